"""The plugin's own rules between a checkpoint and vLLM: claiming, naming, sharing, refusing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay_kernels import settings
from assay_kernels.checkpoint import CheckpointError, Dialect, Precision
from assay_kernels.vllm_plugin import kernel_choice, layers, loading, modules
from assay_kernels.vllm_plugin.quant_config import AssayConfig

V4 = SimpleNamespace(model_type="deepseek_v4")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "mark",
    [
        FP8 | {"moe_quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ],
    ids="ABC",
)
def test_v4_in_nvfp4_is_claimed(mark: dict[str, Any]) -> None:
    assert AssayConfig.override_quantization_method(mark, None, hf_config=V4) == "assay"


def test_other_models_and_native_checkpoints_are_left_to_vllm() -> None:
    mark = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    llama = SimpleNamespace(model_type="llama")
    assert AssayConfig.override_quantization_method(mark, None, hf_config=llama) is None
    assert AssayConfig.override_quantization_method(FP8, None, hf_config=V4) is None


def test_an_unknown_mark_is_one_clear_error() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: .*quant_method.*'awq'"):
        AssayConfig.override_quantization_method({"quant_method": "awq"}, None, hf_config=V4)


@pytest.mark.parametrize(
    ("prefix", "expected", "kind"),
    [
        ("model.layers.1.attn.fused_wqa_wkv", ["attn.wq_a", "attn.wkv"], "attention"),
        ("model.layers.1.attn.wo_a", ["attn.wo_a"], "wo_a"),
        (
            "model.layers.1.attn.compressor.fused_wkv_wgate",
            ["attn.compressor.wkv", "attn.compressor.wgate"],
            "compressor",
        ),
        (
            "model.layers.1.attn.indexer.compressor.fused_wkv_wgate",
            ["attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"],
            "compressor",
        ),
        ("model.layers.1.attn.indexer.wq_b", ["attn.indexer.wq_b"], "indexer"),
        (
            "model.layers.1.ffn.shared_experts.gate_up_proj",
            ["ffn.shared_experts.w1", "ffn.shared_experts.w3"],
            "shared",
        ),
        (
            "model.layers.1.ffn.shared_experts.down_proj",
            ["ffn.shared_experts.w2"],
            "shared",
        ),
    ],
)
def test_partitions_of_a_fused_module_in_row_order(
    prefix: str, expected: list[str], kind: str
) -> None:
    assert modules.partitions(prefix) == [f"layers.1.{name}" for name in expected]
    assert modules.kind(prefix) == kind


def test_fused_matrices_stored_differently_are_refused() -> None:
    config = AssayConfig()
    stored = {
        "layers.0.attn.wq_a": Precision.NVFP4,
        "layers.0.attn.wkv": Precision.BF16,
    }
    config._checkpoint = SimpleNamespace(  # type: ignore[assignment]
        directory=Path("model"), precision=stored.__getitem__
    )
    with pytest.raises(CheckpointError, match=r"attn\.wkv: is bf16, .*attn\.wq_a is nvfp4.*alike"):
        config._storage(modules.partitions("model.layers.0.attn.fused_wqa_wkv"))


def test_every_routed_expert_is_asked_for_its_storage() -> None:
    entries = modules.expert_matrices("model.layers.1.ffn.experts", 3)
    assert len(entries) == 9
    assert entries[-1] == "layers.1.ffn.experts.2.w3"


B = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
A = FP8 | {"moe_quant_algo": "NVFP4"}


MI300 = 94
"""Stands for a GPU of another maker, whose capability also begins with a nine."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make vLLM's platform tell of a GPU with this major capability."""

    def of(major: int) -> None:
        capability = SimpleNamespace(major=major, minor=0)
        platform = SimpleNamespace(
            is_cpu=lambda: False,
            is_rocm=lambda: major == MI300,
            is_xpu=lambda: False,
            get_device_capability=lambda: capability,
        )
        monkeypatch.setattr(kernel_choice, "current_platform", platform)

    return of


@pytest.mark.parametrize("mark", [A, B], ids="AB")
def test_a_hopper_gpu_is_served_by_its_kernels(mark: dict[str, Any], gpu: Any) -> None:
    gpu(9)
    assert AssayConfig.override_quantization_method(mark, None, hf_config=V4) == "assay"
    assert kernel_choice.chosen(Dialect.A) == "sm90"
    assert kernel_choice.arch() == "sm_90"


