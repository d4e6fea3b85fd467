"""Engines on several processes: the tokens of one, and an error at once when a process ends.

ANABRANCH_TEST_RANKS lists the numbers of processes, 2 unless given; `make test-distributed` runs
with 2 and 4.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from test_distributed_models import SHAPES
from tiny_models import (
    GREEDY,
    as_on_gpu,
    blurred_source,
    called_graphs,
    outputs,
    pages,
    random_prompts,
    source,
)

import anabranch.llm.engine.ranks as engine_ranks
from anabranch.distributed import state_buffer
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.engine.ranks import RankLostError
from anabranch.llm.parallel import sharded_linear
from anabranch.llm.parallel.followers import Followers
from anabranch.llm.sampling.params import SamplingParams

THOROUGH = "ANABRANCH_TEST_RANKS" in os.environ
NUM_RANKS = [int(count) for count in os.environ.get("ANABRANCH_TEST_RANKS", "2").split(",")]
NGRAM = {"method": "ngram", "num_drafts": 2, "adaptive": False, "min_ngram": 1}
SIZES = {"kv_cache_gib": 0.02, "max_num_batched_tokens": 64, "max_num_seqs": 4, "page_size": 4}
PROMPTS = random_prompts(lengths=(3, 17, 33, 70))
# What neither 2 nor 4 ranks divide stays whole on each of them.
UNEVEN: dict[str, dict[str, Any]] = {
    "uneven heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    "uneven feed-forward": {"intermediate_size": 97, "num_key_value_heads": 4},
}
WAYS = ("tensor_parallel", "context_parallel")
each_way = pytest.mark.parametrize("way", WAYS)
each_count = pytest.mark.parametrize("num_ranks", NUM_RANKS)


@pytest.fixture(scope="module", autouse=True)
def _import_once() -> None:
    """Processes are forked from one that has imported what they need."""
    forkserver.set_forkserver_preload(["anabranch.llm.engine.llm"])
    forkserver.ensure_running()


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    llm = LLM(model, **{"device": "cpu", "speculative": NGRAM} | SIZES | options)
    try:
        yield llm
    finally:
        llm.close()


def tokens(model: str, prompts: Any = PROMPTS, params: Any = GREEDY, **options: Any) -> Any:
    with engine(model, **options) as llm:
        return outputs(llm, prompts, params)


@each_way
@each_count
def test_tokens_are_those_of_one_process(way: str, num_ranks: int) -> None:
    """Chunked prompts, mixed steps, prefixes, n-gram drafts, windows and sinks."""
    for name, change in (SHAPES | UNEVEN).items():
        model = source(**change)
        params = replace(GREEDY, max_tokens=10)
        assert tokens(model, params=params, **{way: num_ranks}) == tokens(model, params=params), (
            name
        )


@pytest.mark.parametrize("way", WAYS if THOROUGH else WAYS[:1])
@each_count
def test_smollm2(way: str, num_ranks: int) -> None:
    prompts = ["The river runs to the sea, and the river runs to the", "One, two, three,"]
    params = SamplingParams(temperature=0, max_tokens=12)
    given = {"kv_cache_gib": 0.05, "max_num_batched_tokens": 256, "page_size": 16}
    given["dtype"] = "float32"  # one rank alone would keep the file's formats
    expected = tokens("smollm2", prompts, params, **given)
    assert tokens("smollm2", prompts, params, **given, **{way: num_ranks}) == expected


def follow_as_on_gpu(ranks: Any, commands: Any, config: EngineConfig) -> None:
    """A rank whose steps have the shapes of graphs."""
    build = engine_ranks.build

    def build_with_graphs(*given: Any, **options: Any) -> Any:
        built = build(*given, **options)
        called_graphs(built)
        return built

    engine_ranks.build = build_with_graphs
    engine_ranks.follow_rank_0(ranks, commands, config)


@each_way
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_steps_in_flight(way: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded shapes of graphs, and tokens and drafts that only rank 0's device knows."""
    drafts: dict[str, Any] = {"method": method, "num_drafts": 2, "adaptive": False}
    if method == "draft":
        drafts["model"] = blurred_source()
    params = [
        replace(GREEDY, max_tokens=12),
        SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True),
    ] * 2
    expected = tokens(source(), params=params, speculative=None)
    monkeypatch.setattr(engine_ranks, "follow_rank_0", follow_as_on_gpu)
    with engine(source(), speculative=drafts, **{way: 2}) as llm:
        assert outputs(as_on_gpu(llm), PROMPTS, params) == expected
        assert llm.stats.num_graph_steps
        assert llm.stats.speculative.num_drafts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_way
