"""What `standins.install()` puts where, in processes of its own, and the metadata helpers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

from assay_kernels.vllm_plugin import standins

PROLOGUE = """
import json, sys, torch
from assay_kernels.vllm_plugin import standins
AVX2 = {avx2}
if AVX2:  # vLLM picks its library by this test
    torch.cpu._is_avx512_supported = lambda: False
def answer(value):
    print("ANSWER " + json.dumps(value))
"""


def run(script: str, *, avx2: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    source = PROLOGUE.format(avx2=avx2) + textwrap.dedent(script)
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=300
    )


def answer(script: str, *, avx2: bool = False, **environment: str) -> object:
    done = run(script, avx2=avx2, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    return json.loads(line.removeprefix("ANSWER "))


REPORT = """
first = standins.install()
assert standins.install() is first, "not idempotent"
answer([dict(first.operators), first.line])
"""


def test_without_tiles_every_operator_is_ours() -> None:
    """The library that has them is loaded on CPUs that cannot run them: presence proves nothing."""
    script = "torch.cpu._is_amx_tile_supported = lambda: False\n" + textwrap.dedent(REPORT)
    operators, line = answer(script)  # type: ignore[misc]
    assert set(operators.values()) == {"torch"}
    assert line.startswith("V4 operators in torch: no AMX tiles; slower")


def test_with_tiles_they_stay_native() -> None:
    script = "torch.cpu._is_amx_tile_supported = lambda: True\n" + textwrap.dedent(REPORT)
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM loads its AMX library only on CPUs with AVX512-BF16")
    operators, line = answer(script)  # type: ignore[misc]
    assert set(operators.values()) == {"native"}
    assert "AMX tiles" in line


def test_the_switch_forces_torch() -> None:
    script = "torch.cpu._is_amx_tile_supported = lambda: True\n" + textwrap.dedent(REPORT)
    operators, line = answer(script, ASSAY_CPU_OPS="torch")  # type: ignore[misc]
    assert set(operators.values()) == {"torch"}
    assert "ASSAY_CPU_OPS=torch" in line


def test_native_without_the_library_is_one_clear_error() -> None:
    done = run("standins.install()", avx2=True, ASSAY_CPU_OPS="native")
    assert done.returncode != 0
    assert "vLLM lacks the operator _C::" in done.stderr.splitlines()[-1]


def test_an_unknown_switch_is_refused() -> None:
    done = run("standins.install()", ASSAY_CPU_OPS="fast")
    assert "ASSAY_CPU_OPS='fast': must be one of auto, torch, native" in done.stderr


@pytest.mark.parametrize("custom_ops_first", [False, True])
@pytest.mark.parametrize("avx2", [False, True])
def test_vllms_wrappers_reach_them(avx2: bool, custom_ops_first: bool) -> None:
    """On either library, in either import order, called for real and with fake tensors."""
    script = f"""
    if {custom_ops_first}:
        import vllm._custom_ops
    standins.install()
    import vllm._custom_ops as ops
    from torch._subclasses.fake_tensor import FakeTensorMode
    def call():
        x = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
        gates = torch.zeros(24, 256), torch.ones(3), torch.zeros(24)
        y, post, comb = ops.hc_pre_fused_cpu(x, *gates, 4, 20, 1e-6, 1e-6)
        out = ops.hc_post_fused_cpu(y, x, post, comb)
        head = ops.hc_head_fused_cpu(out, gates[0][:4], torch.ones(1), torch.zeros(4), 1e-6, 1e-6)
        logits = torch.zeros(2, 64)
        weights, ids = ops.biased_topk_cpu(
            logits, logits, torch.zeros(64), 6, True, "sqrtsoftplus", 0, 1.5, True)
        _, hashed = ops.hash_topk_cpu(logits, ids, 6, "sqrtsoftplus", 0, 64, 1.5)
        return [list(t.shape) for t in (y, post, comb, out, head, weights, ids, hashed)]
    real = call()
    with FakeTensorMode():
        fake = call()
    answer([real, fake])
    """
    real, fake = answer(script, avx2=avx2)  # type: ignore[misc]
    assert real == fake
    assert real[0] == [2, 64]


def test_weights_of_other_models_are_still_packed_by_the_library() -> None:
    """int8 products stay native on a CPU that runs them, and read the library's own packing."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's library for this CPU does not pack weights")
    script = """
    from vllm.platforms import current_platform
    current_platform.import_kernels()
    weight = torch.arange(64 * 64).to(torch.int8).view(64, 64)
    native = torch.ops._C.convert_weight_packed(weight).clone()
    wide = weight.to(torch.bfloat16)
    standins.install()
    same = torch.equal(torch.ops._C.convert_weight_packed(weight), native)
    answer([same, list(torch.ops._C.convert_weight_packed(wide).shape)])
    """
    assert answer(script, ASSAY_CPU_OPS="torch") == [True, [64, 64]]


def test_modules_are_patched_when_vllm_imports_its_model() -> None:
    """Not before; then all of them."""
    script = """
    standins.install()
    before = "vllm.models.deepseek_v4.cpu.cpu_mla" in sys.modules
    import vllm.models.deepseek_v4.cpu.model
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as builder
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.attention.ops import metadata
    from vllm.v1.sample import sampler
    answer({
        "before": before,
        "requests": sparse_swa.compute_token_to_req_indices is metadata.compute_token_to_req_indices
                    is standins.token_to_request,
        "schedules": sorted(builder.build_tile_scheduler(None, 3)),
        "compiled": hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable"),
    })
    """
    got = answer(script)
    assert got == {
        "before": False,
        "requests": True,
        "schedules": ["c128a", "c1a", "c2a", "c4a", "swaonly"],
        "compiled": False,
    }


