"""Randomness of sampling: noise that is a function of a seed, a position and a token.

A token is drawn by adding Gumbel noise to the logarithms of the weights and taking the largest.
There is no generator state: a request gets the same noise whatever else is in its batch, and again
after a preemption. Rounding of the logits changes a draw only where two sums are nearly equal. A
draft model that gets the same noise draws the target's token as often as their weights agree.
"""

from __future__ import annotations

import secrets

import numpy as np
from torch import Tensor

from anabranch.llm.sampling.transfer import Array

_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15  # splitmix64
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n > 1; sample 0 keeps the request's own."""
    if index == 0:
        return seed
    word = (seed + index * _MIX_A) % _WORD
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        word = (word ^ word >> shift) * factor % _WORD
    return (word ^ word >> 31) >> 1


def noise_keys(seeds: Array, positions: Array) -> Array:
    """The 64 bits, as int64, that the noise of each int64 seed and position is made from."""
    mixed = _mix(seeds.view(np.uint64) + np.uint64(_STEP))
    return _mix(mixed + positions.view(np.uint64) * np.uint64(_STEP)).view(np.int64)


def draw(log_weights: Tensor, keys: Tensor) -> Tensor:
    """A token [rows] for float32 logarithms [rows, vocab] and `keys` [rows]; never one of -inf.

    A row of -inf gives token 0.
    """
    if log_weights.is_cuda:
        from anabranch.kernels.triton.gumbel_argmax import gumbel_argmax
    else:
        from anabranch.kernels.cpu.gumbel_argmax import gumbel_argmax
    return gumbel_argmax(log_weights, keys)


def _mix(words: Array) -> Array:
    """Splitmix64's finaliser; the products wrap around."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_MIX_A)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_MIX_B)
    return words ^ words >> np.uint64(31)
