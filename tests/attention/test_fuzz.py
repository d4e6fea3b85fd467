"""The fuzzer of attend(): what it draws, and that it finds what is wrong."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch import AttentionState, DenseKV, attend
from anabranch.kernels.hopper_config import HEAD_DIMS
from anabranch.keys import KeySource

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import fuzz
import fuzzed_calls

LATE = time.time() + 1e6


def run(seeds: list[int]) -> dict[str, Any]:
    """What the fuzzer reports of the CPU's producer."""
    records = {each["seed"]: each for each in fuzz.run_seeds("torch", seeds, "cpu", LATE)}
    return fuzz.summarise([*records.values()])


def test_calls_are_right_and_counted_by_kind() -> None:
    summary = run(fuzz.call_seeds(3, 8, 4))
    assert summary["calls"] == 8
    assert [*summary["kinds"].values()] == [2] * 4
    assert not summary["failures"]
    assert 0 < summary["largest_error"] <= 1


def test_a_wrong_call_is_found_and_its_seed_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that reads a key beyond the end meets the poison there."""

    def read_on(q: Any, keys: KeySource, **given: Any) -> AttentionState:
        if isinstance(keys, DenseKV):
            keys = replace(keys, seq_lens=keys.seq_lens + 1)
        return attend(q, keys, **given)

    monkeypatch.setattr(fuzz, "attend", read_on)
    seeds = fuzz.call_seeds(0, 14, 14)
    dense = [
        seed
        for seed in seeds
        if fuzzed_calls.draw_kind("torch", fuzz.kind_of(seed), "cpu").case.source == "dense"
    ]
    failures = run(seeds)["failures"]
    assert [each["seed"] for each in failures] == dense != []
    (alone,) = run(dense[:1])["failures"]
    assert alone == failures[0]


def test_what_lies_beside_out_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_on(*args: Any, out: AttentionState | None, **given: Any) -> AttentionState:
        state = attend(*args, out=out, **given)
        if out is not None:
            next_column = out.out.storage_offset() + out.out.shape[-1]
            out.out.as_strided(out.lse.shape, out.out.stride()[:2], next_column).fill_(1.0)
        return state

    monkeypatch.setattr(fuzz, "attend", write_on)
    seeds = [seed for seed in range(12) if drawn("torch", seed, "cpu").destination != "new"]
    failures = run(seeds)["failures"]
    assert [each["seed"] for each in failures] == seeds != []
    assert {each["failure"] for each in failures} == {
        "AssertionError: memory beside out was written"
    }


def drawn(impl: str, seed: int, device: str = "cuda") -> fuzzed_calls.FuzzedCall:
    return fuzzed_calls.draw_call(fuzzed_calls.draw_kind(impl, fuzz.kind_of(seed), device), seed)


@pytest.mark.parametrize("impl", fuzzed_calls.IMPLS)
def test_what_is_drawn(impl: str) -> None:
    calls = [drawn(impl, seed) for seed in fuzz.call_seeds(0, 240, 24)]
    assert len({call.kind for call in calls}) == 24
    lens = [len_ for call in calls for len_ in (*call.case.q_lens, *call.case.k_lens)]
    assert 0 in lens and 1 in lens and max(lens) > 3000
    replays = [(call.case, replay) for call in calls for replay in call.replays]
    assert replays
    for case, (q_lens, k_lens) in replays:
        assert sum(q_lens) <= sum(case.q_lens)
        assert all(new <= old for new, old in zip(k_lens, case.k_lens, strict=True))
    if impl == "gluon":
        cases = [call.case for call in calls]
        assert {case.dims for case in cases} == {*HEAD_DIMS}
        assert {case.page_size for case in cases} == {16, 32, 64, 128, 256}
        assert {case.source for case in cases} >= {"dense", "ragged", "paged"}
