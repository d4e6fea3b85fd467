"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from anabranch.server.protocol import (
    MAX_LOGPROBS,
    Count,
    PromptLogprobs,
    SamplingFields,
    Text,
    Texts,
    TokenIds,
    TokenOrigin,
    Usage,
)

Prompts = Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """One prompt or several, as text or as token ids."""

    prompt: Prompts
    max_tokens: Count | None = Field(16, description="0 only with echo, to score a prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="The prompt comes back ahead of its completion.")
    best_of: int | None = Field(None, ge=1, description="Only equal to n.")
    suffix: Text | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Of prompts given as text.")


class CompletionLogprobs(BaseModel):
    """Of every token of a choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A continuation of a prompt, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    token_origins: list[TokenOrigin] | None = None


class Completion(BaseModel):
    """A response, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
