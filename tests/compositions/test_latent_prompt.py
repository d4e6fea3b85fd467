"""Latent prompts by heads and pieces: merged, their states are the state over all keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from tolerance import assert_state_close
from torch.utils._python_dispatch import _disable_current_modes

from anabranch import (
    AttentionState,
    LatentKV,
    UpProjection,
    append_kv,
    attend,
    attend_latent_prompt,
    merge,
)
from anabranch.compositions import expanded_prompt, prompt_pieces, prompt_workspace
from anabranch.compositions.prompt_pieces import make_prompt_layout
from anabranch.compositions.prompt_workspace import (
    MIB,
    MIN_PIECE,
    ExpandedKeys,
    PromptLens,
    Workspace,
    check_workspace,
    choose_workspace,
)
from anabranch.keys.formats import empty_store

HEADS, NOPE, ROTARY, VALUE, RANK, PAGE = 8, 16, 8, 12, 32, 16
WIDTH = RANK + ROTARY
SCALE = 0.3


def random_up(num_heads: int = HEADS) -> UpProjection:
    return UpProjection(torch.randn(num_heads, NOPE + VALUE, RANK) / RANK**0.5, NOPE)


def random_prompt(
    q_lens: list[int], context_lens: list[int], num_heads: int = HEADS
) -> tuple[torch.Tensor, torch.Tensor, LatentKV]:
    """Queries, their rows, and pages in disorder that hold the contexts and these rows."""
    num_tokens = sum(q_lens)
    lens = [q + context for q, context in zip(q_lens, context_lens, strict=True)]
    counts = [-(-length // PAGE) for length in lens]
    pages = torch.randperm(sum(counts)).int().split(counts)
    table = torch.zeros(len(lens), max(counts, default=1), dtype=torch.int32)
    for row, mine in zip(table, pages, strict=True):
        row[: len(mine)] = mine
    cache = torch.randn(sum(counts), PAGE, WIDTH)
    q = torch.randn(num_tokens, num_heads, NOPE + ROTARY)
    rows = torch.randn(num_tokens, WIDTH)
    keys = LatentKV(cache, table, torch.tensor(lens, dtype=torch.int32), head_dim_v=RANK)
    places = [
        int(table[seq, p // PAGE]) * PAGE + p % PAGE
        for seq, (length, context) in enumerate(zip(lens, context_lens, strict=True))
        for p in range(context, length)
    ]
    append_kv(keys, rows, None, torch.tensor(places, dtype=torch.int64))
    return q, rows, keys


def exact(
    q: torch.Tensor, keys: LatentKV, up: UpProjection, q_lens: list[int], dtype: torch.dtype
) -> AttentionState:
    """Attention over expanded keys, written with torch, sequence by sequence."""
    up = up._replace(weight=up.weight.to(dtype))
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for seq, part in enumerate(q.split(q_lens)):
        k, v = up.expand(keys.gather(seq)[0][:, 0].to(dtype))
        scores = torch.einsum("qhd,khd->hqk", part.to(dtype), k) * SCALE
        hidden = torch.ones_like(scores[0]).tril(len(k) - len(part)) == 0
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        lses.append(scores.logsumexp(-1).t())
    return AttentionState(torch.cat(outs), torch.cat(lses))


CASES = [
    ([5], [0]),
    ([300], [0]),
    ([300, 7, 0, 260], [0, 0, 3, 0]),
    ([40], [700]),
    ([33, 1, 0, 150, 290], [299, 0, 5, 1, 513]),
    ([200, 200], [128, 128]),
]


@pytest.mark.parametrize(("q_lens", "context_lens"), CASES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(8, 128, 128), (2, 100, 33), (1, 400, 400), (4, 10**6, 10**6)], ids=str
)
def test_pieces_give_the_state_of_the_whole(
    q_lens: list[int],
    context_lens: list[int],
    sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(len(q_lens))
    up = random_up()
    q, rows, keys = random_prompt(q_lens, context_lens)
    monkeypatch.setattr(prompt_pieces, "choose_workspace", lambda *_: Workspace(*sizes))
    found = attend_latent_prompt(
        q, rows, keys, up, q_lens=q_lens, context_lens=context_lens, scale=SCALE
    )
    plain, double = (exact(q, keys, up, q_lens, x) for x in (torch.float32, torch.float64))
    assert_state_close(found, double, plain)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    out, lse = attend(up.absorb(q), keys, cu_seqlens_q=starts, scale=SCALE)
    assert_state_close(AttentionState(up.values(out), lse), double, plain)


def quantised(plain: LatentKV) -> LatentKV:
    """The same rows as int8 codes."""
    shape = (*plain.cache.shape[:2], 1, WIDTH)
    codes, scales = empty_store("int8", shape, plain.dtype, plain.device)
    assert scales is not None
    options: Any = {"cache_scales": scales[:, :, 0], "query_dtype": plain.dtype}
    keys = LatentKV(codes[:, :, 0], plain.page_table, plain.seq_lens, RANK, **options)
    slots = torch.arange(plain.num_pages * PAGE)
    append_kv(keys, plain.cache.flatten(0, 1), None, slots)
    return keys


@pytest.mark.parametrize(
    ("num_heads", "context_len", "budget", "is_cut"),
    [
        (8, 1000, 2, False),
        (8, 1000, 0.5, True),
        (8, 8000, 8, False),
        (8, 8000, 1, True),
        (2, 8000, 3.9, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "int8"])
def test_memory_stays_under_the_budget(
    num_heads: int,
    context_len: int,
    budget: float,
    is_cut: bool,
    is_plain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the result, and beside what attention itself uses, at any length of the context."""
    q_lens, context_lens = [900, 300], [context_len, 77]
    up = random_up(num_heads)
    q, rows, keys = random_prompt(q_lens, context_lens, num_heads)
    keys = keys if is_plain else quantised(keys)
    live = LiveBytes()
    calls: list[int] = []
    merges: list[int] = []

    def without_its_own(q: torch.Tensor, source: Any, **options: Any) -> AttentionState:
        calls.append(source.num_kv_heads * len(source.k))
        with _disable_current_modes():
            return attend(q, source, **options)

    def merged_uncounted(*states: AttentionState, out: AttentionState) -> None:
        merges.append(len(states))
        with _disable_current_modes():
            merge(*states, out=out)

    monkeypatch.setattr(expanded_prompt, "attend", without_its_own)
    monkeypatch.setattr(expanded_prompt, "merge", merged_uncounted)
    lens: Any = {"q_lens": q_lens, "context_lens": context_lens}
    with live:
        state = attend_latent_prompt(
            q, rows, keys, up, **lens, scale=SCALE, max_workspace_mib=budget
        )
    result = state.out.nbytes + state.lse.nbytes
    assert budget * MIB / 2 < live.peak - result <= budget * MIB
    assert sum(calls) >= num_heads * (sum(q_lens) + sum(context_lens))
    assert bool(merges) == is_cut
    assert len(calls) > 1


