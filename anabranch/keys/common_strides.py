"""Strides of keys in the units that they have in common, so that one integer finds a key."""

from __future__ import annotations

import math

from anabranch.keys.view import KeyStore, ScaleStore

Sides = tuple[int, int, int]  # pages, keys of a page and heads of a store, or steps between them


def common_steps(sizes: Sides, k: KeyStore, v: KeyStore) -> Sides:
    """Steps from page to page, key to key and head to head, the same for all that is read."""
    stores: dict[str, KeyStore | ScaleStore] = {"k": k, "v": v}
    for name, store in (("k_scales", k), ("v_scales", v)):
        if store.scales is not None and store.format.scaling != "tensor":
            stores[name] = store.scales
    steps = _steps(sizes, k)
    if any(_steps(sizes, store) != steps for store in stores.values()):
        found = ", ".join(f"{tuple(store[1:4])} of {name}" for name, store in stores.items())
        raise ValueError(
            "lists need keys, values and scales that are laid out alike, got strides "
            f"(page, key, head) {found}"
        )
    last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if last >= 1 << 31:
        raise ValueError(f"lists need keys within 2^31 steps of their strides, got {last}")
    return steps


def in_steps(store: KeyStore, sizes: Sides, by_head: bool) -> KeyStore:
    """The store as pages of one key, a step apart; `by_head`, of one head of a key."""
    unit, scales = _unit(sizes, store), store.scales
    if scales is not None and store.format.scaling != "tensor":
        step = _unit(sizes, scales)
        scales = scales._replace(page=step, key=step, head=0 if by_head else scales.head)
    return store._replace(page=unit, key=unit, head=0 if by_head else store.head, scales=scales)


def _strides(sizes: Sides, store: KeyStore | ScaleStore) -> Sides:
    """The strides that matter: one over a single element is 0."""
    page, key, head = (s if size > 1 else 0 for size, s in zip(sizes, store[1:4], strict=True))
    return page, key, head


def _unit(sizes: Sides, store: KeyStore | ScaleStore) -> int:
    return math.gcd(*_strides(sizes, store)) or 1


def _steps(sizes: Sides, store: KeyStore | ScaleStore) -> Sides:
    unit = _unit(sizes, store)
    page, key, head = (stride // unit for stride in _strides(sizes, store))
    return page, key, head