@pytest.mark.parametrize(
    ("major", "wish", "words"),
    [
        (9, "sm100", "ASSAY_KERNELS=sm100: this GPU is sm_90"),
        (9, "cpu", "ASSAY_KERNELS=cpu: this GPU is sm_90"),
        (12, "auto", "no kernels for sm_120; ASSAY_KERNELS=reference"),
        (9, "library", "ASSAY_REQUIRE=1 forbids"),
    ],
)
def test_kernels_that_a_gpu_cannot_have_are_refused(
    major: int, wish: str, words: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(major)
    monkeypatch.setenv("ASSAY_KERNELS", wish)
    with pytest.raises(kernel_choice.KernelChoiceError, match=words):
        AssayConfig.override_quantization_method(A, None, hf_config=V4)


def test_another_makers_gpu_is_left_to_vllm(gpu: Any) -> None:
    gpu(MI300)
    assert AssayConfig.override_quantization_method(A, None, hf_config=V4) is None


def test_the_librarys_kernels_get_what_they_can_load(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(9)
    monkeypatch.setenv("ASSAY_KERNELS", "library")
    monkeypatch.setenv("ASSAY_REQUIRE", "0")
    assert AssayConfig.override_quantization_method(A, None, hf_config=V4) is None
    with pytest.raises(kernel_choice.KernelChoiceError, match=r"cannot load .* dialect B"):
        AssayConfig.override_quantization_method(B, None, hf_config=V4)


@pytest.mark.parametrize(
    ("wish", "name"),
    [("auto", "cpu w4a16"), ("cpu", "cpu w4a16"), ("reference", "reference")],
)
def test_a_cpu_has_its_own_kernels_and_the_reference(
    wish: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", wish)
    made = kernel_choice.make(kernel_choice.chosen(Dialect.B))
    assert made.name == name
    assert kernel_choice.mode(made) == name.split()[-1]


@pytest.mark.parametrize("wish", ["sm90", "sm100", "library"])
def test_a_cpu_has_no_other(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_KERNELS", wish)
    with pytest.raises(kernel_choice.KernelChoiceError, match="on a CPU there are cpu and"):
        kernel_choice.chosen(Dialect.A)


def test_hopper_has_one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_ARITHMETIC", "w4a4")
    with pytest.raises(kernel_choice.KernelChoiceError, match="ASSAY_ARITHMETIC=w4a4: Hopper"):
        kernel_choice.make("sm90")


def test_draft_layers_are_told_from_the_models_own() -> None:
    checkpoint: Any = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))
    assert not modules.is_draft("model.layers.3.attn.wq_b", checkpoint)
    assert modules.is_draft("model.layers.4.mtp_block.attn.wq_b", checkpoint)
    assert not modules.is_draft("lm_head", checkpoint)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf"])
def test_a_time_out_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="ASSAY_SELFCHECK_TIMEOUT"):
        settings.selfcheck_timeout({"ASSAY_SELFCHECK_TIMEOUT": value})
    assert settings.selfcheck_timeout({}) == 300


def test_an_older_modelopt_export_is_claimed() -> None:
    mark = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16},
        "quant_method": "modelopt_fp4",
    }
    assert AssayConfig.override_quantization_method(mark, None, hf_config=V4) == "assay"


@pytest.mark.parametrize("limit", [None, 0.0, float("inf"), float("nan")])
def test_a_model_without_a_clamp_is_refused(limit: float | None) -> None:
    with pytest.raises(ValueError, match=r"layers\.1\.ffn: swiglu_limit"):
        layers.require_limit(limit, "layers.1.ffn")


def reader(name: str, *scales: float) -> SimpleNamespace:
    return SimpleNamespace(
        input_scale=SimpleNamespace(data=torch.tensor(scales)),
        quant_method=SimpleNamespace(name=name),
    )


