"""Opening a checkpoint: headers first and completely, tensor data only when asked for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from assay_kernels.checkpoint.config import V4Config, parse_config, read_json, read_raw_config
from assay_kernels.checkpoint.dialect import Dialect, declared_dialect, detect_dialect
from assay_kernels.checkpoint.errors import CheckpointError, CheckpointWarning, Fault
from assay_kernels.checkpoint.header import TensorInfo, scan_file
from assay_kernels.checkpoint.manifest import original_scale, read_manifest
from assay_kernels.checkpoint.names import Scheme, format_name, is_bare, parse_name
from assay_kernels.checkpoint.spec import Kind, Plain, WeightSpec, mtp_specs, weight_specs
from assay_kernels.checkpoint.weights import (
    BLOCK_FP8,
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    NATIVE_MXFP4,
    PLAIN_PRECISION,
    Encoding,
    FP8BlockWeight,
    MXFP4Weight,
    NVFP4Weight,
    Precision,
    Weight,
    as_nvfp4,
    plain,
)
from assay_kernels.numerics.mxfp4 import NotLosslessError
from assay_kernels.numerics.nvfp4 import usable_scale

INDEX_FILE = "model.safetensors.index.json"

_ENCODINGS: Mapping[Dialect, tuple[Encoding, ...]] = {
    Dialect.NATIVE: (NATIVE_MXFP4, BLOCK_FP8),
    Dialect.A: (MODELOPT_NVFP4, BLOCK_FP8),
    Dialect.B: (MODELOPT_NVFP4,),
    Dialect.C: (COMPRESSED_NVFP4, BLOCK_FP8),
    Dialect.BF16: (),
}

_PLAIN_DTYPES = {
    Plain.BF16: ("BF16", "F16", "F32"),
    Plain.FP32: ("F32", "BF16", "F16"),
    Plain.INT: ("I64", "I32"),
}

_QUANTISABLE = frozenset(Kind) - {Kind.PLAIN}


@dataclass(frozen=True)
class Module:
    """One logical weight of the checkpoint.

    name: canonical entry name; shape: logical shape; tensors: stored tensors by parameter name
    (the entry itself under "" when it is a bare tensor); encoding: None when not quantised
    """

    name: str
    kind: Kind
    precision: Precision
    shape: tuple[int, ...]
    tensors: Mapping[str, TensorInfo]
    encoding: Encoding | None = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def tensor(self, role: str) -> TensorInfo | None:
        """The stored tensor that fills `role` of the encoding, or None."""
        assert self.encoding is not None
        for name in self.encoding.roles[role].names:
            if name in self.tensors:
                return self.tensors[name]
        return None


class Checkpoint:
    """An opened checkpoint. Tensors are memory-mapped and read on `load`."""

    def __init__(
        self, directory: Path, config: V4Config, dialect: Dialect, modules: Iterable[Module]
    ) -> None:
        self.directory = directory
        self.config = config
        self.dialect = dialect
        self._modules = {module.name: module for module in modules}
        self._warnings: dict[str, CheckpointWarning] = {}
        self._open_files: dict[str, Any] = {}
        reciprocal = dialect is Dialect.C
        self._manifest = (read_manifest(directory) or {}) if reciprocal else {}

    def modules(self) -> Mapping[str, Module]:
        """Every logical weight by canonical entry name, in the order of the forward pass."""
        return self._modules

    def precision(self, entry: str) -> Precision:
        """What a canonical entry is stored as; KeyError for a name that is not in `modules()`."""
        return self._modules[entry].precision

    @property
    def warnings(self) -> list[CheckpointWarning]:
        """Layers whose input_scale is missing or unusable, among those loaded so far."""
        return list(self._warnings.values())

    def raw(self, info: TensorInfo) -> Tensor:
        """A tensor exactly as stored."""
        try:
            if info.file not in self._open_files:
                path = self.directory / info.file
                self._open_files[info.file] = safe_open(path, framework="pt")
            tensor: Tensor = self._open_files[info.file].get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(info.file, info.name, f"cannot be read: {error}") from None
        return tensor

    def load(self, name: str) -> Weight:
        """The weight of a canonical entry, normalised.

        NVFP4Weight (scales are multipliers in every dialect), FP8BlockWeight (scale as float32),
        MXFP4Weight (native experts), or the tensor as stored. Raises KeyError for a name that is
        not in `modules()` and CheckpointError for a global scale that no kernel could use.
        """
        module = self._modules[name]
        encoding = module.encoding
        if encoding is None:
            return self.raw(next(iter(module.tensors.values())))
        stored = {role: module.tensor(role) for role in encoding.roles}
        values = {role: self.raw(info) for role, info in stored.items() if info is not None}
        if encoding is BLOCK_FP8:
            return FP8BlockWeight(values["weight"], values["scale"].float())
        if encoding is NATIVE_MXFP4:
            return MXFP4Weight(values["codes"].view(torch.uint8), values["scale"].view(torch.uint8))
        return NVFP4Weight(
            values["codes"],
            values["block_scale"],
            self.global_scale(module, values["global_scale"]),
            self.input_scale(module, values.get("input_scale")),
        )

    def _multiplier(self, module: Module, role: str, stored: Tensor) -> Tensor:
        scale = stored.reshape(())
        if module.encoding is not COMPRESSED_NVFP4:
            return scale
        original = original_scale(self._manifest, module.name, role, scale)
        return scale.reciprocal() if original is None else original

    def global_scale(self, module: Module, stored: Tensor) -> Tensor:
        """The weight's global scale as a multiplier, float32 [].

        Raises CheckpointError where no kernel could use it.
        """
        scale, multiplier = stored.reshape(()), self._multiplier(module, "global_scale", stored)
        if not (usable_scale(scale) and usable_scale(multiplier)):
            info = module.tensor("global_scale")
            assert info is not None
            rule = f"global scale must be finite and positive, is {float(scale)}"
            raise CheckpointError(info.file, info.name, rule)
        return multiplier

    def input_scale(self, module: Module, stored: Tensor | None) -> Tensor | None:
        """The activation scale as a multiplier, or None and a warning: scaled dynamically."""
        if stored is None:
            fault = "has no input_scale"
        else:
            scale, multiplier = stored.reshape(()), self._multiplier(module, "input_scale", stored)
            if usable_scale(scale) and usable_scale(multiplier):
                return multiplier
            fault = f"input_scale {float(scale)} is unusable"
        self._warnings[module.name] = CheckpointWarning(
            module.name, f"{fault}: activations are scaled per token"
        )
        return None


def _shard_files(
    directory: Path, faults: list[CheckpointError]
) -> tuple[list[str], Mapping[str, str] | None]:
    """(shard files that exist, tensor -> file by the index); the index is None where there is none.

    Raises CheckpointError for a directory or an index from which no file can be told.
    """
    if not (directory / INDEX_FILE).is_file():
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        if not files:
            rule = f"holds neither {INDEX_FILE} nor a safetensors file"
            raise CheckpointError(directory.name, None, rule, Fault.UNREADABLE)
        return files, None
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        rule = "weight_map must be a non-empty object"
        raise CheckpointError(INDEX_FILE, None, rule, Fault.INDEX)
    first_tensor: dict[object, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file:
            rule = f"must name a file beside it, is {file!r}"
            raise CheckpointError(INDEX_FILE, tensor, rule, Fault.INDEX)
        first_tensor.setdefault(file, tensor)
    present = []
    for file in sorted(set(weight_map.values())):
        if (directory / file).is_file():
            present.append(file)
        else:
            rule = f"its shard {file} does not exist"
            faults.append(CheckpointError(INDEX_FILE, first_tensor[file], rule, Fault.INDEX_FILE))
    return present, weight_map


def _scan_files(
    directory: Path, faults: list[CheckpointError]
) -> tuple[list[TensorInfo], bool | frozenset[str]]:
    """(headers of all tensors that could be read, names that may be in what could not).

    The second is True where it cannot be told which tensors the unreadable files held.
    """
    files, weight_map = _shard_files(directory, faults)
    infos: dict[str, TensorInfo] = {}
    lost = set(weight_map.values()) - set(files) if weight_map is not None else set()
    for file in files:
        try:
            found, problem = scan_file(directory / file)
        except CheckpointError as error:
            faults.append(error)
            lost.add(file)
            continue
        if problem is not None:
            faults.append(problem)
        for name, info in found.items():
            if name in infos:
                rule = f"is stored in {infos[name].file} too"
                faults.append(CheckpointError(file, name, rule, Fault.DUPLICATE))
            elif weight_map is not None and weight_map.get(name) != file:
                rule = f"is in this shard, but the index says {weight_map.get(name)!r}"
                faults.append(CheckpointError(file, name, rule, Fault.INDEX_TENSOR))
                infos[name] = info
            else:
                infos[name] = info
    if weight_map is None:
        return list(infos.values()), bool(lost)
    for name, file in weight_map.items():
        if name not in infos and file not in lost:
            rule = "is in the index but not in its shard"
            faults.append(CheckpointError(file, name, rule, Fault.INDEX_TENSOR))
    return list(infos.values()), frozenset(n for n, file in weight_map.items() if file in lost)


def _group(infos: Iterable[TensorInfo]) -> Iterator[CheckpointError | tuple[str, str, TensorInfo]]:
    """(entry, parameter or "", info) of every stored tensor, or what is wrong with its name."""
    seen: dict[tuple[str, str], TensorInfo] = {}
    for info in infos:
        parsed = parse_name(info.name)
        if parsed is None:
            rule = "is not the name of a DeepSeek V4 tensor"
            yield CheckpointError(info.file, info.name, rule, Fault.NAME)
            continue
        key = (parsed[0], parsed[1] or "")
        if key in seen:
            rule = f"is the same weight as {seen[key].name}"
            yield CheckpointError(info.file, info.name, rule, Fault.DUPLICATE)
            continue
        seen[key] = info
        yield (*key, info)


def _choose_encoding(tensors: Mapping[str, TensorInfo], dialect: Dialect) -> Encoding | None:
    """The encoding that a weight's carrier tensor announces; None for a plain one."""
    if "weight_packed" in tensors:
        return COMPRESSED_NVFP4
    carrier = tensors.get("weight")
    if carrier is None:
        return None
    if carrier.dtype == "F8_E4M3":
        return BLOCK_FP8
    if carrier.dtype in ("U8", "I8"):
        # Only the release's MXFP4, which dialect A keeps for its MTP layer, says `scale`.
        return NATIVE_MXFP4 if dialect is Dialect.NATIVE or "scale" in tensors else MODELOPT_NVFP4
    return None


