"""Launch knobs of the Hopper kernels and how they are chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

ROW_BLOCK = 64
"""Output channels of one packed block: one m64 tile of wgmma."""
K_BLOCK = 64
"""Inputs of one packed block: four wgmma steps of 16."""
CODE_BYTES = ROW_BLOCK * K_BLOCK // 2
SCALE_BYTES = ROW_BLOCK * K_BLOCK // 16
SM_BYTES = 228 * 1024
"""Shared memory of an SM of sm_90 (CUDA programming guide); 1 KiB of it is kept for each block."""
BLOCK_BYTES = 227 * 1024
SMS = 132
"""Multiprocessors of an H100 / H200 SXM."""
MOST_STAGES = 12
TUNING = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True)
class GemmConfig:
    """One compiled kernel.

    A block computes `64 * warpgroups * tiles` output channels of `tokens` token rows; the
    `split_k` blocks of a cluster share one such tile along K.
    """

    tokens: int  # token rows of a tile: 8 .. 256
    warpgroups: int = 2  # consumer warpgroups
    tiles: int = 1  # m64 tiles a warpgroup
    block_k: int = 128  # inputs of one pipeline stage
    stages: int = 4
    split_k: int = 1  # blocks of a cluster, along K
    min_blocks: int = 1  # blocks an SM holds: bounds registers and shared memory
    group: int = 4  # wgmma steps decoded at a time
    ring: int = 2  # groups decoded or in flight, each with registers of its own
    warp_mma: bool = False  # mma.sync instead of wgmma: cheaper for a few tokens
    late: bool = True  # let the next kernel start once the last load is asked for, not at once
    narrow: int = 0  # token rows of a second product, for tiles that have no more; 0: none
    alternate: bool = False  # warpgroups take turns: one decodes while the other multiplies

    def __post_init__(self) -> None:
        if self.tokens % 8 or not 8 <= self.tokens <= 256:
            raise ValueError(f"{self.name}: tokens must be a multiple of 8 up to 256")
        if self.block_k % K_BLOCK or 4 % self.group or not 1 <= self.split_k <= 8:
            raise ValueError(f"{self.name}: bad block_k, group or split_k")
        if not self.warp_mma and self.k_blocks * self.tiles * 4 // self.group % self.ring:
            # A group's registers are free `ring` groups later; the ring must close on a stage.
            raise ValueError(f"{self.name}: a stage must hold whole rings of decode groups")
        if self.stages < 2:
            raise ValueError(f"{self.name}: fewer than two stages")
        if self.narrow % 8 or not 0 <= self.narrow < self.tokens:
            raise ValueError(f"{self.name}: narrow must be a multiple of 8 below tokens")
        if self.alternate and (self.warpgroups < 2 or self.warp_mma):
            raise ValueError(f"{self.name}: only warpgroups at wgmma take turns")
        if self.reduce_bytes > self.stage_bytes * self.stages:
            raise ValueError(f"{self.name}: the partial tiles do not fit the ring")
        if self.smem_bytes > min(BLOCK_BYTES, SM_BYTES // self.min_blocks - 1024):
            raise ValueError(f"{self.name}: {self.smem_bytes} bytes of shared memory a block")

    @property
    def rows(self) -> int:
        """Output channels of a block."""
        return 64 * self.warpgroups * self.tiles

    @property
    def widths(self) -> tuple[int, ...]:
        """Token rows that a product can have."""
        return (self.tokens, self.narrow) if self.narrow else (self.tokens,)

    @property
    def k_blocks(self) -> int:
        """Packed blocks along K of one stage."""
        return self.block_k // K_BLOCK

    @property
    def setmaxnreg(self) -> bool:
        """Whether the copying warps give registers up.

        Registers belong to a quarter of the SM, so a ninth warp costs as much as a warpgroup.
        """
        return self.tokens * self.tiles > 128

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.setmaxnreg else 32)

    @property
    def stage_bytes(self) -> int:
        weights = self.rows * self.block_k // 2 + self.rows * self.block_k // 16
        return weights + self.tokens * self.block_k * 2

    @property
    def units(self) -> int:
        """(channel pair, token) results of a thread."""
        return self.tiles * self.tokens // 4

    @property
    def owners(self) -> int:
        """Blocks of a cluster that sum and store."""
        return min(self.split_k, self.units)

    @property
    def slots(self) -> int:
        """Units a thread of an owner sums."""
        return -(-self.units // self.owners)

    @property
    def reduce_bytes(self) -> int:
        """Partial sums that a block receives from its cluster."""
        return self.split_k * self.slots * self.warpgroups * 1024 if self.split_k > 1 else 0

    @property
    def reduce_in_ring(self) -> bool:
        """Large partial tiles take the ring's place once it is empty: one more cluster barrier."""
        return self.reduce_bytes > 24 * 1024

    @property
    def smem_bytes(self) -> int:
        own = 0 if self.reduce_in_ring else self.reduce_bytes
        return (
            self.stages * (self.stage_bytes + 16) + own + 8 * self.tokens * self.warpgroups + 1024
        )

    @property
    def name(self) -> str:
        return (
            f"t{self.tokens}_w{self.warpgroups}x{self.tiles}_k{self.block_k}x{self.stages}"
            f"_s{self.split_k}_b{self.min_blocks}_g{self.group}x{self.ring}"
            f"{'_late' if self.late else ''}{'_mma' if self.warp_mma else ''}"
            f"{f'_n{self.narrow}' if self.narrow else ''}"
            f"{'_alt' if self.alternate else ''}"
        )

    @classmethod
    def make(
        cls,
        tokens: int,
        warpgroups: int = 2,
        tiles: int = 1,
        block_k: int = 128,
        split_k: int = 1,
        min_blocks: int = 1,
        warp_mma: bool = False,
    ) -> GemmConfig:
        """The most stages that fit; two wgmma steps a group where a stage has only four."""
        group = 4 if block_k // K_BLOCK * tiles % 2 == 0 or warp_mma else 2
        # Where blocks fill their SM the next kernel cannot enter before they end, early or late.
        late = tokens < 128 or split_k > 1
        for stages in range(MOST_STAGES, 2, -1):
            try:
                return cls(
                    tokens,
                    warpgroups,
                    tiles,
                    block_k,
                    stages,
                    split_k,
                    min_blocks,
                    group,
                    2,
                    warp_mma,
                    late,
                )
            except ValueError:
                continue
        return cls(
            tokens, warpgroups, tiles, block_k, 2, split_k, min_blocks, group, 2, warp_mma, late
        )

    @classmethod
    def from_analytical_heuristic(cls, n: int, k: int, m: int, group: int = 0) -> GemmConfig:
        """A configuration for out[m, n] = x[m, k] W^T on a GPU of `SMS` multiprocessors.

        Up to 64 tokens the weights' way from memory is the time, so one tile holds all tokens and K
        is split until blocks cover the SMs; two blocks an SM hide each other's start and end. Up to
        16 tokens mma.sync does the products: wgmma costs the same for 8 tokens as for 64. Above,
        the tensor cores are the time: the tile and split whose last wave wastes least are taken,
        large tiles preferred because they decode a weight for more tokens.
        """
        block_k = 128 if k % 128 == 0 else 64
        if m <= 64:
            tokens = next(t for t in (8, 16, 32, 64) if m <= t)
            warpgroups = 1 if group % 128 else 2
            split = _split(-(-n // (64 * warpgroups)), k // block_k, 8)
            return cls.make(
                tokens, warpgroups, 1, block_k, split, min_blocks=2, warp_mma=tokens <= 16
            )
        best: tuple[float, GemmConfig] | None = None
        for tokens, warpgroups, speed in (
            (128, 2, 0.88),
            (128, 3, 0.85),
            (192, 2, 0.92),
            (256, 2, 1.0),
            (128, 1, 0.5),
        ):
            # One warpgroup a tile only for groups that are not whole tiles of two.
            if group % (64 * warpgroups) or (warpgroups == 1 and group % 128 == 0):
                continue
            for split in (1, 2, 4):
                if split > 1 and k // K_BLOCK // split < 8:
                    continue
                # Stages of 128 decode four steps at a time, where three or more of them fit.
                deep = 128 if block_k == 128 and tokens < 192 else 64
                try:
                    config = cls.make(tokens, warpgroups, 1, deep, split)
                except ValueError:
                    continue
                tiles = -(-n // config.rows) * -(-m // tokens)
                # Clusters of four do not tile every GPC: count a few SMs as lost.
                waves = -(-tiles * split // (SMS if split < 4 else 120))
                work = config.rows * tokens * (k / split / 64) / 32 / speed
                # Filling the ring, the epilogue, and the exchange of partial tiles, in cycles.
                fixed = 4000 + (0 if split == 1 else 2000 + config.rows * tokens / 8)
                cost = waves * (work + fixed)
                if best is None or cost < best[0]:
                    best = (cost, config)
        assert best is not None
        return best[1]

    @classmethod
    def for_dense(cls, n: int, k: int, m: int, group: int = 0) -> GemmConfig:
        """The measured best for this shape and number of tokens, or the heuristic's.

        group: channels that share a K range of x, if not all do: whole tiles of a configuration.
        """
        for upto, fields in _tuned().get((n, k), ()):
            if m <= upto:
                config = cls(**fields)
                if group % config.rows == 0:
                    return config
                break
        return cls.from_analytical_heuristic(n, k, m, group)

    @classmethod
    def for_grouped(cls, k: int, rows: float, experts: int, n: int = 4096) -> GemmConfig:
        """A configuration for about `rows` routed rows over `experts` local experts.

        How many rows an expert really gets is known on the device alone, so this goes by the mean.
        Half-empty tiles cost tensor time that a small number of rows has to spare; the largest
        tiles have a narrower product for them, and need several rounds over the SMs to come out
        even.
        """
        block_k = 128 if k % 128 == 0 else 64
        mean = rows / experts
        if rows <= 12:
            # Few weights are read at all: many small blocks ask for them at once.
            split = min(2, k // block_k) if rows <= 2 else 1
            few = cls.make(8, 1 + (rows <= 2), 1, block_k, split, 4, warp_mma=True)
            return replace(few, stages=min(4, few.stages))
        if mean <= 6:
            return cls.make(8, 2, 1, block_k, 1, 3, warp_mma=True)
        if mean <= 14:
            return cls.make(16, 2, 2, block_k, 1, 2, warp_mma=True)
        if mean <= 28:
            return cls.make(32, 2, 1, block_k, 1, 2)
        large = cls.make(128, 2, 2, 64)
        tiles = (rows / large.tokens + experts / 2) * n / large.rows
        if mean <= 48 or (mean <= 140 and tiles < 8 * SMS):
            return cls.make(64, 2, 1, block_k, 1, 2)
        return replace(large, narrow=64)


def _split(row_tiles: int, steps: int, most: int) -> int:
    """The largest power of two that keeps the blocks within one wave and three steps a block."""
    split = 1
    while 2 * split <= most and row_tiles * 2 * split <= SMS and steps >= 6 * split:
        split *= 2
    return split


@lru_cache(maxsize=1)
def _tuned() -> dict[tuple[int, int], list[tuple[int, dict[str, Any]]]]:
    table = json.loads(TUNING.read_text())
    return {
        (entry["n"], entry["k"]): [(step["upto"], step["config"]) for step in entry["steps"]]
        for entry in table
    }
