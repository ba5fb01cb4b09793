"""How long a product should take, so that the first real run has something to be wrong about.

A launch costs a fixed time. Then waves of tiles: each takes the longest of its tensor time, its
instructions outside the tensor cores, and its bytes' way from memory, where an SM alone gets no
more than its own share and all together no more than the memory gives; the epilogue of the last
tile is hidden by nothing. The model's three free constants (`launch_us`, `memory_share`,
`tensor_share`) were chosen by hand with the first version of the Hopper kernels in view. Tests hold
it to the times of a later version. Blackwell takes the same constants, and nothing of it has been
measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from assay_kernels.kernels.sm90.config import GemmConfig as HopperConfig
from assay_kernels.kernels.sm100.config import SMS, GemmConfig
from assay_kernels.kernels.sm100.shapes import Shape


@dataclass(frozen=True)
class Gpu:
    name: str
    sms: int
    clock_ghz: float  # under load
    memory_tb_s: float  # that a large copy reaches
    tensor_tflops: float  # dense, of the format in question, at that clock
    sm_bytes_per_clock: int = 64  # from L2 into one SM
    launch_us: float = 3.0  # start and end that the next kernel does not cover
    memory_share: float = 0.72  # of memory_tb_s that a kernel's ring of stages reaches
    tensor_share: float = 0.95  # of tensor_tflops, inside a tile


H200 = Gpu("H200", 132, 1.6, 4.47, 132 * 4096 * 1.6e-3)
"""bf16: 4096 operations a clock and SM. Memory as measured in `benchmarks/results/h200.json`."""
B200 = Gpu("B200", SMS, 1.7, 7.2, SMS * 32768 * 1.7e-3)
"""NVFP4: 32768 operations a clock and SM (published 9 PFLOP/s dense); 90 % of 8 TB/s."""


@dataclass(frozen=True)
class Tile:
    """What one SM does for one tile."""

    operations: float  # tensor operations
    bytes: float  # from memory or L2
    instructions: float = 0.0  # warp instructions outside the tensor cores, mainloop
    epilogue: float = 0.0  # warp instructions after it


@dataclass(frozen=True)
class Prediction:
    us: float
    floor_us: float  # bytes once at full bandwidth, operations at full rate
    waves: int
    bound: str  # memory, tensor or instructions


def predict(gpu: Gpu, tile: Tile, tiles: int, bytes_once: float, useful: float) -> Prediction:
    """`tiles` equal tiles. bytes_once: what memory delivers at least; useful: operations."""
    waves = math.ceil(tiles / gpu.sms)
    clock = gpu.clock_ghz * 1e3  # cycles a microsecond
    sm_rate = gpu.sm_bytes_per_clock * clock * gpu.memory_share
    tensor = tile.operations / (gpu.tensor_tflops * 1e6 / gpu.sms * gpu.tensor_share)
    # Tiles share operands through L2: memory sees every byte once, spread over the waves.
    memory = max(
        tile.bytes / sm_rate,
        bytes_once / waves / (gpu.memory_tb_s * 1e6 * gpu.memory_share),
    )
    # Four schedulers an SM, one instruction a clock each.
    instructions = tile.instructions / 4 / clock
    times = {"memory": memory, "tensor": tensor, "instructions": instructions}
    bound = max(times, key=lambda name: times[name])
    us = gpu.launch_us + waves * times[bound] + tile.epilogue / 4 / clock
    floor = max(bytes_once / (gpu.memory_tb_s * 1e6), useful / (gpu.tensor_tflops * 1e6))
    return Prediction(us, floor, waves, bound)


def hopper(n: int, k: int, m: int) -> Prediction:
    """The sm_90a kernel's dense product, from its own configuration."""
    c = HopperConfig.for_dense(n, k, m)
    tiles = math.ceil(n / c.rows) * math.ceil(m / c.tokens) * c.split_k
    inputs = k / c.split_k
    weights = c.rows * inputs * 9 / 16
    decoded = c.rows * inputs / 8 * 15.5 / 32  # 15.5 instructions for eight weights
    # A tile of fewer than 64 tokens costs wgmma's time of 64; mma.sync has no such floor.
    width = c.tokens if c.warp_mma else max(c.tokens, 64)
    tile = Tile(
        operations=2.0 * c.rows * width * inputs,
        bytes=weights + c.tokens * inputs * 2,
        instructions=decoded * (2 if c.warp_mma else 1),
        epilogue=c.rows * c.tokens / 32 * 4,
    )
    bytes_once = n * k * 9 / 16 + m * k * 2 + m * n * 2
    return predict(H200, tile, tiles, bytes_once, 2.0 * m * n * k)


def blackwell(shape: Shape, m: int) -> Prediction:
    """The sm_100a kernel for m tokens; routed rows are spread evenly over the experts.

    Quantising x, a launch of its own, is not in it; neither is the sum after `grouped_l2`.
    """
    swiglu = shape.epilogue in ("swiglu", "requantise")
    if shape.experts:
        config = GemmConfig.for_grouped()
        rows = m * 6 * shape.share
        used = min(shape.experts, max(1, round(rows)))
        row_tiles = used * math.ceil(rows / used / config.tokens)
    else:
        config = GemmConfig.for_dense(shape.n, shape.k, m, swiglu=swiglu)
        rows, used = m, 1
        row_tiles = math.ceil(m / config.tokens)
    channel_tiles = math.ceil(shape.n / config.channels)
    # A pair of CTAs is two SMs that share a tile.
    tiles = row_tiles * channel_tiles * config.ctas
    k_tiles = math.ceil(shape.k / 256)
    out_bytes = {"bf16": 2.0, "fp32": 4.0, "swiglu": 1.0, "requantise": 9 / 32}[shape.epilogue]
    outputs = 128 * config.tile_n
    each = {"bf16": 3, "fp32": 3, "swiglu": 14, "requantise": 40}[shape.epilogue]
    tile = Tile(
        operations=2.0 * outputs * shape.k,
        bytes=float(config.stage_bytes * k_tiles),
        epilogue=outputs / 32 * each,
    )
    bytes_once = (
        used * shape.n * shape.k * 9 / 16 + rows * shape.k * 9 / 16 + rows * shape.n * out_bytes
    )
    return predict(B200, tile, tiles, bytes_once, 2.0 * rows * shape.n * shape.k)
