"""The kernel's own layout code, run on the CPU: scale offsets, shared memory, CTA tiles.

Runs where the CUTLASS DSL is installed (`make test-gpu-compile` makes such an environment).
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CUTLASS DSL (optional extra) is not installed")

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float8E4M3FN, Int32, Int64
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import make_ptr
from cutlass.utils import blackwell_helpers, blockscaled_layout

from assay_kernels.kernels.sm100.config import SCALE_TILE, TILE_K, GemmConfig
from assay_kernels.kernels.sm100.quantize import scale_offset

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = [GemmConfig.make(128), GemmConfig.make(256, 2), GemmConfig.make(16, swapped=True)]


def published(m: int, s: int, columns: int) -> int:
    """cuBLAS, "1D block scaling factors layout"."""
    tile = (m // 128) * -(-columns // 4) + s // 4
    return tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + s % 4


@cute.jit
def fill(pointer: cute.Pointer, rows: Int32, columns: Int32) -> None:
    out = cute.make_tensor(pointer, cute.make_layout(rows * columns))
    for row in cutlass.range(rows):
        for column in cutlass.range(columns):
            out[row * columns + column] = scale_offset(row, column, columns)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (300, 24), (257, 16), (130, 448)])
def test_the_kernels_scale_offsets_equal_the_published_formula(rows: int, columns: int) -> None:
    buffer = (ctypes.c_int64 * (rows * columns))()
    pointer = make_ptr(Int64, ctypes.addressof(buffer), cute.AddressSpace.generic, assumed_align=8)
    fill(pointer, Int32(rows), Int32(columns))
    wanted = [published(m, s, columns) for m in range(rows) for s in range(columns)]
    assert list(buffer) == wanted
    assert len(set(wanted)) == len(wanted)


def tiled_mma(config: GemmConfig) -> Any:
    major = tcgen05.OperandMajorMode.K
    group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE
    return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN,
        Float4E2M1FN,
        major,
        major,
        Float8E4M3FN,
        16,
        group,
        (config.tile_m, config.tile_n),
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_copied_scale_tiles_lie_in_shared_memory_as_the_mma_reads_them(config: GemmConfig) -> None:
    """TMA brings 512-byte tiles [row tile, step, 512]; tcgen05.cp takes them from the library's
    layout. Byte for byte the two must agree."""
    found: dict[tuple[str, int, int, int], int] = {}

    @cute.jit
    def trace() -> None:
        mma = tiled_mma(config)
        tiler = (config.tile_m, config.tile_n, TILE_K)
        layouts = {
            "a": (blockscaled_layout.make_smem_layout_sfa(mma, tiler, 16, 2), 1),
            "b": (
                blockscaled_layout.make_smem_layout_sfb(mma, tiler, 16, 2),
                config.b_scale_tiles,
            ),
        }
        for name, (layout, tiles) in layouts.items():
            for stage, step, row, s in itertools.product(
                range(2), range(4), range(0, 128 * tiles, 5), range(4)
            ):
                at = cute.crd2idx((((row % 128, row // 128), (0, s)), 0, step, stage), layout)
                assert isinstance(at, int)
                found[name, stage, row, 4 * step + s] = at - stage * tiles * SCALE_TILE * 4

    trace()
    assert found
    for (_, _, row, column), offset in found.items():
        assert offset == published(row, column, TILE_K // 16)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_the_ctas_of_an_mma_read_every_row_and_input_once(config: GemmConfig, operand: str) -> None:
    """Coordinates of the second tile along both sides of a matrix of 2 x 2 tiles."""
    tile = config.tile_m if operand == "a" else config.tile_n
    rows = tile // config.ctas

    @cute.jit
    def coordinates(pointer: cute.Pointer) -> None:
        mma = tiled_mma(config)
        out = cute.make_tensor(pointer, cute.make_layout((2, 4, rows, config.ctas)))
        whole = cute.make_identity_tensor((2 * tile, 2 * TILE_K))
        second = cute.local_tile(whole, (tile, TILE_K), (1, 1))
        for rank in cutlass.range_constexpr(config.ctas):
            part = mma.get_slice(rank)
            mine = part.partition_A(second) if operand == "a" else part.partition_B(second)
            for step in cutlass.range_constexpr(4):
                for row in cutlass.range(rows):
                    at = mine[(row, 0), 0, step]
                    out[0, step, row, rank] = Int64(at[0])
                    out[1, step, row, rank] = Int64(at[1])

    buffer = (ctypes.c_int64 * (8 * tile))()
    address = ctypes.addressof(buffer)
    coordinates(make_ptr(Int64, address, cute.AddressSpace.generic, assumed_align=8))
    found = sorted(zip(buffer[0::2], buffer[1::2], strict=True))
    assert found == [(tile + row, TILE_K + 64 * step) for row in range(tile) for step in range(4)]
