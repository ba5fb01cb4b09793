"""The routed experts' last step: a token's weighted rows, summed in the router's order."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from assay_kernels.kernels.shared import arithmetic
from assay_kernels.kernels.sm100 import ptx

THREADS = 256


class Finalise:
    """out[m] = sum over slots of rows[place[m, slot]]; places < 0 have no expert here.

    The order of the sum is the slots', so results are the same from run to run.
    """

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # fp32 [R * n], weighted
        place: cute.Tensor,  # int32 [m * slots], the row of a token's slot
        out: cute.Tensor,  # bf16 [m * n]
        m: Int32,
        n: Int32,
        slots: Int32,
        pdl: Int32,
        stream: Any,
    ) -> None:
        self.kernel(rows, place, out, n, slots).launch(
            grid=(m, 1, 1), block=(THREADS, 1, 1), use_pdl=pdl, stream=stream
        )

    @cute.kernel
    def kernel(
        self, rows: cute.Tensor, place: cute.Tensor, out: cute.Tensor, n: Int32, slots: Int32
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        place_at = place.iterator.toint() + Int64(token) * slots * 4
        for column in cutlass.range(tidx, n // 4, THREADS, unroll=1):
            a = Float32(0.0)
            b = Float32(0.0)
            c = Float32(0.0)
            d = Float32(0.0)
            for slot in cutlass.range(slots, unroll=1):
                row = ptx.load_i32(place_at + slot * 4)
                if row >= 0:
                    at = rows.iterator.toint() + (Int64(row) * n + column * 4) * 4
                    v = ptx.load_f4(at)
                    a += v[0]
                    b += v[1]
                    c += v[2]
                    d += v[3]
            at = out.iterator.toint() + (Int64(token) * n + column * 4) * 2
            ptx.store_v2(at, arithmetic.pack_bf16(a, b), arithmetic.pack_bf16(c, d))
        cute.arch.griddepcontrol_launch_dependents()
