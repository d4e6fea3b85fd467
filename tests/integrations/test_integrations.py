"""Foreign states: converted, merged with ours, and converted back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from states import double, random_state, stack, torch_merge
from tolerance import assert_state_close

from anabranch import AttentionState, merge
from anabranch.integrations.flash_attention import from_flash_attention, to_flash_attention
from anabranch.integrations.flashinfer import from_flashinfer, to_flashinfer
from anabranch.integrations.flashmla import from_flashmla, to_flashmla

LOG2_E = torch.tensor(2.0, dtype=torch.float64).log().reciprocal()


def foreign(
    state: AttentionState, *, heads_first: bool, log2: bool, empty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A state as another library returns it, with garbage in the output of its empty rows."""
    nothing = state.lse == -torch.inf
    lse = ((state.lse.double() * LOG2_E).float() if log2 else state.lse).masked_fill(nothing, empty)
    out = state.out.masked_fill(nothing[..., None], torch.nan)
    return out, lse.mT.contiguous() if heads_first else lse


FROM: dict[str, tuple[tuple[int, ...], dict[str, object], Callable[..., AttentionState]]] = {
    "flash-attention 2, packed": (
        (30, 4, 24),
        {"heads_first": True, "log2": False, "empty": torch.inf},
        from_flash_attention,
    ),
    "flash-attention 2, batched": (
        (2, 15, 4, 24),
        {"heads_first": True, "log2": False, "empty": torch.inf},
        from_flash_attention,
    ),
    "flash-attention 3": (
        (30, 4, 24),
        {"heads_first": True, "log2": False, "empty": -torch.inf},
        from_flash_attention,
    ),
    "FlashInfer": (
        (30, 4, 24),
        {"heads_first": False, "log2": True, "empty": -torch.inf},
        from_flashinfer,
    ),
    "FlashInfer up to 0.6.18": (
        (30, 4, 24),
        {"heads_first": False, "log2": True, "empty": -5e4},
        from_flashinfer,
    ),
    "FlashInfer up to 0.6.18, 1000 masked keys": (
        (30, 4, 24),
        {"heads_first": False, "log2": True, "empty": -5e4 + 9.97},
        from_flashinfer,
    ),
    "FlashInfer, one token": (
        (200, 24),
        {"heads_first": False, "log2": True, "empty": -torch.inf},
        from_flashinfer,
    ),
    "FlashInfer, natural log": (
        (30, 4, 24),
        {"heads_first": False, "log2": False, "empty": -torch.inf},
        lambda out, lse: from_flashinfer(out, lse, log2=False),
    ),
    "FlashMLA, decoding": (
        (15, 2, 4, 24),
        {"heads_first": True, "log2": False, "empty": torch.inf},
        from_flashmla,
    ),
    "FlashMLA, prefill": (
        (30, 4, 24),
        {"heads_first": False, "log2": False, "empty": torch.inf},
        from_flashmla,
    ),
    "FlashMLA, prefill until 2026": (
        (30, 4, 24),
        {"heads_first": False, "log2": True, "empty": -torch.inf},
        lambda out, lse: from_flashmla(out, lse, log2=True),
    ),
}


@pytest.mark.parametrize("library", FROM)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_foreign_states_become_ours_and_merge(library: str, dtype: torch.dtype) -> None:
    shape, convention, convert = FROM[library]
    theirs, ours = (random_state(shape, seed, dtype=dtype, empty=0.2) for seed in (1, 2))
    both = (theirs.lse == -torch.inf) & (ours.lse == -torch.inf)
    assert both.any()
    converted = convert(*foreign(theirs, **convention))
    # A base-2 LSE was rounded once by its library and is rounded again here.
    torch.testing.assert_close(converted.lse, theirs.lse, rtol=2e-7, atol=0)
    assert torch.equal(converted.out, theirs.out)
    merged = merge(converted, ours)
    parts = stack([converted, ours])
    assert_state_close(merged, torch_merge(double(parts)), torch_merge(parts))
    assert (merged.lse[both] == -torch.inf).all()


@pytest.mark.parametrize("shape", [(9, 4, 8), (2, 5, 4, 8)], ids=str)
def test_there_and_back(shape: tuple[int, ...]) -> None:
    state = random_state(shape, 0, dtype=torch.float16, empty=0.2)
    for convert, back in (
        (to_flash_attention, from_flash_attention),
        (to_flashinfer, from_flashinfer),
        (to_flashmla, from_flashmla),
    ):
        again = back(*convert(state))
        assert torch.equal(again.out, state.out)
        torch.testing.assert_close(again.lse, state.lse, rtol=2e-7, atol=0)


def test_what_goes_out() -> None:
    """Layout, base and mark of empty rows, by hand."""
    out = torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]], [[4.0], [5.0]]])
    lse = torch.tensor([[1.0, -torch.inf], [2.0, 3.0], [4.0, 5.0]])
    state = AttentionState(out, lse)

    same, heads_first = to_flash_attention(state)
    assert same is out
    assert torch.equal(heads_first, torch.tensor([[1.0, 2.0, 4.0], [-torch.inf, 3.0, 5.0]]))
    assert heads_first.data_ptr() == lse.data_ptr()

    same, base2 = to_flashinfer(state)
    assert same.data_ptr() == out.data_ptr()
    natural = torch.exp2(base2.double()).log()
    torch.testing.assert_close(natural[1:], lse[1:].double(), rtol=1e-6, atol=0)
    assert base2[0, 1] == -5e4
    assert torch.equal(to_flashinfer(state, log2=False)[1][1:], lse[1:])

    assert torch.equal(to_flashmla(state)[1][0], torch.tensor([1.0, torch.inf]))
    batched = AttentionState(out[None], lse[None])
    assert torch.equal(to_flashmla(batched)[1][0, 1], torch.tensor([torch.inf, 3.0, 5.0]))


def test_a_low_lse_is_not_an_empty_row() -> None:
    out, lse = torch.ones(4, 1, 2), torch.tensor([[-60000.0], [-49900.0], [-1e30], [0.0]])
    state = from_flashinfer(out, lse)
    assert state.lse.isfinite().all()
    assert (state.out == 1).all()


@pytest.mark.parametrize(
    ("convert", "lse_shape", "message"),
    [
        (from_flash_attention, (5, 4), r"softmax_lse has heads = 5, but out has heads = 4"),
        (from_flash_attention, (2, 4, 5), r"softmax_lse must be \[heads, tokens\], got shape"),
        (from_flashinfer, (4, 5), r"lse has shape \(4, 5\), expected .* \(5, 4\)"),
        (from_flashmla, (4, 5), r"softmax_lse has tokens = 4, but out has tokens = 5"),
    ],
)
def test_layouts_are_checked(
    convert: Callable[..., object], lse_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(torch.zeros(5, 4, 8), torch.zeros(lse_shape))


@pytest.mark.parametrize("convert", [from_flash_attention, from_flashinfer, from_flashmla])
def test_precision_is_checked(convert: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"lse must be one of float32, got torch.float16"):
        convert(torch.zeros(4, 4, 8), torch.zeros(4, 4, dtype=torch.float16))
