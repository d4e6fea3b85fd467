"""Attention of any query length over dense, ragged or paged keys: one kernel from decode to prefill.

A worker walks its share of the schedule, a pair (block of query rows, kv head) at a time. A pair
that one worker holds whole is written directly; otherwise each worker leaves a part, and parts are
merged in a tree whose every node is done by the worker that arrives there last. Nobody waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import AttendConstants
from anabranch.kernels.triton.addressing import load_rows, locate
from anabranch.kernels.triton.masks import seen_by_all, visible
from anabranch.kernels.triton.merge_tree import Parts, leave_part, merge_tree
from anabranch.kernels.triton.online_softmax import (
    LOG2_E,
    empty_state,
    finish_state,
    sink_state,
    update_state,
)
from anabranch.kernels.triton.output import Output, write_rows
from anabranch.kernels.triton.schedule import HEADER, read_block, units_of


class Keys(NamedTuple):
    """Keys and values as the kernel takes them; contiguous ones have no table."""

    k: torch.Tensor  # [pages, page_size, num_kv_heads, head_dim_k]
    k_strides: tuple[int, ...]
    v: torch.Tensor  # [pages, page_size, num_kv_heads, head_dim_v]
    v_strides: tuple[int, ...]
    table: torch.Tensor | None  # int32 [num_seqs, max_pages]


class Rules(NamedTuple):
    """How logits come from scores, and who may look at what."""

    scale: float  # logits in base 2 are scores times scale
    softcap: float | None
    window: int | None
    tree: torch.Tensor | None  # uint8 [num_tokens, tree_width]


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: Keys,
    rules: Rules,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    schedule: torch.Tensor,
    parts: Parts,
    constants: AttendConstants,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write the state of `q` over `keys`, as `schedule` divides the work."""
    attend_kernel[constants.num_workers,](
        q,
        q.stride(),
        keys,
        0 if keys.table is None else keys.table.stride(0),
        rules,
        0 if rules.tree is None else rules.tree.shape[1],
        sinks,
        Output(out, out.stride(), lse, lse.stride()),
        schedule,
        parts,
        constants,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def capped(scores, scale, softcap):
    """Natural logits softcap * tanh(scores * scale / softcap); tanh(x) = 1 - 2 / (e^2x + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))


@triton.jit
def attend_tiles(
    state,
    q,  # [block_m, dk_main] and [block_m, dk_rest], or None for the second
    tokens,  # [block_m], counted in the sequence
    tree_rows,  # pointers [block_m] or None
    tile,
    stop,
    pair,  # origin, q_len, seq_len, kv_head
    keys,
    table_stride,
    rules,
    tree_width,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the tiles [tile, stop); without MASKED every token sees all of their keys."""
    origin, q_len, seq_len, kv_head = pair
    k_ptr = keys.k + kv_head.to(tl.int64) * keys.k_strides[2]
    v_ptr = keys.v + kv_head.to(tl.int64) * keys.v_strides[2]
    for index in tl.range(tile, stop):
        positions = index * C.block_n + tl.arange(0, C.block_n)
        inside = None
        if MASKED:
            inside = positions < seq_len
        page, row = locate(positions, inside, origin, keys.table, table_stride, C.page_size)
        offsets = page * keys.k_strides[0] + row.to(tl.int64) * keys.k_strides[1]
        k = load_rows(k_ptr, offsets, inside, keys.k_strides[3], 0, C.dk_main, C.head_dim_k)
        scores = tl.dot(q[0], tl.trans(k), input_precision="ieee")
        if C.dk_rest > 0:
            k = load_rows(
                k_ptr, offsets, inside, keys.k_strides[3], C.dk_main, C.dk_rest, C.head_dim_k
            )
            scores = tl.dot(q[1], tl.trans(k), scores, input_precision="ieee")
        scale = rules.scale
        if rules.softcap is not None:
            scores = capped(scores, rules.scale, rules.softcap)
            scale = LOG2_E
        if MASKED:
            seen = visible(
                tokens, positions, q_len, seq_len, rules.window, tree_rows, tree_width, C.causal
            )
            scores = tl.where(seen, scores, float("-inf"))
        offsets = page * keys.v_strides[0] + row.to(tl.int64) * keys.v_strides[1]
        v = load_rows(v_ptr, offsets, inside, keys.v_strides[3], 0, C.block_dv, C.head_dim_v)
        state = update_state(state, scores, scale, v)
    return state


@triton.jit
def attend_pair(
    q_ptr,
    q_strides,
    block,  # first_row, q_start
    pair,  # origin, q_len, seq_len, kv_head
    tile,
    stop,
    is_first,  # whether this is the first part of the pair, which also holds the sink
    keys,
    table_stride,
    rules,
    tree_width,
    sinks_ptr,
    C: tl.constexpr,
):
    """The state of one block of rows over the tiles [tile, stop) of one kv head."""
    first_row, q_start = block
    origin, q_len, seq_len, kv_head = pair
    rows = first_row + tl.arange(0, C.block_m)
    row_mask = rows < q_len * C.group
    tokens = rows // C.group
    heads = kv_head * C.group + rows % C.group
    offsets = (q_start + tokens).to(tl.int64) * q_strides[0] + heads * q_strides[1]
    q = load_rows(q_ptr, offsets, row_mask, q_strides[2], 0, C.dk_main, C.head_dim_k)
    q_rest = None
    if C.dk_rest > 0:
        q_rest = load_rows(q_ptr, offsets, row_mask, q_strides[2], C.dk_main, C.dk_rest, C.head_dim_k)
    tree_rows = None
    if rules.tree is not None:  # rows that are never written read their sequence's first
        tree_rows = rules.tree + (q_start + tl.where(row_mask, tokens, 0)).to(tl.int64) * tree_width
    state = empty_state(C.block_m, C.block_dv)
    if sinks_ptr is not None:
        logits = tl.load(sinks_ptr + heads, row_mask & is_first, other=float("-inf"))
        state = sink_state(logits.to(tl.float32), C.block_m, C.block_dv)

    full = (tile, tile)
    if C.block_m >= 64:  # a short block waits for memory and has time to mask every tile
        last_token = (tl.minimum(first_row + C.block_m, q_len * C.group) - 1) // C.group
        start, end = seen_by_all(
            first_row // C.group, last_token, q_len, seq_len, rules.window, rules.tree, C.causal
        )
        full_start = tl.minimum(tl.maximum(tl.cdiv(start, C.block_n), tile), stop)
        full = (full_start, tl.minimum(tl.maximum(end // C.block_n, full_start), stop))
        if rules.window is not None:
            state = attend_tiles(
                state, (q, q_rest), tokens, tree_rows, tile, full[0], pair,
                keys, table_stride, rules, tree_width, C, True,
            )  # fmt: skip
        state = attend_tiles(
            state, (q, q_rest), tokens, tree_rows, full[0], full[1], pair,
            keys, table_stride, rules, tree_width, C, False,
        )  # fmt: skip
    return attend_tiles(
        state, (q, q_rest), tokens, tree_rows, full[1], stop, pair,
        keys, table_stride, rules, tree_width, C, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_kernel(
    q_ptr,  # [num_tokens, num_heads, head_dim_k]
    q_strides,
    keys,  # Keys
    table_stride,
    rules,  # Rules
    tree_width,
    sinks_ptr,  # [num_heads] or None
    output,  # Output
    schedule_ptr,  # as schedule.py lays it out
    parts,  # Parts
    C: tl.constexpr,  # AttendConstants
):
    worker = tl.program_id(0)
    share = tl.load(schedule_ptr)
    num_units = tl.load(schedule_ptr + 1)
    num_blocks = tl.load(schedule_ptr + 2)
    block = tl.load(schedule_ptr + HEADER + worker)
    unit = worker * share
    stop = tl.minimum(unit + share, num_units)
    while unit < stop:
        origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit = read_block(
            schedule_ptr, block, C
        )
        num_rows = q_len * C.group
        units, unit_tiles = units_of(num_tiles, num_rows, C)
        if unit >= first_unit + units * C.num_kv_heads:
            block += 1
        else:
            kv_head = (unit - first_unit) // units
            first_unit += kv_head * units  # of this pair
            begin = unit - first_unit
            taken = tl.minimum(units - begin, stop - unit)
            if C.fixed_parts:
                taken = taken * 0 + 1
            unit += taken
            tile = first_tile + begin * unit_tiles
            tile_stop = tl.minimum(tile + taken * unit_tiles, first_tile + num_tiles)
            state = attend_pair(
                q_ptr, q_strides, (first_row, q_start), (origin, q_len, seq_len, kv_head),
                tile, tile_stop, begin == 0, keys, table_stride, rules, tree_width, sinks_ptr, C,
            )  # fmt: skip
            out, lse = finish_state(state)
            if taken == units:
                rows = first_row + tl.arange(0, C.block_m)
                write_rows(out, lse, rows, num_rows, q_start, kv_head, output, C)
            else:
                if C.fixed_parts:
                    part, num_parts, first_slot = begin, units, first_unit
                else:
                    first_slot = first_unit // share
                    part = worker - first_slot
                    num_parts = (first_unit + units - 1) // share - first_slot + 1
                leave_part(out, lse, part, first_slot, parts, C)
                merge_tree(
                    part, num_parts, first_slot, first_row, num_rows, q_start, kv_head,
                    parts, output, C,
                )  # fmt: skip

    orphans = tl.load(schedule_ptr + 3)
    for block in range(worker, num_blocks, C.num_workers):
        _, first_row, q_start, q_len, _, _, num_tiles, _ = read_block(schedule_ptr, block, C)
        if num_tiles == 0:  # no keys: no worker's share leads here
            rows = first_row + tl.arange(0, C.block_m)
            num_rows = q_len * C.group
            out, lse = finish_state(empty_state(C.block_m, C.block_dv))
            for kv_head in range(C.num_kv_heads):
                if sinks_ptr is not None:
                    heads = kv_head * C.group + rows % C.group
                    owned = (rows < num_rows) & (q_start < orphans)
                    lse = tl.load(sinks_ptr + heads, owned, other=float("-inf")).to(tl.float32)
                write_rows(out, lse, rows, num_rows, q_start, kv_head, output, C)
