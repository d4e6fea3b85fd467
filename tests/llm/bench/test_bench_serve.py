"""The load generator: what it sends, what it counts, and in which words; never how fast it was."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_openai as fake
import pytest
from engine_bench.soak import run_soak, soak_table
from engine_bench.source_options import SoakOptions
from fake_openai import FakeServer, begin_stream, fluent, reply, send, token, usage
from typer.testing import CliRunner

from anabranch.llm.bench.run_results import Header, RunResults
from anabranch.llm.bench.serve import endpoint as endpoint_module
from anabranch.llm.bench.serve import serve_bench
from anabranch.llm.bench.serve.endpoint import Endpoint, parse_counts, speculation_between
from anabranch.llm.bench.serve.load_options import Load, LoadOptions
from anabranch.llm.bench.serve.request_bodies import read_prompts
from anabranch.llm.bench.serve.request_load import LoadRun, arrival_times, summarise
from anabranch.llm.bench.serve.result_block import (
    draw_loads,
    result_block,
    serve_report,
    side_by_side,
)
from anabranch.llm.bench.serve.serve_bench import LaunchedServer, run_serve, serve_arguments
from anabranch.llm.bench.serve.streamed_request import Failure, Outcome, send_request
from anabranch.llm.cli.command_group import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not lag."""
    monkeypatch.setattr(endpoint_module, "SETTLE_SECONDS", 0.0)


def silent(what: str, done: int, of: int) -> None:
    assert what and done <= max(of, done)


def run(server: FakeServer, **options: Any) -> RunResults:
    given: dict[str, Any] = {"num_prompts": 4, "input_len": 5, "output_len": 6, "warmup": 0}
    given |= {"base_url": server.url} | options
    return run_serve(LoadOptions(**given), silent)


def one_row(server: FakeServer, **options: Any) -> dict[str, Any]:
    (row,) = run(server, **options).rows
    return row


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def test_addresses() -> None:
    endpoint = Endpoint("http://host:81/v1/", api_key="k")
    assert endpoint.url == "http://host:81"
    assert endpoint.http.headers["Authorization"] == "Bearer k"
    assert Endpoint("https://host/api/v1").url == "https://host/api"
    for wrong in ("host:80", "ftp://host", "http://", "http://host:x"):
        with pytest.raises(ValueError, match="--base-url"):
            Endpoint(wrong)


# Arithmetic


def outcome(start: float, *arrivals: float, num_output: int, **more: Any) -> Outcome:
    return Outcome(start, list(arrivals), arrivals[-1], 10, num_output, **more)


def test_figures_of_given_times() -> None:
    outcomes = [
        outcome(0.0, 1.0, 1.5, 3.0, num_output=5),
        outcome(0.5, 2.5, num_output=1, num_cached=4),
        Outcome(1.0, end=1.25, failure=Failure("HTTP 429", "full")),
        Outcome(2.75, end=3.5, failure=Failure("HTTP 429", "fuller")),
    ]
    row = summarise(LoadRun(outcomes, 0.0, 4.0), Load(3, 2.0))
    assert outcomes[0].tpot == (3.0 - 1.0) / 4 and outcomes[1].tpot is None
    assert row["mean_ttft_ms"] == row["median_ttft_ms"] == 1500
    assert row["p99_ttft_ms"] == pytest.approx(1990)
    assert row["mean_tpot_ms"] == row["p99_tpot_ms"] == 500
    assert row["mean_itl_ms"] == 1000 and row["p99_itl_ms"] == pytest.approx(1490)
    assert row["mean_e2el_ms"] == 2500
    assert (row["completed"], row["failed"]) == (2, 2)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (20, 6)
    assert row["output_throughput"] == 1.5 and row["total_token_throughput"] == 6.5
    assert row["max_output_tokens_per_s"] == pytest.approx(10 / 3)  # two chunks of 5/3 tokens
    assert row["max_concurrent_requests"] == 3
    assert row["failures"] == {"HTTP 429": {"count": 2, "said": "full"}}
    assert row["cached_input_tokens"] == 4


def test_a_short_run_peaks_at_its_mean() -> None:
    run = LoadRun([outcome(0.0, 0.5, num_output=10)], 0.0, 0.5)
    assert summarise(run, Load(None, None))["max_output_tokens_per_s"] == 20


