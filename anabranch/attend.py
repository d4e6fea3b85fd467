"""attend(): checks, choice of implementation, and the torch operator; no device code."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch

from anabranch.keys import FLOATS, DenseKV, KeySource, PagedKV, RaggedKV
from anabranch.plan import (
    Plan,
    Queries,
    check_masks,
    check_queries,
    max_keys,
    pack_queries,
    plan_from,
    plan_queries,
)
from anabranch.shapes import check_device, check_dtype
from anabranch.state import AttentionState

if TYPE_CHECKING:
    from anabranch.kernels.triton.addressing import Pages

IMPLEMENTATIONS = ("torch", "triton")
ENVIRONMENT_VARIABLE = "ANABRANCH_ATTEND"


@dataclass(frozen=True, slots=True)
class Options:
    """Who may look at what, and how logits come from scores."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    sinks: torch.Tensor | None
    tree_mask: torch.Tensor | None


def attend(
    q: torch.Tensor,
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    plan: Plan | None = None,
    check: bool = False,
    impl: str | None = None,
) -> AttentionState:
    """Attend from `q` to `keys`: decode, speculative verify, chunked prefill or a mix, in one call.

    q             packed [num_tokens, num_heads, dim] with `cu_seqlens_q` (int32 [num_seqs + 1];
                  without it one token a sequence), or padded [num_seqs, q_len, num_heads, dim]
    keys          DenseKV, RaggedKV or PagedKV
    causal        a token sees the keys up to its own; queries stand at the end of the keys
    window        a token sees at most this many keys, counted back from its own
    softcap       logits become softcap * tanh(logit / softcap)
    scale         of the scores, 1 / sqrt(dim) by default
    sinks         [num_heads]: a logit for each head whose value is zero
    tree_mask     bool [num_tokens, width]: which of its sequence's new tokens a token sees, in the
                  place of the causal rule among them
    plan          from make_plan() with the same options, to be shared by the layers of a step
    check         also validate lengths and page indices, which waits for the device
    impl          "torch" or "triton"; by default ANABRANCH_ATTEND, then the device decides

    Tokens that see no key, and rows beyond `cu_seqlens_q[-1]`, get out 0 and lse -inf. Returns the
    state in the shape of `q`. Not differentiable.
    """
    options = Options(causal, window, softcap, _scale(q, scale), sinks, tree_mask)
    queries = pack_queries(q, keys, cu_seqlens_q)
    _check(queries.packed, keys, options, plan)
    if check:
        check_lengths(queries, keys)
    run = _attend_traced if torch.compiler.is_compiling() else _attend
    state = run(queries, keys, options, plan, impl)
    if q.dim() == 3:
        return state
    return AttentionState(*(x.unflatten(0, q.shape[:2]) for x in state))


def _scale(q: torch.Tensor, scale: float | None) -> float:
    if scale is None:
        return max(q.shape[-1], 1) ** -0.5
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale


def _check(q: torch.Tensor, keys: KeySource, options: Options, plan: Plan | None) -> None:
    sizes = check_queries(q, keys)
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {options.softcap}")
    check_masks(causal=options.causal, window=options.window, tree_mask=options.tree_mask)
    if options.sinks is not None:
        sizes.match("sinks", options.sinks, "num_heads")
        check_dtype("sinks", options.sinks, FLOATS)
        check_device("sinks", options.sinks, q.device)
    if options.tree_mask is not None:
        sizes.match("tree_mask", options.tree_mask, "num_tokens tree_width")
        check_dtype("tree_mask", options.tree_mask, (torch.bool,))
        check_device("tree_mask", options.tree_mask, q.device)
    given = {"q": q, "k": keys.k, "v": keys.v, "sinks": options.sinks}
    for name, tensor in given.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; attend is for inference, detach it")
    if plan is not None:
        _check_plan(q, keys, options, plan)


