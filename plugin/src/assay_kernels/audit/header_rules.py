"""Rules that need no tensor data. The first group says in an operator's words what the loader
refuses; the second reads config.json against the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from assay_kernels.audit.expect import Ignored, contradictions, declared, stored_module
from assay_kernels.audit.rule import Finding, HeaderRule, Severity, register
from assay_kernels.checkpoint.config import CONFIG_FILE
from assay_kernels.checkpoint.dialect import Dialect
from assay_kernels.checkpoint.errors import CheckpointError, Fault
from assay_kernels.checkpoint.export import DYNAMIC_MARK
from assay_kernels.checkpoint.manifest import MANIFEST_FILE, read_manifest
from assay_kernels.checkpoint.names import parse_name
from assay_kernels.checkpoint.reader import Module, Survey
from assay_kernels.checkpoint.spec import Kind
from assay_kernels.checkpoint.weights import MODELOPT_NVFP4, Precision
from assay_kernels.numerics.layout import padded
from assay_kernels.numerics.mxfp4 import MX_BLOCK

_COPY_AGAIN = "copy the file again from where it came"
_EXPORT_AGAIN = "export the checkpoint again"
_NO_START = "the server does not start"


def _entry(fault: CheckpointError) -> str:
    parsed = parse_name(fault.tensor or "")
    return parsed[0] if parsed is not None else ""


def _is_expert(fault: CheckpointError) -> bool:
    return ".ffn.experts." in _entry(fault)


def _in_indexer_compressor(fault: CheckpointError) -> bool:
    return ".attn.indexer.compressor." in _entry(fault)


def _is_mxfp4(fault: CheckpointError, survey: Survey) -> bool:
    """An NVFP4 mark over one UE8M0 byte a block, or over blocks of 32."""
    if survey.dialect not in (Dialect.A, Dialect.B, Dialect.C):
        return False
    if fault.fault is Fault.SCALE_DTYPE:
        return "is F8_E8M0" in fault.rule or "is U8" in fault.rule
    if fault.fault is Fault.SCALE_SHAPE and fault.expected is not None:
        blocks = -(-fault.expected[-1] * 16 // MX_BLOCK) if fault.expected else 0
        return f"is [{fault.expected[0]}, {blocks}]" in fault.rule if blocks else False
    return fault.fault is Fault.PRECISION and f"is {Precision.MXFP4}" in fault.rule


class LoaderRule(HeaderRule):
    """A fault that makes the loader refuse the checkpoint."""

    kinds: ClassVar[frozenset[Fault]]
    effect = _NO_START
    action = _EXPORT_AGAIN

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        """Which of its `kinds` the rule takes; the others have a rule of their own."""
        return True

    def check(self, survey: Survey) -> Iterator[Finding]:
        for fault in survey.faults:
            if fault.fault in self.kinds and self.applies(fault, survey):
                yield self.finding(fault.tensor or fault.file, fault.file, fault.rule)


@register
class ConfigValue(LoaderRule):
    """config.json has a size, ratio or name that no DeepSeek V4 has."""

    id = "config-value"
    kinds = frozenset({Fault.CONFIG})
    action = "take config.json from the checkpoint's origin"


@register
class ConfigMark(LoaderRule):
    """quantization_config names no dialect that is served, or the tensors contradict it."""

    id = "config-mark"
    kinds = frozenset({Fault.MARK})
    effect = "the weights would be read in the wrong format, or the server does not start"
    action = "correct quantization_config, or convert from a checkpoint that is right"
    origin = "vLLM #43454 (KeyError w13_input_scale)"


@register
class ConfigShape(HeaderRule):
    """A value in config.json that every tensor that could tell contradicts."""

    id = "config-shape"
    effect = "weights do not fit their layers, or layers are left out without a word"
    action = "take config.json and shards from the same export"

    def check(self, survey: Survey) -> Iterator[Finding]:
        for wrong in contradictions(survey):
            found = f"{wrong.key} is {wrong.configured}, by the tensors it is {wrong.stored}"
            yield self.finding(wrong.tensor.name, wrong.tensor.file, found)


@register
class IndexFile(LoaderRule):
    """The index names a shard that is not there."""

    id = "index-file"
    kinds = frozenset({Fault.INDEX_FILE})
    action = "finish the download: the file is missing"
    origin = "interrupted downloads (llm-d #857: a full disk)"


@register
class IndexTensor(LoaderRule):
    """Index and shards list different tensors, or the index is none."""

    id = "index-tensor"
    kinds = frozenset({Fault.INDEX_TENSOR, Fault.INDEX})
    effect = "tensors are looked for in the wrong file, and stay uninitialised or stop the server"
    action = "take index and shards from the same export"


@register
class ShardTruncated(LoaderRule):
    """A shard ends before its tensors do."""

    id = "shard-truncated"
    kinds = frozenset({Fault.TRUNCATED})
    effect = "the server stops while loading, or reads past the file"
    action = _COPY_AGAIN
    origin = "interrupted downloads (llm-d #857: a full disk)"


@register
class ShardLayout(LoaderRule):
    """Tensors of a shard overlap or leave gaps: the data is not where the header says."""

    id = "shard-overlap"
    kinds = frozenset({Fault.OVERLAP})
    effect = "two weights share bytes: at least one of them is garbage"
    action = _COPY_AGAIN
    origin = "the safetensors format forbids it (its README, 'Format')"


@register
class ShardHeader(LoaderRule):
    """A shard or a manifest whose header cannot be understood or read."""

    id = "shard-header"
    kinds = frozenset({Fault.HEADER, Fault.UNREADABLE})
    action = _COPY_AGAIN


@register
class TensorName(LoaderRule):
    """A tensor whose name no DeepSeek V4 has, or for which this config.json has no place."""

    id = "tensor-unexpected"
    kinds = frozenset({Fault.NAME, Fault.STRANGER})
    effect = "the tensor is dropped or stops the server; what it should have been is missing"
    action = "export with known names; compare num_hidden_layers and n_routed_experts"
    origin = "vLLM's mapper does not know Transformers' names of V4"


@register
class TensorDuplicate(LoaderRule):
    """The same weight is stored twice: in two shards, or under two names."""

    id = "tensor-duplicate"
    kinds = frozenset({Fault.DUPLICATE})
    effect = "which of the two is served depends on the order of files"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not _is_expert(fault)


@register
class ExpertMissing(LoaderRule):
    """A routed expert that the config counts has no weight."""

    id = "expert-missing"
    kinds = frozenset({Fault.MISSING})
    effect = "tokens routed to it get an uninitialised matrix: noise that depends on the prompt"
    origin = "vLLM #45212 (uninitialised parameters)"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return _is_expert(fault)


@register
class ExpertDuplicate(LoaderRule):
    """A routed expert is stored twice, in two shards or under two names."""

    id = "expert-duplicate"
    kinds = frozenset({Fault.DUPLICATE})
    effect = "which of the two is served depends on the order of files"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return _is_expert(fault)


@register
class IndexerCompressorMissing(LoaderRule):
    """The indexer's own compressor is missing."""

    id = "indexer-compressor-missing"
    kinds = frozenset({Fault.MISSING})
    effect = "the indexer selects the wrong tokens: fluent at first, nonsense once it selects"
    action = "export with `attn.indexer.compressor.*`; it is not the main compressor"
    origin = "the symptom of SGLang #33397 (clean to 1.7 k tokens, corrupt from 4 k)"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return _in_indexer_compressor(fault)


