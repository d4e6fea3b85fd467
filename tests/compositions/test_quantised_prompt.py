"""Prompts over decoded pages: merged, the states of their pieces are the state over all keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ON_CPU, Case, assert_right, make_inputs
from live_bytes import LiveBytes
from torch.utils._python_dispatch import _disable_current_modes

from anabranch import AttentionState, PagedKV, attend, attend_quantised_prompt, merge
from anabranch.compositions import expanded_prompt, prompt_pieces, quantised_prompt
from anabranch.compositions.prompt_pieces import make_prompt_layout
from anabranch.compositions.prompt_workspace import MIB, PromptLens, Workspace
from anabranch.compositions.quantised_prompt import MIN_ROWS, PageExpander
from anabranch.kernels.cpu.expand_pages import expand_pages
from anabranch.keys.formats import FORMATS, empty_store

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
QUANTISED = [name for name in FORMATS if name != "plain"]
PAIRS = [*((name, name) for name in QUANTISED), ("q8_0", "fp8"), ("plain", "int8")]
DECODERS = [("torch", "cpu"), pytest.param("triton", "cpu", marks=ON_CPU)]
DECODERS += [pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
every_decoder = pytest.mark.parametrize(("impl", "device"), DECODERS)
BASE = Case(q_lens=(20, 1, 0, 9), k_lens=(20, 33, 5, 40), formats=("int8", "int8"))


def host_lens(case: Case) -> dict[str, list[int]]:
    contexts = [k - q for q, k in zip(case.q_lens, case.k_lens, strict=True)]
    return {"q_lens": [*case.q_lens], "context_lens": contexts}


def check(case: Case, impl: str | None, **given: Any) -> AttentionState:
    q, keys, options = make_inputs(case, 0)
    rules = {name: options[name] for name in ("scale", "window", "softcap", "sinks")}
    assert isinstance(keys, PagedKV)
    state = attend_quantised_prompt(q, keys, **host_lens(case), **rules, **given, impl=impl)
    assert_right(state, q, keys, options)
    return state


def cut_into(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pieces, "choose_workspace", lambda *_: Workspace(*sizes))


@every_decoder
@pytest.mark.parametrize("formats", PAIRS, ids="/".join)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_formats(formats: tuple[str, str], dtype: torch.dtype, impl: str, device: str) -> None:
    check(replace(BASE, formats=formats, dtype=dtype, device=device), impl)


@every_decoder
@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 7},
        {"page_size": 1, "group": 1},
        {"page_size": 64, "num_kv_heads": 3},
        {"dims": (96, 40), "formats": ("q8_0", "fp8")},
        {"dims": (128, 64), "formats": ("fp8_tensor", "q8_0"), "dtype": HALF},
        {"source": "paged by heads", "formats": ("plain", "plain")},
        {"q_lens": (8, 7, 9, 1), "k_lens": (8, 7, 9, 1)},
        {"q_lens": (1,) * 40, "k_lens": (3, 9, 1, 17) * 10},
        {"q_lens": (0, 0), "k_lens": (4, 0)},
    ],
    ids=str,
)
def test_shapes(change: dict[str, Any], impl: str, device: str) -> None:
    """Odd pages, heads and widths, lengths around a page, many sequences, none with tokens."""
    check(replace(BASE, device=device, **change), impl)


@every_decoder
@pytest.mark.parametrize("sizes", [(2, 13, 4), (1, 30, 30), (1, 13, 2)], ids=str)
@pytest.mark.parametrize(
    "rules", [{}, {"sinks": True}, {"softcap": 5.0}, {"window": 6, "sinks": True}], ids=str
)
def test_pieces_give_the_state_of_the_whole(
    rules: dict[str, Any],
    sizes: tuple[int, int, int],
    impl: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By heads and by keys; with a window, by tokens."""
    cut_into(sizes, monkeypatch)
    check(replace(BASE, device=device, **rules), impl)


def test_keys_outside_of_a_window_are_not_decoded() -> None:
    """Of 4000 keys, three tokens see ten and the two before the last."""
    layout = layout_of(Case(q_lens=(3,), k_lens=(4000,)), window=10)
    (piece,) = layout.pieces
    assert piece.num_keys == 12
    spread = layout_of(Case(q_lens=(3000,), k_lens=(4000,)), window=10, max_workspace_mib=0.6)
    assert len(spread.pieces) > 3
    assert sum(piece.num_keys for piece in spread.pieces) == 3000 + 9 * len(spread.pieces)


