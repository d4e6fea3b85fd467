"""Tools that a client offers, and calls of them, as OpenAI writes them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from anabranch.llm.server.openai_fields import StrictModel, Text, described

NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=NAME)]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    name: FunctionName = described(..., "Name of the function.", "get_weather")
    description: Text | None = described(None, "What it does, for the model.", "Weather of a city.")
    parameters: dict[Text, Any] | None = described(
        None, "JSON schema of its arguments.", {"type": "object", "properties": {}}
    )
    strict: bool | None = described(
        None, "Calls match the schema. Those that are required always do.", True
    )

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """An object of anything where none is given."""
        return self.parameters or {"type": "object"}

    def without_schema(self) -> FunctionTool:
        """The same function with any arguments."""
        return self.model_copy(update={"parameters": None})


class Tool(StrictModel):
    """Something the model may use; only functions are supported."""

    type: Literal["function"] = described(..., "Only functions are supported.", "function")
    function: FunctionTool = described(..., "The function.", {"name": "get_weather"})

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {
            "type": "function",
            "function": function | {"parameters": self.function.schema_of_arguments},
        }


class NamedFunction(StrictModel):
    """One of the tools."""

    name: FunctionName = described(..., "Name of the function.", "get_weather")


class NamedChoice(StrictModel):
    """The tool that must be called."""

    type: Literal["function"] = described(..., "Only functions are supported.", "function")
    function: NamedFunction = described(..., "The function.", {"name": "get_weather"})


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(StrictModel):
    """A call in a message of the assistant."""

    name: FunctionName = described(..., "Name of the function.", "get_weather")
    arguments: Text = described(..., "Its arguments, as JSON.", '{"city": "Basel"}')


class TemplateArguments(dict[str, Any]):
    """Arguments for templates that write them as JSON, and for those that join them to texts."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


class PastCall(StrictModel):
    """A call that the model made earlier."""

    id: Text = described(..., "What the tool's answer refers to.", "call_1")
    type: Literal["function"] = described("function", "Only functions are supported.", "function")
    function: CalledFunction = described(..., "The call.", {"name": "f", "arguments": "{}"})
    index: int | None = described(None, "Accepted without effect: streams have it.", 0)

    def for_template(self) -> dict[str, Any]:
        """With arguments as an object, which templates write themselves."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        if isinstance(arguments, dict):
            arguments = TemplateArguments(cast("dict[str, Any]", arguments))
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class FunctionCall(BaseModel):
    """A call that the model makes, or what is new of it."""

    name: str | None = None
    arguments: str = ""


class ToolCall(BaseModel):
    """A call of a tool."""

    index: int | None = None  # in streams
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
