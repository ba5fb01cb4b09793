"""The plugin's side that vLLM loads: entry point ``vllm.general_plugins``.

vLLM calls :func:`register` in every process it starts (API server, engine core, each worker, the
registry's inspection process), possibly more than once.
"""

from __future__ import annotations

ARCHITECTURE = "DeepseekV4ForCausalLM"


def register() -> None:
    """Register the quantisation config, the model and the operators; leave the proof of it."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    from assay_kernels.vllm_plugin import metrics, proof, quant_config, standins

    if current_platform.is_cpu():
        from assay_kernels.vllm_plugin.cpu import waiting

        standins.install()
        waiting.spare_the_cores()
    if current_platform.is_cpu() or current_platform.is_cuda():
        place = "cpu" if current_platform.is_cpu() else "gpu"
        ModelRegistry.register_model(
            ARCHITECTURE, f"assay_kernels.vllm_plugin.{place}.model:AssayDeepseekV4ForCausalLM"
        )
    quant_config.register()
    metrics.register()
    proof.record_registered()
