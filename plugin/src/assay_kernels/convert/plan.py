"""What a conversion will write: decided from headers alone, and the same every time.

A plan is a list of shards, each a list of weights with the step that makes them. Its fingerprint
covers the source's headers, sizes and times, the target and every tensor's place, so that a resumed
conversion continues exactly what was begun, or refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay_kernels import __version__
from assay_kernels.checkpoint.config import CONFIG_FILE
from assay_kernels.checkpoint.data import TensorReader
from assay_kernels.checkpoint.dialect import Dialect
from assay_kernels.checkpoint.errors import CheckpointError
from assay_kernels.checkpoint.export import (
    RECIPES,
    SCHEMES,
    Marks,
    dialect_config,
    dynamic_marks,
    unquantised_linears,
)
from assay_kernels.checkpoint.header import DTYPE_BYTES, data_start
from assay_kernels.checkpoint.manifest import MANIFEST_FILE
from assay_kernels.checkpoint.names import format_name
from assay_kernels.checkpoint.reader import INDEX_FILE, Checkpoint, Module
from assay_kernels.checkpoint.spec import Plain, WeightSpec, mtp_specs, weight_specs
from assay_kernels.checkpoint.weights import (
    BLOCK_FP8,
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    NATIVE_MXFP4,
    Precision,
)
from assay_kernels.convert.steps import Copy, Output, Plainly, QuantiseFP8, Step, nvfp4_step
from assay_kernels.numerics.nvfp4 import E4M3_MAX, FP4_MAX

SINGLE_FILE = "model.safetensors"

TARGETS = (Dialect.A, Dialect.B, Dialect.C, Dialect.BF16)

_PLAIN = {Plain.BF16: "BF16", Plain.FP32: "F32"}

_MTP_ALLOWED = {
    Dialect.A: {NATIVE_MXFP4.precision, BLOCK_FP8.precision, Precision.NVFP4},
    Dialect.B: {Precision.NVFP4},
    Dialect.C: {BLOCK_FP8.precision, Precision.NVFP4},
}


@dataclass(frozen=True)
class Placed:
    """One tensor of a shard. begin: byte of the data section."""

    name: str
    step: Step
    output: Output
    begin: int


@dataclass(frozen=True)
class Shard:
    file: str
    steps: list[Step]
    tensors: list[Placed]
    header: bytes

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        last = self.tensors[-1]
        return len(self.header) + last.begin + last.output.nbytes


@dataclass(frozen=True)
class Plan:
    """dynamic: NVFP4 weights without an input_scale. mtp: one line on what becomes of MTP."""

    target: Dialect
    shards: list[Shard]
    config: dict[str, Any]
    companions: list[Path]
    source: dict[str, Any]
    fingerprint: str
    dynamic: int
    mtp: str

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def companions(directory: Path) -> list[Path]:
    """Files of a checkpoint that are not weights: tokenizer, generation config and the like."""
    own = {CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, "hf_quant_config.json"}
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.suffix != ".safetensors"
        and path.name not in own
        and not path.name.startswith(".")
    ]


def source_fingerprint(checkpoint: Checkpoint, *, times: bool) -> str:
    """SHA-256 over config.json and every shard's name, size and header.

    times: modification times too, which tell a source that changed under a conversion; a manifest
    leaves them out, because a copy of the source is the same source
    """
    digest = hashlib.sha256((checkpoint.directory / CONFIG_FILE).read_bytes())
    files = {info.file for m in checkpoint.modules().values() for info in m.tensors.values()}
    for file in sorted(files):
        path = checkpoint.directory / file
        stat = path.stat()
        digest.update(f"\n{file} {stat.st_size} {stat.st_mtime_ns if times else ''}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(data_start(path)))
    return digest.hexdigest()


class _InputScales:
    """input_scale of each NVFP4 weight: from calibration, else from the source, else none."""

    def __init__(self, checkpoint: Checkpoint, amax: Mapping[str, float] | None) -> None:
        self._checkpoint, self._amax = checkpoint, amax
        self._data = TensorReader(checkpoint.directory)

    def of(self, module: Module) -> float | None:
        if self._amax is not None and module.name in self._amax:
            seen = self._amax[module.name]
            return seen / (FP4_MAX * E4M3_MAX) if seen > 0 else None
        if module.precision is not Precision.NVFP4:
            return None
        info = module.tensor("input_scale")
        if info is None:
            return None
        scale = self._checkpoint.input_scale(module, self._data.scalar(info))
        return None if scale is None else float(scale)


def _copy(module: Module) -> Copy:
    """FP8 scales take DeepSeek's name; everything else keeps its own."""
    if module.encoding is None:
        return Copy(module, dict(module.tensors))
    roles = module.encoding.roles
    found = {role: module.tensor(role) for role in roles}
    return Copy(module, {roles[r].names[0]: info for r, info in found.items() if info is not None})


