"""Who may look at what, as functions of positions; True means attend.

Tokens stand at the end of the keys: token t of a sequence has position seq_len - q_len + t.
"""

import triton
import triton.language as tl


@triton.jit
def seen_by_any(first_token, last_token, q_len, seq_len, window, CAUSAL: tl.constexpr):
    """The keys [start, stop) that some token of [first_token, last_token] can see."""
    shift = seq_len - q_len
    start = first_token * 0
    stop = seq_len
    if CAUSAL:
        stop = tl.minimum(tl.maximum(shift + last_token + 1, 0), seq_len)
    if window is not None:
        start = tl.maximum(shift + first_token - window + 1, 0)
    return tl.minimum(start, stop), stop


@triton.jit
def seen_by_all(first_token, last_token, block, rules, CAUSAL: tl.constexpr):
    """The keys [start, stop) that every token of [first_token, last_token] can see."""
    shift = block.seq_len - block.q_len
    start = first_token * 0
    stop = block.seq_len
    if rules.tree_mask is not None:
        stop = tl.maximum(shift, 0)
    elif CAUSAL:
        stop = tl.minimum(tl.maximum(shift + first_token + 1, 0), block.seq_len)
    if rules.window is not None:
        start = tl.maximum(shift + last_token - rules.window + 1, 0)
    return tl.minimum(start, stop), stop


@triton.jit
def visible(
    tokens,
    keys,
    block,
    window,
    tree_rows,  # pointers or None
    tree_width,
    CAUSAL: tl.constexpr,
    ONE_BOUND: tl.constexpr = False,
):
    """Whether each of `tokens` attends to each of `keys`, index tensors that broadcast together.

    `tree_rows` points at each token's row of the tree mask, which says which of the sequence's own
    new tokens it sees and takes the place of the causal rule among them. With ONE_BOUND, the causal
    rule and the length are one comparison a key, with a bound made for each token.
    """
    seq_len = block.seq_len
    shift = seq_len - block.q_len
    if CAUSAL and ONE_BOUND and tree_rows is None:
        mask = keys <= tl.minimum(shift + tokens, seq_len - 1)
    else:
        mask = keys < seq_len
    if tree_rows is not None:
        newest = keys - shift
        listed = (newest >= 0) & (newest < tree_width) & (keys < seq_len)
        shown = tl.load(tree_rows + newest, listed, other=0) != 0
        mask = mask & ((newest < 0) | shown)
    elif CAUSAL and not ONE_BOUND:
        mask = mask & (keys <= shift + tokens)
    if window is not None:
        mask = mask & (keys > shift + tokens - window)
    return mask
