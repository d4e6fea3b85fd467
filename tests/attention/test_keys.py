"""Key sources by what the rest of the package asks of them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from cases import SOURCES, Case, make_inputs

from anabranch.keys import (
    KINDS,
    KeySource,
    LatentKV,
    PagedKV,
    SelectedKV,
    flatten_source,
    rebuild_source,
)
from anabranch.keys.source import check_index
from anabranch.keys.view import StoreFormat

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


def test_an_index_of_one_has_no_stride() -> None:
    one, two = (torch.zeros(1, size, 4, dtype=torch.int32)[..., 0] for size in (1, 2))
    assert one.stride(-1) == two.stride(-1) == 4
    check_index("table", one, torch.device("cpu"))
    check_index("length", torch.tensor(3, dtype=torch.int32), torch.device("cpu"))
    with pytest.raises(ValueError, match="table must be contiguous in its last dimension"):
        check_index("table", two, torch.device("cpu"))


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


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.kind)
def test_what_identifies_a_call_is_no_part_of_a_source(kind: type[KeySource]) -> None:
    (identity,) = (each for each in fields(kind) if each.name == "identity")
    assert not (identity.init or identity.repr or identity.compare)
    assert "identity" not in repr(kind)


def test_plain_stores_have_neither_scales_nor_blocks() -> None:
    plain = StoreFormat("plain")
    assert (plain.scaling, plain.block) == ("none", 0)
    assert not make_keys("paged").view().values_in_keys


@pytest.mark.parametrize("num_lists", [None, 2, 4])
@pytest.mark.parametrize("by_seqs", [False, True])
def test_lists_name_keys_of_their_tokens_sequence(num_lists: int | None, by_seqs: bool) -> None:
    """Two tokens a sequence, or tokens of any; a list is that of all heads or of some."""
    keys, generator = make_keys("dense"), torch.Generator().manual_seed(0)
    owners = [1, 0, 1, 1] if by_seqs else [0, 0, 1, 1, 2, 2]
    shape = (len(owners), *([] if num_lists is None else [num_lists]), 3)
    indices = torch.randint(0, 5, shape, generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 4, shape[:-1], generator=generator, dtype=torch.int32)
    if not by_seqs:
        counts[4:] = 0  # of a sequence without keys
    seqs = torch.tensor(owners, dtype=torch.int32) if by_seqs else None
    selected = SelectedKV(keys, indices, counts, seqs=seqs)
    for token, owner in enumerate(owners):
        for place in range(num_lists or 1):
            number = token * (num_lists or 1) + place
            count = int(counts.flatten()[number])
            listed = indices.reshape(-1, 3)[number, :count].long()
            first = place * keys.num_kv_heads // (num_lists or 1)
            heads = slice(None) if num_lists is None else slice(first, first + 1)
            for found, whole in zip(selected.gather(number), keys.gather(owner), strict=True):
                assert torch.equal(found, whole[listed, heads])


def test_pages_that_lie_in_order_are_read_in_place() -> None:
    """And nothing else is: other orders and pages that lie apart are copied as they are read."""
    whole, apart = torch.randn(2, 6, 4, 2, 8), torch.randn(6, 2, 4, 2, 8)
    table = torch.tensor([[2, 3, 4], [4, 2, 3], [5, 0, 0]], dtype=torch.int32)
    lens = torch.tensor([10, 10, 4], dtype=torch.int32)
    for (k, v), lies_apart in ((whole, False), (apart.unbind(1), True)):
        keys = PagedKV(k, v, table, lens)
        for seq, in_place in enumerate((True, False, True)):
            length = int(lens[seq])
            columns = keys.columns([seq], [length], length - 3, None)
            assert (columns.copied_bytes == 0) == (in_place and not lies_apart)
            pairs = zip(columns.read(slice(0, length - 3)), keys.gather(seq), strict=True)
            assert all(torch.equal(found[0], expected[3:]) for found, expected in pairs)


def test_values_of_latent_rows_are_some_of_their_columns() -> None:
    cache, table = torch.randn(2, 8, 40), torch.tensor([[0]], dtype=torch.int32)
    lens = torch.tensor([3], dtype=torch.int32)
    for dim in (1, 40):
        keys = LatentKV(cache, table, lens, dim)
        assert (keys.head_dim_k, keys.head_dim_v, keys.num_kv_heads) == (40, dim, 1)
        assert (keys.num_pages, keys.page_size, keys.capacity) == (2, 8, 8)
        assert keys.view().values_in_keys
    for dim in (0, 41):
        with pytest.raises(ValueError, match="head_dim_v"):
            LatentKV(cache, table, lens, dim)


def test_decoded_rows_are_gathered_as_float32() -> None:
    table, lens = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    plain = LatentKV(torch.randn(2, 8, 40).bfloat16(), table, lens, 32)
    assert [x.dtype for x in plain.gather(0)] == [torch.bfloat16] * 2
    codes = torch.randint(-99, 99, (2, 8, 40), dtype=torch.int8)
    scales = torch.rand(2, 8)
    given = {"cache_scales": scales, "query_dtype": torch.bfloat16}
    k, v = LatentKV(codes, table, lens, 32, **given).gather(0)
    assert k.dtype == v.dtype == torch.float32 and v.shape == (9, 1, 32)
    exact = codes * scales[..., None]
    torch.testing.assert_close(k[:, 0], torch.cat([exact[1], exact[0, :1]]))


def test_pages_of_latent_rows_are_read_in_their_order() -> None:
    cache = torch.randn(4, 8, 40)
    table = torch.tensor([[2, 0, 3], [1, 1, 1]], dtype=torch.int32)
    keys = LatentKV(cache, table, torch.tensor([24, 3], dtype=torch.int32), 32)
    out = torch.empty(16, 40)
    keys.read_pages(0, slice(1, 3), out)
    assert torch.equal(out, torch.cat([cache[0], cache[3]]))
    assert torch.equal(
        keys.read_slots(torch.tensor([17, 31])), torch.stack([cache[2, 1], cache[3, 7]])
    )
    codes, scales = torch.randint(-99, 99, cache.shape, dtype=torch.int8), torch.rand(4, 8)
    given = {"cache_scales": scales, "query_dtype": torch.float32}
    LatentKV(codes, table, keys.seq_lens, 32, **given).read_pages(0, slice(1, 3), out)
    exact = codes * scales[..., None]
    torch.testing.assert_close(out, torch.cat([exact[0], exact[3]]))
