"""PTX inside CuTeDSL code."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

KINDS: dict[str, tuple[Any, Any]] = {
    "r": (Int32, T.i32),
    "f": (Float32, T.f32),
    "l": (Int64, T.i64),
}
"""PTX's constraint letters: the DSL's type and the compiler's."""


def asm_tuple(
    text: str, constraints: str, *operands: Any, effects: bool, loc: Any = None, ip: Any = None
) -> tuple[Any, ...]:
    """Instructions as they stand in `text`; call it inside a `dsl_user_op`.

    constraints: LLVM's, outputs first: '=r,=r,l,~{memory}'. effects: whether they read or write
    memory, or must stay where they are; without, the compiler may move and merge them. Returns
    the outputs.
    """
    kinds = [KINDS[c[-1]] for c in constraints.split(",") if c.startswith("=")]
    types = [mlir() for _, mlir in kinds]
    result = llvm.StructType.get_literal(types) if len(types) > 1 else next(iter(types), None)
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    found = llvm.inline_asm(
        result, values, text, constraints, has_side_effects=effects, loc=loc, ip=ip
    )
    if len(types) == 1:
        return (kinds[0][0](found),)
    return tuple(
        wrap(llvm.extractvalue(mlir, found, [i], loc=loc, ip=ip))
        for i, ((wrap, _), mlir) in enumerate(zip(kinds, types, strict=True))
    )


def asm(
    text: str, constraints: str, *operands: Any, effects: bool, loc: Any = None, ip: Any = None
) -> Any:
    """The same for instructions with one output, or none: returns it, or None."""
    found = asm_tuple(text, constraints, *operands, effects=effects, loc=loc, ip=ip)
    return found[0] if found else None
