"""LLM: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, cast

from anabranch.engine.config import EngineConfig, SpeculativeConfig
from anabranch.engine.engine import Engine
from anabranch.engine.outputs import RequestOutput
from anabranch.engine.prompts import Prompt
from anabranch.engine.runner import Progress
from anabranch.engine.sampling_params import SamplingParams
from anabranch.engine.stats import EngineStats

Advance = Callable[[int], None]  # output tokens so far


class LLM:
    """A model that answers prompts, all of them at once.

    Options are those of `EngineConfig`; `speculative` may be a `SpeculativeConfig` or its options
    as a dictionary.
    """

    def __init__(
        self, model: str = "smollm2", *, progress: Progress | None = None, **options: Any
    ) -> None:
        speculative = options.get("speculative")
        if isinstance(speculative, dict):
            options["speculative"] = SpeculativeConfig(**cast("dict[str, Any]", speculative))
        self.engine = Engine(EngineConfig(model=model, **options), progress)
        self._numbers = count()

    @property
    def tokenizer(self) -> Any:
        """Of the model, or None."""
        return self.engine.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counts and times since the start."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        advance: Advance | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs in the order of the prompts.

        If one prompt is refused, none is run.
        """
        given = _listed(prompts)
        ids = self._add(given, _matched(params, len(given)))
        done: dict[str, RequestOutput] = {}
        start = self.stats.num_output_tokens
        while self.engine.has_work:
            for request in self.engine.step():
                if request.finished:
                    done[request.request_id] = request.output()
            if advance:
                advance(self.stats.num_output_tokens - start)
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt; an output whenever there is something new."""
        (request_id,) = self._add([prompt], [params or SamplingParams()])
        try:
            while self.engine.has_work:
                for request in self.engine.step():
                    if request.request_id == request_id:
                        yield request.output()
        finally:
            self.engine.abort(request_id)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation by the model's chat template."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError(f"{self.engine.model_name} has no chat template")
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return cast("list[int]", ids)

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        ids: list[str] = []
        try:
            for prompt, options in zip(prompts, params, strict=True):
                request_id = f"{next(self._numbers)}"
                self.engine.add_request(request_id, prompt, options)
                ids.append(request_id)
        except Exception:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return ids


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _matched(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts but {len(params)} sampling params")
    return list(params)
