"""Benchmarks of the engine: what they report, and in which words; never how fast it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from engine_bench import tree_drafts
from engine_bench.cpu import bars_of, cpu_table, run_cpu
from engine_bench.scorers import run_scorers, scorers_table
from engine_bench.source_options import CpuOptions, ScorersOptions, TreeOptions
from engine_bench.tree_drafts import run_tree, tree_table
from source_commands import ENGINE
from tiny_models import source
from typer.testing import CliRunner

from anabranch.llm.bench.bench_options import LatencyOptions, SweepOptions, ThroughputOptions
from anabranch.llm.bench.commands import OPTIONS
from anabranch.llm.bench.latency import latency_text, run_latency, summarise_latencies
from anabranch.llm.bench.run_results import Header, RunResults
from anabranch.llm.bench.sweep import run_sweep, sweep_table
from anabranch.llm.bench.throughput import run_throughput, throughput_row, throughput_text
from anabranch.llm.bench.transformers_peer import TransformersPeer
from anabranch.llm.bench.workload import random_prompts, random_workload
from anabranch.llm.cli.command_group import app
from anabranch.llm.cli.step_times import RecordedStats, StepTimes, place_stages
from anabranch.llm.engine.request import CompletionOutput


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Options of a tiny model."""
    return {"model": source(vocab_size=300, max_position_embeddings=128), "device": "cpu"}


def silent(what: str, done: int, of: int) -> None:
    assert what and done <= max(of, done)


def results_of(rows: list[dict[str, Any]], **options: Any) -> RunResults:
    header = Header("x", "2026", "abc1234", "CPU", "", {})
    return RunResults(header, {"model": "tiny"} | options, rows)


def test_percentiles_are_interpolated() -> None:
    summary = summarise_latencies([float(value) for value in range(101)][::-1])
    assert summary["avg_latency"] == 50
    assert summary["percentiles"] == {
        "10": 10.0, "25": 25.0, "50": 50.0, "75": 75.0, "90": 90.0, "99": 99.0
    }  # fmt: skip
    assert summarise_latencies([1.0, 2.0])["percentiles"]["25"] == 1.25


def latency_row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "setting": "plain",
        "case": "1 x 8 in, 4 out",
        "latencies": [0.5, 1.5],
        **summarise_latencies([0.5, 1.5]),
        "prefill_ms": 12.0,
        "ms_an_output_token": 3.5,
        "ms_a_step": 3.0,
        "acceptance_rate": None,
        "tokens_a_verification": None,
        "stages": {"model": {"steps": 2, "mean_ms": 1.0, "median_ms": 1.25}},
    }
    return row | changes


def test_latency_lines() -> None:
    lines = latency_text(results_of([latency_row()])).splitlines()
    assert lines[:3] == [
        "Avg latency: 1 seconds",
        "10% percentile latency: 0.6 seconds",
        "25% percentile latency: 0.75 seconds",
    ]
    assert lines[6] == "99% percentile latency: 1.49 seconds"
    assert "Output token: 3.500 ms" in lines
    assert lines[-1] == "CPU, abc1234"


def test_latency_is_printed_with_four_digits() -> None:
    row = latency_row(avg_latency=0.12345678901234567, percentiles={"99": 12.345678901234567})
    text = latency_text(results_of([row]))
    assert "Avg latency: 0.1235 seconds\n99% percentile latency: 12.35 seconds\n" in text


def test_several_cases_run_by_one_engine() -> None:
    options = LatencyOptions(cases="2x16x4,3x8x5")
    sizes = [(each.batch, each.input_len, each.output_len) for each in options.each_case()]
    assert sizes == [(2, 16, 4), (3, 8, 5)]
    with pytest.raises(ValueError, match="--cases must be like"):
        LatencyOptions(cases="2x16")


def test_settings_name_the_width_of_trees() -> None:
    options = LatencyOptions(speculative="ngram", tree_width=3)
    assert options.setting() == "ngram k=4, multi-query, trees of width 3"


def test_latency_compares_with_the_first_setting() -> None:
    slow = latency_row(setting="no graphs", avg_latency=2.0)
    text = latency_text(results_of([latency_row(), slow]))
    assert "no graphs is 0.50x as fast as plain" in text


