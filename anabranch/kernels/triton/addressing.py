"""Where rows lie: tensors with named strides, and keys in pages or in one long page."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rows(NamedTuple):
    """A tensor [tokens, heads, dims] and its strides, flat so that kernels can pass it on."""

    ptr: torch.Tensor
    token: int
    head: int
    dim: int


class Pages(NamedTuple):
    """A tensor [pages, keys, heads, dims] and its strides."""

    ptr: torch.Tensor
    page: int
    key: int
    head: int
    dim: int


@triton.jit
def dim_ptrs(ptr, dim_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [1, WIDTH] to dims [FIRST, FIRST + WIDTH) of the row at `ptr`."""
    return ptr + ((FIRST + tl.arange(0, WIDTH)) * dim_stride)[None, :]


@triton.jit
def load_rows(ptrs, offsets, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Rows at `offsets` from `dim_ptrs`; dims beyond DIM are zero."""
    ptrs = ptrs + offsets[:, None]
    if FIRST + WIDTH > DIM:
        rows = tl.load(ptrs, (FIRST + tl.arange(0, WIDTH) < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def load_pages(keys, origin, table_ptr, table_stride, PAGE_SIZE: tl.constexpr):
    """The page of each key of the sequence at `origin`, its row of the table.

    Contiguous keys have no table: the sequence is one page, and `origin` counts page strides.
    """
    pages = origin
    if table_ptr is not None:
        pages = tl.load(
            table_ptr + origin.to(tl.int64) * table_stride + keys.to(tl.uint32) // PAGE_SIZE
        )
    return pages


@triton.jit
def key_offsets(keys, pages, page_stride, key_stride, table_ptr, C: tl.constexpr):
    """Element offsets (int64) of keys in their pages; wide pages span 2^31 elements or more."""
    rows = keys.to(tl.int64) * key_stride
    if table_ptr is not None:
        rows = (keys.to(tl.uint32) % C.page_size).to(tl.int64 if C.wide_pages else tl.int32)
        rows = rows * key_stride
    return pages.to(tl.int64) * page_stride + rows
