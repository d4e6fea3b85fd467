"""Forms of answers, as OpenAI's `response_format` and vLLM's fields state them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.server.openai_fields import StrictModel, Text, TokenIds, described

MAX_BAD_WORDS = 128
_GUIDED = ("json", "regex", "choice", "grammar")


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A schema that has a name."""

    name: Text | None = described(None, "Name of the schema.", "city")
    description: Text | None = described(None, "Accepted without effect.", "A city.")
    schema_: dict[Text, Any] | None = Field(
        None, alias="schema", description="The JSON schema.", examples=[{"type": "object"}]
    )
    strict: bool | None = described(None, "Accepted: answers always match.", True)


class JsonSchemaFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema = described(
        ..., "The schema and its name.", {"name": "city", "schema": {"type": "object"}}
    )


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredFields(StrictModel):
    """vLLM's names; exactly one form is given."""

    json_: dict[Text, Any] | Text | None = Field(
        None, alias="json", description="A JSON schema.", examples=[{"type": "object"}]
    )
    regex: Text | None = described(None, "Matches the whole answer.", "[a-z]+")
    choice: list[Text] | None = described(None, "One of these texts.", ["yes", "no"])
    grammar: Text | None = described(None, "A grammar in Lark's syntax or GBNF.", 'start: "a"+')
    json_object: bool | None = described(None, "Any JSON object.", True)
    whitespace_pattern: Text | None = described(
        None, "A regex of the whitespace that JSON may have.", " ?"
    )
    disable_any_whitespace: bool | None = described(
        None, "Only the whitespace of the separators.", True
    )

    def structured_outputs(self) -> StructuredOutputs:
        """For the engine; ValueError where not exactly one form is given."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputs(**given)


class FormFields(StrictModel):
    """Which forms and which tokens an answer may have."""

    response_format: ResponseFormat | None = described(
        None,
        "JSON of any form, or of a schema: json_object, json_schema or text.",
        {"type": "json_object"},
    )
    structured_outputs: StructuredFields | None = described(
        None, "A form of the answer, as vLLM states it; exactly one is given.", {"regex": "[a-z]+"}
    )
    guided_json: dict[Text, Any] | Text | None = described(
        None, "An older name of structured_outputs.json.", {"type": "object"}
    )
    guided_regex: Text | None = described(
        None, "An older name of structured_outputs.regex.", "[a-z]+"
    )
    guided_choice: list[Text] | None = described(
        None, "An older name of structured_outputs.choice.", ["yes", "no"]
    )
    guided_grammar: Text | None = described(
        None, "An older name of structured_outputs.grammar.", 'start: "a"+'
    )
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None = described(
        None, "Words that the answer does not contain.", ["flood"]
    )
    allowed_token_ids: TokenIds | None = described(
        None, "The only tokens that the answer may have.", [64, 65]
    )

    def form(self) -> StructuredOutputs | None:
        """Of the answer; ValueError where several are given or one is wrong."""
        guided = {name: getattr(self, f"guided_{name}") for name in _GUIDED}
        given = {name: value for name, value in guided.items() if value is not None}
        fields = self.structured_outputs
        if given and fields is not None:
            raise ValueError("give structured_outputs or guided fields, not both")
        if given:
            fields = StructuredFields.model_validate(given)
        return structured_outputs(self.response_format, fields)

    def rules(self) -> dict[str, Any]:
        listed = self.allowed_token_ids
        return {
            "structured_outputs": self.form(),
            "bad_words": self.bad_words or (),
            **({} if listed is None else {"allowed_token_ids": listed}),
        }


def structured_outputs(
    wanted: ResponseFormat | None, fields: StructuredFields | None
) -> StructuredOutputs | None:
    """Of a request; ValueError where both or contradictory forms are given."""
    formatted = None
    if isinstance(wanted, JsonObjectFormat):
        formatted = StructuredOutputs(json_object=True)
    elif isinstance(wanted, JsonSchemaFormat):
        formatted = StructuredOutputs(json=wanted.json_schema.schema_ or {"type": "object"})
    if fields is None:
        return formatted
    if formatted is not None:
        raise ValueError("give response_format or structured_outputs, not both")
    return fields.structured_outputs()
