"""Attention of any query length over dense, ragged or paged keys: one kernel for all of them.

A program walks its share of the schedule, a pair (block of query rows, kv head) at a time. A pair
that one program holds whole is written directly; otherwise each leaves a part, and parts are merged
in a tree whose every node is done by whoever arrives there last. Nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.config import (
    AttendConfig,
    AttendConstants,
    attend_constants,
    every_attend_config,
    fit_shared_memory,
)
from anabranch.kernels.triton.addressing import Pages, Rows
from anabranch.kernels.triton.boxes import Boxes, boxes_of
from anabranch.kernels.triton.merge_tree import (
    Parts,
    leave_part,
    merge_children,
    merge_tree,
)
from anabranch.kernels.triton.online_softmax import empty_state, finish_state
from anabranch.kernels.triton.output import write_rows
from anabranch.kernels.triton.schedule_layout import (
    is_dealt,
    pair_of,
    part_of,
    parts_of,
    read_block,
    read_dealt,
    read_header,
    read_worker,
    units_of,
)
from anabranch.kernels.triton.tiles import attend_pair


class Rules(NamedTuple):
    """How logits come from scores, and who may look at what."""

    scale: float  # logits in base 2 are scores times scale
    softcap: float | None
    window: int | None
    tree: torch.Tensor | None  # uint8 [num_tokens, tree_width]


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    k: Pages,
    v: Pages,
    boxes: Boxes | None,
    table: torch.Tensor | None,  # int32 [num_seqs, max_pages]; contiguous keys have none
    rules: Rules,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    schedule: torch.Tensor,
    parts: Parts,
    constants: AttendConstants,
    **options: int | None,  # num_warps, num_stages, maxnreg
) -> None:
    """Write the state of `q` over the keys, as `schedule` divides the work."""
    overlap = {"launch_pdl": True} if constants.overlap else {}
    attend_kernel[constants.num_programs,](
        Rows(q, *q.stride()),
        k,
        v,
        *(boxes or (None, None, None)),
        table,
        0 if table is None else table.stride(0),
        rules,
        0 if rules.tree is None else rules.tree.shape[1],
        sinks,
        Rows(out, *out.stride()),
        Rows(lse, *lse.stride(), 0),
        schedule,
        parts,
        constants if table is None else with_page_strides(constants, k[1:3] + v[1:3]),
        **options,
        **overlap,
    )
    if not constants.fused:
        merge_kernel[constants.num_kv_heads, constants.num_workers](
            Rows(out, *out.stride()),
            Rows(lse, *lse.stride(), 0),
            schedule,
            parts,
            constants,
            num_warps=4,
            **overlap,
        )


@cache
def with_page_strides(
    constants: AttendConstants, strides: tuple[int, int, int, int]
) -> AttendConstants:
    """The constants for a paged cache with these strides."""
    wide = constants.page_size * max(strides[1], strides[3]) >= 1 << 31
    return replace(constants, page_strides=strides, wide_pages=wide)


@triton.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_kernel(
    q,  # Rows [num_tokens, num_heads, head_dim_k]
    k,  # Pages [num_pages, page_size, num_kv_heads, head_dim_k]
    v,  # Pages [num_pages, page_size, num_kv_heads, head_dim_v]
    k_box,  # Boxes, or None for each
    k_rest_box,
    v_box,
    table_ptr,  # [num_seqs, max_pages] or None
    table_stride,
    rules,  # Rules
    tree_width,
    sinks_ptr,  # [num_heads] or None
    out_rows,  # Rows [num_tokens, num_heads, head_dim_v]
    lse_rows,  # Rows [num_tokens, num_heads, 1]
    schedule_ptr,  # as schedule.py lays it out
    parts,  # Parts
    C: tl.constexpr,  # AttendConstants
):
    if C.overlap:  # nothing is read before the kernel ahead has ended
        gdc_wait()
    program = tl.program_id(0)
    worker = program // C.num_kv_heads
    share, num_units, num_blocks, num_empty, orphans, num_rounds = read_header(schedule_ptr)
    block, record = read_worker(schedule_ptr, tl.minimum(worker, C.num_workers - 1))
    unit = worker * share
    stop = tl.where(worker < C.num_workers, tl.minimum(unit + share, num_units), unit)
    if not is_dealt(C):
        num_rounds = 0  # known to the compiler
    if num_rounds > 0:
        unit = 0
        stop = num_rounds
    while unit < stop:
        kv_head = program % C.num_kv_heads
        tile, tile_stop, part, num_parts, first_slot = 0, 0, 0, 1, 0
        if num_rounds > 0:
            place, kv_head = pair_of(unit, program, C)
            unit += 1
            if place < num_blocks:
                record = read_dealt(schedule_ptr, place, num_blocks, C)
                _, _, _, _, _, tile, num_tiles, _ = record
                tile_stop = tile + num_tiles
        else:
            _, _, _, q_len, _, first_tile, num_tiles, first_unit = record
            num_rows = q_len * C.group
            begin = unit - first_unit
            units = units_of(num_tiles, num_rows, C)
            if begin >= units:
                block += 1
                record = read_block(schedule_ptr, block, C)
            else:
                end = begin + 1 if C.fixed_parts else tl.minimum(units, stop - first_unit)
                unit = first_unit + end
                tile, tile_stop, part, num_parts, first_slot = part_of(
                    begin, end, worker, share, (num_rows, first_tile, num_tiles, first_unit), C
                )
        if tile < tile_stop:
            origin, first_row, q_start, q_len, seq_len, _, _, _ = record
            num_rows = q_len * C.group
            state = attend_pair(
                q, (first_row, q_start), (origin, q_len, seq_len, kv_head), tile, tile_stop,
                part == 0, k, v, k_box, k_rest_box, v_box, table_ptr, table_stride, rules,
                tree_width, sinks_ptr, C,
            )  # fmt: skip
            out, lse = finish_state(state)
            if num_parts == 1:
                rows = first_row + tl.arange(0, C.block_m)
                write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)
            else:
                left = num_rows - first_row
                leave_part(out, lse, part, first_slot, kv_head, left, parts, C)
                if C.fused:
                    merge_tree(
                        part, num_parts, first_slot, first_row, num_rows, q_start, kv_head,
                        parts, out_rows, lse_rows, C,
                    )  # fmt: skip

    if num_empty > 0:
        write_empty(
            program, worker, num_blocks, orphans, sinks_ptr, out_rows, lse_rows, schedule_ptr, C
        )


@triton.jit
def write_empty(
    program, worker, num_blocks, orphans, sinks_ptr, out_rows, lse_rows, schedule_ptr,
    C: tl.constexpr,
):  # fmt: skip
    """Write the blocks that see no keys: no worker's share leads there."""
    kv_head = program % C.num_kv_heads
    for block in range(worker, num_blocks, C.num_workers):
        _, first_row, q_start, q_len, _, _, num_tiles, _ = read_block(schedule_ptr, block, C)
        if num_tiles == 0:
            rows = first_row + tl.arange(0, C.block_m)
            num_rows = q_len * C.group
            out, lse = finish_state(empty_state(C.block_m, C.block_dv))
            if sinks_ptr is not None:
                heads = kv_head * C.group + rows % C.group
                owned = (rows < num_rows) & (q_start < orphans)
                lse = tl.load(sinks_ptr + heads, owned, other=float("-inf")).to(tl.float32)
            write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)


