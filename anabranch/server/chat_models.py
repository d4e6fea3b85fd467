"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from anabranch.server.protocol import (
    MAX_LOGPROBS,
    Count,
    PromptLogprobs,
    SamplingFields,
    StrictModel,
    Text,
    TokenOrigin,
    Usage,
)


class TextPart(StrictModel):
    """A piece of a message; images and sound are not supported."""

    type: Literal["text"]
    text: Text


class Message(StrictModel):
    """One turn of a conversation. Fields that are null count as absent."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[Any, Any]", value)
        return {name: field for name, field in fields.items() if field is not None}

    def for_template(self) -> dict[str, str]:
        """As chat templates read it; a developer is a system to them."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


class ResponseFormat(StrictModel):
    """Only plain text."""

    type: Literal["text"]


class ChatRequest(SamplingFields):
    """A conversation that the model goes on with."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = Field(None, description="Only plain text.")
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    tool_choice: Literal["none"] | None = Field(None, description="Tools are not supported.")
    add_generation_prompt: bool | None = Field(None, description="True unless given.")

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives at each token, or None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(BaseModel):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token of a choice, and likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of every token of a choice."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """What the model said, or what is new of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class _ChatChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    token_origins: list[TokenOrigin] | None = None


class ChatChoice(_ChatChoice):
    """An answer."""

    message: AssistantMessage


class ChatChunkChoice(_ChatChoice):
    """What is new of an answer."""

    delta: AssistantMessage


class ChatCompletion(BaseModel):
    """A response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
