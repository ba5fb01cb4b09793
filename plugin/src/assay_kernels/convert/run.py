"""Carrying out a conversion: shards in parallel, everything that makes it a checkpoint last."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay_kernels import __version__
from assay_kernels.checkpoint.config import CONFIG_FILE
from assay_kernels.checkpoint.data import TensorReader
from assay_kernels.checkpoint.dialect import Dialect
from assay_kernels.checkpoint.manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    file_sha256,
    read_manifest,
)
from assay_kernels.checkpoint.reader import INDEX_FILE, Checkpoint, open_checkpoint
from assay_kernels.checkpoint.writer import SHARD_BYTES
from assay_kernels.convert.plan import SINGLE_FILE, Plan, Shard, make_plan, source_fingerprint
from assay_kernels.convert.steps import Source
from assay_kernels.convert.work import WORK_FOLDER, InUseError, Work, clear_left_over
from assay_kernels.progress import Progress, progress

SPARE_BYTES = 64 * 2**20
"""Room left free beside the plan's bytes: index, manifest, journal, the file system's own."""

WRITE_BACK_BYTES = 16 * 2**20
"""Bytes of a shard after which the disk is set to work."""

Calibrate = Callable[[Checkpoint], Mapping[str, float]]


class ConversionError(Exception):
    """A conversion that cannot begin. The message is one line."""


@dataclass(frozen=True)
class Outcome:
    """nbytes: size of the new shards; resumed: shards found finished; manifest: as written."""

    nbytes: int
    shards: int
    resumed: int
    manifest: Mapping[str, Any]


def _check_places(source: Path, destination: Path) -> None:
    one, other = source.resolve(), destination.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConversionError(
            f"destination {destination} must be outside the source {source}, and the reverse"
        )
    if destination.exists() and not destination.is_dir():
        raise ConversionError(f"destination {destination} is not a directory")


def _finished(
    checkpoint: Checkpoint, destination: Path, target: Dialect, options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The manifest in `destination` if the same conversion has already been carried out there."""
    if (destination / WORK_FOLDER).exists() or not (destination / CONFIG_FILE).exists():
        return None
    manifest = read_manifest(destination)
    if manifest is None or manifest.get("dialect") != target:
        return None
    fingerprint = source_fingerprint(checkpoint, times=False)
    same = manifest.get("source", {}).get("fingerprint") == fingerprint
    return manifest if same and manifest.get("options") == options else None


def _check_empty(destination: Path) -> None:
    if (destination / WORK_FOLDER).is_dir() or not destination.is_dir():
        return
    if (destination / CONFIG_FILE).exists() or any(destination.glob("*.safetensors")):
        raise FileExistsError(f"{destination} already holds a checkpoint or a part of one")


def _check_space(plan: Plan, work: Work, destination: Path) -> None:
    finished = sum(entry["bytes"] for entry in work.done.values())
    needed = plan.nbytes - finished + sum(p.stat().st_size for p in plan.companions) + SPARE_BYTES
    free = shutil.disk_usage(destination).free
    if needed > free:
        raise ConversionError(
            f"{destination} has {free / 1e9:.2f} GB free, the conversion needs "
            f"{needed / 1e9:.2f} GB; nothing was written"
        )


def _write_shard(shard: Shard, source: Source, work: Work, bar: Progress) -> None:
    for step in shard.steps:
        step.prepare(source)
    digest = hashlib.sha256(shard.header)
    with work.file(shard.file) as stream:
        stream.write(shard.header)
        unsynced = 0
        for placed in shard.tensors:
            written = 0
            for piece in placed.step.stream(source, placed.output):
                view = piece.data
                digest.update(view)
                while view:
                    view = view[stream.write(view) :]
                written += piece.nbytes
                unsynced += piece.nbytes
                bar.advance(piece.nbytes)
                if unsynced >= WRITE_BACK_BYTES:
                    # Linux begins to write such pages out: the disk works while we compute, and
                    # the fsync at the end finds little to do.
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    unsynced = 0
            assert written == placed.output.nbytes, placed.name
    reports = {step.entry: step.report() for step in shard.steps}
    scales = {step.entry: step.scales() for step in shard.steps}
    work.note(
        {
            "file": shard.file,
            "bytes": shard.nbytes,
            "sha256": digest.hexdigest(),
            "tensors": {entry: report for entry, report in reports.items() if report},
            "scales": {entry: bits for entry, bits in scales.items() if bits},
        }
    )


def _write_shards(plan: Plan, source: Source, work: Work, jobs: int) -> None:
    left = [shard for shard in plan.shards if shard.file not in work.done]
    with progress("converting", sum(shard.nbytes for shard in left)) as bar:
        pool = ThreadPoolExecutor(max_workers=jobs)
        try:
            futures = [pool.submit(_write_shard, s, source, work, bar) for s in left]
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _write_json(work: Work, name: str, value: Mapping[str, Any]) -> None:
    with work.file(name) as stream:
        view = memoryview(json.dumps(value, indent=2).encode() + b"\n")
        while view:
            view = view[stream.write(view) :]