def _allowed(encoding: Encoding, dialect: Dialect, entry: str) -> bool:
    if dialect is Dialect.A and entry.startswith("mtp.") and encoding is NATIVE_MXFP4:
        return True
    return encoding in _ENCODINGS[dialect]


def _classify_plain(entry: str, spec: WeightSpec, tensors: Mapping[str, TensorInfo]) -> Module:
    first = next(iter(tensors.values()))
    name = "" if is_bare(entry) else "weight"
    if name not in tensors:
        rule = f"{entry} has no weight beside it"
        raise CheckpointError(first.file, first.name, rule, Fault.MISSING)
    info = tensors[name]
    extra = sorted(set(tensors) - {name})
    if extra:
        rule = f"belongs to {entry}, whose weight is {info.dtype} and not quantised"
        stray = tensors[extra[0]]
        raise CheckpointError(stray.file, stray.name, rule, Fault.PRECISION)
    if info.dtype not in _PLAIN_DTYPES[spec.plain]:
        rule = f"dtype must be {' or '.join(_PLAIN_DTYPES[spec.plain])}, is {info.dtype}"
        raise CheckpointError(info.file, info.name, rule, Fault.DTYPE)
    if info.shape != spec.shape:
        rule = f"shape must be {list(spec.shape)}, is {list(info.shape)}"
        raise CheckpointError(info.file, info.name, rule, Fault.SHAPE, spec.shape)
    return Module(entry, spec.kind, PLAIN_PRECISION[info.dtype], spec.shape, dict(tensors), None)


