"""Rules that read scales and samples of codes, and decide without statistics."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from assay_kernels.audit.block import Block, Weight, as_float32
from assay_kernels.audit.header_rules import is_main_compressors
from assay_kernels.audit.rule import DeepRule, Finding, Measurement, Rule, Severity, register
from assay_kernels.checkpoint.data import TensorReader
from assay_kernels.checkpoint.errors import Fault
from assay_kernels.checkpoint.header import TensorInfo
from assay_kernels.checkpoint.manifest import MANIFEST_FILE
from assay_kernels.checkpoint.reader import Survey
from assay_kernels.checkpoint.weights import Precision
from assay_kernels.numerics.layout import padded
from assay_kernels.numerics.nvfp4 import E4M3_MAX, FP4_MAX

_EXPORT_AGAIN = "export the weight again from its original"

_FOUR_BIT = (Precision.NVFP4, Precision.MXFP4)

_NVFP4_RANGE = FP4_MAX * E4M3_MAX


class _WeightRule(DeepRule):
    """Looks at one quantised weight at a time."""

    action = _EXPORT_AGAIN

    def check(self, block: Block) -> Iterator[Finding]:
        for weight in block.weights.values():
            if weight.scale_info is not None:
                yield from self.judge(weight, weight.scale_info)

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        raise NotImplementedError


@register
class ScaleNotFinite(_WeightRule):
    """A block scale is NaN or infinite."""

    id = "scale-nonfinite"
    effect = "every output channel that it touches is NaN, and the next layer all of it"
    origin = "vLLM #45212 (NaN, prompt-dependent)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        if scale.dtype in ("F8_E8M0", "U8", "I8"):
            bad = weight.scale_bounds[1] == 255 and int((weight.scales == 255).sum())
        elif scale.dtype == "F8_E4M3":
            suspicious = weight.scale_bounds[1] >= 0x7F
            bad = suspicious and int(((weight.scales & 0x7F) == 0x7F).sum())
        else:
            bad = int((~np.isfinite(weight.scale_values)).sum())
        if bad:
            yield self.finding(scale.name, scale.file, f"{bad} scales are NaN or infinite")


@register
class ScaleNegative(_WeightRule):
    """A block scale is negative: scales are magnitudes, and hardware misreads the sign."""

    id = "scale-negative"
    effect = "its block has the opposite sign, or NaN where hardware reads the scale as unsigned"
    origin = "PTX ISA: ue4m3 has no sign bit"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        bad = 0
        if scale.dtype == "F8_E4M3":
            if weight.scale_bounds[1] > 0x80:
                bad = int(((weight.scales > 0x80) & (weight.scales != 0xFF)).sum())
        elif scale.dtype in ("F32", "BF16"):
            bad = int((weight.scale_values < 0).sum())
        if bad:
            yield self.finding(scale.name, scale.file, f"{bad} scales are negative")


@register
class ScaleZero(_WeightRule):
    """Whole rows of block scales are zero while their codes are not."""

    id = "scale-zero"
    effect = "the rows decode to zero: dead channels, an empty answer when it is all of them"
    origin = "vLLM #54189 (zeros)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        if scale.dtype in ("F32", "BF16"):
            zero = weight.scale_values == 0
        elif weight.scale_bounds[0] == 0:
            zero = (weight.scales & 0x7F) == 0 if scale.dtype == "F8_E4M3" else weight.scales == 0
        else:
            return
        rows = zero.all(axis=1)
        if not rows.any():
            return
        mask = 0x77 if weight.precision in _FOUR_BIT else 0x7F
        per_row = weight.module.shape[0] / len(rows)
        sampled = rows[(weight.sampled_rows // max(round(per_row), 1)).clip(max=len(rows) - 1)]
        if rows.all() or sampled.any():
            chosen = slice(None) if rows.all() else sampled
            used = ((weight.codes[chosen] & mask) != 0).mean()
            if used > 0.01:
                found = f"{int(rows.sum())} of {len(rows)} rows of scales are zero, codes are not"
                yield self.finding(scale.name, scale.file, found)


_ENOUGH_BLOCKS = 32
_CHANCE_BLOCKS = 1024


@register
class ScaleConstant(_WeightRule):
    """All block scales of a matrix are the same; all ones is what a forgotten scale looks like."""

    id = "scale-constant"
    effect = "every block has the same range: fluent nonsense, or a constant token"
    origin = "scales that were initialised and never filled; vLLM #45212 is a relative"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        if weight.precision is Precision.FP8_BLOCK:
            # Equal power-of-two scales are usual. Ones are not: they mean weights of up to 448.
            values = weight.scale_values
            peak = int((weight.codes & 0x7F).max(initial=0))
            if bool((values == 1).all()) and peak >= 0x60:  # 0x60 is 32 in E4M3
                yield self.finding(scale.name, scale.file, "all scales are 1, codes reach over 32")
            return
        low, high = weight.scale_bounds
        blocks = weight.scales.size
        if low != high or blocks < _ENOUGH_BLOCKS or low & 0x7F == 0:
            return
        if not (weight.codes & 0x77).any():
            return
        value = float(weight.sampled_scales.flat[0])
        if not np.isfinite(value):
            return
        # Few blocks of an MXFP4 original may share an exponent by chance; one such scale is not 1.
        chance = value != 1 and np.frexp(value)[0] == 0.5 and blocks < _CHANCE_BLOCKS
        yield self.finding(
            scale.name,
            scale.file,
            f"all {blocks} scales are {value:g}",
            severity=Severity.WARNING if chance else None,
            confidence=f"{blocks} powers of two may agree by chance" if chance else None,
        )


def _unusable(value: float) -> bool:
    return not (np.isfinite(value) and value > 0)


@register
class GlobalScaleValue(_WeightRule):
    """weight_scale_2 (weight_global_scale) is zero, negative, NaN or infinite."""

    id = "global-scale-value"
    effect = "the whole matrix is zero or NaN"
    origin = "vLLM #54189 (zeros)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        value, info = weight.stored_global_scale, weight.info("global_scale")
        if value is not None and info is not None and _unusable(value):
            yield self.finding(info.name, info.file, f"is {value:g}")


@register
class GlobalScaleReciprocal(_WeightRule):
    """A global scale is the reciprocal of what its dialect stores, told by the weights that result:
    they would reach beyond 6 * 448, where a model's weights are below 10."""

    id = "global-scale-reciprocal"
    effect = "the matrix is off by a factor of about 10^7: NaN or a constant token"
    action = "store weight_scale_2 = amax / (6 * 448); only dialect C stores the reciprocal"
    origin = "modular #6600 (compressed-tensors divides by these, ModelOpt multiplies)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        value, info = weight.stored_global_scale, weight.info("global_scale")
        if value is None or info is None or _unusable(value):
            return
        high = float(np.nanmax(np.abs(weight.sampled_scales), initial=0.0))
        multiplier = 1 / value if weight.reciprocal else value
        direct, inverse = FP4_MAX * high * multiplier, FP4_MAX * high / multiplier
        if direct > _NVFP4_RANGE and inverse < direct:
            found = f"is {value:g}: weights would reach {direct:.3g}, its reciprocal {inverse:.3g}"
            yield self.finding(info.name, info.file, found)


