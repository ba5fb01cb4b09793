"""Launch knobs of the Blackwell kernels and how they are chosen."""

from __future__ import annotations

from dataclasses import dataclass

TILE_K = 256
"""Inputs of a pipeline stage: 128 bytes of E2M1, one 128-byte swizzle row, four MMA steps of 64."""
MMA_K = 64
LANES = 128
"""Rows of tensor memory, and of the MMA's first operand on one CTA."""
SCALE_TILE = 512
"""Bytes of one 128 x 4 tile of scales: 128 rows by one MMA step."""
BLOCK_BYTES = 227 * 1024
"""Most shared memory of a block on sm_100 (CUDA programming guide)."""
TMEM_COLUMNS = 512
SMS = 148
"""Multiprocessors of a B200."""
EPILOGUE_WARPS = 4
MMA_WARP = 4
LOAD_WARP = 5
THREADS = 192
CHUNK = 32
"""Accumulator columns that an epilogue thread reads at a time."""
SMALL_M = 16


@dataclass(frozen=True)
class GemmConfig:
    """One compiled product: `128 * ctas` rows of the first operand by `tile_n` of the second.

    Tokens are the first operand and channels the second; `swapped` turns that round, so that up to
    16 tokens cost the tensor cores, shared memory and TMEM what 16 columns cost, not 128 rows.
    """

    tile_n: int = 128
    ctas: int = 1  # CTAs that share one MMA
    swapped: bool = False
    stages: int = 4

    def __post_init__(self) -> None:
        if self.ctas not in (1, 2) or (self.swapped and self.ctas != 1):
            raise ValueError(f"{self.name}: one CTA, or two with tokens as the first operand")
        step = 8 * self.ctas
        if not step <= self.tile_n <= 256 or self.tile_n % step:
            raise ValueError(f"{self.name}: tile_n must be a multiple of {step} up to 256")
        if self.tile_n % LANES and not (self.swapped and self.tile_n <= SMALL_M):
            # The second operand's scales come in tiles of 128 rows.
            raise ValueError(f"{self.name}: tile_n must be whole tiles of scales")
        if self.stages < 2 or self.smem_bytes > BLOCK_BYTES:
            raise ValueError(f"{self.name}: {self.stages} stages, {self.smem_bytes} bytes")
        if self.used_columns > TMEM_COLUMNS:
            raise ValueError(f"{self.name}: {self.used_columns} columns of tensor memory")

    @property
    def tile_m(self) -> int:
        """Rows of the first operand of one MMA."""
        return LANES * self.ctas

    @property
    def tokens(self) -> int:
        return self.tile_n if self.swapped else self.tile_m

    @property
    def channels(self) -> int:
        return self.tile_m if self.swapped else self.tile_n

    @property
    def a_bytes(self) -> int:
        """Codes of the first operand that one CTA loads in a stage."""
        return LANES * TILE_K // 2

    @property
    def b_bytes(self) -> int:
        return self.tile_n // self.ctas * TILE_K // 2

    @property
    def b_scale_tiles(self) -> int:
        """Row tiles of the second operand's scales; both CTAs of a pair need all of them."""
        return -(-self.tile_n // LANES)

    @property
    def scale_bytes(self) -> int:
        """Scales of both operands that one CTA loads in a stage."""
        return (1 + self.b_scale_tiles) * SCALE_TILE * TILE_K // MMA_K

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.scale_bytes

    @property
    def transaction_bytes(self) -> int:
        """Bytes that the leader's barrier waits for: what all CTAs of the MMA load."""
        return self.ctas * self.stage_bytes

    @property
    def acc_stages(self) -> int:
        """Accumulators: two let the epilogue overlap the next tile, where they fit."""
        return 2 if self.tile_n <= 128 else 1

    @property
    def acc_columns(self) -> int:
        """Columns of one accumulator: at least what one tcgen05.ld of the epilogue reads."""
        return max(self.tile_n, CHUNK)

    @property
    def scale_columns(self) -> int:
        """Four columns hold 128 rows of one MMA step."""
        return (1 + self.b_scale_tiles) * 4 * TILE_K // MMA_K

    @property
    def used_columns(self) -> int:
        return self.acc_stages * self.acc_columns + self.scale_columns

    @property
    def columns(self) -> int:
        """Columns to allocate: a power of two, at least 32."""
        return max(32, 1 << (self.used_columns - 1).bit_length())

    @property
    def barriers(self) -> int:
        return 2 * self.stages + 2 * self.acc_stages

    @property
    def acc_releases(self) -> int:
        """Arrivals that free an accumulator: one a warp that read it, in every CTA."""
        return EPILOGUE_WARPS * self.ctas

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + 8 * self.barriers + 1024

    @property
    def name(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n}_s{self.stages}"
            f"{'_2cta' if self.ctas == 2 else ''}{'_swap' if self.swapped else ''}"
        )

    @classmethod
    def make(cls, tile_n: int, ctas: int = 1, swapped: bool = False, most: int = 10) -> GemmConfig:
        """The most stages that fit."""
        for stages in range(most, 2, -1):
            try:
                return cls(tile_n, ctas, swapped, stages)
            except ValueError:
                continue
        return cls(tile_n, ctas, swapped, 2)

    @classmethod
    def for_dense(cls, n: int, k: int, m: int, *, swiglu: bool = False) -> GemmConfig:
        """A configuration for [m, k] x [k, n].

        Up to 16 tokens the weights' way from memory is the time: weights become the first operand,
        so that a stage is four fifths weights and ten stages are in flight. SwiGLU needs a token's
        sixteen neighbours in one thread, so it keeps tokens first. A pair of CTAs halves the
        second operand's traffic where pairs fill the GPU.
        """
        if m <= SMALL_M and not swiglu:
            return cls.make(SMALL_M, swapped=True)
        pairs = -(-m // 256) * -(-n // 256)
        if m > 128 and 2 * pairs >= SMS:
            return cls.make(256, 2)
        return cls.make(128)

    @classmethod
    def for_grouped(cls) -> GemmConfig:
        """Routed experts: row tiles of 128, each of one expert."""
        return cls.make(128)