@triton.jit
def merge_kernel(out_rows, lse_rows, schedule_ptr, parts, C: tl.constexpr):
    """Merge the parts of all blocks that have several: what a launch of its own would cost."""
    if C.overlap:
        gdc_wait()
    kv_head = tl.program_id(0)
    share, _, num_blocks, _, _, num_rounds = read_header(schedule_ptr)
    for block in range(tl.program_id(1), num_blocks, C.num_workers):
        _, first_row, q_start, q_len, _, first_tile, num_tiles, first_unit = read_block(
            schedule_ptr, block, C
        )
        num_rows = q_len * C.group
        if num_tiles > 0:
            place = num_rows, first_tile, num_tiles, first_unit
            num_parts, first_slot = parts_of(share, place, C)
            if (num_parts > 1) & (num_rounds == 0):
                left = tl.minimum(num_rows - first_row, C.block_m)
                for row in range(0, left, C.merge_rows):
                    rows = row + tl.arange(0, C.merge_rows)
                    out, lse = merge_children(
                        0, 1, num_parts, first_slot, kv_head, rows, left, parts, C
                    )
                    rows += first_row
                    write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C)


def compile_cases(shared_memory: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on meta tensors: every configuration, and one of each kind with options."""
    plain, every_rule = Rules(0.1, None, None, None), Rules(0.1, 30.0, 100, None)

    def launch(
        config: AttendConfig,
        dims: tuple[int, int],
        dtype: torch.dtype,
        rules: Rules,
        sinks: bool = False,
        fused: bool = True,
    ) -> None:
        make = partial(torch.empty, device="meta")
        k, v = (make(64, 16, 8, dim, dtype=dtype) for dim in dims)
        pages = Pages(k, *k.stride()), Pages(v, *v.stride())
        paged = config.block_m <= 32
        constants = attend_constants(
            config,
            causal=True,
            group=4,
            num_kv_heads=8,
            page_size=16 if paged else 1,
            head_dim_k=dims[0],
            head_dim_v=dims[1],
            num_programs=132,
            fused=fused,
            overlap=shared_memory >= 227 * 1024,
        )
        attend(
            make(64, 32, dims[0], dtype=dtype),
            *pages,
            None if paged else boxes_of(*pages, 16, 64, constants),
            make(64, 16, dtype=torch.int32) if paged else None,
            rules,
            make(32) if sinks else None,
            make(64, 32, dims[1], dtype=dtype),
            make(64, 32),
            make(1024, dtype=torch.int32),
            Parts(make(1024), make(1024), make(1024, dtype=torch.int32)),
            constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
        )

    short = long = None
    for config, (rows, pairs, dims, itemsize) in every_attend_config().items():
        config = fit_shared_memory(  # noqa: PLW2901
            config, *dims, itemsize, per_program=shared_memory, per_sm=shared_memory
        )
        dtype = torch.bfloat16 if itemsize == 2 else torch.float32
        kind = "decode" if config.keys_first else "prefill"
        name = f"{kind} {dims[0]}/{dims[1]} {str(dtype)[6:]}, {rows:g} rows, {pairs} pairs"
        yield name, partial(launch, config, dims, dtype, plain)
        if dims == (128, 128) and config.keys_first:
            short = config
        elif dims == (128, 128) and dtype == torch.bfloat16:
            long = config
    for kind, config in (("decode", short), ("prefill", long)):
        rest = (config, (128, 128), torch.bfloat16, every_rule, True)
        yield f"{kind} with window, softcap and sinks", partial(launch, *rest)
        apart = partial(launch, config, (128, 128), torch.bfloat16, plain, fused=False)
        yield f"{kind} with a merge apart", apart
