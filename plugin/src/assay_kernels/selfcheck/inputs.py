"""Activations that the self-check feeds, and what a kernel makes of them before it multiplies."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from assay_kernels.kernels.interface import KernelSet
from assay_kernels.numerics import decode_fp32, quantize_activation

SAMPLED_CHANNELS = 64
SPANS = 4


def generator(name: str) -> torch.Generator:
    """A source of numbers that is the same in every start, and another for every name."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def activation(name: str, *shape: int) -> Tensor:
    """Normal numbers in bf16, on the CPU: every rank and device gets the same."""
    return torch.randn(*shape, generator=generator(name)).to(torch.bfloat16)


def power_of_two(value: float) -> float:
    """The one nearest in ratio: it scales bf16 exactly."""
    return float(torch.tensor(max(value, 2.0**-60)).log2().round().exp2())


def as_multiplied(kernels: KernelSet, x: Tensor, input_scale: Tensor | None) -> Tensor:
    """x [.., K] bf16 -> fp32 [.., K]: as it is, or as its NVFP4 codes say."""
    if not kernels.quantizes_activations:
        return x.float()
    q = quantize_activation(x, input_scale)
    values = decode_fp32(q.codes, q.block_scale)
    if q.row_scale is not None:
        return values * q.row_scale.unsqueeze(-1)
    assert input_scale is not None
    return values * input_scale


def sampled_channels(name: str, channels: int) -> Tensor:
    """64 of a matrix's channels (all of them if there are fewer), int64 ascending: four spans, one
    in each quarter, each where the name says."""
    if channels <= SAMPLED_CHANNELS:
        return torch.arange(channels)
    length = SAMPLED_CHANNELS // SPANS
    room = channels // SPANS - length
    starts = torch.randint(0, room + 1, (SPANS,), generator=generator(name))
    starts += torch.arange(SPANS) * (channels // SPANS)
    return (starts.unsqueeze(1) + torch.arange(length)).flatten()
