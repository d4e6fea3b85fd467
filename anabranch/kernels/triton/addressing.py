"""Where a key lies: pages and rows in paged storage, one long page otherwise."""

import triton
import triton.language as tl


@triton.jit
def locate(keys, inside, origin, table_ptr, table_stride, PAGE_SIZE: tl.constexpr):
    """Page (int64) and row in it for `keys` of the sequence at `origin`.

    Paged, `origin` is the sequence's row of the table; keys not `inside` read no entry of it.
    Contiguous, the sequence is one page, and `origin` counts strides of the storage.
    """
    if table_ptr is None:
        return origin.to(tl.int64), keys
    entries = table_ptr + origin.to(tl.int64) * table_stride + keys // PAGE_SIZE
    pages = tl.load(entries) if inside is None else tl.load(entries, inside, other=0)
    return pages.to(tl.int64), keys % PAGE_SIZE


@triton.jit
def load_rows(
    ptr, offsets, inside, dim_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):
    """Rows at `offsets`, dims [FIRST, FIRST + WIDTH) of DIM; zero beyond DIM and outside."""
    dims = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + offsets[:, None] + (dims * dim_stride)[None, :]
    if FIRST + WIDTH > DIM:
        mask = (dims < DIM)[None, :]
        if inside is not None:
            mask = mask & inside[:, None]
        return tl.load(ptrs, mask, other=0.0)
    if inside is not None:
        return tl.load(ptrs, inside[:, None], other=0.0)
    return tl.load(ptrs)
