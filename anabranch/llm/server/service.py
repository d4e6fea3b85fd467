"""All that the endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from anabranch.llm.server.answer_forms import AnswerForms, make_answer_forms
from anabranch.llm.server.errors import ApiError
from anabranch.llm.server.messages import ServedEngine
from anabranch.llm.server.metrics import Metrics
from anabranch.llm.server.server_limits import (
    EncodingThreads,
    OpenRequests,
    SequenceQuota,
    ServerLimits,
    WritingThread,
)
from anabranch.llm.server.token_texts import PromptEncoder, TokenTexts


@dataclass(frozen=True, slots=True)
class Service:
    """A model, under the name it is served by."""

    engine: ServedEngine
    model_name: str
    limits: ServerLimits
    admission: SequenceQuota
    open_requests: OpenRequests
    encoder: PromptEncoder
    encoding: EncodingThreads
    writing: WritingThread
    texts: TokenTexts
    metrics: Metrics
    forms: AnswerForms
    created: int  # seconds since 1970

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here; the model is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_engine(self) -> None:
        """Raise a 503 while the engine does not answer."""
        if (trouble := self.engine.trouble) is not None:
            raise ApiError(503, trouble, code="engine_failed")


def make_service(
    engine: ServedEngine,
    *,
    limits: ServerLimits,
    model_name: str | None,
    created: int,
    tool_format: str = "auto",
    reasoning: bool = True,
) -> Service:
    """A service of an engine that is ready; without `reasoning`, it stays in answers' text."""
    info = engine.info
    name = model_name or info.model_name
    return Service(
        engine=engine,
        model_name=name,
        limits=limits,
        admission=SequenceQuota(info.max_num_seqs + limits.max_queue),
        open_requests=OpenRequests(limits.max_request_seconds),
        encoder=PromptEncoder(
            info.tokenizer,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_prompt_tokens=limits.max_prompt_tokens or info.max_model_len,
        ),
        encoding=EncodingThreads(),
        writing=WritingThread(),
        texts=TokenTexts(info.tokenizer),
        metrics=Metrics(name, engine),
        forms=make_answer_forms(info.tokenizer, tool_format, reasoning),
        created=created,
    )


def service_of(request: Request) -> Service:
    return cast("Service", request.app.state.service)