@register
class InputScaleValue(_WeightRule):
    """input_scale (input_global_scale) is zero, negative, NaN or infinite."""

    id = "input-scale-value"
    effect = "activations become NaN or zero in stock vLLM; Assay scales them per token instead"
    action = "calibrate again, or remove it and mark the layer dynamic"
    origin = "vLLM #54189 (zeros)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        value, info = weight.stored_input_scale, weight.info("input_scale")
        if value is not None and info is not None and _unusable(value):
            yield self.finding(info.name, info.file, f"is {value:g}")


@register
class InputScaleReciprocal(_WeightRule):
    """input_scale is the reciprocal of what its dialect stores, or a placeholder of 1: the input
    would reach 2,688 and more, where V4's are normalised or clamped below 100 or so."""

    id = "input-scale-reciprocal"
    effect = "activations are flushed to zero: the layer answers nothing"
    action = "store input_scale = amax / (6 * 448); only dialect C stores the reciprocal"
    origin = "modular #6600 (compressed-tensors divides by these, ModelOpt multiplies)"

    def judge(self, weight: Weight, scale: TensorInfo) -> Iterator[Finding]:
        value, info = weight.stored_input_scale, weight.info("input_scale")
        if value is None or info is None or _unusable(value):
            return
        multiplier = 1 / value if weight.reciprocal else value
        if multiplier >= 1:
            reach, other = _NVFP4_RANGE * multiplier, _NVFP4_RANGE / multiplier
            sure = min(np.log10(multiplier) / 2, 1)
            found = f"is {value:g}: inputs up to {reach:.3g}, by its reciprocal up to {other:.3g}"
            confidence = "certain" if sure == 1 else "by magnitude; near 1 it may be an outlier"
            yield self.finding(info.name, info.file, found, confidence=confidence)


