"""What kernels are given: tensors with named strides, stores, views and lists of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.keys import KeyLists, KeyStore, KeyView, ScaleStore


class Rows(NamedTuple):
    """A tensor [tokens, heads, dims] and its strides, flat so that kernels can pass it on."""

    ptr: torch.Tensor
    token: int
    head: int
    dim: int


class StoreArguments(NamedTuple):
    """A store as a kernel takes it; its format is a constant."""

    ptr: torch.Tensor
    page: int
    key: int
    head: int
    dim: int
    scales: ScaleStore | None


class ListArguments(NamedTuple):
    """Where listed keys lie, as KeyLists has it; sizes of pages and heads are constants."""

    seqs: torch.Tensor | None  # [num_tokens]
    pages: torch.Tensor | None  # [num_seqs, max_pages]
    pages_stride: int
    tokens_per_seq: int
    width: int
    page_step: int
    key_step: int
    head_step: int


class ViewArguments(NamedTuple):
    """The view of a source as a kernel takes it."""

    k: StoreArguments
    v: StoreArguments
    table: torch.Tensor | None
    log_weights: torch.Tensor | None  # in the shape of the table
    lists: ListArguments | None = None  # the table then holds lists of keys, not of pages


def store_arguments(store: KeyStore, native_fp8: bool = False) -> StoreArguments:
    """A store without its format; float8 as bytes where the GPU has no such type."""
    ptr = store.ptr
    if ptr.dtype == torch.float8_e4m3fn and not native_fp8:
        ptr = ptr.view(torch.uint8)
    return StoreArguments(ptr, store.page, store.key, store.head, store.dim, store.scales)


def view_arguments(view: KeyView, native_fp8: bool) -> ViewArguments:
    """A view without what kernels know as constants."""
    stores = (store_arguments(store, native_fp8) for store in (view.k, view.v))
    return ViewArguments(*stores, view.page_table, view.log_weights)


def list_arguments(lists: KeyLists) -> ListArguments:
    """Lists without what kernels know as constants, and without the lists themselves."""
    pages = lists.page_table
    return ListArguments(
        lists.seqs,
        pages,
        0 if pages is None else pages.stride(0),
        lists.tokens_per_seq,
        lists.indices.shape[1],
        lists.page_step,
        lists.key_step,
        lists.head_step,
    )
