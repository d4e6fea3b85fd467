"""Banning tokens by masks of a bit each: a program reads the words of one tile of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

BLOCK = 4096  # tokens of a tile


def mask_tokens(
    scores: torch.Tensor,  # float32 [num_rows, vocab], rows contiguous
    rows: torch.Tensor,  # int64 [num_masked]
    words: torch.Tensor,  # int32 [num_masked, ceil(vocab / 32)], contiguous
) -> None:
    """Set scores to -inf, in these rows, where a token's bit is 0."""
    vocab_size = scores.shape[1]
    launch(
        mask_tokens_kernel,
        (len(rows), triton.cdiv(vocab_size, BLOCK)),
        scores,
        scores.stride(0),
        rows,
        words,
        words.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "words_ptr"])
def mask_tokens_kernel(
    scores_ptr,  # float32 [num_rows, vocab]
    scores_stride,  # of a row
    rows_ptr,  # int64 [num_masked]
    words_ptr,  # int32 [num_masked, ceil(vocab / 32)]
    words_stride,  # of a mask
    vocab_size,
    BLOCK: tl.constexpr,
):
    place, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(words_ptr + place * words_stride + (tokens >> 5), inside, other=-1)
    is_banned = inside & (((words >> (tokens & 31)) & 1) == 0)
    banned = tl.full([BLOCK], -float("inf"), tl.float32)
    tl.store(scores_ptr + row * scores_stride + tokens, banned, is_banned)
