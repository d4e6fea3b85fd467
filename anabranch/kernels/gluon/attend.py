"""The producer "gluon": states by warp-specialised kernels for Hopper GPUs, in 16 bits."""

from __future__ import annotations

from types import ModuleType

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import capability
from anabranch.kernels.gluon import dense_attend, latent_attend
from anabranch.kernels.gluon.latent_plan import LatentLayout
from anabranch.kernels.gluon.plan import HopperLayout
from anabranch.state import AttentionState

RESUMES = False


def _way(call: AttendCall) -> ModuleType:
    """What runs a call: latent rows, each a key and a value, have a kernel of their own."""
    return latent_attend if call.view.values_in_keys else dense_attend


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Whether this producer should run a call that names none."""
    return _way(call).prefers(call, options)


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    q = call.queries.packed
    if capability(q.device)[0] != 9:
        return f"it needs a Hopper GPU (compute capability 9), got q on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs queries of float16 or bfloat16, got {str(q.dtype)[6:]}"
    return _way(call).refusal(call, options)


def lay_out(call: AttendCall, options: PlanOptions) -> HopperLayout | LatentLayout:
    """Room for what divides the work of a call."""
    return _way(call).lay_out(call, options)


def fill_plan(call: AttendCall, layout: HopperLayout | LatentLayout, room: torch.Tensor) -> None:
    """Divide the work of a call."""
    _way(call).fill_plan(call, layout, room)


def attend(
    call: AttendCall,
    layout: HopperLayout | LatentLayout,
    room: torch.Tensor,
    out: AttentionState | None,
) -> AttentionState:
    """The state of a call, in `out` if that is given."""
    return _way(call).attend(call, layout, room, out)
