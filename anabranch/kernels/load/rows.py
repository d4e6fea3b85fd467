"""Rows of a tensor, loaded by pointers to the columns of the first."""

import triton
import triton.language as tl


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
