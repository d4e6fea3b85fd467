"""Queries, keys and outputs as boxes that the tensor memory accelerator (TMA) copies."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anabranch.kernels.gluon.latent_config import LatentConstants
from anabranch.kernels.hopper_config import HopperConstants
from anabranch.keys import PLAIN, KeyStore

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def is_aligned(x: torch.Tensor, *strides: int) -> bool:
    """Whether 16-bit elements with these strides begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)


def takes_rows(x: torch.Tensor) -> bool:
    """Whether TMA can copy boxes of [num_tokens, num_heads, dim]: the heads of a token together."""
    token, head, dim = x.stride()
    return dim == 1 and token >= head and is_aligned(x, token, head)


def num_rows(store: KeyStore) -> int:
    """Rows of a store, counted in strides of a key: [pages, keys, ...] or, packed, [keys, ...]."""
    num_pages, *page_keys = store.ptr.shape[:-2]
    return (num_pages - 1) * (store.page // store.key) + (page_keys[0] if page_keys else 1)


def store_refusal(name: str, store: KeyStore) -> str | None:
    """Why TMA cannot copy boxes of a store; None if it can."""
    if store.format != PLAIN:
        return f"{name} must be plain, got the format {store.format.name}"
    if not store.ptr.numel():
        return f"{name} must hold keys, got shape {tuple(store.ptr.shape)}"
    if store.dim != 1 or not is_aligned(store.ptr, store.key, store.head):
        return f"{name} must be aligned to 16 bytes in keys and heads, got {store.ptr.stride()}"
    if store.key <= 0 or store.page % store.key:
        return (
            f"pages of {name} must begin whole keys apart, got a stride of {store.page} for pages "
            f"and {store.key} for keys"
        )
    num_heads, dim = store.ptr.shape[-2:]
    if max(num_rows(store), num_heads * store.head + dim) >> 31:
        return f"{name} must have fewer than 2^31 rows and columns, got {store.ptr.stride()}"
    return None


@cache
def shared_layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


def row_boxes(x: torch.Tensor, pack: int, width: int) -> TensorDescriptor:
    """Boxes [64 / pack tokens, pack heads, width] of [num_tokens, num_heads, dim]."""
    block = [64 // pack, pack, width]
    layout = shared_layout(x.dtype, *block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def is_flat(x: torch.Tensor) -> bool:
    """Whether the heads of all tokens lie at equal distances, for boxes of any 64 of them."""
    token, head, dim = x.stride()
    return dim == 1 and head > 0 and token == head * x.shape[1] and is_aligned(x, head)


def flat_boxes(x: torch.Tensor, width: int) -> TensorDescriptor:
    """Boxes [64, width] of [num_tokens * num_heads, dim]."""
    num_tokens, num_heads, dim = x.shape
    layout = shared_layout(x.dtype, 64, width)
    shape = [num_tokens * num_heads, dim]
    return TensorDescriptor(x, shape, [x.stride(1), 1], [64, width], layout)


def key_boxes(
    store: KeyStore, constants: HopperConstants | LatentConstants, width: int
) -> TensorDescriptor:
    """Boxes [keys, width] of a store: a row for each key, a range of columns for each head."""
    num_heads, dim = store.ptr.shape[-2:]
    rows = min(constants.page_size or constants.block_n, constants.block_n)
    layout = shared_layout(store.ptr.dtype, rows, width)
    shape = [num_rows(store), (num_heads - 1) * store.head + dim]
    return TensorDescriptor(store.ptr, shape, [store.key, 1], [rows, width], layout)
