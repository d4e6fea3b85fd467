"""Options of a tool as fields of a dataclass: declared once, read by every command line."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints


class Option(NamedTuple):
    """An option as a command line needs it."""

    name: str
    type: type  # of one value
    default: Any
    help: str
    metavar: str | None
    argument: bool  # given by its place, not by name
    many: bool  # may be repeated
    off: str  # what turns a switch off

    @property
    def flag(self) -> str:
        """The name with dashes."""
        return f"--{self.name.replace('_', '-')}"


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    argument: bool = False,
    off: str | None = None,
) -> Any:
    """A field that is an option; `choices` are shown and checked by `check_choices`."""
    shown = "|".join(choices) or metavar
    metadata = {
        "help": help,
        "metavar": shown,
        "argument": argument,
        "choices": tuple(choices),
        "off": off,
    }
    return field(default=default, metadata=metadata)


def options_of(kind: type) -> list[Option]:
    """The options of a dataclass, its own first, then those it inherits."""
    hints = get_type_hints(kind)
    own = list(inspect.get_annotations(kind))
    ordered = sorted(
        fields(kind), key=lambda each: own.index(each.name) if each.name in own else len(own)
    )
    return [_option(each, hints[each.name]) for each in ordered if "help" in each.metadata]


def _option(each: Field[Any], hint: Any) -> Option:
    assert each.default is not MISSING, each.name
    many = get_origin(hint) is tuple
    value_type = get_args(hint)[0] if many else hint
    if isinstance(value_type, types.UnionType):
        value_type = next(part for part in get_args(value_type) if part is not type(None))
    return Option(
        each.name,
        value_type,
        each.default,
        each.metadata["help"],
        each.metadata["metavar"],
        each.metadata["argument"],
        many,
        each.metadata["off"] or f"no-{each.name.replace('_', '-')}",
    )


def check_choices(given: object) -> None:
    """Refuse values that a field does not offer."""
    for each in fields(cast("Any", given)):
        choices: tuple[str, ...] = each.metadata.get("choices", ())
        value = getattr(given, each.name)
        if choices and value is not None and value not in choices:
            flag = each.name.replace("_", "-")
            raise ValueError(f"--{flag} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(given: object, *names: str) -> None:
    """Refuse sizes below 1."""
    for name in names:
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