_MISSING_ROLE = {
    "block_scale": Fault.SCALE_MISSING,
    "scale": Fault.SCALE_MISSING,
    "global_scale": Fault.GLOBAL_SCALE_MISSING,
}


def _classify_quantised(
    entry: str,
    spec: WeightSpec,
    tensors: Mapping[str, TensorInfo],
    encoding: Encoding,
    dialect: Dialect,
) -> Module:
    first = next(iter(tensors.values()))
    if spec.kind not in _QUANTISABLE:
        rule = f"{entry} must not be quantised"
        raise CheckpointError(first.file, first.name, rule, Fault.PRECISION)
    if not _allowed(encoding, dialect, entry):
        rule = f"{entry} is {encoding.precision}, which dialect {dialect} does not store this way"
        raise CheckpointError(first.file, first.name, rule, Fault.PRECISION)
    module = Module(entry, spec.kind, encoding.precision, spec.shape, dict(tensors), encoding)
    claimed = set()
    for role_name, role in encoding.roles.items():
        info = module.tensor(role_name)
        if info is None:
            if role.optional:
                continue
            missing = f"{first.name.rpartition('.')[0]}.{role.names[0]}"
            rule = f"is missing: {entry} cannot be decoded"
            raise CheckpointError(first.file, missing, rule, _MISSING_ROLE[role_name])
        of_scale = role_name in _MISSING_ROLE
        if info.dtype not in role.dtypes:
            rule = f"dtype must be {' or '.join(role.dtypes)}, is {info.dtype}"
            fault = Fault.SCALE_DTYPE if of_scale else Fault.DTYPE
            raise CheckpointError(info.file, info.name, rule, fault)
        if not role.fits(info, spec.shape):
            expected = role.shape(*spec.shape)
            rule = f"shape must be {list(expected)}, is {list(info.shape)}"
            fault = Fault.SCALE_SHAPE if of_scale else Fault.SHAPE
            raise CheckpointError(info.file, info.name, rule, fault, expected)
        claimed.add(info.name)
    for info in tensors.values():
        if info.name not in claimed:
            rule = f"has no place beside {encoding.precision} in dialect {dialect}"
            raise CheckpointError(info.file, info.name, rule, Fault.PRECISION)
    return module


