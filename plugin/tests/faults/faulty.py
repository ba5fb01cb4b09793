"""Copies of a dialect-B checkpoint with one known fault each: what a wrong loader or exporter would
have served."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay_kernels.checkpoint import parse_name

Tensors = dict[tuple[str, str | None], Tensor]
"""(canonical name of the weight, parameter) -> stored tensor."""

NO_CLAMP = 1e6
"""`swiglu_limit` that nothing reaches."""


def nibbles(tensors: Tensors) -> None:
    """Every packed byte with its two codes exchanged."""
    for tensor in _parameters(tensors, "weight", torch.uint8):
        tensor.copy_((tensor >> 4) | (tensor << 4))


def ones(tensors: Tensors) -> None:
    """Every block scale is one."""
    for tensor in _parameters(tensors, "weight_scale", torch.float8_e4m3fn):
        tensor.fill_(1.0)


def gate_for_up(tensors: Tensors) -> None:
    """The gate's global scale also used for up (w1's for w3), in shared and routed experts."""
    for (entry, parameter), tensor in tensors.items():
        if parameter == "weight_scale_2" and entry.endswith(".w3"):
            tensor.copy_(tensors[entry.removesuffix("w3") + "w1", parameter])


def indexer(tensors: Tensors) -> None:
    """The indexer's compressor with the main compressor's weights, as many rows as it takes."""
    for (entry, parameter), tensor in tensors.items():
        if ".indexer.compressor." in entry and not entry.endswith("norm"):
            main = tensors[entry.replace(".indexer.", "."), parameter]
            if tensor.dim() == 0:
                tensor.copy_(main)
            else:
                # Rows are output channels; `ape` has them along its last dimension.
                rows = 0 if parameter is not None else 1
                tensor.copy_(main.narrow(rows, 0, tensor.shape[rows]))


def uninitialised(tensors: Tensors) -> None:
    """Every block scale is whatever the memory held: random bytes, but no NaN (the plugin refuses
    those at once)."""
    generator = torch.Generator().manual_seed(1)
    for tensor in _parameters(tensors, "weight_scale", torch.float8_e4m3fn):
        found = torch.randint(0, 127, tensor.shape, generator=generator, dtype=torch.uint8)
        tensor.copy_(found.view(torch.float8_e4m3fn))


def zeros(tensors: Tensors) -> None:
    """Block scales of zero in the routed experts' down projection (vLLM issue 54189)."""
    for (entry, parameter), tensor in tensors.items():
        if parameter == "weight_scale" and re.search(r"\.experts\.\d+\.w2$", entry):
            tensor.zero_()


def clamp(tensors: Tensors) -> None:
    """Nothing to do to weights: the config has lost the limit."""


FAULTS: dict[str, Callable[[Tensors], None]] = {
    "nibbles": nibbles,
    "ones": ones,
    "clamp": clamp,
    "gate for up": gate_for_up,
    "indexer": indexer,
    "uninitialised": uninitialised,
    "zeros": zeros,
}


def make_faulty(source: Path, destination: Path, fault: str) -> Path:
    """Write `source` (dialect B) with one of FAULTS into `destination`; returns it."""
    destination.mkdir(parents=True)
    shards = sorted(source.glob("*.safetensors"))
    assert shards, source
    stored = {shard: load_file(shard) for shard in shards}
    tensors: Tensors = {}
    for shard in shards:
        for name, tensor in stored[shard].items():
            parsed = parse_name(name)
            assert parsed is not None, name
            tensors[parsed] = tensor
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    FAULTS[fault](tensors)
    changed = sum(not _same(before[key], tensor) for key, tensor in tensors.items())
    assert changed or fault == "clamp", f"{fault}: nothing was changed"
    for shard in shards:
        save_file(stored[shard], destination / shard.name, metadata={"format": "pt"})
    for other in source.iterdir():
        if other.is_file() and other not in stored:
            shutil.copy(other, destination / other.name)
    if fault == "clamp":
        path = destination / "config.json"
        config = json.loads(path.read_text())
        assert config["swiglu_limit"] < NO_CLAMP
        path.write_text(json.dumps(config | {"swiglu_limit": NO_CLAMP}))
    return destination


def _parameters(tensors: Tensors, parameter: str, dtype: torch.dtype) -> list[Tensor]:
    return [t for (_, p), t in tensors.items() if p == parameter and t.dtype == dtype]


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: a NaN equals itself."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
