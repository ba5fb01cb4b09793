"""NVFP4 x NVFP4 on tcgen05: persistent, warp-specialised, block-scaled.

Warp roles, the same sequence that `pipeline` models:

- load warp (both CTAs of a pair): wait for an empty stage; codes and scales of both operands by
  TMA. The leader's barrier counts the bytes of both CTAs.
- MMA warp (leader only): wait for a full stage; scales to tensor memory (tcgen05.cp, in order with
  the MMAs that read them); four block-scaled MMAs of K = 64; commit frees the stage in both CTAs.
  After a tile's last stage, commit hands the accumulator over.
- four epilogue warps (both CTAs): wait for the accumulator; each thread reads its lane, 32 columns
  at a time; the last read frees the accumulator; arithmetic and stores.

Scales travel as 512-byte tiles of 128 rows by one MMA step (`numerics.layout`), copied as they are.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from assay_kernels.kernels.shared import arithmetic
from assay_kernels.kernels.sm100 import ptx
from assay_kernels.kernels.sm100.config import (
    CHUNK,
    LANES,
    LOAD_WARP,
    MMA_K,
    MMA_WARP,
    SCALE_TILE,
    THREADS,
    TILE_K,
    GemmConfig,
)
from assay_kernels.kernels.sm100.quantize import scale_offset
from assay_kernels.kernels.sm100.schedule import locate

STEPS = TILE_K // MMA_K


class Gemm:
    """Host entry and device code of one `GemmConfig`.

    epilogue: "bf16", "fp32": [M, N]; "swiglu": bf16 [M, N / 2]; "requantise": E2M1 codes
        [M, N / 4 bytes] and scales in the next GEMM's layout. The last two want channels in turns
        of sixteen gates and their sixteen ups.
    row_scaled: multiply row m, group g by row_scale[m * groups + g].
    grouped: rows of x come in tiles of 128, each of the expert that `tile_expert` names.
    """

    def __init__(
        self,
        config: GemmConfig,
        epilogue: str = "bf16",
        row_scaled: bool = False,
        grouped: bool = False,
    ) -> None:
        if config.swapped and (grouped or epilogue not in ("bf16", "fp32")):
            raise ValueError(f"{epilogue}: only plain products run with operands swapped")
        if grouped and config.ctas != 1:
            raise ValueError("routed rows come in tiles of 128: one CTA")
        self.config = config
        self.epilogue = epilogue
        self.row_scaled = row_scaled
        self.grouped = grouped
        self.group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # uint8 [M * K * groups / 2]
        x_scales: cute.Tensor,  # uint8, 128 x 4 layout
        w: cute.Tensor,  # uint8 [E * N * K / 2]
        w_scales: cute.Tensor,  # uint8, 128 x 4 layout
        alpha: cute.Tensor,  # fp32 [E * N]
        row_scale: cute.Tensor,  # fp32 [M * groups]
        out: cute.Tensor,  # bf16, fp32 or uint8
        out_scales: cute.Tensor,  # uint8, 128 x 4 layout; "requantise" only
        tile_expert: cute.Tensor,  # int32 [row tiles + 1]; the last is how many are in use
        m: Int32,
        n: Int32,  # channels of one expert
        k: Int32,  # inputs of one channel
        experts: Int32,
        group_n: Int32,  # channels that share one K range of x; n without groups
        limit: Float32,
        out_scale: Float32,  # global scale of the requantised output
        clusters: Int32,  # clusters to launch at most
        pdl: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        groups = n // group_n
        x_codes, x_words = self._operand(x, x_scales, m, k * groups)
        w_codes, w_words = self._operand(w, w_scales, n * experts, k)
        if cutlass.const_expr(c.swapped):
            a, sfa, b, sfb = w_codes, w_words, x_codes, x_words
        else:
            a, sfa, b, sfb = x_codes, x_words, w_codes, w_words
        tiler = (c.tile_m, c.tile_n, TILE_K)
        major = tcgen05.OperandMajorMode.K
        mma = blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            Float4E2M1FN,
            Float4E2M1FN,
            major,
            major,
            Float8E4M3FN,
            16,
            self.group,
            (c.tile_m, c.tile_n),
        )
        a_layout = blackwell_helpers.make_smem_layout_a(mma, tiler, Float4E2M1FN, c.stages)
        b_layout = blackwell_helpers.make_smem_layout_b(mma, tiler, Float4E2M1FN, c.stages)
        sfa_layout = blockscaled_layout.make_smem_layout_sfa(mma, tiler, 16, c.stages)
        sfb_layout = blockscaled_layout.make_smem_layout_sfb(mma, tiler, 16, c.stages)
        cluster = cute.tiled_divide(cute.make_layout((c.ctas, 1, 1)), (mma.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        first = (None, None, None, 0)
        a_tma, a_coords = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.slice_(a_layout, first), tiler, mma, cluster.shape
        )
        b_tma, b_coords = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, cute.slice_(b_layout, first), tiler, mma, cluster.shape
        )
        sfa_tma, sfa_coords = self._scale_tma(load, sfa, 1)
        sfb_tma, sfb_coords = self._scale_tma(load, sfb, c.b_scale_tiles)

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.stages * c.a_bytes], 1024]
            b: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, c.stages * c.b_bytes], 1024]
            sfa: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, c.stages * SCALE_TILE * STEPS], 512
            ]
            sfb: cute.struct.Align[
                cute.struct.MemRange[
                    cutlass.Uint8, c.stages * c.b_scale_tiles * SCALE_TILE * STEPS
                ],
                512,
            ]
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            ready: cute.struct.MemRange[Int64, c.acc_stages]
            free: cute.struct.MemRange[Int64, c.acc_stages]
            tmem: Int32

        self.storage = Storage
        row_tiles = (m + (c.tokens - 1)) // c.tokens
        channel_tiles = (n + (c.channels - 1)) // c.channels
        self.kernel(
            mma,
            a_tma,
            a_coords,
            b_tma,
            b_coords,
            sfa_tma,
            sfa_coords,
            sfb_tma,
            sfb_coords,
            a_layout,
            b_layout,
            sfa_layout,
            sfb_layout,
            alpha,
            row_scale,
            out,
            out_scales,
            tile_expert,
            m,
            n,
            (k + (TILE_K - 1)) // TILE_K,
            group_n,
            row_tiles,
            channel_tiles,
            limit,
            out_scale,
        ).launch(
            grid=(cutlass.min(row_tiles * channel_tiles, clusters) * c.ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(c.ctas, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=pdl,
            stream=stream,
        )

    def _operand(
        self, codes: cute.Tensor, scales: cute.Tensor, rows: Int32, k: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Codes as E2M1 [rows, k]; scales as words [row tiles, k / 64, 128 words]."""
        matrix = cute.make_tensor(
            cute.recast_ptr(codes.iterator, dtype=Float4E2M1FN),
            cute.make_layout((rows, cute.assume(k, 64)), stride=(cute.assume(Int64(k), 64), 1)),
        )
        steps = (k + (MMA_K - 1)) // MMA_K
        words = SCALE_TILE // 4
        tiles = cute.make_tensor(
            cute.recast_ptr(scales.iterator, dtype=Int32),
            cute.make_layout(
                ((rows + (LANES - 1)) // LANES, steps, words),
                stride=(cute.assume(Int64(steps) * words, words), words, 1),
            ),
        )
        return matrix, tiles

    def _scale_shape(self, tiles: int) -> cute.Layout:
        words = SCALE_TILE // 4
        return cute.make_layout((tiles, STEPS, words), stride=(STEPS * words, words, 1))

    def _scale_tma(
        self, load: Any, scales: cute.Tensor, tiles: int
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        layout = self._scale_shape(tiles)
        tile = (tiles, STEPS, SCALE_TILE // 4)
        return cpasync.make_tiled_tma_atom(load, scales, layout, tile)  # type: ignore[no-any-return]

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        a_tma: cute.CopyAtom,
        a_coords: cute.Tensor,
        b_tma: cute.CopyAtom,
        b_coords: cute.Tensor,
        sfa_tma: cute.CopyAtom,
        sfa_coords: cute.Tensor,
        sfb_tma: cute.CopyAtom,
        sfb_coords: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        sfa_layout: cute.Layout,
        sfb_layout: cute.Layout,
        alpha: cute.Tensor,
        row_scale: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        tile_expert: cute.Tensor,
        m: Int32,
        n: Int32,
        k_tiles: Int32,
        group_n: Int32,
        row_tiles: Int32,
        channel_tiles: Int32,
        limit: Float32,
        out_scale: Float32,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if cutlass.const_expr(c.ctas == 2):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        first_tile = block // c.ctas
        step = grid // c.ctas

        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        full = storage.full.data_ptr()
        empty = storage.empty.data_ptr()
        ready = storage.ready.data_ptr()
        free = storage.free.data_ptr()

        if warp == LOAD_WARP:
            for tma in (a_tma, b_tma, sfa_tma, sfb_tma):
                cpasync.prefetch_descriptor(tma)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, 1)
                for s in cutlass.range_constexpr(c.acc_stages):
                    cute.arch.mbarrier_init(ready + s, 1)
                    cute.arch.mbarrier_init(free + s, c.acc_releases)
            cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(c.columns, storage.tmem.ptr, is_two_cta=c.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=c.ctas == 2)
        ptx.before_sync()
        if cutlass.const_expr(c.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        ptx.after_sync()
        acc_ptr = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.ptr)
        cute.arch.griddepcontrol_wait()

        used = row_tiles
        if cutlass.const_expr(self.grouped):
            used = ptx.load_i32(tile_expert.iterator.toint() + Int64(row_tiles) * 4)
        tiles = used * channel_tiles

        sa = cute.make_tensor(
            cute.recast_ptr(storage.a.data_ptr(), a_layout.inner, Float4E2M1FN), a_layout.outer
        )
        sb = cute.make_tensor(
            cute.recast_ptr(storage.b.data_ptr(), b_layout.inner, Float4E2M1FN), b_layout.outer
        )

        if warp == LOAD_WARP:
            self._load(
                mma,
                (a_tma, b_tma, sfa_tma, sfb_tma),
                (a_coords, b_coords, sfa_coords, sfb_coords),
                (sa, sb, storage.sfa.data_ptr(), storage.sfb.data_ptr()),
                (full, empty),
                (first_tile, step, tiles, used, channel_tiles, k_tiles),
                tile_expert,
                group_n,
                rank,
            )
        if warp == MMA_WARP:
            if rank == 0:
                self._multiply(
                    mma,
                    (sa, sb, storage.sfa.data_ptr(), storage.sfb.data_ptr()),
                    (sfa_layout, sfb_layout),
                    (full, empty, ready, free),
                    acc_ptr,
                    (first_tile, step, tiles, k_tiles),
                )
        if warp < MMA_WARP:
            self._epilogue(
                acc_ptr,
                (ready, free),
                (first_tile, step, tiles, used),
                (alpha, row_scale, out, out_scales, tile_expert),
                (m, n, group_n),
                limit,
                out_scale,
                rank,
                tidx,
            )
        ptx.before_sync()
        if cutlass.const_expr(c.ctas == 2):
            # The peer's last arrivals are for this CTA's barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        ptx.after_sync()
        if warp == 0:
            cute.arch.dealloc_tmem(acc_ptr, c.columns, is_two_cta=c.ctas == 2)

    @cute.jit
    def _load(
        self,
        mma: cute.TiledMma,
        tmas: tuple[cute.CopyAtom, ...],
        coords: tuple[cute.Tensor, ...],
        targets: tuple[Any, ...],
        barriers: tuple[Any, ...],
        work: tuple[Int32, ...],
        tile_expert: cute.Tensor,
        group_n: Int32,
        rank: Int32,
    ) -> None:
        c = self.config
        a_tma, b_tma, sfa_tma, sfb_tma = tmas
        a_coords, b_coords, sfa_coords, sfb_coords = coords
        sa, sb, sfa_ptr, sfb_ptr = targets
        full, empty = barriers
        first_tile, step, tiles, used, channel_tiles, k_tiles = work
        part = mma.get_slice(rank)
        one = cute.make_layout(1)
        ga = cute.local_tile(a_coords, (c.tile_m, TILE_K), (None, None))
        gb = cute.local_tile(b_coords, (c.tile_n, TILE_K), (None, None))
        a_to, a_from = cpasync.tma_partition(
            a_tma,
            0,
            one,
            cute.group_modes(sa, 0, 3),
            cute.group_modes(part.partition_A(ga), 0, 3),
        )
        b_to, b_from = cpasync.tma_partition(
            b_tma,
            0,
            one,
            cute.group_modes(sb, 0, 3),
            cute.group_modes(part.partition_B(gb), 0, 3),
        )
        sfa_to, sfa_from = self._scale_copies(sfa_tma, sfa_coords, sfa_ptr, 1)
        sfb_to, sfb_from = self._scale_copies(sfb_tma, sfb_coords, sfb_ptr, c.b_scale_tiles)
        stage = Int32(0)
        phase = Int32(1)
        tile = first_tile
        while tile < tiles:
            row_tile, channel_tile = locate(tile, used)
            expert = Int32(0)
            if cutlass.const_expr(self.grouped):
                expert = ptx.load_i32(tile_expert.iterator.toint() + Int64(row_tile) * 4)
            x_k = channel_tile * c.channels // group_n * k_tiles
            w_tile = expert * channel_tiles + channel_tile
            if cutlass.const_expr(c.swapped):
                a_tile, b_tile, a_k, b_k = w_tile, row_tile, Int32(0), x_k
            else:
                a_tile, b_tile, a_k, b_k = row_tile, w_tile, x_k, Int32(0)
            for i in cutlass.range(k_tiles, unroll=1):
                # A fresh barrier passes a wait for the phase before its first.
                cute.arch.mbarrier_wait(empty + stage, phase)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, c.transaction_bytes)
                bar = full + stage
                cute.copy(a_tma, a_from[None, a_tile, a_k + i], a_to[None, stage], tma_bar_ptr=bar)
                cute.copy(b_tma, b_from[None, b_tile, b_k + i], b_to[None, stage], tma_bar_ptr=bar)
                cute.copy(
                    sfa_tma,
                    sfa_from[None, a_tile * c.ctas + rank, a_k + i],
                    sfa_to[None, stage],
                    tma_bar_ptr=bar,
                )
                cute.copy(
                    sfb_tma, sfb_from[None, b_tile, b_k + i], sfb_to[None, stage], tma_bar_ptr=bar
                )
                stage += 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase ^= 1
            tile += step
        cute.arch.griddepcontrol_launch_dependents()
        # Wait until every stage is free: no copy may be in flight when shared memory goes.
        for _ in cutlass.range(c.stages, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            stage += 1
            if stage == c.stages:
                stage = Int32(0)
                phase ^= 1

    def _scale_copies(
        self, tma: cute.CopyAtom, coords: cute.Tensor, pointer: Any, tiles: int
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Shared (.., stage) and global (.., row tile, k tile) views of scale tiles."""
        c = self.config
        words = SCALE_TILE // 4
        layout = cute.append(
            self._scale_shape(tiles), cute.make_layout(c.stages, stride=tiles * STEPS * words)
        )
        shared = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), layout)
        grid = cute.local_tile(coords, (tiles, STEPS, words), (None, None, 0))
        to, source = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 3),
            cute.group_modes(grid, 0, 3),
        )
        return to, source

    @cute.jit
    def _multiply(
        self,
        mma: cute.TiledMma,
        sources: tuple[Any, ...],
        layouts: tuple[cute.Layout, ...],
        barriers: tuple[Any, ...],
        acc_ptr: cute.Pointer,
        work: tuple[Int32, ...],
    ) -> None:
        c = self.config
        sa, sb, sfa_ptr, sfb_ptr = sources
        sfa_layout, sfb_layout = layouts
        full, empty, ready, free = barriers
        first_tile, step, tiles, k_tiles = work
        a = mma.make_fragment_A(sa)
        b = mma.make_fragment_B(sb)
        tiler = (c.tile_m, c.tile_n, TILE_K)
        acc_shape = mma.partition_shape_C((c.tile_m, c.tile_n))
        acc_layout = mma.make_fragment_C(acc_shape).layout
        sfa_at = c.acc_stages * c.acc_columns
        first = (None, None, None, 0)
        sfa_tmem = cute.make_tensor(
            cute.recast_ptr(acc_ptr + sfa_at, dtype=Float8E4M3FN),
            blockscaled_layout.make_tmem_layout_sfa(mma, tiler, 16, cute.slice_(sfa_layout, first)),
        )
        sfb_tmem = cute.make_tensor(
            cute.recast_ptr(acc_ptr + sfa_at + 4 * STEPS, dtype=Float8E4M3FN),
            blockscaled_layout.make_tmem_layout_sfb(mma, tiler, 16, cute.slice_(sfb_layout, first)),
        )
        sfa_copy, sfa_from, sfa_to = self._to_tmem(sfa_ptr, sfa_layout, sfa_tmem)
        sfb_copy, sfb_from, sfb_to = self._to_tmem(sfb_ptr, sfb_layout, sfb_tmem)
        both = Int32(3)
        stage = Int32(0)
        phase = Int32(0)
        acc_stage = Int32(0)
        acc_phase = Int32(1)
        tile = first_tile
        while tile < tiles:
            cute.arch.mbarrier_wait(free + acc_stage, acc_phase)
            ptx.after_sync()
            acc = cute.make_tensor(acc_ptr + acc_stage * c.acc_columns, acc_layout)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                ptx.after_sync()
                at = (None, None, None, None, stage)
                cute.copy(sfa_copy, sfa_from[at], sfa_to)
                cute.copy(sfb_copy, sfb_from[at], sfb_to)
                for kk in cutlass.range_constexpr(STEPS):
                    cute.gemm(
                        mma,
                        acc,
                        [a[None, None, kk, stage], sfa_tmem[None, None, kk]],
                        [b[None, None, kk, stage], sfb_tmem[None, None, kk]],
                        acc,
                    )
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    if cutlass.const_expr(c.ctas == 2):
                        tcgen05.commit(empty + stage, both, self.group)
                    else:
                        tcgen05.commit(empty + stage)
                stage += 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase ^= 1
            with cute.arch.elect_one():
                if cutlass.const_expr(c.ctas == 2):
                    tcgen05.commit(ready + acc_stage, both, self.group)
                else:
                    tcgen05.commit(ready + acc_stage)
            acc_stage += 1
            if acc_stage == c.acc_stages:
                acc_stage = Int32(0)
                acc_phase ^= 1
            tile += step

    def _to_tmem(
        self, pointer: Any, layout: cute.Layout, target: cute.Tensor
    ) -> tuple[Any, cute.Tensor, cute.Tensor]:
        """tcgen05.cp of one stage's scales: (copy, shared descriptors (.., stage), target)."""
        shared = cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), layout)
        compact, to = cute.filter_zeros(shared), cute.filter_zeros(target)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), Float8E4M3FN)
        copy = tcgen05.make_s2t_copy(atom, to)
        part = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(compact))
        return copy, source, part.partition_D(to)

    @cute.jit
    def _epilogue(
        self,
        acc_ptr: cute.Pointer,
        barriers: tuple[Any, ...],
        work: tuple[Int32, ...],
        tensors: tuple[cute.Tensor, ...],
        sizes: tuple[Int32, ...],
        limit: Float32,
        out_scale: Float32,
        rank: Int32,
        tidx: Int32,
    ) -> None:
        c = self.config
        ready, free = barriers
        first_tile, step, tiles, used = work
        alpha, row_scale, out, out_scales, tile_expert = tensors
        m, n, group_n = sizes
        groups = n // group_n
        acc_stage = Int32(0)
        acc_phase = Int32(0)
        tile = first_tile
        while tile < tiles:
            row_tile, channel_tile = locate(tile, used)
            expert = Int32(0)
            if cutlass.const_expr(self.grouped):
                expert = ptx.load_i32(tile_expert.iterator.toint() + Int64(row_tile) * 4)
            channel = channel_tile * c.channels
            alpha_at = alpha.iterator.toint() + Int64(expert * n + channel) * 4
            scale_at = row_scale.iterator.toint() + channel // group_n * 4
            lane = rank * LANES + tidx
            cute.arch.mbarrier_wait(ready + acc_stage, acc_phase)
            ptx.after_sync()
            at = acc_ptr.toint() + acc_stage * c.acc_columns + (tidx // 32 << 21)
            if cutlass.const_expr(c.swapped):
                values = ptx.load_accumulators(at)
                self._release(free, acc_stage)
                self._store_swapped(
                    values,
                    alpha_at,
                    scale_at,
                    out,
                    row_tile * c.tokens,
                    channel + tidx,
                    tidx,
                    m,
                    n,
                    groups,
                )
            else:
                row = row_tile * c.tokens + lane
                scale = Float32(1.0)
                if cutlass.const_expr(self.row_scaled):
                    if row < m:
                        scale = ptx.load_f32(scale_at + Int64(row) * groups * 4)
                for chunk in cutlass.range(c.tile_n // CHUNK, unroll=1):
                    values = ptx.load_accumulators(at + chunk * CHUNK)
                    if chunk == c.tile_n // CHUNK - 1:
                        self._release(free, acc_stage)
                    column = channel + chunk * CHUNK
                    if column < n:
                        self._store(
                            values,
                            alpha_at + chunk * (CHUNK * 4),
                            scale,
                            out,
                            out_scales,
                            row,
                            column,
                            m,
                            n,
                            limit,
                            out_scale,
                        )
            acc_stage += 1
            if acc_stage == c.acc_stages:
                acc_stage = Int32(0)
                acc_phase ^= 1
            tile += step

    @cute.jit
    def _release(self, free: cute.Pointer, acc_stage: Int32) -> None:
        """This warp has read the accumulator; the leader's MMA warp may write it again."""
        ptx.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.config.ctas == 2):
                cute.arch.mbarrier_arrive(
                    free + acc_stage, Int32(0), scope=nvvm.MemScopeKind.CLUSTER
                )
            else:
                cute.arch.mbarrier_arrive(free + acc_stage)

    @cute.jit
    def _store(
        self,
        values: tuple[Float32, ...],
        alpha_at: Int64,
        scale: Float32,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        row: Int32,
        column: Int32,
        m: Int32,
        n: Int32,
        limit: Float32,
        out_scale: Float32,
    ) -> None:
        """One row's 32 channels from `column` on."""
        alphas = [a for i in range(CHUNK // 4) for a in ptx.load_f4(alpha_at + 16 * i)]
        y = [arithmetic.multiply(value, a) for value, a in zip(values, alphas, strict=True)]
        if cutlass.const_expr(self.row_scaled):
            y = [arithmetic.multiply(value, scale) for value in y]
        base = out.iterator.toint()
        if cutlass.const_expr(self.epilogue == "bf16"):
            if row < m:
                at = base + (Int64(row) * n + column) * 2
                words = [arithmetic.pack_bf16(y[2 * i], y[2 * i + 1]) for i in range(16)]
                for i in cutlass.range_constexpr(4):
                    ptx.store_v4(at + 16 * i, *words[4 * i : 4 * i + 4])
        if cutlass.const_expr(self.epilogue == "fp32"):
            if row < m:
                at = base + (Int64(row) * n + column) * 4
                for i in cutlass.range_constexpr(8):
                    ptx.store_f4(at + 16 * i, *y[4 * i : 4 * i + 4])
        if cutlass.const_expr(self.epilogue in ("swiglu", "requantise")):
            h = [arithmetic.swiglu(y[i], y[16 + i], limit) for i in range(16)]
            block = column // CHUNK
            width = n // 2
            if cutlass.const_expr(self.epilogue == "swiglu"):
                if row < m:
                    at = base + (Int64(row) * width + block * 16) * 2
                    words = [arithmetic.pack_bf16(h[2 * i], h[2 * i + 1]) for i in range(8)]
                    for i in cutlass.range_constexpr(2):
                        ptx.store_v4(at + 16 * i, *words[4 * i : 4 * i + 4])
            else:
                low, high, byte = arithmetic.quantize_block(h, out_scale, True)
                if row < m:
                    ptx.store_v2(base + Int64(row) * (width // 2) + block * 8, low, high)
                # Rows past the last are products of zeros: their scales are the padding's zeros.
                if row < (m + (LANES - 1)) // LANES * LANES:
                    offset = scale_offset(row, block, width // 16)
                    ptx.store_u8(out_scales.iterator.toint() + offset, byte)

    @cute.jit
    def _store_swapped(
        self,
        values: tuple[Float32, ...],
        alpha_at: Int64,
        scale_at: Int64,
        out: cute.Tensor,
        row: Int32,
        column: Int32,
        tidx: Int32,
        m: Int32,
        n: Int32,
        groups: Int32,
    ) -> None:
        """One channel of every token: lanes of a warp write neighbours."""
        if column < n:
            factor = ptx.load_f32(alpha_at + tidx * 4)
            for i in cutlass.range_constexpr(self.config.tile_n):
                if row + i < m:
                    y = arithmetic.multiply(values[i], factor)
                    if cutlass.const_expr(self.row_scaled):
                        y = arithmetic.multiply(
                            y, ptx.load_f32(scale_at + Int64(row + i) * groups * 4)
                        )
                    at = Int64(row + i) * n + column
                    if cutlass.const_expr(self.epilogue == "bf16"):
                        ptx.store_bf16(out.iterator.toint() + at * 2, y)
                    else:
                        ptx.store_f32(out.iterator.toint() + at * 4, y)


OUT = {"bf16": BFloat16, "swiglu": BFloat16, "fp32": Float32, "requantise": cutlass.Uint8}
"""Element type that an epilogue stores."""