def layout_of(case: Case, **options: Any) -> prompt_pieces.PromptLayout:
    keys = make_inputs(replace(case, q_lens=(1,), k_lens=(1,), formats=("int8", "int8")), 0)[1]
    expanded = PageExpander(keys, 6).expanded  # pyright: ignore[reportArgumentType]
    return make_prompt_layout(expanded, **host_lens(case), **options)


@ON_CPU
@pytest.mark.parametrize("window", [None, 50], ids="window {}".format)
@pytest.mark.parametrize(("budget", "calls"), [(0.5, 2), (1.2, 2), (4, 1)], ids=str)
def test_memory_stays_under_the_budget(
    budget: float, calls: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the result, and beside what attention and a CPU's decoding themselves use."""
    case = replace(BASE, q_lens=(300, 0, 40), k_lens=(1500, 7, 90), window=window)
    q, keys, _ = make_inputs(case, 0)
    assert isinstance(keys, PagedKV)
    called: list[int] = []

    def without_its_own(q: torch.Tensor, source: Any, **options: Any) -> AttentionState:
        called.append(len(source.k))
        with _disable_current_modes():
            return attend(q, source, **options)

    def merged_uncounted(*states: AttentionState, out: AttentionState) -> None:
        with _disable_current_modes():
            merge(*states, out=out)

    def decoded_uncounted(*given: Any) -> None:
        with _disable_current_modes():
            expand_pages(*given)

    uncounted = SimpleNamespace(expand_pages=decoded_uncounted)
    monkeypatch.setattr(quantised_prompt, "load_implementation", lambda *_: uncounted)
    monkeypatch.setattr(expanded_prompt, "attend", without_its_own)
    monkeypatch.setattr(expanded_prompt, "merge", merged_uncounted)
    with LiveBytes() as live:
        state = attend_quantised_prompt(
            q, keys, **host_lens(case), window=window, max_workspace_mib=budget
        )
    used = live.peak - state.out.nbytes - state.lse.nbytes
    assert used <= budget * MIB
    assert used > budget * MIB / 3 or len(called) == 1
    assert len(called) >= calls or window


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "context_len"), [(8192, 0), (4096, 200000)], ids=str)
@pytest.mark.parametrize("budget", [64, 256], ids="{} MiB".format)
def test_memory_on_a_gpu(num_tokens: int, context_len: int, budget: int) -> None:
    """With all that attention itself uses."""
    lens: dict[str, Any] = {"q_lens": [num_tokens], "context_lens": [context_len]}
    num_pages, device = -(-(num_tokens + context_len) // 16), torch.device("cuda")
    shape = (num_pages, 16, 8, 128)
    k, scales = empty_store("fp8", shape, BRAIN, device)
    k.view(torch.uint8).fill_(3)
    table = torch.randperm(num_pages, device=device).int()[None]
    assert scales is not None
    keys = PagedKV(k, k, table, table[0, :1], scales.fill_(0.01), scales, BRAIN)
    q = torch.randn(num_tokens, 32, 128, dtype=BRAIN, device=device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        state = attend_quantised_prompt(q, keys, **lens, max_workspace_mib=budget)
        result = state.out.nbytes + state.lse.nbytes
    assert torch.cuda.max_memory_allocated() - before - result <= budget * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("formats", PAIRS, ids="/".join)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dims": (64, 64), "dtype": HALF},
        {"dims": (256, 256), "num_kv_heads": 2},
        {"window": 200, "sinks": True, "softcap": 20.0},
        {"sizes": (4, 400, 128)},
        {"sizes": (8, 700, 200), "sinks": True},
    ],
    ids=str,
)
def test_on_a_gpu(
    formats: tuple[str, str], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever attends there, as layers of a step share a layout."""
    given = dict(change)
    if sizes := given.pop("sizes", None):
        cut_into(sizes, monkeypatch)
    case = replace(BASE, q_lens=(600, 0, 1, 260), k_lens=(600, 30, 701, 1290), page_size=16)
    case = replace(case, num_kv_heads=8, group=4, dims=(128, 128), dtype=BRAIN, device="cuda")
    case = replace(case, formats=formats, **given)
    q, keys, options = make_inputs(case, 0)
    assert isinstance(keys, PagedKV)
    rules = {name: options[name] for name in ("window", "softcap", "sinks")}
    lens, expanded = host_lens(case), PageExpander(keys, q.shape[1]).expanded
    layout = make_prompt_layout(expanded, **lens, window=case.window)
    for _ in range(2):
        rules |= lens | {"layout": layout}
        assert_right(attend_quantised_prompt(q, keys, **rules), q, keys, options)


@every_decoder
def test_largest_blocks_of_float16(impl: str, device: str) -> None:
    """ggml's scale of 65504 / 127 is rounded up to one whose largest number float16 lacks."""
    case = replace(BASE, q_lens=(2,), k_lens=(2,), formats=("q8_0", "q8_0"), dtype=HALF)
    q, keys, _ = make_inputs(replace(case, device=device), 0)
    assert isinstance(keys, PagedKV) and keys.v_scales is not None
    page = int(keys.page_table[0, 0])
    keys.v_scales[page] = 65504 / 127
    keys.v.view(torch.int8)[page, :, :, 0] = 127
    state = attend_quantised_prompt(q[:2], keys, q_lens=[2], context_lens=[0], impl=impl)
    assert (state.out[:, :, 0] == 65504).all()


def test_layers_share_a_layout() -> None:
    q, keys, _ = make_inputs(BASE, 0)
    assert isinstance(keys, PagedKV)
    lens, expanded = host_lens(BASE), PageExpander(keys, q.shape[1]).expanded
    layout = make_prompt_layout(expanded, **lens)
    found = attend_quantised_prompt(q, keys, **lens, layout=layout)
    assert torch.equal(found.out, attend_quantised_prompt(q, keys, **lens).out)
    with pytest.raises(ValueError, match=r"layout was made for .*None.*, got .*window=5"):
        attend_quantised_prompt(q, keys, **lens, layout=layout, window=5)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("head_dim_k = 64, but q has head_dim_k = 63", {"q": torch.randn(30, 6, 63)}),
        ("q must be one of float32, got torch.float16", {"q": torch.randn(30, 6, 64).half()}),
        ("5 heads of q cannot share 2 heads of keys", {"q": torch.randn(30, 5, 64)}),
        ("q_lens sum up to 33, but q has 32", {"q_lens": [33, 0, 0, 0]}),
        ("context_lens must not be negative, got .0, -1", {"context_lens": [0, -1, 0, 0]}),
        ("q_lens has num_seqs = 4", {"context_lens": [0]}),
        ("a sequence has 60 keys with its tokens", {"context_lens": [40, 0, 0, 0]}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, change: dict[str, Any]) -> None:
    q, keys, _ = make_inputs(BASE, 0)
    given: dict[str, Any] = {"q": q, **host_lens(BASE)} | change
    with pytest.raises(ValueError, match=message):
        attend_quantised_prompt(given.pop("q"), keys, **given)  # pyright: ignore


RULE = {  # new tokens, keys before them, a window, and whether keys are decoded first
    "a prompt": (8192, 0, None, True),
    "a chunk": (2048, 8192, None, True),
    "few tokens after a long context": (64, 8192, None, False),
    "a short prompt": (128, 0, None, False),
    "a short window": (8192, 0, 64, False),
    "a long window": (8192, 0, 4096, True),
    "no tokens": (0, 100, None, False),
}


@pytest.mark.parametrize(("q_len", "context_len", "window", "wanted"), RULE.values(), ids=[*RULE])
def test_many_rows_a_key_prefer_decoded_keys(
    q_len: int,
    context_len: int,
    window: int | None,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, keys, _ = make_inputs(replace(BASE, dims=(128, 128), dtype=BRAIN), 0)
    assert isinstance(keys, PagedKV)
    lens = PromptLens((q_len,), (context_len,), window)
    expander = PageExpander(keys, 4 * keys.num_kv_heads)
    assert not expander.prefers_expanded(lens), "but for a GPU of Hopper"
    monkeypatch.setattr("anabranch.compositions.prompt_workspace.capability", lambda _: (9, 0))
    monkeypatch.delenv("ANABRANCH_ATTEND", raising=False)
    assert expander.prefers_expanded(lens) == wanted
    assert lens.num_pairs() * 4 >= MIN_ROWS * sum(lens.key_lens()) or not wanted
    monkeypatch.setenv("ANABRANCH_ATTEND", "triton")
    assert not expander.prefers_expanded(lens)
