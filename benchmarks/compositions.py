"""Selected keys, shared prefixes and draft trees on a GPU, against what they replace.

    python benchmarks/compositions.py [--out FILE]

A graph runs an implementation on several sets of inputs, so that nothing it reads is in the cache
yet; replays of all implementations of a case take turns. Times are microseconds a call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from anabranch import (
    AttentionState,
    DenseKV,
    PagedKV,
    SelectedKV,
    attend,
    attend_cascade,
    make_cascade,
    make_draft_tree,
    make_plan,
)

Call = Callable[[], object]
REPLAYS = 40
NUM_SETS = 8  # of inputs: lists of one layer each
DEVICE = torch.device("cuda")
BRAIN = torch.bfloat16


class Row(NamedTuple):
    """One implementation of a case."""

    case: str
    implementation: str
    median_us: float
    low_us: float  # a tenth of the replays took less,
    high_us: float  # and a tenth took more
    speedup: float  # over the first implementation of the case


def randn(*shape: int) -> torch.Tensor:
    """Random numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE, dtype=BRAIN)


def ints(values: object) -> torch.Tensor:
    """Lengths or tables."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def capture(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """A graph of these calls, all compiled before."""
    for call in calls[:1] * 2:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measure(case: str, implementations: dict[str, list[Call]]) -> list[Row]:
    """Replay all implementations in turns."""
    graphs = {name: capture(calls) for name, calls in implementations.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(REPLAYS + 3):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end) * 1000 / len(implementations[name]))
    rows: list[Row] = []
    for name, taken in times.items():
        taken.sort()
        low, median, high = (taken[int(len(taken) * part)] for part in (0.1, 0.5, 0.9))
        first = rows[0].median_us if rows else median
        rows.append(Row(case, name, median, low, high, first / median))
        print(f"{case:44} {name:34} {median:9.1f} us  {rows[-1].speedup:6.2f}x", flush=True)
    return rows


def assert_close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Refuse to time a wrong result; both sides round to bfloat16."""
    error = (mine.float() - theirs.float()).abs().max().item()
    if not error < 0.03:
        raise RuntimeError(f"results differ by {error}")


def draw_lists(num_seqs: int, num_heads: int, length: int, count: int) -> torch.Tensor:
    """Random lists without repetition."""
    scores = torch.rand(num_seqs, num_heads, length, device=DEVICE)
    return scores.topk(count, -1, sorted=False).indices.int()


def gather_and_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor
) -> torch.Tensor:
    """Torch: copy the listed keys of every query head, then scaled_dot_product_attention."""
    num_seqs, num_heads, _ = lists.shape
    seqs = torch.arange(num_seqs, device=DEVICE)[:, None, None]
    heads = torch.arange(num_heads, device=DEVICE) * k.shape[2] // num_heads
    own = (x[seqs, lists, heads[:, None]] for x in (k, v))
    return scaled_dot_product_attention(q[:, :, None], *own)[:, :, 0]


def sparse(num_seqs: int, length: int, share: float) -> list[Row]:
    """Lists for each query head of 32 over 8 kv heads of 128."""
    k, v = randn(num_seqs, length, 8, 128), randn(num_seqs, length, 8, 128)
    q = randn(num_seqs, 32, 128)
    count = int(length * share)
    dense = DenseKV(k, v)
    counts = torch.full((num_seqs, 32), count, dtype=torch.int32, device=DEVICE)
    drawn = [draw_lists(num_seqs, 32, length, count) for _ in range(NUM_SETS)]
    sources = [SelectedKV(dense, lists, counts) for lists in drawn]
    plan, dense_plan = make_plan(q, sources[0]), make_plan(q, dense)
    rows = [lists.long() for lists in drawn]
    assert_close(attend(q, sources[0]).out, gather_and_attend(q, k, v, rows[0]))
    return measure(
        f"sparse {num_seqs} x {length}, {count} a query head",
        {
            "torch gather + SDPA": [lambda x=x: gather_and_attend(q, k, v, x) for x in rows],
            "our dense decode": [lambda: attend(q, dense, plan=dense_plan)] * 2,
            "SelectedKV, plan for all layers": [
                lambda keys=keys: attend(q, keys, plan=plan) for keys in sources
            ],
            "SelectedKV, plan at each call": [
                lambda keys=keys: attend(q, keys) for keys in sources
            ],
        },
    )


def sparse_growth() -> list[Row]:
    """The same number of listed keys out of ever more."""
    found: list[Row] = []
    for length in (8192, 32768, 131072):
        k, v, q = randn(1, length, 8, 128), randn(1, length, 8, 128), randn(1, 32, 128)
        counts = torch.full((1, 32), 640, dtype=torch.int32, device=DEVICE)
        drawn = [draw_lists(1, 32, length, 640) for _ in range(NUM_SETS)]
        sources = [SelectedKV(DenseKV(k, v), lists, counts) for lists in drawn]
        plan = make_plan(q, sources[0])
        calls = [lambda keys=keys, q=q, plan=plan: attend(q, keys, plan=plan) for keys in sources]
        found += measure(f"sparse 640 a query head of {length}", {"SelectedKV": calls})
    return found


