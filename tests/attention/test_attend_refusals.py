"""Bad input to attend(): a ValueError that names the values, before any device memory is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch import AttentionState, DenseKV, PagedKV, RaggedKV, attend, make_plan, producers
from anabranch.call import AttendCall, PlanOptions

# Two sequences of 3 and 2 queries, 6 heads over 2, pages of 8.
NUM_TOKENS, NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, DIM = 5, 2, 6, 2, 16
META = {"device": "meta"}


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def queries(*shape: int, **kind: Any) -> torch.Tensor:
    return torch.zeros(*(shape or (NUM_TOKENS, NUM_HEADS, DIM)), **kind)


def paged(**changes: torch.Tensor) -> PagedKV:
    cache = torch.zeros(4, 8, NUM_KV_HEADS, DIM)
    fields = {
        "k": cache, "v": cache, "page_table": ints(0, 1, 2, 3).view(2, 2), "seq_lens": ints(9, 16),
    }  # fmt: skip
    return PagedKV(**(fields | changes))


def refuse(message: str, q: torch.Tensor | None = None, keys: Any = None, **options: Any) -> None:
    options = {"cu_seqlens_q": ints(0, 3, 5)} | options
    with pytest.raises(ValueError, match=message):
        attend(queries() if q is None else q, keys or paged(), **options)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (queries(5, 96), r"q must have 3 or 4 dimensions, got shape \(5, 96\)"),
        (queries(5, 6, 24), "k has head_dim_k = 16, but q has head_dim_k = 24"),
        (queries(5, 7, 16), "q has 7 heads, not a multiple of the 2 of the keys"),
        (queries().half(), "k must be one of float16, got torch.float32"),
        (queries().double(), "q must be one of float16, bfloat16, float32, got torch.float64"),
        (queries(1, 5, 6, 16), r"packed queries of 3 dimensions, got q \(1, 5, 6, 16\)"),
        (queries(requires_grad=True), "q requires grad"),
        (queries(5, 0, 16), "q has 0 heads, not a multiple of the 2 of the keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_queries(q: torch.Tensor, message: str) -> None:
    refuse(message, q)


def test_keys_with_gradients_or_empty_pages() -> None:
    cache = torch.zeros(4, 8, NUM_KV_HEADS, DIM, requires_grad=True)
    refuse("k requires grad", keys=paged(k=cache))
    refuse("v requires grad", keys=paged(v=cache))
    with pytest.raises(
        ValueError, match=r"a page must hold at least one key, got k \(4, 0, 2, 16\)"
    ):
        paged(k=cache[:, :0], v=cache[:, :0])


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (queries(5, 7, 16), "q has 7 heads, not a multiple of the 2 of the keys"),
        (queries(5, 6, 24), "k has head_dim_k = 16, but q has head_dim_k = 24"),
        (queries().half(), "k must be one of float16, got torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plans_check_what_they_are_for(q: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(q, paged(), cu_seqlens_q=ints(0, 3, 5))


def test_a_plan_of_another_dtype() -> None:
    plan = make_plan(queries(), paged(), cu_seqlens_q=ints(0, 3, 5))
    half = torch.zeros(4, 8, NUM_KV_HEADS, DIM, dtype=torch.float16)
    refuse(
        "the plan was made for itemsize = 4, got 2",
        queries().half(),
        paged(k=half, v=half),
        plan=plan,
    )


def test_queries_on_another_device() -> None:
    refuse("cu_seqlens_q is on cpu, expected meta", queries(**META))
    cu_seqlens_q = ints(0, 3, 5, device="meta")
    refuse("k is on cpu, expected meta", queries(**META), cu_seqlens_q=cu_seqlens_q)


@pytest.mark.parametrize(
    ("cu_seqlens_q", "message"),
    [
        (None, "q has 5 sequences, the keys have 2; packed queries"),
        (ints(0, 5), r"cu_seqlens_q must be \[3\] for 2 sequences of keys, got shape \(2,\)"),
        (ints(0, 3, 5)[:, None], r"cu_seqlens_q must be \[3\].*, got shape \(3, 1\)"),
        (ints(0, 3, 5).long(), "cu_seqlens_q must be one of int32, got torch.int64"),
        (ints(0, 0, 3, 3, 5)[::2], "cu_seqlens_q must be contiguous, got stride 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cu_seqlens_q(cu_seqlens_q: torch.Tensor | None, message: str) -> None:
    refuse(message, cu_seqlens_q=cu_seqlens_q)
    with pytest.raises(ValueError, match=message):
        make_plan(queries(), paged(), cu_seqlens_q=cu_seqlens_q)


TREE = torch.ones(NUM_TOKENS, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1, a token's own key, got 0"),
        ({"window": -1}, "window must be at least 1, a token's own key, got -1"),
        ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        ({"softcap": float("inf")}, "softcap must be positive and finite, got inf"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
        ({"sinks": torch.zeros(5)}, "sinks has num_heads = 5, but q has num_heads = 6"),
        ({"sinks": torch.zeros(6).int()}, "sinks must be one of .*, got torch.int32"),
        ({"sinks": torch.zeros(6, **META)}, "sinks is on meta, expected cpu"),
        ({"tree_mask": TREE, "window": 4}, "tree_mask has no order .*, got window=4"),
        ({"tree_mask": TREE, "causal": False}, "tree_mask replaces the causal rule"),
        ({"tree_mask": TREE[:3]}, "tree_mask has num_tokens = 3, but q has num_tokens = 5"),
        ({"tree_mask": TREE[0]}, r"tree_mask must be \[num_tokens, tree_width\], got shape \(3,\)"),
        ({"tree_mask": TREE.int()}, "tree_mask must be one of bool, got torch.int32"),
        ({"impl": "cuda"}, "impl must be one of torch, .*triton, got 'cuda'"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str) -> None:
    refuse(message, **options)


OUT = AttentionState(torch.zeros(NUM_TOKENS, NUM_HEADS, DIM), torch.zeros(NUM_TOKENS, NUM_HEADS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"out": OUT.out[:4]},
            r"out has shapes \(4, 6, 16\) and \(5, 6\), expected \(5, 6, 16\) and \(5, 6\)",
        ),
        ({"out": OUT.out.half()}, "out.out must be one of float32, got torch.float16"),
        ({"lse": OUT.lse.double()}, "out.lse must be one of float32, got torch.float64"),
        ({"out": OUT.out.to("meta")}, "out.out is on meta, expected cpu"),
        (
            {"out": OUT.out.transpose(0, 2).contiguous().transpose(0, 2)},
            r"out.out must be contiguous in its last dimension, got strides \(1, 5, 30\)",
        ),
        ({"out": OUT.out[:1].expand_as(OUT.out)}, "out.out overlaps itself"),
        ({"out": OUT.out.clone().requires_grad_()}, "out.out requires grad"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_destinations(changes: dict[str, torch.Tensor], message: str) -> None:
    refuse(message, out=OUT._replace(**changes))


def test_a_destination_that_is_read() -> None:
    q = queries()
    refuse("out.out overlaps q, which is still to be read", q, out=OUT._replace(out=q))
    cache = torch.zeros(4, 8, NUM_KV_HEADS, DIM)
    inside = cache.flatten()[: OUT.out.numel()].view_as(OUT.out)
    refuse("out.out overlaps v", keys=paged(v=cache), out=OUT._replace(out=inside))


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="dropout"):
        attend(queries(), paged(), cu_seqlens_q=ints(0, 3, 5), dropout=0.1)


CACHE = torch.zeros(4, 8, NUM_KV_HEADS, DIM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": CACHE[:3]}, "v has num_pages = 3, but k has num_pages = 4"),
        ({"v": CACHE[:, :4]}, "v has page_size = 4, but k has page_size = 8"),
        ({"v": CACHE[:, :, :1]}, "v has num_kv_heads = 1, but k has num_kv_heads = 2"),
        ({"v": CACHE.half()}, "v must be one of float32, got torch.float16"),
        ({"k": CACHE[0]}, r"k must be \[num_pages, page_size, .*, got shape \(8, 2, 16\)"),
        ({"seq_lens": ints(9)}, "seq_lens has num_seqs = 1, but page_table has num_seqs = 2"),
        ({"seq_lens": ints(9, 16).long()}, "seq_lens must be one of int32, got torch.int64"),
        ({"page_table": ints(0, 1)}, r"page_table must be \[num_seqs, max_pages\], got shape"),
        (
            {"page_table": ints(0, 1, 2, 3).view(2, 2).t()},
            r"page_table must be contiguous in its last dimension, got strides \(1, 2\)",
        ),
        ({"page_table": ints(0, 1, device="meta")[:, None]}, "page_table is on meta, expected cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_paged_keys(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged(**changes)


def test_contiguous_keys() -> None:
    k = torch.zeros(2, 9, NUM_KV_HEADS, DIM)
    with pytest.raises(ValueError, match="seq_lens has num_seqs = 3, but k has num_seqs = 2"):
        DenseKV(k, k, ints(1, 2, 3))
    with pytest.raises(ValueError, match="v has max_len = 8, but k has max_len = 9"):
        DenseKV(k, k[:, :8])
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[num_seqs \+ 1\], got shape \(0,\)"):
        RaggedKV(k[0], k[0], ints())
    with pytest.raises(ValueError, match=r"k must be \[num_keys, .*, got shape \(2, 9, 2, 16\)"):
        RaggedKV(k, k, ints(0, 9))


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (0, "must have a head dim of at least 1, got 0"),
        (577, "impl='triton' cannot run this call: . must have a head dim from 1 to 5.., got 577"),
    ],
)
def test_head_dims(dim: int, message: str) -> None:
    cache = torch.zeros(4, 8, NUM_KV_HEADS, dim)
    refuse(message, queries(5, 6, dim), paged(k=cache), impl="triton")
    refuse(message, keys=paged(v=cache), impl="triton")


def test_producers_are_asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, forget_calls: Callable[[], None]
) -> None:
    """The first that can runs a call and its plans; one that is named runs it or says why not."""
    asked: list[object] = []

    def refusal(call: AttendCall, options: PlanOptions) -> str:
        asked.append(options)
        return f"it dislikes {call.keys.kind} keys"

    monkeypatch.setitem(sys.modules, "fussy", SimpleNamespace(refusal=refusal))
    monkeypatch.setattr(producers, "PRODUCERS", {"fussy": "fussy", **producers.PRODUCERS})
    given = {"cu_seqlens_q": ints(0, 3, 5)}
    attend(queries(), paged(), **given)
    assert make_plan(queries(), paged(), **given, batch_invariant=True).impl == "torch"
    assert asked == [PlanOptions(), PlanOptions(batch_invariant=True)]
    refuse("impl='fussy' cannot run this call: it dislikes paged keys", impl="fussy")
    monkeypatch.setattr(producers, "PRODUCERS", {"fussy": "fussy"})
    forget_calls()
    refuse("nothing can run this call; fussy: it dislikes paged keys")
    producers.load_producer.cache_clear()


def test_a_plan_of_another_producer() -> None:
    plan = make_plan(queries(), paged(), cu_seqlens_q=ints(0, 3, 5), impl="torch")
    refuse("the plan was made by 'torch', got impl='triton'", plan=plan, impl="triton")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": queries(6, NUM_HEADS, DIM)}, "the plan was made for num_tokens = 5, got 6"),
        ({"q": queries(5, 4, DIM)}, "the plan was made for num_heads = 6, got 4"),
        ({"window": 3}, "the plan was made for window = None, got 3"),
        ({"causal": False}, "the plan was made for causal = True, got False"),
        ({"keys": paged(v=CACHE[..., :8])}, "the plan was made for head_dim_v = 16, got 8"),
        (
            {"keys": paged(k=CACHE[:, :4], v=CACHE[:, :4])},
            "the plan was made for page_size = 8, got 4",
        ),
        (
            {"keys": RaggedKV(CACHE[0], CACHE[0], ints(0, 3, 8))},
            "the plan was made for source = paged, got ragged",
        ),
        (
            {
                "keys": paged(page_table=ints(0, 1, 2)[:, None], seq_lens=ints(1, 2, 3)),
                "cu_seqlens_q": ints(0, 3, 5, 5),
            },
            "the plan was made for num_seqs = 2, got 3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_of_another_shape(given: dict[str, Any], message: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys = paged()
    keys = PagedKV(
        *(getattr(keys, name).to(device) for name in ("k", "v", "page_table", "seq_lens"))
    )
    cu_seqlens_q = ints(0, 3, 5, device=device)
    plan = make_plan(queries().to(device), keys, cu_seqlens_q=cu_seqlens_q, impl="triton")
    refuse(message, plan=plan, impl="triton", **given)


@pytest.mark.gpu
def test_torch_is_the_cpus() -> None:
    q, k = queries(device="cuda"), torch.zeros(5, 9, NUM_KV_HEADS, DIM, device="cuda")
    with pytest.raises(
        ValueError, match="impl='torch' cannot run this call: it is the CPU's, got q on cuda:0"
    ):
        attend(q, DenseKV(k, k), impl="torch")


FLAT = torch.zeros(20, NUM_KV_HEADS, DIM)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (paged(seq_lens=ints(9, 17)), "sequence 1 has seq_len 17, its storage holds 0 to 16"),
        (paged(seq_lens=ints(-1, 3)), "sequence 0 has seq_len -1, its storage holds 0 to 16"),
        (
            paged(page_table=ints(0, 1)[:, None], seq_lens=ints(8, 9)),
            "sequence 1 has seq_len 9, its storage holds 0 to 8",
        ),
        (
            paged(page_table=ints(0, 4, 2, 3).view(2, 2)),
            "sequence 0 has page 4, but there are 4 pages",
        ),
        (
            paged(page_table=ints(0, 1, -2, 3).view(2, 2)),
            "sequence 1 has page -2, but there are 4 pages",
        ),
        (
            DenseKV(*[torch.zeros(2, 9, NUM_KV_HEADS, DIM)] * 2, ints(9, 10)),
            "sequence 1 has seq_len 10, its storage holds 0 to 9",
        ),
        (RaggedKV(FLAT, FLAT, ints(0, 8, 6)), "cu_seqlens must not descend, got 8 then 6 at seq"),
        (
            RaggedKV(FLAT, FLAT, ints(0, 8, 21)),
            "cu_seqlens must run from 0 or more to at most num_keys = 20, got 0 to 21",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_lengths_in_device_memory(keys: Any, message: str) -> None:
    refuse(message, keys=keys, check=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 4, 3), "cu_seqlens_q must not descend, got 4 then 3 at sequence 1"),
        ((1, 3, 5), "cu_seqlens_q must run from 0 to at most num_tokens = 5, got 1 to 5"),
        ((0, 3, 6), "cu_seqlens_q must run from 0 to at most num_tokens = 5, got 0 to 6"),
    ],
)
def test_queries_in_device_memory(bounds: tuple[int, ...], message: str) -> None:
    refuse(message, cu_seqlens_q=ints(*bounds), check=True)


def test_unused_pages_are_not_wrong() -> None:
    table = ints(0, 99, 2, 3).view(2, 2)
    keys = paged(page_table=table, seq_lens=ints(8, 16))
    attend(queries(), keys, cu_seqlens_q=ints(0, 3, 5), check=True)
