"""How many heads, keys and queries of a latent prompt a budget of memory allows at once."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from anabranch.compositions.up_projection import UpProjection
from anabranch.device import capability, num_sms
from anabranch.producers import ENVIRONMENT_VARIABLE

MIB = 1 << 20
MIN_PIECE = 128  # keys and queries: smaller products would waste a GPU
MIN_HEADS = 4  # where they fit: kernels are compiled once if groups begin 16 bytes apart in lse
UNBOUNDED = 1 << 40  # tokens: more than any budget holds
STATE_SHARE = 4  # at most a quarter of the budget is for the state of a piece
INDEX_SHARE = 256  # of the budget, for where the sequences of every piece begin
SEQ_BYTES = 64  # the same for each sequence
BLOCK_ROWS = 128  # query rows that one program of attend() handles
# In calls of attend(), as the host counts: rows of a piece are gathered and its work is divided.
PIECE_PRICE, MERGE_PRICE = 1.0, 0.25
PARTS_PRICE = 1.25  # of a call that cuts blocks, whose parts are written in float32 and merged
ALLOCATOR_BYTES = 4 * MIB  # torch leaves up to 1 MiB unused after each of four large tensors


class PromptLens(NamedTuple):
    """Lengths of the sequences of a prompt call, on the host."""

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def key_lens(self) -> list[int]:
        """Keys of the sequences that have new tokens."""
        return [q + c for q, c in zip(self.q_lens, self.context_lens, strict=True) if q]


class Workspace(NamedTuple):
    """How much of a prompt is handled at once."""

    num_heads: int
    num_keys: int
    num_queries: int  # whose states over one piece of a longer sequence are merged
    cuts_blocks: bool = False  # attend() cuts blocks of queries into parts, as they fill no GPU


def choose_workspace(
    up: UpProjection,
    width: int,
    lens: PromptLens,
    page_size: int,
    max_workspace_mib: float,
    fused_merge: bool | None = None,  # as in make_plan
) -> Workspace:
    """The heads and keys with the fewest launches that a budget allows for rows of this width."""
    may_cut = not _keeps_blocks(up, width, fused_merge)
    num_heads = up.weight.shape[0]
    found: list[tuple[float, Workspace]] = []
    for heads in range(num_heads, 0, -1):
        if num_heads % heads or (found and heads < MIN_HEADS):
            continue
        space = _fit(up, width, heads, lens, page_size, max_workspace_mib, may_cut)
        if space is not None:
            found.append((_price(space, lens, num_heads // heads), space))
    if not found:
        raise _too_small(up, width, page_size, max_workspace_mib)
    return min(found, key=lambda choice: choice[0])[1]


def check_workspace(up: UpProjection, width: int, max_workspace_mib: float) -> None:
    """Refuse a budget that cannot hold one head of the smallest piece, with pages of 64 rows."""
    lens = PromptLens((UNBOUNDED,), (0,))
    if _fit(up, width, 1, lens, 64, max_workspace_mib, may_cut=True) is None:
        raise _too_small(up, width, 64, max_workspace_mib)


def _fit(
    up: UpProjection,
    width: int,
    heads: int,
    lens: PromptLens,
    page_size: int,
    max_workspace_mib: float,
    may_cut: bool,
) -> Workspace | None:
    """The most keys that a budget allows with so many heads; None if too few."""
    longest, most_queries = max(lens.key_lens(), default=0), max(lens.q_lens, default=0)
    a_key, a_query = up.bytes_per_key(width, heads), _bytes_per_query(up, heads)
    for with_parts in (False, True):
        room = int(max_workspace_mib * MIB * (1 - 1 / INDEX_SHARE)) - SEQ_BYTES * len(lens.q_lens)
        room -= _fixed_bytes(up, width, heads, page_size, with_parts=with_parts)
        num_keys, num_queries = room // a_key, most_queries
        if num_keys < longest:
            num_queries = balanced_share(most_queries, max(room // STATE_SHARE // a_query, 1))
            num_keys = (room - num_queries * a_query) // a_key
        space = Workspace(heads, num_keys, num_queries, with_parts)
        cuts = may_cut or _may_cut_blocks(space, lens, up.weight)
        if with_parts or not cuts or up.weight.device.type != "cuda":
            too_few = num_keys < min(longest, MIN_PIECE)
            return None if too_few or num_queries < min(most_queries, MIN_PIECE) else space
    return None


def _fixed_bytes(
    up: UpProjection, width: int, heads: int, page_size: int, *, with_parts: bool
) -> int:
    """What does not depend on the keys: rows around a piece, and what attend() takes itself.

    On a GPU, the blocks that attend() cuts leave two parts for each processor, in float32.
    """
    device, fixed = up.weight.device, 2 * page_size * width * up.weight.element_size()
    if device.type != "cuda":
        return fixed
    parts = 2 * max(num_sms(device), heads) * BLOCK_ROWS * (up.head_dim_v + 2) * 4
    return fixed + ALLOCATOR_BYTES + (parts if with_parts else 0)


def _keeps_blocks(up: UpProjection, width: int, fused_merge: bool | None) -> bool:
    """Whether attend() runs on the Hopper kernel, which has no parts where blocks fill the GPU."""
    weight, head_dim_k = up.weight, up.head_dim_nope + width - up.rank
    if weight.device.type != "cuda" or capability(weight.device)[0] != 9:
        return False
    from anabranch.kernels.hopper_config import HEAD_DIMS  # Triton comes with it

    named = os.environ.get(ENVIRONMENT_VARIABLE) in (None, "", "gluon")
    dims = (head_dim_k, up.head_dim_v) in HEAD_DIMS
    return named and dims and weight.element_size() == 2 and fused_merge is not False


def _may_cut_blocks(space: Workspace, lens: PromptLens, weight: torch.Tensor) -> bool:
    """Whether the Hopper kernel may cut blocks: not those of one sequence that fill the GPU."""
    if len(lens.q_lens) != 1:
        return True
    q_len, k_len = lens.q_lens[0], lens.key_lens()[0] if lens.q_lens[0] else 0
    if k_len > space.num_keys:
        last = -(-k_len // -(-k_len // space.num_keys)) if space.num_keys > 0 else 0
        if last < q_len or space.num_queries < q_len:  # some calls have fewer tokens
            return True
    return space.num_heads * -(-q_len // BLOCK_ROWS) < 1.5 * num_sms(weight.device)


def _price(space: Workspace, lens: PromptLens, num_groups: int) -> float:
    """What the host does for all groups of heads, in calls of attend()."""
    key_lens = lens.key_lens()
    short = sum(k_len for k_len in key_lens if k_len <= space.num_keys)
    pieces = -(-short // max(space.num_keys, 1))
    calls, merges = pieces, 0
    turns = -(-max(lens.q_lens, default=0) // max(space.num_queries, 1))
    for k_len in key_lens:
        if k_len > space.num_keys:
            parts = -(-k_len // space.num_keys)
            merged = turns * (parts - 1)
            pieces, calls, merges = pieces + parts, calls + 1 + merged, merges + merged
    each = calls * (PARTS_PRICE if space.cuts_blocks else 1) + merges * MERGE_PRICE
    return pieces * PIECE_PRICE + num_groups * each


def balanced_share(total: int, most: int) -> int:
    """The size of equal shares that are at most so large."""
    return -(-total // -(-total // most)) if total else 0


def _bytes_per_query(up: UpProjection, heads: int) -> int:
    return heads * (up.head_dim_v * up.weight.element_size() + 4)


def _too_small(
    up: UpProjection, width: int, page_size: int, max_workspace_mib: float
) -> ValueError:
    a_key, a_query = up.bytes_per_key(width, 1), _bytes_per_query(up, 1)
    piece = MIN_PIECE * STATE_SHARE * max(a_key / (STATE_SHARE - 1), a_query)
    need = SEQ_BYTES + piece + _fixed_bytes(up, width, 1, page_size, with_parts=True)
    need /= MIB * (1 - 1 / INDEX_SHARE)
    return ValueError(
        f"max_workspace_mib {max_workspace_mib} is too small for one head of {MIN_PIECE} keys, "
        f"which needs about {need:.3g}"
    )
