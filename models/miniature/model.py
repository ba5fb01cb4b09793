"""The miniature's shape, its initial weights, and a forward pass over packed rows.

The weights live in transformers' own `DeepseekV4ForCausalLM`. `forward` computes what that model
computes (a test holds them together), but several conversations share a row, windows are cut into
blocks of 128, the experts run as one grouped product, and matrices may be rounded to NVFP4 on the
way: that is what makes minutes on one GPU enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from . import nvfp4

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 8192,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
RATIOS: list[int] = CONFIG["compress_ratios"]
LAYERS, STREAMS, WIDTH, HEADS, HEAD = 4, 4, 256, 8, 512
EXPERTS, ACTIVE, INNER, LIMIT, WINDOW, TOP = 64, 6, 128, 10.0, 128, 512
INDEX_HEADS, INDEX_HEAD = 32, 128
EPS = 1e-6
UP_OVER_GATE = (
    5.0  # w3's initial scale over w1's: a shared global scale for the pair must be visible
)


def config() -> DeepseekV4Config:
    """The configuration object that transformers makes of `CONFIG`."""
    return DeepseekV4Config(
        **{
            k: v
            for k, v in CONFIG.items()
            if k not in ("architectures", "model_type", "torch_dtype")
        }
    )


# Standard deviations at the start. Pairs that a server fuses differ on purpose: kv over q_a, kv
# over gate, up over gate.
_STD = {
    "embed_tokens.weight": 0.3,
    "lm_head.weight": 0.02,
    "q_a_proj.weight": 0.06,
    "self_attn.kv_proj.weight": 0.2,
    "self_attn.q_b_proj.weight": 0.06,
    "o_a_proj.weight": 0.044,
    "o_b_proj.weight": 0.01,
    "compressor.kv_proj.weight": 0.15,
    "compressor.gate_proj.weight": 0.03,
    "indexer.kv_proj.weight": 0.15,
    "indexer.gate_proj.weight": 0.03,
    "indexer.q_b_proj.weight": 0.06,
    "weights_proj.weight": 0.06,
    "gate.weight": 0.02,
    "shared_experts.gate_proj.weight": 0.06,
    "shared_experts.up_proj.weight": 0.06 * UP_OVER_GATE,
    "shared_experts.down_proj.weight": 0.01,
    "experts.down_proj": 0.01,
    "hc.fn": 0.01,
    "hc_fn": 0.01,
}


def build(seed: int = 1, token_counts: Tensor | None = None) -> DeepseekV4ForCausalLM:
    """A fresh model in fp32. `token_counts` (vocab,) lets the hash layer's table spread the
    frequent tokens evenly.
    """
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                p.fill_(0.3 if name.endswith("scale") else 1.0)
            elif name.endswith("gate_up_proj"):
                p.normal_(0, 0.06)
                p[:, INNER:] *= UP_OVER_GATE
            elif name.endswith(("sinks", "position_bias")):
                p.zero_()
            elif name.endswith("base"):
                _start_streams(p, name)
            else:
                std = next(s for end, s in reversed(_STD.items()) if name.endswith(end))
                p.normal_(0, std)
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                b.copy_(_hash_table(token_counts))
    return model


def _start_streams(base: Tensor, name: str) -> None:
    """Near-identity mixing, every sublayer reading mostly its own stream and writing to all:
    breaks their symmetry.
    """
    if base.numel() == STREAMS:
        base.zero_()
        return
    layer = int(name.split("layers.")[1].split(".")[0])
    pre, post, mix = base.split([STREAMS, STREAMS, STREAMS * STREAMS])
    pre.fill_(-1.5)
    pre[(2 * layer + ("ffn_hc" in name)) % STREAMS] = 1.0
    post.normal_(0, 0.5)
    mix.copy_(4.0 * torch.eye(STREAMS).flatten())


def _hash_table(token_counts: Tensor | None) -> Tensor:
    """(vocab, 6) expert ids: tokens, most frequent first, take six experts each from freshly
    shuffled decks of 64.
    """
    vocab = CONFIG["vocab_size"]
    order = torch.arange(vocab) if token_counts is None else token_counts.argsort(descending=True)
    table = torch.empty(vocab, ACTIVE, dtype=torch.long)
    deck: list[int] = []
    for token in order.tolist():
        if len(deck) < ACTIVE:
            deck = torch.randperm(EXPERTS).tolist()
        table[token] = torch.tensor([deck.pop() for _ in range(ACTIVE)])
    return table


# ---------------------------------------------------------------- which matrices are NVFP4

QUANTISED = (
    "q_a_proj",
    "q_b_proj",
    "kv_proj",
    "o_a_proj",
    "o_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
)


def is_quantised(name: str) -> bool:
    """Whether dialect B stores this parameter as NVFP4 (names of transformers)."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in QUANTISED