@register
class HeadMissing(LoaderRule):
    """There is no output head, and embeddings are not tied."""

    id = "head-missing"
    kinds = frozenset({Fault.MISSING})
    effect = "every token is drawn from an uninitialised matrix"
    action = "export with lm_head / head, or set tie_word_embeddings if they are tied"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return _entry(fault) == "head"


@register
class WeightMissing(LoaderRule):
    """Any other weight that the config calls for is missing."""

    id = "weight-missing"
    kinds = frozenset({Fault.MISSING})
    effect = "the layer is uninitialised"
    origin = "vLLM #45212 (uninitialised parameters)"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not (_is_expert(fault) or _in_indexer_compressor(fault) or _entry(fault) == "head")


@register
class ScaleMissing(LoaderRule):
    """A quantised weight has no block scale."""

    id = "scale-missing"
    kinds = frozenset({Fault.SCALE_MISSING})
    effect = "codes are scaled by uninitialised memory: NaN or noise"
    origin = "vLLM #45212, #54189"


@register
class GlobalScaleMissing(LoaderRule):
    """An NVFP4 weight has no weight_scale_2 (weight_global_scale in dialect C)."""

    id = "global-scale-missing"
    kinds = frozenset({Fault.GLOBAL_SCALE_MISSING})
    effect = "the matrix is off by a factor of thousands: NaN or constant output"
    origin = "vLLM #45212 (NaN), #54189 (zeros)"