def _check_plan(q: torch.Tensor, keys: KeySource, options: Options, plan: Plan) -> None:
    constants = plan.constants
    for name, planned, given in (
        ("num_tokens", plan.num_tokens, q.shape[0]),
        ("num_seqs", plan.num_seqs, keys.num_seqs),
        ("packed keys", plan.packed, isinstance(keys, RaggedKV)),
        ("itemsize", plan.itemsize, q.element_size()),
        ("window", plan.window, options.window),
        ("causal", constants.causal, options.causal and options.tree_mask is None),
        ("num_heads", constants.group * constants.num_kv_heads, q.shape[1]),
        ("num_kv_heads", constants.num_kv_heads, keys.k.shape[-2]),
        ("head_dim_k", constants.head_dim_k, keys.k.shape[-1]),
        ("head_dim_v", constants.head_dim_v, keys.v.shape[-1]),
        ("page_size", constants.page_size, keys.page_size if isinstance(keys, PagedKV) else 1),
    ):
        if planned != given:
            raise ValueError(f"the plan was made for {name} = {planned}, got {given}")
    check_device("plan", plan.schedule, q.device)


def _implementation(impl: str | None, device: torch.device) -> str:
    impl = impl or _default_implementation()
    if impl is None:
        return "torch" if device.type == "cpu" else "triton"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "torch" and device.type != "cpu":
        raise ValueError(f"impl='torch' is the CPU's, got q on {device}")
    return impl


@cache
def _default_implementation() -> str | None:
    return os.environ.get(ENVIRONMENT_VARIABLE) or None


def _attend(
    queries: Queries, keys: KeySource, options: Options, plan: Plan | None, impl: str | None
) -> AttentionState:
    if _implementation(impl, queries.packed.device) == "torch":
        from anabranch.kernels.cpu import attend as cpu

        return cpu.attend(
            queries.packed,
            keys,
            cu_seqlens_q=queries.starts(),
            causal=options.causal,
            window=options.window,
            softcap=options.softcap,
            scale=options.scale,
            sinks=options.sinks,
            tree_mask=options.tree_mask,
        )
    return _attend_triton(queries, keys, options, plan)


