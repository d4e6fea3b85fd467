"""docs/reference.md: the options of LLM, of requests and of the server, from their dataclasses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from anabranch.llm.cli.serve import ServeCommandOptions
from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.engine.request import CompletionOutput, RequestOutput
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.runner.sparse_decode import SparseConfig
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.completion_models import CompletionRequest

PATH = "docs/reference.md"
HEAD = """# Reference

Made by `make docs` from the code; edit the code. [server.md](server.md) is a guide to the server,
[structured.md](structured.md) says how structured outputs, tools and reasoning work, and
[sampling.md](sampling.md) where defaults come from.
"""
SAID = {  # of fields that bodies write differently
    "max_tokens": "The longest answer, in tokens. None is what the context allows.",
    "logprobs": "Likely tokens to return at each place; None for no logprobs.",
    "stop": "Texts before which the answer ends.",
    "structured_outputs": "A form that the answer must have: StructuredOutputs or its fields.",
}


def reference() -> str:
    """The document."""
    sections = [
        HEAD,
        _methods("LLM(model, **options)", LLM),
        _table("Options of LLM: EngineConfig", EngineConfig),
        _table("LLM(speculative=): SpeculativeConfig", SpeculativeConfig),
        _table("LLM(sparse=): SparseConfig", SparseConfig),
        _table("SamplingParams", SamplingParams, _of_requests()),
        _table("SamplingParams(structured_outputs=): StructuredOutputs", StructuredOutputs),
        _table("What generate gives: RequestOutput", RequestOutput),
        _table("RequestOutput.outputs: CompletionOutput", CompletionOutput),
        _command("anabranch serve", ServeCommandOptions),
    ]
    return "\n".join(sections)


def _of_requests() -> dict[str, str]:
    described = CompletionRequest.model_fields.items()
    return {name: field.description or "" for name, field in described} | SAID


def _methods(title: str, kind: type) -> str:
    lines = [f"## {title}\n", f"{_paragraph(kind)}\n"]
    for name, member in vars(kind).items():
        if name.startswith("_") or not getattr(member, "__doc__", None):
            continue
        is_property = isinstance(member, property)
        shown = f".{name}" if is_property else f".{name}{_signature(member)}"
        lines.append(f"- `{shown}`: {_paragraph(member)}")
    return "\n".join(lines) + "\n"


def _signature(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"({', '.join(names)})"


def _paragraph(thing: Any) -> str:
    return re.sub(r"\s+", " ", inspect.getdoc(thing) or "").strip()


def _table(title: str, kind: Any, said: dict[str, str] | None = None) -> str:
    comments = dict(_comments(inspect.getsource(kind)))
    rows = [
        f"| `{field.name}` | {_cell(str(field.type))} | {_cell(_default(field))} "
        f"| {(said or {}).get(field.name) or comments.get(field.name, '')} |"
        for field in fields(kind)
    ]
    head = "| field | type | default | meaning |\n|---|---|---|---|"
    return f"## {title}\n\n{_paragraph(kind)}\n\n{head}\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    if field.default is MISSING:
        return ""
    value = field.default
    return repr(value.value if isinstance(value, Enum) else value)


def _comments(source: str) -> Iterator[tuple[str, str]]:
    """What stands after a field, or in the line above it."""
    above = ""
    for line in source.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            above = bare.lstrip("# ")
            continue
        match = re.match(r"(\w+): [^#]*(?:#\s*(.*))?$", bare)
        if match:
            yield match[1], match[2] or above
        above = ""


def _command(title: str, kind: Any) -> str:
    rows = [
        f"| `--{field.name.replace('_', '-')}` | {_cell(_default(field))} "
        f"| {field.metadata['help']} |"
        for field in fields(kind)
        if not field.metadata.get("positional")
    ]
    head = "| option | default | meaning |\n|---|---|---|"
    about = _paragraph(kind).partition(" $ ")[0]
    return f"## {title}\n\n{about}\n\n{head}\n" + "\n".join(rows) + "\n"


def write_reference(root: Path) -> None:
    """Write the document."""
    (root / PATH).write_text(reference())
