"""Bodies of `/v1/responses`, which become those of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from anabranch.llm.server.chat_models import ChatRequest
from anabranch.llm.server.errors import unsupported
from anabranch.llm.server.openai_fields import (
    Count,
    IgnoredFields,
    StrictModel,
    Text,
    described,
    without_nulls,
)
from anabranch.llm.server.response_formats import NamedSchema
from anabranch.llm.server.tool_models import MAX_TOOLS, FunctionName

_EXAMPLE = [{"role": "user", "content": "Name three rivers."}]


class ContentPart(StrictModel):
    """Text of a message; images and files are not supported."""

    type: Literal["input_text", "output_text", "text"] = described(
        ..., "Only text is supported.", "input_text"
    )
    text: Text = described(..., "The text.", "Name three rivers.")
    annotations: list[Any] | None = described(None, "Accepted without effect.", [])
    logprobs: list[Any] | None = described(None, "Accepted without effect.", [])


class InputItem(StrictModel):
    """A message, a call of a function, its output, or reasoning, as in the output of a response."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = described(
        "message", "What the item is.", "message"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = described(
        None, "Who wrote a message.", "user"
    )
    content: Text | list[ContentPart] | list[dict[Text, Any]] | None = described(
        None, "A message, as text or in parts.", "Name three rivers."
    )
    call_id: Text | None = described(None, "Of a call and of its output.", "call_1")
    name: Text | None = described(None, "Of the function called.", "get_weather")
    arguments: Text | None = described(None, "Of the call, as JSON.", "{}")
    output: Text | list[ContentPart] | None = described(None, "Of the function.", "12 degrees")
    id: Text | None = described(None, "Accepted without effect.", "msg_1")
    status: Text | None = described(None, "Accepted without effect.", "completed")
    summary: list[Any] | None = described(None, "Of reasoning; accepted without effect.", [])
    encrypted_content: Text | None = described(None, "Accepted without effect.", "x")
    namespace: Text | None = described(None, "Accepted without effect.", "x")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return without_nulls(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value

    def message(self) -> dict[str, Any] | None:
        """As a chat has it; reasoning is left out."""
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments or "{}"}
            call = {"id": self.call_id or "call", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": _text(self.output), "tool_call_id": self.call_id}
        if self.type == "reasoning":
            return None
        return {"role": self.role or "user", "content": _text(self.content)}


class FlatTool(StrictModel):
    """A function that the model may call."""

    type: Text = described(..., "Only function is supported.", "function")
    name: FunctionName | None = described(None, "Name of the function.", "get_weather")
    description: Text | None = described(None, "What it does, for the model.", "Weather.")
    parameters: dict[Text, Any] | None = described(
        None, "JSON schema of its arguments.", {"type": "object"}
    )
    strict: bool | None = described(None, "Accepted as in chats.", True)


class FlatFormat(NamedSchema):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = described(..., "Its kind.", "text")

    def response_format(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "answer", "schema": self.schema_ or {}}
        return {"type": "json_schema", "json_schema": schema}


class TextOptions(StrictModel):
    """Of the text of an answer."""

    format: FlatFormat | None = described(None, "Its form.", {"type": "json_object"})
    verbosity: Text | None = described(None, "Accepted without effect.", "low")


class ResponseRequest(IgnoredFields):
    """A conversation whose answer is not kept."""

    model: Text | None = described(
        None, "Name of the served model. Any other name is refused.", "smollm2"
    )
    input: Text | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)] = described(
        ..., "A prompt, or the items of a conversation.", _EXAMPLE
    )
    instructions: Text | None = described(None, "A system message ahead of it.", "Be brief.")
    max_output_tokens: Count | None = described(None, "The longest answer, in tokens.", 256, ge=1)
    temperature: float | None = described(None, "As in chats.", 0.7, ge=0, le=100)
    top_p: float | None = described(None, "As in chats.", 0.95, gt=0, le=1)
    stream: bool | None = described(False, "Send events as the answer is made.", True)
    stream_options: dict[Text, Any] | None = described(None, "Accepted without effect.", {})
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        described(
            None, "Functions that may be called.", [{"type": "function", "name": "get_weather"}]
        )
    )
    tool_choice: Literal["none", "auto", "required"] | FlatTool | None = described(
        None, "none, auto, required, or the function that must be called.", "auto"
    )
    parallel_tool_calls: bool | None = described(True, "As in chats.", False)
    text: TextOptions | None = described(
        None, "The form of the text.", {"format": {"type": "text"}}
    )
    reasoning: dict[Text, Any] | None = described(
        None, "An effort, for templates that use it.", {"effort": "low"}
    )
    previous_response_id: Text | None = described(
        None, "Not supported: nothing is kept here.", None
    )
    background: bool | None = described(None, "Must be false.", False)
    store: bool | None = described(None, "Accepted without effect: nothing is kept.", False)
    include: list[Text] | None = described(None, "Accepted without effect.", [])
    metadata: dict[Text, Any] | None = described(None, "Returned as it is.", {"run": "7"})
    truncation: Text | None = described(None, "Accepted without effect.", "disabled")
    max_tool_calls: int | None = described(None, "Accepted without effect.", 4)
    top_logprobs: int | None = described(None, "Must be 0.", 0, ge=0, le=0)
    seed: int | None = described(None, "As in chats.", 42, ge=-(1 << 63), lt=1 << 63)
    chat_template_kwargs: dict[Text, Any] | None = described(
        None, "Variables for the chat template.", {"enable_thinking": False}
    )

    def chat(self) -> ChatRequest:
        """The same as a chat; what is not supported is refused."""
        if self.previous_response_id is not None:
            raise unsupported(
                "previous_response_id",
                "responses are not kept here; send the conversation in input",
            )
        if self.background:
            raise unsupported("background", "responses are made at once; leave background out")
        given: dict[str, Any] = {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        if self.tools:
            given |= {"tools": self._tools(), "tool_choice": self._tool_choice()}
        if self.text is not None and self.text.format is not None:
            given["response_format"] = self.text.format.response_format()
        return ChatRequest.model_validate({k: v for k, v in given.items() if v is not None})

    def _messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        found = [message for item in self.input if (message := item.message()) is not None]
        return [*system, *_merged(found)]

    def _tools(self) -> list[dict[str, Any]]:
        for tool in self.tools or ():
            if tool.type != "function":
                raise unsupported("tools", f"tools of type {tool.type[:40]!r} are not supported")
        return [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, FlatTool):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow each other belong to one message of the assistant."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and found and found[-1]["role"] == "assistant":
            calls = [*found[-1].get("tool_calls", []), *message["tool_calls"]]
            found[-1] = found[-1] | {"tool_calls": calls}
        else:
            found.append(message)
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(getattr(part, "text", "") for part in content)


class ResponseObject(BaseModel):
    """An answer."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    previous_response_id: None = None
    store: bool = False
