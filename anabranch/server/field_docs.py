"""Meaning, default and example of every request field, added to the OpenAPI document."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from fastapi import FastAPI

from anabranch.engine.sampling_params import SamplingParams

# (meaning, example) by field; "Schema.field" takes precedence over "field"
_DOCS: dict[str, tuple[str, Any]] = {
    "messages": (
        "The conversation so far, oldest message first.",
        [{"role": "user", "content": "Name three rivers."}],
    ),
    "role": ("Who wrote the message. A developer is treated as a system.", "user"),
    "content": ("What the message says, as text or as a list of text parts.", "Name three rivers."),
    "name": ("Name of the author, for chat templates that use it.", "Ada"),
    "type": ("Only text is supported.", "text"),
    "text": ("Content of this part.", "Name three rivers."),
    "model": ("Name of the served model. Any other name is refused.", "smollm2"),
    "prompt": ("Text to tokenize. Give either this or messages.", "The longest river is"),
    "CompletionRequest.prompt": (
        "One prompt or a list of prompts, each as text or as token ids.",
        "The longest river is",
    ),
    "max_tokens": ("Longest answer, in tokens. Unset: as long as the context allows.", 256),
    "CompletionRequest.max_tokens": (
        "Longest completion, in tokens. 0 is allowed with echo, to score a prompt.",
        256,
    ),
    "max_completion_tokens": ("Newer name of max_tokens; takes precedence over it.", 256),
    "n": ("Number of answers to each prompt.", 1),
    "best_of": ("Supported only where it equals n.", 1),
    "temperature": ("0 always takes the most likely token; higher values vary more.", 0.7),
    "top_p": ("Keep the most likely tokens that together have this probability.", 0.95),
    "top_k": ("Keep this many of the most likely tokens. 0 and -1 keep all.", 40),
    "min_p": ("Keep tokens at least this probable, relative to the most likely one.", 0.05),
    "presence_penalty": ("Lowers the scores of tokens the answer already contains.", 0.5),
    "frequency_penalty": ("Lowers scores by how often the answer contains the token.", 0.5),
    "repetition_penalty": ("Divides scores of tokens in the prompt or answer. 1: off.", 1.1),
    "seed": ("Repeats the same random choices.", 42),
    "stop": ("Text, or a list of texts, at which the answer ends.", ["\n\n", "User:"]),
    "stop_token_ids": ("Token ids at which the answer ends.", [2]),
    "include_stop_str_in_output": ("Keep the stop text at the end of the answer.", True),
    "ignore_eos": ("Continue past the end-of-text token.", True),
    "min_tokens": ("The answer does not end before it has this many tokens.", 16),
    "skip_special_tokens": ("Leave special tokens out of the text.", False),
    "logit_bias": ("Added to scores: a map from token id, as text, to a number.", {"50": -100}),
    "logprobs": ("Return the log probability of every token.", True),
    "CompletionRequest.logprobs": ("Likely tokens to return at each place.", 5),
    "top_logprobs": ("Likely tokens to return at each place. Needs logprobs.", 5),
    "prompt_logprobs": ("Likely tokens to return at each place of the prompt.", 1),
    "truncate_prompt_tokens": ("Keep only this many tokens from the end of the prompt.", 1024),
    "stream": ("Send the answer in chunks, as server-sent events.", True),
    "stream_options": ("Options of a stream.", {"include_usage": True}),
    "include_usage": ("End the stream with a chunk that counts the tokens.", True),
    "continuous_usage_stats": ("Count the tokens in every chunk.", True),
    "speculate": ("False turns speculative decoding off for this request.", False),
    "return_token_ids": ("Add the token ids to every choice.", True),
    "return_token_origins": (
        "Add to every choice whether each token was sampled, accepted or corrected, and its step.",
        True,
    ),
    "response_format": ("Only plain text is supported.", {"type": "text"}),
    "tools": ("Tools are not supported; the list must be empty.", []),
    "tool_choice": ("Tools are not supported.", "none"),
    "parallel_tool_calls": ("Accepted without effect.", False),
    "metadata": ("Accepted without effect.", {"run": "7"}),
    "store": ("Accepted without effect.", False),
    "service_tier": ("Accepted without effect.", "auto"),
    "reasoning_effort": ("Accepted without effect.", "low"),
    "user": ("Accepted without effect.", "ada"),
    "add_generation_prompt": ("End the conversation with the start of an answer.", True),
    "add_special_tokens": ("Add the tokenizer's special tokens to a text.", True),
    "return_token_strs": ("Return the text of each token too.", True),
    "echo": ("Return the prompt in front of its completion.", True),
    "suffix": ("Not supported.", None),
    "tokens": ("Token ids to turn into text.", [72, 105]),
}

# what applies when a request leaves the field out or sends null
_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.default is not MISSING and field.default not in (None, ())
} | {
    "stream": False,
    "echo": False,
    "return_token_ids": False,
    "return_token_origins": False,
    "add_generation_prompt": True,
    "add_special_tokens": True,
}
del _DEFAULTS["max_tokens"]  # differs between the two kinds of completion


def document_fields(app: FastAPI) -> None:
    """Have the OpenAPI document of an app explain every request field."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        for name, schema in document["components"]["schemas"].items():
            if schema.get("additionalProperties") is False:  # a request
                for field, described in schema["properties"].items():
                    _describe(name, field, described)
        return document

    app.openapi = openapi


def _describe(schema: str, field: str, described: dict[str, Any]) -> None:
    found = _DOCS.get(f"{schema}.{field}") or _DOCS.get(field)
    if found is not None:
        described["description"], example = found
        if example is not None:
            described["examples"] = [example]
    if field in _DEFAULTS and described.get("default") is None:
        described["default"] = _DEFAULTS[field]
