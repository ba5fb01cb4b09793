"""The PTX that the kernels need and CuTeDSL does not spell: decoding, bulk copies, stores.

Arithmetic is declared free of side effects so that the compiler may move it; memory and barriers
are not.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from assay_kernels.kernels.shared.asm import asm, asm_tuple

MAGNITUDE_AND_SIGN = 0x81C081C0
MAGNITUDE = 0x01C001C0
SIGN = 0x80008000
SCALE_FIELD = 0x0FF00FF0
SCALE_EXPONENT = 0x70007000
CODE_3 = 0x20072007


@dsl_user_op
def scales_of_step(
    word: Int32, exponent: Int32, second: bool, *, loc: Any = None, ip: Any = None
) -> Int32:
    """The two channels' bf16 scales, times 2^106, of one of the word's two steps.

    exponent: SCALE_EXPONENT in a register, so that mask and merge are one instruction.
    """
    swap = "prmt.b32 t, $1, 0, 0x2301;\n" if second else "mov.b32 t, $1;\n"
    return asm(
        "{\n.reg .b32 t;\n" + swap + f"and.b32 t, t, {SCALE_FIELD};\nor.b32 $0, t, $2;\n}}",
        "=r,r,r",
        word,
        exponent,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mul_by_half(a: Int32, b: Int32, high: bool, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two bf16 products of a's halves with one half of b, subnormal inputs kept."""
    half = "h" if high else "l"
    return asm(
        "{\n.reg .b16 l, h;\n.reg .b32 t;\nmov.b32 {l, h}, $2;\n"
        f"mov.b32 t, {{{half}, {half}}};\nmul.rn.bf16x2 $0, $1, t;\n}}",
        "=r,r,r",
        a,
        b,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mul_u32(a: Int32, b: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """The low word of a product by a constant: two left shifts in one multiply."""
    return asm(f"mul.lo.u32 $0, $1, {b};", "=r,r", a, effects=False, loc=loc, ip=ip)


@dsl_user_op
def load_shared_v4(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """16 bytes of shared memory."""
    return asm_tuple(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared_v2(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """8 bytes of shared memory."""
    return asm_tuple(
        "ld.shared.v2.b32 {$0, $1}, [$2];",
        "=r,=r,r,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared_f2(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Two fp32 of shared memory."""
    return asm_tuple(
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        "=f,=f,r,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_global_f2(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Two fp32 of read-only global memory."""
    return asm_tuple(
        "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", address, effects=False, loc=loc, ip=ip
    )


@dsl_user_op
def peer_address(address: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same shared-memory address in another block of the cluster."""
    return asm(
        "mapa.shared::cluster.u32 $0, $1, $2;",
        "=r,r,r",
        address,
        rank,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_peer_f2(
    address: Int32, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Two fp32 into a peer's shared memory."""
    asm(
        "st.shared::cluster.v2.f32 [$0], {$1, $2};",
        "r,f,f,~{memory}",
        address,
        a,
        b,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_global_b32(address: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    asm("st.global.b32 [$0], $1;", "l,r,~{memory}", address, value, effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_global_bf16(address: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    asm(
        "{\n.reg .b16 t;\ncvt.rn.bf16.f32 t, $1;\nst.global.b16 [$0], t;\n}",
        "l,f,~{memory}",
        address,
        value,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_global_f2(
    address: Int64, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    asm(
        "st.global.v2.f32 [$0], {$1, $2};",
        "l,f,f,~{memory}",
        address,
        a,
        b,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def evict_first(*, loc: Any = None, ip: Any = None) -> Int64:
    """L2 policy for bytes that are read once."""
    return asm(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", effects=False, loc=loc, ip=ip
    )


@dsl_user_op
def bulk_copy(
    target: Int32,
    source: Int64,
    size: int,
    barrier: Int32,
    policy: Int64,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """`size` contiguous bytes from global to shared memory."""
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[$0], [$1], {size}, [$2], $3;",
        "r,l,r,l,~{memory}",
        target,
        source,
        barrier,
        policy,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_matrices(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """Four 8 x 8 bf16 matrices, one row address a lane."""
    return asm_tuple(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mma_m16n8k16(
    a: tuple[Int32, ...],
    b: tuple[Int32, ...],
    c: tuple[Float32, ...],
    *,
    loc: Any = None,
    ip: Any = None,
) -> tuple[Float32, ...]:
    """One warp's bf16 product of 16 channels, 8 tokens and 16 inputs, added to c."""
    return asm_tuple(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        *a,
        *b,
        *c,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def shuffle_up(value: Int32, lanes: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value of the lane `lanes` below; the first lanes get their own."""
    return asm(
        f"shfl.sync.up.b32 $0, $1, {lanes}, 0, -1;", "=r,r", value, effects=True, loc=loc, ip=ip
    )


@dsl_user_op
def shuffle_from(value: Int32, lane: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value of one lane."""
    return asm(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", value, lane, effects=True, loc=loc, ip=ip
    )


@dsl_user_op
def first_lane(hit: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The lowest lane whose `hit` is not zero; 31 if there is none."""
    return asm(
        "{\n.reg .pred p;\n.reg .b32 t;\nsetp.ne.s32 p, $1, 0;\n"
        "vote.sync.ballot.b32 t, p, -1;\nbrev.b32 t, t;\nclz.b32 t, t;\n"
        "min.u32 $0, t, 31;\n}",
        "=r,r",
        hit,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ballot(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """One bit for every lane whose value is not zero."""
    return asm(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, -1;\n}",
        "=r,r",
        value,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def lowest_bit(mask: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The number of the lowest bit set; 31 if there is none."""
    return asm(
        "{\n.reg .b32 t;\nbrev.b32 t, $1;\nclz.b32 t, t;\nmin.u32 $0, t, 31;\n}",
        "=r,r",
        mask,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_global_i32(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm("ld.global.b32 $0, [$1];", "=r,l,~{memory}", address, effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_global_f32(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    return asm("ld.global.f32 $0, [$1];", "=f,l,~{memory}", address, effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_l2_f2_if(
    address: Int64, wanted: Int32, *, loc: Any = None, ip: Any = None
) -> tuple[Float32, ...]:
    """Two fp32 as the L2 has them, past a stale L1; zeros where `wanted` is zero."""
    return asm_tuple(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $3, 0;\nmov.f32 $0, 0f00000000;\n"
        "mov.f32 $1, 0f00000000;\n@p ld.global.cg.v2.f32 {$0, $1}, [$2];\n}",
        "=&f,=&f,l,r,~{memory}",
        address,
        wanted,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_global_f2(
    address: Int64, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Add two fp32 to global memory, atomically each."""
    asm(
        "red.relaxed.gpu.global.add.v2.f32 [$0], {$1, $2};",
        "l,f,f,~{memory}",
        address,
        a,
        b,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def count_global(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Add one to a global counter and return what it was; orders memory both ways."""
    return asm(
        "atom.acq_rel.gpu.global.add.s32 $0, [$1], 1;",
        "=r,l,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared_i32(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    return asm("ld.shared.b32 $0, [$1];", "=r,r,~{memory}", address, effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared_i32(address: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    asm("st.shared.b32 [$0], $1;", "r,r,~{memory}", address, value, effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_global_v4(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Int32, ...]:
    """16 bytes of global memory."""
    return asm_tuple(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        address,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_global_v4(
    address: Int64, values: tuple[Int32, ...], *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes to global memory."""
    asm(
        "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r,~{memory}",
        address,
        *values,
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def float_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value's bits as an integer."""
    return Int32(llvm.bitcast(T.i32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
