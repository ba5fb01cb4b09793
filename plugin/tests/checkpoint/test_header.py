"""The header parser accepts what safetensors wrote and answers anything else with one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from assay_kernels.checkpoint import CheckpointError
from assay_kernels.checkpoint.header import DTYPE_BYTES, parse_header, read_header

VALID = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.uint8)})


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = b"\0" * 4) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return read_header(path)


def test_a_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    infos = read(tmp_path, VALID)
    assert {name: (i.dtype, i.shape, i.nbytes) for name, i in infos.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("U8", (4,), 4),
    }


@pytest.mark.parametrize(
    ("content", "tensor", "rule"),
    [
        (b"", None, "truncated"),
        (b"\0" * 7, None, "truncated"),
        (VALID[:20], None, "truncated"),
        (VALID[:-1], "b", "truncated"),
        (VALID + b"\0", None, "1 bytes follow"),
        ((2**40).to_bytes(8, "little") + b"{}", None, "at most 100000000"),
        (file_of(b"\xff\xfe"), None, "must be JSON"),
        (file_of(b"[" * 100_000), None, "must be JSON"),
        (file_of(b'{"a": NaN}'), None, "NaN is not JSON"),
        (file_of([1]), None, "must be a JSON object"),
        (file_of({"__metadata__": {"a": 1}}), None, "__metadata__"),
        (file_of({"a": 1}), "a", "exactly dtype, shape and data_offsets"),
        (file_of({"a": {**entry(), "more": 1}}), "a", "exactly dtype"),
        (file_of({"a": entry(dtype="F4_E2M1X")}), "a", "unknown dtype 'F4_E2M1X'"),
        (file_of({"a": entry(shape=[-4])}), "a", "shape must be a list of sizes"),
        (file_of({"a": entry(shape=[True, 4])}), "a", "shape must be a list of sizes"),
        (file_of({"a": entry(offsets=[0])}), "a", "data_offsets must be two sizes"),
        (file_of({"a": entry(offsets=[4, 0])}), "a", "takes 4 bytes"),
        (file_of({"a": entry(shape=[2**62, 2**62])}), "a", "takes"),
        (file_of({"a": entry(), "b": entry(shape=[2], offsets=[2, 4])}), "b", "overlaps"),
        (file_of({"a": entry(shape=[2], offsets=[2, 4])}), "a", "gap of 2 bytes"),
        (file_of(b'{"a": 1, "a": 1}'), None, "'a' appears twice"),
    ],
)
def test_each_fault_is_one_error_that_names_file_tensor_and_rule(
    tmp_path: Path, content: bytes, tensor: str | None, rule: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    error = caught.value
    assert (error.file, error.tensor) == ("x.safetensors", tensor)
    assert rule in error.rule
    assert str(error).startswith("x.safetensors")


def test_a_directory_in_place_of_a_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "x.safetensors")


def accepted_or_refused(text: bytes, data_bytes: int) -> None:
    try:
        infos = parse_header(text, data_bytes, "x")
    except CheckpointError:
        return
    covered = sorted((info.begin, info.end) for info in infos.values())
    assert all(0 <= begin <= end <= data_bytes for begin, end in covered)
    assert sum(end - begin for begin, end in covered) == data_bytes


@given(st.binary(max_size=200), st.integers(0, 100))
def test_random_bytes_never_escape_as_another_error(text: bytes, data_bytes: int) -> None:
    accepted_or_refused(text, data_bytes)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPE_BYTES)) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@given(st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=4), st.integers(0, 60))
def test_random_headers_never_escape_as_another_error(header: Any, data_bytes: int) -> None:
    accepted_or_refused(json.dumps(header).encode(), data_bytes)


@given(st.integers(0, len(VALID) - 1), st.integers(0, 255))
def test_one_changed_byte_never_escapes_as_another_error(position: int, value: int) -> None:
    changed = bytearray(VALID)
    changed[position] = value
    length = int.from_bytes(changed[:8], "little")
    if length <= len(changed) - 8:
        accepted_or_refused(bytes(changed[8 : 8 + length]), len(changed) - 8 - length)
