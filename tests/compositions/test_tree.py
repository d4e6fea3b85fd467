"""Draft trees by the property: a node attends to its context, its ancestors and itself."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from cases import GPU, Case, assert_right, every_producer, integers, make_inputs, starts
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import AttentionState, attend, make_draft_tree, reference


def draw_parents(size: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, max(node, 1), (), generator=rng)) if node else -1
            for node in range(size)]  # fmt: skip


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from a root to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def attend_paths(
    q: torch.Tensor, keys: Any, trees: list[list[int]], scale: float
) -> AttentionState:
    """Every node by itself, over its context and the keys of its path, in float64."""
    state = AttentionState.empty((*q.shape[:2], keys.head_dim_v), dtype=torch.float64)
    state = state._replace(lse=state.lse.double())
    token = 0
    for seq, parents in enumerate(trees):
        k, v = keys.gather(seq)
        context = len(k) - len(parents)
        for node in range(len(parents)):
            rows = [*range(context), *(context + above for above in path_of(parents, node))]
            part = reference.attention(q[token : token + 1], k[rows], v[rows], scale=scale)
            state.out[token : token + 1], state.lse[token : token + 1] = part
            token += 1
    return state


def check(trees: list[list[int]], contexts: list[int], impl: str, device: str) -> None:
    sizes = [len(tree) for tree in trees]
    lens = [context + size for context, size in zip(contexts, sizes, strict=True)]
    case = Case(q_lens=tuple(sizes), k_lens=tuple(lens), dims=(16, 16), group=2, device=device)
    q, keys, options = make_inputs(case, 0)
    flat = integers(case, [*chain(*trees), *[0] * case.padding])
    tree = make_draft_tree(
        flat, cu_seqlens_q=starts(case, sizes), seq_lens=keys.seq_lens, check=True, impl=impl
    )
    positions = [context + len(path_of(parents, node)) - 1
                 for context, parents in zip(contexts, trees, strict=True)
                 for node in range(len(parents))]  # fmt: skip
    assert tree.positions.tolist() == [*positions, *[0] * case.padding]
    assert not tree.tree_mask[sum(sizes) :].any()
    options["tree_mask"] = tree.tree_mask
    state = attend(q, keys, impl=impl, **options)
    assert_right(state, q, keys, options, attend_paths(q, keys, trees, options["scale"]))


@every_producer
def test_trees_of_several_sizes(impl: str, device: str) -> None:
    """A chain, a star, several roots, one node, none, and as large as they come."""
    trees = [[-1, 0, 1, 2, 3], [-1, 0, 0, 0], [-1, -1, 0, 1, 1, 4], [-1], [], draw_parents(64)]
    check(trees, [3, 0, 17, 8, 5, 20], impl, device)


@every_producer
def test_the_deepest_tree(impl: str, device: str) -> None:
    check([[*range(-1, 63)], draw_parents(63)], [1, 0], impl, device)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 99)),
        min_size=1,
        max_size=4,
    )
)
def test_any_trees(impl: str, drawn: list[tuple[int, int, int]]) -> None:
    if torch.cuda.is_available():
        pytest.skip("in the interpreter")
    check(
        [draw_parents(size, seed) for _, size, seed in drawn], [c for c, *_ in drawn], impl, "cpu"
    )


@every_producer
def test_padded_parents(impl: str, device: str) -> None:
    """Without lengths, positions count from the end of the context."""
    trees = [draw_parents(7, seed) for seed in range(3)]
    parents = torch.tensor(trees, dtype=torch.int32, device=device)
    tree = make_draft_tree(parents, impl=impl)
    assert tree.tree_mask.shape == (21, 7)
    paths = [set(path_of(parents, node)) for parents in trees for node in range(7)]
    assert [{*row.nonzero().flatten().tolist()} for row in tree.tree_mask] == paths
    assert tree.positions.tolist() == [len(path) - 1 for path in paths]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 0, 2], "sequence 1, node 2 has parent 2"),
        ([-1, 2, 1], "sequence 1, node 1 has parent 2"),  # a cycle
        ([-1, 0, -2], "sequence 1, node 2 has parent -2"),
        ([0, 0, 1], "sequence 1, node 0 has parent 0"),
    ],
)
def test_bad_parents(parents: list[int], message: str) -> None:
    both = torch.tensor([[-1, 0, 1], parents], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        make_draft_tree(both)
    with pytest.raises(ValueError, match=message):
        make_draft_tree(both.flatten(), cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32))


def test_bad_arguments() -> None:
    ints = torch.zeros(70, dtype=torch.int32) - 1
    bounds = torch.tensor([0, 70], dtype=torch.int32)
    for message, parents, options in (
        (r"parents must be \[num_seqs, q_len\]", ints, {}),
        ("a tree has at most 64 nodes", ints[None], {}),
        ("sequence 0 has 70 nodes, at most 64 fit", ints, {"cu_seqlens_q": bounds}),
        ("parents must be one of int32", ints.long()[None], {}),
        ("cu_seqlens_q must not descend", ints, {"cu_seqlens_q": bounds[[0, 1, 0]]}),
        ("num_tokens = 69, got 0 to 70", ints[1:], {"cu_seqlens_q": bounds}),
        (r"seq_lens must be contiguous \[1\]", ints[None, :9], {"seq_lens": bounds}),
        ("impl must be one of torch, triton, got 'cuda'", ints[None, :9], {"impl": "cuda"}),
    ):
        with pytest.raises(ValueError, match=message):
            make_draft_tree(parents, **options)


@GPU
def test_a_device_check_names_the_node() -> None:
    parents = torch.tensor([[-1, 0, 3, 1]], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="sequence 0, node 2 has parent 3"):
        make_draft_tree(parents, check=True)


@GPU
def test_replayed_with_other_trees() -> None:
    """Trees, their sizes and lengths change after capture."""
    case = Case(
        q_lens=(20, 20, 24), k_lens=(90, 300, 64), dims=(128, 128), dtype=torch.bfloat16, group=4,
        page_size=16, device="cuda", padding=0,
    )  # fmt: skip
    q, keys, options = make_inputs(case, 0)
    parents, bounds = integers(case, [-1] * 64), integers(case, [0, 20, 40, 64])

    def verify() -> AttentionState:
        tree = make_draft_tree(parents, cu_seqlens_q=bounds, seq_lens=keys.seq_lens)
        given = options | {"cu_seqlens_q": bounds, "tree_mask": tree.tree_mask}
        return attend(q, keys, **given)

    verify()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = verify()
    for edges, lens in (((0, 20, 40, 64), (90, 300, 64)), ((0, 1, 1, 60), (33, 7, 64))):
        bounds.copy_(integers(case, edges))
        keys.seq_lens.copy_(integers(case, lens))
        trees = [draw_parents(stop - start, start) for start, stop in pairwise(edges)]
        flat = [*chain(*trees)]
        parents.copy_(integers(case, [*flat, *[-1] * (64 - len(flat))]))
        graph.replay()
        tree = make_draft_tree(parents, cu_seqlens_q=bounds)
        given = options | {"cu_seqlens_q": bounds, "tree_mask": tree.tree_mask}
        expected = attend_paths(q, keys, trees, options["scale"])
        assert_right(state, q, keys, given, expected)