def _step(module: Module, spec: WeightSpec, target: Dialect, scales: _InputScales) -> Step:
    precision = RECIPES[target].get(spec.kind)
    if precision is Precision.NVFP4:
        encoding = COMPRESSED_NVFP4 if target is Dialect.C else MODELOPT_NVFP4
        return nvfp4_step(module, encoding, scales.of(module))
    if precision is Precision.FP8_BLOCK:
        return _copy(module) if module.precision is Precision.FP8_BLOCK else QuantiseFP8(module)
    if module.precision is Precision.INT:
        return _copy(module)
    dtype = _PLAIN[spec.plain]
    same = module.encoding is None and next(iter(module.tensors.values())).dtype == dtype
    return _copy(module) if same else Plainly(module, dtype)


def _mtp_steps(
    checkpoint: Checkpoint, target: Dialect, scales: _InputScales
) -> tuple[list[Step], str]:
    """MTP layers keep the precision they have; a dialect that has no place for it goes without."""
    specs = {entry: spec for entry, spec, _ in mtp_specs(checkpoint.config)}
    modules = [m for name, m in checkpoint.modules().items() if name in specs]
    if not modules:
        return [], "the source has no MTP layer"
    if target is Dialect.BF16:
        return [_step(m, specs[m.name], target, scales) for m in modules], "dequantised"
    for module in modules:
        if module.encoding is not None and module.precision not in _MTP_ALLOWED[target]:
            return [], (
                f"skipped: {module.name} is {module.precision}, which dialect {target} cannot "
                "store; the result serves without speculative decoding"
            )
    encoding = COMPRESSED_NVFP4 if target is Dialect.C else MODELOPT_NVFP4
    return [
        nvfp4_step(m, encoding, scales.of(m)) if m.precision is Precision.NVFP4 else _copy(m)
        for m in modules
    ], "carried over as stored"


def _header(tensors: list[Placed]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for placed in tensors:
        header[placed.name] = {
            "dtype": placed.output.dtype,
            "shape": list(placed.output.shape),
            "data_offsets": [placed.begin, placed.begin + placed.output.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shard(file: str, steps: list[Step], target: Dialect) -> Shard:
    """Wide dtypes come first, which keeps all data aligned; a weight's own order stays."""
    named = [
        (format_name(step.entry, output.parameter, SCHEMES[target]), step, output)
        for step in steps
        for output in step.outputs
    ]
    named.sort(key=lambda item: -DTYPE_BYTES[item[2].dtype])
    placed, position = [], 0
    for name, step, output in named:
        placed.append(Placed(name, step, output, position))
        position += output.nbytes
    return Shard(file, steps, placed, _header(placed))


def _groups(steps: list[Step], limit: int) -> Iterator[list[Step]]:
    group: list[Step] = []
    size = 0
    for step in steps:
        nbytes = sum(output.nbytes for output in step.outputs)
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append(step)
        size += nbytes
    yield group


def make_plan(
    checkpoint: Checkpoint,
    target: Dialect,
    shard_bytes: int,
    amax: Mapping[str, float] | None = None,
) -> Plan:
    """The plan of converting `checkpoint` to `target`.

    amax: entry -> largest magnitude of its input, from calibration
    Raises CheckpointError for a target that is not written.
    """
    if target not in TARGETS:
        raise CheckpointError(CONFIG_FILE, None, f"dialect {target} is read, not written")
    specs = dict(weight_specs(checkpoint.config))
    modules = checkpoint.modules()
    scales = _InputScales(checkpoint, amax)
    main = [_step(modules[entry], spec, target, scales) for entry, spec in specs.items()]
    mtp, mtp_line = _mtp_steps(checkpoint, target, scales)

    nvfp4, scaled = [], set()
    for step in [*main, *mtp]:
        parameters = {output.parameter for output in step.outputs}
        if parameters & {"weight_scale_2", "weight_global_scale"}:
            nvfp4.append(step.entry)
            if parameters & {"input_scale", "input_global_scale"}:
                scaled.add(step.entry)
    unquantised = unquantised_linears(specs, target)
    if mtp and target is not Dialect.BF16 and not any(step.entry in nvfp4 for step in mtp):
        unquantised += ("mtp.*",)
    marks = Marks(unquantised, dynamic_marks(nvfp4, scaled, target))
    config = dialect_config(checkpoint.config.raw, target, marks)
    if mtp_line.startswith("skipped"):
        config["num_nextn_predict_layers"] = 0

    groups = list(_groups([*main, *mtp], shard_bytes))
    total = len(groups)
    files = [
        SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        for number in range(1, total + 1)
    ]
    shards = [_shard(file, group, target) for file, group in zip(files, groups, strict=True)]
    digest = hashlib.sha256(source_fingerprint(checkpoint, times=True).encode())
    digest.update(f"{__version__} {target}".encode())
    digest.update(json.dumps(amax, sort_keys=True).encode())
    digest.update(json.dumps(config, sort_keys=True).encode())
    for shard in shards:
        digest.update(shard.file.encode() + shard.header)
    source = {
        "dialect": str(checkpoint.dialect),
        "fingerprint": source_fingerprint(checkpoint, times=False),
    }
    return Plan(
        target,
        shards,
        config,
        companions(checkpoint.directory),
        source,
        digest.hexdigest(),
        len(nvfp4) - len(scaled),
        mtp_line,
    )
