"""What DeepSeek V4's CPU path needs and the host's vLLM library lacks or cannot run, in torch.

vLLM keeps V4's CPU operators in its AMX library alone, loads that library on any CPU with
AVX512-BF16 (Zen 4 and 5 have that and no AMX tiles), leaves a few metadata kernels to Triton,
which its CPU builds do not have, and compiles two sampling functions with the host's C++ compiler,
which a laptop may not have. `install()` closes these gaps:

* operators of `torch.ops._C`: defined where the library lacks them, overridden where it has them
  but the host has no tiles. Presence proves nothing, so the tile test decides.
* attributes of vLLM's modules: patched right after vLLM imports its CPU V4 model, so that no
  process pays for imports it would not make.

`ASSAY_CPU_OPS` chooses: `auto` (the tile test), `torch` (always torch) or `native` (never).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from assay_kernels.kernels.cpu import v4_ops
from assay_kernels.settings import CPU_OPERATORS_VARIABLE, cpu_operators

logger = logging.getLogger("vllm.assay.standins")

MODEL_MODULE = "vllm.models.deepseek_v4.cpu.model"
Origin = Literal["native", "torch"]

# Schemas as vLLM registers them (0.32 and 0.33): callers reach them through torch.ops._C.
SCHEMAS = {
    "convert_weight_packed": "(Tensor weight) -> Tensor",
    "bmm_cpu": "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "weight_packed_linear": (
        "(Tensor(a!) out, Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> ()"
    ),
    "fused_qnorm_rope_kv_insert_cpu": (
        "(Tensor q, Tensor kv, Tensor positions, Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, "
        "Tensor cos_sin_cache, int q_head_padded, float eps, int cache_block_size) -> Tensor"
    ),
    "inverse_gptj_rope_o_proj_cpu": (
        "(Tensor o, Tensor positions, Tensor cos_sin_cache, int rope_dim) -> Tensor"
    ),
    "flash_mla_with_kvcache_cpu": (
        "(Tensor(a!) out, Tensor q, Tensor window_cache_2d, Tensor window_slots, "
        "int window_block_size, Tensor compressed_cache_2d, Tensor compressed_slots, "
        "int compressed_block_size, Tensor attn_sink, float scale) -> ()"
    ),
    "save_partial_states_cpu": (
        "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, "
        "Tensor slot_mapping) -> ()"
    ),
    "compress_norm_rope_store_cpu": (
        "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, "
        "Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, "
        "Tensor(a!) kv_cache_2d, int kv_cache_block_size, int compress_ratio) -> ()"
    ),
    "compress_norm_rope_store_indexer_cpu": (
        "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, "
        "Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, "
        "Tensor(a!) kv_cache_2d, int kv_cache_block_size, int compress_ratio) -> ()"
    ),
    "fused_indexer_q_rope_quant_cpu": (
        "(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, Tensor(a!) index_q_fp8, "
        "Tensor index_weights, float index_weights_softmax_scale, "
        "float index_weights_head_scale, Tensor(b!) index_weights_out) -> ()"
    ),
    "fp8_paged_mqa_logits_cpu": (
        "(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, Tensor page_table, "
        "int block_size, int max_seq_len) -> Tensor"
    ),
    "topk_transform_512_cpu": (
        "(Tensor scores, Tensor seq_lens, Tensor page_tables, Tensor(a!) out_page_indices, "
        "int page_size, Tensor(b!)? out_raw_indices) -> ()"
    ),
    "hc_pre_fused_cpu": (
        "(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, "
        "int sinkhorn_iters, float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
    ),
    "hc_post_fused_cpu": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "hc_head_fused_cpu": (
        "(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, float hc_eps, "
        "float norm_eps) -> Tensor"
    ),
    "biased_topk_cpu": (
        "(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, "
        "bool renormalize, str scoring_func, int num_fused_shared_experts, "
        "float? routed_scaling_factor, bool apply_routed_scaling_factor_on_output) "
        "-> (Tensor, Tensor)"
    ),
    "hash_topk_cpu": (
        "(Tensor gating_output, Tensor tid2eid, int topk, str scoring_func, "
        "int num_fused_shared_experts, int num_experts, float routed_scaling_factor) "
        "-> (Tensor, Tensor)"
    ),
}


class MissingHookError(RuntimeError):
    """vLLM has not, or no longer, what a stand-in attaches to."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"vLLM lacks {what}, which assay's CPU stand-ins attach to: "
            "this vLLM version is not supported on CPU"
        )