@register
class MXFP4Label(LoaderRule):
    """MXFP4 under an NVFP4 label: UE8M0 scales, or one scale for 32 values."""

    id = "mxfp4-label"
    kinds = frozenset({Fault.SCALE_DTYPE, Fault.SCALE_SHAPE, Fault.PRECISION})
    effect = "exponents are read as E4M3 numbers: every block has the wrong magnitude"
    action = "`assay-kernels convert` from the native checkpoint; MXFP4 to NVFP4 is exact"
    origin = "DeepSeek V4 is released in MXFP4; OCP Microscaling Formats v1.0, section 5.2"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return _is_mxfp4(fault, survey)


@register
class ScaleShape(LoaderRule):
    """A scale's shape is not that of one scale per block (NVFP4: [N, K/16])."""

    id = "scale-shape"
    kinds = frozenset({Fault.SCALE_SHAPE})
    effect = "scales are applied to the wrong blocks, or the server does not start"
    action = "store linear, unpadded scales; kernels reorder them at load time"
    origin = "vLLM #45888, #48898 (padded scale rows)"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not _is_mxfp4(fault, survey)

    def check(self, survey: Survey) -> Iterator[Finding]:
        shapes = {info.name: info.shape for info in survey.infos}
        for finding in super().check(survey):
            expected = next(f.expected for f in survey.faults if f.tensor == finding.tensor)
            stored, hint = shapes.get(finding.tensor, ()), ""
            if expected is not None and len(expected) == 2:
                full = padded(*expected)
                if stored in (full, (full[0] * full[1],)) and stored != expected:
                    hint = " (padded to 128x4 tiles: probably swizzled)"
            yield self.finding(finding.tensor, finding.file, finding.found + hint)


@register
class ScaleDtype(LoaderRule):
    """A scale is stored in a dtype that its format does not have."""

    id = "scale-dtype"
    kinds = frozenset({Fault.SCALE_DTYPE})
    effect = "scales are misread"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not _is_mxfp4(fault, survey)


@register
class WeightShape(LoaderRule):
    """A weight whose shape is not what config.json makes it."""

    id = "weight-shape"
    kinds = frozenset({Fault.SHAPE})

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not is_main_compressors(fault, survey)


def is_main_compressors(fault: CheckpointError, survey: Survey) -> bool:
    """Whether an indexer's compressor has the shape of the main one beside it."""
    if not _in_indexer_compressor(fault) or fault.fault is not Fault.SHAPE:
        return False
    parsed = parse_name(fault.tensor or "")
    assert parsed is not None
    main = (parsed[0].replace(".indexer.", "."), parsed[1])
    shapes = {parse_name(info.name): info.shape for info in survey.infos}
    return shapes.get(main) == shapes.get(parsed)


