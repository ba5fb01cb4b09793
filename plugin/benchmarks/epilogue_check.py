"""The Blackwell epilogue's arithmetic on this GPU against the CPU reference, as JSON.

    python plugin/benchmarks/epilogue_check.py --out FILE

All 16 codes x all 127 scales x values at, just below and just above every rounding boundary,
several global scales; random blocks; the ends of fp32, zeros of both signs, infinities and NaN.
Codes, scales and row scales must be equal bit for bit; SiLU may differ by `SILU_ULP` fp32 steps.
On an H200 the E2M1 instruction has a stand-in that is compared with its documented rounding. Exits
1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay_kernels import reference
from assay_kernels.kernels.shared.check import compile_check
from assay_kernels.numerics import E2M1_VALUES, quantize_activation, unpack
from assay_kernels.numerics.nvfp4 import global_scale

LIMIT = 10.0
SILU_ULP = 64
"""ex2.approx is within 2 ulp (PTX ISA), of an argument that rounding moves by up to gate * 2^-24;
at the largest gates that the clamp lets through from below this adds up to some tens of steps."""
LEAST_GATE = -88.72
"""exp(-gate) is beyond fp32 for gates below, and silu * up, at most 2.7e-36, is zero there."""
GLOBAL_SCALES = (1.0, 0.0123, 3.1e-4, 17.0, 1e-30)


def boundary_blocks() -> Tensor:
    """fp32 [rows, 16]: a block whose scale byte is given, and values around each boundary."""
    e4m3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    signed = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    up = torch.nextafter(middles, torch.tensor(9.0))
    down = torch.nextafter(middles, torch.tensor(0.0))
    rows = []
    for scale in e4m3:
        # A six in the block makes its scale the one wanted.
        six = torch.tensor([6.0])
        rows.append(signed * scale)
        for edge in (middles, up, down):
            rows.append(torch.cat([six, edge, -edge, -six]) * scale)
    return torch.stack(rows)


def blocks() -> tuple[Tensor, Tensor]:
    """(values [rows, 16], global scale [rows])."""
    generator = torch.Generator().manual_seed(0)
    base = boundary_blocks()
    parts = [(base * g, torch.full((len(base),), g)) for g in GLOBAL_SCALES]
    random = torch.randn(4096, 16, generator=generator)
    random *= torch.exp2(torch.randint(-20, 20, (4096, 1), generator=generator).float())
    parts.append((random, torch.full((4096,), 0.01)))
    ends = torch.zeros(8, 16)
    ends[1] = -0.0
    ends[2, 3] = float("inf")
    ends[3, 5] = float("nan")
    ends[4] = torch.finfo(torch.float32).max
    ends[5] = torch.finfo(torch.float32).tiny
    ends[6, 0] = 1e-45
    ends[7, 15] = float("-inf")
    parts.append((ends, torch.full((8,), 0.5)))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def steps(a: Tensor, b: Tensor) -> Tensor:
    """fp32 values between a and b, counted."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(a) - ordered(b)).abs()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    arch = {(9, 0): "sm_90a", (10, 0): "sm_100a"}[capability]

    first, scale = blocks()
    generator = torch.Generator().manual_seed(1)
    gates = torch.cat([first, torch.randn(len(first), 16, generator=generator) * 8], dim=1)
    rows = len(first)
    device = {"device": "cuda"}
    activated = torch.empty(rows, 16, **device)
    codes = torch.empty(rows, 2, dtype=torch.int32, **device)
    scales = torch.empty(rows, dtype=torch.int32, **device)
    row_scale = torch.empty(rows, **device)
    compile_check(arch)(gates.cuda(), scale.cuda(), activated, codes, scales, row_scale, LIMIT)
    torch.cuda.synchronize()

    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "arch": arch, "blocks": rows}
    got = unpack(codes.cpu().view(torch.uint8))
    wrong_codes, wrong_scales = 0, 0
    for value in scale.unique().tolist():
        mine = scale == value
        wanted = quantize_activation(first[mine], torch.tensor(value))
        same = scales.cpu()[mine].to(torch.uint8) == wanted.block_scale.view(torch.uint8)[:, 0]
        wrong_scales += int((~same).sum())
        wrong_codes += int((got[mine] != unpack(wanted.codes)).sum())
    found["wrong codes"], found["wrong scales"] = wrong_codes, wrong_scales
    wanted_rows = global_scale(first.abs().amax(dim=-1))
    found["wrong row scales"] = int((row_scale.cpu() != wanted_rows).sum())

    exact = reference.swiglu(gates[:, :16].double(), gates[:, 16:].double(), LIMIT).float()
    mine = activated.cpu()
    flushed = (gates[:, :16] < LEAST_GATE) & (mine == 0)
    finite = torch.isfinite(exact) & (exact.abs() > torch.finfo(torch.float32).tiny) & ~flushed
    found["nan differs"] = int((torch.isnan(exact) != torch.isnan(mine)).sum())
    found["SiLU worst steps"] = int(steps(mine, exact)[finite].max())
    found["SiLU bound"] = SILU_ULP
    passed = found["SiLU worst steps"] <= SILU_ULP and not any(
        found[name] for name in ("wrong codes", "wrong scales", "wrong row scales", "nan differs")
    )
    found["passed"] = passed
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
