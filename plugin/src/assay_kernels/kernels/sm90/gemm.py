"""out[M, N] = x[M, K] W^T on Hopper, W in NVFP4 as the register operand of wgmma.

The product is computed transposed, D[n, m] = sum_k W[n, k] x[m, k], so that the weights, decoded in
registers, are wgmma's A operand and the tokens its N. One warp copies packed weights (contiguous by
construction, see `layout`) and tokens (TMA, 128-byte swizzle) into a ring of shared-memory stages;
consumer warpgroups decode one group of wgmma steps while the tensor cores run the group before.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, hopper_helpers

from assay_kernels.kernels.shared import arithmetic
from assay_kernels.kernels.sm90 import ptx
from assay_kernels.kernels.sm90.config import (
    CODE_BYTES,
    K_BLOCK,
    ROW_BLOCK,
    SCALE_BYTES,
    GemmConfig,
)

SUMS_ADDED = 4
"""First of the named barriers by which warpgroups tell that a tile's sums are in memory."""
ROWS_READ = 6
"""First of those by which they hear that the description of its rows is free again."""
TURN = 8
"""First of the named barriers by which warpgroups take turns at the tensor cores."""
LOG2_E = 1.4426950408889634


class Gemm:
    """Host entry and device code of one `GemmConfig`.

    epilogue: "bf16" and "fp32" store [M, N]; "swiglu" clamps and stores [M, N / 2], its weights
    packed with gate and up rows side by side; "combine" weighs rows and sums them by token.
    experts: most experts of a grouped product, whose rows of x are sorted by expert; 0: dense.
    after_router: the grouped kernel before this one already waited for the router's result.
    """

    def __init__(
        self,
        config: GemmConfig,
        epilogue: str = "bf16",
        experts: int = 0,
        after_router: bool = False,
    ) -> None:
        self.config = config
        self.epilogue = epilogue
        self.experts = experts
        self.after_router = after_router
        c = config
        self.subs = c.k_blocks
        self.blocks = c.rows // ROW_BLOCK
        self.consumers = 4 * c.warpgroups  # warps
        # Where a whole warpgroup copies, its idle warps look after the sums.
        self.helped = epilogue == "combine" and c.setmaxnreg and c.split_k == 1
        # 256 experts' counts, eight a lane, do not fit 24 registers; nor do the sums.
        many = experts > 64
        self.copying_registers = 48 if many and self.helped else 40 if many or self.helped else 24
        self.multiplying = 224 if many and self.helped else 232
        if epilogue == "combine" and c.tokens > 128:
            raise ValueError(f"{c.name}: combining takes at most 128 token rows a tile")
        self.code_bytes = c.rows * c.block_k // 2
        self.scale_bytes = c.rows * c.block_k // 16
        self.x_bytes = c.tokens * c.block_k * 2

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,  # int32 [words], packed
        scales: cute.Tensor,  # int32 [words], packed
        alpha: cute.Tensor,  # fp32 [N]
        x: cute.Tensor,  # bf16 [M, groups * K]
        out: cute.Tensor,  # [M, N] or [M, N / 2]
        n: Int32,
        k: Int32,
        group_rows: Int32,  # channels that share one K range of x; n without groups
        limit: Float32,
        clusters: Int32,  # clusters to launch at most: the persistent grid
        pdl: Int32,
        stream: Any,
    ) -> None:
        """The dense product, one K range of x for all channels or one a group of channels."""
        c = self.config
        row_tiles = (n + (c.rows - 1)) // c.rows
        tiles = row_tiles * ((x.shape[0] + (c.tokens - 1)) // c.tokens)
        self._launch(
            codes,
            scales,
            alpha,
            x,
            out,
            (),
            n,
            k,
            group_rows,
            limit,
            row_tiles,
            tiles,
            cutlass.min(tiles, clusters),
            pdl,
            stream,
        )

    @cute.jit
    def grouped(
        self,
        codes: cute.Tensor,  # int32 [words], packed, expert after expert
        scales: cute.Tensor,  # int32 [words], packed
        alpha: cute.Tensor,  # fp32 [E * N]
        x: cute.Tensor,  # bf16 [R, K], rows sorted by expert
        out: cute.Tensor,  # bf16 [R, N / 2], or [M, N] of "combine"
        ends: cute.Tensor,  # int32 [E], cumulative row counts
        tokens: cute.Tensor,  # int32 [R], the token of a row
        weights: cute.Tensor,  # fp32 [R], the router's weight of a row
        fan: cute.Tensor,  # int32 [M], rows of a token
        total: cute.Tensor,  # fp32 [M * N], zero between calls
        counts: cute.Tensor,  # int32 [M * N / 64], zero between calls
        n: Int32,
        k: Int32,
        limit: Float32,
        clusters: Int32,
        pdl: Int32,
        stream: Any,
    ) -> None:
        """Each row's product with its expert's weights."""
        c = self.config
        row_tiles = (n + (c.rows - 1)) // c.rows
        groups = (ends, tokens, weights, fan, total, counts)
        self._launch(
            codes,
            scales,
            alpha,
            x,
            out,
            groups,
            n,
            k,
            n,
            limit,
            row_tiles,
            Int32(0x7FFFFFFF),
            clusters,
            pdl,
            stream,
        )

    @cute.jit
    def _launch(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        alpha: cute.Tensor,
        x: cute.Tensor,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        n: Int32,
        k: Int32,
        group_rows: Int32,
        limit: Float32,
        row_tiles: Int32,
        tiles: Int32,
        clusters: Int32,
        pdl: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        mmas = tuple(
            hopper_helpers.make_trivial_tiled_mma(
                BFloat16,
                BFloat16,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                tiler_mn=(64, width),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for width in c.widths
        )
        x_layout = hopper_helpers.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (64, c.tokens, K_BLOCK), BFloat16, c.stages * self.subs
        )
        tma, x_coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            x,
            cute.slice_(x_layout, (None, None, 0)),
            (c.tokens, K_BLOCK),
        )

        described = c.tokens * c.warpgroups if self.epilogue == "combine" else 0

        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout)], 1024]
            codes: cute.struct.Align[
                cute.struct.MemRange[Int32, c.stages * self.code_bytes // 4], 128
            ]
            scales: cute.struct.Align[
                cute.struct.MemRange[Int32, c.stages * self.scale_bytes // 4], 128
            ]
            reduce: cute.struct.Align[
                cute.struct.MemRange[Float32, 0 if c.reduce_in_ring else c.reduce_bytes // 4],
                16,
            ]
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, 2 * described], 8]

        self.storage = Storage
        self.kernel(
            mmas,
            tma,
            x_coords,
            x_layout,
            codes,
            scales,
            alpha,
            out,
            groups,
            x.shape[0],
            n,
            row_tiles,
            tiles,
            k // K_BLOCK,
            group_rows,
            limit,
            Int32(ptx.SCALE_EXPONENT) + (k & 1),  # K is even: a constant the compiler cannot fold
        ).launch(
            grid=(clusters * c.split_k, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.split_k, 1, 1),
            min_blocks_per_mp=c.min_blocks,
            preferred_smem_carveout=100,
            use_pdl=pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        tma: cute.CopyAtom,
        x_coords: cute.Tensor,
        x_layout: cute.ComposedLayout,
        codes: cute.Tensor,
        scales: cute.Tensor,
        alpha: cute.Tensor,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        m: Int32,
        n: Int32,
        row_tiles: Int32,
        tiles: Int32,
        k_blocks: Int32,
        group_rows: Int32,
        limit: Float32,
        exponent: Int32,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        full = storage.full.data_ptr()
        empty = storage.empty.data_ptr()
        sx = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        codes_smem = storage.codes.data_ptr().toint()
        scales_smem = storage.scales.data_ptr().toint()

        rank = Int32(0)
        tile = block
        step = grid
        if cutlass.const_expr(c.split_k > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            tile = block // c.split_k
            step = grid // c.split_k
        stage_steps = k_blocks // self.subs
        k_first = stage_steps * rank // c.split_k
        k_steps = stage_steps * (rank + 1) // c.split_k - k_first

        if warp == self.consumers:
            cpasync.prefetch_descriptor(tma)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, self.consumers)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(not c.late):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(c.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()

        if warp >= self.consumers:
            has_tile = Int32(1)
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(self.copying_registers)
            if warp == self.consumers:
                policy = ptx.evict_first()
                done = Int32(0)
                stage = Int32(0)
                phase = Int32(1)
                if cutlass.const_expr(self.experts > 0 and not self.after_router):
                    cute.arch.griddepcontrol_wait()
                where = self._locate(tile, tiles, row_tiles, m, groups)
                has_tile = where[0]
                while where[0] != 0:
                    code_row, scale_row, tx_gmem, tx_smem, x_at = self._sources(
                        where, codes, scales, tma, x_coords, sx, n, k_blocks, group_rows, k_first
                    )
                    ahead = Int32(0)
                    if done == 0:
                        # Weights never depend on the kernel before this one: the first stages are
                        # asked for while it still runs, tokens after it.
                        ahead = cutlass.min(k_steps, c.stages)
                        for i in cutlass.range(ahead, unroll=1):
                            self._copy_weights(
                                code_row, scale_row, codes_smem, scales_smem, full, i, i, policy
                            )
                        cute.arch.griddepcontrol_wait()
                        for i in cutlass.range(ahead, unroll=1):
                            self._copy_tokens(tma, tx_gmem, tx_smem, full, x_at, i, i)
                        done = ahead
                        stage = ahead
                        if ahead == c.stages:
                            stage = Int32(0)
                            phase = Int32(0)
                    for i in cutlass.range(ahead, k_steps, unroll=1):
                        # A fresh barrier passes a wait for the phase before its first.
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        self._copy_weights(
                            code_row, scale_row, codes_smem, scales_smem, full, i, stage, policy
                        )
                        self._copy_tokens(tma, tx_gmem, tx_smem, full, x_at, i, stage)
                        stage += 1
                        if stage == c.stages:
                            stage = Int32(0)
                            phase ^= 1
                    done = Int32(1)
                    tile += step
                    where = self._locate(tile, tiles, row_tiles, m, groups)
                if cutlass.const_expr(c.late):
                    cute.arch.griddepcontrol_launch_dependents()
            if cutlass.const_expr(self.helped):
                if warp > self.consumers and warp <= self.consumers + c.warpgroups:
                    self._look_after_sums(
                        storage.rows.data_ptr().toint(), warp - self.consumers - 1, tile, step,
                        tiles, row_tiles, m, n, out, groups,
                    )  # fmt: skip
            if cutlass.const_expr(c.split_k > 1):
                # The consumers' barriers count every warp; without a tile none of them comes.
                cute.arch.cluster_wait()
                if has_tile != 0:
                    if cutlass.const_expr(c.reduce_in_ring):
                        cute.arch.cluster_arrive()
                        cute.arch.cluster_wait()
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(160 if c.warpgroups == 3 else self.multiplying)
            group = warp // 4
            thread = tidx % 128
            acc_shape = mmas[0].partition_shape_C((64, c.tokens))
            acc = [cute.make_rmem_tensor(acc_shape, Float32) for _ in range(c.tiles)]
            a_shape = mmas[0].partition_shape_A((64, 16 * c.group))
            a = [cute.make_rmem_tensor(a_shape, BFloat16) for _ in range(c.ring)]

            # A stage holds [block][k block]: a block's k blocks side by side.
            my_codes = codes_smem + group * (c.tiles * self.subs * CODE_BYTES) + thread * 16
            my_scales = scales_smem + group * (c.tiles * self.subs * SCALE_BYTES) + thread // 4 * 8
            # ldmatrix row of this lane: token lane % 8, its k chunk swizzled with the token.
            lane = tidx % 32
            my_tokens = storage.x.data_ptr().toint() + lane % 8 * 128 + (lane // 8 ^ lane % 8) * 16
            rows_smem = storage.rows.data_ptr().toint() + group * (c.tokens * 8)
            stage = Int32(0)
            phase = Int32(0)
            first = Int32(1)
            if cutlass.const_expr(c.alternate):
                # The first turn is the first warpgroup's; whoever has had a turn gives the next.
                if group == c.warpgroups - 1:
                    cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
            if cutlass.const_expr(self.experts > 0 and not self.after_router):
                cute.arch.griddepcontrol_wait()
            where = self._locate(tile, tiles, row_tiles, m, groups)
            while where[0] != 0:
                for t in cutlass.range_constexpr(c.tiles):
                    acc[t].fill(0.0)
                if cutlass.const_expr(self.helped):
                    if first == 0:
                        cute.arch.barrier(barrier_id=ROWS_READ + group, number_of_threads=160)
                if cutlass.const_expr(self.epilogue == "combine"):
                    self._describe_rows(groups, rows_smem, thread, where[3], where[4])
                at_stage = (stage, phase)
                if cutlass.const_expr(c.warp_mma):
                    at_stage = self._steps_by_warp(
                        acc, my_codes, my_scales, my_tokens, full, empty, stage, phase, k_steps,
                        exponent,
                    )  # fmt: skip
                elif cutlass.const_expr(len(c.widths) == 1):
                    at_stage = self._steps(
                        mmas[0], c.tokens, acc, a, sx, my_codes, my_scales, full, empty, stage,
                        phase, k_steps, exponent, group,
                    )  # fmt: skip
                elif where[4] - where[3] <= c.narrow:
                    at_stage = self._steps(
                        mmas[1], c.narrow, acc, a, sx, my_codes, my_scales, full, empty, stage,
                        phase, k_steps, exponent, group,
                    )  # fmt: skip
                else:
                    at_stage = self._steps(
                        mmas[0], c.tokens, acc, a, sx, my_codes, my_scales, full, empty, stage,
                        phase, k_steps, exponent, group,
                    )  # fmt: skip
                stage, phase = at_stage
                first = Int32(0)

                _, expert, row_tile, first_row, end_row = where
                channel = row_tile * c.rows + group * (c.tiles * 64)
                token = first_row + thread % 4 * 2
                lane_channel = channel + thread // 32 * 16 + thread % 32 // 4 * 2
                alpha_at = alpha.iterator.toint() + Int64(expert * n + lane_channel) * 4
                rows_at = Int32(0)
                if cutlass.const_expr(self.epilogue == "combine"):
                    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                    rows_at = rows_smem - first_row * 8
                if cutlass.const_expr(c.split_k == 1):
                    for t in cutlass.range_constexpr(c.tiles):
                        if channel + 64 * t < n:
                            scale = ptx.load_global_f2(alpha_at + 256 * t)
                            for u in cutlass.range_constexpr(c.tokens // 4):
                                j, col = u // 2, u % 2
                                self._store(
                                    out,
                                    groups,
                                    acc[t][4 * j + col],
                                    acc[t][4 * j + 2 + col],
                                    scale,
                                    lane_channel + 64 * t,
                                    token + 8 * j + col,
                                    end_row,
                                    limit,
                                    rows_at,
                                )
                else:
                    reduce = (
                        storage.x.data_ptr().toint()
                        if cutlass.const_expr(c.reduce_in_ring)
                        else storage.reduce.data_ptr().toint()
                    )
                    self._reduce_and_store(
                        acc,
                        reduce,
                        rank,
                        tidx,
                        alpha_at,
                        out,
                        groups,
                        channel,
                        lane_channel,
                        token,
                        end_row,
                        n,
                        limit,
                        rows_at,
                    )
                if cutlass.const_expr(self.helped):
                    cute.arch.barrier_arrive(barrier_id=SUMS_ADDED + group, number_of_threads=160)
                elif cutlass.const_expr(self.epilogue == "combine"):
                    self._combine(
                        out, groups, rows_smem, thread, group, rank, channel, first_row, end_row, n
                    )
                tile += step
                where = self._locate(tile, tiles, row_tiles, m, groups)

    @cute.jit
    def _locate(
        self,
        tile: Int32,
        tiles: Int32,
        row_tiles: Int32,
        m: Int32,
        groups: tuple[cute.Tensor, ...],
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """(1 or 0: past the last, expert, channel tile, first row, one past the last row).

        Dense: channel tiles first. Grouped: experts first, then channel tiles, then the expert's
        row tiles, so that blocks at work together share weights. Whole warps call this.
        """
        c = self.config
        if cutlass.const_expr(self.experts == 0):
            inside = Int32(tile < tiles)
            return (inside, Int32(0), tile % row_tiles, tile // row_tiles * c.tokens, m)
        ends = groups[0]
        experts = ends.shape[0]
        each = -(-self.experts // 32)
        lane = cute.arch.lane_idx()
        ends_at = ends.iterator.toint()
        before = Int32(0)
        if lane > 0 and lane * each <= experts:
            before = ptx.load_global_i32(ends_at + Int64(lane * each - 1) * 4)
        mine = Int32(0)
        upto = []
        row = before
        for i in cutlass.range_constexpr(each):
            if lane * each + i < experts:
                row = ptx.load_global_i32(ends_at + Int64(lane * each + i) * 4)
            upto.append(row)
        row = before
        for i in cutlass.range_constexpr(each):
            mine += (upto[i] - row + (c.tokens - 1)) // c.tokens
            row = upto[i]
        seen = mine
        for bit in cutlass.range_constexpr(5):
            other = ptx.shuffle_up(seen, 1 << bit)
            if lane >= 1 << bit:
                seen += other
        total = ptx.shuffle_from(seen, Int32(31))
        slot = tile // row_tiles
        run = seen - mine
        hit = Int32(0)
        expert = Int32(0)
        start = Int32(0)
        count = Int32(1)
        first = Int32(0)
        last = Int32(0)
        row = before
        for i in cutlass.range_constexpr(each):
            here = (upto[i] - row + (c.tokens - 1)) // c.tokens
            if slot >= run and slot < run + here:
                hit = Int32(1)
                expert = lane * each + i
                start = run
                count = here
                first = row
                last = upto[i]
            run += here
            row = upto[i]
        source = ptx.first_lane(hit)
        expert = ptx.shuffle_from(expert, source)
        start = ptx.shuffle_from(start, source)
        count = ptx.shuffle_from(count, source)
        first = ptx.shuffle_from(first, source)
        last = ptx.shuffle_from(last, source)
        local = tile - start * row_tiles
        inside = Int32(slot < total)
        return (inside, expert, local // count, first + local % count * c.tokens, last)

    def _sources(
        self,
        where: tuple[Int32, ...],
        codes: cute.Tensor,
        scales: cute.Tensor,
        tma: cute.CopyAtom,
        x_coords: cute.Tensor,
        sx: cute.Tensor,
        n: Int32,
        k_blocks: Int32,
        group_rows: Int32,
        k_first: Int32,
    ) -> tuple[list[Int64], list[Int64], cute.Tensor, cute.Tensor, Int32]:
        """Where a tile's codes, scales and tokens come from, and where tokens go."""
        c = self.config
        _, expert, row_tile, first_row, _ = where
        channel = row_tile * c.rows
        gx = cute.local_tile(
            cute.domain_offset((first_row, 0), x_coords), (c.tokens, K_BLOCK), (0, None)
        )
        tx_smem, tx_gmem = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(sx, 0, 2),
            cute.group_modes(gx, 0, 2),
        )
        # A last tile that is not whole reads its last block again.
        blocks = n // ROW_BLOCK
        at = Int64(expert * blocks) * k_blocks + k_first * self.subs
        block_at = [
            at + Int64(cutlass.min(channel // ROW_BLOCK + r, blocks - 1) * k_blocks)
            for r in range(self.blocks)
        ]
        code_row = [codes.iterator.toint() + block * CODE_BYTES for block in block_at]
        scale_row = [scales.iterator.toint() + block * SCALE_BYTES for block in block_at]
        x_at = channel // group_rows * k_blocks + k_first * self.subs
        return code_row, scale_row, tx_gmem, tx_smem, x_at

    @cute.jit
    def _steps(
        self,
        mma: cute.TiledMma,
        width: cutlass.Constexpr[int],
        acc: list[cute.Tensor],
        a: list[cute.Tensor],
        sx: cute.Tensor,
        codes: Int32,
        scales: Int32,
        full: Any,
        empty: Any,
        stage: Int32,
        phase: Int32,
        k_steps: Int32,
        exponent: Int32,
        group: Int32,
    ) -> tuple[Int32, Int32]:
        """All of a tile's products by wgmma, `width` of its tokens. Returns stage and phase."""
        c = self.config
        mma.set(warpgroup.Field.ACCUMULATE, True)
        after = group + 1
        if after == c.warpgroups:
            after = Int32(0)
        narrow = cute.local_tile(sx, (width, K_BLOCK), (0, 0, None))
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(narrow))
        layout = cute.make_rmem_tensor(mma.partition_shape_C((64, width)), Float32).layout
        sums = [cute.make_tensor(t.iterator, layout) for t in acc]
        words = [cute.recast_tensor(t, Int32) for t in a]
        before = stage
        for i in cutlass.range(k_steps, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            parity = 0
            done_groups = 0
            for sub in cutlass.range_constexpr(self.subs):
                for t in cutlass.range_constexpr(c.tiles):
                    at = t * self.subs + sub
                    q = ptx.load_shared_v4(codes + stage * self.code_bytes + at * CODE_BYTES)
                    s = ptx.load_shared_v2(scales + stage * self.scale_bytes + at * SCALE_BYTES)
                    for part in cutlass.range_constexpr(4 // c.group):
                        for j in cutlass.range_constexpr(c.group):
                            kk = part * c.group + j
                            self._decode(words[parity], j, q[kk], s[kk // 2], kk % 2, exponent)
                        if cutlass.const_expr(c.alternate):
                            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
                        warpgroup.fence()
                        for j in cutlass.range_constexpr(c.group):
                            kk = part * c.group + j
                            cute.gemm(
                                mma,
                                sums[t],
                                a[parity][None, None, j],
                                b[None, None, kk, stage * self.subs + sub],
                                sums[t],
                            )
                        warpgroup.commit_group()
                        if cutlass.const_expr(c.alternate):
                            cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=256)
                        warpgroup.wait_group(c.ring - 1)
                        if cutlass.const_expr(done_groups == c.ring - 2):
                            if i > 0:
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive(empty + before)
                        done_groups += 1
                        parity = done_groups % c.ring
            before = stage
            stage += 1
            if stage == c.stages:
                stage = Int32(0)
                phase ^= 1
        warpgroup.wait_group(0)
        if k_steps > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + before)
        return (stage, phase)

    @cute.jit
    def _steps_by_warp(
        self,
        acc: list[cute.Tensor],
        codes: Int32,
        scales: Int32,
        tokens: Int32,
        full: Any,
        empty: Any,
        stage: Int32,
        phase: Int32,
        k_steps: Int32,
        exponent: Int32,
    ) -> tuple[Int32, Int32]:
        """All of a tile's products by mma.sync. Returns stage and phase."""
        c = self.config
        for _ in cutlass.range(k_steps, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            self._warp_products(
                acc,
                codes + stage * self.code_bytes,
                scales + stage * self.scale_bytes,
                tokens + stage * self.x_bytes,
                exponent,
            )
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            stage += 1
            if stage == c.stages:
                stage = Int32(0)
                phase ^= 1
        return (stage, phase)

    def _warp_products(
        self, acc: list[cute.Tensor], codes: Int32, scales: Int32, tokens: Int32, exponent: Int32
    ) -> None:
        """One stage on this warp's sixteen channels of each tile, by mma.sync."""
        c = self.config
        for sub in range(self.subs):
            # chunks 4..7 of a swizzled row are chunks 0..3 with address bit 6 turned over
            base = tokens + sub * (c.tokens * 128)
            b = [
                [ptx.load_matrices((base + 1024 * j) ^ 64 * h) for h in range(2)]
                for j in range(c.tokens // 8)
            ]
            for t in range(c.tiles):
                at = t * self.subs + sub
                q = ptx.load_shared_v4(codes + at * CODE_BYTES)
                s = ptx.load_shared_v2(scales + at * SCALE_BYTES)
                for kk in range(4):
                    a = self._decoded(q[kk], s[kk // 2], kk % 2, exponent)
                    for j in range(c.tokens // 8):
                        pair = b[j][kk // 2][2 * (kk % 2) : 2 * (kk % 2) + 2]
                        total = ptx.mma_m16n8k16(
                            a, pair, tuple(acc[t][4 * j + r] for r in range(4))
                        )
                        for r in range(4):
                            acc[t][4 * j + r] = total[r]

    def _decode(
        self,
        a: cute.Tensor,
        step: int,
        q: Int32,
        scale_word: Int32,
        half: int,
        exponent: Int32,
    ) -> None:
        """Eight codes of one wgmma step into its four A registers (see `layout`)."""
        for r, value in enumerate(self._decoded(q, scale_word, half, exponent)):
            a[4 * step + r] = value

    def _decoded(
        self, q: Int32, scale_word: Int32, half: int, exponent: Int32
    ) -> tuple[Int32, ...]:
        """Eight codes times their scales: bf16 pairs of channels g, g + 8 at two k."""
        scale = ptx.scales_of_step(scale_word, exponent, half == 1)
        both = Int32(_signed(ptx.MAGNITUDE_AND_SIGN))
        magnitude = Int32(ptx.MAGNITUDE)
        sign = Int32(_signed(ptx.SIGN))
        v0 = q & both
        v1 = (q << 3) & both
        v2 = ((q >> 3) & magnitude) | ((q << 1) & sign)
        # Sign two to the left, magnitude six: one multiplication, whose carries stay below bit 6.
        v3 = ptx.mul_u32(q & Int32(ptx.CODE_3), 4 + 64) & both
        return (
            ptx.mul_by_half(v0, scale, False),
            ptx.mul_by_half(v1, scale, True),
            ptx.mul_by_half(v2, scale, False),
            ptx.mul_by_half(v3, scale, True),
        )

    @cute.jit
    def _copy_weights(
        self,
        code_row: list[Int64],
        scale_row: list[Int64],
        codes_smem: Int32,
        scales_smem: Int32,
        full: Any,
        k_step: Int32,
        stage: Int32,
        policy: Int64,
    ) -> None:
        """Arm the stage's barrier and ask for its codes and scales."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.config.stage_bytes)
            barrier = (full + stage).toint()
            for r in cutlass.range_constexpr(self.blocks):
                ptx.bulk_copy(
                    codes_smem + stage * self.code_bytes + r * (self.subs * CODE_BYTES),
                    code_row[r] + Int64(k_step) * (self.subs * CODE_BYTES),
                    self.subs * CODE_BYTES,
                    barrier,
                    policy,
                )
                ptx.bulk_copy(
                    scales_smem + stage * self.scale_bytes + r * (self.subs * SCALE_BYTES),
                    scale_row[r] + Int64(k_step) * (self.subs * SCALE_BYTES),
                    self.subs * SCALE_BYTES,
                    barrier,
                    policy,
                )

    @cute.jit
    def _copy_tokens(
        self,
        tma: cute.CopyAtom,
        tx_gmem: cute.Tensor,
        tx_smem: cute.Tensor,
        full: Any,
        x_at: Int32,
        k_step: Int32,
        stage: Int32,
    ) -> None:
        for sub in cutlass.range_constexpr(self.subs):
            cute.copy(
                tma,
                tx_gmem[None, x_at + k_step * self.subs + sub],
                tx_smem[None, stage * self.subs + sub],
                tma_bar_ptr=full + stage,
            )

    @cute.jit
    def _reduce_and_store(
        self,
        acc: list[cute.Tensor],
        reduce: Int32,
        rank: Int32,
        tidx: Int32,
        alpha_at: Int64,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        channel: Int32,
        lane_channel: Int32,
        token: Int32,
        m: Int32,
        n: Int32,
        limit: Float32,
        rows_at: Int32,
    ) -> None:
        """Sum the cluster's partial tiles over distributed shared memory, each block its share.

        Unit u (two channels of one token) belongs to block u % owners; the order of summation is
        fixed, so the result does not depend on timing.
        """
        c = self.config
        slot_bytes = c.warpgroups * 1024
        cute.arch.cluster_wait()
        if cutlass.const_expr(c.reduce_in_ring):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        mine = reduce + rank * (c.slots * slot_bytes) + tidx * 8
        for owner in cutlass.range_constexpr(c.owners):
            if rank != owner:
                there = ptx.peer_address(mine, Int32(owner))
                for u in cutlass.range_constexpr(owner, c.units, c.owners):
                    t, j, col = u // (c.tokens // 4), u % (c.tokens // 4) // 2, u % 2
                    ptx.store_peer_f2(
                        there + u // c.owners * slot_bytes,
                        acc[t][4 * j + col],
                        acc[t][4 * j + 2 + col],
                    )
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for owner in cutlass.range_constexpr(c.owners):
            if rank == owner:
                for u in cutlass.range_constexpr(owner, c.units, c.owners):
                    t, j, col = u // (c.tokens // 4), u % (c.tokens // 4) // 2, u % 2
                    first = acc[t][4 * j + col]
                    second = acc[t][4 * j + 2 + col]
                    for peer in cutlass.range_constexpr(c.split_k):
                        if cutlass.const_expr(peer != owner):
                            got = ptx.load_shared_f2(
                                reduce + (peer * c.slots + u // c.owners) * slot_bytes + tidx * 8
                            )
                            first += got[0]
                            second += got[1]
                    if channel + 64 * t < n:
                        scale = ptx.load_global_f2(alpha_at + 256 * t)
                        self._store(
                            out,
                            groups,
                            first,
                            second,
                            scale,
                            lane_channel + 64 * t,
                            token + 8 * j + col,
                            m,
                            limit,
                            rows_at,
                        )

    @cute.jit
    def _store(
        self,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        first: Float32,
        second: Float32,
        scale: tuple[Float32, Float32],
        channel: Int32,
        row: Int32,
        end_row: Int32,
        limit: Float32,
        rows_at: Int32,
    ) -> None:
        """Channels `channel` and `channel + 1` of one row."""
        if row < end_row:
            a = first * scale[0]
            b = second * scale[1]
            base = out.iterator.toint()
            stride = Int64(out.stride[0]) * (out.element_type.width // 8)
            if cutlass.const_expr(self.epilogue == "fp32"):
                ptx.store_global_f2(base + row * stride + channel * 4, a, b)
            elif cutlass.const_expr(self.epilogue == "bf16"):
                ptx.store_global_b32(base + row * stride + channel * 2, arithmetic.pack_bf16(a, b))
            elif cutlass.const_expr(self.epilogue == "swiglu"):
                gate = cute.arch.fmin(a, limit)
                up = cute.arch.fmin(cute.arch.fmax(b, -limit), limit)
                sigmoid = cute.arch.rcp_approx(1.0 + cute.arch.exp2(gate * -LOG2_E))
                ptx.store_global_bf16(base + row * stride + channel, gate * sigmoid * up)
            else:
                total = groups[4]
                word, bits = ptx.load_shared_f2(rows_at + row * 8)
                a *= bits
                b *= bits
                token = Int64(ptx.float_bits(word))
                if token >= 0:
                    ptx.store_global_b32(
                        base + token * stride + channel * 2, arithmetic.pack_bf16(a, b)
                    )
                else:
                    ptx.add_global_f2(
                        total.iterator.toint() + (-1 - token) * stride * 2 + channel * 4, a, b
                    )

    @cute.jit
    def _describe_rows(
        self,
        groups: tuple[cute.Tensor, ...],
        rows: Int32,
        thread: Int32,
        first_row: Int32,
        end_row: Int32,
    ) -> None:
        """(token, weight) of the tile's rows into shared memory, while their product is computed.

        Each warpgroup has a copy, so that none waits for another.

        A token that other rows share is stored as -1 - token.
        """
        _, tokens, weights, fan, _, _ = groups
        row = first_row + thread
        if thread < self.config.tokens and row < end_row:
            token = ptx.load_global_i32(tokens.iterator.toint() + Int64(row) * 4)
            weight = ptx.load_global_f32(weights.iterator.toint() + Int64(row) * 4)
            if ptx.load_global_i32(fan.iterator.toint() + Int64(token) * 4) > 1:
                token = -1 - token
            at = rows + thread * 8
            ptx.store_shared_i32(at, token)
            ptx.store_shared_i32(at + 4, ptx.float_bits(weight))

    @cute.jit
    def _combine(
        self,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        rows: Int32,
        thread: Int32,
        group: Int32,
        rank: Int32,
        channel: Int32,
        first_row: Int32,
        end_row: Int32,
        n: Int32,
    ) -> None:
        """Round the sums that this warpgroup completed, and leave the workspace zero.

        Whoever adds a token's last row to a range of channels counts up to the token's rows and
        writes it out, so that no pass over the sums follows. Each warp looks after its own 32 rows
        and reads the sums of four tokens at a time.
        """
        c = self.config
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        unit = thread // 8 * 2 + thread % 2
        shared = Int32(0)
        if (
            thread < c.tokens
            and first_row + thread < end_row
            and channel < n
            and (c.split_k == 1 or unit % c.owners == rank)
        ):
            shared = ptx.load_shared_i32(rows + thread * 8)
        self._complete(out, groups, [shared], channel, thread % 32, n)

    @cute.jit
    def _look_after_sums(
        self,
        rows: Int32,
        group: Int32,
        tile: Int32,
        step: Int32,
        tiles: Int32,
        row_tiles: Int32,
        m: Int32,
        n: Int32,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
    ) -> None:
        """One warp does for a warpgroup what `_combine` does, beside its next tile's products.

        The fence covers the warpgroup's additions too: the barrier before it makes it cumulative.
        """
        c = self.config
        lane = cute.arch.lane_idx()
        where = self._locate(tile, tiles, row_tiles, m, groups)
        while where[0] != 0:
            _, _, row_tile, first_row, end_row = where
            channel = row_tile * c.rows + group * (c.tiles * 64)
            cute.arch.barrier(barrier_id=SUMS_ADDED + group, number_of_threads=160)
            shared = []
            for i in cutlass.range_constexpr(c.tokens // 32):
                row = 32 * i + lane
                value = Int32(0)
                if first_row + row < end_row and channel < n:
                    value = ptx.load_shared_i32(rows + (group * c.tokens + row) * 8)
                shared.append(value)
            cute.arch.sync_warp()
            # Nobody waits for it after the last tile, which does no harm.
            cute.arch.barrier_arrive(barrier_id=ROWS_READ + group, number_of_threads=160)
            cute.arch.fence_acq_rel_gpu()
            self._complete(out, groups, shared, channel, lane, n)
            tile += step
            where = self._locate(tile, tiles, row_tiles, m, groups)

    @cute.jit
    def _complete(
        self,
        out: cute.Tensor,
        groups: tuple[cute.Tensor, ...],
        shared: list[Int32],
        channel: Int32,
        lane: Int32,
        n: Int32,
    ) -> None:
        """Count a warp's rows and round the sums that are whole. shared: -1 - token, or >= 0."""
        c = self.config
        _, _, _, fan, total, counts = groups
        width = 64 * c.tiles
        stride = Int64(out.stride[0]) * 2
        completes = []
        for i in cutlass.range_constexpr(len(shared)):
            complete = Int32(-1)
            if shared[i] < 0:
                token = -1 - shared[i]
                sharers = ptx.load_global_i32(fan.iterator.toint() + Int64(token) * 4)
                ranges = (n + (width - 1)) // width
                at = counts.iterator.toint() + (Int64(token) * ranges + channel // width) * 4
                if ptx.count_global(at) == sharers - 1:
                    complete = token
                    ptx.store_global_b32(at, Int32(0))
            completes.append(complete)
        cute.arch.sync_warp()
        at_once = 2 if self.helped else 4
        for i in cutlass.range_constexpr(len(shared)):
            complete = completes[i]
            left = ptx.ballot(complete + 1)
            while left != 0:
                tokens = []
                sums = []
                for _ in cutlass.range_constexpr(at_once):
                    source = ptx.lowest_bit(left)
                    token = ptx.shuffle_from(complete, source)
                    if left == 0:
                        token = Int32(-1)
                    tokens.append(token)
                    left = left & (left - 1)
                    for t in cutlass.range_constexpr(c.tiles):
                        at = Int64(token) * stride * 2 + (channel + 64 * t + 2 * lane) * 4
                        inside = Int32(channel + 64 * t < n) * Int32(token >= 0)
                        sums.append(ptx.load_l2_f2_if(total.iterator.toint() + at, inside))
                for j in cutlass.range_constexpr(at_once):
                    for t in cutlass.range_constexpr(c.tiles):
                        at = channel + 64 * t + 2 * lane
                        if tokens[j] >= 0 and at < n:
                            base = Int64(tokens[j]) * stride
                            zero = Float32(0.0)
                            ptx.store_global_f2(
                                total.iterator.toint() + base * 2 + at * 4, zero, zero
                            )
                            pair = arithmetic.pack_bf16(*sums[j * c.tiles + t])
                            ptx.store_global_b32(out.iterator.toint() + base + at * 2, pair)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
