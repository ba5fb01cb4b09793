"""Weights in kernel order, and which launch knobs are refused."""

from __future__ import annotations

import pytest
import torch

from assay_kernels.kernels.sm100.config import TILE_K, GemmConfig
from assay_kernels.kernels.sm100.layout import check_weight, gate_up_blocks, scales_128x4
from assay_kernels.kernels.sm100.shapes import SHAPES, TOKENS, key_for


def test_sixteen_gates_are_followed_by_their_sixteen_ups() -> None:
    matrix = torch.arange(2 * 64).unsqueeze(-1)  # gates 0..63, ups 64..127
    rows = gate_up_blocks(matrix).flatten().view(4, 2, 16)
    for block in range(4):
        gates = torch.arange(16 * block, 16 * block + 16)
        assert rows[block, 0].equal(gates)
        assert rows[block, 1].equal(gates + 64)


def test_scales_of_every_expert_lie_where_the_published_formula_says() -> None:
    scales = torch.randint(0, 0x7F, (3, 256, 24), dtype=torch.uint8)
    laid = scales_128x4(scales.view(torch.float8_e4m3fn)).view(3, -1)
    for expert, m, s in [(0, 0, 0), (0, 31, 3), (1, 32, 4), (2, 127, 23), (2, 128, 5), (1, 255, 9)]:
        tile = (m // 128) * 6 + s // 4
        offset = tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + s % 4
        assert laid[expert, offset] == scales[expert, m, s]


@pytest.mark.parametrize("bad", [0x7F, 0xFF, 0x81])
def test_scales_that_nvfp4_does_not_have_are_refused(bad: int) -> None:
    scales = torch.full((128, 4), bad, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="non-negative"):
        scales_128x4(scales)


@pytest.mark.parametrize("shape", [(100, 256), (128, 96), (2, 2, 128, 64)])
def test_weights_that_are_not_whole_tiles_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        check_weight(shape)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tile_n": 64},  # half a tile of scales
        {"tile_n": 16},  # tokens as the first operand
        {"tile_n": 256, "stages": 6},  # shared memory
        {"tile_n": 256, "ctas": 2, "swapped": True},
        {"tile_n": 120},
        {"stages": 1},
    ],
)
def test_knobs_that_do_not_fit_the_hardware_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="_s"):
        GemmConfig(**knobs)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.model} {s.layer}")
def test_every_layer_has_a_kernel_whose_tiles_it_fills(shape) -> None:
    check_weight((shape.n, shape.k))
    for m in TOKENS:
        config = key_for(shape, m).config
        assert config is not None
        assert config.smem_bytes <= 227 * 1024
        assert config.used_columns <= config.columns <= 512
        if shape.kernel == "wo_a":
            # A tile's channels belong to one group, whose inputs are whole stages.
            assert 1024 % config.channels == 0
            assert shape.k % TILE_K == 0
        if shape.experts:
            assert shape.n % config.channels == 0
