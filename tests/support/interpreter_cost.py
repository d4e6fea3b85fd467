"""Triton's interpreter without work that it repeats: a third of the time of kernels in tests.

It wraps all functions of the language anew at each call of a device function, though they are
wrapped for the whole launch, builds a table of dtypes at each look-up, and gives each shape a type
that nothing asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def spare_repetitions() -> None:
    """Wrap the language once in a launch, look dtypes up in one table, make no unused types."""
    interpreter._patch_lang = _wrapped_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _in_one_table(interpreter._get_np_dtype)
    tl.tuple.__init__ = _keep_values
    tl.tuple.type = property(_type_of_values, lambda self, given: setattr(self, "_type", given))


def _wrapped_once(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`wrap` for the first function of a launch that sees a module of the language."""
    seen_by: dict[Any, frozenset[str]] = {}  # each function's modules
    wrapped: set[str] = set()  # in this launch; its first function is the kernel

    def wrap_once(function: Any) -> Any:
        if function not in seen_by:
            values = function.__globals__.values()
            seen_by[function] = frozenset(m.__name__ for m in (tl, tl.core) if m in values)
        if wrapped and wrapped >= seen_by[function]:
            return interpreter._LangPatchScope()
        begins, scope = not wrapped, wrap(function)
        wrapped.update(seen_by[function])
        if begins:
            unwrap = scope.restore

            def end() -> None:
                wrapped.clear()
                unwrap()

            scope.restore = end
        return scope

    return wrap_once


def _in_one_table(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype.scalar)
        return known[name]

    return look_up_once


def _keep_values(self: Any, args: Any, type: Any = None) -> None:
    self.values = [*args]
    self._type = type if type is None or isinstance(type, tl.tuple_type) else tl.tuple_type(type)


def _type_of_values(self: Any) -> Any:
    if self._type is None:
        self._type = tl.core._type_for_tuple_values(self.values)
    return self._type