@register
class WeightNotFinite(DeepRule):
    """A plain or FP8 weight holds a NaN or an infinity (large tensors are sampled)."""

    id = "weight-nonfinite"
    effect = "NaN spreads to every token that meets it"
    action = _EXPORT_AGAIN

    def check(self, block: Block) -> Iterator[Finding]:
        for weight in block.weights.values():
            if weight.precision in (*_FOUR_BIT, Precision.INT):
                continue
            info = weight.info("weight") or next(iter(weight.module.tensors.values()))
            bad = 0
            for dtype, raw in weight.sample():
                if dtype == "F8_E4M3":
                    bad += int(((raw & 0x7F) == 0x7F).sum())
                elif dtype == "BF16":
                    bad += int(((raw.view(np.uint16) & 0x7F80) == 0x7F80).sum())
                else:
                    bad += int((~np.isfinite(as_float32(raw, dtype))).sum())
            if bad:
                yield self.finding(info.name, info.file, f"{bad} values are NaN or infinite")


@register
class HashTable(DeepRule):
    """An entry of a hash layer's table names an expert that does not exist."""

    id = "hash-table"
    effect = "the token's lookup reads past the experts: a crash, or another layer's weights"
    action = "take the table from the checkpoint's origin"

    def check(self, block: Block) -> Iterator[Finding]:
        weight = block.weights.get("tid2eid")
        if weight is None or weight.precision is not Precision.INT:
            return
        info = next(iter(weight.module.tensors.values()))
        raw = weight.whole()
        wide = info.dtype == "I64"
        table = (raw.view(np.int64) if wide else raw.view(np.int32)).astype(np.int64)
        bad = int(((table < 0) | (table >= block.experts)).sum())
        if bad:
            found = f"{bad} entries are outside 0..{block.experts - 1}"
            yield self.finding(info.name, info.file, found)


_FUSED = (
    ("fused_wqa_wkv", "wq_a", "wkv"),
    ("gate_up", "w1", "w3"),
    ("fused_wkv_wgate", "wkv", "wgate"),
)


@register
class PartitionScales(DeepRule):
    """Two weights that run as one fused matrix have different global scales."""

    id = "partition-scales"
    severity = Severity.WARNING
    effect = "right under Assay; stock vLLM uses one scale for both and is wrong by their ratio"
    action = "serve with Assay's plugin"
    origin = "vLLM #47515, #54974; SGLang #29151 (a relative: GSM8K 0.005 instead of 0.945)"

    def measure(self, block: Block) -> Iterator[Measurement]:
        for fused, one, other in _FUSED:
            pair = [block.weights.get(one), block.weights.get(other)]
            scales = [w.stored_global_scale or 0.0 if w else 0.0 for w in pair]
            if pair[0] is None or scales[0] == scales[1] or any(map(_unusable, scales)):
                continue
            ratio = max(scales[0] / scales[1], scales[1] / scales[0])
            info = pair[0].info("global_scale")
            assert info is not None
            yield Measurement(fused, pair[0].name, info.file, ratio)

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        groups: dict[str, list[Measurement]] = defaultdict(list)
        for measurement in measured:
            groups[measurement.group].append(measurement)
        for fused, pairs in groups.items():
            worst = max(pairs, key=lambda pair: (pair.value, pair.tensor))
            found = (
                f"{len(pairs)} {fused} matrices have partitions of different scales, "
                f"by a factor of up to {worst.value:.3g} (here)"
            )
            yield self.finding(worst.tensor, worst.file, found)


_LAYER_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)")


