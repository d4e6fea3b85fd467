"""Where results go: rows (token, head in group) of a sequence, back to tokens and heads."""

import triton
import triton.language as tl


@triton.jit
def write_rows(out, lse, rows, num_rows, q_start, kv_head, out_rows, lse_rows, C: tl.constexpr):
    """Write finished rows of one kv head; those from `num_rows` on belong to nobody."""
    tokens = (q_start + rows // C.group).to(tl.int64)
    heads = kv_head * C.group + rows % C.group
    dims = tl.arange(0, C.tiles.block_dv)
    inside = rows < num_rows
    offsets = tokens * out_rows.token + heads.to(tl.int64) * out_rows.head
    ptrs = out_rows.ptr + offsets[:, None] + (dims * out_rows.dim)[None, :]
    mask = inside[:, None] & (dims < C.head_dim_v)[None, :]
    tl.store(ptrs, out.to(out_rows.ptr.dtype.element_ty), mask)
    tl.store(
        lse_rows.ptr + tokens * lse_rows.token + heads.to(tl.int64) * lse_rows.head, lse, inside
    )
