"""What a case must give, in float64 on the device of its inputs, and how far a result is from it.

The oracle of the tests runs on the CPU; here keys by the gigabyte are checked before every
timing, so the same mathematics runs batched where the data is. A test holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.state import AttentionState, merge_stacked
from attention_bench.inputs import AttendInputs, Inputs, MergeInputs

MAX_ROWS = 1021  # queries of a sequence that are checked; prime, to meet every row of a tile
MAX_SCORES = 1 << 28  # float64 scores held at a time


class CallResult(NamedTuple):
    """What an implementation returned: [num_tokens, num_heads, head_dim], and lse if it has one."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


class Expected(NamedTuple):
    """The state of some or all queries, and the tokens that they are."""

    tokens: torch.Tensor
    state: AttentionState

    def complaint(self, answer: CallResult) -> str:
        """Why an answer is wrong, or nothing. Not a number is wrong."""
        shape = answer.out.shape
        if shape[1:] != self.state.out.shape[1:]:
            return f"out has shape {tuple(shape)}"
        # Rounding weights and output costs half an epsilon; approximate exp2 sets the floor.
        error, bound = self.error(answer), max(2 * torch.finfo(answer.out.dtype).eps, 1e-5)
        if not error <= bound:
            return f"out is off by {error:.2g} of its norm, {bound:.2g} allowed"
        if answer.lse is not None:
            gap = (answer.lse[self.tokens].double() - self.state.lse).abs()
            worst = float((gap / self.state.lse.abs().clamp_min(1)).max())
            if not worst <= 1e-4:
                return f"lse is off by {worst:.2g}, 1e-4 allowed"
        return ""

    def error(self, answer: CallResult) -> float:
        """The largest distance of a row of `out` from its exact value, relative to its norm."""
        gap = answer.out[self.tokens].double() - self.state.out
        relative = gap.square().sum(-1) / self.state.out.square().sum(-1)
        return float(relative.max().sqrt())


def expected_of(inputs: Inputs) -> Expected:
    """The exact result of the first rotation."""
    if isinstance(inputs, MergeInputs):
        states = zip(*inputs.pairs[0], strict=True)
        merged = merge_stacked(AttentionState(*(torch.stack(x).double() for x in states)))
        return Expected(torch.arange(len(merged.out), device=merged.out.device), merged)
    return _expected_attention(inputs)


def _expected_attention(inputs: AttendInputs) -> Expected:
    case, keys = inputs.case, inputs.dense[0]
    device = keys.k.device
    count = min(case.q_len, MAX_ROWS)
    rows = torch.linspace(0, case.q_len - 1, count, dtype=torch.float64, device=device).long()
    queries = inputs.queries[0].view(case.num_seqs, case.q_len, case.num_heads, case.head_dim)
    step = max(1, MAX_SCORES // (case.num_heads * case.seq_len))
    states = [
        exact_attention(queries[seq, part], keys.k[seq], keys.v[seq], _mask(inputs, part))
        for seq in range(case.num_seqs)
        for part in torch.split(rows, step)
    ]
    starts = torch.arange(case.num_seqs, device=device)[:, None] * case.q_len
    state = AttentionState(*map(torch.cat, zip(*states, strict=True)))
    return Expected((starts + rows).flatten(), state)


def _mask(inputs: AttendInputs, rows: torch.Tensor) -> torch.Tensor:
    case = inputs.case
    positions = (rows + case.seq_len - case.q_len)[:, None]
    keys = torch.arange(case.seq_len, device=rows.device)
    mask = keys <= positions
    return mask if case.window is None else mask & (keys > positions - case.window)


def exact_attention(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    k: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    v: torch.Tensor,  # [seq_len, num_kv_heads, head_dim_v]
    mask: torch.Tensor,  # bool [num_rows, seq_len], no row without a key
) -> AttentionState:
    """Attention of one sequence in float64."""
    num_rows, num_heads, dim = q.shape
    q, k, v = (x.double() for x in (q, k, v))
    grouped = q.view(num_rows, k.shape[1], -1, dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * dim**-0.5
    scores.masked_fill_(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("hgqk,khd->qhgd", torch.exp_(scores.sub_(lse[..., None])), v)
    return AttentionState(
        out.reshape(num_rows, num_heads, -1), lse.permute(2, 0, 1).reshape(num_rows, num_heads)
    )
