"""One token over short lists of keys: a program for each part of each list.

Where lists are few and short, a step waits for memory a few times in a row and does little else.
So there is no schedule to read, and lists are looked up where they lie.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.call import AttendCall
from anabranch.kernels.constants import AttendConstants, ListShape
from anabranch.kernels.load.arguments import Rows, list_arguments, view_arguments
from anabranch.kernels.parts.join import merge_tree
from anabranch.kernels.parts.slots import OpenPlan, Parts, StateRows, leave_part, write_rows
from anabranch.kernels.programs import AttendProgram, for_call
from anabranch.kernels.schedule.walk import Block, Item
from anabranch.kernels.softmax.online_softmax import finish_state
from anabranch.kernels.triton.prior_states import prior_arguments
from anabranch.kernels.triton.tile_loop import Operands, attend_block
from anabranch.keys import KeyView
from anabranch.launches.recorder import launch
from anabranch.rules import Rules
from anabranch.state import AttentionState


def parts_of_list(width: int, constants: AttendConstants) -> int:
    """How many programs attend to one list, each to a part."""
    return -(-width // (constants.tiles.block_n * constants.division.part_tiles))


def check_width(call: AttendCall, plan: OpenPlan[AttendProgram]) -> None:
    """Refuse lists whose parts do not fit into the plan's room."""
    num_lists, width = call.keys.num_seqs, call.keys.capacity
    if not width:
        raise ValueError("the plan was made for short lists, got lists of width 0")
    room = len(plan.parts.counters) // num_lists
    needed = parts_of_list(width, plan.program.constants)
    if needed > room:
        raise ValueError(
            f"the plan was made for lists of {room} parts at most, "
            f"lists of width {width} have {needed}"
        )


def attend_lists(
    q: torch.Tensor,  # [num_lists, group, head_dim_k]
    view: KeyView,
    rules: Rules,
    state: AttentionState,
    parts: Parts,
    program: AttendProgram,
    prior: AttentionState | None = None,  # a stack of states, merged into this one
) -> None:
    """Write the state of each token of `q` over its list."""
    lists = view.lists
    assert lists is not None
    indices = lists.indices.contiguous()
    constants = for_call(
        program.constants,
        strides=(view.k[1:3], view.v[1:3]),
        lists=ListShape(lists.lists_per_token, lists.num_kv_heads, lists.page_size),
        num_priors=0 if prior is None else prior.lse.shape[0],
    )
    num_lists, width = indices.shape
    arguments = view_arguments(view._replace(page_table=indices), constants.source.native_fp8)
    launch(
        attend_lists_kernel,
        (num_lists, parts_of_list(width, constants)),
        Rows(q, *q.stride()),
        arguments._replace(lists=list_arguments(lists)),
        width,
        lists.counts,
        rules._replace(
            causal=None,  # a constant
            scale=rules.scale * math.log2(math.e),
            sinks=None if rules.sinks is None else rules.sinks.contiguous(),
        ),
        Rows(state.out, *state.out.stride()),
        Rows(state.lse, *state.lse.stride(), 0),
        parts,
        None if prior is None else prior_arguments(prior),
        constants,
        **program.options,
        **({"launch_pdl": True} if constants.overlap else {}),
    )


@triton.jit(do_not_specialize=["width"])
def attend_lists_kernel(
    q,  # Rows [num_lists, group, head_dim_k]
    view,  # ViewArguments
    width,
    counts_ptr,  # [num_lists]
    rules,  # Rules, with the scale of logits in base 2
    out_rows,  # Rows [num_lists, group, head_dim_v]
    lse_rows,  # Rows [num_lists, group, 1]
    parts,  # Parts
    prior,  # PriorArguments or None
    C: tl.constexpr,  # AttendConstants
):
    """Attend to a part of one list, and merge its parts if this program is the last of them."""
    if C.overlap:  # nothing is read before the kernel ahead has ended
        gdc_wait()
        gdc_launch_dependents()  # at once: 8.87 us, without it 9.24
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = tl.minimum(tl.load(counts_ptr + row), width)
    tile = part * C.division.part_tiles
    stop = tl.minimum(tile + C.division.part_tiles, tl.cdiv(count, C.tiles.block_n))
    block = Block(row, 0, row, 1, count, 0, 0, 0)
    item = Item(block, row * 0, tile, stop, part, 1, num_parts, 0, row * num_parts)
    results = StateRows(out_rows, lse_rows, parts)
    given = Operands(q, view, (None, None, None), width, rules, 0, prior, results)
    state, _ = attend_block(item, part == 0, given, C)
    out, lse = finish_state(state)
    if num_parts == 1:
        write_rows(out, lse, tl.arange(0, C.tiles.block_m), item, results, C)
    else:
        leave_part(out, lse, part, item, parts, C)
        if C.merging.fused:
            merge_tree(item, results, C)
