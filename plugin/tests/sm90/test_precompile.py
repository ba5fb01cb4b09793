"""Kernels that an image brings: which they are, and that they compile without a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from assay_kernels.kernels import precompile, shapes
from assay_kernels.kernels.sm90 import compiler
from assay_kernels.kernels.sm90.config import GemmConfig
from assay_kernels.kernels.sm100 import compiler as sm100
from assay_kernels.kernels.sm100.config import GemmConfig as BlackwellConfig

MINIATURE = Path(__file__).resolve().parents[3] / "models" / "miniature" / "checkpoint"


def test_the_products_are_those_of_a_checkpoint_s_weights() -> None:
    """Fused as the server fuses them, on one GPU: what the config alone says of every matrix."""
    pytest.importorskip("torch", reason="checkpoints are read with torch's types")
    from assay_kernels.checkpoint.config import parse_config, read_raw_config
    from assay_kernels.checkpoint.spec import weight_specs

    config = parse_config(read_raw_config(MINIATURE))
    of = {name: spec.shape for name, spec in weight_specs(config)}
    attention = [name.rpartition(".attn.")[0] for name in of if name.endswith(".attn.wq_a")]
    expected = set()
    for layer in attention:
        q_rank, hidden = of[f"{layer}.attn.wq_a"]
        expected.add(shapes.Dense("dense", q_rank + of[f"{layer}.attn.wkv"][0], hidden))
        for name in ("wq_b", "wo_a", "wo_b", "indexer.wq_b"):
            if f"{layer}.attn.{name}" in of:
                group = config.o_lora_rank if name == "wo_a" else 0
                expected.add(shapes.Dense("dense", *of[f"{layer}.attn.{name}"], group))
        for name in ("compressor", "indexer.compressor"):
            if f"{layer}.attn.{name}.wkv" in of:
                width, hidden = of[f"{layer}.attn.{name}.wkv"]
                assert of[f"{layer}.attn.{name}.wgate"] == (width, hidden)
                expected.add(shapes.Dense("fp32", 2 * width, hidden))
        shared = f"{layer}.ffn.shared_experts"
        width, hidden = of[f"{shared}.w1"]
        expected |= {
            shapes.Dense("swiglu", 2 * width, hidden),
            shapes.Dense("dense", *of[f"{shared}.w2"]),
        }
    widths = shapes.Widths(
        config.hidden_size, config.q_lora_rank, config.num_attention_heads, config.head_dim,
        config.o_groups, config.o_lora_rank, config.index_n_heads, config.index_head_dim,
        config.n_routed_experts, config.moe_intermediate_size, config.num_experts_per_tok,
    )  # fmt: skip
    assert shapes.dense(shapes.Share(widths, 1, 1)) == expected


@pytest.mark.parametrize("share", shapes.SHARES, ids=str)
def test_no_number_of_tokens_between_those_looked_at_takes_another_kernel(
    share: shapes.Share,
) -> None:
    named = {kernel.name for kernel in precompile.hopper([share])}
    numbers = [*range(1, 40), 65, 100, 129, 250, 257, 321, 383, 1000, 1023, 2111, 5000, 8191]
    for product in shapes.dense(share):
        epilogue = "bf16" if product.kind == "dense" else product.kind
        for m in numbers:
            config = GemmConfig.for_dense(product.n, product.k, m, product.group)
            assert compiler.KernelKey(config, epilogue).name in named, (product, m)  # type: ignore[arg-type]
    layer = shapes.grouped(share)
    table = 64 if layer.experts <= 64 else 256
    for m in numbers:
        rows = m * layer.top_k * layer.experts / layer.of
        config = GemmConfig.for_grouped(layer.inter, rows, layer.experts, layer.hidden)
        assert compiler.KernelKey(config, "combine", table, True).name in named, m


@pytest.mark.parametrize("share", shapes.SHARES, ids=str)
def test_blackwell_s_kernels_are_those_of_every_number_of_tokens(share: shapes.Share) -> None:
    named = {kernel.name for kernel in precompile.blackwell([share])}
    for product in shapes.dense(share):
        for m in (1, 16, 17, 128, 129, 300, 1000, 4097, 8191):
            for row_scaled in (False, True):
                swiglu = product.kind == "swiglu"
                config = BlackwellConfig.for_dense(product.n, product.k, m, swiglu=swiglu)
                epilogue = {"dense": "bf16", "swiglu": "swiglu", "fp32": "fp32"}[product.kind]
                key = sm100.KernelKey("gemm", config, epilogue, row_scaled)  # type: ignore[arg-type]
                assert key.name in named, (product, m)
    assert {"finalise", "quantize", "quantize_dynamic", "quantize_grouped"} <= named


def test_an_architecture_without_kernels_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert precompile.main(["--arch", "sm_75"]) == 2
    assert "no kernels for sm_75 in this version" in capsys.readouterr().err


def test_nothing_is_missing_once_every_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="the cache's name holds the version of the CUTLASS DSL")
    monkeypatch.setenv("ASSAY_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(precompile, "SHARES", shapes.SHARES[3:4])
    kernels = precompile.kernels("sm_90a")
    assert len(precompile.missing(["sm_90a"])) == len(kernels)
    for kernel in kernels:
        kernel.path.parent.mkdir(parents=True, exist_ok=True)
        kernel.path.touch()
    assert precompile.missing(["sm_90a"]) == []
    kernels[0].path.unlink()
    assert precompile.missing(["sm_90a"]) == [f"sm_90a/{kernels[0].name}"]


class Failing:
    """A kernel that does not compile."""

    name = "failing"
    path = Path("/nowhere")

    def make(self) -> None:
        raise ValueError("no such instruction")


def test_what_does_not_compile_is_named_and_the_rest_is_made() -> None:
    said: list[str] = []
    failed = precompile.compile_all([Failing()], 1, said.append)
    assert failed == {"failing": "ValueError: no such instruction"}
    assert "1/1 failing: FAILED" in said[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arch", "endings"), [("sm_90a", ("gather", "_mma")), ("sm_100a", ("quantize", "finalise"))]
)
def test_two_kernels_are_compiled_without_a_gpu_and_not_again(
    tmp_path: Path, arch: str, endings: tuple[str, str]
) -> None:
    pytest.importorskip("cutlass", reason="the CUTLASS DSL (optional extra) is not installed")
    made = [kernel.name for kernel in precompile.kernels(arch)]
    names = [next(name for name in made if name.endswith(ending)) for ending in endings]
    command = [sys.executable, "-m", "assay_kernels.kernels.precompile", "--arch", arch]
    command += ["--jobs", "2", "--only", *names]
    environment = {
        "PYTHONPATH": ":".join(sys.path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ASSAY_KERNEL_CACHE": str(tmp_path / "kernels"),
    }
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert first.returncode == 0, first.stderr[-2000:]
    assert "2 kernels, 0 of them are there" in first.stdout
    files = {path.name for path in (tmp_path / "kernels").rglob("*.o")}
    assert files == {f"{name}.o" for name in names}
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert again.stdout.strip() == f"{arch}: 2 kernels, 2 of them are there"


def test_the_models_are_the_profiles_and_the_chart_s() -> None:
    """The calculator of docs/k8s has the same numbers from another hand."""
    folder = Path(__file__).resolve().parents[3] / "k8s"
    sys.path.insert(0, str(folder))
    try:
        import calculator
    finally:
        sys.path.remove(str(folder))
    for ours, theirs in ((shapes.PRO, calculator.PRO), (shapes.FLASH, calculator.FLASH)):
        for name in ("hidden", "heads", "q_rank", "o_groups", "experts", "inter", "top_k"):
            assert dataclasses.asdict(ours)[name] == getattr(theirs, name), name
        assert (ours.head, ours.o_rank) == (calculator.HEAD, calculator.O_RANK)
        assert ours.index_heads * ours.index_head == calculator.INDEX_HEADS * calculator.INDEX_HEAD
