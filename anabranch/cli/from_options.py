"""A typer command from a dataclass of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from anabranch.bench.engine.errors import EXPECTED, one_line
from anabranch.bench.engine.fields import Option, options_of

T = TypeVar("T")


def command_of(kind: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """A function that typer can read; what a user can mend ends in one line and exit code 2."""
    options = options_of(kind)

    def command(**given: Any) -> None:
        for option in options:
            if option.many:
                given[option.name] = tuple(given[option.name] or ())
        try:
            run(kind(**given))
        except EXPECTED as error:
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from None

    parameters = [_parameter(option) for option in options]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(option: Option) -> inspect.Parameter:
    value: Any = list[option.type] if option.many else option.type
    if option.default is None or option.many:
        value = value | None
    if option.argument:
        shown = typer.Argument(help=option.help, metavar=option.metavar)
    elif option.type is bool:
        shown = typer.Option(f"{option.flag}/--{option.off}", help=option.help)
    else:
        shown = typer.Option(option.flag, help=option.help, metavar=option.metavar)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if option.many else option.default,
        annotation=Annotated[value, shown],
    )
