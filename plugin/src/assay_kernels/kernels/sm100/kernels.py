"""The Blackwell kernels behind the project's kernel interface: W4A4. Compiled, never run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.kernels.plain import PlainOperand
from assay_kernels.kernels.sm100.compiler import Epilogue, KernelKey, load_kernel, require_dsl
from assay_kernels.kernels.sm100.config import SMS, TILE_K, GemmConfig
from assay_kernels.kernels.sm100.layout import check_weight, gate_up_blocks, scales_128x4
from assay_kernels.kernels.sm100.routing import TiledRows
from assay_kernels.numerics.layout import padded
from assay_kernels.numerics.nvfp4 import usable_scale


@dataclass(frozen=True)
class BlackwellOperand:
    """Weights in kernel order."""

    codes: Tensor  # uint8 [E * N * K / 2]
    scales: Tensor  # uint8, 128 x 4 layout, expert after expert
    alpha: Tensor  # fp32 [E * N], input_scale included where there is one
    n: int
    k: int
    experts: int  # 0: one matrix
    gate_up: bool  # rows are sixteen gates, sixteen ups, ..
    input_scale: float | None  # None: per token


@dataclass(frozen=True)
class Quantized:
    """Activations as the products read them."""

    codes: Tensor  # uint8 [rows * K / 2]
    scales: Tensor  # uint8, 128 x 4 layout, padding zero
    row_scale: Tensor | None  # fp32 [rows * groups]; None: static, part of alpha
    rows: int
    k: int


class BlackwellKernels(KernelSet):
    """NVFP4 weights times NVFP4 activations on sm_100a.

    pdl: programmatic dependent launch. Results are the same bits from run to run: no atomics.
    """

    name = "sm100 w4a4"
    quantizes_activations = True

    def __init__(self, pdl: bool = True) -> None:
        require_dsl()
        self._pdl = int(pdl)

    def prepare(self, weight: PackedWeight) -> BlackwellOperand:
        """Scales into the 128 x 4 layout; codes stay where they are."""
        return self._prepare(weight, gate_up=False)

    def prepare_gate_up(self, weight: PackedWeight) -> BlackwellOperand:
        """The same for rows gate | up of `dense_swiglu` and `grouped_l1`, reordered by sixteens."""
        return self._prepare(weight, gate_up=True)

    def _prepare(self, weight: PackedWeight, gate_up: bool) -> BlackwellOperand:
        check_weight(weight.shape)
        *lead, n, k = weight.shape
        codes, scales = weight.codes, weight.block_scale.view(torch.uint8)
        input_scale = _static_scale(weight.input_scale)
        alpha = weight.alpha.float() * (1.0 if input_scale is None else input_scale)
        if gate_up:
            codes, scales = gate_up_blocks(codes), gate_up_blocks(scales)
            alpha = gate_up_blocks(alpha.unsqueeze(-1)).squeeze(-1)
        return BlackwellOperand(
            codes.contiguous().view(-1),
            scales_128x4(scales.view(torch.float8_e4m3fn)),
            alpha.reshape(-1).contiguous(),
            n,
            k,
            lead[0] if lead else 0,
            gate_up,
            input_scale,
        )

    def prepare_plain(self, weight: Tensor) -> PlainOperand:
        """bf16 [.., N, K] weights stay as they are."""
        return PlainOperand(weight)

    def quantize_activation(
        self, x: Tensor, scale: float | None, source: Tensor | None = None, groups: int = 1
    ) -> Quantized:
        """x [M, groups * K] bf16 -> codes, 128 x 4 scales and, without a static scale, a scale a
        row and group.

        source: int32 [R], the row of x that row r is, -1 for zeros; None: rows as they are.
        """
        k = x.shape[1]
        if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(
                "x must be bfloat16 with contiguous rows that start on 16 bytes, "
                f"got {x.dtype} with strides {x.stride()}"
            )
        if k % (64 * groups):
            raise ValueError(f"{groups} groups of K must be multiples of 64, got {k}")
        rows = x.shape[0] if source is None else source.shape[0]
        device = x.device
        codes = torch.empty(rows * k // 2, dtype=torch.uint8, device=device)
        full_rows, full_columns = padded(rows, k // 16)
        scales = torch.empty(full_rows * full_columns, dtype=torch.uint8, device=device)
        dynamic = scale is None
        row_scale = torch.empty(rows * groups if dynamic else 0, dtype=torch.float32, device=device)
        tokens = source if source is not None else torch.empty(0, dtype=torch.int32, device=device)
        if rows:
            key = KernelKey("quantize", dynamic=dynamic, grouped=source is not None)
            load_kernel(key)(
                x.as_strided((x.stride(0) * (x.shape[0] - 1) + k,), (1,)), codes, scales,
                row_scale, tokens, rows, x.stride(0), k // groups, groups, scale or 0.0, self._pdl,
            )  # fmt: skip
        return Quantized(codes, scales, row_scale if dynamic else None, rows, k)

    def _gemm(
        self,
        x: Quantized,
        operand: BlackwellOperand,
        out: Tensor,
        epilogue: Epilogue,
        *,
        limit: float = 0.0,
        group_n: int = 0,
        row_scale: Tensor | None = None,
        tile_expert: Tensor | None = None,
        out_scales: Tensor | None = None,
        out_scale: float = 0.0,
    ) -> None:
        grouped = tile_expert is not None
        swiglu = epilogue in ("swiglu", "requantise")
        if grouped:
            config = GemmConfig.for_grouped()
        else:
            config = GemmConfig.for_dense(operand.n, operand.k, x.rows, swiglu=swiglu)
        if group_n and group_n % config.channels:
            raise ValueError(f"groups of {group_n} channels are not whole tiles")
        row_scale = x.row_scale if row_scale is None else row_scale
        none = torch.empty(0, dtype=torch.uint8, device=out.device)
        load_kernel(KernelKey("gemm", config, epilogue, row_scale is not None, grouped))(
            x.codes, x.scales, operand.codes, operand.scales, operand.alpha,
            none.view(torch.float32) if row_scale is None else row_scale,
            out.view(-1), none if out_scales is None else out_scales,
            none.view(torch.int32) if tile_expert is None else tile_expert,
            x.rows, operand.n, operand.k, max(operand.experts, 1), group_n or operand.n,
            limit, out_scale, SMS // config.ctas, self._pdl,
        )  # fmt: skip

    def dense(
        self,
        x: Tensor,
        operand: BlackwellOperand | PlainOperand,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """x [M, K] bf16 -> [M, N] in bf16, or in fp32 for the compressor."""
        if isinstance(operand, PlainOperand):
            return operand.dense(x, out_dtype)
        if out_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
        if operand.experts or operand.gate_up:
            raise ValueError("a stack of experts, or gate and up rows, need their own kernel")
        out = torch.empty(x.shape[0], operand.n, dtype=out_dtype, device=x.device)
        if x.shape[0]:
            self._gemm(
                self._quantized(x, operand),
                operand,
                out,
                "fp32" if out_dtype == torch.float32 else "bf16",
            )
        return out

    def compressor(self, x: Tensor, operand: BlackwellOperand | PlainOperand) -> Tensor:
        """x [M, K] bf16 -> [M, N] fp32: the softmax over gates that follows needs it."""
        return self.dense(x, operand, torch.float32)

    def _quantized(self, x: Tensor, operand: BlackwellOperand) -> Quantized:
        if x.dim() != 2 or x.shape[1] != operand.k:
            raise ValueError(f"x must be [M, {operand.k}], got {tuple(x.shape)}")
        return self.quantize_activation(x, operand.input_scale)

    def dense_swiglu(
        self, x: Tensor, operand: BlackwellOperand | PlainOperand, limit: float
    ) -> Tensor:
        """x [M, K] bf16, gate and up rows -> [M, N / 2] bf16, clamped at `limit`."""
        if isinstance(operand, PlainOperand):
            return operand.dense_swiglu(x, limit)
        _check_limit(operand, limit)
        out = torch.empty(x.shape[0], operand.n // 2, dtype=torch.bfloat16, device=x.device)
        if x.shape[0]:
            self._gemm(self._quantized(x, operand), operand, out, "swiglu", limit=limit)
        return out

    def dense_swiglu_requantised(
        self, x: Tensor, operand: BlackwellOperand, limit: float, scale: float
    ) -> Quantized:
        """The same, as the next product's input: scale is that product's static input_scale."""
        _check_limit(operand, limit)
        return self._requantised(self._quantized(x, operand), operand, limit, scale, None)

    def _requantised(
        self,
        x: Quantized,
        operand: BlackwellOperand,
        limit: float,
        scale: float,
        tile_expert: Tensor | None,
    ) -> Quantized:
        width = operand.n // 2
        device = x.codes.device
        codes = torch.empty(x.rows * width // 2, dtype=torch.uint8, device=device)
        rows, columns = padded(x.rows, width // 16)
        scales = torch.empty(rows * columns, dtype=torch.uint8, device=device)
        if width % 64:
            raise ValueError(f"a requantised width must be a multiple of 64, got {width}")
        if x.rows:
            self._gemm(
                x,
                operand,
                codes,
                "requantise",
                limit=limit,
                tile_expert=tile_expert,
                out_scales=scales,
                out_scale=scale,
            )
        return Quantized(codes, scales, None, x.rows, width)

    def wo_a(self, x: Tensor, operand: BlackwellOperand | PlainOperand) -> Tensor:
        """x [M, G, K] -> [M, G, R] bf16, each group with its own [R, K] weights."""
        if isinstance(operand, PlainOperand):
            return operand.wo_a(x)
        groups = operand.experts
        if x.dim() != 3 or x.shape[1] != groups or not x.is_contiguous():
            raise ValueError(f"x must be contiguous [M, {groups}, K], got {tuple(x.shape)}")
        if groups > 1 and operand.k % TILE_K:
            raise ValueError(f"groups of {operand.k} inputs are not whole stages of {TILE_K}")
        # Groups packed one by one lie as one matrix of all their rows would.
        whole = replace(operand, n=groups * operand.n, experts=0)
        out = torch.empty(x.shape[0], whole.n, dtype=torch.bfloat16, device=x.device)
        if x.shape[0]:
            flat = x.reshape(x.shape[0], groups * operand.k)
            quantized = self.quantize_activation(flat, operand.input_scale, groups=groups)
            self._gemm(quantized, whole, out, "bf16", group_n=operand.n)
        return out.view(x.shape[0], groups, operand.n)

    def route(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_local_experts: int,
        expert_map: Tensor | None,
    ) -> TiledRows:
        """The router's choice as tiles of rows."""
        return TiledRows.from_router(topk_ids, topk_weights, num_local_experts, expert_map)

    def routed(
        self,
        x: Tensor,
        l1: BlackwellOperand,
        l2: BlackwellOperand,
        rows: TiledRows,
        limit: float,
    ) -> Tensor:
        """Both routed layers, x [M, H] -> [M, H]: gather, L1 with SwiGLU, L2, sum by token."""
        _check_limit(l1, limit)
        if not rows.rows:
            return torch.zeros(x.shape[0], l2.n, dtype=torch.bfloat16, device=x.device)
        quantized = self.quantize_activation(x, l1.input_scale, rows.source)
        if l2.input_scale is not None:
            h = self._requantised(quantized, l1, limit, l2.input_scale, rows.tile_expert)
            return self._combine(h, l2, rows)
        out = torch.empty(rows.rows, l1.n // 2, dtype=torch.bfloat16, device=x.device)
        self._gemm(quantized, l1, out, "swiglu", limit=limit, tile_expert=rows.tile_expert)
        return self._combine(self._rows_quantized(out, l2, rows), l2, rows)

    def _rows_quantized(self, h: Tensor, operand: BlackwellOperand, rows: TiledRows) -> Quantized:
        """Rows in tiles; those of padding and of tiles not in use become zeros, unread."""
        index = torch.arange(rows.rows, dtype=torch.int32, device=h.device)
        source = torch.where(rows.source >= 0, index, -1)
        return self.quantize_activation(h, operand.input_scale, source)

    def _combine(self, h: Quantized, operand: BlackwellOperand, rows: TiledRows) -> Tensor:
        """L2 weighted by the router in fp32, then a token's rows summed in the router's order."""
        weight = rows.weight if h.row_scale is None else rows.weight * h.row_scale
        device = h.codes.device
        products = torch.empty(rows.rows, operand.n, dtype=torch.float32, device=device)
        self._gemm(h, operand, products, "fp32", row_scale=weight, tile_expert=rows.tile_expert)
        tokens, slots = rows.place.shape
        out = torch.empty(tokens, operand.n, dtype=torch.bfloat16, device=device)
        load_kernel(KernelKey("finalise"))(
            products.view(-1), rows.place.view(-1), out.view(-1), tokens, operand.n, slots,
            self._pdl,
        )  # fmt: skip
        return out

    def grouped_l1(
        self,
        x: Tensor,
        operand: BlackwellOperand | PlainOperand,
        groups: Groups | TiledRows,
        limit: float,
    ) -> Tensor:
        """x [M, H] bf16 -> bf16 rows: [R, I] by expert, or in tiles for `TiledRows`."""
        operand = _experts(operand)
        _check_limit(operand, limit)
        rows, keep = TiledRows.from_groups(groups)
        out = torch.empty(rows.rows, operand.n // 2, dtype=torch.bfloat16, device=x.device)
        if rows.rows:
            quantized = self.quantize_activation(x, operand.input_scale, rows.source)
            self._gemm(quantized, operand, out, "swiglu", limit=limit, tile_expert=rows.tile_expert)
        return out if keep is None else out[keep]

    def grouped_l2(
        self,
        h: Tensor,
        operand: BlackwellOperand | PlainOperand,
        groups: Groups | TiledRows,
    ) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16: weighted by the router, summed over a token's rows."""
        operand = _experts(operand)
        rows, keep = TiledRows.from_groups(groups)
        if not rows.rows:
            tokens = rows.place.shape[0]
            return torch.zeros(tokens, operand.n, dtype=torch.bfloat16, device=h.device)
        if keep is None:
            return self._combine(self._rows_quantized(h, operand, rows), operand, rows)
        source = torch.full((rows.rows,), -1, dtype=torch.int32, device=h.device)
        source[keep] = torch.arange(h.shape[0], dtype=torch.int32, device=h.device)
        quantized = self.quantize_activation(h, operand.input_scale, source)
        return self._combine(quantized, operand, rows)


def _static_scale(scale: Tensor | None) -> float | None:
    """A usable static input scale; it waits for the device, once, at load time."""
    return float(scale) if scale is not None and usable_scale(scale) else None


def _experts(operand: BlackwellOperand | PlainOperand) -> BlackwellOperand:
    if isinstance(operand, PlainOperand) or not operand.experts:
        raise ValueError("grouped kernels take a stack of NVFP4 experts")
    return operand


def _check_limit(operand: BlackwellOperand, limit: float) -> None:
    if not 0 < limit < float("inf"):
        raise ValueError(f"swiglu_limit must be finite and positive, got {limit}")
    if not operand.gate_up:
        raise ValueError("SwiGLU needs gates and ups in turns of sixteen: prepare_gate_up")