@dataclass(frozen=True)
class StandinReport:
    """Where each V4 operator of this process comes from, and why."""

    operators: Mapping[str, Origin] = field(default_factory=dict)
    reason: str = ""

    @property
    def line(self) -> str:
        """One line for the log."""
        count = sum(origin == "torch" for origin in self.operators.values())
        if count == 0:
            return f"V4 operators from vLLM's library: {self.reason}"
        return f"V4 operators in torch: {self.reason}; slower ({count} of {len(self.operators)})"


# torch unregisters a Library's operators when it is collected.
_libraries: list[torch.library.Library] = []
_report: StandinReport | None = None


def install() -> StandinReport:
    """Supply what is missing, once per process; later calls return the first report.

    Raises MissingHookError when vLLM lacks an attribute to attach to (for the attributes of the
    model's modules: when vLLM imports the model), ValueError for an unknown ASSAY_CPU_OPS.
    """
    global _report
    if _report is None:
        _report = _install()
    return _report


def _install() -> StandinReport:
    choice = cpu_operators()
    from vllm.platforms import current_platform

    # Before our definitions: the library defines its operators when it is loaded, and may not find
    # them defined already.
    current_platform.import_kernels()
    has_tiles = bool(torch.cpu._is_amx_tile_supported())
    if choice == "auto":
        use_torch = not has_tiles
        reason = "no AMX tiles" if use_torch else "AMX tiles"
    else:
        use_torch = choice == "torch"
        reason = f"{CPU_OPERATORS_VARIABLE}={choice}"
    operators = _register_operators(use_torch)
    if not has_tiles:
        _allow_chunked_prefill(type(current_platform))
    _after_import(MODEL_MODULE, _patch_modules)
    return StandinReport(operators, reason)


# -------------------------------------------------------------------------------------- operators


def _register_operators(use_torch: bool) -> dict[str, Origin]:
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    fakes_are_due = "vllm._custom_ops" in sys.modules
    origins: dict[str, Origin] = {}
    for name, schema in SCHEMAS.items():
        present = hasattr(torch.ops._C, name)
        if present and not use_torch:
            origins[name] = "native"
            continue
        if not use_torch and not present:
            raise MissingHookError(f"the operator _C::{name} ({CPU_OPERATORS_VARIABLE}=native)")
        function = _packing(getattr(v4_ops, name)) if name in _PACKING else getattr(v4_ops, name)
        if not present:
            library.define(name + schema)
        library.impl(name, function, "CPU", allow_override=present)
        if not present and fakes_are_due and name in _FAKES:
            # vllm._custom_ops gives its operators shapes for torch.compile when it is imported, and
            # skipped those that did not exist yet.
            torch.library.register_fake(f"_C::{name}", _FAKES[name], lib=library)
        origins[name] = "torch"
    return origins


# These serve other models too, with quantised weights that the library must keep packing.
_PACKING = frozenset({"convert_weight_packed"})


