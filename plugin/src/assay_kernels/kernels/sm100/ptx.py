"""The PTX that the Blackwell kernels need and CuTeDSL does not spell."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from assay_kernels.kernels.shared.asm import asm, asm_tuple


@dsl_user_op
def load_accumulators(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """32 consecutive fp32 columns of this thread's lane of tensor memory, waited for.

    address: lane of the warp's first thread in bits 31..16, column in bits 15..0.
    """
    names = ", ".join(f"${i}" for i in range(32))
    return asm_tuple(
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{names}}}, [$32];\n"
        "tcgen05.wait::ld.sync.aligned;",
        ",".join(["=f"] * 32) + ",r,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def after_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order the tcgen05 operations that follow behind the barrier just waited for."""
    asm("tcgen05.fence::after_thread_sync;", "~{memory}", effects=True, loc=loc, ip=ip)


@dsl_user_op
def before_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order the tcgen05 operations so far before the barrier about to be arrived at."""
    asm("tcgen05.fence::before_thread_sync;", "~{memory}", effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_f32(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    return asm("ld.global.f32 $0, [$1];", "=f,l,~{memory}", address, effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_f4(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Four fp32 of global memory."""
    return asm_tuple(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_i32(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm("ld.global.b32 $0, [$1];", "=r,l,~{memory}", address, effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_v4(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """16 bytes of global memory."""
    return asm_tuple(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


def _store(suffix: str, kind: str, count: int) -> Any:
    names = ", ".join(f"${i + 1}" for i in range(count))
    value = f"{{{names}}}" if count > 1 else names

    @dsl_user_op
    def store(address: Int64, *values: Any, loc: Any = None, ip: Any = None) -> None:
        asm(
            f"st.global.{suffix} [$0], {value};",
            "l," + ",".join([kind] * count) + ",~{memory}",
            address,
            *values,
            effects=True,
            loc=loc,
            ip=ip,
        )

    return store


store_v4 = _store("v4.b32", "r", 4)
store_v2 = _store("v2.b32", "r", 2)
store_b32 = _store("b32", "r", 1)
store_f4 = _store("v4.f32", "f", 4)
store_f32 = _store("f32", "f", 1)
store_u8 = _store("u8", "r", 1)


@dsl_user_op
def store_bf16(address: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    asm(
        "{\n.reg .b16 t;\ncvt.rn.bf16.f32 t, $1;\nst.global.b16 [$0], t;\n}",
        "l,f,~{memory}",
        address,
        value,
        effects=True,
        loc=loc,
        ip=ip,
    )
