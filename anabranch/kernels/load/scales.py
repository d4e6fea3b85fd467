"""Scales of quantised keys and values: where they lie, and what they are multiplied into."""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import key_offsets


@triton.constexpr_function
def scaled_as_tile(side, dtype):
    """Whether scales are multiplied into a tile, and not into scores or weights.

    Those of blocks are; and those of values for float16, in which a small scale of a weight would
    underflow. Words are converted with the scales of their blocks.
    """
    if side.words:
        return False
    if side.format.scaling == "block":
        return True
    return side.format.scaling != "none" and side.has_values and dtype == tl.float16


@triton.constexpr_function
def scaled_by_key(side, dtype):
    """Whether scores or weights of a tile are multiplied by the scale of each key.

    The one scale of a tensor of words is multiplied in once, not for each key.
    """
    if side.words:
        return side.format.scaling == "key"
    return side.format.scaling != "none" and not scaled_as_tile(side, dtype)


@triton.jit
def load_scales(columns, at, places, DTYPE: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """The scale of each key that its tile lacks, or None; `places` as `scale_offsets` has them."""
    scales = None
    if scaled_by_key(SIDE, DTYPE):
        scales = tl.load(columns.store.scales.ptr + places)
    return scales


@triton.jit
def scale_offsets(columns, at, SIDE: tl.constexpr, C: tl.constexpr):
    """Element offsets (int64) of the first scale of one head of each key."""
    offsets = at.looked_up  # unused without scales
    if SIDE.format.scaling != "none":
        STRIDES: tl.constexpr = SIDE.scale_strides
        offsets = key_offsets(at.looked_up, at.pages, STRIDES[0], STRIDES[1], C)
        offsets += head_offset(columns, SIDE)
    return offsets


@triton.jit
def head_offset(columns, SIDE: tl.constexpr):
    """The element offset (int64) of the scales of a head."""
    head = columns.store.scales.head
    if SIDE.scale_strides[2] is not None:
        head = SIDE.scale_strides[2]
    return columns.kv_head.to(tl.int64) * head