@register
class ExpertsEqual(DeepRule):
    """Two routed experts of a layer are the same, bit for bit in all that is sampled."""

    id = "experts-equal"
    effect = "an expert is missing and another runs in its place: some topics are nonsense"
    action = "export the layer's experts again; look for a shard that was copied twice"

    def measure(self, block: Block) -> Iterator[Measurement]:
        match = _LAYER_EXPERT.fullmatch(block.prefix)
        if match is None:
            return
        for leaf, weight in block.weights.items():
            if weight.scale_info is None or not weight.codes.any():
                continue
            digest = hashlib.blake2b(weight.scales[weight.sampled_rows].tobytes(), digest_size=16)
            digest.update(weight.codes.tobytes())
            info = weight.scale_info
            value = (int(match.group(2)), digest.digest())
            yield Measurement(f"{match.group(1)}.{leaf}", weight.name, info.file, value)

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        first: dict[tuple[str, bytes], Measurement] = {}
        for one in sorted(measured, key=lambda m: (m.group, m.value[0])):
            original = first.setdefault((one.group, one.value[1]), one)
            if original is not one:
                yield self.finding(one.tensor, one.file, f"is equal to {original.tensor}")


@register
class IndexerEqualsMain(DeepRule):
    """The indexer's compressor begins with the main compressor's own bytes."""

    id = "indexer-equals-main"
    effect = "the indexer selects the wrong tokens: fluent at first, nonsense once it selects"
    action = "export with `attn.indexer.compressor.*`; it is not the main compressor"
    origin = "the symptom of SGLang #33397 (clean to 1.7 k tokens, corrupt from 4 k)"

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        modules = {module.name: module for module in survey.modules}
        for name, module in modules.items():
            main = modules.get(name.replace(".indexer.compressor.", ".compressor."))
            if main is None or main is module or not name.endswith((".wkv", ".wgate")):
                continue
            one, other = (Weight(m, data) for m in (module, main))
            carriers = [w.info("codes") or w.info("weight") or w.module.tensors.get("weight")
                        for w in (one, other)]  # fmt: skip
            if None in carriers or one.precision is not other.precision:
                continue
            assert carriers[0]
            assert carriers[1]
            count = min(carriers[0].nbytes, carriers[1].nbytes, 2**20)
            mine = data.read(carriers[0], 0, count)
            if mine.any() and np.array_equal(mine, data.read(carriers[1], 0, count)):
                found = f"begins with the same {count} bytes as {other.name}"
                yield self.finding(one.name, carriers[0].file, found)


@register
class Padding(DeepRule):
    """A tensor was stored with padding, and the padding is not zero."""

    id = "padding-nonzero"
    effect = "kernels that read whole tiles add stale rows to the result"
    action = "store tensors without padding; Assay pads at load time, with zeros"
    origin = "vLLM #45888, #48898 (stale padded scale rows gave garbage)"

    def conclude(
        self, survey: Survey, data: TensorReader, measured: list[Measurement]
    ) -> Iterator[Finding]:
        infos = {info.name: info for info in survey.infos}
        for fault in survey.faults:
            info = infos.get(fault.tensor or "")
            expected = fault.expected
            if info is None or expected is None or fault.fault not in (
                Fault.SHAPE,
                Fault.SCALE_SHAPE,
            ):  # fmt: skip
                continue
            if len(expected) != 2 or len(info.shape) != 2 or is_main_compressors(fault, survey):
                continue
            rows, cols = expected
            full_rows, full_cols = padded(rows, cols)
            if info.shape[0] not in (rows, full_rows) or info.shape[1] not in (cols, full_cols):
                continue
            width = info.nbytes // max(info.shape[0] * info.shape[1], 1)
            grid = data.read(info).reshape(info.shape[0], info.shape[1], width)
            stale = int((grid[rows:] != 0).any(-1).sum() + (grid[:rows, cols:] != 0).any(-1).sum())
            if stale:
                found = f"{stale} padding elements beyond {list(expected)} are not zero"
                yield self.finding(info.name, info.file, found)


@register
class ManifestChecksum(Rule):
    """A file's SHA-256 is not the one that the conversion's manifest has."""

    id = "manifest-checksum"
    effect = "some bytes are not what was converted: anything from nothing to garbage"
    action = "copy the file again, or convert again"
    origin = "silent disk and network corruption"

    def judge(self, name: str, expected: str, actual: str) -> Iterator[Finding]:
        if actual != expected:
            found = f"SHA-256 is {actual[:12]}..., was {expected[:12]}..."
            yield self.finding(name, MANIFEST_FILE, found)
