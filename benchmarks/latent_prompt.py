"""Prompts over latent contexts under budgets of memory: time, and what is allocated beside it.

    python benchmarks/latent_prompt.py --out benchmarks/results/latent/h200-prompt.json

A chunk of a prompt meets a context of latent rows, whose keys and values are expanded for groups of
heads and in pieces. Budgets take turns, so that clocks and temperature are the same for all; times
are medians by CUDA events, from one call to the next, as the layers of a step follow each other and
share a layout. Extra memory is the peak beside the inputs and the result. Two heads of some tokens
are checked in float64 before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
from attention_bench.timing import event_us
from rows import header, save_rows

from anabranch import LatentKV, UpProjection, attend_latent_prompt
from anabranch.compositions.prompt_pieces import PromptLayout, make_prompt_layout
from anabranch.compositions.prompt_workspace import MIB
from anabranch.state import AttentionState

NOPE, ROTARY, VALUE, RANK, PAGE = 128, 64, 128, 512, 64
SCALE = (NOPE + ROTARY) ** -0.5
UNLIMITED = 1 << 20  # MiB
BUDGETS = (UNLIMITED, 256, 64)
ROUNDS = 7
LAYERS = 5  # calls after one another, of which the first is not counted
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class PromptCase:
    """New tokens over a latent context, with the heads of a model."""

    model: str
    num_heads: int
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_tokens} over {self.context}"


CASES = [
    PromptCase("V2-Lite", 16, 8192, 32768),
    PromptCase("V2-Lite", 16, 2048, 32768),
    PromptCase("V2-Lite", 16, 2048, 131072),
    PromptCase("V3", 128, 8192, 32768),
    PromptCase("V3", 128, 2048, 32768),
    PromptCase("V3", 128, 8192, 0),
]


class PromptInputs(NamedTuple):
    """The arguments of attend_latent_prompt(), for one sequence."""

    q: torch.Tensor
    rows: torch.Tensor
    keys: LatentKV
    up: UpProjection
    context: int

    def run(self, budget: int, layout: PromptLayout | None = None) -> AttentionState:
        """One call under a budget in MiB."""
        options = {"scale": SCALE, "max_workspace_mib": budget, "layout": layout}
        return attend_latent_prompt(*self[:4], **self.lens(), **options)

    def layout(self, budget: int) -> PromptLayout:
        """How the prompt is cut, which layers share."""
        expanded = self.up.expanded(self.rows.shape[1], PAGE)
        return make_prompt_layout(expanded, **self.lens(), max_workspace_mib=budget)

    def lens(self) -> dict[str, list[int]]:
        return {"q_lens": [len(self.q)], "context_lens": [self.context]}


def make_inputs(case: PromptCase, device: torch.device) -> PromptInputs:
    """Random rows in pages in any order; the new tokens have rows of their own."""

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    num_pages = max(-(-case.context // PAGE), 1)
    table = torch.randperm(num_pages, device=device).int()[None]
    seq_lens = torch.tensor([case.context], dtype=torch.int32, device=device)
    return PromptInputs(
        values(case.num_tokens, case.num_heads, NOPE + ROTARY),
        values(case.num_tokens, RANK + ROTARY),
        LatentKV(values(num_pages, PAGE, RANK + ROTARY), table, seq_lens, RANK),
        UpProjection(values(case.num_heads, NOPE + VALUE, RANK) * RANK**-0.5, NOPE),
        case.context,
    )


def check(inputs: PromptInputs, state: AttentionState) -> None:
    """Refuse to time what is wrong: some tokens and two heads in float64."""
    q, rows, keys, up, context = inputs
    tokens = torch.linspace(0, len(q) - 1, CHECKED_TOKENS).long().to(q.device)
    latent = torch.cat([keys.gather(0)[0][:context, 0], rows]).double()
    late = torch.arange(len(latent), device=q.device) > tokens[:, None] + context
    for head in (0, q.shape[1] - 1):
        k, v = UpProjection(up.weight[head : head + 1].double(), NOPE).expand(latent)
        scores = q[tokens, head].double() @ k[:, 0].T * SCALE
        exact = scores.masked_fill(late, -torch.inf).softmax(-1) @ v[:, 0]
        error = float((state.out[tokens, head].double() - exact).norm() / exact.norm())
        if not error < 0.02:  # keys and values are rounded to bfloat16 as they are expanded
            raise RuntimeError(f"head {head} is wrong: relative error {error:.4f}")


def extra_mib(inputs: PromptInputs, budget: int) -> float:
    """The peak of what one call allocates beside its result."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = inputs.run(budget)
    torch.cuda.synchronize()
    result = sum(x.nbytes for x in state)
    return (torch.cuda.max_memory_allocated() - before - result) / MIB


def measure(case: PromptCase) -> Iterator[dict[str, object]]:
    """A row for each budget."""
    inputs = make_inputs(case, torch.device("cuda"))
    for budget in BUDGETS:
        check(inputs, inputs.run(budget))
    memory = {budget: extra_mib(inputs, budget) for budget in BUDGETS}
    layouts = {budget: inputs.layout(budget) for budget in BUDGETS}
    samples: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    for turn in range(ROUNDS):
        for place in range(len(BUDGETS)):
            budget = BUDGETS[(turn + place) % len(BUDGETS)]
            call = partial(inputs.run, budget, layouts[budget])
            samples[budget].append(mean(event_us([call] * LAYERS)[1:]))
    unlimited = median(samples[UNLIMITED])
    for budget in BUDGETS:
        us = median(samples[budget])
        yield {
            "case": case.name,
            "budget_mib": None if budget == UNLIMITED else budget,
            "ms": round(us / 1000, 3),
            "of_unlimited": round(us / unlimited, 3),
            "extra_mib": round(memory[budget], 1),
            "within": memory[budget] <= budget,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(f"{'':28} {'budget':>9} {'ms':>9} {'time':>6} {'extra MiB':>10}")
    for case in CASES:
        if options.only not in case.name:
            continue
        for row in measure(case):
            rows.append(row)
            over = "" if row["within"] else "  over the budget"
            print(
                f"{row['case']:28} {row['budget_mib'] or 'none':>9} {row['ms']:9} "
                f"{row['of_unlimited']:6} {row['extra_mib']:10}{over}",
                flush=True,
            )
        torch.cuda.empty_cache()
    about = header() | {"timing": "CUDA events, budgets in turn, medians, bfloat16"}
    save_rows(options.out, about, rows)


if __name__ == "__main__":
    main()
