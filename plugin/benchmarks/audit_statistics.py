"""How often the audit's two statistical rules are right: false alarms and detections by structure.

    .venv/bin/python plugin/benchmarks/audit_statistics.py [--seeds 200] [--first 5000]

A trial is a small checkpoint's worth of experts (16, hidden 256, inner 128) whose units have
log-normal gains of a given spread, quantised to NVFP4: spread 0 is a random initialisation, a
trained model has 0.1 and more. The rules see it as it should be, with nibbles swapped, and with
scales in 128x4 tile order. The thresholds were set on seeds below 1,000 and on one trained
miniature; these seeds begin at 5,000.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
import torch

from assay_kernels.audit.statistics import POOLED_THRESHOLD, nibble_z, swizzle_z
from assay_kernels.numerics import NVFP4, decode_fp32, quantize, swizzle_128x4

EXPERTS, HIDDEN, INNER = 16, 256, 128
SPREADS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)


def expert(generator: torch.Generator, spread: float) -> tuple[NVFP4, NVFP4, NVFP4]:
    """w1, w3 [INNER, HIDDEN] and w2 [HIDDEN, INNER] that share the gains of their units."""
    gains = torch.exp(spread * torch.randn(INNER, generator=generator))
    inputs = torch.exp(spread * torch.randn(HIDDEN, generator=generator))
    w1, w3 = (torch.randn(INNER, HIDDEN, generator=generator) * gains[:, None] for _ in range(2))
    w2 = torch.randn(HIDDEN, INNER, generator=generator) * gains * inputs[:, None]
    return quantize(w1 * inputs), quantize(w3 * inputs), quantize(w2)


def row_profile(weight: NVFP4) -> np.ndarray:
    return weight.block_scale.view(torch.uint8).numpy().mean(axis=1, dtype=np.float32) / 8


def trial(seed: int, spread: float) -> dict[str, float]:
    """Pooled z of each rule, on the right order and on the wrong one."""
    generator = torch.Generator().manual_seed(seed)
    z: dict[str, list[float]] = {"nibble right": [], "nibble wrong": []}
    z |= {"scales right": [], "scales wrong": []}
    for _ in range(EXPERTS):
        w1, w3, w2 = expert(generator, spread)
        rows = row_profile(w1) + row_profile(w3)
        swapped = (w2.codes << 4) | (w2.codes >> 4)
        for name, codes in (("right", w2.codes), ("wrong", swapped)):
            columns = decode_fp32(codes[:64], w2.block_scale[:64]).abs().mean(0).numpy()
            z[f"nibble {name}"].append(nibble_z(columns, rows))
        for weight in (w1, w3, w2):
            scale = weight.block_scale.view(torch.uint8)
            wrong = swizzle_128x4(scale).reshape(scale.shape)
            z["scales right"].append(swizzle_z(scale.numpy()))
            z["scales wrong"].append(swizzle_z(wrong.numpy()))
    return {name: sum(values) / math.sqrt(len(values)) for name, values in z.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.seeds} seeds from {options.first}; alarm at z > {POOLED_THRESHOLD:g}")
    print(
        f"{'spread':>7}  {'rule':<8}{'false alarms':>14}{'detections':>12}{'z wrong, median':>18}"
    )
    clean = True
    for spread in SPREADS:
        results = [trial(options.first + seed, spread) for seed in range(options.seeds)]
        for rule in ("nibble", "scales"):
            right, wrong = ([r[f"{rule} {order}"] for r in results] for order in ("right", "wrong"))
            false = sum(z > POOLED_THRESHOLD for z in right)
            caught = sum(z > POOLED_THRESHOLD for z in wrong)
            clean &= not false
            count = options.seeds
            print(
                f"{spread:>7}  {rule:<8}{false:>8} / {count}{caught:>8} / {count}"
                f"{float(np.median(wrong)):>14.1f}"
            )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