def matrices(name: str, p: Tensor) -> Tensor:
    """View a parameter as the stack of matrices (..., N, K) that each own a global scale."""
    return p.unflatten(1, (2, INNER)) if name.endswith("gate_up_proj") else p


class _Rounded(torch.autograd.Function):
    """NVFP4 in the forward pass, identity in the backward one."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, compiled: bool) -> Tensor:
        return (_compiled_round_trip() if compiled else _bf16_round_trip)(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` through torch.compile, once for every shape it meets."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(f, dynamic=False)


def _bf16_round_trip(w: Tensor) -> Tensor:
    return nvfp4.round_trip(w).to(torch.bfloat16)


@lru_cache(maxsize=1)
def _compiled_round_trip() -> Callable[[Tensor], Tensor]:
    return _compiled(_bf16_round_trip)


def working_weights(
    model: DeepseekV4ForCausalLM,
    rounded: bool,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
) -> dict[str, Tensor]:
    """The weights that a step computes with: matrices in `dtype`, rounded to NVFP4 if asked for,
    the rest fp32.
    """
    out = {}
    for name, p in model.named_parameters():
        if is_quantised(name):
            if rounded:
                p = _Rounded.apply(matrices(name, p), compiled).view_as(p).to(dtype)
            else:
                p = p.to(dtype)
        elif (
            p.dim() == 2
            and "hc" not in name
            and not name.endswith(("position_bias", "mlp.gate.weight"))
        ):
            p = p.to(dtype)
        out[name.removeprefix("model.")] = p
    for name, b in model.named_buffers():
        if name.endswith(("tid2eid", "e_score_correction_bias")):
            out[name.removeprefix("model.")] = b
    return out


# ---------------------------------------------------------------- pieces, each quick to compile


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMS norm over the last axis, in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE on the last 64 channels; `cos`, `sin` broadcast to (..., 32)."""
    nope, rope = x[..., :-64], x[..., -64:].float()
    a, b = rope[..., 0::2], rope[..., 1::2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([nope, turned.to(x.dtype)], dim=-1)


def hyper_in(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams (N, 4, D) -> post (N, 4), comb (N, 4, 4), normed sublayer input (N, D)."""
    flat = x.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre_w, post_w, comb_w = F.linear(flat, fn).split([STREAMS, STREAMS, STREAMS * STREAMS], dim=-1)
    pre_b, post_b, comb_b = base.split([STREAMS, STREAMS, STREAMS * STREAMS])
    pre = torch.sigmoid(pre_w * scale[0] + pre_b) + EPS
    post = 2 * torch.sigmoid(post_w * scale[1] + post_b)
    comb = (comb_w * scale[2] + comb_b).view(-1, STREAMS, STREAMS).softmax(-1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(CONFIG["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    collapsed = (pre.unsqueeze(-1) * x).sum(1).to(x.dtype)
    return post, comb, rms(collapsed, norm)


def hyper_out(x: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> Tensor:
    """Write a sublayer's output (N, D) back to the streams (N, 4, D)."""
    mixed = (comb.transpose(-1, -2).unsqueeze(-1) * x.unsqueeze(1).float()).sum(2)
    return (mixed + post.unsqueeze(-1) * out.unsqueeze(1).float()).to(x.dtype)


def hyper_head(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor) -> Tensor:
    """Streams (N, 4, D) -> normed hidden (N, D)."""
    flat = x.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(F.linear(flat, fn) * scale + base) + EPS
    return rms((pre.unsqueeze(-1) * x).sum(1).to(x.dtype), norm)


def finish_q(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Per-head norm and rotation of (B, S, H, 512)."""
    return rotate(rms(q), cos[:, None], sin[:, None])


def finish_kv(kv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, fp8: bool) -> Tensor:
    """Norm and rotation of (B, S, 512); `fp8` adds the cache's rounding."""
    kv = rotate(rms(kv, norm), cos, sin)
    return nvfp4.fp8_cache(kv) if fp8 else kv


def compress(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    doc: Tensor,
    overlap: bool,
    fp8: bool,
) -> Tensor:
    """Pool windows of tokens into entries: (B, S, C) -> (B, T, head). With `overlap` C = 2 * head
    (ratio 4).
    """
    batch, _, channels = kv.shape
    ratio = bias.shape[0]
    kv = kv.view(batch, -1, ratio, channels).float()
    gate = gate.view(batch, -1, ratio, channels).float() + bias
    if overlap:
        head = channels // 2
        starts = doc[:, ::ratio]
        follows = torch.zeros_like(starts, dtype=torch.bool)
        follows[:, 1:] = starts[:, 1:] == starts[:, :-1]
        before_kv = F.pad(kv[:, :-1, :, :head], (0, 0, 0, 0, 1, 0))
        before_gate = F.pad(gate[:, :-1, :, :head], (0, 0, 0, 0, 1, 0))
        before_gate = before_gate.masked_fill(~follows[:, :, None, None], float("-inf"))
        kv = torch.cat([before_kv, kv[..., head:]], dim=2)
        gate = torch.cat([before_gate, gate[..., head:]], dim=2)
    pooled = (kv * gate.softmax(dim=2)).sum(2).to(torch.bfloat16 if fp8 else norm.dtype)
    entry = rotate(rms(pooled, norm), cos[::ratio], sin[::ratio])
    return nvfp4.fp8_cache(entry) if fp8 and entry.shape[-1] == HEAD else entry


@lru_cache(maxsize=8)
def _window_mask(device: torch.device) -> Tensor:
    """(128, 256): query i of a block sees key j of [previous block | own block]."""
    i = torch.arange(WINDOW, device=device)[:, None]
    j = torch.arange(2 * WINDOW, device=device)[None] - WINDOW
    return (j <= i) & (i - j < WINDOW)


def local_mask(doc: Tensor) -> Tensor:
    """(B, S) -> (B, S/128, 128, 256): same conversation, inside the window."""
    own = doc.unflatten(1, (-1, WINDOW))
    previous = F.pad(doc, (WINDOW, 0), value=-1)[:, :-WINDOW].unflatten(1, (-1, WINDOW))
    keys = torch.cat([previous, own], dim=2)
    return (own.unsqueeze(-1) == keys.unsqueeze(2)) & _window_mask(doc.device)


def entry_mask(doc: Tensor, ratio: int) -> Tensor:
    """(B, S) -> (B, S, T): entries of the same conversation whose window is closed."""
    position = torch.arange(doc.shape[1], device=doc.device)
    closed = (
        torch.arange(doc.shape[1] // ratio, device=doc.device)[None]
        < ((position + 1) // ratio)[:, None]
    )
    return (doc.unsqueeze(-1) == doc[:, ::ratio].unsqueeze(1)) & closed


def soft_parts(
    local: Tensor, far: Tensor, sinks: Tensor, near_ok: Tensor, far_ok: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over [window | entries | sink] without joining them.

    local (B, b, 128, H, 256), far (B, b, 128, H, T), near_ok (B, b, 128, 256), far_ok (B, b, 128,
    T)
    -> probabilities of both parts, log of the normaliser (B, b, 128, H).
    """
    scale = HEAD**-0.5
    near = (local.float() * scale).masked_fill(~near_ok.unsqueeze(3), float("-inf"))
    away = (far.float() * scale).masked_fill(~far_ok.unsqueeze(3), float("-inf"))
    top = torch.maximum(torch.maximum(near.amax(-1), away.amax(-1)), sinks)
    near = torch.exp(near - top.unsqueeze(-1))
    away = torch.exp(away - top.unsqueeze(-1))
    total = near.sum(-1) + away.sum(-1) + torch.exp(sinks - top)
    inverse = (1 / total).unsqueeze(-1)
    return (
        (near * inverse).to(local.dtype),
        (away * inverse).to(local.dtype),
        (top + total.log()).detach(),
    )


def soft_local(local: Tensor, sinks: Tensor, near_ok: Tensor) -> Tensor:
    """Softmax over [window | sink]."""
    near = (local.float() * HEAD**-0.5).masked_fill(~near_ok.unsqueeze(3), float("-inf"))
    top = torch.maximum(near.amax(-1), sinks)
    near = torch.exp(near - top.unsqueeze(-1))
    total = near.sum(-1) + torch.exp(sinks - top)
    return (near / total.unsqueeze(-1)).to(local.dtype)


def index_mix(products: Tensor, weights: Tensor) -> Tensor:
    """(..., 32, T), (..., 32) -> (..., T): the indexer's score."""
    return (F.relu(products.float()) * weights.float().unsqueeze(-1)).sum(-2) * (
        INDEX_HEAD**-0.5 * INDEX_HEADS**-0.5
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """Clamped SwiGLU of (N, 2 * inner), gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def weighted_loss(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and the per-token one (detached)."""
    each = F.cross_entropy(logits.float(), target, reduction="none")
    return (each * weight).sum() / weight.sum().clamp(min=1), each.detach()


PIECES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        hyper_in,
        hyper_out,
        hyper_head,
        finish_q,
        finish_kv,
        compress,
        soft_parts,
        soft_local,
        index_mix,
        swiglu,
        weighted_loss,
        rotate,
        rms,
        local_mask,
        entry_mask,
    )
}


@lru_cache(maxsize=1)
def compiled_pieces() -> dict[str, Callable[..., Any]]:
    """The pieces through torch.compile, for fixed training shapes."""
    return {name: _compiled(f) for name, f in PIECES.items()}


# ---------------------------------------------------------------- experts


class _Spread(torch.autograd.Function):
    """x (N, D) -> rows sorted by expert (N * 6, D); its backward adds six rows instead of
    scattering.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order // ACTIVE]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back].view(-1, ACTIVE, grad.shape[-1]).sum(1), None, None


class _Reorder(torch.autograd.Function):
    """y[back], whose backward is grad[order]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, back: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[back]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x up to ends[e] go through weight[e] (E, N, K)."""
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    parts = torch.tensor_split(x, ends[:-1].long())
    return torch.cat([F.linear(part, w) for part, w in zip(parts, weight, strict=True)])


# ---------------------------------------------------------------- the whole model


@dataclass
class Options:
    """What a forward pass does beyond the plain model."""

    fp8_cache: bool = False
    select: bool = (
        False  # the indexer's own top-k instead of all entries (matters beyond 2,048 tokens)
    )
    align: Tensor | None = None  # (B, P) query positions at which the indexer is taught
    compiled: bool = False
    observe: Callable[[str, Tensor], None] | None = None  # called with (matrix name, its input)


@dataclass
class Extras:
    """What a forward pass reports besides the hidden states."""

    align_loss: Tensor | None = None
    load: dict[int, Tensor] = field(default_factory=dict)
    recall: list[Tensor] = field(default_factory=list)


def angles(model: DeepseekV4ForCausalLM, length: int) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin (S, 32) of the plain and of the compressed layers."""
    rotary = model.model.rotary_emb
    position = torch.arange(length, device=rotary.main_inv_freq.device).float()[:, None]
    out = {}
    for kind in ("main", "compress"):
        angle = position * getattr(rotary, f"{kind}_inv_freq").float()
        out[kind] = (angle.cos(), angle.sin())
    return out


def forward(
    w: dict[str, Tensor],
    turns: dict[str, tuple[Tensor, Tensor]],
    ids: Tensor,
    doc: Tensor,
    options: Options,
) -> tuple[Tensor, Extras]:
    """ids, doc (B, S), S a multiple of 128 -> normed hidden states (B * S, 256)."""
    op = compiled_pieces() if options.compiled else PIECES
    batch, length = ids.shape
    extras = Extras()
    embedded = w["embed_tokens.weight"][ids.flatten()]
    x = embedded.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()
    near_ok = op["local_mask"](doc)
    far_ok = {r: op["entry_mask"](doc, r) for r in set(RATIOS) if r}
    for i in range(LAYERS):
        p = {
            k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")
        }
        post, comb, y = op["hyper_in"](
            x, p["attn_hc.fn"], p["attn_hc.base"], p["attn_hc.scale"], p["input_layernorm.weight"]
        )
        out = _attention(
            p,
            turns,
            y.view(batch, length, -1),
            doc,
            near_ok,
            far_ok.get(RATIOS[i]),
            i,
            options,
            extras,
        )
        x = op["hyper_out"](x, post, comb, out)
        post, comb, y = op["hyper_in"](
            x,
            p["ffn_hc.fn"],
            p["ffn_hc.base"],
            p["ffn_hc.scale"],
            p["post_attention_layernorm.weight"],
        )
        x = op["hyper_out"](x, post, comb, _experts(p, y, ids, i, options, extras))
    head = op["hyper_head"](
        x, w["hc_head.hc_fn"], w["hc_head.hc_base"], w["hc_head.hc_scale"], w["norm.weight"]
    )
    return head, extras


def _see(options: Options, layer: int, name: str, x: Tensor) -> None:
    if options.observe:
        options.observe(f"layers.{layer}.{name}", x)


def _attention(
    p: dict[str, Tensor],
    turns: dict[str, tuple[Tensor, Tensor]],
    y: Tensor,
    doc: Tensor,
    near_ok: Tensor,
    far_ok: Tensor | None,
    layer: int,
    options: Options,
    extras: Extras,
) -> Tensor:
    op = compiled_pieces() if options.compiled else PIECES
    batch, length, _ = y.shape
    ratio = RATIOS[layer]
    cos, sin = turns["compress" if ratio else "main"]
    a = "self_attn."
    _see(options, layer, a + "q_a_proj", y)
    q_low = op["rms"](F.linear(y, p[a + "q_a_proj.weight"]), p[a + "q_a_norm.weight"])
    _see(options, layer, a + "q_b_proj", q_low)
    q = op["finish_q"](
        F.linear(q_low, p[a + "q_b_proj.weight"]).view(batch, length, HEADS, HEAD), cos, sin
    )
    kv = op["finish_kv"](
        F.linear(y, p[a + "kv_proj.weight"]), p[a + "kv_norm.weight"], cos, sin, options.fp8_cache
    )

    blocks = length // WINDOW
    before = F.pad(kv, (0, 0, WINDOW, 0))[:, :-WINDOW].view(batch, blocks, WINDOW, HEAD)
    keys = torch.cat([before, kv.view(batch, blocks, WINDOW, HEAD)], dim=2).flatten(0, 1)
    rows = q.reshape(batch * blocks, WINDOW * HEADS, HEAD)
    local = torch.bmm(rows, keys.transpose(1, 2)).view(batch, blocks, WINDOW, HEADS, 2 * WINDOW)
    if far_ok is None:
        near = op["soft_local"](local, p[a + "sinks"], near_ok)
        out = torch.bmm(near.view(batch * blocks, WINDOW * HEADS, -1), keys).view(
            batch, length, HEADS, HEAD
        )
    else:
        c = a + "compressor."
        entries = op["compress"](
            F.linear(y, p[c + "kv_proj.weight"]),
            F.linear(y, p[c + "gate_proj.weight"]),
            p[c + "position_bias"],
            p[c + "kv_norm.weight"],
            cos,
            sin,
            doc,
            ratio == 4,
            options.fp8_cache,
        ).to(y.dtype)
        teach = ratio == 4 and options.align is not None
        narrow = ratio == 4 and options.select and length // 4 > TOP
        seen = far_ok
        if teach or narrow:
            index = _Index(p, y.detach(), q_low.detach(), cos, sin, doc, options)
            if narrow:
                seen = far_ok & index.chosen(far_ok)
        far = torch.bmm(q.reshape(batch, length * HEADS, HEAD), entries.transpose(1, 2))
        far = far.view(batch, blocks, WINDOW, HEADS, -1)
        near, away, log_total = op["soft_parts"](
            local, far, p[a + "sinks"], near_ok, seen.unflatten(1, (blocks, WINDOW))
        )
        out = torch.bmm(near.view(batch * blocks, WINDOW * HEADS, -1), keys).view(
            batch, length * HEADS, HEAD
        )
        out = out + torch.bmm(away.reshape(batch, length * HEADS, -1), entries)
        out = out.view(batch, length, HEADS, HEAD)
        if teach:
            loss = index.alignment(
                q.detach(), entries.detach(), log_total.view(batch, length, HEADS), far_ok, extras
            )
            extras.align_loss = loss if extras.align_loss is None else extras.align_loss + loss
    out = op["rotate"](out, cos[:, None], -sin[:, None])
    _see(options, layer, a + "o_a_proj", out)
    grouped_out = torch.einsum(
        "bshd,hod->bsho", out, p[a + "o_a_proj.weight"].view(HEADS, -1, HEAD)
    ).flatten(2)
    _see(options, layer, a + "o_b_proj", grouped_out)
    return F.linear(grouped_out, p[a + "o_b_proj.weight"]).flatten(0, 1)


class _Index:
    """The lightning indexer of one layer: its scores, its choice, and how it is taught to agree
    with the attention.
    """

    def __init__(
        self,
        p: dict[str, Tensor],
        y: Tensor,
        q_low: Tensor,
        cos: Tensor,
        sin: Tensor,
        doc: Tensor,
        options: Options,
    ) -> None:
        op = self.op = compiled_pieces() if options.compiled else PIECES
        n = "self_attn.compressor.indexer."
        self.options = options
        self.batch, self.length, _ = y.shape
        self.keys = op["compress"](
            F.linear(y, p[n + "kv_proj.weight"]),
            F.linear(y, p[n + "gate_proj.weight"]),
            p[n + "position_bias"],
            p[n + "kv_norm.weight"],
            cos,
            sin,
            doc,
            True,
            False,
        ).to(y.dtype)
        self.q = op["rotate"](
            F.linear(q_low, p[n + "q_b_proj.weight"]).view(
                self.batch, self.length, INDEX_HEADS, INDEX_HEAD
            ),
            cos[:, None],
            sin[:, None],
        )
        self.weights = F.linear(y, p[n + "scorer.weights_proj.weight"])

    def _scores(self, q: Tensor, weights: Tensor, row: slice = slice(None)) -> Tensor:
        """(b, P, 32, 128), (b, P, 32) -> (b, P, T)."""
        keys = self.keys[row]
        products = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(*q.shape[:3], -1)
        return self.op["index_mix"](products, weights)

    @torch.no_grad()
    def chosen(self, allowed: Tensor) -> Tensor:
        """(B, S, T): the entries among each query's 512 best."""
        parts = []
        for b in range(self.batch):
            row = slice(b, b + 1)
            scores = self._scores(self.q[row], self.weights[row], row).masked_fill(
                ~allowed[row], float("-inf")
            )
            parts.append(scores >= scores.topk(TOP, dim=-1).values[..., -1:])
        return torch.cat(parts)

    def alignment(
        self, q: Tensor, entries: Tensor, log_total: Tensor, allowed: Tensor, extras: Extras
    ) -> Tensor:
        """KL from the main attention's head-summed probabilities over entries to the indexer's
        softmax.
        """
        at = self.options.align
        assert at is not None
        take = torch.arange(self.batch, device=q.device)[:, None], at
        ok = allowed[take]
        with torch.no_grad():
            logits = (
                torch.bmm(q[take].flatten(1, 2), entries.transpose(1, 2))
                .view(*at.shape, HEADS, -1)
                .float()
            )
            mass = (
                torch.exp(logits * HEAD**-0.5 - log_total[take].unsqueeze(-1))
                .sum(2)
                .masked_fill(~ok, 0)
            )
            total = mass.sum(-1, keepdim=True)
            target = mass / total.clamp(min=1e-9)
        scores = self._scores(self.q[take], self.weights[take]).masked_fill(~ok, -1e30)
        guess = scores.log_softmax(-1).masked_fill(~ok, 0)
        kl = (torch.special.xlogy(target, target) - target * guess).sum(-1)
        good = (total.squeeze(-1) > 1e-3).float()
        if scores.shape[-1] > TOP:
            with torch.no_grad():
                best = scores >= scores.topk(TOP, dim=-1).values[..., -1:]
                many = (ok.sum(-1) > TOP) & (good > 0)
                extras.recall.append(
                    ((target * best).sum(-1) * many).sum() / many.sum().clamp(min=1)
                )
        return (kl * good).sum() / good.sum().clamp(min=1)


def _experts(
    p: dict[str, Tensor], y: Tensor, ids: Tensor, layer: int, options: Options, extras: Extras
) -> Tensor:
    op = compiled_pieces() if options.compiled else PIECES
    scores = torch.sqrt(F.softplus(F.linear(y.float(), p["mlp.gate.weight"].float())))
    if layer < CONFIG["num_hash_layers"]:
        chosen = p["mlp.gate.tid2eid"][ids.flatten()]
    else:
        chosen = (
            (scores.detach() + p["mlp.gate.e_score_correction_bias"])
            .topk(ACTIVE, dim=-1, sorted=False)
            .indices
        )
    weight = scores.gather(1, chosen)
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * CONFIG["routed_scaling_factor"]
    order = chosen.flatten().to(torch.int16).argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    ends = counts.cumsum(0).to(torch.int32)
    extras.load[layer] = counts
    _see(options, layer, "mlp", y)
    gate_up = grouped(_Spread.apply(y, order, back), p["mlp.experts.gate_up_proj"], ends)
    inner = op["swiglu"](gate_up)
    if options.observe:
        for e, (a, b) in enumerate(
            zip(
                torch.tensor_split(inner, ends[:-1].long().cpu()),
                torch.tensor_split(gate_up, ends[:-1].long().cpu()),
                strict=True,
            )
        ):
            options.observe(f"layers.{layer}.mlp.experts.{e}.down_proj", a)
            options.observe(f"layers.{layer}.mlp.experts.{e}.preactivation", b)
    routed = _Reorder.apply(grouped(inner, p["mlp.experts.down_proj"], ends), back, order)
    routed = (routed.view(-1, ACTIVE, WIDTH) * weight.unsqueeze(-1).to(y.dtype)).sum(1)
    s = "mlp.shared_experts."
    both = F.linear(y, torch.cat([p[s + "gate_proj.weight"], p[s + "up_proj.weight"]]))
    shared = op["swiglu"](both)
    _see(options, layer, s + "down_proj", shared)
    _see(options, layer, s + "preactivation", both)
    return routed + F.linear(shared, p[s + "down_proj.weight"])


def align_positions(weight: Tensor, per_batch: int = 2048) -> Tensor:
    """Query positions (B, P) at which to teach the indexer: random, answers and the later half
    preferred.
    """
    batch, length = weight.shape
    key = (
        torch.rand_like(weight)
        + 0.7 * (weight > 0.5)
        + 0.5 * (torch.arange(length, device=weight.device) > length // 2)
    )
    return key.topk(min(length, max(1, per_batch // batch)), dim=-1).indices


def fan_rms(p: Tensor) -> float:
    """Root mean square of a tensor, the unit of a relative step."""
    return math.sqrt(float(p.detach().float().square().mean()))
