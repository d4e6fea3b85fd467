"""Predicted step times on several GPUs, from measured times on one: the tables of docs/scale.md.

python benchmarks/scale_plan.py            # print the tables
python benchmarks/scale_plan.py --write    # put them into docs/scale.md
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs/scale.md"
LATENCY = ROOT / "benchmarks/results/engine/h200-latency.json"
DECODE = ROOT / "benchmarks/results/h200-decode.json"
DECODE = ROOT / "benchmarks/results/h200-decode.json"
LINK_GB_S = 450.0  # NVLink 4 of an H200 SXM, each direction: its data sheet, not measured here
COLLECTIVE_US = 8.0  # assumed start of a small collective inside a CUDA graph, not measured here
GPU_GB = 141.0  # memory of an H200, its data sheet
USABLE = 0.9  # of it, for weights and cache
NUM_GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Shape:
    """A dense decoder in bfloat16."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def weight_bytes(self) -> int:
        """Weights that a decode step reads: every matrix but the embedding of inputs."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.intermediate) + self.head())

    def head(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.hidden * self.vocab

    def stored_bytes(self) -> int:
        """All weights, the embedding of inputs too."""
        return self.weight_bytes() + 2 * self.head()

    def key_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SMALL = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256)
LARGE = Shape("70B", 8192, 28672, 80, 64, 8, 128, 128256)


@dataclass(frozen=True)
class Wire:
    """What a rank receives in a layer, and in how many collectives."""

    num_bytes: float  # a token
    collectives: int

    def seconds(self, tokens: int) -> float:
        """Time on the link for one layer of a step of so many tokens."""
        return self.collectives * COLLECTIVE_US * 1e-6 + tokens * self.num_bytes / (LINK_GB_S * 1e9)


def tensor_parallel(shape: Shape, n: int) -> Wire:
    """Two sums of the hidden state."""
    return Wire(2 * 2 * (n - 1) / n * shape.hidden * 2, 2 if n > 1 else 0)


def context_parallel(shape: Shape, n: int) -> Wire:
    """One merge of the states of all heads, `merge_across(heads="all")`."""
    row = shape.head_dim * 2 + 4
    collectives = {1: 0, 2: 1}.get(n, 2)
    return Wire(2 * (n - 1) / n * shape.heads * row, collectives)


def context_in_tensor_parallel(shape: Shape, n: int) -> Wire:
    """Queries of all heads gathered, states scattered, besides what tensor parallel moves."""
    others, row = (n - 1) / n, shape.head_dim * 2
    extra = others * shape.heads * (row + row + 4)
    sums = tensor_parallel(shape, n)
    return Wire(sums.num_bytes + extra, sums.collectives + (2 if n > 1 else 0))


def pipeline_bytes(shape: Shape) -> int:
    """The hidden state and the residual of a token, at each cut between stages."""
    return 2 * 2 * shape.hidden


def measured() -> tuple[dict[tuple[int, int], float], float, str]:
    """Seconds of a decode step by (sequences, keys), the read ceiling in bytes/s, and a commit."""
    results = json.loads(LATENCY.read_text())
    steps: dict[tuple[int, int], float] = {}
    for row in results["rows"]:
        seqs, prompt, out = map(int, re.findall(r"\d+", row["case"]))
        steps[seqs, prompt + out // 2] = row["ms_a_step"] * 1e-3
    ceilings: dict[str, float] = json.loads(DECODE.read_text())["header"]["ceilings"]
    return steps, ceilings["read_gb_s"] * 1e9, results["header"]["commit"]


def step_floor(shape: Shape, seqs: int, keys: int, read: float) -> tuple[float, float]:
    """Seconds to read the weights and the keys once, at the measured ceiling."""
    return shape.weight_bytes() / read, seqs * keys * shape.key_bytes() / read


def rest_of_step(seqs: int, keys: int) -> float:
    """Seconds a layer beyond the floor, measured with the 8B shape on one GPU."""
    steps, read, _ = measured()
    return (steps[seqs, keys] - sum(step_floor(SMALL, seqs, keys, read))) / SMALL.layers


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bytes_table() -> str:
    """Bytes that a rank receives for one token in one layer."""
    rows: list[list[str]] = []
    for shape in (SMALL, LARGE):
        for name, cut in (
            ("TP", tensor_parallel),
            ("CP, all heads", context_parallel),
            ("CP inside TP", context_in_tensor_parallel),
        ):
            wires = [cut(shape, n) for n in NUM_GPUS[1:]]
            said = [f"{wire.num_bytes:,.0f} in {wire.collectives}" for wire in wires]
            rows.append([f"{shape.name}, {name}", *said])
        rows.append([f"{shape.name}, PP, at a cut", *[f"{pipeline_bytes(shape):,} in 1"] * 3])
    return table(["bytes a token and layer", *(f"{n} GPUs" for n in NUM_GPUS[1:])], rows)


def tensor_rows(shape: Shape) -> list[list[str]]:
    """Decode steps under tensor parallel: weights and kv heads are cut, the rest is not."""
    steps, read, _ = measured()
    rows: list[list[str]] = []
    for seqs, keys in steps:
        cells = [f"{shape.name}, {seqs} x {keys}"]
        rest = rest_of_step(seqs, keys) * shape.layers
        for n in NUM_GPUS:
            if cache_room(shape, n, cut_weights=True) < seqs * keys:
                cells.append("does not fit")
                continue
            floor = sum(step_floor(shape, seqs, keys, read)) / n
            wire = shape.layers * tensor_parallel(shape, n).seconds(seqs)
            slow, quick = ((floor + wire + other) * 1e3 for other in (rest, rest / n))
            cells.append(f"{quick:.2f}" if n == 1 else f"{quick:.2f} to {slow:.2f}")
        rows.append(cells)
    return rows


def context_rows(shape: Shape) -> list[list[str]]:
    """One long sequence under context parallel: keys are cut, weights are on every GPU."""
    steps, read, _ = measured()
    rest = rest_of_step(*next(case for case in steps if case[0] == 1)) * shape.layers
    rows: list[list[str]] = []
    for keys in (131072, 1048576, 4194304):
        cells = [f"{shape.name}, 1 x {keys}"]
        for n in NUM_GPUS:
            if cache_room(shape, n, cut_weights=False) < keys:
                cells.append("does not fit")
                continue
            weights, cache = step_floor(shape, 1, keys, read)
            wire = shape.layers * context_parallel(shape, n).seconds(1)
            cells.append(f"{(weights + rest + cache / attention_share() / n + wire) * 1e3:.2f}")
        rows.append(cells)
    return rows


def attention_share() -> float:
    """The part of the read ceiling that attention over one long sequence reaches."""
    rows = json.loads(DECODE.read_text())["rows"]
    case = {"case": "B1 L131072 H32/8 D128", "implementation": "anabranch"}
    row = next(row for row in rows if case.items() <= row.items())
    return row["percent_of_ceiling"] / 100


def cache_room(shape: Shape, n: int, *, cut_weights: bool) -> float:
    """Positions that fit into the memory that weights leave, over all GPUs."""
    weights = shape.stored_bytes() * (1 if cut_weights else n)
    return max(n * GPU_GB * 1e9 * USABLE - weights, 0) / shape.key_bytes()


def room_table() -> str:
    rows: list[list[str]] = []
    for shape in (SMALL, LARGE):
        for name, cut in (("weights cut (TP, PP)", True), ("weights on each GPU (CP)", False)):
            room = [cache_room(shape, n, cut_weights=cut) for n in NUM_GPUS]
            said = [f"{keys / 1e6:.2f} M" if keys else "none" for keys in room]
            rows.append([f"{shape.name}, {name}", *said])
    return table(["keys that fit", "1 GPU", *(f"{n} GPUs" for n in NUM_GPUS[1:])], rows)


def tables() -> dict[str, str]:
    """Every table of the document by its name."""
    gpus = ["1 GPU", *(f"{n} GPUs" for n in NUM_GPUS[1:])]
    return {
        "bytes": bytes_table(),
        "tensor": table(["ms a step, TP", *gpus], tensor_rows(SMALL) + tensor_rows(LARGE)),
        "context": table(["ms a step, CP", *gpus], context_rows(SMALL)),
        "room": room_table(),
        "source": f"Measured on one H200 at commit {measured()[2]}.",
    }


def main() -> None:
    """Print the tables, or write them into the document."""
    text = DOC.read_text()
    for name, content in tables().items():
        if "--write" not in sys.argv:
            print(content, end="\n\n")
        mark = rf"(<!-- scale:{name} -->\n).*?(<!-- /scale -->)"
        text = re.sub(mark, lambda m, c=content: m[1] + c + "\n" + m[2], text, flags=re.DOTALL)
    if "--write" in sys.argv:
        DOC.write_text(text)


if __name__ == "__main__":
    main()
