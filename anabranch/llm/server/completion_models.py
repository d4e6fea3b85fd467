"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from anabranch.llm.server.openai_fields import (
    MAX_LOGPROBS,
    Count,
    PromptLogprobs,
    SamplingFields,
    Text,
    Texts,
    TokenIds,
    TokenOrigin,
    Usage,
    described,
)
from anabranch.llm.server.response_formats import FormFields

Prompts = Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields, FormFields):
    """One prompt or several, as text or as token ids."""

    prompt: Prompts = described(
        ...,
        "One prompt or a list of prompts, each as text or as token ids.",
        "The longest river is",
    )
    max_tokens: Count | None = described(
        16,
        "The longest completion, in tokens. Null is what the context allows; 0 needs echo, to "
        "score a prompt.",
        256,
    )
    max_completion_tokens: Count | None = described(
        None, "Another name of max_tokens; if both are given, they must be equal.", 256
    )
    logprobs: int | None = described(
        None, "Likely tokens to return at each place.", 5, ge=0, le=MAX_LOGPROBS
    )
    echo: bool | None = described(False, "Return the prompt ahead of its completion.", True)
    best_of: int | None = described(None, "Supported only where it equals n.", 1, ge=1)
    suffix: Text | None = described(None, "Not supported.", None)
    parallel_tool_calls: bool | None = described(
        None, "Accepted without effect: completions call no tools.", False
    )
    reasoning_effort: Text | None = described(None, "Accepted without effect.", "low")
    add_special_tokens: bool | None = described(
        True, "Add the tokenizer's special tokens to prompts given as text.", True
    )

    @model_validator(mode="after")
    def _take_other_name(self) -> CompletionRequest:
        other = self.max_completion_tokens
        if other is not None:
            if "max_tokens" in self.model_fields_set and self.max_tokens != other:
                raise ValueError(
                    f"max_tokens {self.max_tokens} and max_completion_tokens {other} differ; "
                    "give one"
                )
            self.max_tokens = other
        return self


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
