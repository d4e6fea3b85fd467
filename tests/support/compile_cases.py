"""Launches of every Triton kernel on meta tensors, compiled for GPUs that are not here.

A case is a name and a call of a launcher, for a GPU with so much shared memory. As a program it
answers each line of its input, a module, a target, names of cases (none: all) and of those to leave
out, with a line of what their kernels need:

    echo '["anabranch.kernels.triton.merge", "sm_90", [], []]' |
        python tests/support/compile_cases.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from traceback import format_exc
from unittest import mock

import torch
from compiled_launch import TARGETS, compile_launch, record, resources
from configurations import every_attend_config
from hot_loop import (
    loops_join_no_halves,
    loops_overlap_products,
    loops_stay_in_registers,
    products_follow_each_other,
    serialised,
    tiles_stay_in_registers,
    waits_after_exponentials,
)
from layer_cases import LAYER_CASES, Case
from lengths import call_of_lengths
from triton import knobs

from anabranch.kernels.config import AttendConfig, fit_shared_memory, select_attend
from anabranch.kernels.gluon.kernel import OrderedWork
from anabranch.kernels.gluon.latent_config import LatentTiles, latent_constants
from anabranch.kernels.gluon.latent_kernel import attend_latent
from anabranch.kernels.gluon.launch import attend as gluon_attend
from anabranch.kernels.hopper_config import Packing, hopper_constants, select_packing, select_tiles
from anabranch.kernels.layers import hopper_experts
from anabranch.kernels.layers.expert_config import (
    ExpertConfig,
    every_expert_config,
    fit_experts,
    select_expert_tiles,
    select_experts,
)
from anabranch.kernels.layers.expert_order import order_experts
from anabranch.kernels.layers.expert_product import gate_experts, project_experts
from anabranch.kernels.layers.expert_sum import sum_experts
from anabranch.kernels.layers.hopper_code_config import (
    NARROW,
    SQUARE,
    TALL,
    WIDE,
    CodeTiles,
    code_tile_constants,
)
from anabranch.kernels.layers.hopper_codes import hopper_codes
from anabranch.kernels.layers.quantised_config import CodeConstants, RowsConfig, every_rows_config
from anabranch.kernels.layers.quantised_product import CodeArguments
from anabranch.kernels.layers.quantised_rows import quantised_rows
from anabranch.kernels.list_config import select_lists
from anabranch.kernels.load.arguments import Rows, box_keys
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import in_words
from anabranch.kernels.parts.merge_items import merge_items
from anabranch.kernels.parts.merge_parts import merge_parts
from anabranch.kernels.parts.slots import Parts, StateRows
from anabranch.kernels.programs import (
    AttendProgram,
    HeadShape,
    PartKinds,
    StoreTypes,
    attend_program,
)
from anabranch.kernels.schedule.order import order, order_size
from anabranch.kernels.schedule.schedule import schedule, schedule_size
from anabranch.kernels.triton import expand_pages
from anabranch.kernels.triton.append_kv import append_kv
from anabranch.kernels.triton.attend import attend_blocks
from anabranch.kernels.triton.attend_lists import attend_lists
from anabranch.kernels.triton.choose_pages import choose_pages, renew_bounds
from anabranch.kernels.triton.draft_tree import make_draft_tree
from anabranch.kernels.triton.gumbel_argmax import gumbel_argmax
from anabranch.kernels.triton.list_pages import list_pages
from anabranch.kernels.triton.mask_tokens import mask_tokens
from anabranch.kernels.triton.merge import merge
from anabranch.kernels.triton.move_rows import WORDS, move_rows
from anabranch.kernels.triton.share_pages import share_pages
from anabranch.kernels.versions import CODE_ROWS
from anabranch.keys import PLAIN, DenseKV, LatentKV, PagedKV, SelectedKV, store_of
from anabranch.keys.formats import FORMATS, empty_store, encoded_store
from anabranch.rules import Rules
from anabranch.state import AttentionState

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
meta = partial(torch.empty, device="meta")
ints = partial(torch.empty, device="meta", dtype=torch.int32)
longs = partial(torch.empty, device="meta", dtype=torch.int64)
VOCABULARIES = ((1, 49152), (64, 128256), (8, 50257))
SCRATCH = Parts(meta(1024), meta(1024), ints(1024))


def program_of(
    config: AttendConfig,
    dims: tuple[int, int],
    types: StoreTypes | int,  # or the size of pages of plain keys
    parts: PartKinds,
    num_programs: int,
    heads: tuple[int, int] = (4, 8),
    **given: bool,
) -> AttendProgram:
    types = StoreTypes(types, PLAIN, PLAIN) if isinstance(types, int) else types
    return attend_program(
        config, HeadShape(*heads, *dims), types, parts,
        causal=True, num_programs=num_programs, **given,
    )  # fmt: skip


def launch_attend(
    config: AttendConfig,
    dims: tuple[int, int],
    dtype: torch.dtype,
    rules: Rules,
    shared_memory: int,
    fused: bool = True,
    weighted: bool = False,
    num_priors: int = 0,
    leaves_empty: bool = False,
    folds_parts: bool = False,
) -> None:
    """Short blocks over pages, long ones over contiguous keys."""
    k, v = (meta(64, 16, 8, dim, dtype=dtype) for dim in dims)
    paged = config.block_m <= 32
    keys = PagedKV(k, v, ints(64, 16), ints(64)) if paged else DenseKV(k, v)
    overlap = shared_memory >= 227 * 1024
    parts = PartKinds(folded=folds_parts, fused=fused)
    program = program_of(
        config, dims, keys.page_size, parts, 132, overlap=overlap, leaves_empty=leaves_empty
    )
    state = AttentionState(meta(64, 32, dims[1], dtype=dtype), meta(64, 32))
    q = meta(64, 32, dims[0], dtype=dtype)
    view = keys.view()._replace(log_weights=meta(64, 16) if weighted else None)
    prior = None
    if num_priors:
        prior = AttentionState(*(meta(num_priors, *x.shape, dtype=x.dtype) for x in state))
    attend_blocks(q, view, rules, state, ints(1024), SCRATCH, program, prior)


def launch_stored(
    rows: int,
    format_name: str,
    shared_memory: int,
    *,
    latent: bool,
    one_tile: bool = True,
    head_dim: int = 128,
    page_size: int = 16,
    packed: bool = False,
    num_pairs: int = 512,
    boxed: bool = False,
    paired: bool = True,
) -> None:
    """Decode over latent rows or pages of 8 heads in a format, in the tiles selected for it.

    `packed` is True for NVIDIA's GPUs, as in a plan, `boxed` for those that copy boxes, and
    `paired` where codes are loaded by pairs of keys if they can be: they are but on GPUs with
    tensor memory, which take 16 rows then.
    """
    dims, num_kv_heads = ((576, 512), 1) if latent else ((head_dim, head_dim), 8)
    stores = [
        empty_store(format_name, (64, page_size, num_kv_heads, dim), BRAIN, torch.device("meta"))
        for dim in dims
    ]
    (k, k_scales), (v, v_scales) = stores
    if latent:
        scales = None if k_scales is None else k_scales[:, :, 0]
        keys = LatentKV(k[:, :, 0], ints(64, 16), ints(64), dims[1], scales, BRAIN)
    else:
        keys = PagedKV(k, v, ints(64, 16), ints(64), k_scales, v_scales, BRAIN)
    view = keys.view()
    code_pairs = paired and in_pairs(view, 2)
    config = select_attend(
        rows_per_seq=rows, num_pairs=num_pairs, head_dim_k=dims[0], head_dim_v=dims[1], itemsize=2,
        latent=latent, quantised=format_name != "plain", code_pairs=code_pairs,
        int8_codes=view.k.format.name == "int8", code_rows=CODE_ROWS if paired else 16,
        box_keys=box_keys(view) if boxed else 0,
    )  # fmt: skip
    shape = (dims[0], 0 if latent and one_tile else dims[1], 2)
    halves = in_words(view.k) and not latent
    room = {"per_program": shared_memory, "per_sm": shared_memory, "code_words": halves}
    config = fit_shared_memory(config, *shape, **room, code_pairs=code_pairs)
    recent = shared_memory >= 227 * 1024
    formats = view.k.format, view.v.format
    types = StoreTypes(page_size, *formats, view.values_in_keys, native_fp8=recent, packed=packed)
    parts, heads = PartKinds(fused=config.fused_merge), (rows, num_kv_heads)
    program = program_of(config, dims, types, parts, 132, heads, overlap=recent)
    num_heads = rows * num_kv_heads
    state = AttentionState(meta(64, num_heads, dims[1], dtype=BRAIN), meta(64, num_heads))
    q = meta(64, num_heads, dims[0], dtype=BRAIN)
    rules = Rules(causal=True, scale=0.1)
    attend_blocks(q, view, rules, state, ints(1024), SCRATCH, program)


def stored_cases(shared_memory: int) -> Iterator[Case]:
    """Latent rows by how many heads read them, and every format."""
    for rows in (16, 32, 64):
        call = partial(launch_stored, rows, "plain", shared_memory, latent=True)
        yield f"decode latent, {rows} rows", call
        if rows == 64:
            yield f"decode latent, {rows} rows, values copied", partial(call, one_tile=False)
    latent = partial(launch_stored, 128, "plain", shared_memory, latent=True)
    yield "decode latent, one sequence", partial(latent, num_pairs=1)
    copied = partial(latent, num_pairs=1, one_tile=False)
    yield "decode latent, one sequence, values copied", copied
    if shared_memory >= 227 * 1024:
        boxes = partial(latent, page_size=64, boxed=True)
        yield "decode latent, boxes", boxes
        yield "decode latent, boxes, one sequence", partial(boxes, num_pairs=1)
        yield "decode latent, boxes, values copied", partial(boxes, one_tile=False)
    yield "decode latent q8_0", partial(launch_stored, 16, "q8_0", shared_memory, latent=True)
    stored = partial(launch_stored, latent=False, packed=shared_memory > 64 * 1024)
    for name in ("fp8_tensor", "fp8", "int8", "q8_0"):
        yield f"decode {name}", partial(stored, 4, name, shared_memory)
    for name in ("fp8", "int8"):
        alone = partial(stored, 4, name, shared_memory, paired=False)
        yield f"decode {name}, keys one by one", alone
    yield "decode q8_0, 32 rows", partial(stored, 32, "q8_0", shared_memory)
    few = partial(stored, 4, "int8", shared_memory, num_pairs=8)
    yield "decode one sequence of int8", few
    yield "decode 16 rows of int8", partial(stored, 16, "int8", shared_memory)
    yield "decode pages of 64, int8", partial(stored, 4, "int8", shared_memory, page_size=64)
    yield "decode 256 dims of int8", partial(stored, 4, "int8", shared_memory, head_dim=256)
    yield "prefill int8", partial(stored, 128, "int8", shared_memory)


def attend_cases(shared_memory: int) -> Iterator[Case]:
    """Every configuration, and one of each kind with options."""
    plain = Rules(causal=True, scale=0.1)
    every_rule = Rules(causal=True, window=100, softcap=30.0, scale=0.1, sinks=meta(32))
    short = long = None
    for config, (rows, pairs, dims, itemsize) in every_attend_config().items():
        config = fit_shared_memory(  # noqa: PLW2901
            config, *dims, itemsize, per_program=shared_memory, per_sm=shared_memory
        )
        dtype = BRAIN if itemsize == 2 else SINGLE
        kind = "decode" if config.keys_first else "prefill"
        name = f"{kind} {dims[0]}/{dims[1]} {str(dtype)[6:]}, {rows:g} rows, {pairs} pairs"
        yield name, partial(launch_attend, config, dims, dtype, plain, shared_memory)
        if dims == (128, 128) and config.keys_first:
            short = config
        elif dims == (128, 128) and dtype == BRAIN:
            long = config
    for kind, config in (("decode", short), ("prefill", long)):
        given = (config, (128, 128), BRAIN)
        if kind == "prefill":  # decoding has them with prior states
            call = partial(launch_attend, *given, every_rule, shared_memory)
            yield f"{kind} with window, softcap and sinks", call
        option = {"weighted": True} if kind == "decode" else {"leaves_empty": True}
        apart = partial(launch_attend, *given, plain, shared_memory, fused=False, **option)
        yield f"{kind} with a merge apart and {next(iter(option))}", apart
    resumed = partial(launch_attend, short, (128, 128), BRAIN, every_rule, shared_memory)
    yield "decode with every rule and prior states", partial(resumed, num_priors=3)
    for rows, rules in ((4, plain), (16, every_rule), (32, plain), (32768, plain)):
        config = select_attend(
            rows_per_seq=rows, num_pairs=256, head_dim_k=128, head_dim_v=128, itemsize=2
        )
        room = {"per_program": shared_memory, "per_sm": shared_memory, "folds_parts": True}
        config = fit_shared_memory(config, 128, 128, 2, **room)
        folded = partial(launch_attend, config, (128, 128), BRAIN, rules, shared_memory)
        kind = "decode" if rows <= 16 else "prefill"
        yield f"{kind} with fixed parts, {rows} rows", partial(folded, folds_parts=True)
    yield from stored_cases(shared_memory)


def gluon_cases(_: int) -> Iterator[Case]:
    """Every head dim, contiguous and paged, whole blocks and parts, every rule."""
    plain = Rules(causal=True, scale=0.1)
    every_rule = Rules(causal=True, window=100, softcap=30.0, scale=0.1, sinks=meta(32))

    def launch(
        dims: tuple[int, int],
        group: int,
        page_size: int,
        splits: bool,
        rules: Rules,
        *,
        few_blocks: bool = False,
        tokens: int = 1000,
        q_columns: int | None = None,
    ) -> None:
        num_heads = 8 * group if group % 2 else 32
        tiles = select_tiles(*dims, few_blocks=few_blocks, splits=splits)
        constants = hopper_constants(
            tiles if q_columns is None else replace(tiles, q_columns=q_columns),
            causal=True,
            packing=select_packing(group, tokens),
            num_heads=num_heads,
            num_kv_heads=num_heads // group,
            page_size=page_size,
            head_dim_k=dims[0],
            head_dim_v=dims[1],
            num_programs=132,
            splits=splits,
            overlap=True,
        )
        k, v = (meta(64, 16, num_heads // group, dim, dtype=BRAIN) for dim in dims)
        keys = PagedKV(k, v, ints(64, 16), ints(64)) if page_size else DenseKV(k, v)
        q = meta(64, num_heads, dims[0], dtype=BRAIN)
        work = OrderedWork(ints(1024), ints(1))
        gluon_attend(q, keys.view(), rules, rows_of(num_heads, dims[1]), work, constants)

    yield "128, whole blocks", partial(launch, (128, 128), 4, 0, False, plain)
    yield "128, pages and parts", partial(launch, (128, 128), 4, 16, True, plain)
    few_blocks = partial(launch, (128, 128), 4, 16, True, plain, few_blocks=True)
    yield "128, few blocks", few_blocks
    yield "128, padded packs", partial(launch, (128, 128), 7, 16, True, plain, tokens=5)
    yield "192/128", partial(launch, (192, 128), 1, 0, False, plain)
    yield "256", partial(launch, (256, 256), 4, 16, False, plain)
    yield "64", partial(launch, (64, 64), 4, 0, True, plain)
    yield "96", partial(launch, (96, 96), 1, 0, True, plain)
    yield "every rule", partial(launch, (128, 128), 4, 16, True, every_rule)
    yield "256, every rule", partial(launch, (256, 256), 4, 16, False, every_rule)
    for dim, columns in ((128, 64), (128, 128), (256, 128)):  # choices of benchmarks/in_turns.py
        if columns != select_tiles(dim, dim).q_columns:
            chosen = partial(launch, (dim, dim), 4, 16, False, plain, q_columns=columns)
            yield f"{dim}, {columns} query columns in registers", chosen


def rows_of(num_heads: int, dim: int) -> StateRows:
    out, lse = meta(64, num_heads, dim, dtype=BRAIN), meta(64, num_heads)
    return StateRows(Rows(out, *out.stride()), Rows(lse, *lse.stride(), 0), SCRATCH)


def latent_cases(_: int) -> Iterator[Case]:
    """Teams of heads and blocks of tokens and heads, pages of each kind, fixed parts, rules."""
    plain = Rules(causal=True, scale=0.1)
    every_rule = Rules(causal=True, window=100, softcap=30.0, scale=0.1)

    def launch(num_heads: int, page_size: int, fixed_parts: bool, rules: Rules) -> None:
        constants = latent_constants(
            LatentTiles(), causal=True, num_heads=num_heads, page_size=page_size,
            num_programs=132, fixed_parts=fixed_parts, overlap=True,
        )  # fmt: skip
        keys = LatentKV(meta(64, page_size, 576, dtype=BRAIN), ints(8, 16), ints(8), 512)
        state = AttentionState(meta(8, num_heads, 512, dtype=BRAIN), meta(8, num_heads))
        q = meta(8, num_heads, 576, dtype=BRAIN)
        attend_latent(q, keys.view(), rules, state, ints(1024), SCRATCH, constants)

    yield "128 heads, pages of 64", partial(launch, 128, 64, False, plain)
    yield "16 heads, pages of 16, fixed parts", partial(launch, 16, 16, True, plain)
    yield "every rule", partial(launch, 16, 16, False, every_rule)


def merge_items_cases(shared_memory: int) -> Iterator[Case]:
    """Heads of one power of two, and of two."""

    def launch(dim: int, packing: Packing) -> None:
        constants = hopper_constants(
            select_tiles(dim, dim), causal=True, packing=packing, num_heads=28, num_kv_heads=4,
            page_size=16, head_dim_k=dim, head_dim_v=dim, num_programs=132,
            overlap=shared_memory >= 227 * 1024,
        )  # fmt: skip
        merge_items(rows_of(28, dim), ints(1024), 33, constants)

    yield "128", partial(launch, 128, Packing(1, 1))
    yield "96, padded packs", partial(launch, 96, Packing(8, 7))


def order_cases(_: int) -> Iterator[Case]:
    """Each kind of lengths, with a window, with fixed parts, and never cut."""

    def launch(packed: bool, window: int | None, fixed_parts: bool, splits: bool) -> None:
        constants = hopper_constants(
            select_tiles(128, 128),
            causal=True,
            packing=Packing(4, 4),
            num_heads=32,
            num_kv_heads=8,
            page_size=0,
            head_dim_k=128,
            head_dim_v=128,
            num_programs=132,
            fixed_parts=fixed_parts,
            splits=splits,
        )
        lengths = ints(9)
        given = (None, lengths) if packed else (lengths[1:], None)
        buffer = ints(order_size(8, 64, 33, constants))
        call = call_of_lengths(64, lengths, *given, 4096, window)
        order(buffer, ints(64), call, 33, constants)

    yield "lengths", partial(launch, False, None, False, True)
    yield "packed, window", partial(launch, True, 100, False, False)
    yield "fixed parts", partial(launch, False, None, True, True)


def merge_parts_cases(shared_memory: int) -> Iterator[Case]:
    """Parts of short blocks and of long ones, of latent keys, and fixed parts."""

    def launch(rows: int, dim: int, folds_parts: bool = False, **merging: int) -> None:
        config = AttendConfig(rows, 64, 4, 3, 2, **merging)
        parts, overlap = PartKinds(folded=folds_parts, fused=False), shared_memory >= 227 * 1024
        constants = program_of(config, (dim, dim), 1, parts, 132, overlap=overlap).constants
        state = AttentionState(meta(64, 32, dim, dtype=BRAIN), meta(64, 32))
        merge_parts(state, ints(1024), SCRATCH, constants)

    yield "short", partial(launch, 16, 128, merge_rows=4)
    yield "short, fixed parts", partial(launch, 16, 128, folds_parts=True, merge_rows=4)
    yield "long", partial(launch, 64, 128, merge_rows=16)
    yield "latent", partial(launch, 64, 512, merge_rows=1, merge_batch=16)


def schedule_cases(_: int) -> Iterator[Case]:
    """Each kind of lengths, with fixed parts, and dealt out whole."""

    def launch(
        seq_lens: bool, cu_seqlens: bool, window: int | None, fixed_parts: bool, rows: int = 16
    ) -> None:
        lengths = ints(9)
        config = AttendConfig(rows, 64, num_warps=4, num_stages=3, workers_per_sm=2)
        parts = PartKinds(folded=fixed_parts)
        constants = program_of(config, (128, 128), 16, parts, 264).constants
        given = (lengths[1:] if seq_lens else None, lengths if cu_seqlens else None)
        call = call_of_lengths(8, lengths, *given, 4096, window)
        schedule(ints(schedule_size(8, 8, constants)), ints(64), call, constants)

    yield "lengths", partial(launch, True, False, None, False)
    yield "lengths, window, fixed parts", partial(launch, True, False, 100, True)
    yield "packed", partial(launch, False, True, None, False)
    yield "packed, dealt out whole", partial(launch, False, True, None, False, rows=64)
    yield "packed, fixed parts, dealt out whole", partial(launch, False, True, None, True, rows=64)
    yield "whole storage", partial(launch, False, False, None, False)


def expand_pages_cases(shared_memory: int) -> Iterator[Case]:
    """One a format."""
    recent = dict.fromkeys(("has_fp8", "has_overlap"), lambda _: shared_memory >= 227 * 1024)

    def launch(name: str, dim: int, dtype: torch.dtype) -> None:
        (k, k_scales), (v, v_scales) = (
            empty_store(name, (64, 16, 8, dim), dtype, torch.device("meta")) for _ in range(2)
        )
        keys = PagedKV(k, v, ints(4, 64), ints(4), k_scales, v_scales, dtype)
        out = [meta(4096, 8, dim, dtype=dtype) for _ in range(2)]
        with mock.patch.multiple(expand_pages, **recent):
            expand_pages.expand_pages(keys.stores(), keys.page_table, ints(12), 0, *out)

    for name in FORMATS:
        yield f"{name}, bfloat16", partial(launch, name, 128, BRAIN)
    yield "q8_0, float16, 96", partial(launch, "q8_0", 96, HALF)
    yield "fp8, float16", partial(launch, "fp8", 128, HALF)


def attend_lists_cases(shared_memory: int) -> Iterator[Case]:
    """Every selection of tiles, over pages and a padded batch, every rule, prior states."""
    plain = Rules(causal=True, scale=0.1)
    every_rule = Rules(causal=True, softcap=30.0, scale=0.1, sinks=meta(4))
    overlap = shared_memory >= 227 * 1024

    def launch(
        group: int,
        dim: int,
        dtype: torch.dtype,
        *,
        paged: bool = True,
        rules: Rules = plain,
        num_lists: int = 8,
        num_priors: int = 0,
        weighted: bool = False,
    ) -> None:
        k = meta(64, 16, 8, dim, dtype=dtype)
        keys = PagedKV(k, k, ints(1, 64), ints(1)) if paged else DenseKV(k[:1], k[:1])
        shape = (1, num_lists, 640)
        weights = meta(shape) if weighted else None
        view = SelectedKV(keys, ints(shape), ints(shape[:2]), weights).view()
        config = select_lists(
            group=group, num_lists=num_lists, width=640, head_dim_k=dim, head_dim_v=dim,
            itemsize=dtype.itemsize, num_sms=1024, per_program=shared_memory, per_sm=shared_memory,
        )  # fmt: skip
        parts = PartKinds(uniform=True)
        program = program_of(config, (dim, dim), 1, parts, 1, (group, 1), overlap=overlap)
        state = AttentionState(meta(num_lists, group, dim, dtype=dtype), meta(num_lists, group))
        prior = None
        if num_priors:
            prior = AttentionState(*(meta(num_priors, *x.shape, dtype=x.dtype) for x in state))
        q = meta(num_lists, group, dim, dtype=dtype)
        attend_lists(q, view, rules, state, SCRATCH, program, prior)

    for group, dim, dtype in ((1, 128, BRAIN), (4, 128, BRAIN), (1, 256, BRAIN), (4, 256, SINGLE)):
        name = f"group of {group}, {dim} {str(dtype)[6:]}"
        yield name, partial(launch, group, dim, dtype, paged=group == 1)
    every = {"rules": every_rule, "num_priors": 3, "weighted": True}
    if overlap:  # elsewhere these need as much room as fewer parts of twice the size
        yield (
            "many, every rule and prior states",
            partial(launch, 4, 128, BRAIN, num_lists=256, **every),
        )


def list_pages_cases(_: int) -> Iterator[Case]:
    """Lists over pages and over a padded batch, for each head and for all."""

    def launch(paged: bool, num_lists: int, by_seqs: bool) -> object:
        k = meta(64, 16, 8, 128, dtype=BRAIN)
        keys = PagedKV(k, k, ints(64, 16), ints(64)) if paged else DenseKV(k, k)
        shape = (64, num_lists) if num_lists > 1 else (64,)
        seqs = ints(64) if by_seqs else None
        return list_pages(SelectedKV(keys, ints(*shape, 300), ints(shape), None, seqs).view().lists)

    yield "paged, by query heads", partial(launch, True, 32, False)
    yield "paged, for all heads, by tokens", partial(launch, True, 1, True)
    yield "dense, by kv heads", partial(launch, False, 8, False)


def draft_tree_cases(_: int) -> Iterator[Case]:
    """With and without lengths."""
    yield "lengths", partial(make_draft_tree, ints(64), ints(9), ints(8), 64)
    yield "no lengths", partial(make_draft_tree, ints(64), ints(9), None, 8)


def move_rows_cases(_: int) -> Iterator[Case]:
    """Words of every size."""
    for word_bytes in WORDS:
        given = longs(8, 2), 1024, word_bytes, longs(4, 9), longs(4, 9), longs(4)
        yield f"{word_bytes} bytes", partial(move_rows, *given)


def share_pages_cases(_: int) -> Iterator[Case]:
    """One level and several."""
    given = {"num_tokens": 8, "page_size": 16, "min_saved_keys": 512, "min_total_keys": 1 << 16}
    for levels in (1, 3):
        table = ints(8, 64), ints(8), ints(9)
        yield f"{levels} levels", partial(share_pages, *table, levels=levels, **given)


def choose_pages_cases(_: int) -> Iterator[Case]:
    """Bounds of new keys, and pages of a long table."""
    k, bounds = meta(64, 16, 8, 128, dtype=BRAIN), meta(64, 8, 128, dtype=BRAIN)
    slots = torch.empty(40, device="meta", dtype=torch.int64)
    yield "bounds", partial(renew_bounds, bounds, bounds, k, slots)
    given = {"num_chosen": 64, "page_size": 16, "page_step": 128}
    q, table = meta(8, 32, 128, dtype=BRAIN), ints(8, 8192)
    yield "8192 pages", partial(choose_pages, q, bounds, bounds, table, ints(8), **given)


def gumbel_argmax_cases(_: int) -> Iterator[Case]:
    """Usual vocabularies."""
    for num_rows, vocab_size in VOCABULARIES:
        given = meta(num_rows, vocab_size), longs(num_rows)
        yield f"{num_rows} x {vocab_size}", partial(gumbel_argmax, *given)


def mask_tokens_cases(_: int) -> Iterator[Case]:
    """Usual vocabularies."""
    for num_rows, vocab_size in VOCABULARIES:
        given = meta(num_rows, vocab_size), longs(num_rows), ints(num_rows, -(-vocab_size // 32))
        yield f"{num_rows} x {vocab_size}", partial(mask_tokens, *given)


def append_kv_cases(_: int) -> Iterator[Case]:
    """Widths, dtypes, cache layouts and kinds of slots."""
    half, single = BRAIN, SINGLE

    def launch(
        dims: tuple[int, int], dtype: torch.dtype, slots: torch.dtype, by_heads: bool
    ) -> object:
        shape = (4, 8, 16) if by_heads else (4, 16, 8)
        caches = (torch.empty(*shape, dim, dtype=dtype, device="meta") for dim in dims)
        views = (cache.transpose(1, 2) if by_heads else cache for cache in caches)
        new = (torch.empty(64, 8, dim, dtype=dtype, device="meta") for dim in dims)
        slot_mapping = torch.empty(64, dtype=slots, device="meta")
        return append_kv(tuple(map(store_of, views)), tuple(new), slot_mapping, None)

    for dims in ((64, 64), (72, 72), (128, 128), (192, 128), (256, 256)):
        yield f"bfloat16, {dims[0]}/{dims[1]}", partial(launch, dims, half, torch.int32, False)
    yield "bfloat16, by heads", partial(launch, (128, 128), half, torch.int64, True)
    yield "float32", partial(launch, (128, 128), single, torch.int64, False)

    def launch_format(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> object:
        store = encoded_store("k", *empty_store(name, (4, 16, *shape), dtype, torch.device("meta")))
        new, slots = meta(64, *shape, dtype=dtype), torch.empty(64, dtype=torch.int64).to("meta")
        return append_kv((store,), (new,), slots, ints(1))

    for name in FORMATS:
        yield f"{name}, latent", partial(launch_format, name, (1, 576), half)
    for name in ("fp8", "q8_0"):
        yield f"{name}, float32", partial(launch_format, name, (8, 128), single)


def merge_cases(_: int) -> Iterator[Case]:
    """Configurations, sources and dtypes."""
    half, single = HALF, SINGLE

    def launch(lead: tuple[int, ...], sources: int, head_dim: int, *dtypes: torch.dtype) -> object:
        shape = (*lead, 64, 8, head_dim)
        part = AttentionState.empty(shape, dtype=dtypes[0], device="meta")
        merged = AttentionState.empty(shape[-3:], dtype=dtypes[1], device="meta")
        return merge((part,) * sources, bool(lead), *merged)

    for head_dim in (1, 64, 72, 128, 192, 512):
        yield f"two float16, head dim {head_dim}", partial(launch, (), 2, head_dim, half, half)
    yield "two float32", partial(launch, (), 2, 128, single, single)
    yield "eight float16", partial(launch, (), 8, 128, half, half)
    yield "stacked float32 into float16", partial(launch, (17,), 1, 128, single, half)


def expert_order_cases(_: int) -> Iterator[Case]:
    """As many rows as are looked at once, and more."""
    for num_rows in (384, 49152):
        experts = torch.empty(num_rows, dtype=torch.int64, device="meta")
        yield f"{num_rows} rows", partial(order_experts, experts, ints(num_rows), ints(65), ints(2))


def expert_sum_cases(_: int) -> Iterator[Case]:
    """A width that blocks divide, and one that they do not."""
    for n in (2048, 904):
        yield f"{n}", partial(sum_experts, meta(384, n, dtype=BRAIN), meta(64, n, dtype=BRAIN))


def hopper_expert_cases(_: int) -> Iterator[Case]:
    """A product of DeepSeek-V2-Lite and one of V3, and widths of no tile."""

    def launch(n: int, k: int, num_experts: int, dtype: torch.dtype, gated: bool) -> None:
        tiles = select_expert_tiles(49152, num_experts)
        assert tiles is not None
        w, y = meta(num_experts, 2 * n if gated else n, k, dtype=dtype), meta(49152, n, dtype=dtype)
        routed = ints(49152), ints(num_experts + 1), ints(1)
        if gated:
            given = meta(8192, k, dtype=dtype), w, *routed, y
            hopper_experts.gate_experts(*given, tiles, 132)
        else:
            given = meta(49152, k, dtype=dtype), w, *routed, meta(49152), y
            hopper_experts.project_experts(*given, tiles, 132)

    yield "gated", partial(launch, 1408, 2048, 64, BRAIN, True)
    yield "256 experts, weighted", partial(launch, 7168, 2048, 256, BRAIN, False)
    yield "odd widths, gated", partial(launch, 1000, 904, 5, HALF, True)


def hopper_code_cases(_: int) -> Iterator[Case]:
    """Every tile; zeros, long scales, a bias, other formats and widths of no tile."""
    int4 = CodeConstants("int4", 1, 128)

    def launch(
        tiles: CodeTiles,
        constants: CodeConstants,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        *,
        n: int = 4096,
        k: int = 4096,
        zeros: bool = False,
    ) -> None:
        grouped = constants.group_k < k
        split = grouped and scale_dtype != dtype
        c = code_tile_constants(tiles, constants, grouped=grouped, split_scales=split)
        words = meta(n, -(-k // constants.run) * constants.words, dtype=torch.int16)
        groups = -(-k // constants.group_k), -(-n // constants.group_n)
        weight = CodeArguments(
            words,
            meta(*groups, dtype=scale_dtype),
            meta(*groups, dtype=torch.int8) if zeros else None,
        )
        x, y, bias = meta(64, k, dtype=dtype), meta(64, n, dtype=dtype), meta(n, dtype=dtype)
        hopper_codes(x, weight, bias if zeros else None, y, meta(200, c.size), ints(2048), c, 100)

    for tiles in (NARROW, WIDE, SQUARE, TALL):
        name = f"{tiles.rows} rows, {tiles.consumers} consumers"
        yield name, partial(launch, tiles, int4, BRAIN, BRAIN)
        long = partial(launch, tiles, int4, HALF, SINGLE)
        yield f"{name}, long scales", long
        if tiles != WIDE:
            yield f"{name}, zeros", partial(long, zeros=True)
    few = replace(NARROW, rows=32)
    yield "odd widths", partial(launch, few, int4, HALF, HALF, n=1000, k=904)
    for kind in ("fp8", "int8"):
        whole, blocks = CodeConstants(kind, 1, 4096), CodeConstants(kind, 128, 128)
        yield f"{kind}", partial(launch, few, whole, BRAIN, SINGLE)
        yield f"{kind} in blocks", partial(launch, few, blocks, BRAIN, BRAIN)


def expert_product_cases(shared_memory: int) -> Iterator[Case]:
    """Every configuration, both products of DeepSeek-V2-Lite, and widths of no tile."""

    def launch(config: ExpertConfig, dtype: torch.dtype, n: int, k: int, gated: bool) -> None:
        fitted = fit_experts(config, itemsize=dtype.itemsize, shared_bytes=shared_memory)
        w, y = (meta(*shape, dtype=dtype) for shape in ((64, 2 * n if gated else n, k), (384, n)))
        routed = ints(384), ints(65)
        if gated:
            gate_experts(meta(64, k, dtype=dtype), w, *routed, y, fitted)
        else:
            project_experts(meta(384, k, dtype=dtype), w, *routed, meta(384), y, fitted)

    for config in every_expert_config():
        name = f"{config.block_m} x {config.block_n}"
        yield f"{name} gated", partial(launch, config, BRAIN, 1408, 2048, True)
    few = select_experts(6, 64)
    yield "weighted", partial(launch, few, BRAIN, 2048, 1408, False)
    yield "odd widths", partial(launch, few, HALF, 1000, 904, True)


def quantised_rows_cases(shared_memory: int) -> Iterator[Case]:
    """Every configuration of every format; gates and zeros of those that have them."""
    hopper, packed = shared_memory >= 227 * 1024, shared_memory > 64 * 1024  # NVIDIA's instructions

    def launch(
        config: RowsConfig, constants: CodeConstants, dtype: torch.dtype, *, gated: bool = False
    ) -> None:
        m, n, k = config.block_m, 4096, 4096
        words = meta(n, k // constants.parts, dtype=torch.int16)
        scales = meta(-(-k // constants.group_k), n // constants.group_n, dtype=BRAIN)
        zeros = scales.to(HALF if constants.short else torch.int8) if dtype == HALF else None
        x, y = meta(m, k, dtype=dtype), meta(m, n // 2 if gated else n, dtype=dtype)
        given = x, CodeArguments(words, scales, zeros), None, y, constants
        quantised_rows(*given, replace(config, overlap=hopper), gated=gated)

    formats = {
        "fp8": CodeConstants("fp8", 1, 4096, packed),
        "fp8 in blocks": CodeConstants("fp8", 128, 128, packed),
        "int8": CodeConstants("int8", 1, 4096, packed),
        "int8 in groups of 32": CodeConstants("int8", 1, 32, packed),
        "int8 in groups of 16": CodeConstants("int8", 1, 16, packed),
        "int4": CodeConstants("int4", 1, 128, packed),
        "int4 in groups of 32": CodeConstants("int4", 1, 32, packed),
    }
    for kind, constants in formats.items():
        for config in every_rows_config(constants):
            name = f"{config.block_m} x {config.block_n}, {config.runs} runs, {kind}"
            case = partial(launch, config, constants)
            yield name, partial(case, BRAIN)
            if constants.kind == "int4":
                yield f"{name} gated", partial(case, BRAIN, gated=True)
            if constants.kind == "int4" or constants.short:
                yield f"{name} zeros float16", partial(case, HALF)


KERNELS = "anabranch.kernels"
CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    f"{KERNELS}.gluon.kernel": gluon_cases,
    f"{KERNELS}.gluon.latent_kernel": latent_cases,
    f"{KERNELS}.layers.expert_order": expert_order_cases,
    f"{KERNELS}.layers.expert_product": expert_product_cases,
    f"{KERNELS}.layers.expert_sum": expert_sum_cases,
    f"{KERNELS}.layers.hopper_codes": hopper_code_cases,
    f"{KERNELS}.layers.hopper_experts": hopper_expert_cases,
    f"{KERNELS}.layers.quantised_rows": quantised_rows_cases,
    f"{KERNELS}.parts.merge_items": merge_items_cases,
    f"{KERNELS}.parts.merge_parts": merge_parts_cases,
    f"{KERNELS}.schedule.order": order_cases,
    f"{KERNELS}.schedule.schedule": schedule_cases,
    f"{KERNELS}.triton.append_kv": append_kv_cases,
    f"{KERNELS}.triton.attend": attend_cases,
    f"{KERNELS}.triton.attend_lists": attend_lists_cases,
    f"{KERNELS}.triton.choose_pages": choose_pages_cases,
    f"{KERNELS}.triton.draft_tree": draft_tree_cases,
    f"{KERNELS}.triton.expand_pages": expand_pages_cases,
    f"{KERNELS}.triton.gumbel_argmax": gumbel_argmax_cases,
    f"{KERNELS}.triton.list_pages": list_pages_cases,
    f"{KERNELS}.triton.mask_tokens": mask_tokens_cases,
    f"{KERNELS}.triton.merge": merge_cases,
    f"{KERNELS}.triton.move_rows": move_rows_cases,
    f"{KERNELS}.triton.share_pages": share_pages_cases,
} | LAYER_CASES
# What the loops of a warp-specialised kernel must do, by its name
LOOPS = {
    "attend_kernel": (
        waits_after_exponentials,
        loops_join_no_halves,
        products_follow_each_other,
    ),
    "attend_latent_kernel": (loops_stay_in_registers,),
    "expert_rows_kernel": (loops_stay_in_registers, loops_overlap_products),
    "hopper_codes_kernel": (loops_stay_in_registers,),
}


def prefetches_every_map(ptx: str) -> bool:
    """Whether the tensor maps among the parameters, and nothing else, are fetched at the start."""
    maps = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    return bool(maps) and maps == re.findall(r"prefetch\.param\.tensormap \[(\w+)\]", ptx)


def compiled_cases(
    module: str, target: str, names: list[str], unused: list[str]
) -> Iterator[dict[str, object]]:
    """What each kernel of the module's cases needs on a target."""
    gpu = TARGETS[target]
    every = dict(CASES[module](gpu.shared_bytes))
    assert set(unused) <= set(every), unused
    for case in names or [x for x in every if x not in unused]:
        for launch in record(every[case]):
            with redirect_stdout(StringIO()) as log:
                compiled = compile_launch(launch, gpu)
            found = {"case": case, **asdict(resources(compiled))}
            if launch.kernel.is_gluon():
                found["serialised"] = serialised(log.getvalue())
                for check in LOOPS[launch.kernel.__name__]:
                    found[check.__name__] = check(compiled.asm["cubin"])
                if launch.kernel.__name__ == "attend_kernel":
                    found["prefetches_every_map"] = prefetches_every_map(compiled.asm["ptx"])
            elif target == "sm_90" and module.endswith("triton.attend") and found["spills"]:
                found["tiles_stay_in_registers"] = tiles_stay_in_registers(compiled.asm["cubin"])
            yield found


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = True
    for line in sys.stdin:
        try:
            answer: object = list(compiled_cases(*json.loads(line)))
        except Exception:
            answer = format_exc()
        print(json.dumps(answer), flush=True)
