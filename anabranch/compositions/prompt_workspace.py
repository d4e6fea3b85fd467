"""How many heads, keys and queries of a prompt over expanded keys a budget of memory allows."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from anabranch.device import capability, num_sms
from anabranch.kernels.hopper_config import BLOCK_ROWS, HEAD_DIMS, PARTS_A_PROGRAM
from anabranch.producers import ENVIRONMENT_VARIABLE

MIB = 1 << 20
MIN_PIECE = 128  # keys and queries: smaller products would waste a GPU
MIN_HEADS = 4  # where they fit: kernels are compiled once if groups begin 16 bytes apart in lse
UNBOUNDED = 1 << 40  # tokens: more than any budget holds
STATE_SHARE = 4  # at most a quarter of the budget is for the state of a piece
INDEX_SHARE = 256  # of the budget, for where the sequences of every piece begin
SEQ_BYTES = 64  # the same for each sequence
# In calls of attend(), as the host counts: rows of a piece are gathered and its work is divided.
PIECE_PRICE, MERGE_PRICE = 1.0, 0.25
PARTS_PRICE = 1.25  # of a call that cuts blocks, whose parts are written in float32 and merged
ALLOCATOR_BYTES = 4 * MIB  # torch leaves up to 1 MiB unused after each of four large tensors


class ExpandedKeys(NamedTuple):
    """Keys and values as attend() is given them, and what expanding them takes beside."""

    num_heads: int  # of keys
    group: int  # query heads for each
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    row_bytes: int = 0  # of a key, gathered before its heads are expanded
    spare_rows: int = 0  # gathered around a piece

    def bytes_per_key(self, num_heads: int) -> int:
        """What a key takes while it is expanded for so many heads."""
        dims = self.head_dim_k + self.head_dim_v
        return self.row_bytes + num_heads * dims * self.dtype.itemsize

    def bytes_per_query(self, num_heads: int) -> int:
        """What the state of a query takes for so many heads of keys."""
        return num_heads * self.group * (self.head_dim_v * self.dtype.itemsize + 4)

    def allocate(self, num_keys: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the keys and values [num_keys, num_heads, dim] of so many heads."""
        dim_k, dim_v = self.head_dim_k, self.head_dim_v
        rows = num_keys * num_heads
        both = torch.empty(rows * (dim_k + dim_v), dtype=self.dtype, device=self.device)
        k = both[: rows * dim_k].view(num_keys, num_heads, dim_k)
        return k, both[rows * dim_k :].view(num_keys, num_heads, dim_v)

    @property
    def runs_on_hopper(self) -> bool:
        """Whether attend() over these keys is the Hopper kernel, unless it has few queries."""
        if capability(self.device)[0] != 9 or self.dtype.itemsize != 2:
            return False
        named = os.environ.get(ENVIRONMENT_VARIABLE) in (None, "", "gluon")
        return named and (self.head_dim_k, self.head_dim_v) in HEAD_DIMS


class PromptLens(NamedTuple):
    """Lengths of the sequences of a prompt call, on the host."""

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    window: int | None = None  # of keys that a token sees

    @property
    def overlap(self) -> int:
        """Keys before its own that a token sees, where tokens are divided and not keys."""
        return 0 if self.window is None else self.window - 1

    def first_key(self, context_len: int) -> int:
        """The first key that a token at this position sees."""
        return 0 if self.window is None else max(context_len - self.overlap, 0)

    def num_pairs(self) -> int:
        """Keys that tokens see, counted for each token."""
        pairs = 0
        for q_len, context_len in zip(self.q_lens, self.context_lens, strict=True):
            seen = context_len + (q_len + 1) / 2
            pairs += int(q_len * (seen if self.window is None else min(seen, self.window)))
        return pairs

    def key_lens(self) -> list[int]:
        """Keys of the sequences that have new tokens, as far as these see them."""
        lens = zip(self.q_lens, self.context_lens, strict=True)
        return [q + c - self.first_key(c) for q, c in lens if q]


class Workspace(NamedTuple):
    """How much of a prompt is handled at once."""

    num_heads: int
    num_keys: int
    num_queries: int  # whose states over one piece of a longer sequence are merged
    cuts_blocks: bool = False  # attend() cuts blocks of queries into parts, as they fill no GPU


def choose_workspace(
    keys: ExpandedKeys,
    lens: PromptLens,
    max_workspace_mib: float,
    fused_merge: bool | None = None,  # as in make_plan
) -> Workspace:
    """The heads and keys with the fewest launches that a budget allows, or an error."""
    found = find_workspace(keys, lens, max_workspace_mib, fused_merge)
    if found is None:
        raise _too_small(keys, lens, max_workspace_mib)
    return found