def _manifest(plan: Plan, work: Work, destination: Path, others: list[str]) -> dict[str, Any]:
    """The same for the same plan, whenever and however often it was interrupted."""
    files = {
        shard.file: {key: work.done[shard.file][key] for key in ("bytes", "sha256")}
        for shard in plan.shards
    }
    for name in others:
        path = destination / name
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    tensors: dict[str, Any] = {}
    scales: dict[str, Any] = {}
    for shard in plan.shards:
        tensors |= work.done[shard.file]["tensors"]
        scales |= work.done[shard.file]["scales"]
    errors: dict[str, float] = {}
    for report in tensors.values():
        pair = f"{report['from']} -> {report['to']}"
        errors[pair] = max(errors.get(pair, 0.0), report.get("relative_error", 0.0))
    manifest: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "tool": f"assay-kernels {__version__}",
        "dialect": str(plan.target),
        "source": plan.source,
        "dynamic_inputs": plan.dynamic,
        "mtp": plan.mtp,
        "largest_relative_error": errors,
        "not_exact": sorted(name for name, r in tensors.items() if r.get("exact") is False),
        "files": files,
        "tensors": tensors,
    }
    if scales:
        manifest["global_scales"] = scales
    return manifest


def _finish(
    plan: Plan, work: Work, destination: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    others = [path.name for path in plan.companions]
    for path in plan.companions:
        with work.file(path.name) as stream, path.open("rb") as original:
            shutil.copyfileobj(original, stream)
    if plan.shards[0].file != SINGLE_FILE:
        weight_map = {placed.name: shard.file for shard in plan.shards for placed in shard.tensors}
        total = sum(placed.output.nbytes for shard in plan.shards for placed in shard.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(work, INDEX_FILE, index)
        others.append(INDEX_FILE)
    manifest = {**_manifest(plan, work, destination, others), "options": dict(options)}
    _write_json(work, MANIFEST_FILE, manifest)
    _write_json(work, CONFIG_FILE, plan.config)
    work.remove()
    return manifest


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    target: Dialect,
    *,
    shard_bytes: int = SHARD_BYTES,
    calibrate: Calibrate | None = None,
    jobs: int | None = None,
) -> Outcome:
    """Write the checkpoint in `source` as `target` into `destination`, or go on where a killed run
    of the same conversion stopped.

    NVFP4 that stays NVFP4 keeps codes and block scales bit for bit; MXFP4 becomes NVFP4 exactly, or
    is named in the manifest; what the target stores otherwise is dequantised and rounded once.
    MTP layers keep their precision, or are left out where the target cannot store it.

    shard_bytes: tensor bytes of a shard before the next one starts
    calibrate: gives the largest input magnitude of entries; without it, and without input scales in
        the source, activations are marked dynamic
    jobs: shards written at a time; None takes the number of CPUs
    Raises ConversionError or FileExistsError where it cannot begin, CheckpointError for a source
    that is not right.
    """
    origin, goal = Path(source), Path(destination)
    checkpoint = open_checkpoint(origin)
    options = {"shard_bytes": shard_bytes, "calibrated": calibrate is not None}
    done = _finished(checkpoint, goal, target, options)
    if done is not None:
        clear_left_over(goal)
        sizes = [
            entry["bytes"] for name, entry in done["files"].items() if name.endswith(".safetensors")
        ]
        return Outcome(sum(sizes), len(sizes), len(sizes), done)
    _check_empty(goal)
    _check_places(origin, goal)
    threads = torch.get_num_threads()
    goal_was_there = goal.exists()
    try:
        work = Work(goal)
    except InUseError as error:
        raise ConversionError(str(error)) from None
    begun = work.begun
    try:
        amax = None
        if calibrate is not None:
            amax = work.recall("calibration.json", lambda: dict(calibrate(checkpoint)))
        plan = make_plan(checkpoint, target, shard_bytes, amax)
        work.begin(plan.fingerprint)
        _check_space(plan, work, goal)
        resumed, begun = len(work.done), True
        torch.set_num_threads(1)  # shards are the parallelism; sums keep one order
        with TensorReader(origin) as data:
            _write_shards(plan, Source(checkpoint, data), work, jobs or os.cpu_count() or 1)
        manifest = _finish(plan, work, goal, options)
    except InUseError as error:
        raise ConversionError(str(error)) from None
    finally:
        torch.set_num_threads(threads)
        if not begun:  # refused before the first shard: as if nothing had been asked
            work.remove()
            if not goal_was_there:
                goal.rmdir()
        work.close()
    return Outcome(plan.nbytes, len(plan.shards), resumed, manifest)


def render(outcome: Outcome) -> str:
    """What was done, for people."""
    manifest = outcome.manifest
    resumed = f", {outcome.resumed} of them found finished" if outcome.resumed else ""
    source = manifest["source"]["dialect"]
    lines = [
        f"{source} -> {manifest['dialect']}: {outcome.nbytes / 1e9:.3f} GB in "
        f"{outcome.shards} shards{resumed}"
    ]
    reports = manifest["tensors"].values()
    exact = sum(1 for report in reports if report.get("exact"))
    if exact:
        lines.append(f"{exact} MXFP4 weights became NVFP4 exactly, proven scale by scale")
    for name in manifest["not_exact"]:
        report = manifest["tensors"][name]
        lines.append(
            f"{name} is not exact: its exponents span {report['octaves']} octaves, 18 fit; "
            f"relative error {report['relative_error']:.3g}"
        )
    for pair, error in manifest["largest_relative_error"].items():
        if error and not pair.startswith("mxfp4"):
            lines.append(f"{pair}: relative error at most {error:.4g}")
    if manifest["dynamic_inputs"]:
        lines.append(f"{manifest['dynamic_inputs']} weights have no input_scale: marked dynamic")
    lines.append(f"MTP: {manifest['mtp']}")
    return "\n".join(lines)
