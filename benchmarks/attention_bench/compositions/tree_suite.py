"""`anabranch bench tree`: draft trees verified in one call, beside plain decode and chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from anabranch import PagedKV, make_draft_tree
from attention_bench.compositions.page_rows import (
    PAGE,
    attended,
    exact_rows,
    normal,
    random_pages,
    rotations_of,
    shuffled,
)
from attention_bench.exact import Expected
from attention_bench.implementations import Implementation, Prepared


@dataclass(frozen=True, slots=True)
class TreeCase:
    """A tree in which every node has two children, after the context of each sequence."""

    num_seqs: int
    context: int
    nodes: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    groups: tuple[str, ...] = ("table",)
    models: tuple[str, ...] = ()
    bench: str = "tree"

    @property
    def name(self) -> str:
        """What tables and filters call it."""
        heads = f"H{self.num_heads}/{self.num_kv_heads} D{self.head_dim}"
        return f"B{self.num_seqs} L{self.context} {heads} tree of {self.nodes}"

    @property
    def work(self) -> int:
        """Bytes of keys and values of 16 bits."""
        row = 2 * 2 * self.num_kv_heads * self.head_dim
        return self.num_seqs * (self.context + self.nodes) * row

    @property
    def working_set(self) -> int:
        """Bytes that one rotation reads."""
        return self.work

    def prepare(self, device: torch.device) -> tuple[TreeInputs, Expected]:
        """Other keys in each rotation, under one table."""
        generator = torch.Generator(device).manual_seed(0)
        rotations, length = rotations_of(self, device), self.context + self.nodes
        width = -(-length // PAGE)
        numbers = torch.arange(self.num_seqs * width, device=device).view(self.num_seqs, width)
        table = shuffled(numbers, generator)
        heads = (self.num_kv_heads, self.head_dim)
        keys = [random_pages(table, heads, length, generator) for _ in rotations]
        shape = (self.num_seqs, self.nodes, self.num_heads, self.head_dim)
        queries = [normal(shape, generator) for _ in rotations]
        parents = [-1, *(node // 2 for node in range(self.nodes - 1))]
        given = torch.tensor([parents] * self.num_seqs, dtype=torch.int32, device=device)
        mask = make_draft_tree(given).tree_mask
        inputs = TreeInputs(self, queries, keys, mask)
        return inputs, exact_rows(queries[0], keys[0], inputs.masks(mask[:, : self.nodes]))


class TreeInputs(NamedTuple):
    """Queries of all nodes and pages, one for each rotation."""

    case: TreeCase
    queries: list[torch.Tensor]  # [num_seqs, nodes, num_heads, head_dim]
    keys: list[PagedKV]
    tree_mask: torch.Tensor

    def masks(self, among: torch.Tensor) -> list[torch.Tensor]:
        """All of the context, and what nodes see of each other, for each sequence."""
        seen = torch.ones(len(among), self.case.context, dtype=torch.bool, device=among.device)
        masks = torch.cat([seen, among.bool()], 1)
        return list(masks.view(-1, self.case.nodes, masks.shape[1]))


def _tree(inputs: TreeInputs) -> Prepared:
    return attended(inputs.queries, inputs.keys, tree_mask=inputs.tree_mask)


def _chain(inputs: TreeInputs) -> Prepared:
    """As many drafts, each after the one before it."""
    case, queries = inputs.case, inputs.queries
    below = torch.ones(case.nodes, case.nodes, dtype=torch.bool, device=queries[0].device).tril()
    masks = inputs.masks(below.repeat(case.num_seqs, 1))
    return attended(queries, inputs.keys, exact_rows(queries[0], inputs.keys[0], masks))


def _decode(inputs: TreeInputs) -> Prepared:
    """One token a sequence, over as many keys."""
    queries = [q[:, -1].contiguous() for q in inputs.queries]
    expected = exact_rows(queries[0][:, None], inputs.keys[0])
    return attended(queries, inputs.keys, expected)


def implementations(_device: str) -> list[Implementation]:
    """The tree, and what it is measured by."""
    return [
        Implementation("anabranch", "ours", _tree),
        Implementation("chain", "context", _chain),
        Implementation("plain decode", "context", _decode),
    ]


def cases_of(device: str) -> list[TreeCase]:
    """Trees of up to 64 nodes."""
    if device == "cpu":
        return [TreeCase(2, 40, 7, 4, 2, 16, groups=("cpu",))]
    return [TreeCase(8, 8192, nodes, groups=("table", "nodes")) for nodes in (8, 16, 32, 64)]
