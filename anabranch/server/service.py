"""All that the endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from anabranch.server.engine_process import EngineProcess
from anabranch.server.errors import ApiError
from anabranch.server.limits import Admission, ServerLimits
from anabranch.server.metrics import Metrics
from anabranch.server.prompts import Encoder
from anabranch.server.token_texts import TokenTexts


@dataclass(frozen=True, slots=True)
class Service:
    """A model, under the name it is served by."""

    engine: EngineProcess
    model_name: str
    limits: ServerLimits
    admission: Admission
    encoder: Encoder
    texts: TokenTexts
    metrics: Metrics
    created: int  # seconds since 1970

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here; the model is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )


def make_service(
    engine: EngineProcess, *, limits: ServerLimits, model_name: str | None, created: int
) -> Service:
    """Of an engine that is ready."""
    info = engine.info
    name = model_name or info.model_name
    return Service(
        engine=engine,
        model_name=name,
        limits=limits,
        admission=Admission(info.max_num_seqs + limits.max_queue),
        encoder=Encoder(
            info.tokenizer,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_prompt_tokens=limits.max_prompt_tokens or info.max_model_len,
        ),
        texts=TokenTexts(info.tokenizer),
        metrics=Metrics(name, engine),
        created=created,
    )


def service_of(request: Request) -> Service:
    """Of the app that a request came to."""
    return cast("Service", request.app.state.service)