def _classify(
    entry: str, spec: WeightSpec, tensors: Mapping[str, TensorInfo], dialect: Dialect
) -> Module:
    """The module of one entry; raises CheckpointError for the first rule that it breaks."""
    encoding = _choose_encoding(tensors, dialect)
    if encoding is None:
        return _classify_plain(entry, spec, tensors)
    return _classify_quantised(entry, spec, tensors, encoding, dialect)


def _find_modules(
    config: V4Config,
    dialect: Dialect,
    infos: list[TensorInfo],
    lost: bool | frozenset[str] = False,
) -> Iterator[CheckpointError | Module]:
    """Every module of the checkpoint and everything that is wrong with it, headers only.

    lost: stored names that nobody can say are missing, because their file could not be read
    """
    entries: dict[str, dict[str, TensorInfo]] = {}
    for found in _group(infos):
        if isinstance(found, CheckpointError):
            yield found
        else:
            entry, parameter, info = found
            entries.setdefault(entry, {})[parameter] = info

    has_mtp = any(entry.startswith("mtp.") for entry in entries)
    files = {info.file for info in infos}
    listing = INDEX_FILE if len(files) > 1 else "".join(files)
    scheme = naming_scheme(infos)
    expected = [(entry, spec, True) for entry, spec in weight_specs(config)]
    expected += mtp_specs(config) if has_mtp else ()
    unknown = lost is True
    if not isinstance(lost, bool):
        parsed = (parse_name(name) for name in lost)
        incomplete = {found[0] for found in parsed if found is not None}
    else:
        incomplete = set()
    for entry, spec, required in expected:
        tensors = entries.pop(entry, None)
        if entry in incomplete or (unknown and tensors is None):
            continue
        if tensors is not None:
            try:
                yield _classify(entry, spec, tensors, dialect)
            except CheckpointError as error:
                if not (unknown and error.fault in _MISSING_ROLE.values()):
                    yield error
        elif required:
            stored = format_name(entry, None if is_bare(entry) else "weight", scheme)
            rule = "is missing: no shard holds it"
            yield CheckpointError(listing, stored, rule, Fault.MISSING)
    for entry, tensors in entries.items():
        for info in tensors.values():
            rule = f"{entry} does not exist by config.json"
            yield CheckpointError(info.file, info.name, rule, Fault.STRANGER)


def naming_scheme(infos: Iterable[TensorInfo]) -> Scheme:
    """The scheme that a checkpoint's names follow."""
    told = any(".self_attn." in info.name for info in infos)
    return Scheme.TRANSFORMERS if told else Scheme.DEEPSEEK


@dataclass(frozen=True, eq=False)
class Survey:
    """Everything that headers and config.json say, and everything that is wrong with them.

    config and dialect are None where they could not be told; modules then is empty.
    lost: see `_find_modules`
    """

    directory: Path
    raw_config: Mapping[str, Any]
    config: V4Config | None
    dialect: Dialect | None
    infos: list[TensorInfo]
    modules: list[Module]
    faults: list[CheckpointError]
    lost: bool | frozenset[str]

    def under(self, raw_config: Mapping[str, Any]) -> Survey:
        """The same files, read with another config.json."""
        files = [fault for fault in self.faults if fault.fault in _FILE_FAULTS]
        return _interpret(self.directory, raw_config, self.infos, files, self.lost)


_FILE_FAULTS = frozenset(
    {
        Fault.INDEX_FILE,
        Fault.INDEX_TENSOR,
        Fault.UNREADABLE,
        Fault.HEADER,
        Fault.TRUNCATED,
        Fault.OVERLAP,
    }
)

