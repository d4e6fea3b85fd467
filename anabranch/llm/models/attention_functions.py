"""Attention functions by name: those that are registered here, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

_functions: dict[str, Callable[..., Any]] = {}


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make a function known that takes what transformers' attention functions take."""
    _functions[name] = function


def known_to_transformers(name: str) -> str:
    """The name, now that transformers has the function of that name, too."""
    if name in _functions:
        from transformers import AttentionInterface

        cast("Any", AttentionInterface).register(name, _functions[name])
    return name


def attention_function(name: str) -> Callable[..., Any]:
    if name in _functions:
        return _functions[name]
    from transformers import AttentionInterface

    return cast("Any", AttentionInterface())[name]
