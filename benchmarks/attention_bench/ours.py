"""This library's own implementations, called as a user calls them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import anabranch as ab
from anabranch.merge import load_launcher
from anabranch.state import AttentionState
from attention_bench.exact import CallResult
from attention_bench.implementations import Implementation, Prepared, UnavailableError, require
from attention_bench.inputs import AttendInputs, MergeInputs

KeyLayout = Literal["dense", "ragged", "paged"]


def implementations(bench: str, device: str) -> list[Implementation]:
    """Ours for a benchmark; the first that works is the one that tables rate."""
    if bench == "merge":
        names = ("cuda", "triton", "torch") if device == "cuda" else ("torch",)
        return [Implementation(name, "ours", partial(_merge, name)) for name in names]
    if bench == "prefill":
        others = {name: partial(_variant, name) for name in ("ragged", "paged")}
        ours = {"": partial(_attend, "dense"), **others}
    else:
        invariant = {"batch-invariant": partial(_variant, "paged", batch_invariant=True)}
        ours = {"": partial(_attend, "paged"), **(invariant if device == "cuda" else {})}
        ours |= {"contiguous": partial(_variant, "dense")}
    return [Implementation(f"anabranch {x}".strip(), "ours", call) for x, call in ours.items()]


def _answer(state: AttentionState) -> CallResult:
    return CallResult(state.out, state.lse)


def _merge(impl: str, inputs: MergeInputs) -> Prepared:
    try:
        load_launcher(impl, inputs.pairs[0][0].out.device)
    except (ImportError, RuntimeError) as reason:
        raise UnavailableError(str(reason)) from reason
    return Prepared([partial(ab.merge, a, b, impl=impl) for a, b in inputs.pairs], _answer)


def _variant(layout: KeyLayout, inputs: AttendInputs, *, batch_invariant: bool = False) -> Prepared:
    """Another layout or plan; each compiles again for every shape, so not for every shape."""
    compared = set(inputs.case.groups) - {"models", "pages"}
    require(bool(compared), "compared in the other cases only")
    return _attend(layout, inputs, batch_invariant=batch_invariant)


def _attend(layout: KeyLayout, inputs: AttendInputs, *, batch_invariant: bool = False) -> Prepared:
    """With a plan made beforehand on a GPU; the CPU's implementation takes none."""
    keys = {"dense": inputs.dense, "ragged": inputs.ragged, "paged": inputs.paged}[layout]
    given: Any = {"cu_seqlens_q": inputs.cu_seqlens_q, "window": inputs.case.window}
    attend, make_plan = partial(ab.attend, **given), None
    if inputs.queries[0].is_cuda:
        given |= {"batch_invariant": batch_invariant}
        make_plan = partial(ab.make_plan, inputs.queries[0], keys[0], **given)
        attend = partial(attend, plan=make_plan())
    calls = [partial(attend, q, source) for q, source in zip(inputs.queries, keys, strict=True)]
    return Prepared(calls, _answer, make_plan)
