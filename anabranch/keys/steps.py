"""Strides of keys in the units that they have in common, so that one integer finds a key."""

from __future__ import annotations

import math

from anabranch.keys.view import PLAIN, KeyStore

Sides = tuple[int, int, int]  # pages, keys of a page and heads of a store, or steps between them


def common_steps(sizes: Sides, k: KeyStore, v: KeyStore) -> Sides:
    """Steps from page to page, key to key and head to head, the same for keys and values."""
    for name, store in (("k", k), ("v", v)):
        if store.format != PLAIN:
            raise ValueError(f"lists need plain keys and values, got {store.format.name} of {name}")
    steps, others = _steps(sizes, k), _steps(sizes, v)
    if steps != others:
        raise ValueError(
            "lists need keys and values that are laid out alike, got strides (page, key, head) "
            f"{k[1:4]} of k and {v[1:4]} of v"
        )
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if last >= 1 << 31:
        raise ValueError(f"lists need keys within 2^31 steps of their strides, got {last}")
    return steps


def in_steps(store: KeyStore, sizes: Sides, by_head: bool) -> KeyStore:
    """The store as pages of one key, a step apart; `by_head`, of one head of a key."""
    unit = _unit(sizes, store)
    return store._replace(page=unit, key=unit, head=0 if by_head else store.head)


def _strides(sizes: Sides, store: KeyStore) -> Sides:
    """The strides that matter: one over a single element is 0."""
    page, key, head = (s if size > 1 else 0 for size, s in zip(sizes, store[1:4], strict=True))
    return page, key, head


def _unit(sizes: Sides, store: KeyStore) -> int:
    return math.gcd(*_strides(sizes, store)) or 1


def _steps(sizes: Sides, store: KeyStore) -> Sides:
    unit = _unit(sizes, store)
    page, key, head = (stride // unit for stride in _strides(sizes, store))
    return page, key, head
