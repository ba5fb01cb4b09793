"""A kernel that runs the epilogue arithmetic alone, for any CUDA architecture."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from assay_kernels.kernels.shared import arithmetic

THREADS = 128


class Arithmetic:
    """Per row of 32 fp32: sixteen gates and ups -> SwiGLU; and the first sixteen, requantised.

    hardware: E2M1 by instruction (sm_100a) or by its stand-in.
    """

    def __init__(self, hardware: bool) -> None:
        self.hardware = hardware

    @cute.jit
    def __call__(
        self,
        values: cute.Tensor,  # fp32 [rows, 32]
        scale: cute.Tensor,  # fp32 [rows], global scale of a row
        activated: cute.Tensor,  # fp32 [rows, 16]
        codes: cute.Tensor,  # int32 [rows, 2], 16 codes
        scales: cute.Tensor,  # int32 [rows], an E4M3 byte
        row_scale: cute.Tensor,  # fp32 [rows], the dynamic scale of the first sixteen
        limit: Float32,
        stream: Any,
    ) -> None:
        rows = values.shape[0]
        self.kernel(values, scale, activated, codes, scales, row_scale, limit).launch(
            grid=((rows + (THREADS - 1)) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        values: cute.Tensor,
        scale: cute.Tensor,
        activated: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        row_scale: cute.Tensor,
        limit: Float32,
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * THREADS + tidx
        if row < values.shape[0]:
            x = [values[row, i] for i in range(32)]
            for i in cutlass.range_constexpr(16):
                activated[row, i] = arithmetic.swiglu(x[i], x[16 + i], limit)
            low, high, byte = arithmetic.quantize_block(x[:16], scale[row], self.hardware)
            codes[row, 0] = low
            codes[row, 1] = high
            scales[row] = byte
            row_scale[row] = arithmetic.row_scale(arithmetic.block_amax(x[:16]))


def compile_check(arch: str) -> Any:
    """The kernel for sm_90a or sm_100a, on any host."""
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    rows = cute.sym_int32()

    def matrix(dtype: Any, columns: int) -> Any:
        return make_fake_tensor(dtype, (rows, columns), (columns, 1), assumed_align=16)

    def vector(dtype: Any) -> Any:
        return make_fake_tensor(dtype, (rows,), (1,), assumed_align=4)

    return cute.compile(
        Arithmetic(hardware=arch == "sm_100a"),
        matrix(Float32, 32),
        vector(Float32),
        matrix(Float32, 16),
        matrix(Int32, 2),
        vector(Int32),
        vector(Float32),
        Float32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )
