"""Build, load and check the plugin's CUDA model from vLLM's sources on a machine without a GPU.

    python pretend_hopper.py FOLDER_OF_VLLM_SOURCES CHECKPOINT

vLLM is told that it runs on Hopper; streams and events do nothing; our CPU kernels stand where the
Hopper kernels would; vLLM's FP8 layers get no kernel. So classes, names, shapes, loading, the
self-check and the summary are the product's and vLLM's own; nothing is computed as a GPU would.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from typing import Any


def main(sources: str, checkpoint: str) -> None:
    sys.path.insert(0, sources)
    os.environ["VLLM_PLUGINS"] = "none"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CpuPlatform):
        pretends = False

        def is_cpu(self) -> bool:
            return not self.pretends

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.cache_config.block_size = 256

    vllm.platforms._current_platform = platform = Hopper()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from assay_kernels.kernels.cpu.nvfp4 import CpuKernels
    from assay_kernels.vllm_plugin import kernel_choice, proof, quant_config
    from assay_kernels.vllm_plugin.gpu import model

    chosen = []

    def make(choice: Any) -> Any:
        chosen.append(choice)
        return CpuKernels()

    kernel_choice.make = make
    fp8.init_fp8_linear_kernel = Nothing
    quant_config.register()
    config = EngineArgs(
        model=checkpoint, skip_tokenizer_init=True, max_model_len=4096, kv_cache_dtype="fp8",
        block_size=256, dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=64,
    ).create_engine_config()  # fmt: skip
    platform.pretends = True
    rendezvous = tempfile.mktemp()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        built = model.AssayDeepseekV4ForCausalLM(vllm_config=config)
        built.load_weights(iter([]))
        process_weights_after_loading(built, config.model_config, torch.device("cpu"))
    (record,) = proof.read_all()
    assert record.summary is not None
    methods = Counter(
        type(module.quant_method).__name__
        for module in built.modules()
        if hasattr(module, "quant_method")
    )
    attention = built.model.layers[1].attn
    report = {
        "chosen": chosen,
        "arch": record.summary.arch,
        "served": record.summary.in_nvfp4(),
        "expected": record.summary.expected_nvfp4,
        "checked": sum(row.layers for row in record.summary.checks),
        "attention": [cls.__name__ for cls in type(attention).__mro__[:3]],
        "shared": type(built.model.layers[0].ffn.shared_experts).__name__,
        "methods": methods,
    }
    print("REPORT", json.dumps(report))


class Nothing:
    """Takes anything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


if __name__ == "__main__":
    main(*sys.argv[1:])