def test_nothing_but_failures_has_no_latency() -> None:
    failed = Outcome(0.0, end=1.0, failure=Failure("timeout", "no end after 1 s"))
    row = summarise(LoadRun([failed], 0.0, 1.0), Load(None, None))
    assert row["mean_ttft_ms"] is row["p99_itl_ms"] is None
    assert "Mean TTFT (ms):                          -         \n" in result_block(row)


def test_arrivals() -> None:
    assert arrival_times(3, None, 0) == [0.0] * 3
    times = arrival_times(4000, 8.0, 1)
    assert times == arrival_times(4000, 8.0, 1) != arrival_times(4000, 8.0, 2)
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(1 / 8, rel=0.1)


def test_counters_of_both_servers() -> None:
    ours = parse_counts(
        '# HELP x\nanabranch:spec_decode_num_drafts_total{model_name="m"} 3.0\n'
        'anabranch:spec_decode_num_draft_tokens_total{model_name="m"} 1e+01\n'
        'anabranch:spec_decode_num_accepted_tokens_total{model_name="m"} 4.0\n'
        'anabranch:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 1.0\n'
        "anabranch:spec_decode_num_drafts_created{} 17.0\n"
    )
    assert ours == {"drafts": 3, "draft_tokens": 10, "accepted_tokens": 4, 1: 1}
    two = parse_counts(
        'vllm:spec_decode_num_drafts_total{engine="0"} 1\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 2\n'
    )
    assert two == {"drafts": 3}
    assert not parse_counts("vllm:num_requests_running 3\n")
    assert speculation_between(ours, ours) is None  # nothing was drafted
    before = parse_counts(
        "vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_draft_tokens_total 4\n"
        "vllm:spec_decode_num_accepted_tokens_total 2\n"
    )
    assert speculation_between(before, ours) == {
        "acceptance_rate": pytest.approx(100 * 2 / 6),
        "acceptance_length": 2.0,
        "num_drafts": 2,
        "draft_tokens": 6,
        "accepted_tokens": 2,
        "per_position_acceptance": [0.0, 50.0],
    }


ROW: dict[str, Any] = {
    "setting": "plain",
    "model": "m",
    "load": "concurrency 16",
    "completed": 100,
    "failed": 2,
    "max_concurrency": 16,
    "request_rate": 2.5,
    "duration": 5.0,
    "total_input_tokens": 102400,
    "total_output_tokens": 12800,
    "cached_input_tokens": 0,
    "request_throughput": 20.0,
    "output_throughput": 2560.0,
    "max_output_tokens_per_s": 3000.5,
    "max_concurrent_requests": 18,
    "total_token_throughput": 23040.0,
    **{f"{w}_{n}_ms": 1.234 for w in ("mean", "median", "p99") for n in ("ttft", "tpot", "itl")},
    "failures": {"HTTP 429": {"count": 2, "said": "full (Retry-After 1)"}},
    "speculation": {
        "acceptance_rate": 50.0,
        "acceptance_length": 2.0,
        "num_drafts": 10,
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "per_position_acceptance": [75.0, 25.0],
    },
}
BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     100       |
Failed requests:                         2         |
Maximum request concurrency:             16        |
Request rate configured (RPS):           2.50      |
Benchmark duration (s):                  5.00      |
Total input tokens:                      102400    |
Total generated tokens:                  12800     |
Request throughput (req/s):              20.00     |
Output token throughput (tok/s):         2560.00   |
Peak output token throughput (tok/s):    3000.50   |
Peak concurrent requests:                18.00     |
Total token throughput (tok/s):          23040.00  |
---------------Time to First Token----------------
Mean TTFT (ms):                          1.23      |
Median TTFT (ms):                        1.23      |
P99 TTFT (ms):                           1.23      |
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          1.23      |
Median TPOT (ms):                        1.23      |
P99 TPOT (ms):                           1.23      |
---------------Inter-token Latency----------------
Mean ITL (ms):                           1.23      |
Median ITL (ms):                         1.23      |
P99 ITL (ms):                            1.23      |
---------------Speculative Decoding---------------
Acceptance rate (%):                     50.00     |
Acceptance length:                       2.00      |
Drafts:                                  10        |
Draft tokens:                            20        |
Accepted tokens:                         10        |
Per-position acceptance (%):
  Position 0:                            75.00     |
  Position 1:                            25.00     |
