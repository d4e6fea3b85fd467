"""Key sources by what the rest of the package asks of them."""

from __future__ import annotations

import pytest
import torch
from cases import SOURCES, Case, make_inputs

from anabranch.keys import KINDS, KeySource, flatten_source, rebuild_source

CASE = Case(q_lens=(1, 1, 1), k_lens=(5, 20, 0), dims=(16, 24))


def make_keys(source: str) -> KeySource:
    return make_inputs(Case(**{**CASE.__dict__, "source": source}), 0)[1]


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_describes_itself(source: str) -> None:
    keys = make_keys(source)
    assert (keys.num_seqs, keys.num_kv_heads) == (3, 2)
    assert (keys.head_dim_k, keys.head_dim_v) == (16, 24)
    assert (keys.dtype, keys.device) == (torch.float32, torch.device("cpu"))
    assert keys.key_lens() == [5, 20, 0]
    assert max(keys.key_lens()) <= keys.capacity
    assert sum(keys.key_lens()) <= keys.total_capacity
    keys.check_content()


@pytest.mark.parametrize("source", SOURCES)
def test_a_view_finds_every_key(source: str) -> None:
    """By nothing but pointers, strides, table and lengths."""
    keys = make_keys(source)
    view, (_, cu_seqlens) = keys.view(), keys.lengths
    for seq, length in enumerate(keys.key_lens()):
        for position in range(length):
            if view.page_table is not None:
                page = int(view.page_table[seq, position // view.page_size])
                row = position % view.page_size
            else:
                page, row = seq if cu_seqlens is None else int(cu_seqlens[seq]), position
            for store, gathered in zip((view.k, view.v), keys.gather(seq), strict=True):
                start = store.ptr.storage_offset() + page * store.page + row * store.key
                found = store.ptr.as_strided(gathered.shape[1:], (store.head, store.dim), start)
                assert torch.equal(found, gathered[position])


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_passes_through_an_operator(source: str) -> None:
    keys = make_keys(source)
    again = rebuild_source(*flatten_source(keys))
    assert type(again) is type(keys)
    for name, tensor in keys.tensors().items():
        assert getattr(again, name) is tensor


def test_every_source_is_listed() -> None:
    found, left = set(), [KeySource]
    while left:
        kinds = left.pop().__subclasses__()
        left += kinds
        found |= {kind for kind in kinds if "kind" in vars(kind)}
    in_package = {kind for kind in found if kind.__module__.startswith("anabranch")}
    assert {kind.__qualname__ for kind in in_package} == {
        kind.__qualname__ for kind in KINDS.values()
    }
