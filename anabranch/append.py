"""append_kv(): checks, choice of implementation, and the torch operator; no device code."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from anabranch.keys import PagedKV
from anabranch.shapes import Sizes, check_device, check_dtype, read_index

# Asked in this order; without a name, the first that can run on a device does.
WRITERS = {
    "torch": "anabranch.kernels.cpu.append_kv",
    "triton": "anabranch.kernels.triton.append_kv",
}


def append_kv(
    keys: PagedKV,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    check: bool = False,
    impl: str | None = None,
) -> None:
    """Write new tokens into the pages of `keys`, in place.

    k, v          [num_tokens, num_kv_heads, head_dim], of any strides
    slot_mapping  int32 or int64 [num_tokens]: page * page_size + row, or a negative number for a
                  token that is not to be written; no slot twice
    check         also validate the slots, which waits for the device
    impl          "torch" or "triton"; by default the device decides

    The page table and the lengths of `keys` are neither read nor written.
    """
    _check(keys, k, v, slot_mapping)
    if check:
        check_slots(keys, slot_mapping)
    if torch.compiler.is_compiling():
        torch.ops.anabranch.append_kv(keys.k, keys.v, k, v, slot_mapping, impl)
    else:
        _append_kv(keys.k, keys.v, k, v, slot_mapping, impl)


def _check(keys: PagedKV, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    sizes = Sizes()
    sizes.match("keys.k", keys.k, "num_pages page_size num_kv_heads head_dim_k")
    sizes.match("keys.v", keys.v, "num_pages page_size num_kv_heads head_dim_v")
    sizes.match("k", k, "num_tokens num_kv_heads head_dim_k")
    sizes.match("v", v, "num_tokens num_kv_heads head_dim_v")
    sizes.match("slot_mapping", slot_mapping, "num_tokens")
    check_dtype("slot_mapping", slot_mapping, (torch.int32, torch.int64))
    check_device("slot_mapping", slot_mapping, keys.k.device)
    for name, new in (("k", k), ("v", v)):
        check_dtype(name, new, (keys.k.dtype,))
        check_device(name, new, keys.k.device)
        if new.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; append_kv is for inference, detach it")


def check_slots(keys: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Validate slots that lie in device memory, naming the token that is wrong. Synchronises."""
    num_slots = keys.k.shape[0] * keys.page_size
    owners: dict[int, int] = {}
    for token, slot in enumerate(read_index(slot_mapping)):
        if slot >= num_slots:
            raise ValueError(f"token {token} has slot {slot}, but there are {num_slots} slots")
        if slot >= 0 and owners.setdefault(slot, token) != token:
            raise ValueError(f"tokens {owners[slot]} and {token} have the same slot {slot}")


def _append_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    impl: str | None,
) -> None:
    writer = _load_writer(impl, k_cache.device)
    if k.shape[0]:
        writer.append_kv(k_cache, v_cache, k, v, slot_mapping)


@cache
def _load_writer(impl: str | None, device: torch.device) -> ModuleType:
    if impl is None:
        modules = (import_module(path) for path in WRITERS.values())
        return next(module for module in modules if module.refusal(device) is None)
    if impl not in WRITERS:
        raise ValueError(f"impl must be one of {', '.join(WRITERS)}, got {impl!r}")
    module = import_module(WRITERS[impl])
    if reason := module.refusal(device):
        raise ValueError(f"impl={impl!r} cannot write these keys: {reason}")
    return module


@torch.library.custom_op("anabranch::append_kv", mutates_args=("k_cache", "v_cache"))
def _append_kv_op(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    impl: str | None,
) -> None:
    _append_kv(k_cache, v_cache, k, v, slot_mapping, impl)


@_append_kv_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(*_: object) -> None:
    pass
