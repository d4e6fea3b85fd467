"""One tolerance for every test: infinities in the same places, then twice the error of torch."""

from __future__ import annotations

import torch

from anabranch import AttentionState


def assert_state_close(
    actual: AttentionState, expected64: AttentionState, torch_state: AttentionState
) -> float:
    """`actual` errs against `expected64` at most twice as much as torch does, plus one rounding.

    `torch_state` is what torch makes of the same inputs at the same precision. Returns the largest
    error as a share of what is allowed.
    """
    assert actual.lse.dtype == torch.float32
    expected64, torch_state, actual = (
        AttentionState(*(x.detach().to(actual.out.device) for x in state))
        for state in (expected64, torch_state, actual)
    )
    assert_same_infinities(actual.lse, expected64.lse)
    empty = actual.lse == -torch.inf
    assert not actual.out[empty].count_nonzero(), "out must be exactly 0 where lse is -inf"
    return max(
        assert_close(actual.lse, expected64.lse, torch_state.lse),
        assert_close(actual.out, expected64.out, torch_state.out),
    )


def assert_close(actual: torch.Tensor, expected64: torch.Tensor, by_torch: torch.Tensor) -> float:
    """Finite values by the error of torch; the others must be the same.

    Returns the largest error as a share of what is allowed.
    """
    assert actual.shape == expected64.shape == by_torch.shape
    assert expected64.dtype == torch.float64
    assert_same_infinities(actual, expected64)
    finite = expected64.isfinite()
    if not finite.any():
        return 0.0
    expected = expected64[finite]
    allowed = 2 * (by_torch[finite].double() - expected).abs().max() + rounding(
        expected, actual.dtype
    )
    error = (actual[finite].double() - expected).abs()
    worst = int((error - allowed).argmax())
    assert error[worst] <= allowed[worst], (
        f"error {error[worst]:.3e} at {expected[worst]:.6g}, allowed {allowed[worst]:.3e}"
    )
    return float((error / allowed).max())


def assert_same_infinities(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """+inf, -inf and NaN in the same places."""
    for name in ("isposinf", "isneginf", "isnan"):
        mine, theirs = getattr(actual, name)(), getattr(expected, name)()
        assert torch.equal(mine, theirs), f"{name}: {mine.sum()} values, expected {theirs.sum()}"


def rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far one rounding to `dtype` can move each value."""
    kind = torch.finfo(dtype)
    return (values.abs() * kind.eps).clamp_min(kind.smallest_normal * kind.eps) / 2
