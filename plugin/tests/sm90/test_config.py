"""Launch configurations: every layer of V4 at every number of tokens gets one that fits the SM."""

from __future__ import annotations

import pytest

from assay_kernels.kernels.sm90.config import BLOCK_BYTES, SM_BYTES, GemmConfig

# (N, K) of V4-Pro, V4-Flash (TP8, DP8) and the miniature: docs/kernels-sm90.md
SHAPES = [
    (2048, 7168), (8192, 1536), (1024, 4096), (7168, 2048), (768, 7168), (7168, 384),
    (1536, 4096), (4096, 1024), (512, 4096), (4096, 256), (1024, 7168), (512, 7168),
    (65536, 1536), (7168, 16384), (6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048),
    (8192, 1024), (768, 256), (256, 256), (256, 128), (2048, 256), (1024, 512),
]  # fmt: skip
TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 1000, 4096, 16384]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_gets_a_kernel_that_fits(n: int, k: int) -> None:
    for m in TOKENS:
        for config in (
            GemmConfig.for_dense(n, k, m),
            GemmConfig.from_analytical_heuristic(n, k, m),
        ):
            assert k % config.block_k == 0
            assert config.smem_bytes <= BLOCK_BYTES
            assert (config.smem_bytes + 1024) * config.min_blocks <= SM_BYTES
            assert k // config.block_k >= config.split_k


@pytest.mark.parametrize("rows", [0.5, 6, 50, 400, 3000, 25000, 98304])
@pytest.mark.parametrize("experts", [32, 48, 256])
def test_every_number_of_routed_rows_gets_a_kernel(rows: float, experts: int) -> None:
    for k in (128, 2048, 3072, 4096, 7168):
        config = GemmConfig.for_grouped(k, rows, experts)
        assert k % config.block_k == 0


def test_a_configuration_that_cannot_run_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        GemmConfig(tokens=256, block_k=128, stages=6)
    with pytest.raises(ValueError, match="whole rings"):
        GemmConfig(tokens=64, block_k=64, stages=4, group=4)
    with pytest.raises(ValueError, match="multiple of 8"):
        GemmConfig(tokens=12)
    with pytest.raises(ValueError, match="narrow"):
        GemmConfig(tokens=64, narrow=64)
    with pytest.raises(ValueError, match="take turns"):
        GemmConfig(tokens=16, warp_mma=True, alternate=True)


@pytest.mark.parametrize("channels", [64, 128, 192, 1024])
def test_channels_that_share_inputs_are_whole_tiles(channels: int) -> None:
    """`wo_a` groups: a tile of two groups would read the wrong inputs, and is refused."""
    for groups, k in ((2, 4096), (8, 512), (16, 4096), (2, 7168)):
        for m in TOKENS:
            config = GemmConfig.for_dense(groups * channels, k, m, channels)
            assert channels % config.rows == 0


def test_half_empty_tiles_of_many_rows_get_a_narrower_product() -> None:
    config = GemmConfig.for_grouped(7168, 12000, 48, 6144)
    assert config.widths == (128, 64)
    assert GemmConfig.for_grouped(4096, 300, 32, 4096).widths == (config.widths[0] // 8,)


def test_large_tiles_are_taken_only_where_they_make_several_rounds_over_the_gpu() -> None:
    few, many = 32, 256
    assert GemmConfig.for_grouped(4096, 96 * few, few, 4096).tokens == 64
    assert GemmConfig.for_grouped(4096, 96 * many, many, 4096).tokens == 128


def test_splits_are_taken_where_the_channels_do_not_fill_the_gpu() -> None:
    assert GemmConfig.from_analytical_heuristic(2048, 7168, 1).split_k == 8
    assert GemmConfig.from_analytical_heuristic(65536, 1536, 1).split_k == 1