def _attend_triton(
    queries: Queries, keys: KeySource, options: Options, plan: Plan | None
) -> AttentionState:
    from anabranch.kernels.triton import attend as kernel
    from anabranch.kernels.triton.boxes import boxes_of
    from anabranch.kernels.triton.merge_tree import Parts
    from anabranch.kernels.triton.runtime import require_triton_device

    q = queries.packed
    require_triton_device(q.device)
    shape = (q.shape[0], q.shape[1], keys.v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
    if not q.shape[0]:
        return AttentionState(out, lse)
    if plan is None:
        causal = options.causal and options.tree_mask is None
        plan = plan_queries(queries, keys, causal=causal, window=options.window)
    tree = options.tree_mask
    k, v = _pages(keys)
    table, boxes = None, None
    if isinstance(keys, PagedKV):
        table = keys.page_table
    else:
        rows = keys.k.shape[1] if isinstance(keys, DenseKV) else 1
        boxes = boxes_of(k, v, rows, keys.k.shape[0], plan.constants)
    kernel.attend(
        q,
        k,
        v,
        boxes,
        table,
        kernel.Rules(
            options.scale * math.log2(math.e),
            options.softcap,
            options.window,
            None if tree is None else tree.contiguous().view(torch.uint8),
        ),
        None if options.sinks is None else options.sinks.contiguous(),
        out,
        lse,
        plan.schedule,
        Parts(plan.outs, plan.lses, plan.counters),
        plan.constants,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **({} if plan.max_registers is None else {"maxnreg": plan.max_registers}),
    )
    return AttentionState(out, lse)


def _pages(keys: KeySource) -> tuple[Pages, Pages]:
    """Keys and values by strides [page, key, head, dim]; a contiguous sequence is one long page."""
    from anabranch.kernels.triton.addressing import Pages

    k, v = keys.k.stride(), keys.v.stride()
    if isinstance(keys, RaggedKV):  # a sequence's page begins at any key
        k, v = (k[0], *k), (v[0], *v)
    return Pages(keys.k, *k), Pages(keys.v, *v)


def check_lengths(queries: Queries, keys: KeySource) -> None:
    """Validate what lies in device memory, naming the sequence that is wrong. Synchronises."""
    bounds = _values(queries.starts())
    if bounds[0] != 0 or bounds[-1] > queries.packed.shape[0]:
        raise ValueError(
            f"cu_seqlens_q must run from 0 to at most num_tokens = {queries.packed.shape[0]}, "
            f"got {bounds[0]} to {bounds[-1]}"
        )
    _check_ascending("cu_seqlens_q", bounds)
    if isinstance(keys, RaggedKV):
        bounds = _values(keys.cu_seqlens)
        _check_ascending("cu_seqlens", bounds)
        if bounds[0] < 0 or bounds[-1] > keys.k.shape[0]:
            raise ValueError(
                f"cu_seqlens must run from 0 or more to at most num_keys = {keys.k.shape[0]}, "
                f"got {bounds[0]} to {bounds[-1]}"
            )
        return
    if keys.seq_lens is None:
        return
    capacity = max_keys(keys)
    for seq, length in enumerate(_values(keys.seq_lens)):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"sequence {seq} has seq_len {length}, its storage holds 0 to {capacity}"
            )
        if isinstance(keys, PagedKV) and length:
            pages = keys.page_table[seq, : -(-length // keys.page_size)]
            low, high = int(pages.min()), int(pages.max())
            if low < 0 or high >= keys.k.shape[0]:
                raise ValueError(
                    f"sequence {seq} has page {low if low < 0 else high}, "
                    f"but there are {keys.k.shape[0]} pages"
                )


def _values(index: torch.Tensor) -> list[int]:
    return cast("list[int]", index.tolist())  # pyright: ignore[reportUnknownMemberType]


def _check_ascending(name: str, bounds: list[int]) -> None:
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"{name} must not descend, got {start} then {stop} at sequence {seq}")


def _attend_traced(
    queries: Queries, keys: KeySource, options: Options, plan: Plan | None, impl: str | None
) -> AttentionState:
    index = keys.cu_seqlens if isinstance(keys, RaggedKV) else keys.seq_lens
    tensors = [] if plan is None else [plan.schedule, plan.outs, plan.lses, plan.counters]
    return AttentionState(
        *torch.ops.anabranch.attend(
            queries.packed,
            keys.k,
            keys.v,
            keys.page_table if isinstance(keys, PagedKV) else None,
            index,
            queries.starts(),
            options.sinks,
            options.tree_mask,
            options.causal,
            options.window,
            options.softcap,
            options.scale,
            tensors,
            [] if plan is None else plan.static(),
            impl,
        )
    )


@torch.library.custom_op("anabranch::attend", mutates_args=())
def _attend_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor | None,  # cu_seqlens for packed keys, else seq_lens
    cu_seqlens_q: torch.Tensor,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    plan_tensors: list[torch.Tensor],  # scratch: what is written there nobody else reads
    plan_static: list[int],
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys: KeySource
    if page_table is not None:
        assert lengths is not None
        keys = PagedKV(k, v, page_table, lengths)
    elif k.dim() == 3:
        assert lengths is not None
        keys = RaggedKV(k, v, lengths)
    else:
        keys = DenseKV(k, v, lengths)
    options = Options(causal, window, softcap, scale, sinks, tree_mask)
    plan = plan_from(plan_tensors, plan_static) if plan_static else None
    queries = Queries(q, cu_seqlens_q, 0, keys.num_seqs)
    return _attend(queries, keys, options, plan, impl)


@_attend_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object):  # pyright: ignore
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32)
