"""Attention of any query length over dense, ragged or paged keys: one kernel for all of them.

A worker walks its share of the schedule, a pair (block of query rows, kv head) at a time. A pair
that one worker holds whole is written directly; otherwise each worker leaves a part, and parts are
merged in a tree whose every node is done by the worker that arrives there last. Nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.kernels.config import (
    AttendConfig,
    AttendConstants,
    attend_constants,
    select_attend,
)
from anabranch.kernels.triton.addressing import (
    Pages,
    Rows,
    dim_ptrs,
    key_offsets,
    load_pages,
    load_rows,
)
from anabranch.kernels.triton.masks import seen_by_all, visible
from anabranch.kernels.triton.merge_tree import Parts, leave_part, merge_tree
from anabranch.kernels.triton.online_softmax import (
    LOG2_E,
    empty_state,
    finish_state,
    sink_state,
    update_state,
)
from anabranch.kernels.triton.output import write_rows
from anabranch.kernels.triton.schedule import (
    part_of,
    read_block,
    read_header,
    read_worker,
    units_of,
)


class Rules(NamedTuple):
    """How logits come from scores, and who may look at what."""

    scale: float  # logits in base 2 are scores times scale
    softcap: float | None
    window: int | None
    tree: torch.Tensor | None  # uint8 [num_tokens, tree_width]


class Boxes(NamedTuple):
    """Contiguous keys as the tensor memory accelerator takes them: 2D, a row for each key."""

    k: TensorDescriptor  # boxes [block_n, dk_main] of [rows, heads and dims]
    k_rest: TensorDescriptor  # boxes [block_n, dk_rest]; those of k again without a rest
    v: TensorDescriptor  # boxes [block_n, block_dv]


def boxes_of(
    k: Pages, v: Pages, rows: int, origins: int, constants: AttendConstants
) -> Boxes | None:
    """Descriptors of contiguous keys, or None where the accelerator cannot take them.

    `origins` sequences (or, packed, keys) begin `rows` rows apart.
    """
    c = constants
    exact = c.head_dim_k == c.dk_main + c.dk_rest and c.head_dim_v == c.block_dv
    if not exact or c.block_m < 64 or k.ptr.element_size() != 2:
        return None
    for pages in (k, v):
        aligned = pages.ptr.data_ptr() % 16 == 0 and pages.key % 8 == 0 and pages.head % 8 == 0
        if not aligned or pages.dim != 1 or pages.page != pages.key * rows:
            return None
    def box(pages: Pages, dim: int, width: int) -> TensorDescriptor:
        shape = [origins * rows, (c.num_kv_heads - 1) * pages.head + dim]
        return TensorDescriptor(pages.ptr, shape, [pages.key, 1], [c.block_n, width])

    return Boxes(
        box(k, c.head_dim_k, c.dk_main),
        box(k, c.head_dim_k, c.dk_rest or c.dk_main),
        box(v, c.head_dim_v, c.block_dv),
    )


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
    attend_kernel[constants.num_kv_heads, constants.num_workers](
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
    )


@cache
def with_page_strides(
    constants: AttendConstants, strides: tuple[int, int, int, int]
) -> AttendConstants:
    """The constants for a paged cache with these strides."""
    return replace(constants, page_strides=strides)


@triton.jit
def capped(scores, scale, softcap):
    """Natural logits softcap * tanh(scores * scale / softcap); tanh(x) = 1 - 2 / (e^2x + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))


@triton.jit
def score(q, k, scores, KEYS_FIRST: tl.constexpr):
    """scores + q k^T [ROWS, KEYS], or its transpose with KEYS_FIRST."""
    if KEYS_FIRST:
        return tl.dot(k, tl.trans(q), scores, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), scores, input_precision="ieee")


