"""Epilogue arithmetic as the numerics define it, one IEEE fp32 operation at a time.

The same functions serve sm_100a and sm_90a, so that what a Blackwell epilogue computes can be run
on a Hopper GPU. Only `e2m1x2` differs: sm_100a has an instruction; elsewhere comparisons with the
documented rounding boundaries stand in for it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from assay_kernels.kernels.shared.asm import asm, asm_tuple

LOG2_E = 1.4426950408889634
LARGEST = 3.4028234663852886e38
SMALLEST_NORMAL = 1.1754943508222875e-38
E4M3_MAX = 448.0
FP4_MAX = 6.0

BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of neighbouring E2M1 magnitudes; a tie goes to the even code, so every other midpoint
belongs to the code above it."""


def _float2(name: str, text: str) -> Any:
    @dsl_user_op
    def op(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
        values = (Float32(a), Float32(b))
        return asm(f"{text} $0, $1, $2;", "=f,f,f", *values, effects=False, loc=loc, ip=ip)

    op.__name__ = name
    return op


divide = _float2("divide", "div.rn.f32")
"""IEEE division: the approximate one would move values across rounding boundaries."""
multiply = _float2("multiply", "mul.rn.f32")
"""A product that is not contracted into a multiply-add."""
largest = _float2("largest", "max.NaN.f32")
"""The larger operand; a NaN wins."""
smallest = _float2("smallest", "min.f32")
"""The smaller operand; a number wins over a NaN."""
at_least = _float2("at_least", "max.f32")
_no_more = _float2("_no_more", "min.NaN.f32")
_no_less = _float2("_no_less", "max.NaN.f32")


def _float1(text: str) -> Any:
    @dsl_user_op
    def op(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
        return asm(f"{text} $0, $1;", "=f,f", Float32(a), effects=False, loc=loc, ip=ip)

    return op


magnitude = _float1("abs.f32")
_exp2 = _float1("ex2.approx.f32")


@dsl_user_op
def bf16_pair(word: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """The two bf16 of a word, low half first, as fp32."""
    return asm_tuple(
        "{\n.reg .b32 t;\nshl.b32 t, $2, 16;\nmov.b32 $0, t;\n"
        "and.b32 t, $2, 0xffff0000;\nmov.b32 $1, t;\n}",
        "=f,=f,r",
        word,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_bf16(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 rounded to bf16, nearest even."""
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", high, low, effects=False, loc=loc, ip=ip)


@dsl_user_op
def e4m3(value: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The E4M3 byte of a value in 0..448, nearest even."""
    return asm(
        "{\n.reg .b16 t;\n.reg .f32 z;\nmov.f32 z, 0f00000000;\n"
        "cvt.rn.satfinite.e4m3x2.f32 t, z, $1;\ncvt.u32.u16 $0, t;\n}",
        "=r,f",
        value,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def from_e4m3(byte: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The value of an E4M3 byte; exact."""
    return asm(
        "{\n.reg .b16 t, l, h;\n.reg .b32 p;\ncvt.u16.u32 t, $1;\n"
        "cvt.rn.f16x2.e4m3x2 p, t;\nmov.b32 {l, h}, p;\ncvt.f32.f16 $0, l;\n}",
        "=f,r",
        byte,
        effects=False,
        loc=loc,
        ip=ip,
    )


_HARDWARE = (
    "{\n.reg .b8 b;\ncvt.rn.satfinite.e2m1x2.f32 b, $2, $1;\ncvt.u32.u8 $0, b;\n}",
    "=r,f,f",
)


def _stand_in() -> tuple[str, str]:
    """Count the boundaries under the magnitude; NaN is +6."""
    lines = [".reg .pred p, q, n;", ".reg .f32 m;", ".reg .b32 t, s, o, c;", "mov.u32 o, 0;"]
    for operand, shift in (("$1", 0), ("$2", 4)):
        lines += [f"abs.f32 m, {operand};", "mov.u32 c, 0;"]
        for index, boundary in enumerate(BOUNDARIES):
            compare = "ge" if index % 2 else "gt"
            bits = _bits(boundary)
            lines += [f"setp.{compare}.f32 p, m, 0f{bits:08X};", "selp.u32 t, 1, 0, p;"]
            lines += ["add.u32 c, c, t;"]
        lines += [
            f"setp.nan.f32 n, {operand}, {operand};",
            "selp.u32 c, 7, c, n;",
            f"mov.b32 s, {operand};",
            "shr.u32 s, s, 28;",
            "and.b32 s, s, 8;",
            "selp.u32 s, 0, s, n;",
            "or.b32 c, c, s;",
            f"shl.b32 c, c, {shift};",
            "or.b32 o, o, c;",
        ]
    return "{\n" + "\n".join(lines) + "\nmov.u32 $0, o;\n}", "=r,f,f"


def _bits(value: float) -> int:
    import struct

    return int.from_bytes(struct.pack(">f", value), "big")


@dsl_user_op
def e2m1x2(
    low: Float32, high: Float32, hardware: bool, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Two E2M1 codes in a byte, the low nibble first: nearest even, saturating, NaN is +6."""
    text, constraints = _HARDWARE if hardware else _stand_in()
    return asm(text, constraints, low, high, effects=False, loc=loc, ip=ip)


def row_scale(amax: Float32) -> Float32:
    """The global scale of a row: amax / (6 * 448), normal and finite; 1 for a row of zeros."""
    amax = smallest(amax, LARGEST)
    scale = at_least(divide(amax, FP4_MAX * E4M3_MAX), SMALLEST_NORMAL)
    return select(amax, Float32(1.0), scale)


@dsl_user_op
def select(
    test: Float32, if_zero: Float32, otherwise: Float32, *, loc: Any = None, ip: Any = None
) -> Float32:
    """if_zero where test is zero of either sign."""
    return asm(
        "{\n.reg .pred p;\nsetp.eq.f32 p, $1, 0f00000000;\nselp.f32 $0, $2, $3, p;\n}",
        "=f,f,f,f",
        test,
        if_zero,
        otherwise,
        effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _quotient(value: Float32, step: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """value / step; a zero of value's sign where step is zero."""
    return asm(
        "{\n.reg .pred p;\n.reg .f32 d, z;\n.reg .b32 t;\ndiv.rn.f32 d, $1, $2;\n"
        "mov.b32 t, $1;\nand.b32 t, t, 0x80000000;\nmov.b32 z, t;\n"
        "setp.gt.f32 p, $2, 0f00000000;\nselp.f32 $0, d, z, p;\n}",
        "=f,f,f",
        value,
        step,
        effects=False,
        loc=loc,
        ip=ip,
    )


def block_amax(values: list[Float32]) -> Float32:
    """The largest magnitude; NaN if there is one."""
    amax = magnitude(values[0])
    for value in values[1:]:
        amax = largest(amax, magnitude(value))
    return amax


def quantize_block(
    values: list[Float32], global_scale: Float32, hardware: bool
) -> tuple[Int32, Int32, Int32]:
    """16 values -> (codes of k 0..7, codes of k 8..15, E4M3 byte), low nibble first.

    Operation for operation what `numerics.quantize` does.
    """
    amax = block_amax(values)
    byte = e4m3(smallest(divide(divide(amax, FP4_MAX), global_scale), E4M3_MAX))
    step = multiply(from_e4m3(byte), global_scale)
    scaled = [_quotient(value, step) for value in values]
    words = []
    for half in (0, 8):
        word = Int32(0)
        for i in range(4):
            pair = e2m1x2(scaled[half + 2 * i], scaled[half + 2 * i + 1], hardware)
            word = word | (pair << (8 * i))
        words.append(word)
    return words[0], words[1], byte


def swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); a NaN stays one."""
    gate = _no_more(gate, limit)
    up = _no_less(_no_more(up, limit), Float32(0.0) - limit)
    silu = divide(gate, Float32(1.0) + _exp2(multiply(gate, Float32(-LOG2_E))))
    return multiply(silu, up)
