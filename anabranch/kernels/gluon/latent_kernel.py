"""The Hopper kernel for latent keys: its launch, shared memory, and a function for each role."""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from anabranch.kernels import versions
from anabranch.kernels.gluon.barriers import make_barriers, prefetch_maps
from anabranch.kernels.gluon.boxes import flat_boxes, key_boxes
from anabranch.kernels.gluon.latent_config import LatentConstants
from anabranch.kernels.gluon.latent_consumers import consume_latent
from anabranch.kernels.gluon.latent_copies import produce_latent
from anabranch.kernels.gluon.operands import HopperOperands, LatentBoxes, LatentRoom
from anabranch.kernels.load.arguments import Rows
from anabranch.kernels.parts.slots import Parts, StateRows
from anabranch.keys import KeyView
from anabranch.launches.recorder import launch
from anabranch.rules import Rules
from anabranch.state import AttentionState


def attend_latent(
    q: torch.Tensor,  # [num_tokens, num_heads, 576]
    view: KeyView,
    rules: Rules,
    state: AttentionState,
    schedule: torch.Tensor,
    parts: Parts,
    constants: LatentConstants,
) -> None:
    """Write the state of `q` over latent keys, as `schedule` divides the work."""
    c, k, table, tree = constants, view.k, view.page_table, rules.tree_mask
    assert table is not None
    launch(
        attend_latent_kernel,
        (c.work.division.num_programs,),
        flat_boxes(q, 256),
        flat_boxes(q, 64),
        key_boxes(k, c, 256),
        key_boxes(k, c, 64),
        flat_boxes(state.out, 256),
        k.page // k.key,
        table,
        table.stride(0),
        rules._replace(
            causal=None,  # a constant
            scale=rules.scale * math.log2(math.e),
            tree_mask=None if tree is None else tree.contiguous().view(torch.uint8),
        ),
        0 if tree is None else tree.shape[1],
        StateRows(
            Rows(state.out, *state.out.stride()), Rows(state.lse, *state.lse.stride(), 0), parts
        ),
        schedule,
        c,
        num_warps=4,
        maxnreg=c.max_registers,
        hopper=versions.LATENT_OPTIONS,
        **({"launch_pdl": True} if c.overlap else {}),
    )


@gluon.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_latent_kernel(
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    out_desc,
    page_rows,  # rows from one page to the next
    table_ptr,  # [num_seqs, max_pages]
    table_stride,
    rules,  # Rules, with the scale of logits in base 2 and a mask of bytes
    tree_width,
    results,  # StateRows
    schedule_ptr,  # as schedule.py lays it out
    C: gl.constexpr,  # LatentConstants
):
    """Attend to the items of each worker's share: two consumers and a producer."""
    if C.overlap:  # each partition waits for the kernel ahead before it touches global memory
        gdc_launch_dependents()
        prefetch_maps(C)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(q_desc.dtype, [1, 64, 256], q_desc.layout)
    q_right = gl.allocate_shared_memory(q_desc.dtype, [1, 64, 256], q_desc.layout)
    p_odd = gl.allocate_shared_memory(q_desc.dtype, [64, 64], q_rest_desc.layout)
    p_even = gl.allocate_shared_memory(q_desc.dtype, [64, 64], q_rest_desc.layout)
    k_left = gl.allocate_shared_memory(k_desc.dtype, [2, 64, 256], k_desc.layout)
    k_right = gl.allocate_shared_memory(k_desc.dtype, [2, 64, 256], k_desc.layout)
    k_rest = gl.allocate_shared_memory(k_desc.dtype, [2, 64, 64], k_rest_desc.layout)
    peak_even = gl.allocate_shared_memory(gl.float32, [64], line)
    peak_odd = gl.allocate_shared_memory(gl.float32, [64], line)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], line)
    k_full = (make_barriers(2, 1), make_barriers(2, 1))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    fence_async_shared()
    q, k = (q_left, q_right), (k_left, k_right, k_rest)
    room = LatentRoom(q, q_full, k, k_full, p_even, p_odd, peak_even, peak_odd, sums)
    boxes = LatentBoxes(q_desc, q_rest_desc, k_desc, k_rest_desc, page_rows)
    given = HopperOperands(table_ptr, table_stride, rules, tree_width, results, schedule_ptr)
    gl.warp_specialize(
        [
            (consume_latent, (room, out_desc, given, C, 0)),
            (consume_latent, (room, out_desc, given, C, 1)),
            (produce_latent, (room, boxes, given, C)),
        ],
        [4, 1],
        [C.tiles.consumer_registers, C.tiles.producer_registers],
    )
