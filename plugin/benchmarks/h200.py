"""Time the Hopper kernels beside their peers on one GPU, and write results/h200.json.

    make bench-h200                      # every phase that has no result yet, then the report
    python plugin/benchmarks/h200.py --phases ours,cublas --out DIR
    python plugin/benchmarks/h200.py --report --out DIR

Every time is the median of at least 20 replays of a CUDA graph over rotating inputs: enough copies
of the weights, or enough routings, that they come from memory and not from L2. Phases are processes
of their own, a few minutes each; one that has a result is skipped. Peers that are not installed are
reported as missing. Errors are relative L2 norms against fp32 (dense) or fp64 sums.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPES = [(6144, 7168), (7168, 3072), (8192, 1536), (2048, 7168), (7168, 2048)]  # (N, K)
TOKENS = [1, 4, 16, 32, 64, 128, 256, 1024, 4096]
GLOBAL_SCALE = 1e-4
L2_BYTES = 60e6
LIMIT = 10.0
# local experts, all experts, hidden, expert width, experts a token
MODELS = {
    "v4-pro-ep8": (48, 384, 7168, 3072, 6),
    "v4-flash-ep8": (32, 256, 4096, 2048, 6),
    "v4-flash-1gpu": (256, 256, 4096, 2048, 6),
}
GROUPED_TOKENS = [1, 8, 64, 512, 4096, 16384]
# (kind, channels of a group, K, groups): what else a layer asks for, V4-Pro and V4-Flash at TP8
OTHERS = [
    ("dense_swiglu", 768, 7168, 1), ("dense_swiglu", 512, 4096, 1),
    ("wo_a", 1024, 4096, 2), ("wo_a", 1024, 4096, 1),
    ("compressor", 2048, 7168, 1), ("compressor", 1024, 7168, 1), ("compressor", 512, 4096, 1),
]  # fmt: skip
PHASES = [
    "floor", "ours", "others", "cublas", "quack", "humming", "marlin",
    "grouped-ours", "grouped-humming", "grouped-marlin",
]  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "h200.json"

Call = Callable[[], Any]


def median_us(calls: list[Call], inner: int, replays: int = 21) -> float:
    """Median microseconds of one call, over replays of a graph that runs `inner` of them."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / inner * 1e3)
    return sorted(times)[len(times) // 2]


def inner_calls(copies: int, m: int) -> int:
    """Calls of one graph: whole rounds over the copies, fewer where a call is long."""
    if m >= 1024:
        return 4
    return copies * max(1, 24 // copies)


def random_weight(n: int, k: int) -> tuple[Any, Any]:
    import torch

    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, k // 16, device="cuda") * 400 + 20).to(torch.float8_e4m3fn)
    return codes, scale


def decoded(codes: Any, scale: Any) -> Any:
    """fp32 [N, K], the global scale included."""
    from assay_kernels.numerics import decode_fp32

    return decode_fp32(codes, scale) * GLOBAL_SCALE


# ------------------------------------------------------------------------------------ dense peers


def ours_layer(codes: Any, scale: Any, pdl: bool = True) -> Call:
    import torch

    from assay_kernels.kernels.interface import PackedWeight
    from assay_kernels.kernels.sm90.kernels import HopperKernels

    kernels = HopperKernels(pdl=pdl)
    alpha = torch.full((codes.shape[0],), GLOBAL_SCALE, device="cuda")
    operand = kernels.prepare(PackedWeight(codes.clone(), scale.clone(), alpha, None))
    return lambda x: kernels.dense(x, operand)


def cublas_layer(codes: Any, scale: Any) -> Call:
    weight = decoded(codes, scale).bfloat16()
    return lambda x: x @ weight.T


def quack_layer(codes: Any, scale: Any) -> Call:
    import quack.gemm_w4 as w4

    blob, strip = w4.prepare_w4_weight(codes, scale, "nvfp4")
    n = codes.shape[0]
    return lambda x: w4.gemm_w4a16(x, blob, strip, tensor_scale=GLOBAL_SCALE, wformat="nvfp4")[
        :, :n
    ]


def humming_stack(codes: Any, scale: Any, experts: int = 0) -> Any:
    import torch
    from humming.layer import HummingLayer

    options = {"num_experts": experts} if experts else {}
    layer = HummingLayer(
        shape_n=codes.shape[-2],
        shape_k=codes.shape[-1] * 2,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        torch_dtype=torch.bfloat16,
        **options,
    ).cuda()
    factor = torch.full((max(experts, 1),), GLOBAL_SCALE, device="cuda")
    layer.load_from_tensors({"weight": codes, "weight_scale": scale, "weight_scale_2": factor})
    layer.transform()
    return layer


def marlin_layer(codes: Any, scale: Any) -> Call:
    import torch
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    n, k = codes.shape[0], codes.shape[1] * 2
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype = torch.bfloat16
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(
        torch.tensor(GLOBAL_SCALE, device="cuda"), requires_grad=False
    )
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    workspace = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")
    return lambda x: torch.ops._C.marlin_gemm(
        x, None, layer.weight, None, layer.weight_scale, None, layer.weight_global_scale, None,
        workspace, scalar_types.float4_e2m1f.id, x.shape[0], n, k, False, True, False,
    )  # fmt: skip


LAYERS: dict[str, Callable[..., Call]] = {
    "ours": ours_layer,
    "cublas": cublas_layer,
    "quack": quack_layer,
    "humming": humming_stack,
    "marlin": marlin_layer,
}


def dense(impl: str, shapes: list[tuple[int, int]], tokens: list[int]) -> list[dict[str, Any]]:
    import torch

    rows = []
    for n, k in shapes:
        copies = max(3, math.ceil(3 * L2_BYTES / (n * k * (2 if impl == "cublas" else 0.5625))))
        weights = [random_weight(n, k) for _ in range(copies)]
        wanted = decoded(*weights[0])
        layers = [LAYERS[impl](*w) for w in weights]
        plain = [ours_layer(*w, pdl=False) for w in weights] if impl == "ours" else []
        for m in tokens:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            row: dict[str, Any] = {"kind": "dense", "n": n, "k": k, "m": m, "impl": impl}
            try:
                got = layers[0](x).double()
                want = x.double() @ wanted.double().T
                row["relative_error"] = float((got - want).norm() / want.norm())
                inner = inner_calls(copies, m)
                row["us"] = median_us([lambda f=f, x=x: f(x) for f in layers], inner)
                if plain:
                    row["us_without_pdl"] = median_us([lambda f=f, x=x: f(x) for f in plain], inner)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def floor() -> list[dict[str, Any]]:
    """The two ceilings of this GPU, and the time they leave each cell."""
    import torch

    big = torch.randint(0, 1 << 40, (1 << 28,), device="cuda")
    read = 8 * big.numel() / median_us([big.sum], 4, 21) / 1e6
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / median_us([lambda: x @ w], 4, 21) / 1e6
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        for m in TOKENS:
            size = n * k * 0.5625 + 2 * m * (n + k)
            us = max(size / read / 1e6, 2 * m * n * k / rate / 1e6)
            rows.append({"kind": "dense", "n": n, "k": k, "m": m, "impl": "floor", "us": us})
    for kind, n, k, groups in OTHERS:
        for m in TOKENS:
            size = groups * (n * k * 0.5625 + 2 * m * (n + k))
            us = max(size / read / 1e6, 2 * m * groups * n * k / rate / 1e6)
            where = {"kind": kind, "n": n, "k": k, "m": m, "groups": groups}
            rows.append({**where, "impl": "floor", "us": us})
    rows.append({"kind": "ceiling", "impl": "floor", "read_tb_s": read, "bf16_tflops": rate})
    print(json.dumps(rows[-1]), flush=True)
    return rows


def other_layer(kind: str, n: int, k: int, groups: int, codes: Any, scale: Any) -> Call:
    """The kernel of one of `OTHERS` on x [M, groups * k]."""
    import torch

    from assay_kernels.kernels.interface import PackedWeight
    from assay_kernels.kernels.sm90.kernels import HopperKernels

    kernels = HopperKernels()
    alpha = torch.full((groups * n,), GLOBAL_SCALE, device="cuda")
    weight = PackedWeight(codes.clone(), scale.clone(), alpha, None)
    if kind == "dense_swiglu":
        gated = kernels.prepare_gate_up(weight)
        return lambda x: kernels.dense_swiglu(x, gated, LIMIT)
    if kind == "compressor":
        plain = kernels.prepare(weight)
        return lambda x: kernels.dense(x, plain, torch.float32)
    stack = PackedWeight(
        weight.codes.view(groups, n, -1), weight.block_scale.view(groups, n, -1),
        alpha.view(groups, n), None,
    )  # fmt: skip
    operand = kernels.prepare(stack)
    return lambda x: kernels.wo_a(x.view(-1, groups, k), operand)


def others() -> list[dict[str, Any]]:
    """Times and errors of our other dense kernels."""
    import torch

    from assay_kernels import reference

    rows = []
    for kind, n, k, groups in OTHERS:
        copies = max(3, math.ceil(3 * L2_BYTES / (groups * n * k * 0.5625)))
        weights = [random_weight(groups * n, k) for _ in range(copies)]
        layers = [other_layer(kind, n, k, groups, *w) for w in weights]
        values = decoded(*weights[0]).double().view(groups, n, k)
        for m in TOKENS:
            x = torch.randn(m, groups * k, device="cuda", dtype=torch.bfloat16)
            want = torch.einsum("mgk,gnk->mgn", x.double().view(m, groups, k), values)
            if kind == "dense_swiglu":
                want = reference.swiglu(*want.chunk(2, dim=-1), LIMIT)
            got = layers[0](x).double().view(want.shape)
            rows.append({
                "kind": kind, "n": n, "k": k, "m": m, "groups": groups, "impl": "ours",
                "us": median_us([lambda f=f, x=x: f(x) for f in layers], inner_calls(copies, m)),
                "relative_error": float((got - want).norm() / want.norm()),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


# ---------------------------------------------------------------------------------- grouped peers


def routings(tokens: int, model: str, count: int) -> list[SimpleNamespace]:
    """Skewed choices, as a router gives: experts' odds fall with their rank to the power 0.6."""
    import torch

    from assay_kernels.kernels.sm90.routing import SortedRows

    local, every, _, _, top_k = MODELS[model]
    torch.manual_seed(tokens)
    expert_map = torch.full((every,), -1, device="cuda")
    expert_map[torch.randperm(every, device="cuda")[:local]] = torch.arange(local, device="cuda")
    odds = -0.6 * torch.arange(1, every + 1, device="cuda").float().log()
    odds = odds[torch.randperm(every, device="cuda")]
    made = []
    while len(made) < count:
        noise = -torch.log(-torch.log(torch.rand(tokens, every, device="cuda")))
        ids = (noise + odds).topk(top_k, dim=1).indices
        weights = torch.rand(tokens, top_k, device="cuda") + 0.1
        weights = weights / weights.sum(dim=1, keepdim=True)
        rows = SortedRows.from_router(ids, weights, local, expert_map)
        if int(rows.ends[-1]) > 0:
            made.append(SimpleNamespace(ids=ids, weights=weights, rows=rows, map=expert_map))
    return made


def expert_stack(experts: int, n: int, k: int) -> tuple[Any, Any]:
    import torch

    made = [random_weight(n, k) for _ in range(experts)]
    return torch.stack([w[0] for w in made]), torch.stack(
        [w[1].view(torch.uint8) for w in made]
    ).view(torch.float8_e4m3fn)


def grouped_ours(model: str, w13: Any, w2: Any) -> Callable[[Any, SimpleNamespace], Any]:
    import torch

    from assay_kernels.kernels.interface import PackedWeight
    from assay_kernels.kernels.sm90.kernels import HopperKernels

    kernels = HopperKernels()

    def stack(codes: Any, scale: Any) -> PackedWeight:
        alpha = torch.full(codes.shape[:2], GLOBAL_SCALE, device="cuda")
        return PackedWeight(codes, scale, alpha, None)

    l1 = kernels.prepare_gate_up(stack(*w13))
    l2 = kernels.prepare(stack(*w2))
    return lambda x, r: kernels.routed(x, l1, l2, r.rows, LIMIT)


def grouped_humming(model: str, w13: Any, w2: Any) -> Callable[[Any, SimpleNamespace], Any]:
    """Its two products and the activation; gather and combine are left out, in its favour."""
    import torch

    experts, _, _, width, _ = MODELS[model]
    l1 = humming_stack(*w13, experts)
    l2 = humming_stack(*w2, experts)
    config = {"gemm_type": "grouped_contiguous"}

    def call(x: Any, r: SimpleNamespace) -> Any:
        h = l1(r.gathered, expert_layout=r.offsets, compute_config=config, valid_shape_m=r.count)
        gate, up = h.chunk(2, dim=-1)
        silu = torch.empty(h.shape[0], width, dtype=h.dtype, device=h.device)
        torch.mul(torch.nn.functional.silu(gate), up, out=silu)
        return l2(silu, expert_layout=r.offsets, compute_config=config, valid_shape_m=r.count)

    return call


def grouped_marlin(model: str, w13: Any, w2: Any) -> Callable[[Any, SimpleNamespace], Any]:
    """vLLM's fused_marlin_moe: alignment, both products, activation and sum."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    experts, every, hidden, width, _ = MODELS[model]
    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=width,
        params_dtype=torch.bfloat16,
    )
    factor = torch.full((experts,), GLOBAL_SCALE, device="cuda")
    c13, s13, g13, c2, s2, g2 = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
        layer, *w13, factor, *w2, factor.clone(), True
    )
    workspace = torch.zeros(132 * 4, dtype=torch.int32, device="cuda")

    def activation(_: Any, out: Any, value: Any, **__: Any) -> None:
        torch.ops._C.silu_and_mul(out, value)

    return lambda x, r: fused_marlin_moe(
        x, c13, c2, None, None, s13, s2, r.weights, r.ids, scalar_types.float4_e2m1f.id,
        global_num_experts=every, activation_func=activation, expert_map=r.map.int(),
        global_scale1=g13, global_scale2=g2, workspace=workspace,
    )  # fmt: skip


GROUPED = {
    "grouped-ours": grouped_ours,
    "grouped-humming": grouped_humming,
    "grouped-marlin": grouped_marlin,
}


def grouped_error(impl: str, got: Any, x: Any, r: SimpleNamespace, w13: Any, w2: Any) -> float:
    """Relative error on the rows of a few tokens, the first layer's output rounded to bf16.

    The peers' activations do not clamp, and Humming's rows are neither weighed nor summed: each is
    compared with what it computes.
    """
    import torch

    from assay_kernels import reference

    some = torch.nonzero(r.rows.fan).flatten()[:6]
    tokens, ends = r.rows.tokens[: r.count].long(), r.rows.ends.long()
    limit = LIMIT if impl == "grouped-ours" else 1e30
    places = torch.nonzero(torch.isin(tokens, some)).flatten().tolist()
    want = torch.zeros(got.shape, dtype=torch.float64, device="cuda")
    for place in places:
        expert = int(torch.searchsorted(ends, place, right=True))
        first, second = (decoded(*(part[expert] for part in w)).double() for w in (w13, w2))
        h = reference.swiglu(*(first @ x[tokens[place]].double()).chunk(2), limit)
        row = second @ h.bfloat16().double()
        if impl == "grouped-humming":
            want[place] = row
        else:
            want[tokens[place]] += float(r.rows.weights[place]) * row
    at = places if impl == "grouped-humming" else some
    return float((got[at].double() - want[at]).norm() / want[at].norm())


def grouped(impl: str, models: list[str]) -> list[dict[str, Any]]:
    import torch
    from torch.nn import functional

    made: list[dict[str, Any]] = []
    for model in models:
        experts, _, hidden, width, _ = MODELS[model]
        w13 = expert_stack(experts, 2 * width, hidden)
        w2 = expert_stack(experts, hidden, width)
        try:
            layer = GROUPED[impl](
                model, tuple(t.clone() for t in w13), tuple(t.clone() for t in w2)
            )
        except Exception as error:
            traceback.print_exc()
            made.append(
                {"kind": "grouped", "model": model, "impl": impl[8:], "failed": str(error)[:300]}
            )
            continue
        for tokens in GROUPED_TOKENS:
            choices = routings(tokens, model, 8 if tokens <= 64 else 2)
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            for r in choices:
                r.count = int(r.rows.ends[-1])
                r.gathered = x[r.rows.tokens[: r.count].long()]
                r.offsets = functional.pad(r.rows.ends.long(), (1, 0))
            counts = torch.stack([r.rows.ends for r in choices]).diff(dim=1, prepend=torch.zeros(
                len(choices), 1, dtype=torch.int32, device="cuda"))  # fmt: skip
            used = float((counts > 0).sum()) / len(choices)
            routed = sum(r.count for r in choices) / len(choices)
            row: dict[str, Any] = {
                "kind": "grouped", "model": model, "tokens": tokens, "experts": experts,
                "n": 2 * width, "k": hidden, "m": routed, "used_experts": used, "impl": impl[8:],
            }  # fmt: skip
            try:
                row["relative_error"] = grouped_error(
                    impl, layer(x, choices[0]), x, choices[0], w13, w2
                )
                inner = len(choices) * (2 if tokens <= 64 else 1)
                row["us"] = median_us([lambda r=r, x=x, f=layer: f(x, r) for r in choices], inner)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            made.append(row)
            print(json.dumps(row), flush=True)
    return made


# ------------------------------------------------------------------------------------------ report


def environment() -> dict[str, Any]:
    from importlib import metadata

    import torch

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "missing"

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    packages = ("nvidia-cutlass-dsl", "quack-kernels", "humming-kernels", "vllm")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        **{package: version(package) for package in packages},
    }


def run_phase(
    phase: str, shapes: list[tuple[int, int]], tokens: list[int], models: list[str]
) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    if phase == "floor":
        return floor()
    if phase == "others":
        return others()
    if phase in GROUPED:
        return grouped(phase, models)
    return dense(phase, shapes, tokens)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def report(data: dict[str, Any]) -> None:
    """One aligned line a cell, then the bands' ratios: best peer's time over ours."""
    rows = [r for r in data["rows"] if "us" in r]
    peers = ("cublas", "marlin", "quack", "humming")
    time_of = {(r["n"], r["k"], r["m"], r["impl"]): r for r in rows if r["kind"] == "dense"}
    ratios: dict[int, float] = {}
    bands: dict[str, list[float]] = {"M <= 32": [], "M = 64, 128": [], "M >= 256": []}
    for n, k in SHAPES:
        for m in TOKENS:
            ours = time_of.get((n, k, m, "ours"))
            if ours is None:
                continue
            others = {p: time_of[n, k, m, p]["us"] for p in peers if (n, k, m, p) in time_of}
            bound = time_of.get((n, k, m, "floor"), {}).get("us", math.nan)
            ratio = min(others.values()) / ours["us"] if others else math.nan
            band = "M <= 32" if m <= 32 else "M = 64, 128" if m <= 128 else "M >= 256"
            bands[band].append(ratio)
            ratios[len(ratios)] = ratio
            listed = " ".join(f"{p} {others.get(p, math.nan):7.1f}" for p in peers)
            print(
                f"> {n:5d} x {k:5d} M={m:5d} | ours {ours['us']:7.2f} us "
                f"({ours.get('us_without_pdl', math.nan):7.2f} without PDL) | {listed} | "
                f"floor {bound:6.1f} | best peer / ours {ratio:5.2f} | "
                f"error {ours['relative_error']:.5f}"
            )
    for band, values in bands.items():
        if values:
            print(f"> {band}: geometric mean {geometric_mean(values):.2f}, least {min(values):.2f}")
    found = {(r["kind"], r["n"], r["k"], r.get("groups"), r["m"], r["impl"]): r for r in rows
             if r["kind"] in ("dense_swiglu", "wo_a", "compressor")}  # fmt: skip
    for kind, n, k, groups in OTHERS:
        for m in TOKENS:
            ours = found.get((kind, n, k, groups, m, "ours"))
            if ours:
                bound = found.get((kind, n, k, groups, m, "floor"), {}).get("us", math.nan)
                print(
                    f"> {kind:12s} {groups} x {n:5d} x {k:5d} M={m:5d} | ours {ours['us']:7.2f} us "
                    f"| floor {bound:6.1f} | error {ours['relative_error']:.5f}"
                )
    cells = {(r["model"], r["tokens"], r["impl"]): r for r in rows if r["kind"] == "grouped"}
    for model in MODELS:
        for tokens in GROUPED_TOKENS:
            ours = cells.get((model, tokens, "ours"))
            if ours is None:
                continue
            others = {p: cells[model, tokens, p]["us"] for p in ("humming", "marlin")
                      if (model, tokens, p) in cells}  # fmt: skip
            listed = " ".join(f"{p} {us:8.1f}" for p, us in others.items())
            ratio = min(others.values()) / ours["us"] if others else math.nan
            print(
                f"> {model:14s} tokens={tokens:5d} rows={ours['m']:8.1f} "
                f"experts={ours['used_experts']:6.1f} | ours {ours['us']:8.1f} us | {listed} | "
                f"best peer / ours {ratio:5.2f} | error {ours['relative_error']:.5f}"
            )


def plot(data: dict[str, Any], path: Path) -> None:
    """Time over the floor against M, ours and the best peer, one panel a shape."""
    from matplotlib import pyplot

    times = {
        (r["n"], r["k"], r["m"], r["impl"]): r["us"]
        for r in data["rows"]
        if r["kind"] == "dense" and "us" in r
    }
    figure, panels = pyplot.subplots(1, len(SHAPES), figsize=(15, 3.4), sharey=True)
    for panel, (n, k) in zip(panels, SHAPES, strict=True):
        for impl in ("cublas", "marlin", "quack", "humming", "ours"):
            points = [
                (m, times[n, k, m, impl] / times[n, k, m, "floor"])
                for m in TOKENS
                if (n, k, m, impl) in times
            ]
            panel.plot(
                *zip(*points, strict=True),
                label=impl,
                linewidth=2.5 if impl == "ours" else 1,
                color="black" if impl == "ours" else None,
            )
        panel.axhline(1, color="grey", linestyle=":")
        panel.set(xscale="log", yscale="log", xlabel="tokens M", title=f"{n} x {k}")
    panels[0].set_ylabel("time / floor")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--out", type=Path, default=Path(".assay/bench-h200"))
    parser.add_argument("--phase", help="run one phase in this process")
    parser.add_argument("--report", action="store_true", help="merge and print what there is")
    parser.add_argument("--shapes", help="subset, as N:K,N:K")
    parser.add_argument("--tokens", help="subset, as 1,16")
    parser.add_argument("--models", help="subset of the grouped models")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="also draw time over floor against M")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.phase:
        shapes = (
            [tuple(map(int, s.split(":"))) for s in options.shapes.split(",")]
            if options.shapes
            else SHAPES
        )
        tokens = [int(t) for t in options.tokens.split(",")] if options.tokens else TOKENS
        models = options.models.split(",") if options.models else list(MODELS)
        rows = run_phase(options.phase, shapes, tokens, models)
        data = {"environment": environment(), "rows": rows}
        path = options.out / f"{options.phase}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data))
        temporary.rename(path)
        return
    if not options.report:
        for phase in options.phases.split(","):
            if (options.out / f"{phase}.json").exists():
                print(f"{phase}: has a result, skipped")
                continue
            command = [sys.executable, __file__, "--phase", phase, "--out", str(options.out)]
            if subprocess.run(command, timeout=480, check=False).returncode:
                print(f"{phase}: failed, no result")
    merged: dict[str, Any] = {"environment": {}, "rows": []}
    for phase in PHASES:
        path = options.out / f"{phase}.json"
        if path.exists():
            part = json.loads(path.read_text())
            merged["environment"].update(part["environment"])
            merged["rows"] += part["rows"]
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text(json.dumps(merged, indent=1) + "\n")
    report(merged)
    if options.plot:
        plot(merged, options.plot)


if __name__ == "__main__":
    main()
