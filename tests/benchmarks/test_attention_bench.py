"""The benchmark runner: cases, the check before the clock, results, README, command line."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import document
import pytest
import torch
from attention_bench import case_runner as runner
from attention_bench.case_results import Results, Row, blank_row, with_ratios
from attention_bench.case_table import make_table
from attention_bench.cases import BENCHES, AttendCase, Case, MergeCase, unite
from attention_bench.ceilings import Ceilings
from attention_bench.exact import CallResult, expected_of
from attention_bench.grids import COMPOSITIONS, MODELS, cases_of, decode_cases, merge_cases
from attention_bench.implementations import Implementation, Prepared, UnavailableError
from attention_bench.inputs import AttendInputs, MergeInputs, make_inputs
from attention_bench.timing import Timing
from figures import FIGURES
from headlines import headline_section
from source_commands import ATTENTION, ENGINE
from typer.testing import CliRunner

from anabranch import reference
from anabranch.llm.bench.commands import IN_SOURCE_TREE, make_app
from anabranch.llm.bench.run_results import Header
from anabranch.llm.bench.table import print_table
from anabranch.llm.cli.command_group import app
from anabranch.state import AttentionState, merge_stacked

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CEILINGS = Ceilings(4000.0, 700.0)
SMALL = AttendCase(
    "verify", 2, 70, q_len=3, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=8, window=20
)


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_bench.inputs.CPU_CACHE", 1 << 16)


@pytest.mark.parametrize("bench", BENCHES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_are_well_formed(bench: str, device: str) -> None:
    cases = cases_of(bench, device)
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.bench == bench and case.groups and case.work > 0 and case.working_set > 0
        if isinstance(case, AttendCase):
            assert case.num_heads % case.num_kv_heads == 0
            assert 1 <= case.q_len <= case.seq_len


def test_merge_grid_is_whole() -> None:
    assert len([case for case in merge_cases() if "grid" in case.groups]) == 7 * 3 * 3
    cached = cases_of("merge", "cuda", pattern="cached")
    assert len(cached) == len({case.name.removesuffix(" warm") for case in cached}) * 2 == 12
    assert {len(make_inputs(case, CPU).pairs) for case in cached if case.warm} == {1}
    assert MergeCase(16384, 32).work == 3 * 16384 * 32 * (128 * 2 + 4)


def test_work_of_attention() -> None:
    prefill = AttendCase("prefill", 1, 8192, 8192)
    assert prefill.work == 4 * 8192 * 8192 * 128 * 32 // 2
    unequal = AttendCase("prefill", 1, 8192, 8192, 16, 16, head_dim=192)
    assert unequal.work == 2 * 8192 * 8192 * (192 + 128) * 16 // 2
    assert AttendCase("decode", 64, 4096).work == 64 * 4096 * 8 * 256 * 2
    assert AttendCase("decode", 1, 8192, window=1024).work == 1024 * 8 * 256 * 2


def test_filters_and_quick() -> None:
    assert {case.num_kv_heads for case in cases_of("decode", "cuda", pattern="smollm2")} == {3}
    assert [case.name for case in cases_of("decode", "cuda", pattern="page 64")] == [
        "B8 L8192 H32/8 D128 page 64"
    ]
    assert len(cases_of("merge", "cuda", quick=True)) == 3


def test_equal_shapes_are_one_case() -> None:
    a, b = (AttendCase("decode", 1, 8192, groups=(group,)) for group in ("table", "context"))
    assert unite([a, b]) == [dataclasses.replace(a, groups=("table", "context"))]
    shown = {model for case in decode_cases() for model in case.models}
    assert shown == set(MODELS)


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_layout_holds_the_same_keys(page_size: int) -> None:
    inputs = make_inputs(dataclasses.replace(SMALL, page_size=page_size), CPU)
    assert isinstance(inputs, AttendInputs)
    assert len(inputs.queries) > 1
    for dense, ragged, paged in zip(inputs.dense, inputs.ragged, inputs.paged, strict=True):
        for seq in range(SMALL.num_seqs):
            k, v = dense.gather(seq)
            for keys in (ragged, paged):
                torch.testing.assert_close((k, v), keys.gather(seq))


@pytest.mark.parametrize("window", [None, 20])
def test_exact_attention_is_the_reference(window: int | None) -> None:
    inputs = make_inputs(dataclasses.replace(SMALL, window=window), CPU)
    assert isinstance(inputs, AttendInputs)
    expected = expected_of(inputs)
    state = reference.attend(
        inputs.queries[0], inputs.paged[0], cu_seqlens_q=inputs.cu_seqlens_q, window=window
    )
    torch.testing.assert_close(expected.state.out, state.out[expected.tokens])
    torch.testing.assert_close(expected.state.lse, state.lse[expected.tokens])


def test_long_prefills_are_checked_on_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_bench.exact.MAX_ROWS", 7)
    inputs = make_inputs(AttendCase("prefill", 2, 40, 40, 4, 2, 16, 16), CPU)
    tokens = expected_of(inputs).tokens.tolist()
    assert tokens[0] == 0 and tokens[6] == 39 and tokens[7] == 40 and tokens[-1] == 79


def _merge_with(
    change: AttentionState, calls: list[str], name: str, inputs: MergeInputs
) -> Prepared:
    def call(a: AttentionState, b: AttentionState) -> AttentionState:
        calls.append(name)
        merged = merge_stacked(
            AttentionState(torch.stack([a.out, b.out]), torch.stack([a.lse, b.lse]))
        )
        return AttentionState(merged.out + change.out, merged.lse + change.lse)

    return Prepared(
        [partial(call, a, b) for a, b in inputs.pairs], lambda s: CallResult(s.out, s.lse)
    )


def _missing(inputs: MergeInputs) -> Prepared:
    raise UnavailableError("not here")


def _broken(inputs: MergeInputs) -> Prepared:
    raise RuntimeError("first line\nsecond line")


def _change(out: float, lse: float) -> AttentionState:
    return AttentionState(torch.tensor(out), torch.tensor(lse))


def test_what_is_wrong_is_never_timed() -> None:
    calls: list[str] = []
    implementations = [
        Implementation(name, "ours", partial(_merge_with, change, calls, name))
        for name, change in {
            "right": _change(0.0, 0.0),
            "wrong out": _change(1e-2, 0.0),
            "wrong lse": _change(0.0, 1e-2),
            "not a number": _change(float("nan"), 0.0),
        }.items()
    ]
    implementations += [
        Implementation("missing", "peer", _missing),
        Implementation("broken", "peer", _broken),
    ]
    case = MergeCase(8, 2, 16, "float32")
    steps: list[str] = []
    rows = runner.run_case(case, implementations, CPU, CEILINGS, steps.append)
    by_name = {row.implementation: row for row in rows}
    assert len(steps) == len(rows) == 6
    right = by_name.pop("right")
    assert right.status == "ok" and right.us and right.rate and right.percent_of_ceiling
    assert all(row.us is None and row.rate is None for row in by_name.values())
    assert {row.status for row in rows if "wrong" in row.implementation} == {"wrong"}
    assert by_name["not a number"].status == "wrong"
    assert calls.count("wrong out") == calls.count("wrong lse") == calls.count("not a number") == 1
    assert (by_name["missing"].status, by_name["missing"].note) == ("unavailable", "not here")
    assert by_name["broken"].note == "RuntimeError: first line"


def test_a_wrong_replay_drops_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    case = MergeCase(8, 2, 16, "float32")
    wrong = AttentionState(torch.zeros(8, 2, 16), torch.zeros(8, 2))
    monkeypatch.setattr(runner, "make_inputs", lambda case, device: make_inputs(case, CPU))
    monkeypatch.setattr(runner, "time_graph", lambda calls, device: (Timing(1.0, 0.0), wrong))
    right = Implementation("right", "ours", partial(_merge_with, _change(0.0, 0.0), [], "right"))
    (row,) = runner.run_case(case, [right], gpu, CEILINGS, lambda step: None)
    assert row.status == "wrong" and row.us is None and "CUDA graph" in row.note


def _row(name: str, role: Any, us: float | None, case: Case) -> Row:
    row = blank_row(case, Implementation(name, role, _missing), "ok" if us else "wrong")
    return dataclasses.replace(row, us=us, eager_us=us, rate=us, percent_of_ceiling=50.0)


def test_ratios_are_to_the_best_peer() -> None:
    case = MergeCase(256, 32)
    rows = with_ratios(
        [_row("cuda", "ours", 2.0, case), _row("torch", "ours", 9.0, case),
         _row("slow", "peer", 6.0, case), _row("fast", "peer", 4.0, case),
         _row("other layout", "context", 1.0, case), _row("bad", "peer", None, case)]
    )  # fmt: skip
    assert [row.ratio for row in rows] == [2.0, 4 / 9, 4 / 6, 1.0, 4.0, None]
    alone = with_ratios([_row("cuda", "ours", 2.0, case), _row("torch", "ours", 9.0, case)])
    assert (alone[0].ratio, alone[0].best_peer) == (4.5, "torch")


def _results(bench: str, date: str = "2026-01-01T00:00:00+00:00", us: float = 3.0) -> Results:
    header = Header(bench, date, "abc", "GPU", "1.0", {"torch": "2"})
    rows = [
        row
        for case in cases_of(bench, "cuda")
        for row in with_ratios(
            [_row("anabranch", "ours", us, case), _row("peer", "peer", 2 * us, case)]
        )
    ]
    return Results(header, CEILINGS, rows)


def test_json_roundtrip(tmp_path: Path) -> None:
    for bench in BENCHES:
        results = _results(bench)
        results.save(tmp_path / "new" / f"{bench}.json")
        assert Results.load(tmp_path / "new" / f"{bench}.json") == results


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(make_table(_results("merge")))
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.split()[:4] == ["T613", "H16", "D128", "bfloat16"])
    assert line.split()[4:] == ["3", "/", "3", "6", "/", "6", "2.00x", "3", "50"]


def test_timing_summary() -> None:
    timing = Timing.of([10.0, 11.0, 9.0, 10.0, 10.0])
    assert timing.us == 10.0 and 0 < timing.spread <= 0.2


DOCUMENT = "# Title\n<!-- bench:merge -->\nold\n<!-- /bench:merge -->\ntext\n"


def test_report_writes_once_and_detects_staleness(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written, folder = tmp_path / "docs" / "benchmarks.md", tmp_path / "benchmarks" / "results"
    written.parent.mkdir()
    written.write_text(DOCUMENT)
    assert document.check(tmp_path) == 0  # no results: nothing to say
    _results("merge").save(folder / "x-merge.json")
    assert document.check(tmp_path) == 1
    assert document.write(tmp_path) == 0
    text = written.read_text()
    assert "old" not in text and text.endswith("text\n")
    assert "| T613 H32 D128 float16 | 3 / 3 | 6 / 6 | 2.00x | 3 | 50 |" in text
    plot = tmp_path / "docs" / "plots" / "merge-tokens.svg"
    drawn = plot.read_bytes()
    assert document.check(tmp_path) == 0
    assert document.write(tmp_path) == 0
    assert written.read_text() == text and plot.read_bytes() == drawn
    plot.unlink()
    assert document.check(tmp_path) == 1
    assert document.write(tmp_path) == 0
    _results("merge", "2026-02-01T00:00:00+00:00", us=4.0).save(folder / "a-merge.json")
    assert document.check(tmp_path) == 1


def test_headlines_are_ratios_to_the_best_peer(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    _results("decode").save(folder / "x-decode.json")
    text = headline_section(tmp_path)
    assert text is not None
    assert "| decode over pages | **2.00x** | 2.00 to 2.00 | peer | GPU, 2026-01-01 |" in text
    assert headline_section(tmp_path / "empty") is None


def test_the_repository_documents_are_what_the_results_give() -> None:
    assert document.check(ROOT) == 0


def test_every_figure_has_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from figure_plots import draw_figures

    benches = (*BENCHES, *COMPOSITIONS)
    drawn = [path for bench in benches for path in draw_figures(_results(bench), tmp_path)]
    assert {path.stem for path in drawn} == {figure.name for figure in FIGURES}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_bench.timing.NUM_SAMPLES", 2)
    monkeypatch.setattr("attention_bench.timing.SAMPLE_US", 1.0)
    monkeypatch.setattr("attention_bench.ceilings.CPU_READ_BYTES", 1 << 20)
    monkeypatch.setattr("attention_bench.ceilings.CPU_MATMUL", (64, torch.float32))


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("bench", BENCHES)
def test_benchmarks_run_on_the_cpu(bench: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    pattern = "T256" if bench == "merge" else "H9/3"
    options = ("--device", "cpu", "--quick", "--filter", pattern, "--out", str(out))
    done = run_command(bench, *options)
    assert done.exit_code == 0, done.output
    rows = Results.load(out).rows
    assert rows and all(row.status == "ok" and row.us for row in rows)
    assert "need a GPU" in done.stdout and str(out) in done.stdout


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("bench", COMPOSITIONS)
def test_compositions_run_on_the_cpu(bench: str, tmp_path: Path) -> None:
    """Every implementation is checked against float64, or is not there for a case."""
    done = run_command(bench, "--device", "cpu", "--out", str(tmp_path / "results.json"))
    assert done.exit_code == 0, done.output
    rows = Results.load(tmp_path / "results.json").rows
    assert all(row.us if row.status == "ok" else row.status == "unavailable" for row in rows)
    assert {row.case for row in rows} == {row.case for row in rows if row.us is not None}
    assert {"ours", "context"} <= {row.role for row in rows if row.us is not None}


@pytest.mark.parametrize("bench", IN_SOURCE_TREE)
def test_the_wheel_says_what_needs_the_source_tree(bench: str, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()  # of another package
    done = CliRunner().invoke(make_app(tmp_path / "benchmarks"), [bench, "--out", "x.json"])
    assert done.exit_code == 2
    assert f"anabranch bench {bench} needs the source tree" in done.stderr


def test_every_command_of_the_source_tree_is_announced() -> None:
    assert {*ATTENTION, *ENGINE} == {*IN_SOURCE_TREE}
    assert {*BENCHES, *COMPOSITIONS} == {*ATTENTION}


@pytest.mark.usefixtures("fast")
def test_a_wrong_implementation_of_ours_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(bench: str, device: str) -> list[Implementation]:
        prepare = partial(_merge_with, _change(0.1, 0.0), [], "off")
        return [Implementation("off", "ours", prepare)]

    monkeypatch.setattr("attention_bench.ours.implementations", wrong)
    done = run_command("merge", "--device", "cpu", "--filter", "T256 H16 D128 float32")
    assert done.exit_code == 1 and "off wrong in 1" in done.stdout


@pytest.mark.parametrize("bad", [("--filter", "no such case"), ("--device", "abacus")])
def test_bad_options_are_errors(bad: tuple[str, str]) -> None:
    done = run_command("merge", "--device", "cpu", *bad)
    assert done.exit_code == 2 and bad[1] in done.stderr