def test_throughput_line() -> None:
    work = random_workload(4, 10, 5, 100)
    row = throughput_row("anabranch", work, 2.0)
    lines = throughput_text(results_of([row])).splitlines()
    assert lines[0] == "Throughput: 2.00 requests/s, 30.00 total tokens/s, 10.00 output tokens/s"
    failed = {"name": "transformers generate_batch (sdpa)", "error": "RuntimeError: no"}
    other = throughput_row("transformers generate (sdpa)", work, 4.0)
    text = throughput_text(results_of([row, other, failed]))
    assert "10.00 output tokens/s\ntransformers generate (sdpa):\n" in text
    assert "anabranch is 2.00x as fast" in text
    assert "failed: RuntimeError: no" in text


def test_prompts_are_reproducible_and_within_range() -> None:
    work = random_workload(50, 20, 10, 300, range_ratio=0.5, seed=3)
    assert work == random_workload(50, 20, 10, 300, range_ratio=0.5, seed=3)
    assert {len(prompt) for prompt in work.prompts} <= set(range(10, 31))
    assert set(work.output_lens) <= set(range(5, 16)) and len(set(work.output_lens)) > 3
    assert all(10 <= token < 300 for prompt in work.prompts for token in prompt)
    assert len({tuple(prompt) for prompt in random_prompts(8, 16, 300)}) == 8


def test_stages_are_placed_one_after_another() -> None:
    steps = [
        StepTimes(1.010, {"model": 8.0, "sampling": 2.0}),
        StepTimes(1.013, {"scoring": 5.0}),  # landed early: it waits for the step before
        StepTimes(1.030, {"model": 5.0}),  # the host was late: a gap
    ]
    placed = [(stage, round(start, 6), length) for stage, start, length in place_stages(steps)]
    assert placed == [
        ("model", 0.0, 8.0), ("sampling", 8.0, 2.0), ("scoring", 10.0, 5.0), ("model", 25.0, 5.0)
    ]  # fmt: skip
    assert place_stages([]) == []


def test_recorded_steps_add_up() -> None:
    stats = RecordedStats()
    for taken in (1.0, 2.0, 6.0):
        stats.add_times({"model": taken})
    stats.add_times({"scoring": 4.0})
    assert stats.stage_ms == {"model": 9.0, "scoring": 4.0}
    assert stats.stage_summary()["model"] == {"steps": 3, "mean_ms": 3.0, "median_ms": 2.0}
    assert list(stats.stage_summary()) == ["model", "scoring"]


def test_latency_of_a_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    options = LatencyOptions(
        **tiny,
        input_len=8,
        output_len=6,
        batch=2,
        iterations=2,
        warmup=0,
        speculative="ngram",
        compare="speculative",
        profile=tmp_path / "profile",
    )
    results = run_latency(options, silent)
    plain, drafted = results.rows
    assert (plain["setting"], drafted["setting"]) == ("plain", "ngram k=4, multi-query")
    for row in results.rows:
        assert len(row["latencies"]) == 2 and row["prefill_ms"] > 0
        assert row["ms_an_output_token"] > 0
    assert plain["stages"]["model"]["steps"] == 2 * 6  # every step of both runs emits a token each
    assert plain["ms_a_step"] > 0
    for folder in ("plain", "ngram-k=4-multi-query"):
        trace = json.loads((tmp_path / "profile" / folder / "trace.json").read_text())
        assert trace["traceEvents"]


def test_throughput_beside_transformers(tiny: dict[str, Any]) -> None:
    options = ThroughputOptions(
        **tiny, num_prompts=3, input_len=8, output_len=4, range_ratio=0.5, peer="transformers"
    )
    ours, theirs = run_throughput(options, silent).rows
    assert (ours["name"], theirs["name"]) == ("anabranch", "transformers generate (sdpa)")
    assert ours["num_output_tokens"] == theirs["num_output_tokens"] > 0
    assert ours["total_tokens_s"] > ours["output_tokens_s"] > 0


