"""Which plots there are, and the points of their lines; figure_plots.py draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attention_bench.case_results import Results, Row

TIME = ("us", "microseconds")
READ = ("percent_of_ceiling", "% of read ceiling")


@dataclass(frozen=True, slots=True)
class Figure:
    """A field of the case along x, a panel for each field of the rows, a line an implementation."""

    name: str
    title: str
    bench: str
    group: str
    x: str
    x_label: str
    panels: tuple[tuple[str, str], ...]
    fixed: dict[str, Any] = field(default_factory=dict[str, Any])

    def shows(self, row: Row) -> bool:
        """Whether the row is a point of this figure."""
        fixed = all(row.shape.get(name) == value for name, value in self.fixed.items())
        return row.us is not None and self.group in row.shape["groups"] and fixed

    def lines(self, results: Results) -> dict[str, list[Row]]:
        """The points of each implementation, from left to right."""
        lines: dict[str, list[Row]] = {}
        for row in sorted(filter(self.shows, results.rows), key=lambda row: row.shape[self.x]):
            lines.setdefault(row.implementation, []).append(row)
        return lines


FIGURES = (
    Figure(
        "merge-tokens",
        "Merge of two states, 32 heads of 128, float16",
        *("merge", "grid", "num_tokens", "tokens"),
        panels=(("rate", "GB/s"), READ),
        fixed={"num_heads": 32, "dtype": "float16"},
    ),
    Figure(
        "decode-context-1",
        "Decode, 1 sequence, 32/8 heads of 128, page 16, bfloat16",
        *("decode", "context", "seq_len", "context, keys"),
        panels=(TIME, READ),
        fixed={"num_seqs": 1},
    ),
    Figure(
        "decode-context-8",
        "Decode, 8 sequences, 32/8 heads of 128, page 16, bfloat16",
        *("decode", "context", "seq_len", "context, keys"),
        panels=(TIME, READ),
        fixed={"num_seqs": 8},
    ),
    Figure(
        "decode-batch",
        "Decode, 4096 keys each, 32/8 heads of 128, page 16, bfloat16",
        *("decode", "batch", "num_seqs", "sequences"),
        panels=(TIME, READ),
    ),
    Figure(
        "decode-pages",
        "Decode, 8 sequences of 8192 keys, 32/8 heads of 128, bfloat16",
        *("decode", "pages", "page_size", "keys in a page"),
        panels=(TIME, READ),
    ),
    Figure(
        "verify-queries",
        "Verify, 8 sequences of 8192 keys, 32/8 heads of 128, page 16, bfloat16",
        *("verify", "queries", "q_len", "queries of a sequence"),
        panels=(TIME, READ),
        fixed={"num_seqs": 8},
    ),
    Figure(
        "sparse-context",
        "Lists of 640 keys, 1 sequence, 32/8 heads of 128, bfloat16",
        *("sparse", "context", "seq_len", "context, keys"),
        panels=(TIME,),
    ),
    Figure(
        "sparse-kept",
        "Lists of 32768 keys, 1 sequence, 32/8 heads of 128, bfloat16",
        *("sparse", "kept", "kept", "keys of a list"),
        panels=(TIME,),
    ),
    Figure(
        "cascade-shared",
        "Decode, 64 sequences with a common prefix and 256 keys of their own, bfloat16",
        *("cascade", "shared", "shared", "keys of the prefix"),
        panels=(TIME,),
    ),
    Figure(
        "cascade-batch",
        "Decode, a common prefix of 8192 keys and 256 of their own, bfloat16",
        *("cascade", "batch", "num_seqs", "sequences"),
        panels=(TIME,),
    ),
    Figure(
        "tree-nodes",
        "Trees after 8192 keys, 8 sequences, 32/8 heads of 128, bfloat16",
        *("tree", "nodes", "nodes", "nodes of a tree"),
        panels=(TIME,),
    ),
    Figure(
        "prefill-context",
        "Causal prefill, 1 sequence, 32/8 heads of 128, bfloat16",
        *("prefill", "context", "seq_len", "prompt, tokens"),
        panels=(("rate", "TFLOP/s"), ("percent_of_ceiling", "% of matmul ceiling")),
    ),
)


def figures_of(results: Results) -> list[Figure]:
    """The figures that have a line to draw: one through two points or more."""
    return [
        figure
        for figure in FIGURES
        if figure.bench == results.header.bench
        and any(len(points) > 1 for points in figure.lines(results).values())
    ]
