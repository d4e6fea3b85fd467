"""LLM: prompts in, texts out.

Threads may share one engine: one of them steps it for all, the others wait for their results. The
thread that steps goes on until its own requests are done, then another takes over: a thread that
runs kernels has a team of threads of its own, so they do not change with every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from anabranch.llm.engine.admission import Prompt, message_text
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.engine import Engine
from anabranch.llm.engine.request import Request, RequestOutput
from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.runner.model_runner import Progress
from anabranch.llm.sampling.params import SamplingParams

Conversation = Sequence[dict[str, Any]]  # messages with a role and a content
Advance = Callable[[int], None]  # output tokens so far


class Turns:
    """Who may use an engine now. A thread may ask again while it steps, as a callback may."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # held during a step, and by whoever is between steps
        self._counting = threading.Lock()
        self._entering = 0  # threads that go before the next step
        self._stepping: int | None = None  # the thread that steps for all
        self._num_steps = 0

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """Have the engine alone, before its next step."""
        with self._counting:
            self._entering += 1
        with self._changed:
            with self._counting:
                self._entering -= 1
            try:
                yield
            finally:
                self._changed.notify_all()

    def run(
        self,
        step: Callable[[], object],
        done: Callable[[], bool],
        advance: Callable[[], object] | None = None,
    ) -> None:
        """Let the engine step until `done`, by this thread or another; `advance` after each step.

        An error of a step is raised in the thread that ran it; the next one tries again.
        """
        me = threading.get_ident()
        is_outer = self._stepping != me
        try:
            while not done():
                self._run_once(step, done, me)
                if advance is not None:
                    advance()
        finally:
            if is_outer:
                self._leave(me)

    def _run_once(self, step: Callable[[], object], done: Callable[[], bool], me: int) -> None:
        """Step, or wait until another thread has."""
        with self._changed:
            seen = self._num_steps
            self._changed.wait_for(lambda: done() or self._num_steps != seen or self._is_free(me))
            if done() or not self._is_free(me):
                return
            self._stepping = me
            step()
            self._num_steps += 1
            self._changed.notify_all()

    def _is_free(self, me: int) -> bool:
        return self._stepping in (None, me) and not self._entering

    def _leave(self, me: int) -> None:
        with self._changed:
            if self._stepping == me:
                self._stepping = None
            self._changed.notify_all()


class LLM:
    """A model that answers prompts, all of them at once.

    Options are those of `EngineConfig`; `speculative` may be a `SpeculativeConfig`, its options
    as a dictionary, or the name of a method alone ("ngram", or "off"). Threads may share an LLM:
    their prompts join the same batches.
    """

    def __init__(
        self, model: str = "smollm2", *, progress: Progress | None = None, **options: Any
    ) -> None:
        self.engine = Engine(EngineConfig(model=model, **options), progress)
        self._numbers = count()
        self._turns = Turns()

    @property
    def tokenizer(self) -> Any:
        """Of the model, or None."""
        return self.engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What is used where no params are given, by the model's generation_config.json."""
        return SamplingParams(**self.engine.sampling_defaults)

    @property
    def stats(self) -> EngineStats:
        """Counts and times since the start."""
        return self.engine.stats

    def close(self) -> None:
        """End the processes of other ranks; where there are any, no prompt can be answered then."""
        self.engine.ranks.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        advance: Advance | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs in the order of the prompts.

        If one prompt is refused, none is run. `advance` is called with the number of output tokens
        of all prompts, after each step.
        """
        given = _listed(prompts)
        requests = self._add(given, _matched(params, len(given), self.default_params))
        open_requests = list(requests)

        def done() -> bool:
            while open_requests and open_requests[-1].finished:
                open_requests.pop()
            return not open_requests

        def report() -> None:
            if advance is not None:
                advance(sum(request.num_output for request in requests))

        try:
            self._turns.run(self.engine.step, done, report)
        finally:
            self._end(requests)
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt; an output whenever there is something new."""
        (request,) = self._add([prompt], [params or self.default_params])
        num_seen = 0
        try:
            while num_seen < request.num_output or not request.finished:
                if num_seen < request.num_output:  # by this loop's step or another's
                    with self._turns.between_steps():
                        num_seen, output = request.num_output, request.output()
                    yield output
                else:
                    self._turns.run(
                        self.engine.step,
                        lambda seen=num_seen: request.finished or seen < request.num_output,
                    )
        finally:
            self._end([request])

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        advance: Advance | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        With `continue_final_message`, the answer goes on from the last message.
        """
        given = cast("Sequence[Any]", messages)
        several = [given] if given and isinstance(given[0], dict) else given
        options: dict[str, Any] = dict(chat_template_kwargs or {})
        if tools is not None:
            options["tools"] = list(tools)
        if continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        prompts = [self.chat_prompt(each, **options) for each in several]
        return self.generate(prompts, params, advance=advance)

    def chat_prompt(self, messages: Conversation, **options: Any) -> list[int]:
        """Tokens of a conversation by the model's chat template, which sees the options.

        The content of a message is text, or a list of parts `{"type": "text", "text": ...}`.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError(f"{self.engine.model_name} has no chat template")
        plain = [dict(message) | {"content": message_text(message)} for message in messages]
        given: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False} | options
        with self._turns.between_steps():
            return cast("list[int]", self.tokenizer.apply_chat_template(plain, **given))

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        requests: list[Request] = []
        grammars = [self.engine.compile_grammar(each) for each in params]  # beside others' steps
        try:
            with self._turns.between_steps():
                for given in zip(prompts, params, grammars, strict=True):
                    requests.append(self.engine.add_request(f"{next(self._numbers)}", *given))
        except Exception:
            self._end(requests)
            raise
        return requests

    def _end(self, requests: Sequence[Request]) -> None:
        with self._turns.between_steps():
            for request in requests:
                self.engine.abort(request.request_id)
            if not (self.engine.num_running or self.engine.num_waiting):
                self.engine.step()  # takes in what is in flight


def _listed(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [cast("Prompt", prompts)]  # one, or what will be refused as one
    listed = list(cast("Sequence[Any]", prompts))
    return [listed] if listed and isinstance(listed[0], int) else listed


def _matched(params: Any, num_prompts: int, default: SamplingParams) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * num_prompts
    if not isinstance(params, Sequence):
        raise ValueError(f"params must be SamplingParams or a list of them, got {params!r:.80}")
    listed = list(cast("Sequence[Any]", params))
    if len(listed) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts but {len(listed)} sampling params")
    return listed
