"""Questions through an engine of this process, all in its continuous batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from anabranch.bench.engine.engine_options import release
from anabranch.bench.evaluate.backend import Advance, Continuation, Scored, choice_start

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.outputs import RequestOutput

AT_ONCE = 512  # requests given to the engine together; the logprobs of all their tokens are kept


class _Prompt(NamedTuple):
    ids: list[int]
    start: int  # where the choice begins


class EngineBackend:
    """An LLM that answers questions."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ValueError(f"{llm.engine.model_name} has no tokenizer: it cannot read questions")
        self._llm = llm
        self._num_truncated = 0

    @property
    def notes(self) -> list[str]:
        """What the engine did: whether a setting had an effect at all."""
        stats, config = self._llm.stats, self._llm.engine.config
        found = [f"{stats.num_steps} steps, {stats.num_graph_steps} of them by CUDA graphs"]
        if stats.num_cached_tokens:
            found.append(f"{stats.num_cached_tokens} prompt tokens reused")
        if config.speculative is not None:
            drafts = stats.speculative
            found.append(
                f"{drafts.num_draft_tokens} draft tokens, {drafts.num_accepted_tokens} accepted"
            )
        if self._num_truncated:
            found.append(f"{self._num_truncated} prompts longer than the context lost their head")
        return found

    def loglikelihoods(self, asked: Sequence[Scored], advance: Advance) -> list[list[float]]:
        """By the logprobs of prompt tokens; one more token is generated and not looked at."""
        from anabranch.engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts = list(chain.from_iterable(self._encoded(each) for each in asked))
        done, sums = 0, list[float]()
        for some in _cut(prompts):
            outputs = self._llm.generate(
                [prompt.ids for prompt in some],
                params,
                advance=lambda tokens, done=done: advance(done + tokens),
            )
            sums += [_sum(output, each.start) for output, each in zip(outputs, some, strict=True)]
            done += len(some)
        each_sum = iter(sums)
        return [[next(each_sum) for _ in each.continuations] for each in asked]

    def generate(
        self, prompts: Sequence[str], max_tokens: int, advance: Advance
    ) -> list[Continuation]:
        """Greedily."""
        from anabranch.engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        ids = [self._fitted(self._encode(prompt), max_tokens) for prompt in prompts]
        outputs = self._llm.generate(
            ids, params, advance=lambda tokens: advance(tokens // max_tokens)
        )
        firsts = [output.outputs[0] for output in outputs]
        return [Continuation(first.text, first.token_ids) for first in firsts]

    def close(self) -> None:
        """Free the engine's memory for the next one."""
        del self._llm
        release()

    def _encoded(self, asked: Scored) -> Iterator[_Prompt]:
        context = self._encode(asked.context)
        for continuation in asked.continuations:
            whole = self._encode(asked.context + continuation)
            start = choice_start(context, whole)
            kept = self._fitted(whole, 1)
            yield _Prompt(kept, max(start - (len(whole) - len(kept)), 1))

    def _encode(self, text: str) -> list[int]:
        return self._llm.tokenizer(text)["input_ids"]

    def _fitted(self, ids: list[int], max_tokens: int) -> list[int]:
        limit = self._llm.engine.limits.max_model_len - max_tokens
        if limit < 1:
            raise ValueError(f"--max-tokens {max_tokens} leaves no room for a question")
        if len(ids) <= limit:
            return ids
        self._num_truncated += 1
        return ids[-limit:]


def _cut(prompts: Sequence[_Prompt]) -> Iterator[Sequence[_Prompt]]:
    for start in range(0, len(prompts), AT_ONCE):
        yield prompts[start : start + AT_ONCE]


def _sum(output: RequestOutput, start: int) -> float:
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return sum(entry[token].logprob for token, entry in list(pairs)[start:] if entry)