def find_workspace(
    keys: ExpandedKeys,
    lens: PromptLens,
    max_workspace_mib: float,
    fused_merge: bool | None = None,
) -> Workspace | None:
    """The same, or None where the budget is too small."""
    may_cut = fused_merge is False or not keys.runs_on_hopper
    found: list[tuple[float, Workspace]] = []
    for heads in range(keys.num_heads, 0, -1):
        if keys.num_heads % heads or (found and heads * keys.group < MIN_HEADS):
            continue
        space = _fit(keys, heads, lens, max_workspace_mib, may_cut)
        if space is not None:
            found.append((_price(space, lens, keys.num_heads // heads), space))
    return min(found, key=lambda choice: choice[0])[1] if found else None


def check_workspace(keys: ExpandedKeys, max_workspace_mib: float) -> None:
    """Refuse a budget that cannot hold one head of the smallest piece of a long prompt."""
    lens = PromptLens((UNBOUNDED,), (0,))
    if _fit(keys, 1, lens, max_workspace_mib, may_cut=True) is None:
        raise _too_small(keys, lens, max_workspace_mib)


def _fit(
    keys: ExpandedKeys, heads: int, lens: PromptLens, max_workspace_mib: float, may_cut: bool
) -> Workspace | None:
    """The most keys that a budget allows with so many heads; None if too few."""
    longest, most_queries = max(lens.key_lens(), default=0), max(lens.q_lens, default=0)
    a_key, a_query = keys.bytes_per_key(heads), keys.bytes_per_query(heads)
    for with_parts in (False, True):
        room = int(max_workspace_mib * MIB * (1 - 1 / INDEX_SHARE)) - SEQ_BYTES * len(lens.q_lens)
        room -= _fixed_bytes(keys, heads, with_parts=with_parts)
        num_keys, num_queries = room // a_key, most_queries
        if num_keys < longest and lens.window is None:
            num_queries = balanced_share(most_queries, max(room // STATE_SHARE // a_query, 1))
            num_keys = (room - num_queries * a_query) // a_key
        space = Workspace(heads, num_keys, num_queries, with_parts)
        cuts = may_cut or _may_cut_blocks(space, lens, keys)
        if with_parts or not cuts or keys.device.type != "cuda":
            too_few = num_keys < min(longest, MIN_PIECE + lens.overlap)
            return None if too_few or num_queries < min(most_queries, MIN_PIECE) else space
    return None


def _fixed_bytes(keys: ExpandedKeys, heads: int, *, with_parts: bool) -> int:
    """What does not depend on the keys: rows around a piece, and what attend() takes itself.

    On a GPU, the blocks that attend() cuts leave parts for each processor, in float32.
    """
    fixed = keys.spare_rows * keys.row_bytes
    if keys.device.type != "cuda":
        return fixed
    slots = max(PARTS_A_PROGRAM * num_sms(keys.device), 2 * heads * keys.group)
    parts = slots * BLOCK_ROWS * (keys.head_dim_v + 2) * 4
    return fixed + ALLOCATOR_BYTES + (parts if with_parts else 0)


def _may_cut_blocks(space: Workspace, lens: PromptLens, keys: ExpandedKeys) -> bool:
    """Whether the Hopper kernel may cut blocks: not those of one sequence that fill the GPU.

    Tokens after a piece see all of it: without an order of keys, blocks may always be cut.
    """
    if len(lens.q_lens) != 1:
        return True
    q_len, k_len = lens.q_lens[0], max(lens.key_lens(), default=0)
    if k_len > space.num_keys:
        return True
    blocks = space.num_heads * -(-q_len * keys.group // BLOCK_ROWS)
    return blocks < 1.5 * num_sms(keys.device)


def _price(space: Workspace, lens: PromptLens, num_groups: int) -> float:
    """What the host does for all groups of heads, in calls of attend()."""
    key_lens = lens.key_lens()
    short = sum(k_len for k_len in key_lens if k_len <= space.num_keys)
    pieces = -(-short // max(space.num_keys, 1))
    calls, merges = pieces, 0
    turns = -(-max(lens.q_lens, default=0) // max(space.num_queries, 1))
    for k_len in key_lens:
        if k_len > space.num_keys:
            parts = -(-(k_len - lens.overlap) // (space.num_keys - lens.overlap))
            merged = turns * (parts - 1) if lens.window is None else 0
            pieces, merges = pieces + parts, merges + merged
            calls += 1 + merged if lens.window is None else parts
    each = calls * (PARTS_PRICE if space.cuts_blocks else 1) + merges * MERGE_PRICE
    return pieces * PIECE_PRICE + num_groups * each


def balanced_share(total: int, most: int) -> int:
    """The size of equal shares that are at most so large."""
    return -(-total // -(-total // most)) if total else 0


def _too_small(keys: ExpandedKeys, lens: PromptLens, max_workspace_mib: float) -> ValueError:
    a_key, a_query = keys.bytes_per_key(1), keys.bytes_per_query(1)
    num_keys = MIN_PIECE + lens.overlap
    piece = max(
        num_keys * STATE_SHARE * a_key / (STATE_SHARE - 1), MIN_PIECE * STATE_SHARE * a_query
    )
    need = SEQ_BYTES + piece + _fixed_bytes(keys, 1, with_parts=True)
    need /= MIB * (1 - 1 / INDEX_SHARE)
    return ValueError(
        f"max_workspace_mib {max_workspace_mib} is too small for one head of {num_keys} keys, "
        f"which needs about {need:.3g}"
    )
