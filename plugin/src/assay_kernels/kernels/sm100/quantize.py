"""bf16 activations -> E2M1 codes and E4M3 scales in the 128 x 4 layout that tcgen05 reads."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from assay_kernels.kernels.shared import arithmetic
from assay_kernels.kernels.sm100 import ptx

THREADS = 256
WARPS = THREADS // 32


@cute.jit
def scale_offset(row: Int32, column: Int32, columns: Int32) -> Int64:
    """Byte of scale (row, column) of a matrix of `columns` scale columns, padded to fours."""
    tile = Int64(row // 128) * ((columns + 3) // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


class Quantize:
    """One block a row and group; rows past the last, and unused rows of an expert, become zeros.

    A row is `groups` times k inputs (`wo_a` has a weight for each group; elsewhere there is one).
    dynamic: every row of a group gets a global scale of its own, stored in `row_scale`.
    gather: row r is x[tokens[r]], zeros where tokens[r] < 0.
    hardware: E2M1 by instruction (sm_100a) or by its stand-in.
    """

    def __init__(self, dynamic: bool, gather: bool = False, hardware: bool = True) -> None:
        self.dynamic = dynamic
        self.gather = gather
        self.hardware = hardware

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [tokens * stride]
        codes: cute.Tensor,  # uint8 [rows * groups * k / 2]
        scales: cute.Tensor,  # uint8 [rows padded to 128 * groups * k / 16]
        row_scale: cute.Tensor,  # fp32 [rows * groups]
        tokens: cute.Tensor,  # int32 [rows] of a gather
        rows: Int32,  # rows of `codes`
        stride: Int64,  # elements from one row of x to the next
        k: Int32,  # a multiple of 64
        groups: Int32,
        scale: Float32,  # static global scale
        pdl: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, codes, scales, row_scale, tokens, rows, stride, k, scale).launch(
            grid=(groups, (rows + 127) // 128 * 128, 1),
            block=(THREADS, 1, 1),
            use_pdl=pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        row_scale: cute.Tensor,
        tokens: cute.Tensor,
        rows: Int32,
        stride: Int64,
        k: Int32,
        scale: Float32,
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        group, row, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        columns = k // 16
        first = group * columns
        every = groups * columns
        scales_at = scales.iterator.toint()
        partial = cutlass.utils.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(WARPS), 16
        )
        cute.arch.griddepcontrol_wait()
        source = row
        if row >= rows:
            source = Int32(-1)
        elif cutlass.const_expr(self.gather):
            source = ptx.load_i32(tokens.iterator.toint() + Int64(row) * 4)
        codes_at = codes.iterator.toint() + (Int64(row) * every + first) * 8
        row_scale_at = row_scale.iterator.toint() + (Int64(row) * groups + group) * 4
        if source < 0:
            for s in cutlass.range(tidx, columns, THREADS, unroll=1):
                ptx.store_u8(scales_at + scale_offset(row, first + s, every), Int32(0))
                if row < rows:
                    ptx.store_v2(codes_at + s * 8, Int32(0), Int32(0))
            if cutlass.const_expr(self.dynamic):
                if row < rows and tidx == 0:
                    ptx.store_f32(row_scale_at, Float32(0.0))
        else:
            x_at = x.iterator.toint() + (Int64(source) * stride + group * k) * 2
            if cutlass.const_expr(self.dynamic):
                amax = Float32(0.0)
                for s in cutlass.range(tidx, columns, THREADS, unroll=1):
                    amax = arithmetic.largest(amax, arithmetic.block_amax(self._block(x_at, s)))
                for bit in cutlass.range_constexpr(5):
                    amax = arithmetic.largest(
                        amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << bit)
                    )
                if tidx % 32 == 0:
                    partial[tidx // 32] = amax
                cute.arch.sync_threads()
                for warp in cutlass.range_constexpr(WARPS):
                    amax = arithmetic.largest(amax, partial[warp])
                scale = arithmetic.row_scale(amax)
                if tidx == 0:
                    ptx.store_f32(row_scale_at, scale)
            for s in cutlass.range(tidx, columns, THREADS, unroll=1):
                low, high, byte = arithmetic.quantize_block(
                    self._block(x_at, s), scale, self.hardware
                )
                ptx.store_v2(codes_at + s * 8, low, high)
                ptx.store_u8(scales_at + scale_offset(row, first + s, every), byte)
        cute.arch.griddepcontrol_launch_dependents()

    def _block(self, x_at: Int64, s: Int32) -> list[Float32]:
        """The 16 values of block s."""
        words = [*ptx.load_v4(x_at + s * 32), *ptx.load_v4(x_at + s * 32 + 16)]
        return [value for word in words for value in arithmetic.bf16_pair(word)]