@register
class IndexerCompressorShape(LoaderRule):
    """The indexer's compressor has the main compressor's shape: the wrong key was exported."""

    id = "indexer-compressor-shape"
    kinds = frozenset({Fault.SHAPE})
    effect = "the indexer selects the wrong tokens: fluent at first, nonsense once it selects"
    action = "export with `attn.indexer.compressor.*`; it is not the main compressor"
    origin = "the symptom of SGLang #33397 (clean to 1.7 k tokens, corrupt from 4 k)"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return is_main_compressors(fault, survey)


@register
class WeightDtype(LoaderRule):
    """A weight is stored in a dtype that cannot hold it."""

    id = "weight-dtype"
    kinds = frozenset({Fault.DTYPE})
    effect = "the weight is misread, or the server does not start"


@register
class WeightFormat(LoaderRule):
    """A weight is quantised in a way that its dialect does not have."""

    id = "weight-format"
    kinds = frozenset({Fault.PRECISION})
    effect = "codes are decoded by the wrong rule, or the server does not start"
    action = "`assay-kernels convert` to the dialect that is meant"

    def applies(self, fault: CheckpointError, survey: Survey) -> bool:
        return not _is_mxfp4(fault, survey)


# ---- config.json against what is stored


class _Declared(HeaderRule):
    """Compares each weight's precision with what config.json says of it."""

    def applies(self, module: Module, wanted: set[Precision]) -> bool:
        raise NotImplementedError

    def check(self, survey: Survey) -> Iterator[Finding]:
        if survey.config is None or survey.dialect is None:
            return
        ignored = Ignored(survey.config)
        for module in survey.modules:
            wanted = declared(survey.config, survey.dialect, module, ignored)
            if not wanted or module.precision in wanted:
                continue
            if module.name.startswith("mtp.") == isinstance(self, MTPPrecision) and self.applies(
                module, wanted
            ):
                info = next(iter(module.tensors.values()))
                said = " or ".join(sorted(wanted))
                found = f"config.json says {said}, stored is {module.precision}"
                yield self.finding(stored_module(module), info.file, found)


_PLAIN = {Precision.BF16, Precision.FP16, Precision.FP32}


@register
class ListedUnquantised(_Declared):
    """config.json lists a layer as quantised, and it is stored unquantised."""

    id = "quantised-by-config-only"
    effect = "the server makes quantised parameters that nothing fills: garbage, or no start"
    action = "add the layer to quantization_config's ignore list, or quantise it"
    origin = "vLLM #43454; ModelOpt's exclude_modules"

    def applies(self, module: Module, wanted: set[Precision]) -> bool:
        return module.precision in _PLAIN


@register
class QuantisedUnlisted(_Declared):
    """A layer is stored quantised, and config.json lists it as something else."""

    id = "quantised-unlisted"
    effect = "codes are read as numbers: garbage, or the server does not start"
    action = "remove the layer from quantization_config's ignore list, or correct its format"
    origin = "vLLM #43454; ModelOpt's exclude_modules"

    def applies(self, module: Module, wanted: set[Precision]) -> bool:
        return module.precision not in _PLAIN


@register
class MTPPrecision(_Declared):
    """An MTP layer's precision differs from what config.json says of it."""

    id = "mtp-precision"
    effect = "draft tokens are garbage (slow, never accepted), or the load fails an assertion"
    action = 'say what it is: dialect A keeps MTP native with "ignore": ["mtp.*"]'
    origin = "vLLM's align_mtp_quant_config: MTP entries that no prefix matches"

    def applies(self, module: Module, wanted: set[Precision]) -> bool:
        return True


@register
class MTPAbsent(HeaderRule):
    """config.json counts MTP layers and there are none."""

    id = "mtp-absent"
    severity = Severity.WARNING
    effect = "speculative decoding with MTP cannot be switched on"
    action = "nothing, unless MTP is wanted; then take a checkpoint that has it"

    def check(self, survey: Survey) -> Iterator[Finding]:
        if survey.config is None or survey.dialect is None or survey.lost:
            return
        count = survey.config.num_nextn_predict_layers
        if count and not any(info.name.startswith(("mtp.", "model.mtp.")) for info in survey.infos):
            found = f"num_nextn_predict_layers is {count}, no tensor is named mtp.*"
            yield self.finding(CONFIG_FILE, CONFIG_FILE, found)


