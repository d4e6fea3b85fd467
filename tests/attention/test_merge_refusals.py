"""What merge() refuses, by name and before any launch, and how an implementation is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from states import random_state, stack

from anabranch import AttentionState, merge
from anabranch.merge import ENVIRONMENT_VARIABLE, load_launcher

A, B = (random_state((4, 3, 8), seed) for seed in (0, 1))
STACKED = stack([A, B])


def overlapping() -> AttentionState:
    """Buffers of which a later one begins inside an earlier one."""
    room = torch.zeros(5, 3, 8)
    return merge(
        AttentionState(room[:4], torch.zeros(4, 3)),
        B,
        out=AttentionState(room[1:], torch.zeros(4, 3)),
    )


META = torch.device("meta")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no state": (merge, "at least one state"),
    "a tensor": (lambda: merge(A, B.out), r"states\[1\] must be an AttentionState, got Tensor"),
    "a plain pair": (lambda: merge(tuple(A), B), r"states\[0\] .* AttentionState, got tuple"),
    "shapes of out": (
        lambda: merge(A, AttentionState(B.out[:2], B.lse[:2])),
        r"states\[1\].out has shape \(2, 3, 8\), states\[0\].out has \(4, 3, 8\)",
    ),
    "shape of lse": (
        lambda: merge(A, B._replace(lse=B.lse.T)),
        r"states\[1\].lse has shape \(3, 4\), its out has \(4, 3, 8\)",
    ),
    "dtypes of out": (
        lambda: merge(A, B._replace(out=B.out.half())),
        r"states\[1\].out is torch.float16, states\[0\].out is torch.float32",
    ),
    "dtype of lse": (
        lambda: merge(A._replace(lse=A.lse.double()), B),
        r"states\[0\].lse must be torch.float32, got torch.float64",
    ),
    "float64": (
        lambda: merge(A._replace(out=A.out.double())),
        r"states\[0\].out must be one of float16, bfloat16, float32, got torch.float64",
    ),
    "integers": (lambda: merge(A._replace(out=A.out.int())), r"states\[0\].out .* got torch.int32"),
    "device of out": (
        lambda: merge(A, B._replace(out=B.out.to(META))),
        r"states\[1\].out is on meta, expected cpu",
    ),
    "device of lse": (
        lambda: merge(A, B._replace(lse=B.lse.to(META))),
        r"states\[1\].lse is on meta, expected cpu",
    ),
    "gradients": (
        lambda: merge(A, B._replace(out=B.out.clone().requires_grad_())),
        r"states\[1\] requires grad",
    ),
    "gradients of an lse": (
        lambda: merge(A, B._replace(lse=B.lse.clone().requires_grad_())),
        r"states\[1\] requires grad",
    ),
    "dim of two states": (lambda: merge(A, B, dim=0), "dim=0 takes one stacked state, got 2"),
    "dim too large": (lambda: merge(A, dim=2), r"dim must lie in \[0, 2\).*got 2"),
    "dim negative": (lambda: merge(A, dim=-1), r"dim must lie in \[0, 2\).*got -1"),
    "no parts": (
        lambda: merge(AttentionState(A.out[:0], A.lse[:0]), dim=0),
        r"at least one part, got shape \(0, 3, 8\)",
    ),
    "unknown impl": (lambda: merge(A, B, impl="cudnn"), "impl must be one of .*got 'cudnn'"),
    "out_dtype": (
        lambda: merge(A, B, out_dtype=torch.int8),
        "out_dtype must be one of float16, bfloat16, float32, got torch.int8",
    ),
    "out_dtype beside out": (
        lambda: merge(A, B, out=B, out_dtype=torch.float16),
        "out_dtype is torch.float16, but out.out is torch.float32",
    ),
    "shape of the destination": (
        lambda: merge(A, B, out=AttentionState(A.out[:2], A.lse[:2])),
        r"out has shapes \(2, 3, 8\) and \(2, 3\), expected \(4, 3, 8\) and \(4, 3\)",
    ),
    "dtype of the destination": (
        lambda: merge(A, B, out=A._replace(out=A.out.double())),
        "out.out must be one of float16, bfloat16, float32, got torch.float64",
    ),
    "dtype of the destination's lse": (
        lambda: merge(A, B, out=A._replace(lse=A.lse.half())),
        "out.lse must be one of float32, got torch.float16",
    ),
    "device of the destination": (
        lambda: merge(A, B, out=A._replace(out=A.out.to(META))),
        "out.out is on meta, expected cpu",
    ),
    "in place into the second": (lambda: merge(A, B, out=B), r"out.out overlaps states\[1\].out"),
    "lse of the second": (
        lambda: merge(A, B, out=A._replace(lse=B.lse)),
        r"out.lse overlaps states\[1\].lse",
    ),
    "in place with other strides": (
        lambda: merge(
            *(AttentionState(x.out[:3, :, :3], x.lse[:3]) for x in (A, B)),
            out=AttentionState(A.out[:3, :, :3].transpose(0, 1), torch.zeros(3, 3)),
        ),
        r"out.out overlaps states\[0\].out",
    ),
    "shifted in place": (overlapping, r"out.out overlaps states\[0\].out"),
    "lse into out": (
        lambda: merge(A, B, out=AttentionState(torch.zeros(4, 3, 8), A.out[..., 0])),
        r"out.lse overlaps states\[0\].out",
    ),
    "stacked, into the second part": (
        lambda: merge(STACKED, dim=0, out=AttentionState(*(x[1] for x in STACKED))),
        r"out.out overlaps states\[0\].out",
    ),
    "destination that overlaps itself": (
        lambda: merge(A, B, out=A._replace(out=torch.zeros(1, 3, 8).expand(4, 3, 8))),
        r"out.out .* strides \(0, 8, 1\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_environment_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    try:
        for name in ("torch", "triton"):
            load_launcher.cache_clear()
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
            if name == "torch" or not torch.cuda.is_available():
                chosen = load_launcher(None, device)
                assert chosen is load_launcher(name, device)
        load_launcher.cache_clear()
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cudnn")
        with pytest.raises(ValueError, match=r"ANABRANCH_MERGE must be one of .*got 'cudnn'"):
            merge(A, B)
        assert merge(A, B, impl="torch").lse.shape == (4, 3)
    finally:
        load_launcher.cache_clear()


def test_triton_on_the_cpu_is_refused_without_the_interpreter() -> None:
    script = (
        "import torch; from anabranch import AttentionState, merge\n"
        "state = AttentionState.empty((2, 3, 8))\n"
        "merge(state, state, impl='triton')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "impl='triton' cannot run here: it needs a GPU tensor" in run.stderr
