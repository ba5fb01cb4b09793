"""How fast the checkpoint tools are, beside `cat` and `cp` of the same bytes on the same disk.

    make bench-checkpoint                       # about 15 GB of disk, about five minutes
    make bench-checkpoint ARGS='--experts 32'   # smaller

Three figures, each with its bar:
- the header audit of a whole V4-Pro layout in dialect B: 61 layers, 384 experts, real names and
  shapes, about 280,000 tensors in sparse files (header parsing is all the work there is);
- the deep audit of real data (one V4-Pro layer, native and converted, the converted one with the
  SHA-256 of every byte) beside `cat` of the same files to /dev/null;
- the conversion native -> A of that layer, checksums and fsync included, beside `cp` and `sync` of
  the same files.

A tool and its yardstick run in pairs that change places from round to round, each with the page
cache of its input dropped; the ratio is the median over the pairs, so that a disk or a neighbour
that slows down does it to both. The scratch folder must be on the disk that is meant (--scratch).
An exit code of 1 says that a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from assay_kernels.audit import audit
from assay_kernels.checkpoint import Dialect
from assay_kernels.checkpoint.config import parse_config
from assay_kernels.checkpoint.export import (
    RECIPES,
    SCHEMES,
    Marks,
    dialect_config,
    unquantised_linears,
)
from assay_kernels.checkpoint.header import DTYPE_BYTES
from assay_kernels.checkpoint.names import format_name, is_bare
from assay_kernels.checkpoint.spec import Plain, WeightSpec, weight_specs
from assay_kernels.checkpoint.weights import (
    BLOCK_FP8,
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    NATIVE_MXFP4,
    Precision,
)
from assay_kernels.checkpoint.writer import write_safetensors
from assay_kernels.convert import convert

HEADER_SECONDS = 15.0
RATIO = 0.70

SHARD_BYTES = 2**28
"""Small, so that a layer has as many shards for each thread as a whole model has."""

V4_PRO: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "hc_mult": 4,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""Sizes of DeepSeek V4-Pro; the order of compress ratios is ours."""

_PLAIN = {Plain.BF16: "BF16", Plain.FP32: "F32", Plain.INT: "I64"}
_DTYPE = {"U8": torch.uint8, "I8": torch.int8}

Layout = list[tuple[str, str, tuple[int, ...]]]


def layout(config: dict[str, Any], dialect: Dialect) -> Layout:
    """(stored name, dtype, shape) of every tensor that `dialect` has for the config."""
    result: Layout = []
    nvfp4 = COMPRESSED_NVFP4 if dialect is Dialect.C else MODELOPT_NVFP4
    encodings = {
        Precision.NVFP4: nvfp4,
        Precision.MXFP4: NATIVE_MXFP4,
        Precision.FP8_BLOCK: BLOCK_FP8,
    }
    for entry, spec in weight_specs(parse_config(config)):
        precision = RECIPES[dialect].get(spec.kind)
        if precision is None:
            name = format_name(entry, None if is_bare(entry) else "weight", SCHEMES[dialect])
            result.append((name, _PLAIN[spec.plain], spec.shape))
            continue
        for role in encodings[precision].roles.values():
            name = format_name(entry, role.names[0], SCHEMES[dialect])
            result.append((name, role.dtypes[0], role.shape(*spec.shape)))
    return result