def test_a_group_of_one(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path with a single rank; on a GPU, graphs hold its collectives."""
    ways: Any = (None, NGRAM)
    given: Any = {"device": device, "dtype": "float32", "page_size": 16}
    expected = [tokens(source(), **given, speculative=x) for x in ways]
    monkeypatch.setattr(engine_ranks, "uses_ranks", lambda config: True)
    monkeypatch.setattr(EngineConfig, "deals_context", property(lambda _: way == WAYS[1]))
    module, name = (
        (sharded_linear, "all_reduce") if way == WAYS[0] else (state_buffer, "all_gather")
    )
    collective, captured = getattr(module, name), list[bool]()

    def count(*given: Any) -> None:
        captured.append(device == "cuda" and torch.cuda.is_current_stream_capturing())
        collective(*given)

    monkeypatch.setattr(module, name, count)
    for speculative, right in zip(ways, expected, strict=True):
        with engine(source(), **given, speculative=speculative) as llm:
            assert outputs(llm, PROMPTS) == right
            assert (llm.stats.num_graph_steps > 0) == (device == "cuda")
    assert captured
    assert any(captured) == (device == "cuda")


def test_a_sequence_fills_the_memory_of_all_ranks() -> None:
    few: dict[str, Any] = {"kv_cache_gib": pages(4), "page_size": 16, "speculative": None}
    prompt = torch.arange(2, 92).tolist()
    with engine(source(), **few) as llm:
        assert llm.engine.limits.max_model_len == 64
    with engine(source(), **few, context_parallel=2) as llm:
        assert llm.engine.limits.max_model_len == 128
        found = outputs(llm, [prompt], replace(GREEDY, max_tokens=38))
    assert found == tokens(source(), [prompt], replace(GREEDY, max_tokens=38))


@each_way
def test_a_killed_rank_is_an_error(way: str) -> None:
    with engine(source(), speculative=None, **{way: 2}) as llm:
        answers = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=100))
        next(answers)
        os.kill(llm.engine.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 of the engine ended with exit code -9"):
            list(answers)
        with pytest.raises(RankLostError, match="rank 1"):
            llm.generate(PROMPTS[0])
    assert not dist.is_initialized()
    assert tokens(source(), **{way: 2})  # a later engine is not disturbed


def test_what_cannot_be_cut_is_refused() -> None:
    message = r"no layer of LlamaForCausalLM can be cut over 2 ranks: .* with 3 heads and 3 kv "
    shape = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    shape["intermediate_size"] = 97
    with pytest.raises(ValueError, match=message + r"heads; .*gate_proj with 97 outputs"):
        tokens(source(**shape), tensor_parallel=2)
    with pytest.raises(ValueError, match="max_num_batched_tokens 2 must be at least max_num_seqs"):
        tokens(source(), tensor_parallel=2, max_num_batched_tokens=2)
    assert not dist.is_initialized()


class Ending:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_rank_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match=r"rank [12] ended with exit code 3 before it joined"):
        Followers(3, print, Ending(), backend="gloo")
    assert not dist.is_initialized()


def test_one_group_a_process() -> None:
    with engine(source(), tensor_parallel=2), pytest.raises(ValueError, match="process group alr"):
        LLM(source(), device="cpu", tensor_parallel=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be an integer of at least 1, got 0"),
        ({"context_parallel": 1.5}, "context_parallel must be an integer of at least 1, got 1.5"),
        ({"tensor_parallel": True}, "tensor_parallel must be an integer of at least 1, got True"),
        (
            {"tensor_parallel": 2, "context_parallel": 4},
            "tensor_parallel 2 and context_parallel 4 cannot be combined",
        ),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "tensor_parallel 3 x context_parallel 1 needs 3 GPUs, torch sees 2"),
        ("cuda:1", "several ranks take GPUs from 0 on, got device 'cuda:1'"),
    ],
)
def test_more_ranks_than_gpus(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    count = 3 if device == "cuda" else 2
    with pytest.raises(ValueError, match=message):
        LLM(source(), device=device, tensor_parallel=count)