def test_the_peer_is_given_the_same_model(tiny: dict[str, Any]) -> None:
    from anabranch import LLM, SamplingParams

    options = ThroughputOptions(**tiny)
    prompts = random_workload(3, 9, 1, 300, range_ratio=0.4).prompts
    peer = TransformersPeer(options, "eager", silent)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    ours = LLM(options.model, device="cpu").generate(prompts, params)
    assert peer.generate(prompts, 6) == [each.outputs[0].token_ids for each in ours]


def test_sweep(tiny: dict[str, Any], tmp_path: Path) -> None:
    impls = "anabranch,transformers-sdpa,transformers-anabranch"
    options = SweepOptions(
        **tiny, contexts="16,8,128", generate=3, repeats=2, impls=impls, out=tmp_path / "o.json"
    )
    results = run_sweep(options, silent)
    table = sweep_table(results)
    first, *others = impls.split(",")
    ratios = [f"{first} / {other}" for other in others]
    assert table.columns == ["test", first, *others, *ratios]
    assert [line[0] for line in table.lines] == [
        "pp8", "pp16", "pp128", "tg3@pp8", "tg3@pp16", "tg3@pp128"
    ]  # fmt: skip
    timed = [line for line in table.lines if "128" not in line[0]]
    assert all("±" in cell for line in timed for cell in line[1:4])
    assert all(cell.endswith("x") for line in timed for cell in line[4:])
    assert table.lines[2][1:] == ["-"] * 5 and "context has 128" in table.notes[0]
    saved = json.loads((tmp_path / "o.json").read_text())
    assert saved["header"]["bench"] == "sweep" and "transformers" in saved["header"]["versions"]
    assert saved["rows"] == results.rows


