"""How many files of the package one call enters: what a reader has to know to follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import anabranch as ab

ROOT = str(Path(ab.__file__).parent)


def entered(call: Callable[[], object]) -> set[str]:
    """Files whose functions run in the second call of a kind; the first is checked."""
    call()
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            files.add(name.removeprefix(ROOT))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def decode_inputs(device: str = "cpu") -> tuple[torch.Tensor, ab.PagedKV]:
    k, v = torch.randn(2, 4, 16, 2, 64, device=device)
    table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([40, 37], dtype=torch.int32, device=device)
    return torch.randn(2, 8, 64, device=device), ab.PagedKV(k, v, table, lens)


def test_attend_on_a_cpu() -> None:
    q, keys = decode_inputs()
    files = entered(lambda: ab.attend(q, keys))
    assert "/attend.py" in files
    assert len(files) <= 9, sorted(files)


def test_a_plan_and_a_planned_call_in_the_interpreter() -> None:
    q, keys = decode_inputs()
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    files = entered(lambda: ab.make_plan(q, keys, impl="triton"))
    assert len(files) <= 11, sorted(files)
    plan = ab.make_plan(q, keys, impl="triton")
    files = entered(lambda: ab.attend(q, keys, plan=plan))
    assert "/kernels/triton/tile_loop.py" in files
    assert len(files) <= 14, sorted(files)


@pytest.mark.parametrize("repeats", [2, 8])
def test_generate_with_drafts_on_a_cpu(repeats: int) -> None:
    """A prompt runs as drafts do, of few tokens or many."""
    pytest.importorskip("transformers")
    from tiny_models import GREEDY, source

    drafts = {"method": "ngram", "adaptive": False}
    llm = ab.LLM(source(), device="cpu", speculative=drafts)
    files = entered(lambda: llm.generate([[10, 11, 12, 10] * repeats], GREEDY))
    assert {"/llm/engine/engine.py", "/llm/speculative/ngram.py"} <= files
    assert len(files) <= 40, sorted(files)


@pytest.mark.gpu
def test_calls_that_are_launched_again() -> None:
    q, keys = decode_inputs("cuda")
    plan = ab.make_plan(q, keys)
    assert len(entered(lambda: ab.attend(q, keys, plan=plan))) <= 4
    assert len(entered(lambda: ab.make_plan(q, keys))) <= 6