==================================================
2 failed with HTTP 429: full (Retry-After 1)"""


def test_the_block_to_the_letter() -> None:
    assert result_block(ROW) == BLOCK.replace("|", "")


def test_the_block_leaves_out_what_was_not_asked_for() -> None:
    plain = ROW | {"max_concurrency": None, "request_rate": None, "speculation": None}
    text = result_block(plain | {"cached_input_tokens": 9})
    for absent in ("Maximum request", "Request rate", "Speculative", "Position"):
        assert absent not in text
    assert text.endswith("9 of the input tokens were in the server's prefix cache")


def results_of(*rows: dict[str, Any], **options: Any) -> RunResults:
    header = Header("serve", "2026", "abc1234", "CPU", "", {})
    return RunResults(header, options, list(rows))


def test_settings_side_by_side() -> None:
    plain = ROW | {"speculation": None, "output_throughput": 1280.0, "failures": {}}
    table = side_by_side(results_of(plain, ROW | {"setting": "ngram"}))
    lines = {line[0]: line[1:] for line in table.lines}
    assert table.columns == ["", "plain", "ngram", "last / first"]
    assert lines["Output token throughput (tok/s)"] == ["1280.00", "2560.00", "2.00x"]
    assert lines["Acceptance length"] == ["", "2.00", ""]
    assert lines["Successful requests"] == ["100", "100", ""]
    assert table.notes == ["ngram: 2 failed with HTTP 429: full (Retry-After 1)"]


def test_loads_side_by_side_and_as_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [ROW | {"max_concurrency": n, "load": f"concurrency {n}"} for n in (1, 2)]
    slow = [row | {"setting": "slow", "p99_tpot_ms": None} for row in rows]
    both = side_by_side(results_of(*rows, *slow)).columns
    assert both[1] == "plain, concurrency 1" and both[4] == "slow, concurrency 2"
    assert side_by_side(results_of(*rows)).columns[1:3] == ["concurrency 1", "concurrency 2"]
    draw_loads(results_of(*rows, *slow), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml") and drawn.count('<g id="axes_') == 3


# Loads


def test_completions_of_random_prompts() -> None:
    with fake.running() as server:
        row = one_row(server, api_key="secret", ignore_eos=True, extra_body='{"top_k": 3}')
    assert (row["completed"], row["failed"]) == (4, 0)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (20, 24)
    assert row["speculation"]["num_drafts"] == 12  # 3 chunks of each answer
    assert row["speculation"]["acceptance_length"] == 2.0
    first = server.bodies[0]
    assert first["model"] == "fake" and first["stream_options"] == {"include_usage": True}
    assert first["ignore_eos"] is True and first["top_k"] == 3 and first["temperature"] == 0
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert all(len(prompt) == 5 for prompt in prompts) and len(set(prompts)) == 4
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}


@pytest.mark.parametrize("tokenizer", ["vllm", "llama.cpp", "missing"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompts_by_whatever_tokenizer_there_is(tokenizer: str, endpoint: str) -> None:
    with fake.running(tokenizer=tokenizer) as server:
        row = one_row(server, endpoint=endpoint)
    assert row["completed"] == 4 and row["total_output_tokens"] == 24
    for body in server.bodies:
        if endpoint == "chat":
            (message,) = body["messages"]
            assert message["role"] == "user" and len(message["content"].split()) == 5
        elif tokenizer == "missing":
            assert len(body["prompt"].split()) == 5
        else:
            assert [type(part) for part in body["prompt"]] == [int] * 5


def test_token_ids_without_a_tokenizer() -> None:
    with fake.running(tokenizer=None) as server:
        one_row(server, vocab_size=300)
        assert all(max(body["prompt"]) < 300 for body in server.bodies)


def test_a_seed_gives_the_same_prompts_and_loads_of_a_sweep_differ() -> None:
    def sent(**options: Any) -> list[str]:
        with fake.running(tokenizer="missing") as server:
            run(server, num_prompts=2, **options)
        return sorted(body["prompt"] for body in server.bodies)

    assert sent(seed=1) == sent(seed=1) != sent(seed=2)
    assert len(set(sent(sweep="1,2,3", warmup=1))) == 3 * 2 + 1


def test_no_more_requests_than_allowed_are_under_way() -> None:
    """Every answer waits until as many are open as may be, so all of them must have been."""

    async def together(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        while server.most_open < 3:
            await asyncio.sleep(0)
        await fluent(server, body, writer)

    with fake.running(together) as server:
        row = one_row(server, num_prompts=9, concurrency=3, timeout=20.0)
    assert row["completed"] == 9 and server.most_open == 3
    assert row["max_concurrent_requests"] == row["max_concurrency"] == 3


def test_without_a_limit_all_are_sent_at_once() -> None:
    async def together(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        while server.most_open < 9:
            await asyncio.sleep(0)
        await fluent(server, body, writer)

    with fake.running(together) as server:
        assert one_row(server, num_prompts=9, timeout=20.0)["completed"] == 9


def test_a_stream_in_single_bytes() -> None:
    async def bytewise(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        begin_stream(writer)
        for byte in token(body, "ö") + token(body, "x", "stop") + usage(3, 2) + b"data: [DONE]\n\n":
            send(writer, bytes([byte]))
            await writer.drain()
        send(writer, b"")

    with fake.running(bytewise) as server:
        row = one_row(server)
    assert row["completed"] == 4 and row["total_output_tokens"] == 8
    assert row["mean_itl_ms"] is not None and row["mean_tpot_ms"] is not None


def test_a_client_that_leaves() -> None:
    async def endless(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        begin_stream(writer)
        for _ in range(2):
            send(writer, token(body, "x"))
            await writer.drain()
        await asyncio.sleep(60)

    with fake.running(endless) as server:
        sent = send_request(
            Endpoint(server.url), "completions", {"prompt": "a"}, disconnect_after=2
        )
        outcome = asyncio.run(sent)
    assert len(outcome.arrivals) == 2 and outcome.failure is None and outcome.disconnected


def test_chunks_without_tokens_are_no_arrivals() -> None:
    """A greeting and an empty last chunk bring none; without usage, chunks are counted."""

    async def wordy(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        begin_stream(writer)
        send(writer, fake.event([{"delta": {"role": "assistant", "content": ""}}]))
        send(writer, token(body, "a") + token(body, "") + token(body, "b"))
        send(writer, token(body, "", "stop") + b"data: [DONE]\n\n")
        send(writer, b"")

    with fake.running(wordy) as server:
        assert one_row(server, endpoint="chat")["total_output_tokens"] == 12


# Failures


async def troubled(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
    """Each request fails in a way of its own; the last is answered."""
    number = len(server.bodies)
    if number == 1:
        error = {"message": "the server is full", "type": "overloaded"}
        reply(writer, 429, {"error": error}, Retry_After="1")
    elif number == 2:
        reply(writer, 200, {"choices": [{"text": "whole"}]})
    elif number == 3:
        writer.close()
    elif number == 4:
        await asyncio.Event().wait()
    elif number < 9:
        begin_stream(writer)
        send(writer, token(body, "a"))
        if number == 5:
            send(writer, b'data: {"error": {"message": "the engine failed"}}\n\n')
        elif number == 6:
            send(writer, b"data: {nonsense\n\n")
        elif number == 7:
            return  # in the middle of the body
        send(writer, b"")  # without an end of the answer
    else:
        await fluent(server, body, writer)


def test_failures_are_counted_with_their_reasons() -> None:
    with fake.running(troubled) as server:
        row = one_row(server, num_prompts=9, concurrency=1, timeout=3.0)
    assert (row["completed"], row["failed"]) == (1, 8)
    failures = {kind: failure["count"] for kind, failure in row["failures"].items()}
    assert failures == {
        "HTTP 429": 1,
        "no stream": 1,
        "connection": 2,
        "timeout": 1,
        "error in the stream": 1,
        "bad event": 1,
        "cut short": 1,
    }
    assert row["failures"]["HTTP 429"]["said"] == "the server is full (Retry-After 1)"
    assert row["failures"]["error in the stream"]["said"] == "the engine failed"
    assert row["total_output_tokens"] == 6
    assert "1 failed with timeout: no end after 3 s" in result_block(row)


def test_a_server_that_fails_to_warm_up_is_not_measured() -> None:
    async def refuse(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
        reply(writer, 400, {"error": {"message": "no such thing"}})

    with fake.running(refuse) as server, pytest.raises(ValueError, match="HTTP 400: no such thing"):
        run(server, warmup=1)
    assert len(server.bodies) == 1


def test_nobody_there_is_one_clear_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = run_command("--base-url", url)
    error = done.stderr.strip()
    assert done.exit_code == 2
    assert error.startswith(f"error: no server answers at {url} (") and "\n" not in error


# Options, files, the command


def test_prompts_of_files(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo words\n")
    assert [prompt.content for prompt in read_prompts(text, 7, "chat")] == ["one", "two words"]
    messages = [{"role": "user", "content": "hi"}]
    given = ["plain", {"prompt": "p", "max_tokens": 3}, {"text": "t"}, {"messages": messages}]
    lines.write_text("\n".join(map(json.dumps, given)))
    prompts = read_prompts(lines, 7, "chat")
    assert [prompt.content for prompt in prompts] == ["plain", "p", "t", messages]
    assert [prompt.max_tokens for prompt in prompts] == [7, 3, 7, 7]
    with pytest.raises(ValueError, match="--endpoint chat takes messages, completions token ids"):
        read_prompts(lines, 7, "completions")
    lines.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"b\.jsonl: a prompt is a string or has one of"):
        read_prompts(lines, 7, "chat")
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none", 7, "chat")


def test_prompts_of_a_file_are_sent(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a b\nc d e\n")
    with fake.running() as server:
        row = one_row(server, prompts=tmp_path / "p.txt", num_prompts=4)
    assert sorted(body["prompt"] for body in server.bodies) == ["a b", "a b", "c d e", "c d e"]
    assert row["total_input_tokens"] == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_prompts": 0}, "--num-prompts must be at least 1, got 0"),
        ({"request_rate": 0.0}, "--request-rate must be above 0, got 0.0"),
        ({"timeout": -1.0}, "--timeout must be above 0"),
        ({"endpoint": "x"}, "--endpoint must be one of completions, chat"),
        ({"sweep": "1,x"}, "--sweep must be numbers above 0 with commas, got '1,x'"),
        ({"sweep": "1,1.5"}, "--sweep must be numbers above 0 with commas, got '1,1.5'"),
        ({"sweep": "0"}, "--sweep must be numbers above 0 with commas, got '0'"),
        ({"range_ratio": 1.0}, "--range-ratio must be at least 0 and below 1, got 1.0"),
        ({"extra_body": "[1]"}, "--extra-body must be a JSON object"),
        ({"plot": Path("x.svg")}, "give --sweep"),
        ({"compare": "graphs"}, "--compare needs --launch MODEL"),
        ({"launch": "m", "compare": "merge"}, "--compare must be one of speculative, scorer"),
        ({"cases": "8x8,4"}, "--cases must be like 4096x1024,8192x64, got '8x8,4'"),
        ({"cases": "8x0"}, "--output-len must be at least 1, got 0"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoadOptions(**options)


def test_loads() -> None:
    assert LoadOptions().loads() == [Load(None, None)]
    assert LoadOptions(sweep="1,4", request_rate=2.0).loads() == [Load(1, 2.0), Load(4, 2.0)]
    assert LoadOptions(concurrency=3).loads() == [Load(3, None)]


def test_settings_of_a_comparison() -> None:
    def names(**options: Any) -> list[str]:
        return list(LoadOptions(launch="m", **options).settings())

    assert names() == ["plain"]
    assert names(compare="speculative") == ["plain", "ngram k=4, multi-query"]
    assert names(compare="scorer") == ["ngram k=4, multi-query", "ngram k=4, batch-expansion"]
    assert names(compare="graphs") == ["no graphs", "plain"]
    assert names(compare="adaptive") == ["adaptive off", "adaptive on"]  # settings do not say it


def test_a_comparison_loads_every_setting_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    with fake.running() as server:

        @contextmanager
        def launched(model: str, options: LoadOptions, timeout: float) -> Any:
            started.append(options.setting())
            yield LaunchedServer(server.url, 0)

        monkeypatch.setattr(serve_bench, "launched", launched)
        results = run(server, launch="m", compare="scorer", device="cpu", concurrency=1)
    assert [row["setting"] for row in results.rows] == started and len(started) == 2
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:4] == prompts[4:]


def test_cases_are_run_one_after_the_other() -> None:
    with fake.running() as server:
        results = run(server, cases="5x2,7x3", warmup=2, concurrency=2, model="fake")
    assert [len(body["prompt"]) for body in server.bodies] == [5] * 2 + [5] * 4 + [7] * 4
    assert [body["max_tokens"] for body in server.bodies] == [2] * 6 + [3] * 4
    loads = ["5 in, 2 out, concurrency 2", "7 in, 3 out, concurrency 2"]
    assert [row["load"] for row in results.rows] == loads
    assert serve_report(results).columns == ["", *loads, "last / first"]


def test_room_for_the_longest_case() -> None:
    options = LoadOptions(launch="m", cases="10x5,8x9", range_ratio=0.5)
    assert options.longest == 12 + 14
    assert replace(options, endpoint="chat").longest is None


def test_a_launched_server_has_the_options_of_the_run() -> None:
    options = LoadOptions(launch="m", speculative="ngram", graphs=False, page_size=32)
    line = " ".join(serve_arguments("m", options, 9.0))
    assert line.startswith("serve m ") and "--max-request-seconds 9.0" in line
    for part in ("--speculative ngram", "--no-graphs", "--page-size 32", "--prefix-caching"):
        assert part in line
    assert "--model" not in line.split() and "--base-url" not in line


def test_command_prints_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with fake.running() as server:
        options = ("--base-url", server.url, "--num-prompts", "3", "--output-len", "4")
        done = run_command(*options, "--api-key", "secret", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("============ Serving Benchmark Result ============\n")
    assert "Successful requests:                     3  " in done.stdout
    content = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert content["header"]["bench"] == "serve" and content["header"]["commit"]
    assert content["header"]["device"] == server.url
    assert content["rows"][0]["completed"] == 3 and "secret" not in out.read_text()


def test_sweep_prints_a_table_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "load.svg"
    with fake.running() as server:
        options = ("--base-url", server.url, "--num-prompts", "3", "--sweep", "1,2")
        done = run_command(*options, "--plot", str(plot))
    assert done.exit_code == 0, done.output
    for part in ("concurrency 1", "concurrency 2", "Median TTFT"):
        assert part in done.stdout
    assert plot.stat().st_size


def test_our_own_server() -> None:
    """Started, loaded and stopped; every prompt and answer has the length asked for."""
    for needed in ("transformers", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed)
    from server_models import talking_model

    options = LoadOptions(
        launch=talking_model(), device="cpu", speculative="ngram", adaptive=False,
        num_prompts=4, concurrency=2, cases="20x40,30x8", ignore_eos=True, timeout=60.0,
    )  # fmt: skip
    row, short = run_serve(options, silent).rows
    for each in (row, short):
        assert (each["completed"], each["failed"]) == (4, 0)
        assert each["startup_seconds"] > 0
    assert (short["total_input_tokens"], short["total_output_tokens"]) == (120, 32)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (80, 160)
    assert row["max_concurrent_requests"] == 2 and row["cached_input_tokens"] == 0
    assert row["speculation"]["num_drafts"] > 0


def test_a_soak_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's process is that of its engine; `test_our_own_server` starts a whole one."""
    for needed in ("transformers", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed)
    from forked_engine import forked_engine
    from server_models import engine_config, running_server, talking_model

    @contextmanager
    def launched(*_: object) -> Iterator[LaunchedServer]:
        engine = forked_engine(engine_config())
        with running_server(engine, max_queue=1000) as server:
            yield LaunchedServer(server.url, engine.pid)
        engine.close()

    monkeypatch.setattr("engine_bench.soak.launched", launched)
    options = SoakOptions(
        model=talking_model(), device="cpu", clients=8, seconds=1.0, vanish=0.5, output_len=16
    )
    (row,) = run_soak(options, silent).rows
    assert row["completed"] and row["vanished"]
    assert (row["failed"], row["unhealthy"], row["kv_usage_end"]) == (0, 0, 0.0)
    assert row["total_output_tokens"] == 16 * row["completed"]
    assert row["health_requests"]
    assert soak_table(results_of(row)).lines[0] == ["completed", str(row["completed"])]
