"""Moving the rows of accepted nodes within a cache: every layer's keys and values in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

BLOCK: tl.constexpr = tl.constexpr(256)  # words of a row that one program moves
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes


def move_rows(
    stores: torch.Tensor,  # int64 [num_stores, 2]: address, words of a row
    longest: int,  # row, in words
    word_bytes: int,
    slots: torch.Tensor,  # int64 [num_seqs, width]
    path: torch.Tensor,  # int64 [num_seqs, width], ascending
    num_accepted: torch.Tensor,  # int64 [num_seqs]
) -> None:
    """Copy the row of each accepted node to the slot of its depth."""
    num_seqs, width = slots.shape
    pieces = triton.cdiv(longest, BLOCK.value)
    given = stores, slots.contiguous(), path.contiguous(), num_accepted, pieces, width
    grid = stores.shape[0] * pieces, num_seqs
    launch(move_rows_kernel, grid, *given, WORD=WORDS[word_bytes], num_warps=4)


@triton.jit(do_not_specialize=["pieces", "width"])
def move_rows_kernel(
    stores_ptr,  # [num_stores, 2]
    slots_ptr,  # [num_seqs, width]
    path_ptr,  # [num_seqs, width]
    num_accepted_ptr,  # [num_seqs]
    pieces,  # of the longest row
    width,
    WORD: tl.constexpr,  # of equal size in all stores
):
    """A piece of one store's rows, from the smallest depth on: a node never lies before its depth.

    Every word is moved by one thread, so a row is read before a later depth overwrites it.
    """
    store, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    seq = tl.program_id(1).to(tl.int64)
    rows_ptr = tl.load(stores_ptr + 2 * store).to(tl.pointer_type(WORD))
    row_words = tl.load(stores_ptr + 2 * store + 1)
    offsets = piece * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < row_words
    for depth in range(1, tl.load(num_accepted_ptr + seq) + 1):
        node = tl.load(path_ptr + seq * width + depth)
        if node != depth:
            source = tl.load(slots_ptr + seq * width + node) * row_words
            target = tl.load(slots_ptr + seq * width + depth) * row_words
            row = tl.load(rows_ptr + source + offsets, inside)
            tl.store(rows_ptr + target + offsets, row, inside)
