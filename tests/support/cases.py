"""Cases of attend(): queries and keys, poison in all unused memory, and what is right for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import pytest
import torch
from tolerance import assert_state_close

from anabranch import AttentionState, DenseKV, PagedKV, RaggedKV, append_kv, reference
from anabranch.call import AttendCall, Queries
from anabranch.keys import KeySource, LatentKV, PagedSource
from anabranch.keys.formats import empty_store
from anabranch.rules import Rules

DIMS = [(40, 40), (64, 64), (192, 128), (128, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNUSED_PAGE = 1 << 30  # reading it would fault
FP8_SCALE = 0.02  # covers numbers up to 9
SOURCES = ["dense", "ragged", "paged", "paged in order", "paged by heads", "paged k|v"]


GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
every_producer = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("torch", "cpu"),
        pytest.param("triton", "cpu", marks=ON_CPU),
        pytest.param("triton", "cuda", marks=GPU),
    ],
)


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...] = (0, 1, 3, 17, 40)
    k_lens: tuple[int, ...] = (5, 70, 33, 80, 12)
    source: str = "paged"
    page_size: int = 8
    num_kv_heads: int = 2
    group: int = 3
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tree_width: int | None = None
    padding: int = 2  # tokens of no sequence
    scale: float | None = None
    formats: tuple[str, str] = ("plain", "plain")  # of keys and values, or of latent rows
    device: str = "cpu"


def poisoned(case: Case, *shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=case.dtype, device=case.device)


def integers(case: Case, values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=case.device)


def starts(case: Case, lengths: Sequence[int]) -> torch.Tensor:
    """Where sequences of these lengths begin and end, as cu_seqlens has it."""
    return integers(case, [*accumulate(lengths, initial=0)])


def make_cache(case: Case, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, (dim_k, dim_v), size = case.num_kv_heads, case.dims, case.page_size
    if case.source == "paged k|v":
        both = poisoned(case, num_pages, size, heads, dim_k + dim_v)
        return both[..., :dim_k], both[..., dim_k:]
    if case.source == "paged by heads":
        k, v = (poisoned(case, num_pages, heads, size, dim) for dim in case.dims)
        return k.transpose(1, 2), v.transpose(1, 2)
    return tuple(poisoned(case, num_pages, size, heads, dim) for dim in case.dims)


def make_keys(case: Case) -> KeySource:
    lens, (dim_k, dim_v) = case.k_lens, case.dims
    k, v = (
        torch.randn(sum(lens), case.num_kv_heads, dim).to(case.device, case.dtype)
        for dim in case.dims
    )
    seq_lens = integers(case, lens)
    if case.source == "ragged":
        end = poisoned(case, 1, case.num_kv_heads, max(case.dims))
        k, v = torch.cat([k, end[..., :dim_k]]), torch.cat([v, end[..., :dim_v]])
        return RaggedKV(k, v, starts(case, lens))
    k, v = k.split(lens), v.split(lens)
    if case.source == "dense":
        shape = (len(lens), max(lens) + 1, case.num_kv_heads)
        dense = DenseKV(*(poisoned(case, *shape, dim) for dim in case.dims), seq_lens)
        for seq, length in enumerate(lens):
            dense.k[seq, :length], dense.v[seq, :length] = k[seq], v[seq]
        return dense
    num_pages = [ceil(length / case.page_size) for length in lens]
    total = sum(num_pages) + 2
    pages = torch.randperm(total).int().to(case.device)
    if case.source == "paged in order":
        pages = integers(case, range(1, total))
    table = integers(case, [[UNUSED_PAGE] * (max(num_pages) + 1)] * len(lens))
    keys = make_pages(case, total, table, seq_lens)
    for seq, length in enumerate(lens):
        own = pages[sum(num_pages[:seq]) :][: num_pages[seq]]
        table[seq, : len(own)] = own
        rows = torch.arange(length, device=case.device)
        slots = own[rows // case.page_size] * case.page_size + rows % case.page_size
        new = (k[seq][:, 0], None) if case.source == "latent" else (k[seq], v[seq])
        append_kv(keys, *new, slots)
    return keys


def make_pages(
    case: Case, num_pages: int, table: torch.Tensor, seq_lens: torch.Tensor
) -> PagedSource:
    """A cache in which everything is poison."""
    if case.formats == ("plain", "plain") and case.source != "latent":
        return PagedKV(*make_cache(case, num_pages), table, seq_lens)
    stores = []
    for name, dim in zip(case.formats, case.dims, strict=True):
        heads = 1 if case.source == "latent" else case.num_kv_heads
        shape = (num_pages, case.page_size, heads, dim)
        codes, scales = empty_store(name, shape, case.dtype, torch.device(case.device))
        codes.view(torch.uint8).fill_(255)  # NaN of float8, and of the others
        if name == "fp8_tensor":
            scales.fill_(FP8_SCALE)
        elif scales is not None:
            scales.fill_(torch.nan)
        stores.append((codes, scales))
    (k, k_scales), (v, v_scales) = stores
    if case.source == "latent":
        scales = k_scales
        if scales is not None and scales.dim() > 1:
            scales = scales[:, :, 0]
        return LatentKV(k[:, :, 0], table, seq_lens, case.dims[1], scales, case.dtype)
    return PagedKV(k, v, table, seq_lens, k_scales, v_scales, case.dtype)


def make_inputs(case: Case, seed: int) -> tuple[torch.Tensor, KeySource, dict[str, Any]]:
    torch.manual_seed(seed)
    keys = make_keys(case)
    num_tokens, num_heads = sum(case.q_lens), case.num_kv_heads * case.group
    q = poisoned(case, num_tokens + case.padding, num_heads, case.dims[0])
    q[:num_tokens] = torch.randn(num_tokens, num_heads, case.dims[0])
    tree = None
    if case.tree_width is not None:
        tree = (torch.rand(len(q), case.tree_width) < 0.6).to(case.device)
    return q, keys, {
        "cu_seqlens_q": starts(case, case.q_lens),
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "scale": case.scale or case.dims[0] ** -0.5,
        "sinks": torch.randn(num_heads).to(case.device) if case.sinks else None,
        "tree_mask": tree,
    }  # fmt: skip


def make_call(q: torch.Tensor, keys: KeySource, options: dict[str, Any]) -> AttendCall:
    """The call as producers see it, also by rules that attend() refuses."""
    rules = {name: value for name, value in options.items() if name != "cu_seqlens_q"}
    queries = Queries(q, options["cu_seqlens_q"], 0, keys.num_seqs)
    return AttendCall(queries, keys, Rules(**rules), keys.view())


def torch_attention(
    q: torch.Tensor, keys: KeySource, options: dict[str, Any], dtype: torch.dtype | None = None
) -> AttentionState:
    """Plain torch, by default in the precision of the inputs, where its error is the tolerance."""
    q = q.to(dtype or q.dtype)
    out = q.new_zeros(*q.shape[:2], keys.head_dim_v)
    state = AttentionState(out, q.new_full(q.shape[:2], -torch.inf))
    sinks, tree, softcap = (options[name] for name in ("sinks", "tree_mask", "softcap"))
    bounds = options["cu_seqlens_q"].tolist()
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        k, v = (
            x.to(q.dtype).repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)
            for x in keys.gather(seq)
        )
        mask = reference.visible(
            stop - start,
            k.shape[1],
            causal=options["causal"],
            window=options["window"],
            tree_mask=None if tree is None else tree[start:stop].cpu(),
        )
        scores = q[start:stop].transpose(0, 1) @ k.transpose(1, 2) * options["scale"]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask.to(q.device), -torch.inf)
        if sinks is not None:
            sink = sinks.to(q.dtype)[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat([scores, sink], -1)
            v = torch.cat([v, v.new_zeros(len(v), 1, v.shape[-1])], 1)
        out = torch.softmax(scores, -1).nan_to_num(0.0) @ v
        state.out[start:stop] = out.transpose(0, 1)
        state.lse[start:stop] = torch.logsumexp(scores, -1).transpose(0, 1)
    return state


def gathered(keys: KeySource, which: int) -> list[torch.Tensor]:
    """The keys (0) or values (1) of every sequence."""
    return [keys.gather(seq)[which] for seq in range(keys.num_seqs)]


def largest(tensors: list[torch.Tensor]) -> float:
    """The largest absolute value, NaN aside; 0 where there is none."""
    return max([0.0, *(x.nan_to_num().abs().amax().item() for x in tensors if x.numel())])


def score_rounding(q: torch.Tensor, keys: KeySource, scale: float) -> float:
    """How far a float32 sum of products may be off in another order, by Cauchy-Schwarz."""
    longest = [largest([x.float().norm(dim=-1) for x in rows]) for rows in ([q], gathered(keys, 0))]
    return torch.finfo(torch.float32).eps * longest[0] * longest[1] * scale


def assert_right(
    state: AttentionState,
    q: torch.Tensor,
    keys: KeySource,
    options: dict[str, Any],
    expected: AttentionState | None = None,  # float64; by default the reference's
) -> float:
    """By the largest error of torch or a rounding: in a few rows torch may be right by luck.

    Returns the largest error as a share of what is allowed.
    """
    assert state.out.dtype == q.dtype
    expected = expected or reference.attend(q, keys, **options)
    expected = AttentionState(*(x.to(q.device) for x in expected))
    by_torch = torch_attention(q, keys, options)
    rounding = score_rounding(q, keys, options["scale"])
    highest_value = largest(gathered(keys, 1))
    eps = torch.finfo(q.dtype).eps
    # torch rounds scores to the dtype of the inputs, and with it an LSE of one key
    highest = expected.lse.nan_to_num(0.0, 0.0, 0.0).abs().flatten().tolist()
    roundings = (highest_value * (eps + rounding), max([0.0, *highest]) * eps / 4 + rounding)
    off = []
    for right, theirs, least in zip(expected, by_torch, roundings, strict=True):
        errors = (theirs.double() - right).nan_to_num(0.0, 0.0, 0.0).abs().flatten()
        off.append(right + torch.cat([errors, errors.new_tensor([least])]).amax())
    return assert_state_close(state, expected, AttentionState(*off))