@triton.jit
def attend_tiles(
    state,
    q,  # [block_m, dk_main] and [block_m, dk_rest]
    tokens,  # [block_m], counted in the sequence
    tree_rows,  # pointers [block_m] or None
    tile,
    stop,
    pair,  # origin, q_len, seq_len, kv_head
    k,
    v,
    k_box,
    k_rest_box,
    v_box,
    table_ptr,
    table_stride,
    rules,
    tree_width,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    BOXED: tl.constexpr,
):
    """Attend to the tiles [tile, stop); without MASKED every token sees all of their keys.

    BOXED tiles lie wholly inside the sequence, and the tensor memory accelerator copies them.
    """
    origin, q_len, seq_len, kv_head = pair
    k_ptr = k.ptr + kv_head.to(tl.int64) * k.head
    k_ptrs = dim_ptrs(k_ptr, k.dim, 0, C.dk_main)
    rest_ptrs = k_ptrs  # unused without a rest
    if C.dk_rest > 0:
        rest_ptrs = dim_ptrs(k_ptr, k.dim, C.dk_main, C.dk_rest)
    v_ptrs = dim_ptrs(v.ptr + kv_head.to(tl.int64) * v.head, v.dim, 0, C.block_dv)
    if C.page_strides is not None:
        k_page, k_key = C.page_strides[0], C.page_strides[1]
        v_page, v_key = C.page_strides[2], C.page_strides[3]
    else:
        k_page, k_key, v_page, v_key = k.page, k.key, v.page, v.key
    box_row = origin * (k.page // k.key)
    # Keys behind the last one read it again, masked: a clamp costs less than a masked copy.
    keys = tile * C.block_n + tl.arange(0, C.block_n)
    pages = load_pages(tl.minimum(keys, seq_len - 1), origin, table_ptr, table_stride, C.page_size)
    for index in tl.range(tile, stop):
        keys = index * C.block_n + tl.arange(0, C.block_n)
        if BOXED:
            tile_k = k_box.load([box_row + index * C.block_n, kv_head * k.head])
        else:
            safe_keys = tl.minimum(keys, seq_len - 1)
            offsets = key_offsets(safe_keys, pages, k_page, k_key, table_ptr, C.page_size)
            tile_k = load_rows(k_ptrs, offsets, 0, C.dk_main, C.head_dim_k)
        scores = score(q[0], tile_k, None, C.keys_first)
        if C.dk_rest > 0:
            if BOXED:
                column = kv_head * k.head + C.dk_main
                tile_k = k_rest_box.load([box_row + index * C.block_n, column])
            else:
                tile_k = load_rows(rest_ptrs, offsets, C.dk_main, C.dk_rest, C.head_dim_k)
            scores = score(q[1], tile_k, scores, C.keys_first)
        scale = rules.scale
        if rules.softcap is not None:
            scores = capped(scores, rules.scale, rules.softcap)
            scale = LOG2_E
        if MASKED:
            if C.keys_first:
                key_side, token_side, tree_side = keys[:, None], tokens[None, :], tree_rows
                if tree_rows is not None:
                    tree_side = tree_rows[None, :]
            else:
                key_side, token_side, tree_side = keys[None, :], tokens[:, None], tree_rows
                if tree_rows is not None:
                    tree_side = tree_rows[:, None]
            seen = visible(
                token_side, key_side, q_len, seq_len, rules.window, tree_side, tree_width, C.causal
            )
            scores = tl.where(seen, scores, float("-inf"))
        if BOXED:
            tile_v = v_box.load([box_row + index * C.block_n, kv_head * v.head])
        else:
            offsets = key_offsets(safe_keys, pages, v_page, v_key, table_ptr, C.page_size)
            tile_v = load_rows(v_ptrs, offsets, 0, C.block_dv, C.head_dim_v)
            # The next tile's pages are on their way while this tile is attended to.
            next_keys = tl.minimum(keys + C.block_n, seq_len - 1)
            pages = load_pages(next_keys, origin, table_ptr, table_stride, C.page_size)
        state = update_state(state, scores, scale, tile_v, C.keys_first)
    return state


@triton.jit
def attend_pair(
    q,  # Rows
    block,  # first_row, q_start
    pair,  # origin, q_len, seq_len, kv_head
    tile,
    stop,
    is_first,  # whether this is the first part of the pair, which also holds the sink
    k,
    v,
    k_box,
    k_rest_box,
    v_box,
    table_ptr,
    table_stride,
    rules,
    tree_width,
    sinks_ptr,
    C: tl.constexpr,
):
    """The state of one block of rows over the tiles [tile, stop) of one kv head."""
    first_row, q_start = block
    _, q_len, seq_len, kv_head = pair
    rows = first_row + tl.arange(0, C.block_m)
    row_mask = rows < q_len * C.group
    tokens = rows // C.group
    heads = kv_head * C.group + rows % C.group
    offsets = (q_start + tokens).to(tl.int64) * q.token + heads * q.head
    offsets = tl.where(row_mask, offsets, 0)  # rows of nobody read a row and are never written
    q_main = load_rows(dim_ptrs(q.ptr, q.dim, 0, C.dk_main), offsets, 0, C.dk_main, C.head_dim_k)
    q_rest = q_main  # unused without a rest
    if C.dk_rest > 0:
        ptrs = dim_ptrs(q.ptr, q.dim, C.dk_main, C.dk_rest)
        q_rest = load_rows(ptrs, offsets, C.dk_main, C.dk_rest, C.head_dim_k)
    tree_rows = None
    if rules.tree is not None:  # rows that are never written read their sequence's first
        tree_rows = rules.tree + (q_start + tl.where(row_mask, tokens, 0)).to(tl.int64) * tree_width
    peak, total, acc = empty_state(C.block_m, C.block_dv)
    if sinks_ptr is not None:
        logits = tl.load(sinks_ptr + heads, row_mask & is_first, other=float("-inf"))
        peak, total = sink_state(logits.to(tl.float32))
    if C.keys_first:
        first_key = tl.arange(0, C.block_n)[:, None] == 0
        total = tl.where(first_key, total[None, :], 0.0)
        acc = tl.trans(acc)
    state = (peak, total, acc)

    if C.block_m >= 64:  # a short block waits for memory and has time to mask every tile
        last_token = (tl.minimum(first_row + C.block_m, q_len * C.group) - 1) // C.group
        start, end = seen_by_all(
            first_row // C.group, last_token, q_len, seq_len, rules.window, rules.tree, C.causal
        )
        if rules.window is not None:
            full_start = tl.minimum(tl.maximum(tl.cdiv(start, C.block_n), tile), stop)
            if tile < full_start:
                state = attend_tiles(
                    state, (q_main, q_rest), tokens, tree_rows, tile, full_start, pair, k, v, k_box,
                    k_rest_box, v_box, table_ptr, table_stride, rules, tree_width, C, True, False,
                )  # fmt: skip
            tile = full_start
        full_stop = tl.minimum(tl.maximum(end // C.block_n, tile), stop)
        if tile < full_stop:
            state = attend_tiles(
                state, (q_main, q_rest), tokens, tree_rows, tile, full_stop, pair, k, v, k_box,
                k_rest_box, v_box, table_ptr, table_stride, rules, tree_width, C, False,
                k_box is not None,
            )  # fmt: skip
        tile = full_stop
    if tile < stop:
        state = attend_tiles(
            state, (q_main, q_rest), tokens, tree_rows, tile, stop, pair, k, v, k_box,
            k_rest_box, v_box, table_ptr, table_stride, rules, tree_width, C, True, False,
        )  # fmt: skip
    peak, total, acc = state
    if C.keys_first:
        total = tl.sum(total, 0)
        acc = tl.trans(acc)
    return peak, total, acc


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
    kv_head = tl.program_id(0)
    worker = tl.program_id(1)
    share, num_units, num_blocks, num_empty, orphans = read_header(schedule_ptr)
    block, record = read_worker(schedule_ptr, worker)
    unit = worker * share
    stop = tl.minimum(unit + share, num_units)
    while unit < stop:
        origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles, first_unit = record
        num_rows = q_len * C.group
        units = units_of(num_tiles, num_rows, C)
        begin = unit - first_unit
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
                    merge_tree(
                        part, num_parts, first_slot, first_row, num_rows, q_start, kv_head,
                        parts, out_rows, lse_rows, C,
                    )  # fmt: skip

    if num_empty > 0:  # blocks that see no keys: no worker's share leads there
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


def every_config() -> dict[AttendConfig, tuple[float, int, tuple[int, int], torch.dtype]]:
    """Each configuration, and the widest call that selects it: rows, pairs, head dims, dtype."""
    calls = product(
        (4.0, 8.0, 32.0, 64.0, 1024.0, 32768.0),
        (8, 64, 1024),
        ((64, 64), (128, 128), (192, 128), (256, 256)),
        (torch.bfloat16, torch.float32),
    )
    configs = {}
    for rows, pairs, dims, dtype in calls:
        config = select_attend(
            rows_per_seq=rows,
            num_pairs=pairs,
            head_dim_k=dims[0],
            head_dim_v=dims[1],
            itemsize=dtype.itemsize,
        )
        configs[config] = (rows, pairs, dims, dtype)
    return configs


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on meta tensors: every configuration, and the options that change the code."""
    plain, every_rule = Rules(0.1, None, None, None), Rules(0.1, 30.0, 100, None)

    def launch(
        config: AttendConfig,
        dims: tuple[int, int],
        dtype: torch.dtype,
        rules: Rules,
        sinks: bool = False,
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
            num_workers=16,
            fixed_parts=False,
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
    for config, (rows, pairs, dims, dtype) in every_config().items():
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
