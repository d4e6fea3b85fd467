"""append_kv(): each token in its slot, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from cases import SOURCES, Case, integers, make_cache, poisoned

from anabranch.append import append_kv
from anabranch.keys import PagedKV, flatten_source

NUM_PAGES = 4
every_implementation = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("torch", "cpu"),
        pytest.param(
            "triton", "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
        ),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)


def empty_keys(case: Case) -> PagedKV:
    none = integers(case, [0])
    return PagedKV(*make_cache(case, NUM_PAGES), none[:, None], none)


def new_tokens(case: Case, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of one projection, heads outermost."""
    packed = torch.randn(case.num_kv_heads, num_tokens, sum(case.dims))
    return packed.to(case.device, case.dtype).transpose(0, 1).split(case.dims, -1)


def some_slots(case: Case, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    slots = torch.randperm(NUM_PAGES * case.page_size)[:num_tokens]
    slots[::3] = -1
    return slots.to(case.device, dtype)


def expected_caches(
    keys: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> list[torch.Tensor]:
    caches = [keys.k.clone(), keys.v.clone()]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for cache, new in zip(caches, (k, v), strict=True):
                cache[slot // keys.page_size, slot % keys.page_size] = new[token]
    return caches


def assert_caches(keys: PagedKV, expected: list[torch.Tensor]) -> None:
    for cache, right in zip((keys.k, keys.v), expected, strict=True):
        torch.testing.assert_close(cache, right, rtol=0, atol=0, equal_nan=True)


@every_implementation
@pytest.mark.parametrize("source", SOURCES[2:])
@pytest.mark.parametrize(
    ("dims", "dtype", "slot_dtype"),
    [
        ((40, 64), torch.float32, torch.int32),
        ((128, 128), torch.float16, torch.int64),
        ((192, 72), torch.bfloat16, torch.int64),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
def test_append(
    impl: str,
    device: str,
    source: str,
    dims: tuple[int, int],
    dtype: torch.dtype,
    slot_dtype: torch.dtype,
    num_tokens: int,
) -> None:
    case = Case(source=source, dims=dims, dtype=dtype, device=device, num_kv_heads=3)
    keys, slots = empty_keys(case), some_slots(case, num_tokens, slot_dtype)
    k, v = new_tokens(case, num_tokens)
    expected = expected_caches(keys, k, v, slots)
    append_kv(keys, k, v, slots, check=True, impl=impl)
    assert_caches(keys, expected)


@every_implementation
@pytest.mark.parametrize("source", ["paged", "paged k|v"])
def test_compiled_whole(impl: str, device: str, source: str) -> None:
    case = Case(source=source, device=device)
    keys, slots = empty_keys(case), some_slots(case, 9, torch.int64)
    k, v = new_tokens(case, 9)

    def append_doubled(keys: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor):
        append_kv(keys, 2 * k, v, slots, impl=impl)
        return keys.k.isnan().sum()

    expected = expected_caches(keys, 2 * k, v, slots)
    backend = "aot_eager" if device == "cpu" else "inductor"
    left = torch.compile(append_doubled, fullgraph=True, backend=backend)(keys, k, v, slots)
    assert_caches(keys, expected)
    assert left == expected[0].isnan().sum()


def test_operator_is_as_it_says() -> None:
    case = Case()
    keys, slots = empty_keys(case), some_slots(case, 9, torch.int64)
    arguments = (*flatten_source(keys), list(new_tokens(case, 9)), slots, None, "torch")
    torch.library.opcheck(torch.ops.anabranch.append_kv.default, arguments)


@pytest.mark.gpu
def test_graph_replays_with_other_slots() -> None:
    case = Case(device="cuda", dims=(128, 64), dtype=torch.bfloat16)
    keys, slots = empty_keys(case), some_slots(case, 9, torch.int64)
    k, v = new_tokens(case, 9)
    append_kv(keys, k, v, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(keys, k, v, slots)
    for _ in range(3):
        slots.copy_(some_slots(case, 9, torch.int64))
        k.copy_(torch.randn_like(k))
        expected = expected_caches(keys, k, v, slots)
        graph.replay()
        assert_caches(keys, expected)


@pytest.mark.gpu
def test_cache_beyond_int32() -> None:
    both = torch.empty(9000, 16, 128, 128, dtype=torch.float16, device="cuda")
    assert both.numel() > 1 << 31
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    keys = PagedKV(both[..., :64], both[..., 64:], none[:, None], none)
    k, v = torch.randn(2, 2, 128, 64, dtype=torch.float16, device="cuda")
    append_kv(keys, k, v, torch.tensor([9000 * 16 - 1, 3], device="cuda"))
    for cache, new in ((keys.k, k), (keys.v, v)):
        assert torch.equal(cache[-1, -1], new[0])
        assert torch.equal(cache[0, 3], new[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(3, 2, 64)}, "v has num_tokens = 2, but k has num_tokens = 3"),
        ({"k": torch.zeros(2, 3, 64)}, "k has num_kv_heads = 3, but keys.k has num_kv_heads = 2"),
        ({"k": torch.zeros(2, 128)}, r"k must be \[.*\], got shape \(2, 128\)"),
        ({"v": torch.zeros(2, 2, 40)}, "v has head_dim_v = 40, but keys.v has head_dim_v = 64"),
        ({"k": torch.zeros(2, 2, 64).half()}, "k must be one of float32, got torch.float16"),
        ({"v": torch.zeros(2, 2, 64, device="meta")}, "v is on meta, expected cpu"),
        ({"slot_mapping": torch.zeros(3).int()}, "slot_mapping has num_tokens = 3, but k has"),
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping must be one of int32, int64, got"),
        ({"slot_mapping": torch.tensor([3, 32])}, "token 1 has slot 32, but there are 32 slots"),
        ({"slot_mapping": torch.tensor([5, 5])}, "tokens 0 and 1 have the same slot 5"),
        ({"impl": "cuda"}, "impl must be one of torch, triton, got 'cuda'"),
        ({"k": torch.zeros(2, 2, 64, requires_grad=True)}, "k requires grad"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    case = Case()
    arguments = {
        "k": poisoned(case, 2, 2, 64),
        "v": poisoned(case, 2, 2, 64),
        "slot_mapping": torch.tensor([0, 1]),
        "check": True,
    }
    with pytest.raises(ValueError, match=message):
        append_kv(empty_keys(case), **(arguments | changes))


@pytest.mark.gpu
def test_torch_is_the_cpus() -> None:
    case = Case(device="cuda")
    with pytest.raises(
        ValueError,
        match="impl='torch' cannot run here: it is the CPU's, got tensors on cuda:0",
    ):
        append_kv(empty_keys(case), *new_tokens(case, 1), integers(case, [0]), impl="torch")