def _without_input_scale(survey: Survey) -> tuple[list[Module], int]:
    """(NVFP4 weights without an input_scale, number of NVFP4 weights)."""
    nvfp4 = [m for m in survey.modules if m.precision is Precision.NVFP4]
    return [m for m in nvfp4 if m.tensor("input_scale") is None], len(nvfp4)


def _marked_dynamic(survey: Survey, module: Module) -> bool:
    quantization = (survey.config.quantization if survey.config else None) or {}
    marked = quantization.get(DYNAMIC_MARK)
    return isinstance(marked, list) and ("*" in marked or stored_module(module) in marked)


@register
class InputScaleMissing(HeaderRule):
    """Some NVFP4 weights have an input_scale, others have none and are not marked dynamic."""

    id = "input-scale-missing"
    effect = "stock vLLM quantises activations by uninitialised memory: NaN, or noise by prompt"
    action = f"calibrate again, or list the layer in quantization_config.{DYNAMIC_MARK}"
    origin = "vLLM #45212 (NaN), #54189 (zeros)"

    def check(self, survey: Survey) -> Iterator[Finding]:
        without, total = _without_input_scale(survey)
        if len(without) == total:
            return
        for module in without:
            if not _marked_dynamic(survey, module):
                name = f"{stored_module(module)}.{_input_scale_name(module)}"
                file = next(iter(module.tensors.values())).file
                found = f"is missing, {total - len(without)} other weights have one"
                yield self.finding(name, file, found)


def _input_scale_name(module: Module) -> str:
    return "input_scale" if module.encoding is MODELOPT_NVFP4 else "input_global_scale"


@register
class DynamicInput(HeaderRule):
    """NVFP4 weights whose activations are scaled per token: marked so, or nothing is calibrated."""

    id = "dynamic-input"
    severity = Severity.WARNING
    effect = "right under Assay, a little slower; stock vLLM reads uninitialised scales"
    action = "`assay-kernels convert --calibrate PROMPTS` records input scales"
    origin = "vLLM #45212"

    def check(self, survey: Survey) -> Iterator[Finding]:
        without, total = _without_input_scale(survey)
        if not without:
            return
        if len(without) == total:
            found = f"none of {total} NVFP4 weights has an input_scale"
            yield self.finding(CONFIG_FILE, CONFIG_FILE, found)
            return
        by_kind: dict[Kind, list[Module]] = defaultdict(list)
        for module in without:
            if _marked_dynamic(survey, module):
                by_kind[module.kind].append(module)
        for kind, modules in by_kind.items():
            first = next(iter(modules[0].tensors.values()))
            found = f"{len(modules)} {kind} weights are marked dynamic, this one first"
            yield self.finding(stored_module(modules[0]), first.file, found)


@register
class ManifestFile(HeaderRule):
    """A file that the conversion's manifest lists is missing or has another size."""

    id = "manifest-file"
    effect = "this is not what was converted and checked"
    action = "copy the checkpoint again, or convert again"

    def check(self, survey: Survey) -> Iterator[Finding]:
        try:
            manifest = read_manifest(survey.directory)
        except CheckpointError as error:
            yield self.finding(error.file, error.file, error.rule)
            return
        for name, entry in (manifest or {"files": {}})["files"].items():
            path = survey.directory / name
            if not path.is_file():
                yield self.finding(name, MANIFEST_FILE, "is listed and missing")
            elif path.stat().st_size != entry["bytes"]:
                found = f"has {path.stat().st_size} bytes, was written with {entry['bytes']}"
                yield self.finding(name, MANIFEST_FILE, found)
