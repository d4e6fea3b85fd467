"""append_kv(): checks, choice of implementation, and the torch operator; no device code."""

from __future__ import annotations

from typing import Any

import torch

from anabranch.implementations import load_implementation
from anabranch.keys import PagedSource, flatten_source, rebuild_source
from anabranch.launches.prepare import PreparedLaunches, prepare
from anabranch.launches.recorder import Kinds, describe, record
from anabranch.shapes import Sizes, check_device, check_dtype, read_index

APPENDS = Kinds[tuple[Any, ...], PreparedLaunches | None]()  # None: run the long way


def append_kv(
    keys: PagedSource,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    saturated: torch.Tensor | None = None,
    check: bool = False,
    impl: str | None = None,
) -> None:
    """Write new tokens into the pages of `keys`, a PagedKV or LatentKV, in place and in its format.

    k, v          [num_tokens, num_kv_heads, head_dim], of any strides; for LatentKV, k is the rows
                  [num_tokens, head_dim_k] and v is None
    slot_mapping  int32 or int64 [num_tokens]: page * page_size + row, or a negative number for a
                  token that is not to be written; no slot twice
    saturated     int32 [1], to which the number of elements is added that a quantised format could
                  not hold: infinities and what exceeds a fixed scale get the largest code, NaN
                  the code of 0
    check         also validate the slots, which waits for the device
    impl          "torch" or "triton"; by default the device decides

    The page table and the lengths of `keys` are neither read nor written.
    """
    identity, kind, tensors = keys.identity, None, (k, v, slot_mapping, saturated)
    if identity is not None and not check and (described := describe(tensors)) is not None:
        kind = (identity.kind, described, impl, torch.is_grad_enabled())
        known = APPENDS.get(kind)
        if known is not None:
            run, launches, _ = known
            run(launches, (*tensors, *identity.tensors))
            return
    new = keys.new_rows(k, v)
    _check(keys, {"k": k, "v": v}, slot_mapping, saturated)
    if check:
        check_slots(keys, slot_mapping)
    if torch.compiler.is_compiling():
        torch.ops.anabranch.append_kv(
            *flatten_source(keys), list(new), slot_mapping, saturated, impl
        )
    elif kind is None or identity is None or kind in APPENDS:
        _append_kv(keys, new, slot_mapping, saturated, impl)
    else:
        with record(slot_mapping.device) as recording:
            _append_kv(keys, new, slot_mapping, saturated, impl)
        APPENDS.keep(kind, prepare(recording, tensors, identity.tensors))


def _check(
    keys: PagedSource,
    new: dict[str, torch.Tensor | None],
    slot_mapping: torch.Tensor,
    saturated: torch.Tensor | None,
) -> None:
    sizes = Sizes()
    for name, rows in new.items():
        if rows is None:
            continue
        sizes.bind("num_tokens", rows.shape[0], name)
        if rows.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; append_kv is for inference, detach it")
    sizes.match("slot_mapping", slot_mapping, "num_tokens")
    check_dtype("slot_mapping", slot_mapping, (torch.int32, torch.int64))
    check_device("slot_mapping", slot_mapping, keys.device)
    if saturated is not None:
        sizes.match("saturated", saturated, "1")
        check_dtype("saturated", saturated, (torch.int32,))
        check_device("saturated", saturated, keys.device)


def check_slots(keys: PagedSource, slot_mapping: torch.Tensor) -> None:
    """Validate slots that lie in device memory, naming the token that is wrong. Synchronises."""
    num_slots = keys.num_pages * keys.page_size
    owners: dict[int, int] = {}
    for token, slot in enumerate(read_index(slot_mapping)):
        if slot >= num_slots:
            raise ValueError(f"token {token} has slot {slot}, but there are {num_slots} slots")
        if slot >= 0 and owners.setdefault(slot, token) != token:
            raise ValueError(f"tokens {owners[slot]} and {token} have the same slot {slot}")


def _append_kv(
    keys: PagedSource,
    new: tuple[torch.Tensor, ...],
    slot_mapping: torch.Tensor,
    saturated: torch.Tensor | None,
    impl: str | None,
) -> None:
    writer = load_implementation("append_kv", impl, keys.device)
    if slot_mapping.shape[0]:
        writer.append_kv(keys.stores(), new, slot_mapping, saturated)


@torch.library.custom_op("anabranch::append_kv", mutates_args=("key_tensors", "saturated"))
def _append_kv_op(
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    new: list[torch.Tensor],
    slot_mapping: torch.Tensor,
    saturated: torch.Tensor | None,
    impl: str | None,
) -> None:
    keys = rebuild_source(kind, key_tensors, key_static)
    assert isinstance(keys, PagedSource)
    _append_kv(keys, tuple(new), slot_mapping, saturated, impl)


@_append_kv_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(*_: object) -> None:
    pass