def layer(**scales: tuple[float, ...]) -> Any:
    """A decoder layer's readers; anything not given is plain bf16 (no input_scale)."""
    plain = SimpleNamespace()

    def at(name: str) -> Any:
        return reader(name, *scales[name]) if name in scales else plain

    attn = SimpleNamespace(
        fused_wqa_wkv=at("fused_wqa_wkv"),
        wq_b=at("wq_b"),
        wo_a=at("wo_a"),
        wo_b=at("wo_b"),
        compressor=SimpleNamespace(fused_wkv_wgate=at("compressor")),
        indexer=SimpleNamespace(
            wq_b=at("indexer_wq_b"),
            compressor=SimpleNamespace(fused_wkv_wgate=at("indexer_compressor")),
        ),
    )
    experts = SimpleNamespace(quant_method=SimpleNamespace(name="experts"))
    for name in ("w13_input_scale", "w2_input_scale"):
        if name in scales:
            setattr(experts, name, SimpleNamespace(data=torch.tensor(scales[name])))
    shared = SimpleNamespace(gate_up_proj=at("gate_up"), down_proj=at("down"))
    ffn = SimpleNamespace(experts=SimpleNamespace(routed_experts=experts), shared_experts=shared)
    return SimpleNamespace(attn=attn, ffn=ffn)


def share(*layers: Any) -> list[str]:
    model = SimpleNamespace(
        named_modules=lambda: [(str(index), each) for index, each in enumerate(layers)]
    )
    return loading.share_input_scales(model)  # type: ignore[arg-type]


def test_readers_of_one_input_share_the_largest_scale() -> None:
    one = layer(
        fused_wqa_wkv=(0.5, 0.25),
        compressor=(1.0, 1.0),
        indexer_compressor=(0.125, 2.0),
        wq_b=(4.0,),
        indexer_wq_b=(3.0,),
        w13_input_scale=((0.1, 0.2), (0.3, 0.4)),  # type: ignore[arg-type]
        gate_up=(0.25, 0.25),
        w2_input_scale=(5.0, 6.0),
    )
    assert share(one) == []
    attn = one.attn
    for shared in (attn.fused_wqa_wkv, attn.compressor.fused_wkv_wgate):
        assert shared.input_scale.data.tolist() == [2.0, 2.0]
    assert attn.indexer.compressor.fused_wkv_wgate.input_scale.data.tolist() == [2.0, 2.0]
    assert attn.indexer.wq_b.input_scale.data.tolist() == [4.0]
    experts = one.ffn.experts.routed_experts
    torch.testing.assert_close(experts.w13_input_scale.data, torch.full((2, 2), 0.4))
    torch.testing.assert_close(
        one.ffn.shared_experts.gate_up_proj.input_scale.data, torch.full((2,), 0.4)
    )
    assert experts.w2_input_scale.data.tolist() == [6.0, 6.0], "w2 reads another input"


@pytest.mark.parametrize("unusable", [0.0, -1.0, float("inf"), float("nan")])
def test_one_unusable_scale_makes_its_input_dynamic_and_is_named(unusable: float) -> None:
    one = layer(fused_wqa_wkv=(0.5, unusable), compressor=(1.0, 1.0), wq_b=(4.0,))
    assert share(one) == ["fused_wqa_wkv", "compressor"]
    assert one.attn.compressor.fused_wkv_wgate.input_scale.data.tolist() == [0.0, 0.0]
    assert one.attn.wq_b.input_scale.data.tolist() == [4.0]


def fp8(scale: float) -> Any:
    weight = torch.randn(256, 128).clamp(-4, 4).to(torch.float8_e4m3fn)
    return weight, torch.full((2, 1), scale)


def test_fp8_with_power_of_two_scales_decodes_exactly() -> None:
    weight, scale = fp8(2.0**-7)
    decoded = loading._decoded_fp8("a.safetensors", "layers.0.attn.wo_b", weight, scale)
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded.double(), weight.double() * 2.0**-7)


def test_fp8_with_any_other_scale_is_refused() -> None:
    weight, scale = fp8(0.3)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: layers.*wo_b.*powers of two"):
        loading._decoded_fp8("a.safetensors", "layers.0.attn.wo_b", weight, scale)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.1.ffn.gate.bias", "model.layers.1.ffn.gate.e_score_correction_bias"),
        (
            "layers.1.ffn.shared_experts.w2.weight_scale",
            "model.layers.1.ffn.shared_experts.down_proj.weight_scale",
        ),
        ("layers.1.ffn.experts.3.w2.weight", "model.layers.1.ffn.experts.3.w2.weight"),
    ],
)
def test_names_that_vllms_loader_expects(name: str, expected: str) -> None:
    assert loading.vllm_name(name) == expected


def test_a_misspelt_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_ARITHMETIC", "w4a8")
    with pytest.raises(ValueError, match=r"ASSAY_ARITHMETIC='w4a8'.*w4a16, w4a4, reference"):
        settings.arithmetic()