def test_sweep_over_caches_and_its_plot(tiny: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.svg"
    command = ["bench", "sweep", "--model", tiny["model"], "--device", "cpu", "--plot", str(plot),
               "--impls", "anabranch,transformers-eager", "--kv-cache-dtype", "auto,int8/fp8",
               "--contexts", "8,20", "--generate", "2", "--repeats", "1"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for shown in ("anabranch auto", "anabranch int8/fp8", "transformers-eager", "tg2@pp20"):
        assert shown in done.output
    drawn = plot.read_text()
    assert drawn.count('<g id="axes_') == 2 and "<!-- anabranch int8/fp8 -->" in drawn


def test_a_sweep_names_what_fails(tiny: dict[str, Any]) -> None:
    options = SweepOptions(
        **tiny, contexts="8", repeats=1, impls="anabranch", kv_cache_dtype="q8_0"
    )
    with pytest.raises(ValueError, match="blocks of 32, got head_dim with 16 columns"):
        run_sweep(options, silent)
    rows = [
        {"implementation": "a", "test": "pp8", "context": 8, "tokens_s": 6.0, "spread": 0.5},
        {"implementation": "b", "test": "pp8", "context": 8, "error": "OutOfMemoryError: no"},
        {"implementation": "c", "test": "pp8", "context": 8, "tokens_s": 4.0, "spread": 0.0},
    ]
    table = sweep_table(results_of(rows))
    assert table.lines == [["pp8", "6 ± 0.5", "-", "4 ± 0", "-", "1.50x"]]
    assert table.notes == ["b pp8: OutOfMemoryError: no"]


def test_scorers(tiny: dict[str, Any]) -> None:
    options = ScorersOptions(**tiny, batch=2, context=20, num_drafts=3, repeats=2)
    results = run_scorers(options, silent)
    assert [row["name"] for row in results.rows] == [
        "plain decode step", "multi-query", "batch-expansion"
    ]  # fmt: skip
    assert [row["tokens_a_sequence"] for row in results.rows] == [1, 4, 4]
    assert all(row["ms"] > 0 for row in results.rows)
    table = scorers_table(results)
    assert table.lines[0][-1] == "1.00x" and "multi-query is" in table.notes[0]


def test_cpu_bench_of_a_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    from server_models import talking_model

    (tmp_path / "text.txt").write_text("a b c d e f")
    options = CpuOptions(
        model=talking_model(), output_len=3, prompts=2, repeats=2, file=tmp_path / "text.txt"
    )
    rows = run_cpu(options, silent).rows
    rates = [row for row in rows if "tokens_s" in row]
    assert len(rates) == 8 and all(row["tokens_s"] > 0 for row in rates)
    assert all(len(row["samples"]) == 2 for row in rates)
    assert len(rows) == 8 + 4 and all(row["ratio"] > 0 for row in rows[8:])


def test_cpu_ratios_have_bars_and_missed_ones_a_mark() -> None:
    rates = {
        "transformers generate": 10.0, "anabranch": 15.0, "summarise, no drafts": 10.0,
        "summarise, n-gram": 14.0, "one by one": 10.0, "batched": 40.0,
        "summarise, no drafts, after the prompt": 10.0,
        "summarise, n-gram, after the prompt": 25.0,
    }  # fmt: skip
    rows = [{"name": name, "tokens_s": rate} for name, rate in rates.items()]
    table = cpu_table(results_of([*rows, *bars_of(rates)], dtype="float32"))
    assert [line[1:] for line in table.lines[-4:]] == [
        ["1.50x", ">= 1.2x"], ["1.40x", ">= 1.5x  MISSED"], ["2.50x", ">= 1.5x"],
        ["4.00x", ">= 4x"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bench", "changes", "named"),
    [
        ("latency", {"batch": 0}, "--batch"),
        ("latency", {"compare": "colour"}, "'colour'"),
        ("latency", {"speculative": "draft"}, "--draft-model"),
        ("latency", {"draft_model": "x"}, "--draft-model"),
        ("throughput", {"range_ratio": 1.0}, "--range-ratio"),
        ("throughput", {"peer": "abacus"}, "'abacus'"),
        ("sweep", {"contexts": "512,many"}, "512,many"),
        ("sweep", {"impls": "abacus"}, "'abacus'"),
        ("scorers", {"scorer": "guess"}, "'guess'"),
        ("drafts", {"tree_width": 0}, "--tree-width"),
    ],
)
def test_bad_options_are_named(bench: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        {**OPTIONS, **ENGINE}[bench](**changes)


def test_errors_are_one_line() -> None:
    options = ["bench", "latency", "--model", "dummy:nothing", "--device", "cpu"]
    done = CliRunner().invoke(app, options)
    error = done.stderr.strip().splitlines()[-1]
    assert done.exit_code == 2 and error.startswith("error: ") and "dummy:nothing" in error


def test_trees_and_chains_answer_the_same_tasks(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompts and seeds for both, and a line for each number of drafts."""
    from server_models import talking_model

    (tmp_path / "tasks.txt").write_text("Repeat.\nAgain.")
    monkeypatch.setattr(tree_drafts, "TEXTS", tmp_path)
    (tmp_path / "text.txt").write_text("a b c d e f")
    sizes: Any = {"sizes": "2,5", "seeds": 2, "output_len": 8}
    options = TreeOptions(model=talking_model(), device="cpu", file=tmp_path / "text.txt", **sizes)
    results = run_tree(options, silent)
    shapes = [(row["drafts"], row["width"]) for row in results.rows]
    assert shapes == [(2, 1), (2, 4), (5, 1), (5, 4)]
    assert all(len(row["samples"]) == 4 and min(row["samples"]) >= 1 for row in results.rows)
    assert [line[0] for line in tree_table(results).lines] == ["2", "5"]


def test_gains_of_trees_are_of_the_same_answers() -> None:
    rows = [
        {"drafts": 8, "width": 1, "samples": [1.0, 2.0, 4.0]},
        {"drafts": 8, "width": 4, "samples": [2.0, 1.0, 4.0]},
    ]
    (line,) = tree_table(results_of(rows)).lines
    assert line == ["8", "2.33 ± 1.53", "2.33 ± 1.53", "1.167 ± 0.764", "1 more, 1 fewer"]
    output = CompletionOutput(
        0, "", [5] * 7, origins=[0, 1, 2, 2, 0, 1, 0], steps=[0, 1, 1, 2, 3, 4, 4]
    )
    assert output.verifications == [2, 1, 2], "steps 0 and 3 had no drafts"
