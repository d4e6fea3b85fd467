"""What the engine's benchmarks share: prompts of random tokens, and a device that is free."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from anabranch.llm.sampling.params import SamplingParams

LOWEST_TOKEN = 10  # below are control tokens, of most vocabularies


class Workload(NamedTuple):
    """Prompts, and how many tokens follow each."""

    prompts: list[list[int]]
    output_lens: list[int]


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    """Answers of this length, whatever the tokens are."""
    from anabranch.llm.sampling.params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **more)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of one length that share nothing."""
    return random_workload(count, length, 1, vocab_size, seed=seed).prompts


def random_workload(
    count: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    *,
    range_ratio: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Lengths are drawn from (1 - range_ratio) to (1 + range_ratio) times those given."""
    rng = np.random.default_rng(seed)
    low = min(LOWEST_TOKEN, vocab_size - 1)
    prompts = [
        rng.integers(low, vocab_size, size).tolist()
        for size in _lengths(rng, count, input_len, range_ratio)
    ]
    return Workload(prompts, _lengths(rng, count, output_len, range_ratio))


def _lengths(rng: np.random.Generator, count: int, length: int, ratio: float) -> list[int]:
    low, high = round(length * (1 - ratio)), round(length * (1 + ratio))
    return rng.integers(max(low, 1), max(high, 1) + 1, count).tolist()


def release_memory() -> None:
    """Free the memory of a model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
