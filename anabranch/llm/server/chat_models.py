"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from anabranch.llm.server.protocol import (
    MAX_LOGPROBS,
    Count,
    PromptLogprobs,
    SamplingFields,
    StrictModel,
    Text,
    TokenOrigin,
    Usage,
    described,
)


class TextPart(StrictModel):
    """A piece of a message; images and sound are not supported."""

    type: Literal["text"] = described(..., "Only text is supported.", "text")
    text: Text = described(..., "Text of this part.", "Name three rivers.")


class Message(StrictModel):
    """One turn of a conversation. Fields that are null count as absent."""

    role: Literal["system", "developer", "user", "assistant"] = described(
        ..., "Who wrote the message. A developer is treated as a system.", "user"
    )
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] = described(
        ..., "The message, as text or as a list of text parts.", "Name three rivers."
    )
    name: Text | None = described(None, "The author's name, for templates that use it.", "Ada")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[Any, Any]", value)
        return {name: field for name, field in fields.items() if field is not None}

    @property
    def texts(self) -> list[str]:
        """The parts of the content."""
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content]

    def for_template(self) -> dict[str, str]:
        """As chat templates read it; a developer is a system to them."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": "".join(self.texts), **named}


class ChatRequest(SamplingFields):
    """A conversation that the model continues."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = described(
        ...,
        "The conversation so far, the oldest message first.",
        [{"role": "user", "content": "Name three rivers."}],
        min_length=1,
    )
    max_tokens: Count | None = described(
        None, "The longest answer, in tokens. Null is what the context allows.", 256, ge=1
    )
    max_completion_tokens: Count | None = described(
        None, "Another name of max_tokens; if both are given, they must be equal.", 256, ge=1
    )
    logprobs: bool | None = described(False, "Return the log probability of every token.", True)
    top_logprobs: int | None = described(
        0, "Likely tokens to return at each place. Needs logprobs.", 5, ge=0, le=MAX_LOGPROBS
    )
    response_format: dict[Text, Any] | None = described(
        None, "JSON formats are not supported; the only type is text.", {"type": "text"}
    )
    tools: list[Any] | None = described(
        None, "Tools are not supported; the list must be empty.", []
    )
    tool_choice: Text | dict[Text, Any] | None = described(
        None, "Tools are not supported; none and auto are accepted without effect.", "none"
    )
    add_generation_prompt: bool | None = described(
        True, "End the conversation with the start of an answer.", True
    )

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
    """An answer of the model, or what is new of it."""

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
