"""Rows of x in expert order, for the grouped product that follows."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from assay_kernels.kernels.sm90 import ptx

THREADS = 256


class Gather:
    """rows[r] = x[tokens[r]] for the rows that have an expert here; y[m] = 0 where none has.

    A block takes every `grid`-th row. How many rows there are is known on the device alone.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [M, K]
        rows: cute.Tensor,  # bf16 [R, K]
        ends: cute.Tensor,  # int32 [E]
        tokens: cute.Tensor,  # int32 [R]
        fan: cute.Tensor,  # int32 [M]
        y: cute.Tensor,  # bf16 [M, N]
        blocks: Int32,
        pdl: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, rows, ends, tokens, fan, y).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), use_pdl=pdl, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        rows: cute.Tensor,
        ends: cute.Tensor,
        tokens: cute.Tensor,
        fan: cute.Tensor,
        y: cute.Tensor,
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        count = ptx.load_global_i32(ends.iterator.toint() + Int64(ends.shape[0] - 1) * 4)
        for row in cutlass.range(block, count, grid, unroll=1):
            token = ptx.load_global_i32(tokens.iterator.toint() + Int64(row) * 4)
            source = x.iterator.toint() + Int64(token) * Int64(x.stride[0]) * 2
            target = rows.iterator.toint() + Int64(row) * Int64(rows.stride[0]) * 2
            for i in cutlass.range(tidx, x.shape[1] // 8, THREADS, unroll=1):
                ptx.store_global_v4(target + i * 16, ptx.load_global_v4(source + i * 16))
        for token in cutlass.range(block, y.shape[0], grid, unroll=1):
            if ptx.load_global_i32(fan.iterator.toint() + Int64(token) * 4) == 0:
                target = y.iterator.toint() + Int64(token) * Int64(y.stride[0]) * 2
                for i in cutlass.range(tidx, y.shape[1] // 8, THREADS, unroll=1):
                    ptx.store_global_v4(target + i * 16, (Int32(0), Int32(0), Int32(0), Int32(0)))
        cute.arch.griddepcontrol_launch_dependents()
