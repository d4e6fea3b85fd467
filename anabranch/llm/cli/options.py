"""A typer command from a dataclass of options: each option is declared once, as a field."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

CHECKED = ("choices", "at_least", "above", "below")
T = TypeVar("T")


class Option(NamedTuple):
    """An option as a command line needs it."""

    name: str
    type: type  # of one value
    default: Any
    help: str
    metavar: str | None
    positional: bool
    repeatable: bool
    off_flag: str  # turns a switch off

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def flag_of(name: str) -> str:
    """The option `--max-tokens` of the field `max_tokens`."""
    return f"--{name.replace('_', '-')}"


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    positional: bool = False,
    off_flag: str | None = None,
) -> Any:
    """A dataclass field that is an option; `check_options` checks its choices and bounds."""
    metadata = {
        "help": help,
        "metavar": "|".join(choices) or metavar,
        "positional": positional,
        "choices": tuple(choices),
        "at_least": at_least,
        "above": above,
        "below": below,
        "off_flag": off_flag,
    }
    return field(default=default, metadata=metadata)


def options_of(kind: type) -> list[Option]:
    """The options of a dataclass, its own before those it inherits."""
    hints = get_type_hints(kind)
    own = list(inspect.get_annotations(kind))
    ordered = sorted(
        fields(kind), key=lambda each: own.index(each.name) if each.name in own else len(own)
    )
    return [_option(each, hints[each.name]) for each in ordered if "help" in each.metadata]


def _option(each: Field[Any], hint: Any) -> Option:
    repeatable = get_origin(hint) is tuple
    value_type = get_args(hint)[0] if repeatable else hint
    if isinstance(value_type, types.UnionType):
        value_type = next(part for part in get_args(value_type) if part is not type(None))
    metadata = each.metadata
    return Option(
        each.name,
        value_type,
        each.default,
        metadata["help"],
        metadata["metavar"],
        metadata["positional"],
        repeatable,
        metadata["off_flag"] or f"--no-{each.name.replace('_', '-')}",
    )


def arguments_of(kind: type, given: object, without: Sequence[str] = ()) -> list[str]:
    """A command line that sets the options of `kind` as they are in `given`."""
    arguments: list[str] = []
    for each in options_of(kind):
        value = None if each.name in without else getattr(given, each.name)
        if isinstance(value, bool):
            arguments.append(each.flag if value else each.off_flag)
        elif value is not None:
            arguments += [each.flag, str(value)]
    return arguments


def check_options(given: object) -> None:
    """Refuse values that are none of the choices of a field, or outside its bounds."""
    for each in fields(cast("Any", given)):
        value, metadata = getattr(given, each.name), each.metadata
        if value is None or "help" not in metadata:
            continue
        choices, at_least, above, below = (metadata[name] for name in CHECKED)
        if choices and value not in choices:
            listed = ", ".join(choices)
            raise ValueError(f"{flag_of(each.name)} must be one of {listed}, got {value!r}")
        if (
            (at_least is not None and not value >= at_least)
            or (above is not None and not value > above)
            or (below is not None and not value < below)
        ):
            bounds = {"at least": at_least, "above": above, "below": below}
            listed = " and ".join(f"{k} {v:g}" for k, v in bounds.items() if v is not None)
            raise ValueError(f"{flag_of(each.name)} must be {listed}, got {value}")


def new_app(help: str | None = None, **more: Any) -> typer.Typer:
    """An app whose help is plain text, which is printed fast and never cuts option names."""
    plain: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False}
    return typer.Typer(help=help, no_args_is_help=help is not None, **plain, **more)


def add_command(
    app: typer.Typer, name: str, kind: type[T], run: Callable[[T], None], help: str | None = None
) -> None:
    """A command with the options of a dataclass; its help is `help` or the dataclass's docstring.

    Lines of the help that begin with $ are examples. An error that the user can correct becomes one
    line and exit code 2.
    """
    options = options_of(kind)

    def command(**given: Any) -> None:
        for each in options:
            if each.repeatable:
                given[each.name] = tuple(given[each.name] or ())
        try:
            run(kind(**given))
        except Exception as error:
            if not is_user_error(error):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from None

    parameters = [_parameter(each) for each in options]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    # click keeps the line breaks of a paragraph that begins with \b
    help = help or inspect.getdoc(kind) or ""
    app.command(name, help=help.replace("\n\n$", "\n\n\b\n$"))(command)


def _parameter(each: Option) -> inspect.Parameter:
    value: Any = list[each.type] if each.repeatable else each.type
    if each.default is None or each.repeatable:
        value = value | None
    if each.positional:
        declared = typer.Argument(help=each.help, metavar=each.metavar)
    elif each.type is bool:
        declared = typer.Option(f"{each.flag}/{each.off_flag}", help=each.help)
    else:
        declared = typer.Option(each.flag, help=each.help, metavar=each.metavar)
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if each.repeatable else each.default,
        annotation=Annotated[value, declared],
    )


def is_user_error(error: Exception) -> bool:
    """Whether the user can correct it. torch's out-of-memory error is known by its name."""
    expected = (ValueError, OSError, ImportError, MemoryError)
    return isinstance(error, expected) or type(error).__name__ == "OutOfMemoryError"


def one_line(error: BaseException) -> str:
    """What went wrong, without line breaks."""
    message = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{message}; pip install 'anabranch[engine]'"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return message or type(error).__name__
