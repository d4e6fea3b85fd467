"""Where the rows of a block of latent keys are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def block_rows(rows, block, pack, C: gl.constexpr):
    """Where rows of a block lie in [num_tokens * num_heads]."""
    GROUP: gl.constexpr = C.work.group
    rows = block.first_row + rows
    return (block.q_start + rows // GROUP) * C.num_heads + pack * GROUP + rows % GROUP


@gluon.jit
def store_lse(lse, places, inside, lse_rows, C: gl.constexpr):
    """The LSEs of rows, whose tensor may have any strides."""
    tokens = (places // C.num_heads).to(gl.int64)
    heads = (places % C.num_heads).to(gl.int64)
    gl.store(lse_rows.ptr + tokens * lse_rows.token + heads * lse_rows.head, lse, inside)