def test_a_moved_attribute_is_one_clear_error() -> None:
    script = """
    from vllm.v1.attention.backends.mla import compressor_utils
    del compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL
    standins.install()
    import vllm.models.deepseek_v4.cpu.model
    """
    done = run(script)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingHookError" in last
    assert "compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL" in last
    assert "this vLLM version is not supported on CPU" in last


def test_chunked_prefill_and_prefix_caching_stay_as_asked() -> None:
    """vLLM turns both off for V4 without tiles; for other models its decision stands."""
    script = """
    from types import SimpleNamespace as Namespace
    from vllm.platforms import current_platform
    def original(cls, config):
        config.scheduler_config.enable_chunked_prefill = False
        config.scheduler_config.max_num_batched_tokens = 99
        config.cache_config.enable_prefix_caching = False
    torch.cpu._is_amx_tile_supported = lambda: False
    type(current_platform).check_and_update_config = classmethod(original)
    standins.install()
    def settings(kind):
        config = Namespace(
            model_config=Namespace(hf_config=Namespace(model_type=kind)),
            scheduler_config=Namespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
            cache_config=Namespace(enable_prefix_caching=True))
        type(current_platform).check_and_update_config(config)
        scheduler, cache = config.scheduler_config, config.cache_config
        return [scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching]
    answer([settings("deepseek_v4"), settings("llama")])
    """
    assert answer(script) == [[True, 64, True], [False, 99, False]]


# ------------------------------------------------------------------------------- metadata helpers

STARTS = torch.tensor([0, 1, 2, 7, 7, 12], dtype=torch.int32)  # decode, decode, 5, none, 5
SEQ_LENS = torch.tensor([9, 130, 5, 3, 300], dtype=torch.int32)


def test_tokens_find_their_request() -> None:
    out = torch.full((20,), 77, dtype=torch.int32)
    got = standins.token_to_request(STARTS, out, 12, 15)
    assert got.tolist() == [0, 1, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 0, 0, 0]
    assert got.data_ptr() == out.data_ptr()
    assert out[15:].tolist() == [77] * 5


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("decode_only", [False, True])
def test_compressed_slots_follow_the_block_table(decode_only: bool, ratio: int) -> None:
    starts = torch.arange(6, dtype=torch.int32) if decode_only else STARTS
    tokens = int(starts[-1])
    block = 256 // ratio
    tables = torch.randperm(10).view(5, 2).to(torch.int32)
    own = torch.arange(tokens)
    own[tokens // 2] = -1  # replayed
    out = torch.full((tokens + 3,), -1, dtype=torch.int64)
    standins.CompressedSlotMapping()(out, own, starts, SEQ_LENS, tables, block, ratio, 1, 1)
    expected = [-1] * (tokens + 3)
    for request in range(5):
        begin, end = int(starts[request]), int(starts[request + 1])
        for token in range(begin, end):
            position = int(SEQ_LENS[request]) - (end - begin) + token - begin
            if (position + 1) % ratio == 0 and own[token] != -1:
                state = position // ratio
                expected[token] = int(tables[request, state // block]) * block + state % block
    assert out.tolist() == expected


@pytest.mark.parametrize("part", [slice(0, 12), slice(3, 9)])
def test_prefill_tokens_see_their_requests_finished_keys(part: slice) -> None:
    compressed = SEQ_LENS // 4
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), compressed.cumsum(0).int()])
    owner = torch.full((int(cu[-1]),), -9, dtype=torch.int32)
    begin, end = torch.full((2, part.stop - part.start), -9, dtype=torch.int32).unbind(0)
    standins.PrefillChunkMetadata()(
        STARTS, SEQ_LENS, cu, cu, owner, begin, end, part.start, part.stop, 0, 1, 1,
        num_reqs=5, COMPRESS_RATIO=4,
    )  # fmt: skip
    requests = standins.token_to_request(STARTS, torch.empty(12, dtype=torch.int32), 12, 12)
    for row, token in enumerate(range(part.start, part.stop)):
        request = int(requests[token])
        length = int(STARTS[request + 1] - STARTS[request])
        seen = int(SEQ_LENS[request]) - length + token - int(STARTS[request]) + 1
        assert begin[row] == cu[request]
        assert end[row] == cu[request] + seen // 4
    assert owner.tolist() == [r for r in range(5) for _ in range(int(compressed[r]))]


def test_prompts_too_short_for_the_indexer_have_an_empty_chunk() -> None:
    """Without it, two tokens of prompt beside a long answer ended the engine."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerPrefillChunkMetadata

    def metadata(chunks: list[Any]) -> Namespace:
        return Namespace(
            num_decode_tokens=10, num_prefill_tokens=2, num_prefills=1,
            prefill=Namespace(chunks=chunks),
        )  # fmt: skip

    kind = DeepseekV32IndexerPrefillChunkMetadata
    (chunk,) = standins.with_a_chunk(metadata([]), kind).prefill.chunks
    assert (chunk.token_start, chunk.token_end, chunk.local_total_seq_lens) == (10, 12, 0)
    assert standins.with_a_chunk(metadata(["one"]), kind).prefill.chunks == ["one"]
    assert standins.with_a_chunk(Namespace(prefill=None), kind).prefill is None
