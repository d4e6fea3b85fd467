"""make_draft_tree(): masks and positions of draft trees, from the parents of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from anabranch.implementations import load_implementation
from anabranch.shapes import check_ascending, check_device, check_dtype, read_index

MAX_NODES = 64  # of one tree


class DraftTree(NamedTuple):
    """What a model and attend() need to verify trees in one call."""

    tree_mask: torch.Tensor  # bool [num_tokens, width]: a node sees itself and its ancestors
    positions: torch.Tensor  # int32 [num_tokens]: a node stands one after its parent


def make_draft_tree(
    parents: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    check: bool = False,
    impl: str | None = None,
) -> DraftTree:
    """Masks and positions of one draft tree a sequence, made on the device of `parents`.

    parents       int32 [num_seqs, q_len], or packed [num_tokens] with `cu_seqlens_q`: the parent of
                  each node, counted in its own tree of up to 64 nodes; -1 for one that follows the
                  committed context. A parent stands before its children
    cu_seqlens_q  int32 [num_seqs + 1], as in attend(); tokens of no sequence see nothing
    seq_lens      int32 [num_seqs]: committed keys and the nodes; without it positions count from
                  the end of the committed context
    check         also validate parents on a GPU, which waits for it; on a CPU they always are
    impl          "torch" or "triton"; by default the device decides

    Give `tree_mask` to attend() together with queries packed in the same order.
    """
    starts, width = _check(parents, cu_seqlens_q, seq_lens)
    flat = parents.reshape(-1)
    if check or parents.device.type == "cpu":
        check_parents(flat, starts)
    maker = load_implementation("draft_tree", impl, parents.device)
    return DraftTree(*maker.make_draft_tree(flat, starts, seq_lens, width))


def _check(
    parents: torch.Tensor, cu_seqlens_q: torch.Tensor | None, seq_lens: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """Where trees begin, and the width of their mask."""
    check_dtype("parents", parents, (torch.int32,))
    shape, device = tuple(parents.shape), parents.device
    if parents.dim() != (2 if cu_seqlens_q is None else 1):
        raise ValueError(
            "parents must be [num_seqs, q_len], or [num_tokens] with cu_seqlens_q, "
            f"got shape {shape}"
        )
    if cu_seqlens_q is None:
        num_seqs, width = shape
        if width > MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES} nodes, got parents {shape}")
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * width
    else:
        starts, width, num_seqs = cu_seqlens_q, MAX_NODES, cu_seqlens_q.shape[0] - 1
        if cu_seqlens_q.dim() != 1 or num_seqs < 0:
            raise ValueError(f"cu_seqlens_q must be [num_seqs + 1], got {tuple(starts.shape)}")
    for name, index, size in (
        ("cu_seqlens_q", starts, num_seqs + 1),
        ("seq_lens", seq_lens, num_seqs),
    ):
        if index is None:
            continue
        check_dtype(name, index, (torch.int32,))
        check_device(name, index, device)
        if index.shape != (size,) or (size > 1 and index.stride(0) != 1):
            raise ValueError(f"{name} must be contiguous [{size}], got {tuple(index.shape)}")
    return starts, width


def check_parents(parents: torch.Tensor, starts: torch.Tensor) -> None:
    """Refuse trees that are too large, and parents that do not stand before. Synchronises."""
    bounds, nodes = read_index(starts), read_index(parents)
    check_ascending("cu_seqlens_q", bounds)
    if bounds[0] < 0 or bounds[-1] > len(nodes):
        raise ValueError(
            f"cu_seqlens_q must run from 0 to at most num_tokens = {len(nodes)}, "
            f"got {bounds[0]} to {bounds[-1]}"
        )
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        if stop - start > MAX_NODES:
            raise ValueError(f"sequence {seq} has {stop - start} nodes, at most {MAX_NODES} fit")
        check_tree_order(f"sequence {seq}", nodes[start:stop])


def check_tree_order(name: str, parents: Sequence[int]) -> None:
    """Refuse parents that do not stand before their children; `name` says whose tree it is."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"{name}, node {node} has parent {parent}; a parent is -1 or stands "
                "before its children, so that there is no cycle"
            )


def node_depths(parents: Sequence[int]) -> list[int]:
    """How many nodes lead to each node, itself included: 1 for a node without a parent."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
