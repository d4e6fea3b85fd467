"""Random numbers that are a function of a seed, a position and a stream.

There is no generator state: a request draws the same numbers whatever else is in its batch, and
again after a preemption. All three are known on the host, so the numbers are made there.
"""

from __future__ import annotations

import secrets

import numpy as np

from anabranch.engine.sample_transfer import Array

DRAW, ACCEPT, DRAFT = 1, 2, 3  # streams: a token, whether a draft is accepted, a draft token

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


def uniforms(seeds: Array, positions: Array, stream: int) -> Array:
    """One float64 in [0, 1) for each int64 seed and position, with 53 random bits."""
    keys = _mix(seeds.view(np.uint64) + np.uint64(_STEP * stream % _WORD))
    bits = _mix(keys + positions.view(np.uint64) * np.uint64(_STEP))
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(words: Array) -> Array:
    """Splitmix64's finaliser; the products wrap around."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_MIX_A)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_MIX_B)
    return words ^ words >> np.uint64(31)
