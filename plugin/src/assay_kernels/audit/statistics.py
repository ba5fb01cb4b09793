"""The two rules that decide by statistics: which nibble comes first, and whether scales are in
tensor-core order. Both layouts hold the same bytes in another order, so no value is out of range;
what gives them away is structure that only the right order shows. A checkpoint without any
structure (random initial weights) is left undecided, and the report says so.

Each matrix gives a z-score that is near N(0, 1) when order means nothing; the z-scores of one kind
of matrix are pooled over the checkpoint (Stouffer: their sum over the root of their number).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from assay_kernels.audit.block import Block, Floats, Weight
from assay_kernels.audit.rule import DeepRule, Finding, Measurement, register
from assay_kernels.checkpoint.data import Bytes, TensorReader
from assay_kernels.checkpoint.reader import Survey
from assay_kernels.checkpoint.weights import Precision
from assay_kernels.numerics.layout import TILE_COLS, TILE_ROWS

THRESHOLD = 7.0
"""z beyond which order is called wrong. Under no structure a matrix passes it once in 10^12."""

POOLED_THRESHOLD = 7.0

_EVIDENCE = 4.0
"""|z| from which a checkpoint is said to have structure at all."""

_NUMBERS = re.compile(r"\.\d+\.")


def confidence(z: float, count: int) -> str:
    """How sure a z-score makes, in words that do not claim more than the model of it holds."""
    exponent = max(z, 0) ** 2 / 2 / math.log(10)
    return f"z = {z:.1f} over {count} matrices; by chance less than once in 10^{int(exponent)}"


def _by_group(measured: list[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for one in measured:
        groups[one.group].append(one)
    return groups


class _Statistical(DeepRule):
    """Judges each matrix by itself, then all of a kind together. Values are z; positive is wrong.

    A matrix that is no more than suspicious alone is named through its kind.
    """

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        for group, ones in _by_group(measured).items():
            alone = [one for one in ones if one.value > THRESHOLD]
            rest = [one for one in ones if one.value <= THRESHOLD]
            for one in alone:
                yield self.finding(
                    one.tensor, one.file, self.found, confidence=confidence(one.value, 1)
                )
            pooled = sum(one.value for one in rest) / math.sqrt(len(rest)) if rest else 0.0
            if pooled > POOLED_THRESHOLD:
                worst = max(rest, key=lambda one: float(one.value))
                found = f"{self.found} ({len(rest)} matrices of the kind {group} together)"
                sure = confidence(pooled, len(rest))
                yield self.finding(worst.tensor, worst.file, found, confidence=sure)

    def undecided(self, measured: list[Measurement]) -> str | None:
        kinds = _by_group(measured)
        pooled = {
            group: sum(one.value for one in ones) / math.sqrt(len(ones))
            for group, ones in kinds.items()
        }
        if not pooled or max(abs(z) for z in pooled.values()) > _EVIDENCE:
            return None
        strongest = max(pooled.values(), key=abs)
        return (
            f"{len(measured)} matrices have no structure to tell by (strongest z = "
            f"{strongest:.1f}), as random initial weights have none"
        )

    found = ""


def nibble_z(columns: Floats, rows: Floats) -> float:
    """How much better swapped nibbles fit, from a consumer's columns and its producer's rows.

    columns: mean magnitude of each of K columns of the matrix that is judged
    rows: log magnitude, in any unit, of each of K rows of the matrices that make its input

    Neighbours 2j and 2j + 1 change places under the other nibble order. Where a large row meets a
    large column, log(columns[2j] / columns[2j + 1]) goes with rows[2j] - rows[2j + 1]; under
    the wrong order it goes against it. The correlation r over n = K/2 pairs
    gives -atanh(r) sqrt(n - 3) (Fisher).
    """
    usable = (columns[0::2] > 0) & (columns[1::2] > 0)
    if usable.sum() < 16:
        return 0.0
    one = np.log(columns[0::2][usable] / columns[1::2][usable])
    other = rows[0::2][usable] - rows[1::2][usable]
    # Ranks: a single extreme channel must not decide.
    one, other = (np.argsort(np.argsort(v)).astype(np.float64) for v in (one, other))
    if one.std() == 0 or other.std() == 0:
        return 0.0
    r = float(np.clip(np.corrcoef(one, other)[0, 1], -0.999999, 0.999999))
    return -math.atanh(r) * math.sqrt(len(one) - 3)


def _row_profile(weight: Weight) -> Floats | None:
    """Mean logarithm of every row's block scales, in octaves: the bytes of E4M3 and of UE8M0 rise
    with it, eight steps an octave and one."""
    if weight.precision not in (Precision.NVFP4, Precision.MXFP4):
        return None
    octave = 8 if weight.precision is Precision.NVFP4 else 1
    profile: Floats = weight.scales.mean(axis=1, dtype=np.float32) / np.float32(octave)
    return profile


def _column_profile(weight: Weight) -> Floats:
    profile: Floats = weight.magnitudes.mean(axis=0)
    return profile


_FED_BY = (("w2", ("w1", "w3")), ("wo_b", ("wo_a",)), ("wq_b", ("wq_a",)))


@register
class NibbleOrder(_Statistical):
    """Codes are packed high nibble first: every pair of neighbouring inputs has changed places.

    Told from matrices that feed one another (w1, w3 into w2; wo_a into wo_b; wq_a into wq_b):
    training ties a unit's outgoing weights to its incoming ones (Du, Hu, Lee 2018, "Algorithmic
    regularization in learning deep homogeneous models: layers are automatically balanced").
    """

    id = "nibble-order"
    effect = "each matrix reads its inputs in swapped pairs: fluent-looking nonsense"
    action = "pack the low nibble first: byte j holds code 2j in bits 0-3 and 2j + 1 in bits 4-7"
    origin = "comfy-kitchen #41: the order within a byte is a convention, and both are in use"
    found = "inputs fit better with the two nibbles of each byte swapped"

    def measure(self, block: Block) -> Iterator[Measurement]:
        for consumer, producers in _FED_BY:
            weight = block.weights.get(consumer)
            feeding = [block.weights.get(name) for name in producers]
            if weight is None or weight.precision not in (Precision.NVFP4, Precision.MXFP4):
                continue
            profiles = [_row_profile(w) if w is not None else None for w in feeding]
            rows = np.zeros((), dtype=np.float32)
            for profile in profiles:
                if profile is None or profile.size != weight.module.shape[1]:
                    break
                rows = rows + profile
            else:
                info = weight.info("codes")
                assert info is not None
                z = nibble_z(_column_profile(weight), rows)
                yield Measurement(consumer, info.name, info.file, z)


def _explained(grid: Floats) -> float:
    """z-score of rows and columns explaining a grid's values: 0 +- 1 for values without structure.

    grid: [rows, columns]
    """
    rows, cols = grid.shape
    grid = grid - grid.mean()
    total = float((grid * grid).sum())
    if total == 0:
        return 0.0
    of_rows, of_cols = grid.mean(axis=1), grid.mean(axis=0)
    explained = cols * float((of_rows**2).sum()) + rows * float((of_cols**2).sum())
    free = (rows - 1) + (cols - 1)
    left = rows * cols - 1 - free
    if left <= 0 or total - explained <= 0:
        return 0.0
    f = (explained / free) / ((total - explained) / left)
    return float((f - 1) / math.sqrt(2 / free + 2 / left))


def unswizzled(tile_rows: Bytes) -> Bytes:
    """A stripe of 128 rows read as 128x4 tiles: the inverse of `numerics.swizzle_128x4`.

    tile_rows: uint8 [128, S], S a multiple of 4
    """
    columns = tile_rows.shape[1]
    tiles = tile_rows.reshape(columns // TILE_COLS, 32, 4, TILE_COLS)
    result: Bytes = tiles.transpose(2, 1, 0, 3).reshape(TILE_ROWS, columns)
    return result


def swizzle_z(scales: Bytes) -> float:
    """How much better scales fit when read as 128x4 tiles, from their first and middle stripe.

    scales: uint8 [N, S], one-byte floats, whose bytes rise with their logarithm
    Rows and columns of a trained matrix differ in magnitude; only in the right order do rows and
    columns of the grid explain the scales.
    """
    rows, cols = scales.shape
    if rows < TILE_ROWS or rows % TILE_ROWS or cols % TILE_COLS or cols < 2 * TILE_COLS:
        return 0.0
    starts = sorted({0, rows // TILE_ROWS // 2 * TILE_ROWS})
    total = 0.0
    for start in starts:
        stripe = scales[start : start + TILE_ROWS]
        total += _explained(unswizzled(np.ascontiguousarray(stripe)).astype(np.float32))
        total -= _explained(stripe.astype(np.float32))
    return float(total / math.sqrt(2 * len(starts)))


@register
class ScaleSwizzled(_Statistical):
    """Block scales are stored in the order in which tensor cores read them (128x4 tiles), where a
    checkpoint has them row by row."""

    id = "scale-swizzled"
    effect = "blocks get other blocks' scales: fluent-looking nonsense"
    action = "store scales row by row; kernels reorder them at load time"
    origin = "Model-Optimizer #2038 (an export that kept the kernel's scale order)"
    found = "rows and columns explain the scales better in 128x4 tile order"

    def measure(self, block: Block) -> Iterator[Measurement]:
        for leaf, weight in block.weights.items():
            info = weight.scale_info
            if info is None or weight.precision is not Precision.NVFP4:
                continue
            z = swizzle_z(weight.scales)
            if z:
                kind = f"{_NUMBERS.sub('.', block.prefix + '.')}{leaf}"
                yield Measurement(kind, info.name, info.file, z)