def _packing(in_torch: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    native: Callable[..., Any] | None = None
    if hasattr(torch.ops._C, "convert_weight_packed"):
        kernel = torch.library.get_kernel("_C::convert_weight_packed", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        native = lambda weight: kernel.call_boxed(keys, weight)  # noqa: E731

    def pack(weight: Tensor) -> Tensor:
        if native is not None and weight.dtype not in (torch.bfloat16, torch.float32):
            packed: Tensor = native(weight)
            return packed
        return in_torch(weight)

    return pack


def _fake_hc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _, width = x.shape
    post = x.new_empty((tokens, hc_mult), dtype=torch.float32)
    comb = x.new_empty((tokens, hc_mult, hc_mult), dtype=torch.float32)
    return x.new_empty((tokens, width)), post, comb


def _fake_topk(tokens: int, topk: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty((tokens, topk), dtype=torch.float32),
        like.new_empty((tokens, topk), dtype=torch.int32),
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "fused_qnorm_rope_kv_insert_cpu": lambda q, kv, positions, cache, slots, cos_sin, heads, *_: (
        q.new_empty((q.shape[0], heads, q.shape[2]))
    ),
    "inverse_gptj_rope_o_proj_cpu": lambda o, *_: o.new_empty(o.shape, dtype=torch.float32),
    "fp8_paged_mqa_logits_cpu": lambda q, cache, weight, lens, table, block, longest: q.new_empty(
        (q.shape[0], longest), dtype=torch.float32
    ),
    "hc_pre_fused_cpu": _fake_hc_pre,
    "hc_post_fused_cpu": lambda x, residual, post, comb: residual.new_empty(residual.shape),
    "hc_head_fused_cpu": lambda x, *_: x.new_empty((x.shape[0], x.shape[2])),
    "biased_topk_cpu": lambda hidden, gating, bias, topk, *_: _fake_topk(
        hidden.shape[0], topk, hidden
    ),
    "hash_topk_cpu": lambda gating, table, topk, *_: _fake_topk(gating.shape[0], topk, gating),
}


# ------------------------------------------------------------------------------ platform settings


def _allow_chunked_prefill(platform: type) -> None:
    """vLLM turns chunked prefill and prefix caching off for V4 on CPUs without tiles, because its
    operators could not run there; ours can, and do both."""
    name = "check_and_update_config"
    original = _attribute(platform, name)

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        model = vllm_config.model_config
        is_v4 = model is not None and getattr(model.hf_config, "model_type", "") == "deepseek_v4"
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        before = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        original(vllm_config)
        if is_v4:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = before[:2]
            cache.enable_prefix_caching = before[2]

    setattr(platform, name, classmethod(check_and_update_config))


# -------------------------------------------------------------------------------- module patches


def _attribute(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise MissingHookError(f"{getattr(owner, '__module__', '')}{owner.__name__}.{name}")
    return found


def _replace(owner: Any, name: str, value: Any) -> None:
    _attribute(owner, name)
    setattr(owner, name, value)


def _patch_modules() -> None:
    """Replace what vLLM leaves to Triton. Runs once vLLM has imported its CPU V4 model."""
    from vllm.model_executor.layers import utils, vocab_parallel_embedding
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import block_table

    _replace(metadata, "compute_token_to_req_indices", token_to_request)
    _replace(sparse_swa, "compute_token_to_req_indices", token_to_request)
    _replace(compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL", CompressedSlotMapping())
    _replace(block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", SlotMapping())
    _replace(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", PrefillChunkMetadata())
    # Their results are read by CUDA's attention only.
    _replace(sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", Unused())
    _replace(sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL", Unused())

    layer_types = [
        _attribute(sparse_swa, f"_LAYER_TYPE_{kind}")
        for kind in ("SWAONLY", "C4A", "C128A", "C1A", "C2A")
    ]
    builder = _attribute(cpu_mla, "DeepseekV4CPUSparseSWAMetadataBuilder")
    # vLLM's own override forgets the last two, which the base class then reads.

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(layer_types)

    _replace(builder, "build_tile_scheduler", build_tile_scheduler)

    indexer_builder = _attribute(cpu_mla, "DeepseekV4CPUIndexerMetadataBuilder")
    build = _attribute(indexer_builder, "build")
    chunk_type = _attribute(indexer, "DeepseekV32IndexerPrefillChunkMetadata")

    def build_with_a_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_a_chunk(build(self, *args, **kwargs), chunk_type)

    _replace(indexer_builder, "build", build_with_a_chunk)

    if not v4_ops.has_fast_bf16():
        _widen_linears(utils)

    # Compiled with inductor on first use, which needs a C++ compiler on the host: log-probabilities
    # would fail without one, and so would any temperature above 0 and a second rank.
    _replace_compiled(sampler, "batched_count_greater_than")
    _replace_compiled(topk_topp_sampler, "compiled_random_sample")
    _replace_compiled(vocab_parallel_embedding, "get_masked_input_and_mask")


def _replace_compiled(module: ModuleType, name: str) -> None:
    """Put the plain function in place of one that vLLM wrapped in torch.compile."""
    function = getattr(_attribute(module, name), "_torchdynamo_orig_callable", None)
    if function is not None:
        setattr(module, name, function)


def with_a_chunk(metadata: Any, chunk_type: Any) -> Any:
    """The indexer's metadata with one prefill chunk where vLLM made none.

    When all prompts of a step are shorter than the compression ratio they have no compressed entry,
    vLLM leaves their chunk out, and its CPU indexer, which asserts that there is exactly one, takes
    the engine down: a prompt of 2 tokens while another request is beyond 2,048 is enough. An empty
    chunk says what is meant: nothing to choose from.
    """
    prefill = metadata.prefill
    if prefill is not None and not prefill.chunks:
        nothing = torch.zeros(0, dtype=torch.int32)
        first = metadata.num_decode_tokens
        prefill.chunks.append(
            chunk_type(
                block_table=nothing,
                cu_seqlen_ks=nothing,
                cu_seqlen_ke=nothing,
                cu_seq_lens=nothing,
                token_to_seq=nothing,
                total_seq_lens=0,
                token_start=first,
                token_end=first + metadata.num_prefill_tokens,
                num_reqs=metadata.num_prefills,
            )
        )
    return metadata


class Unused:
    """In place of a kernel whose results nothing on CPU reads."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to compile."""


def token_to_request(
    query_start_loc: Tensor, out: Tensor, num_mapped_tokens: int, num_tokens: int
) -> Tensor:
    """Request of each of the first `num_tokens` tokens, 0 for those not mapped, into `out` int32.

    query_start_loc: (R + 1,) int32, first token of each request.
    """
    result = out[:num_tokens]
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    request.clamp_max_(query_start_loc.shape[0] - 2)
    if num_mapped_tokens < num_tokens:
        request[num_mapped_tokens:] = 0
    result.copy_(request)
    return result


class SlotMapping(Unused):
    """The library's operator without vLLM's kernel launcher, whose signature matching costs half a
    millisecond a step (five block tables, each bound again)."""

    def __call__(
        self,
        num_reqs: int,
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        block_table_stride: int,
        slot_mapping: Tensor,
        kv_cache_block_size: int,
        total_cp_world_size: int,
        total_cp_rank: int,
        cp_kv_cache_interleave_size: int,
    ) -> None:
        """positions: (T,) int64; block_table: (R, pages) int32; slot_mapping: (T,), written."""
        if total_cp_world_size != 1:
            raise NotImplementedError("context parallelism on CPU")
        torch.ops._C.compute_slot_mapping_kernel_impl(
            query_start_loc, positions, block_table, slot_mapping, kv_cache_block_size
        )


class CompressedSlotMapping(Unused):
    """Slot of the compressed state that each token completes, or -1."""

    def __call__(
        self,
        compressed_slot_mapping: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        compress_ratio: int,
        dcp_world_size: int = 1,
        cp_interleave: int = 1,
    ) -> None:
        """compressed_slot_mapping: (T,) int64, written; slot_mapping: (T,), -1 = replayed token;
        query_start_loc: (R + 1,); seq_lens: (R,); block_table: (R, pages)."""
        if dcp_world_size != 1:
            raise NotImplementedError("decode context parallelism on CPU")
        tokens = int(query_start_loc[-1])
        if tokens == 0:
            return
        starts = query_start_loc.to(torch.int64)
        lengths = starts[1:] - starts[:-1]
        requests = block_table.shape[0]
        first = seq_lens[:requests].to(torch.int64) - lengths[:requests] - starts[:requests]
        if tokens == requests:  # decode: one token each
            request = torch.arange(requests)
        else:
            request = torch.repeat_interleave(lengths[:requests], output_size=tokens)
        position = torch.arange(tokens).add_(first.index_select(0, request))
        done = (position + 1) % compress_ratio == 0
        done &= slot_mapping[:tokens] != -1
        state = torch.div(position, compress_ratio, rounding_mode="floor")
        page = torch.div(state, block_size, rounding_mode="floor")
        page = page.clamp_(0, block_table.shape[1] - 1)
        block = block_table[request, page].to(torch.int64)
        slots = block * block_size + state % block_size
        compressed_slot_mapping[:tokens] = slots.masked_fill_(~done, -1)


class PrefillChunkMetadata(Unused):
    """Where each prefill token's keys start and end in the indexer's flat key list."""

    def __call__(
        self,
        query_start_loc: Tensor,
        uncompressed_seq_lens: Tensor,
        cu_compressed_seq_lens: Tensor,
        row_start_cu: Tensor,
        token_to_seq: Tensor,
        cu_seq_len_ks: Tensor,
        cu_seq_len_ke: Tensor,
        query_slice_start: int,
        query_slice_stop: int,
        dcp_rank: int = 0,
        dcp_world: int = 1,
        dcp_interleave: int = 1,
        *,
        num_reqs: int,
        COMPRESS_RATIO: int,
    ) -> None:
        """query_start_loc: (R + 1,) from 0; uncompressed_seq_lens: (R,); cu_compressed_seq_lens and
        row_start_cu: (R + 1,); written: token_to_seq (keys,), cu_seq_len_ks and _ke (tokens of the
        slice,), all int32."""
        if dcp_world != 1:
            raise NotImplementedError("decode context parallelism on CPU")
        starts = query_start_loc[: num_reqs + 1].to(torch.int64)
        lengths = starts[1:] - starts[:-1]
        request = torch.repeat_interleave(lengths)
        part = slice(query_slice_start, query_slice_stop)
        first = uncompressed_seq_lens[:num_reqs].to(torch.int64) - lengths - starts[:-1]
        request = request[part]
        seen = torch.arange(query_slice_start, query_slice_start + request.numel()) + 1
        seen += first.index_select(0, request)
        begin = row_start_cu.to(torch.int64).index_select(0, request)
        cu_seq_len_ks[: request.numel()] = begin
        cu_seq_len_ke[: request.numel()] = begin + torch.div(
            seen, COMPRESS_RATIO, rounding_mode="floor"
        )
        keys = cu_compressed_seq_lens[: num_reqs + 1].to(torch.int64)
        owner = torch.repeat_interleave(keys[1:] - keys[:-1])
        token_to_seq[: owner.numel()] = owner


# -------------------------------------------------------------------------- unquantised linears


def _widen_linears(utils: ModuleType) -> None:
    """Without bf16 instructions oneDNN refuses bf16 and torch emulates it: use fp32 copies."""
    original = _attribute(utils, "dispatch_cpu_unquantized_gemm")

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.dim() != 2 or weight.dtype != torch.bfloat16:
            original(layer, remove_weight)
            return
        wide = weight.detach().float()

        def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            bias = bias if bias is None else bias.float()
            return torch.nn.functional.linear(x.float(), wide, bias).to(x.dtype)

        layer.cpu_linear = cpu_linear
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    _replace(utils, "dispatch_cpu_unquantized_gemm", dispatch_cpu_unquantized_gemm)


# ---------------------------------------------------------------------------------- after import


def _after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` right after module `name` has been imported, or now if it has been already.

    An error of `then` surfaces at that import.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            raise MissingHookError(f"the module {fullname}")
        spec.loader = _Loader(spec.loader, self.then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self.loader = loader
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then()
