"""Studies of the engine by name: how each is run and printed."""

from __future__ import annotations

from anabranch.llm.bench.benches import Bench
from engine_bench import cpu, scorers, soak, tree_drafts

STUDIES = {
    "scorers": Bench(scorers.run_scorers, scorers.scorers_table),
    "cpu": Bench(cpu.run_cpu, cpu.cpu_table),
    "drafts": Bench(tree_drafts.run_tree, tree_drafts.tree_table),
    "soak": Bench(soak.run_soak, soak.soak_table),
}
