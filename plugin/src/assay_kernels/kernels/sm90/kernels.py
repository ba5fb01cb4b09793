"""The Hopper kernels behind the project's kernel interface: W4A16, bf16 activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay_kernels.kernels.interface import Groups, KernelSet, PackedWeight
from assay_kernels.kernels.plain import PlainOperand
from assay_kernels.kernels.sm90.compiler import Epilogue, KernelKey, load_kernel, require_dsl
from assay_kernels.kernels.sm90.config import K_BLOCK, ROW_BLOCK, SMS, GemmConfig
from assay_kernels.kernels.sm90.layout import (
    ALPHA_FACTOR,
    interleave_gate_up,
    pack_codes,
    pack_scales,
)
from assay_kernels.kernels.sm90.routing import SortedRows

NO_LIMIT = 0.0
EVERY_CLUSTER = 1 << 30


@dataclass(frozen=True)
class HopperOperand:
    """Weights in kernel order (`layout`), in the storage they were loaded into."""

    codes: Tensor  # int32 [E * N * K / 8]
    scales: Tensor  # int32 [E * N * K / 64]
    alpha: Tensor  # fp32 [E * N], times ALPHA_FACTOR
    n: int
    k: int
    experts: int  # 0: one matrix
    gate_up: bool  # rows are gate 0, up 0, gate 1, ..


def check_activation(x: Tensor, k: int, name: str = "x") -> None:
    """Raise ValueError, naming tensor and rule, unless TMA can read x [M, k]."""
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"{name} must be [M, {k}], got {tuple(x.shape)}")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{name} must be bfloat16, got {x.dtype}")
    if x.shape[0] > 1 and (x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < k):
        raise ValueError(
            f"{name} must have contiguous rows that start on 16 bytes, got strides {x.stride()}"
        )
    if x.data_ptr() % 16:
        raise ValueError(f"{name} must start on 16 bytes, got address {x.data_ptr():#x}")


class HopperKernels(KernelSet):
    """NVFP4 weights times bf16 activations on sm_90a.

    pdl: let a kernel's weights be fetched while the one before it ends (programmatic dependent
    launch). Results are bit-identical from run to run, but for sums over several local experts of a
    token in `grouped_l2`, whose order is the hardware's.
    """

    name = "sm90 w4a16"

    def __init__(self, pdl: bool = True) -> None:
        require_dsl()
        self._pdl = int(pdl)
        self._workspaces: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def prepare(self, weight: PackedWeight) -> HopperOperand:
        """Reorder codes [.., N, K/2] and scales in place; peak memory is one matrix more."""
        return self._prepare(weight, gate_up=False)

    def prepare_gate_up(self, weight: PackedWeight) -> HopperOperand:
        """The same for rows gate | up of `dense_swiglu` and `grouped_l1`."""
        return self._prepare(weight, gate_up=True)

    def _prepare(self, weight: PackedWeight, gate_up: bool) -> HopperOperand:
        *lead, n, k = weight.shape
        if len(lead) > 1 or n % ROW_BLOCK or k % K_BLOCK:
            raise ValueError(
                f"weights {weight.shape}: at most one leading dimension, channels a multiple of "
                f"{ROW_BLOCK}, inputs a multiple of {K_BLOCK}"
            )
        for name, tensor in (("codes", weight.codes), ("block_scale", weight.block_scale)):
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and start on 16 bytes")
        experts = lead[0] if lead else 0
        codes = weight.codes.view(experts or 1, n, k // 2)
        scales = weight.block_scale.view(torch.uint8).view(experts or 1, n, k // 16)
        alpha = weight.alpha.float().view(experts or 1, n, 1) * ALPHA_FACTOR
        for expert in range(experts or 1):
            code, scale = codes[expert], scales[expert]
            if gate_up:
                code, scale = interleave_gate_up(code), interleave_gate_up(scale)
            scale = scale.view(torch.float8_e4m3fn)
            words = pack_codes(code, scale)
            scales[expert].view(-1).view(torch.int32).copy_(pack_scales(scale))
            codes[expert].view(-1).view(torch.int32).copy_(words)
        if gate_up:
            alpha = interleave_gate_up(alpha)
        return HopperOperand(
            codes.view(-1).view(torch.int32),
            scales.view(-1).view(torch.int32),
            alpha.reshape(-1).contiguous(),
            n,
            k,
            experts,
            gate_up,
        )

    def prepare_plain(self, weight: Tensor) -> PlainOperand:
        """bf16 [.., N, K] weights stay as they are."""
        return PlainOperand(weight)

    def _dense(
        self,
        x: Tensor,
        operand: HopperOperand,
        out: Tensor,
        epilogue: Epilogue,
        limit: float = NO_LIMIT,
        groups: int = 1,
        config: GemmConfig | None = None,
    ) -> Tensor:
        check_activation(x, groups * operand.k)
        m = x.shape[0]
        if operand.experts:
            raise ValueError("a stack of experts needs a grouped kernel")
        if m == 0:
            return out
        rows = operand.n // groups
        group = rows if groups > 1 else 0
        config = config or GemmConfig.for_dense(operand.n, operand.k, m, group)
        load_kernel(KernelKey(config, epilogue))(
            operand.codes, operand.scales, operand.alpha, x, out, operand.n, operand.k, rows,
            limit, SMS * config.min_blocks if config.split_k == 1 else EVERY_CLUSTER, self._pdl,
        )  # fmt: skip
        return out

    def dense(
        self,
        x: Tensor,
        operand: HopperOperand | PlainOperand,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """x [M, K] bf16 -> [M, N] in bf16, or in fp32 for the compressor."""
        if isinstance(operand, PlainOperand):
            return operand.dense(x, out_dtype)
        if out_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
        if operand.gate_up:
            raise ValueError("gate and up rows are interleaved: use dense_swiglu")
        out = torch.empty(x.shape[0], operand.n, dtype=out_dtype, device=x.device)
        return self._dense(x, operand, out, "fp32" if out_dtype == torch.float32 else "bf16")

    def dense_swiglu(
        self, x: Tensor, operand: HopperOperand | PlainOperand, limit: float
    ) -> Tensor:
        """x [M, K] bf16, gate and up rows -> [M, N / 2] bf16, clamped at `limit`."""
        if isinstance(operand, PlainOperand):
            return operand.dense_swiglu(x, limit)
        _check_limit(operand, limit)
        out = torch.empty(x.shape[0], operand.n // 2, dtype=torch.bfloat16, device=x.device)
        return self._dense(x, operand, out, "swiglu", limit)

    def wo_a(self, x: Tensor, operand: HopperOperand | PlainOperand) -> Tensor:
        """x [M, G, K] -> [M, G, R] bf16, each group with its own [R, K] weights."""
        if isinstance(operand, PlainOperand):
            return operand.wo_a(x)
        groups = operand.experts
        if x.dim() != 3 or x.shape[1] != groups or not x.is_contiguous():
            raise ValueError(f"x must be contiguous [M, {groups}, K], got {tuple(x.shape)}")
        # Groups packed one by one lie as one matrix of all their rows would.
        whole = replace(operand, n=groups * operand.n, experts=0)
        out = torch.empty(x.shape[0], whole.n, dtype=torch.bfloat16, device=x.device)
        flat = x.reshape(x.shape[0], groups * x.shape[2])
        return self._dense(flat, whole, out, "bf16", groups=groups).view(x.shape[0], groups, -1)

    def _workspace(self, device: torch.device, tokens: int, n: int) -> tuple[Tensor, Tensor]:
        """Zeros that `combine` adds up in and leaves zero: one of its own for every stream."""
        stream = torch.cuda.current_stream(device).cuda_stream
        key = (device.index or 0, stream, n)
        total, counts = self._workspaces.get(key, (None, None))
        if total is None or counts is None or total.numel() < tokens * n:
            total = torch.zeros(tokens * n, dtype=torch.float32, device=device)
            counts = torch.zeros(tokens * (n // ROW_BLOCK), dtype=torch.int32, device=device)
            self._workspaces[key] = (total, counts)
        return total, counts

    def _grouped(
        self, x: Tensor, operand: HopperOperand, rows: SortedRows, out: Tensor, limit: float | None
    ) -> None:
        """The grouped product on rows in expert order; without a limit, the one that combines."""
        combine = limit is None
        expected = x.shape[0] * rows.share
        config = GemmConfig.for_grouped(operand.k, expected, operand.experts, operand.n)
        experts = 64 if operand.experts <= 64 else 256
        if operand.experts > 256:
            raise ValueError(f"at most 256 local experts, got {operand.experts}")
        row_tiles = -(-operand.n // config.rows)
        most = row_tiles * min(x.shape[0], operand.experts + x.shape[0] // config.tokens)
        clusters = most if config.split_k > 1 else min(most, SMS * config.min_blocks)
        total, counts = (
            self._workspace(x.device, out.shape[0], operand.n)
            if combine
            else (rows.weights, rows.tokens)
        )
        load_kernel(KernelKey(config, "combine" if combine else "swiglu", experts, combine))(
            operand.codes, operand.scales, operand.alpha, x, out, rows.ends, rows.tokens,
            rows.weights, rows.fan, total, counts, operand.n, operand.k,
            NO_LIMIT if limit is None else limit, clusters, self._pdl,
        )  # fmt: skip

    def routed(
        self,
        x: Tensor,
        l1: HopperOperand,
        l2: HopperOperand,
        rows: SortedRows,
        limit: float,
    ) -> Tensor:
        """Both routed layers, x [M, H] -> [M, H]: gather, L1 with SwiGLU, L2 summed by token."""
        check_activation(x, l1.k)
        _check_limit(l1, limit)
        out = torch.empty(x.shape[0], l2.n, dtype=torch.bfloat16, device=x.device)
        if x.shape[0] == 0:
            return out
        gathered = self._gather(x, rows, out)
        h = torch.empty(gathered.shape[0], l1.n // 2, dtype=torch.bfloat16, device=x.device)
        self._grouped(gathered, l1, rows, h, limit)
        self._grouped(h, l2, rows, out, None)
        return out

    def _gather(self, x: Tensor, rows: SortedRows, out: Tensor) -> Tensor:
        """x's rows in expert order; zeros in `out` for tokens without a local expert."""
        gathered = torch.empty(
            rows.tokens.shape[0], x.shape[1], dtype=torch.bfloat16, device=x.device
        )
        load_kernel(KernelKey(None))(
            x, gathered, rows.ends, rows.tokens, rows.fan, out, 4 * SMS, self._pdl
        )
        return gathered

    def grouped_l1(
        self,
        x: Tensor,
        operand: HopperOperand | PlainOperand,
        groups: Groups | SortedRows,
        limit: float,
    ) -> Tensor:
        """x [M, H] bf16 -> [R, I] bf16, rows in expert order."""
        operand = _experts(operand)
        check_activation(x, operand.k)
        _check_limit(operand, limit)
        rows = SortedRows.from_groups(groups)
        h = torch.empty(rows.tokens.shape[0], operand.n // 2, dtype=torch.bfloat16, device=x.device)
        if h.shape[0]:
            unused = torch.empty(0, 8, dtype=torch.bfloat16, device=x.device)
            self._grouped(self._gather(x, rows, unused), operand, rows, h, limit)
        return h

    def grouped_l2(
        self, h: Tensor, operand: HopperOperand | PlainOperand, groups: Groups | SortedRows
    ) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16: weighted by the router, summed over a token's rows."""
        operand = _experts(operand)
        check_activation(h, operand.k, "h")
        rows = SortedRows.from_groups(groups)
        out = torch.zeros(rows.fan.shape[0], operand.n, dtype=torch.bfloat16, device=h.device)
        if h.shape[0]:
            self._grouped(h, operand, rows, out, None)
        return out


def _experts(operand: HopperOperand | PlainOperand) -> HopperOperand:
    if isinstance(operand, PlainOperand) or not operand.experts:
        raise ValueError("grouped kernels take a stack of NVFP4 experts")
    return operand


def _check_limit(operand: HopperOperand, limit: float) -> None:
    if not 0 < limit < float("inf"):
        raise ValueError(f"swiglu_limit must be finite and positive, got {limit}")
    if not operand.gate_up:
        raise ValueError("SwiGLU needs gate and up rows side by side: prepare_gate_up")
