"""The launch of the Hopper kernel."""

from __future__ import annotations

import math

import torch

from anabranch.kernels import versions
from anabranch.kernels.gluon.boxes import key_boxes, row_boxes
from anabranch.kernels.gluon.kernel import BoxPlaces, OrderedWork, attend_kernel
from anabranch.kernels.hopper_config import HopperConstants
from anabranch.kernels.parts.slots import StateRows
from anabranch.keys import KeyView
from anabranch.launches.recorder import launch
from anabranch.rules import Rules


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    view: KeyView,
    rules: Rules,
    results: StateRows,
    work: OrderedWork,
    constants: HopperConstants,
) -> None:
    """Write the state of `q` over the keys, taking items in the given order."""
    c, (k, v), table, tree = constants, view[:2], view.page_table, rules.tree_mask
    launch(
        attend_kernel,
        (c.num_programs,),
        row_boxes(q, c.pack, c.dk_main),
        row_boxes(q, c.pack, c.dk_rest) if c.dk_rest else None,
        key_boxes(k, c, c.dk_main),
        key_boxes(k, c, c.dk_rest) if c.dk_rest else None,
        key_boxes(v, c, c.dv_main),
        key_boxes(v, c, c.dv_rest) if c.dv_rest else None,
        row_boxes(results.out.ptr, c.pack, c.out_columns),
        row_boxes(results.out.ptr, c.pack, c.dv_rest) if c.dv_rest else None,
        BoxPlaces(k.page // k.key, k.head, v.page // v.key, v.head, table),
        0 if table is None else table.stride(0),
        rules._replace(
            causal=None,  # a constant
            scale=rules.scale * math.log2(math.e),
            sinks=None if rules.sinks is None else rules.sinks.contiguous(),
            tree_mask=None if tree is None else tree.contiguous().view(torch.uint8),
        ),
        0 if tree is None else tree.shape[1],
        results,
        work,
        c,
        num_warps=4,
        maxnreg=c.max_registers,
        hopper=versions.CUT_OPTIONS if c.splits else versions.PROMPT_OPTIONS,
        **({"launch_pdl": True} if c.overlap else {}),
    )