def sparse_paged() -> list[Row]:
    """3 sequences, 32 kv heads of 256, 2% of 16000 keys, in pages of 16 and in a padded batch."""
    num_seqs, length, size, count = 3, 16000, 16, 320
    dense = DenseKV(randn(num_seqs, length, 32, 256), randn(num_seqs, length, 32, 256))
    order = torch.randperm(num_seqs * length // size, device=DEVICE)
    places = order.argsort().int().view(num_seqs, -1)
    k, v = (x.view(-1, size, 32, 256)[order] for x in (dense.k, dense.v))
    paged = PagedKV(k, v, places, ints([length] * num_seqs))
    q = randn(num_seqs, 32, 256)
    counts = torch.full((num_seqs, 32), count, dtype=torch.int32, device=DEVICE)
    drawn = [draw_lists(num_seqs, 32, length, count) for _ in range(NUM_SETS)]
    calls: dict[str, list[Call]] = {}
    for name, keys in (("padded batch", dense), ("pages of 16", paged)):
        sources = [SelectedKV(keys, lists, counts) for lists in drawn]
        plan = make_plan(q, sources[0])
        calls[name] = [lambda x=x, plan=plan: attend(q, x, plan=plan) for x in sources]
    assert_close(calls["padded batch"][0]().out, calls["pages of 16"][0]().out)
    return measure(f"sparse {num_seqs} x {length}, {count} a head of 256", calls)


def paged_keys(table: torch.Tensor, lens: list[int], size: int = 16) -> PagedKV:
    """Pages of 8 kv heads of 128."""
    num_pages = int(table.max()) + 1
    return PagedKV(
        randn(num_pages, size, 8, 128), randn(num_pages, size, 8, 128), table, ints(lens)
    )


def prefix_table(num_seqs: int, shared: int, own: int) -> torch.Tensor:
    """Rows of `shared` pages that all have, then `own` pages each."""
    common = torch.arange(shared, device=DEVICE).repeat(num_seqs, 1)
    rest = shared + torch.arange(num_seqs * own, device=DEVICE).view(num_seqs, own)
    return torch.cat([common, rest], 1).int()


def cascade(case: str, table: torch.Tensor, length: int) -> list[Row]:
    """A decode step of 32 query heads over 8 kv heads of 128."""
    num_seqs = table.shape[0]
    keys, q = paged_keys(table, [length] * num_seqs), randn(num_seqs, 32, 128)
    plan = make_plan(q, keys)
    calls: dict[str, list[Call]] = {"flat": [lambda: attend(q, keys, plan=plan)] * 3}
    flat = attend(q, keys).out
    for levels in (1, 2, 3):
        made = make_cascade(q, keys, levels=levels)
        assert_close(attend_cascade(q, keys, made).out, flat)
        name = f"cascade of {levels}"
        calls[name] = [lambda made=made: attend_cascade(q, keys, made)] * 3
        if levels == 1:
            other = make_cascade(q, keys, levels=1, impl="triton")
            calls["cascade of 1, Triton alone"] = [
                lambda other=other: attend_cascade(q, keys, other)
            ] * 3
        if levels == 2:
            calls["make_cascade of 2, once a step"] = [lambda: make_cascade(q, keys, levels=2)] * 3
    return measure(case, calls)


def cascades() -> list[Row]:
    """One level, three levels, nothing shared, little shared."""
    found = cascade("64 x (8192 shared + 256)", prefix_table(64, 512, 16), 8448)
    table = prefix_table(64, 512, 16)
    for seq in range(64):  # 4096 of all, 2048 of 16 neighbours, 2048 of 4
        table[seq, 256:384] += (seq // 16 + 1) * 10_000
        table[seq, 384:512] += (seq // 4 + 10) * 10_000
    unique, places = table.unique(return_inverse=True)
    assert len(unique) < 10_000
    found += cascade("64 x (4096 + 2048 + 2048 shared + 256)", places.int(), 8448)
    found += cascade("64 x 2048, nothing shared", prefix_table(64, 0, 128), 2048)
    return found + cascade("8 x (1024 shared + 256)", prefix_table(8, 64, 16), 1280)


def trees() -> list[Row]:
    """64 nodes a sequence at a context of 8192, 8 sequences, against one token a sequence."""
    table = prefix_table(8, 0, 516)
    keys = paged_keys(table, [8192 + 64] * 8)
    parents = ints([[-1, *(node // 2 for node in range(63))]] * 8)
    tree = make_draft_tree(parents, seq_lens=keys.seq_lens)
    q, one = randn(8, 64, 32, 128), randn(8, 32, 128)
    plan, one_plan = make_plan(q, keys, tree_mask=tree.tree_mask), make_plan(one, keys)
    chain = make_plan(q, keys)

    def verify() -> AttentionState:
        return attend(q, keys, tree_mask=tree.tree_mask, plan=plan)

    return measure(
        "8 x 8192, trees of 64 nodes",
        {
            "plain decode, one token": [lambda: attend(one, keys, plan=one_plan)] * 3,
            "tree of 64": [verify] * 3,
            "chain of 64": [lambda: attend(q, keys, plan=chain)] * 3,
            "make_draft_tree, once a step": [
                lambda: make_draft_tree(parents, seq_lens=keys.seq_lens)
            ]
            * 3,
        },
    )


def main() -> None:
    """Measure everything, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [*sparse(1, 32000, 0.02), *sparse(16, 32000, 0.02), *sparse_growth(), *sparse_paged()]
    rows += [*cascades(), *trees()]
    if options.out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        found = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit.stdout.strip(),
            "rows": [row._asdict() for row in rows],
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
