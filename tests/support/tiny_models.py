"""Tiny random models for tests of the engine, and engines that behave on a CPU as on a GPU."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from anabranch.llm.engine.attention_ways import decode_keys
from anabranch.llm.engine.build import Built
from anabranch.llm.engine.llm import LLM
from anabranch.llm.models import load_model, smollm2_directory
from anabranch.llm.runner.graphs import Graphs, PromptKey, graph_batches
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.speculative.adaptive import draft_numbers
from anabranch.llm.speculative.draft_chain import chain_keys

VOCAB, EOS = 97, 1
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits far enough apart that rounding does not reorder them
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, dims, bytes
_directory = tempfile.TemporaryDirectory()


def source(**changes: Any) -> str:
    """A model with random weights that are the same for the same shape."""
    return _source(json.dumps(SHAPE | changes, sort_keys=True))


@cache
def _source(config: str) -> str:
    path = Path(tempfile.mkdtemp(dir=_directory.name)) / "config.json"
    path.write_text(config)
    return f"dummy:{path}"


@cache
def blurred_source(blur: float = 0.1) -> str:
    """A directory with the same model but for noise in its weights: a draft that is often right."""
    model = load_model(source(), device="cpu").model
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.add_(torch.randn_like(weight), alpha=blur * weight.std().item())
    path = tempfile.mkdtemp(dir=_directory.name)
    model.save_pretrained(path)
    return path


def tiny(**options: Any) -> LLM:
    return LLM(source(), **{"device": "cpu"} | options)


def pages(count: int, page_bytes: int = PAGE_BYTES) -> float:
    """`kv_cache_gib` of so many pages."""
    return count * page_bytes / 2**30


@cache
def eager(model: str) -> Any:
    """transformers' own model with the weights of an engine's."""
    return load_model(model, device="cpu", attn_implementation="eager").model


def eager_logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] of what follows each token."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(1)


def outputs(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    """Tokens of every prompt; nothing may be held when all are answered."""
    found = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    assert_idle(llm)
    return found


def one_by_one(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    given = params if isinstance(params, list) else [params] * len(prompts)
    return [outputs(llm, [p], one)[0] for p, one in zip(prompts, given, strict=True)]


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_pages
    assert not engine._requests


def random_prompts(seed: int = 0, lengths: Sequence[int] = (1, 3, 15, 16, 17, 40, 70)) -> Any:
    """Prompts around the size of a page; every other repeats itself, for n-grams to be found."""
    draws = torch.Generator().manual_seed(seed)
    found = [torch.randint(2, VOCAB, (size,), generator=draws).tolist() for size in lengths]
    return [p if i % 2 else p[: max(len(p) // 3, 1)] * 3 for i, p in enumerate(found)]


class CalledGraphs(Graphs[Any]):
    """Shapes as of captured graphs, run by calling the model: padding without a GPU."""

    def capture(self, key: Any, forward: Callable[[], torch.Tensor]) -> None:
        self._graphs[key] = forward  # type: ignore[assignment]

    def replay(self, key: Any) -> torch.Tensor:
        return self._graphs[key]()  # type: ignore[operator]


def as_on_gpu(llm: LLM) -> LLM:
    """Steps in flight while the next is scheduled, and graphs of fixed shapes."""
    engine = llm.engine
    called_graphs(engine._launcher._built)
    engine._pipelined = engine._pads = True
    return llm


def called_graphs(built: Built) -> None:
    """Graphs of fixed shapes, and entries as on a GPU."""
    limits, chain = built.limits, built.draft
    batches = graph_batches(limits.max_num_seqs)
    built.runner.graphs = CalledGraphs()
    built.runner.capture(decode_keys(limits, built.runner.choice))
    built.runner.prompt_graphs = CalledGraphs()
    built.runner.capture_prompts([PromptKey(40), PromptKey(64)])
    runners = [built.runner]
    if chain is not None:
        chain.graphs = CalledGraphs()
        chain.capture(chain_keys(draft_numbers(limits.max_drafts)[1:], batches))
        runners.append(chain.runner)
    for runner in runners:
        runner._short = lambda layout: layout.short


@cache
def writing_source(vocab_size: int = 49152) -> str:
    """A directory of a tiny model with SmolLM2's tokenizer."""
    shape = {"vocab_size": vocab_size, "hidden_size": 32, "initializer_range": 0.5}
    path = Path(tempfile.mkdtemp(dir=_directory.name))
    load_model(source(**shape), device="cpu").model.save_pretrained(path)
    for file in smollm2_directory().iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, path)
    return str(path)
