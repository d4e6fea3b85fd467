"""Sequences cut into blocks of query rows, on the device: what every schedule begins with."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.softmax.online_softmax import seen_by_any

# Arguments of which no value is special: a new one must not compile another kernel
SIZES = [
    "q_len_of_all",
    "max_len",
    "num_seqs",
    "num_tokens",
    "max_blocks",
    "num_counters",
    "window",
]


class Lengths(NamedTuple):
    """The lengths of a batch."""

    cu_seqlens_q: Any  # [num_seqs + 1], or None for equally many tokens of each sequence
    seq_lens: Any  # [num_seqs] or None
    cu_seqlens_k: Any  # [num_seqs + 1] or None
    q_len_of_all: Any
    max_len: Any  # keys that the storage holds of one sequence; longer lengths are cut
    num_seqs: Any
    num_tokens: Any


class CutBlocks(NamedTuple):
    """Some rows of sequences, and the tiles of keys that they see: the fields of a Block."""

    origin: Any
    first_row: Any
    q_start: Any
    q_len: Any
    seq_len: Any
    first_tile: Any
    num_tiles: Any


@triton.jit
def clear(counters_ptr, num_counters, value=0, LANES: tl.constexpr = 1024):
    """Write one value everywhere: 0 where no part has arrived."""
    for start in range(0, num_counters, LANES):
        places = start + tl.arange(0, LANES)
        tl.store(counters_ptr + places, value, places < num_counters)


@triton.jit
def last_not_above(sorted_ptr, stride, count, values):
    """For each value the last index i < count with sorted[i] <= value; sorted[0] is 0."""
    low = values * 0
    high = low + count
    remaining = count
    while remaining > 1:
        middle = (low + high) // 2
        below = tl.load(sorted_ptr + middle * stride) <= values
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        remaining = (remaining + 1) // 2
    return low


@triton.jit
def query_range(seqs, lengths):
    """First token and number of tokens; index num_seqs stands for orphan tokens."""
    num_seqs, num_tokens = lengths.num_seqs, lengths.num_tokens
    if lengths.cu_seqlens_q is None:
        start = seqs * lengths.q_len_of_all
        stop = tl.where(seqs < num_seqs, start + lengths.q_len_of_all, num_tokens)
    else:
        start = tl.load(lengths.cu_seqlens_q + seqs, seqs <= num_seqs, other=0)
        stop = tl.load(lengths.cu_seqlens_q + seqs + 1, seqs < num_seqs, other=num_tokens)
    return start, tl.maximum(tl.minimum(stop, num_tokens) - start, 0)


@triton.jit
def key_range(seqs, lengths):
    """Origin in the storage (a table row, a batch row or a packed row) and number of keys."""
    owned = seqs < lengths.num_seqs
    max_len = lengths.max_len
    origin = seqs
    length = tl.where(owned, max_len, 0)
    if lengths.cu_seqlens_k is not None:
        origin = tl.minimum(
            tl.maximum(tl.load(lengths.cu_seqlens_k + seqs, owned, other=0), 0), max_len
        )
        end = tl.load(lengths.cu_seqlens_k + seqs + 1, owned, other=0)
        length = tl.minimum(end, max_len) - origin
    if lengths.seq_lens is not None:
        length = tl.load(lengths.seq_lens + seqs, owned, other=0)
    return origin, tl.minimum(tl.maximum(length, 0), max_len)


@triton.jit
def count_blocks(seqs, lengths, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many blocks sequences have."""
    _, q_len = query_range(seqs, lengths)
    return tl.where(seqs <= lengths.num_seqs, tl.cdiv(q_len * GROUP, BLOCK_M), 0)


@triton.jit
def cut_blocks(
    blocks,
    seqs_ptr,  # the first block of each sequence
    lengths,  # Lengths
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The rows of blocks and the tiles that they see, and whether they see any key."""
    seqs = last_not_above(seqs_ptr, 1, lengths.num_seqs + 1, blocks)
    q_start, q_len = query_range(seqs, lengths)
    origin, seq_len = key_range(seqs, lengths)
    num_rows = q_len * GROUP
    first_row = (blocks - tl.load(seqs_ptr + seqs)) * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    key_start, key_stop = seen_by_any(
        first_row // GROUP, last_row // GROUP, q_len, seq_len, window, CAUSAL
    )
    first_tile = key_start // BLOCK_N
    num_tiles = tl.cdiv(key_stop, BLOCK_N) - first_tile
    block = CutBlocks(origin, first_row, q_start, q_len, seq_len, first_tile, num_tiles)
    return block, key_stop > key_start


@triton.jit
def store_blocks(record, block, num_tiles, inside):
    """Write the fields of blocks, with other numbers of tiles."""
    tl.store(record, block.origin, inside)
    tl.store(record + 1, block.first_row, inside)
    tl.store(record + 2, block.q_start, inside)
    tl.store(record + 3, block.q_len, inside)
    tl.store(record + 4, block.seq_len, inside)
    tl.store(record + 5, block.first_tile, inside)
    tl.store(record + 6, num_tiles, inside)