def test_room_for_parts_follows_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the Hopper kernel has no parts, where whole blocks of its head dims fill the GPU."""
    monkeypatch.setattr(prompt_workspace, "capability", lambda device: (9, 0))
    monkeypatch.setattr(prompt_workspace, "num_sms", lambda device: 132)
    monkeypatch.delenv("ANABRANCH_ATTEND", raising=False)

    def cuts(nope: int = 128, **options: Any) -> bool:
        device = SimpleNamespace(type="cuda")
        given: Any = (16, 1, nope + 64, 128, torch.bfloat16, device, 576 * 2, 2 * 64)
        lens = PromptLens((8192,), (32768,))
        return choose_workspace(ExpandedKeys(*given), lens, 256, **options).cuts_blocks

    assert not cuts()
    assert cuts(fused_merge=False)
    assert cuts(nope=96)
    monkeypatch.setenv("ANABRANCH_ATTEND", "triton")
    assert cuts()


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [([600], [900]), ([0, 300, 1, 260], [4, 0, 700, 1030])], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(8, 10**6, 10**6, False), (4, 400, 128, False), (2, 300, 200, True)],
    ids=str,
)
def test_layers_share_plans_on_a_gpu(
    lens: tuple[list[int], list[int]],
    sizes: tuple[int, int, int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSeek's widths in bfloat16; a plan is kept, or thrown away where blocks may be cut."""
    torch.manual_seed(0)
    nope, rotary, value, rank = 128, 64, 128, 512
    for name, size in {"NOPE": nope, "ROTARY": rotary, "VALUE": value, "RANK": rank}.items():
        monkeypatch.setitem(globals(), name, size)
    monkeypatch.setitem(globals(), "WIDTH", rank + rotary)
    monkeypatch.setitem(globals(), "SCALE", (nope + rotary) ** -0.5)
    monkeypatch.setattr(prompt_pieces, "choose_workspace", lambda *_: Workspace(*sizes))
    up = random_up()
    up = up._replace(weight=up.weight.cuda().bfloat16())
    given: Any = {"q_lens": lens[0], "context_lens": lens[1]}
    layout = make_prompt_layout(up.expanded(WIDTH, PAGE), **given)
    for _ in range(2):
        q, rows, keys = random_prompt(*lens)
        tensors = (keys.cache.cuda().bfloat16(), keys.page_table.cuda(), keys.seq_lens.cuda())
        keys = LatentKV(*tensors, head_dim_v=rank)
        q, rows = q.cuda().bfloat16(), rows.cuda().bfloat16()
        found = attend_latent_prompt(q, rows, keys, up, **given, scale=SCALE, layout=layout)
        plain, double = (exact(q, keys, up, lens[0], x) for x in (torch.bfloat16, torch.float64))
        assert_state_close(found, double, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "budget"),
    [(16, 300, 64), (16, 8192, 64), (128, 2048, 256), (128, 8192, 256)],
    ids=str,
)
def test_memory_stays_under_the_budget_on_a_gpu(
    num_heads: int, num_tokens: int, budget: int
) -> None:
    """With all that attention itself uses."""
    torch.manual_seed(0)
    nope, rotary, value, rank = 128, 64, 128, 512
    options: Any = {"device": "cuda", "dtype": torch.bfloat16}
    up = UpProjection(torch.randn(num_heads, nope + value, rank, **options) / rank**0.5, nope)
    q = torch.randn(num_tokens, num_heads, nope + rotary, **options)
    rows = torch.randn(num_tokens, rank + rotary, **options)
    for context_len in (32768, 100000):
        num_pages = -(-context_len // 64)
        cache = torch.randn(num_pages, 64, rank + rotary, **options)
        table = torch.randperm(num_pages, device="cuda").int()[None]
        seq_lens = torch.tensor([context_len], dtype=torch.int32, device="cuda")
        keys = LatentKV(cache, table, seq_lens, head_dim_v=rank)
        lens: Any = {"q_lens": [num_tokens], "context_lens": [context_len], "scale": 192**-0.5}
        attend_latent_prompt(q, rows, keys, up, **lens, max_workspace_mib=budget)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        state = attend_latent_prompt(q, rows, keys, up, **lens, max_workspace_mib=budget)
        result = state.out.nbytes + state.lse.nbytes
        assert torch.cuda.max_memory_allocated() - before - result <= budget * MIB
        del state


@pytest.mark.parametrize("num_heads", [16, 40, 128])
@pytest.mark.parametrize(
    ("q_lens", "context_lens"),
    [
        ([2048], [32768]),
        ([8192], [32768]),
        ([2048], [131072]),
        ([8192], [0]),
        ([700] * 11, [0, 9000] * 5 + [40]),
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [64, 256, 1024])
def test_attention_is_called_as_often_as_memory_asks(
    num_heads: int, q_lens: list[int], context_lens: list[int], budget: int
) -> None:
    """Every call but a few handles as many expanded keys as the budget can hold."""
    weight = torch.empty(num_heads, 256, 512, dtype=torch.bfloat16, device="meta")
    up = UpProjection(weight, 128)
    lens: Any = {"q_lens": q_lens, "context_lens": context_lens}
    layout = make_prompt_layout(up.expanded(576, 64), **lens, max_workspace_mib=budget)
    calls = sum(len(piece.calls) for piece in layout.pieces) * num_heads // layout.num_heads
    expanded = (sum(q_lens) + sum(context_lens)) * num_heads * (192 + 128) * 2
    assert calls <= 2.2 * expanded / (budget * MIB) + 1


def test_a_layout_is_for_its_lengths() -> None:
    up = random_up()
    q, rows, keys = random_prompt([30], [50])
    layout = make_prompt_layout(up.expanded(WIDTH, PAGE), q_lens=[30], context_lens=[50])
    options: Any = {"context_lens": [50], "scale": SCALE}
    found = attend_latent_prompt(q, rows, keys, up, q_lens=[30], **options, layout=layout)
    wanted = attend_latent_prompt(q, rows, keys, up, q_lens=[30], **options)
    assert torch.equal(found.out, wanted.out)
    with pytest.raises(ValueError, match=r"layout was made for .*\(30,\).*, got .*\(29,\)"):
        attend_latent_prompt(q, rows, keys, up, q_lens=[29], **options, layout=layout)


def test_a_budget_too_small_for_a_piece_is_refused() -> None:
    up = UpProjection(torch.empty(128, 256, 512, device="meta"), 128)
    expanded = up.expanded(576, 64)
    message = f"max_workspace_mib 0.5 is too small for one head of {MIN_PIECE} keys, which needs"
    with pytest.raises(ValueError, match=message) as error:
        check_workspace(expanded, 0.5)
    needed = 1.005 * float(str(error.value).split()[-1])  # it is written in three digits
    check_workspace(expanded, needed)
    lens: Any = {"q_lens": [5000], "context_lens": [5000]}
    assert make_prompt_layout(expanded, **lens, max_workspace_mib=needed).num_heads == 1
    with pytest.raises(ValueError, match=message):
        make_prompt_layout(expanded, **lens, max_workspace_mib=0.5)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("need q .num_tokens, 8, 24.*got .30, 8, 23", {"q": torch.randn(30, HEADS, 23)}),
        ("rows has num_tokens = 29", {"rows": torch.randn(29, WIDTH)}),
        ("head_dim_k = 40, but rows has head_dim_k = 39", {"rows": torch.randn(30, WIDTH - 1)}),
        ("q_lens sum up to 31", {"q_lens": [31]}),
        ("must not be negative, got .-1", {"context_lens": [-1]}),
        ("context_lens has num_seqs = 2", {"context_lens": [1, 1]}),
        ("context_lens has 4000, but a row of the page table holds", {"context_lens": [4000]}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, change: dict[str, Any]) -> None:
    q, rows, keys = random_prompt([30], [50])
    given = {"q": q, "rows": rows, "q_lens": [30], "context_lens": [50]} | change
    with pytest.raises(ValueError, match=message):
        attend_latent_prompt(
            given.pop("q"), given.pop("rows"), keys, random_up(), **given, scale=SCALE
        )


def test_rows_in_a_quantised_cache_are_decoded() -> None:
    torch.manual_seed(0)
    q, rows, plain = random_prompt([40], [200])
    keys = quantised(plain)
    options: Any = {"q_lens": [40], "context_lens": [200], "scale": SCALE}
    up = random_up()
    found, wanted = (attend_latent_prompt(q, rows, x, up, **options) for x in (keys, plain))
    error = (found.out - wanted.out).abs().max()
    assert 0 < error < 0.02 * wanted.out.abs().max()
