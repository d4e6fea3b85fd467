"""One call of attend(), as producers of states see it: queries, keys and rules, and its shape."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from anabranch.keys import KeySource, KeyView
from anabranch.rules import Rules
from anabranch.shapes import FLOATS, Sizes, check_ascending, check_device, check_dtype, read_index
from anabranch.state import AttentionState


class Queries(NamedTuple):
    """Packed queries and where each sequence of them begins."""

    packed: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cu_seqlens: torch.Tensor | None  # int32 [num_seqs + 1], or q_len tokens a sequence
    q_len: int
    num_seqs: int

    def starts(self) -> torch.Tensor:
        """cu_seqlens, made now if it was not given."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        steps = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=self.packed.device)
        return steps * self.q_len

    def check_content(self) -> None:
        """Validate where sequences begin, which lies in device memory. Synchronises."""
        bounds, num_tokens = read_index(self.starts()), self.packed.shape[0]
        if bounds[0] != 0 or bounds[-1] > num_tokens:
            raise ValueError(
                f"cu_seqlens_q must run from 0 to at most num_tokens = {num_tokens}, "
                f"got {bounds[0]} to {bounds[-1]}"
            )
        check_ascending("cu_seqlens_q", bounds)


def pack_queries(q: torch.Tensor, keys: KeySource, cu_seqlens_q: torch.Tensor | None) -> Queries:
    """Flatten padded queries, and fold heads where every list of keys is a sequence of its own."""
    num_seqs, num_lists = keys.num_seqs, keys.lists_per_token
    if num_lists is not None:  # the heads that read a list are those of its one token
        packed = q.reshape(num_seqs, q.shape[-2] // num_lists, q.shape[-1])
        return Queries(packed, None, 1, num_seqs)
    packed = q.flatten(0, 1) if q.dim() == 4 else q
    if cu_seqlens_q is not None:
        return Queries(packed, cu_seqlens_q, 0, num_seqs)
    return Queries(packed, None, q.shape[1] if q.dim() == 4 else 1, num_seqs)


def check_packing(q: torch.Tensor, keys: KeySource, cu_seqlens_q: torch.Tensor | None) -> None:
    """Refuse queries that do not belong to the sequences of the keys."""
    if q.dim() not in (3, 4):
        raise ValueError(f"q must have 3 or 4 dimensions, got shape {tuple(q.shape)}")
    if keys.lists_per_token is not None:
        _check_lists(q, keys, keys.lists_per_token, cu_seqlens_q)
        return
    num_seqs = keys.num_seqs
    if cu_seqlens_q is None:
        if q.shape[0] != num_seqs:
            raise ValueError(
                f"q has {q.shape[0]} sequences, the keys have {num_seqs}; packed queries of "
                "other lengths than 1 need cu_seqlens_q"
            )
        return
    if q.dim() == 4:
        raise ValueError(
            f"cu_seqlens_q goes with packed queries of 3 dimensions, got q {tuple(q.shape)}"
        )
    check_dtype("cu_seqlens_q", cu_seqlens_q, (torch.int32,))
    check_device("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError(
            f"cu_seqlens_q must be [{num_seqs + 1}] for {num_seqs} sequences of keys, "
            f"got shape {tuple(cu_seqlens_q.shape)}"
        )
    if num_seqs > 0 and cu_seqlens_q.stride(0) != 1:
        raise ValueError(f"cu_seqlens_q must be contiguous, got stride {cu_seqlens_q.stride(0)}")


def _check_lists(
    q: torch.Tensor, keys: KeySource, num_lists: int, cu_seqlens_q: torch.Tensor | None
) -> None:
    if cu_seqlens_q is not None:
        raise ValueError("lists of keys say themselves whose they are (seqs), got cu_seqlens_q")
    num_tokens, num_heads = q.shape[:-2].numel(), q.shape[-2]
    if num_tokens * num_lists != keys.num_seqs:
        listed = keys.num_seqs // num_lists
        raise ValueError(f"q has {num_tokens} tokens, but there are lists of {listed}")
    if num_heads % num_lists:
        raise ValueError(f"q has {num_heads} heads, not a multiple of {num_lists} lists a token")


def check_queries(q: torch.Tensor, keys: KeySource) -> Sizes:
    """Refuse packed queries that do not go with the keys."""
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads head_dim_k")
    check_dtype("q", q, FLOATS)
    if keys.dtype != q.dtype:
        raise ValueError(f"k must be one of {str(q.dtype)[6:]}, got {keys.dtype}")
    if keys.device != q.device:
        raise ValueError(f"k is on {keys.device}, expected {q.device}")
    sizes.bind("head_dim_k", keys.head_dim_k, "k")
    num_heads, num_kv_heads = q.shape[1], keys.num_kv_heads
    if not num_kv_heads or not num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads, not a multiple of the {num_kv_heads} of the keys"
        )
    for name, dim in (("q", q.shape[2]), ("v", keys.head_dim_v)):
        if dim < 1:
            raise ValueError(f"{name} must have a head dim of at least 1, got {dim}")
    return sizes


class AttendCall(NamedTuple):
    """Attend from these queries to these keys by these rules."""

    queries: Queries
    keys: KeySource
    rules: Rules
    view: KeyView  # of the keys
    prior: AttentionState | None = None  # a stack of states over other keys, merged into this one


def new_state(call: AttendCall) -> AttentionState:
    """Memory for the state of a call; nothing is written there yet."""
    q = call.queries.packed
    shape = (q.shape[0], q.shape[1], call.view.v.ptr.shape[-1])
    lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
    return AttentionState(torch.empty(shape, dtype=q.dtype, device=q.device), lse)


class PlanOptions(NamedTuple):
    """How work may be divided."""

    batch_invariant: bool = False  # the bits of a sequence do not depend on the batch
    fused_merge: bool | None = None  # parts need no second launch; None: the producer chooses
    config: object | None = None  # the producer's own tiles, in place of those it would select
    rows_per_seq: float | None = None  # that tiles are selected for; by default the average
    leave_empty: bool = False  # rows that see no key need not be written


class PlanLayout(Protocol):
    """What a plan holds; equal layouts have equal hashes."""

    @property
    def size(self) -> int:
        """Bytes of the room."""
        ...

    def open(self, room: torch.Tensor) -> Any:
        """The plan as tensors in the room, and what they are for."""
        ...


class CallShape(NamedTuple):
    """What a plan is made for, beside lengths: it serves the calls of an equal shape."""

    num_tokens: int
    num_seqs: int
    source: str  # the kind of the keys
    itemsize: int  # bytes of an element of q
    window: int | None
    causal: bool
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    page_size: int
    k_format: str
    v_format: str
    device: torch.device


def shape_of(call: AttendCall) -> CallShape:
    """The shape of a call; nothing is read from the device."""
    q, keys, rules = call.queries.packed, call.keys, call.rules
    num_tokens, num_heads, head_dim_k = q.shape
    return CallShape(
        num_tokens,
        keys.num_seqs,
        keys.kind,
        q.element_size(),
        rules.window,
        rules.in_order,
        num_heads,
        keys.num_kv_heads,
        head_dim_k,
        keys.head_dim_v,
        keys.page_size,
        call.view.k.format.name,
        call.view.v.format.name,
        q.device,
    )
