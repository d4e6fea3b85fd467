"""How long a call takes: CUDA-graph replay, a loop on the host, medians and spreads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from anabranch.llm.bench.workload import synchronize
from attention_bench.implementations import Call

SAMPLE_US = 2000.0  # a sample lasts about this long, so that starting it does not count
MAX_CALLS = 2000  # in a sample
NUM_SAMPLES = 9


class Timing(NamedTuple):
    """Microseconds a call, median, and the distance between the outer deciles relative to it."""

    us: float
    spread: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        middle = median(samples)
        deciles = quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples
        return Timing(middle, (deciles[-1] - deciles[0]) / middle)


def time_loop(calls: Sequence[Call], device: torch.device) -> Timing:
    """Calls from Python, one after another: the slower of host and device."""
    _loop_us(calls[:3], device)
    count = _num_calls(_loop_us(calls[:3], device))
    sample = list(islice(cycle(calls), count))
    return Timing.of([_loop_us(sample, device) for _ in range(NUM_SAMPLES)])


def _loop_us(calls: Sequence[Call], device: torch.device) -> float:
    """Microseconds a call, from the host's first to the device's last."""
    synchronize(device)
    start = time.perf_counter()
    for call in calls:
        call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e6 / len(calls)


def _num_calls(call_us: float) -> int:
    return max(1, min(MAX_CALLS, round(SAMPLE_US / max(call_us, 1e-3))))


def time_graph(calls: Sequence[Call], device: torch.device) -> tuple[Timing, Any]:
    """Calls replayed in a CUDA graph, and what the first of them leaves there.

    A graph of one round gives the number of rounds that a sample needs; an eager call would not
    where the host is slower than the device.
    """
    _loop_us(calls[:3], device)  # compiles, allocates and tunes outside the capture
    graph, outputs = _capture(calls, 1)
    call_us = min(event_us([graph.replay] * 3)) / len(calls)
    rounds = max(1, _num_calls(call_us) // len(calls))
    if rounds > 1:
        graph, outputs = _capture(calls, rounds)
        graph.replay()
    samples = event_us([graph.replay] * NUM_SAMPLES)
    return Timing.of([sample / (rounds * len(calls)) for sample in samples]), outputs[0]


def _capture(calls: Sequence[Call], rounds: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Every rotation keeps its output until its next turn: outputs leave the cache like inputs."""
    outputs: list[Any] = [None] * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for rotation, call in enumerate(calls):
                outputs[rotation] = call()
    return graph, outputs


def event_us(calls: Sequence[Call]) -> list[float]:
    """Device time of each call. The host runs ahead, so that only the first waits for a launch."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(stop) * 1000 for start, stop in pairwise(events)]
