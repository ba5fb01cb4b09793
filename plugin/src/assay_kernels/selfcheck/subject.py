"""A served layer as the self-check sees it: what it computes, what the shards say, what runs it.

The holders of kernels and operands are the served layer itself, not copies: what is checked is what
will serve, and a replacement takes its place there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from assay_kernels.kernels.interface import KernelSet, PackedWeight
from assay_kernels.selfcheck.shards import Part, ShardReader

LinearOp = Literal["dense", "compressor", "dense_swiglu", "wo_a"]


@dataclass
class Subject(ABC):
    """name: as vLLM calls the layer; kind: as `assay_layers` counts it.

    method: object whose `kernels` serve the layer; layer: object that holds the operands;
    input_scale: fp32 [] that activations are quantised with where kernels do that, else None
    """

    name: str
    kind: str
    method: Any
    layer: Any
    device: torch.device

    @property
    def kernels(self) -> KernelSet:
        kernels: KernelSet = self.method.kernels
        return kernels

    @property
    @abstractmethod
    def shape(self) -> str:
        """What distinguishes kernels: sizes on this rank, as the report prints them."""

    @property
    @abstractmethod
    def matrices(self) -> int:
        """How many stored matrices stand behind the layer on this rank."""

    @abstractmethod
    def rebuild(self, kernels: KernelSet, reader: ShardReader) -> None:
        """Serve the layer by other kernels, its operands made anew from the shards."""


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


@dataclass
class LinearSubject(Subject):
    """One matrix, or several that are fused along the channels in `parts`' order."""

    op: LinearOp
    parts: tuple[Part, ...]
    input_scale: Tensor | None = None
    limit: float = 0.0  # of SwiGLU, for dense_swiglu
    groups: int = 1  # output groups, for wo_a

    @property
    def k(self) -> int:
        return self.parts[0].columns

    @property
    def shape(self) -> str:
        rows = " | ".join(str(part.rows) for part in self.parts)
        return f"{rows} x {self.k}" + (f" / {self.groups}" if self.groups > 1 else "")

    @property
    def matrices(self) -> int:
        return len(self.parts)

    def run(self, x: Tensor) -> Tensor:
        """x [M, K], for wo_a [M, G, K] -> what the layer computes, [M, N]; bf16, or fp32 from the
        compressor."""
        operand = self.layer.operand
        if self.op == "dense_swiglu":
            return self.kernels.dense_swiglu(x, operand, self.limit)
        if self.op == "wo_a":
            return self.kernels.wo_a(x, operand).flatten(1)
        dtype = torch.float32 if self.op == "compressor" else torch.bfloat16
        return self.kernels.dense(x, operand, dtype)

    def rebuild(self, kernels: KernelSet, reader: ShardReader) -> None:
        if reader.is_nvfp4(self.parts[0]):
            packed = [reader.packed(part) for part in self.parts]
            weight = PackedWeight(
                _to(torch.cat([p.codes for p in packed]), self.device),
                _to(torch.cat([p.block_scale.view(torch.uint8) for p in packed]), self.device).view(
                    torch.float8_e4m3fn
                ),
                _to(
                    torch.cat([p.global_scale.expand(p.codes.shape[0]) for p in packed]),
                    self.device,
                ),
                self.input_scale,
            )
            if self.op == "wo_a":
                weight = PackedWeight(
                    weight.codes.view(self.groups, -1, self.k // 2),
                    weight.block_scale.view(self.groups, -1, self.k // 16),
                    weight.alpha.view(self.groups, -1),
                    self.input_scale,
                )
            gate_up = self.op == "dense_swiglu"
            prepare = kernels.prepare_gate_up if gate_up else kernels.prepare
            self.layer.operand = prepare(weight)
        else:
            values = torch.cat([reader.values(part) for part in self.parts]).to(torch.bfloat16)
            if self.op == "wo_a":
                values = values.view(self.groups, -1, self.k)
            self.layer.operand = kernels.prepare_plain(_to(values, self.device))
        self.method.kernels = kernels


@dataclass
class ExpertsSubject(Subject):
    """The routed experts of a layer that live on this rank, in the order of their local ids."""

    experts: tuple[tuple[Part, Part, Part], ...]  # w1 (gate), w3 (up), w2 (down) of each
    global_ids: tuple[int, ...]  # id that the router knows each of them by
    num_global: int
    expert_map: Tensor | None
    top_k: int
    limit: float
    input_scale13: Tensor | None = None
    input_scale2: Tensor | None = None

    @property
    def hidden(self) -> int:
        return self.experts[0][0].columns

    @property
    def width(self) -> int:
        return self.experts[0][0].rows

    @property
    def shape(self) -> str:
        return f"{len(self.experts)} x {2 * self.width} x {self.hidden}"

    @property
    def matrices(self) -> int:
        return 3 * len(self.experts)

    def route(self, topk_ids: Tensor, topk_weights: Tensor) -> Any:
        return self.kernels.route(topk_ids, topk_weights, len(self.experts), self.expert_map)

    def l1(self, x: Tensor, rows: Any) -> Tensor:
        """x [M, H] bf16 -> [R, I] bf16, rows in expert order."""
        return self.kernels.grouped_l1(x, self.layer.operand13, rows, self.limit)

    def l2(self, h: Tensor, rows: Any) -> Tensor:
        """h [R, I] bf16 -> [M, H] bf16."""
        return self.kernels.grouped_l2(h, self.layer.operand2, rows)

    def both(self, x: Tensor, rows: Any) -> Tensor:
        """x [M, H] bf16 -> [M, H] bf16, as the layer is served."""
        layer = self.layer
        return self.kernels.routed(x, layer.operand13, layer.operand2, rows, self.limit)

    def rebuild(self, kernels: KernelSet, reader: ShardReader) -> None:
        if not reader.is_nvfp4(self.experts[0][0]):
            w13 = [torch.cat([reader.values(w1), reader.values(w3)]) for w1, w3, _ in self.experts]
            w2 = [reader.values(part) for *_, part in self.experts]
            for name, values in (("operand13", w13), ("operand2", w2)):
                stacked = _to(torch.stack(values).to(torch.bfloat16), self.device)
                setattr(self.layer, name, kernels.prepare_plain(stacked))
        else:
            pairs = [(w1, w3) for w1, w3, _ in self.experts]
            singles = [(w2,) for *_, w2 in self.experts]
            self.layer.operand13 = kernels.prepare_gate_up(
                self._stack(pairs, reader, self.input_scale13)
            )
            self.layer.operand2 = kernels.prepare(self._stack(singles, reader, self.input_scale2))
        self.method.kernels = kernels

    def _stack(
        self, parts: list[Any], reader: ShardReader, input_scale: Tensor | None
    ) -> PackedWeight:
        rows, columns = sum(p.rows for p in parts[0]), parts[0][0].columns
        codes = torch.empty(len(parts), rows, columns // 2, dtype=torch.uint8, device=self.device)
        scale = torch.empty(
            len(parts), rows, columns // 16, dtype=torch.float8_e4m3fn, device=self.device
        )
        alpha = torch.empty(len(parts), rows, dtype=torch.float32, device=self.device)
        for expert, matrices in enumerate(parts):
            row = 0
            for part in matrices:
                packed = reader.packed(part)
                own = slice(row, row + part.rows)
                codes[expert, own] = packed.codes.to(self.device)
                scale[expert, own].view(torch.uint8).copy_(packed.block_scale.view(torch.uint8))
                alpha[expert, own] = packed.global_scale.to(self.device)
                row += part.rows
        return PackedWeight(codes, scale, alpha, input_scale)