_FATAL = _FILE_FAULTS | {Fault.CONFIG, Fault.MARK, Fault.INDEX}


def _interpret(
    directory: Path,
    raw_config: Mapping[str, Any],
    infos: list[TensorInfo],
    faults: list[CheckpointError],
    lost: bool | frozenset[str],
) -> Survey:
    config = dialect = None
    modules: list[Module] = []
    try:
        config = parse_config(raw_config)
        if lost and config.quantization is not None:
            dialect = declared_dialect(config.quantization)  # the evidence may be what is lost
        else:
            dialect = detect_dialect(config.quantization, infos)
    except CheckpointError as error:
        faults.append(error)
        if config is not None and config.quantization is not None:
            with suppress(CheckpointError):
                dialect = declared_dialect(config.quantization)
    if config is not None and dialect is not None:
        for found in _find_modules(config, dialect, infos, lost):
            if isinstance(found, Module):
                modules.append(found)
            else:
                faults.append(found)
    return Survey(directory, raw_config, config, dialect, infos, modules, faults, lost)


@contextmanager
def without_collection() -> Iterator[None]:
    """Without the cycle collector, which would walk the growing headers again and again; nothing
    here makes cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def survey_checkpoint(directory: str | os.PathLike[str]) -> Survey:
    """Look at headers and config.json without giving up at the first thing that is wrong.

    Raises CheckpointError only where there is no checkpoint to look at: config.json or index that
    cannot be parsed, no safetensors file.
    """
    path = Path(directory)
    raw_config = read_raw_config(path)
    faults: list[CheckpointError] = []
    with without_collection():
        infos, lost = _scan_files(path, faults)
        return _interpret(path, raw_config, infos, faults, lost)


def scan_checkpoint(directory: str | os.PathLike[str]) -> tuple[Checkpoint, list[CheckpointError]]:
    """The checkpoint with every header-level fault; faulty weights are not in `modules()`.

    Raises CheckpointError where the files cannot be understood at all: config.json, index,
    safetensors headers, dialect.
    """
    survey = survey_checkpoint(directory)
    for fault in survey.faults:
        if fault.fault in _FATAL:
            raise fault
    assert survey.config is not None
    assert survey.dialect is not None
    path = Path(directory)
    return Checkpoint(path, survey.config, survey.dialect, survey.modules), survey.faults


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """A checkpoint whose headers are right in every respect: names, shapes, dtypes, completeness.

    Raises CheckpointError for the first thing that is not.
    """
    checkpoint, faults = scan_checkpoint(directory)
    if faults:
        raise faults[0]
    return checkpoint


def _internal(name: str, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, FP8BlockWeight):
        yield f"{name}.weight", weight.weight
        yield f"{name}.weight_scale_inv", weight.scale
    elif isinstance(weight, NVFP4Weight):
        dynamic = torch.zeros(())
        yield f"{name}.weight", weight.codes
        yield f"{name}.weight_scale", weight.block_scale
        yield f"{name}.weight_scale_2", weight.global_scale
        yield f"{name}.input_scale", dynamic if weight.input_scale is None else weight.input_scale
    else:
        assert isinstance(weight, Tensor)
        yield name if is_bare(name) else f"{name}.weight", weight


def weights_iterator(
    source: str | os.PathLike[str] | Checkpoint,
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) in one form whatever the dialect and naming.

    NVFP4: X.weight uint8 [N, K/2], X.weight_scale float8_e4m3fn [N, K/16], X.weight_scale_2 and
    X.input_scale float32 [] (multipliers; input_scale 0.0 means dynamic). Native MXFP4 comes as
    NVFP4, converted exactly. FP8: X.weight float8_e4m3fn, X.weight_scale_inv float32
    [N/128, K/128]. Others as stored.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    for name, module in checkpoint.modules().items():
        weight = checkpoint.load(name)
        if isinstance(weight, MXFP4Weight):
            try:
                weight = as_nvfp4(weight)
            except NotLosslessError as error:
                info = module.tensors["weight"]
                rule = f"not exact in NVFP4: {error}"
                raise CheckpointError(info.file, info.name, rule) from None
        yield from _internal(name, weight)


def dequantized_state_dict(
    source: str | os.PathLike[str] | Checkpoint, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Canonical names -> plain tensors, floating ones in `dtype`. Holds the whole model."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    state: dict[str, Tensor] = {}
    for name in checkpoint.modules():
        value = plain(checkpoint.load(name))
        key = name if is_bare(name) else f"{name}.weight"
        state[key] = value.to(dtype) if value.is_floating_point() else value
    return state
