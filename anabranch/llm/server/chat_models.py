"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from anabranch.llm.server.openai_fields import (
    MAX_LOGPROBS,
    Count,
    PromptLogprobs,
    SamplingFields,
    StrictModel,
    Text,
    TokenOrigin,
    Usage,
    described,
    without_nulls,
)
from anabranch.llm.server.response_formats import FormFields
from anabranch.llm.server.tool_models import MAX_TOOLS, PastCall, Tool, ToolCall, ToolChoice


class TextPart(StrictModel):
    """A piece of a message; images and sound are not supported."""

    type: Literal["text"] = described(..., "Only text is supported.", "text")
    text: Text = described(..., "Text of this part.", "Name three rivers.")


# What clients keep with an answer's message, and send back with it.
_KEPT_BY_CLIENTS = ("provider_specific_fields", "thinking_blocks", "annotations", "images")


class Message(StrictModel):
    """One turn of a conversation. Fields that are null count as absent."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = described(
        ..., "Who wrote the message. A developer is treated as a system.", "user"
    )
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] = described(
        ..., "The message, as text or as a list of text parts.", "Name three rivers."
    )
    name: Text | None = described(None, "The author's name, for templates that use it.", "Ada")
    tool_calls: Annotated[list[PastCall], Field(fail_fast=True)] | None = described(
        None,
        "Calls that the assistant made.",
        [{"id": "call_1", "function": {"name": "f", "arguments": "{}"}}],
    )
    tool_call_id: Text | None = described(None, "Which call a tool answers.", "call_1")
    reasoning_content: Text | None = described(
        None, "Reasoning before the assistant's answer, for templates that use it.", "Hm."
    )
    refusal: Text | None = described(None, "Accepted without effect.", "No.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = without_nulls(cast("dict[Any, Any]", value))
        if kept.get("role") == "assistant":
            for name in _KEPT_BY_CLIENTS:
                kept.pop(name, None)
            if kept.get("tool_calls"):
                kept.setdefault("content", "")
        return kept

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content]

    @property
    def all_texts(self) -> list[str]:
        """The content and all else that templates write."""
        calls = [text for call in self.tool_calls or () for text in (call.function.arguments,)]
        return [*self.texts, *calls, self.reasoning_content or ""]

    def for_template(self, *, none_for_calls: bool = False) -> dict[str, Any]:
        """As chat templates read it; a developer is a system to them.

        Where calls have no text beside them, some templates want None for it.
        """
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": "".join(self.texts)}
        if none_for_calls and self.tool_calls and not found["content"]:
            found["content"] = None
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found


class ChatRequest(SamplingFields, FormFields):
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
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = described(
        None,
        "Functions that the model may call.",
        [{"type": "function", "function": {"name": "get_weather"}}],
    )
    tool_choice: ToolChoice | None = described(
        None, "none, auto, required, or the function that must be called.", "auto"
    )
    parallel_tool_calls: bool | None = described(
        True, "Whether an answer that must call tools may have several calls.", False
    )
    reasoning_effort: Text | None = described(
        None, "For templates that use it, such as those of gpt-oss.", "low"
    )
    chat_template_kwargs: dict[Text, Any] | None = described(
        None, "Variables for the chat template.", {"enable_thinking": False}
    )
    continue_final_message: bool | None = described(
        False, "Go on with the last message, which is the assistant's.", True
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
    content: str | None = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class _ChatChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
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
