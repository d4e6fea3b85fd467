"""Drawing one token a row by Gumbel noise: each program hashes and searches a tile of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

BLOCK = 2048  # tokens of a tile: enough tiles to fill a GPU with a single row of 100k tokens

WEYL = tl.constexpr(0x9E3779B1)  # tokens start this far apart
MIX_A = tl.constexpr(0x21F0AAAD)  # odd factors of a mixer of 32 bits with low bias
MIX_B = tl.constexpr(0xD35A2D97)
LARGEST = tl.constexpr(0xFFFFFF00)  # the largest word that is below 2^32 as a float32


def gumbel_argmax(
    log_weights: torch.Tensor,  # float32 [num_rows, vocab], rows contiguous
    keys: torch.Tensor,  # int64 [num_rows]
) -> torch.Tensor:
    """The first token of each row at which the logarithm plus its noise is largest."""
    num_rows, vocab_size = log_weights.shape
    num_tiles = triton.cdiv(vocab_size, BLOCK)
    peaks = log_weights.new_empty(num_rows, num_tiles)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=log_weights.device)
    launch(
        gumbel_argmax_kernel,
        (num_rows, num_tiles),
        log_weights,
        log_weights.stride(0),
        keys,
        peaks,
        tokens,
        vocab_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return tokens.gather(1, peaks.argmax(1, keepdim=True)).squeeze(1)


@triton.jit
def gumbels(key, tokens):
    """Standard Gumbel noise of these tokens, a function of the key's 64 bits."""
    bits = tokens.to(tl.uint32) * WEYL + key.to(tl.uint32)
    bits ^= bits >> 16
    bits *= MIX_A
    bits ^= bits >> 15
    bits += (key >> 32).to(tl.uint32)
    bits *= MIX_B
    bits ^= bits >> 15
    u = tl.minimum(bits | 1, LARGEST).to(tl.float32) * (1.0 / 4294967296.0)
    # -log(1 - u), by its series where 1 - u would lose the bits of a small u
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5)))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit(do_not_specialize_on_alignment=["keys_ptr"])
def gumbel_argmax_kernel(
    logs_ptr,  # float32 [num_rows, vocab]
    logs_stride,  # of a row
    keys_ptr,  # int64 [num_rows]
    peaks_ptr,  # float32 [num_rows, num_tiles]
    tokens_ptr,  # int64 [num_rows, num_tiles]
    vocab_size,  # a property of the model; multiples of 16 are loaded 16 bytes at a time
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    logs = tl.load(logs_ptr + row * logs_stride + tokens, tokens < vocab_size, other=-float("inf"))
    noisy = logs + gumbels(tl.load(keys_ptr + row), tokens)
    place = row * tl.num_programs(1) + tile
    tl.store(peaks_ptr + place, tl.max(noisy, 0))
    tl.store(tokens_ptr + place, (tile * BLOCK + tl.argmax(noisy, 0)).to(tl.int64))
