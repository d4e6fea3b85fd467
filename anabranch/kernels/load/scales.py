"""Scales of quantised keys and values: where they lie, and what they are multiplied into."""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import key_offsets


@triton.constexpr_function
def scaled_as_tile(store_format, has_values, dtype):
    """Whether scales are multiplied into a tile, and not into scores or weights.

    Those of blocks are; and those of values for float16, in which a small scale of a weight would
    underflow.
    """
    if store_format.scaling == "block":
        return True
    return store_format.scaling != "none" and has_values and dtype == tl.float16


@triton.constexpr_function
def scaled_by_key(store_format, words, scaled):
    """Whether scores or weights of a tile are multiplied by the scale of each key.

    The one scale of a tensor of words is multiplied in once, not for each key.
    """
    if words:
        return store_format.scaling == "key"
    return store_format.scaling != "none" and not scaled


@triton.jit
def load_folded(store, places, BY_KEY: tl.constexpr):
    """The scale of each key that its tile lacks, or None."""
    scales = None
    if BY_KEY:
        scales = tl.load(store.scales.ptr + places)
    return scales


@triton.jit
def scale_offsets(
    store, strides, keys, pages, kv_head, table_ptr, FORMAT: tl.constexpr, C: tl.constexpr
):
    """Element offsets (int64) of the first scale of one head of each key.

    `strides` are those of pages, keys and, unless heads lie first, of heads, as constants.
    """
    offsets = keys  # unused without scales
    if FORMAT.scaling != "none":
        offsets = key_offsets(keys, pages, strides[0], strides[1], table_ptr, C)
        offsets += head_offset(store, strides, kv_head)
    return offsets


@triton.jit
def head_offset(store, strides, kv_head):
    """The element offset (int64) of the scales of a head."""
    head = store.scales.head
    if strides[2] is not None:
        head = strides[2]
    return kv_head.to(tl.int64) * head
