"""What counts as served, and what the checkpoint's headers demand."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from assay_kernels.checkpoint import Precision
from assay_kernels.vllm_plugin import summary
from assay_kernels.vllm_plugin.layers import (
    AssayModelOptNvFp4ExpertsMethod,
    NvFp4LinearMethod,
)

KERNELS: Any = SimpleNamespace(name="cpu w4a16")
LINEARS = {
    "attn.fused_wqa_wkv": ("attn.wq_a", "attn.wkv"),
    "attn.wo_a": ("attn.wo_a",),
    "ffn.shared_experts.gate_up_proj": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
}
EXPERTS = tuple(f"ffn.experts.{e}.{w}" for e in range(2) for w in ("w1", "w2", "w3"))


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(model.named_children()):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(name, module)


def linear(name: str) -> nn.Module:
    module: Any = nn.Module()
    module.quant_method = NvFp4LinearMethod(KERNELS, name, None)  # type: ignore[arg-type]
    module.operand = object()
    return module  # type: ignore[no-any-return]


@pytest.fixture
def model() -> nn.Module:
    """Layer 0 of two, as a pipeline's first worker holds it."""
    built = nn.Module()
    for name in LINEARS:
        put(built, f"model.layers.0.{name}", linear(f"model.layers.0.{name}"))
    experts: Any = nn.Module()
    method = object.__new__(AssayModelOptNvFp4ExpertsMethod)
    method.kernels, method.name = KERNELS, "model.layers.0.ffn.experts"
    experts.quant_method = method
    experts.operand13 = experts.operand2 = object()
    put(built, "model.layers.0.ffn.experts.routed_experts", experts)
    put(built, "model.layers.1", nn.Module())
    return built


def checkpoint(**precisions: Precision) -> Any:
    entries = [part for parts in LINEARS.values() for part in parts] + list(EXPERTS)
    stored = {f"layers.{layer}.{e}": Precision.NVFP4 for layer in range(2) for e in entries}
    stored |= {"mtp.0.attn.wo_a": Precision.NVFP4, **precisions}
    held = {name: SimpleNamespace(precision=precision) for name, precision in stored.items()}
    return SimpleNamespace(modules=lambda: held)


def served(model: nn.Module) -> int:
    return sum(summary.count_layers(model).values())


def test_a_sound_model_serves_what_the_headers_demand(model: nn.Module) -> None:
    assert summary.expected_nvfp4(model, checkpoint()) == served(model) == 4


@pytest.mark.parametrize(
    ("path", "operand"),
    [
        ("model.layers.0.attn.wo_a", "operand"),
        ("model.layers.0.ffn.experts.routed_experts", "operand13"),
        ("model.layers.0.ffn.experts.routed_experts", "operand2"),
    ],
)
def test_a_method_without_its_operand_does_not_count(
    model: nn.Module, path: str, operand: str
) -> None:
    delattr(model.get_submodule(path), operand)
    assert served(model) == 3
    assert summary.expected_nvfp4(model, checkpoint()) == 4


def test_a_layer_that_was_left_to_vllm_is_still_demanded(model: nn.Module) -> None:
    delattr(model.get_submodule("model.layers.0.attn.wo_a"), "quant_method")
    assert served(model) == 3
    assert summary.expected_nvfp4(model, checkpoint()) == 4


def test_a_matrix_without_any_module_is_still_demanded(model: nn.Module) -> None:
    delattr(model.get_submodule("model.layers.0.attn"), "wo_a")
    assert summary.expected_nvfp4(model, checkpoint()) == 4


def test_what_the_headers_store_otherwise_is_not_demanded(model: nn.Module) -> None:
    plain = {"layers.0.attn.wo_a": Precision.BF16}
    assert summary.expected_nvfp4(model, checkpoint(**plain)) == 3