def marked_config(config: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    specs: dict[str, WeightSpec] = dict(weight_specs(parse_config(config)))
    return dialect_config(config, dialect, Marks(unquantised_linears(specs, dialect)))


def sparse(directory: Path, config: dict[str, Any], dialect: Dialect, shard_bytes: int) -> int:
    """Write the whole layout as shards whose data is holes; returns the number of tensors."""
    directory.mkdir(parents=True)
    groups: list[Layout] = [[]]
    size = 0
    for tensor in layout(config, dialect):
        nbytes = math.prod(tensor[2]) * DTYPE_BYTES[tensor[1]]
        if size + nbytes > shard_bytes and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header: dict[str, Any] = {}
        position = 0
        for name, dtype, shape in group:
            end = position + math.prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
        weight_map |= dict.fromkeys(header, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(marked_config(config, dialect)))
    return len(weight_map)


def one_layer(experts: int) -> dict[str, Any]:
    """A V4-Pro of one layer and few words, whose bytes are therefore those of a layer."""
    return {
        **V4_PRO,
        "num_hidden_layers": 1,
        "num_hash_layers": 0,
        "compress_ratios": [4],
        "n_routed_experts": experts,
        "vocab_size": 1280,
    }


def real_data(directory: Path, config: dict[str, Any]) -> None:
    """The layer in the native format, random but valid bytes, in shards of SHARD_BYTES."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    number = size = 0

    def flush() -> None:
        nonlocal shard, number, size
        number += 1
        file = f"model-{number:05d}.safetensors"
        write_safetensors(directory / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for name, dtype, shape in layout(config, Dialect.NATIVE):
        if dtype in ("U8", "I8"):
            value = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            value = value.view(_DTYPE[dtype])
        elif dtype == "F8_E8M0":
            value = torch.randint(113, 121, shape, dtype=torch.uint8, generator=generator)
            value = value.view(torch.float8_e8m0fnu)
        elif dtype == "F8_E4M3":
            value = torch.randint(0, 0x70, shape, dtype=torch.uint8, generator=generator)
            value = value.view(torch.float8_e4m3fn)
        else:
            value = torch.randn(shape, generator=generator) * 0.02
            value = value.float() if dtype == "F32" else value.bfloat16()
        shard[name] = value
        size += value.nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(marked_config(config, Dialect.NATIVE)))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def drop_cache(directory: Path) -> None:
    """Written back and out of the page cache, so that everyone reads from the disk."""
    for path in shards(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def cat(directory: Path) -> None:
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *map(str, shards(directory))], check=True, stdout=nowhere)


def cp(directory: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(["cp", *map(str, shards(directory)), str(target)], check=True)
    subprocess.run(["sync", *map(str, shards(target)), str(target)], check=True)


def race(
    source: Path,
    names: tuple[str, str],
    actions: tuple[Callable[[], object], Callable[[], object]],
    rounds: int,
    out: Path,
) -> float:
    """Time a yardstick and a tool in pairs of neighbouring runs, which change places from pair to
    pair; prints both and returns the median of the pairs' ratios, tool over yardstick, in rate."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            shutil.rmtree(out, ignore_errors=True)
            drop_cache(source)
            seconds[which].append(timed(actions[which]))
    shutil.rmtree(out, ignore_errors=True)
    nbytes = sum(path.stat().st_size for path in shards(source))
    for name, times in zip(names, seconds, strict=True):
        median = statistics.median(times)
        spread = f"({min(times):.2f} .. {max(times):.2f} s)"
        print(f"{name:<46}{median:>8.2f} s  {spread:<20}{nbytes / median / 1e9:>7.2f} GB/s")
    return statistics.median(one / other for one, other in zip(*seconds, strict=True))


def verdict(what: str, value: float, bar: float, *, at_most: bool = False) -> bool:
    passed = value <= bar if at_most else value >= bar
    sign = "<=" if at_most else ">="
    print(f"  {what}: {value:.2f} ({sign} {bar:g}: {'pass' if passed else 'MISSED'})")
    return passed


def bench_headers(scratch: Path, rounds: int) -> bool:
    count = sparse(scratch / "pro", V4_PRO, Dialect.B, 5 * 10**9)
    code = "from assay_kernels.audit import audit; import sys; print(audit(sys.argv[1]).exit_code)"
    seconds, cpu = [], []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", code, str(scratch / "pro")]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.strip() == "0", done.stdout
    shutil.rmtree(scratch / "pro")
    median = statistics.median(seconds)
    print(f"header audit of V4-Pro, dialect B, {count:,} tensors, process start included")
    print(f"  CPU seconds: {statistics.median(cpu):.2f}, of them one core's at a time")
    return verdict("seconds", median, HEADER_SECONDS, at_most=True)


def bench_data(scratch: Path, experts: int, rounds: int) -> bool:
    native, converted, out = scratch / "native", scratch / "converted", scratch / "out"
    real_data(native, one_layer(experts))
    convert(native, converted, Dialect.A, shard_bytes=SHARD_BYTES)
    nbytes = sum(path.stat().st_size for path in shards(native))
    print(f"\none V4-Pro layer, {experts} experts: {nbytes / 1e9:.2f} GB native")

    def deep(directory: Path) -> None:
        assert audit(directory, deep=True).exit_code == 0

    ratio = race(
        native,
        ("cat native", "audit --deep native (scales, sampled codes)"),
        (lambda: cat(native), lambda: deep(native)),
        rounds,
        out,
    )
    passed = verdict("audit / cat", ratio, RATIO)
    ratio = race(
        converted,
        ("cat converted", "audit --deep converted (+ SHA-256 of all)"),
        (lambda: cat(converted), lambda: deep(converted)),
        rounds,
        out,
    )
    passed &= verdict("audit / cat", ratio, RATIO)
    ratio = race(
        native,
        ("cp + sync native", "convert --to A native"),
        (
            lambda: cp(native, out),
            lambda: convert(native, out, Dialect.A, shard_bytes=SHARD_BYTES),
        ),
        rounds,
        out,
    )
    return verdict("convert / cp", ratio, RATIO) and passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--scratch", type=Path, help="folder on the disk that is meant")
    parser.add_argument("--headers-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        passed = bench_headers(Path(folder), options.rounds)
        if not options.headers_only:
            passed &= bench_data(Path(folder), options.experts, options.rounds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
