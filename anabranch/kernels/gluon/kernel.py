"""The Hopper kernel: shared memory, and one function for each role of its warps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents

from anabranch.kernels.gluon.barriers import make_barriers, prefetch_maps
from anabranch.kernels.gluon.consumer import consume
from anabranch.kernels.gluon.copies import produce_queries_keys, produce_values
from anabranch.kernels.gluon.operands import (
    BoxedColumns,
    HopperOperands,
    QueryRoom,
    Ring,
    Staging,
)
from anabranch.kernels.gluon.queue import make_queue


class BoxPlaces(NamedTuple):
    """Where pages and heads begin in boxes of keys and values."""

    k_page_rows: int  # rows of a page
    k_head: int  # columns of a head
    v_page_rows: int
    v_head: int
    table: torch.Tensor | None  # [num_seqs, max_pages]


class OrderedWork(NamedTuple):
    """The order of items, and the counter that hands them out."""

    order: torch.Tensor  # as order.py lays it out
    counter: torch.Tensor  # 0 between launches


@gluon.jit
def allocate_rows(dtype: gl.constexpr, WIDTH: gl.constexpr):
    """Room for the 64 rows of each consumer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [2, 64, WIDTH], layout)


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """A ring of tiles of keys or values."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES, BLOCK_N, WIDTH], desc.layout)


@gluon.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_kernel(
    q_main_desc,
    q_rest_desc,
    k_main_desc,
    k_rest_desc,
    v_main_desc,
    v_rest_desc,
    out_main_desc,
    out_rest_desc,
    source,  # BoxPlaces
    table_stride,
    rules,  # Rules, with the scale of logits in base 2 and a mask of bytes
    tree_width,
    results,  # StateRows
    work,  # OrderedWork
    C: gl.constexpr,  # HopperConstants
):
    """Attend to the items of an order: two consumers of 64 rows each, two producers."""
    if C.overlap:  # global memory is not touched before `first_ticket`
        prefetch_maps(C)
        gdc_launch_dependents()  # the next kernel takes processors that have nothing left to do
    q_main = allocate_rows(q_main_desc.dtype, C.dk_main)
    k_main = allocate_tiles(k_main_desc, C.stages, C.block_n, C.dk_main)
    v_main = allocate_tiles(v_main_desc, C.stages, C.block_n, C.dv_main)
    out_main = allocate_rows(out_main_desc.dtype, C.out_columns)
    q_rest, k_rest, v_rest, out_rest = q_main, k_main, v_main, out_main
    if C.dk_rest:
        q_rest = allocate_rows(q_main_desc.dtype, C.dk_rest)
        k_rest = allocate_tiles(k_rest_desc, C.stages, C.block_n, C.dk_rest)
    if C.dv_rest:
        v_rest = allocate_tiles(v_rest_desc, C.stages, C.block_n, C.dv_rest)
        out_rest = allocate_rows(out_main_desc.dtype, C.dv_rest)
    q = QueryRoom(q_main, q_rest, make_barriers(2, 1), make_barriers(2, 1))
    k = Ring(k_main, k_rest, make_barriers(C.stages, 1))
    v = Ring(v_main, v_rest, make_barriers(C.stages, 1))
    queue = make_queue()
    fence_async_shared()
    staging = Staging(out_main, out_rest, out_main_desc, out_rest_desc)
    q_descs = (q_main_desc, q_rest_desc)
    keys = BoxedColumns(k_main_desc, k_rest_desc, source.k_page_rows, source.k_head)
    values = BoxedColumns(v_main_desc, v_rest_desc, source.v_page_rows, source.v_head)
    given = HopperOperands(source.table, table_stride, rules, tree_width, results, work.order)
    gl.warp_specialize(
        [
            (consume, (q, k, v, staging, queue, given, C, 0)),
            (consume, (q, k, v, staging, queue, given, C, 1)),
            (produce_queries_keys, (q, k, q_descs, keys, queue, work.counter, given, C)),
            (produce_values, (v, values, queue, given, C)),
        ],
        [4, 1, 1],
        [C.consumer_registers, C.producer_registers, C.producer_registers],
    )
