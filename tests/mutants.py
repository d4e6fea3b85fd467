"""How many small faults the tests notice: `make mutants`, an hour; `--minutes 15` for less.

A random sample of mutations (tests/support/mutations.py) is applied one at a time in a scratch copy
of the tree, and tests of the changed file that run the changed line, in whatever process, are run
until one fails, the quickest first; it has to pass without the mutation. Each run is a fork of a
process that has imported what takes long. Mutations that change nothing anyone could see are listed
with their reasons in tests/equivalent_mutants.json: a file, a line and its change, or a file and a
line for all changes of that line.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from line_traces import LineTraces  # noqa: E402
from mutations import Mutation, find_mutations, made_by, place_of  # noqa: E402

ROOMS = ("llm/engine", "llm/server", "llm/sampling", "llm/sequences", "keys", "distributed")
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.json"
WARM = ("torch", "transformers", "transformers.models.llama.modeling_llama", "triton", "numpy")
WARM += ("pytest", "hypothesis", "gguf", "fastapi", "httpx", "openai", "uvicorn", "typer", "rich")
WARM += ("anyio._backends._asyncio", "prometheus_client", "markdown_it", "llguidance", "requests")
LEAST_SECONDS, SLOWER = 60.0, 4.0  # until a run counts as hung; times what the tests take without
LONGEST_SECONDS = 600.0  # of a run without a mutation
MOST_SECONDS = 60.0  # of tests that are run for a mutant, as they take without it when traced
USAGE_ERROR = 4  # of pytest: a test that is named is not found

ENGINE, SERVER, LLM = "tests/llm/engine/", "tests/llm/server/", "tests/llm/"
SERVED = tuple(
    f"{SERVER}test_{name}.py"
    for name in (
        "engine_loop",
        "replies",
        "chat_requests",
        "server_contract",
        "server_parts",
        "server_prompts",
        "server_gate",
        "server_logprobs",
        "answer_pieces",
        "response_events",
        "tool_grammar",
        "chat_families",
        "server_field_docs",
        "server_clients",
        "server_connections",
        "server",
        "server_failure",
    )
)
ATTENTION = "tests/attention/"
# The tests of a file, the quickest first; the longest prefix that fits counts.
TESTS: dict[str, tuple[str, ...]] = {
    "llm/engine/": (
        f"{ENGINE}test_engine_sizes.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_structured.py",
    ),
    "llm/engine/admission.py": (
        f"{ENGINE}test_sampling_defaults.py",
        f"{ENGINE}test_text_stream.py",
        f"{ENGINE}test_engine_sizes.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_structured.py",
    ),
    "llm/engine/request.py": (
        f"{ENGINE}test_arrivals.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_structured.py",
    ),
    "llm/engine/async_llm.py": (f"{ENGINE}test_async_llm.py",),
    "llm/engine/attention_ways.py": (
        f"{ENGINE}test_engine_cascade.py",
        f"{ENGINE}test_engine_sparse.py",
    ),
    "llm/engine/build.py": (
        f"{ENGINE}test_engine_sizes.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_engine_formats.py",
        f"{ENGINE}test_engine_models.py",
        f"{LLM}parallel/test_ranks.py",
    ),
    "llm/engine/config.py": (
        f"{ENGINE}test_engine_sizes.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_engine_sparse.py",
        f"{LLM}speculative/test_draft_trees.py",
    ),
    "llm/engine/drafters.py": (
        f"{LLM}speculative/test_speculative.py",
        f"{LLM}speculative/test_draft_trees.py",
    ),
    "llm/engine/launch.py": (
        f"{ENGINE}test_engine_sizes.py",
        f"{LLM}speculative/test_speculative.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_structured.py",
        f"{ENGINE}test_structured_paths.py",
        f"{LLM}speculative/test_draft_trees.py",
    ),
    "llm/engine/launched.py": (
        f"{LLM}speculative/test_speculative.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_structured_paths.py",
    ),
    "llm/engine/limits.py": (
        f"{ENGINE}test_engine_sizes.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_engine_cascade.py",
    ),
    "llm/engine/llm.py": (
        f"{ENGINE}test_llm_threads.py",
        f"{ENGINE}test_engine.py",
        f"{ENGINE}test_sampling_defaults.py",
    ),
    "llm/engine/ranks.py": (f"{LLM}parallel/test_ranks.py",),
    "llm/engine/scheduler.py": (f"{ENGINE}test_scheduler.py", f"{ENGINE}test_engine.py"),
    "llm/engine/stats.py": (
        f"{ENGINE}test_engine_sizes.py",
        f"{LLM}speculative/test_speculative.py",
        f"{ENGINE}test_engine.py",
    ),
    "llm/engine/step_masks.py": (
        f"{ENGINE}test_step_masks.py",
        f"{ENGINE}test_structured.py",
    ),
    "llm/engine/text_stream.py": (f"{ENGINE}test_stop_strings.py", f"{ENGINE}test_text_stream.py"),
    "llm/sampling/": (
        f"{ENGINE}test_engine_sizes.py",
        f"{LLM}sampling/test_sampling_params.py",
        f"{LLM}sampling/test_sampler.py",
        f"{LLM}sampling/test_verify.py",
        f"{LLM}speculative/test_draft_chain.py",
        f"{LLM}speculative/test_draft_trees.py",
    ),
    "llm/sequences/": (
        f"{ENGINE}test_scheduler.py",
        f"{LLM}runner/test_cache.py",
        f"{LLM}speculative/test_draft_trees.py",
        f"{ENGINE}test_engine.py",
    ),
    "llm/server/": SERVED,
    "llm/server/app.py": (
        f"{SERVER}test_server_markdown.py",
        f"{SERVER}test_server_contract.py",
        f"{SERVER}test_server_gate.py",
    ),
    "llm/server/engine_child.py": (f"{SERVER}test_engine_loop.py", f"{SERVER}test_server.py"),
    "llm/server/engine_process.py": (f"{SERVER}test_server_failure.py",),
    "llm/server/engine_watch.py": (
        f"{SERVER}test_server_contract.py",
        f"{SERVER}test_server_failure.py",
    ),
    "llm/server/http_server.py": (
        f"{SERVER}test_server_connections.py",
        f"{SERVER}test_server.py",
        f"{SERVER}test_server_failure.py",
    ),
    "llm/server/messages.py": (
        f"{SERVER}test_server_contract.py",
        f"{SERVER}test_server_parts.py",
        f"{SERVER}test_server_failure.py",
    ),
    "llm/server/restarting_engine.py": (f"{SERVER}test_server_failure.py",),
    "llm/server/tool_grammar.py": (
        f"{SERVER}test_tool_grammar.py",
        f"{SERVER}test_offer_grammar.py",
    ),
    "keys/": (
        f"{ATTENTION}test_keys.py",
        f"{ATTENTION}test_attend_refusals.py",
        f"{ATTENTION}test_append_kv.py",
        f"{ATTENTION}test_attend_cpu.py",
        f"{ATTENTION}test_quantised.py",
        f"{ATTENTION}test_selected.py",
        f"{ATTENTION}test_latent.py",
    ),
    "distributed/": ("tests/distributed/test_distributed.py", f"{LLM}parallel/test_ranks.py"),
}


class Outcome(NamedTuple):
    """What became of a mutant."""

    mutation: Mutation
    result: str  # "caught", "hung", which is as good, or "survived"
    seconds: float


class Ran(NamedTuple):
    """A run of pytest."""

    code: int | None  # None where it took too long
    failed: str  # the first test that failed, if one did
    seconds: float


def file_of(test: str) -> str:
    """Of a test's name."""
    return test.split("::", maxsplit=1)[0]


def tests_of(path: str) -> tuple[str, ...]:
    """Test files of a source file."""
    inside = path.removeprefix("anabranch/")
    return TESTS[max((name for name in TESTS if inside.startswith(name)), key=len)]


def all_mutations() -> list[Mutation]:
    """Of every file of the rooms, without those known to change nothing."""
    known = {tuple(row["mutation"]) for row in json.loads(EQUIVALENT.read_text())}
    found: list[Mutation] = []
    for room in ROOMS:
        for path in sorted((ROOT / "anabranch" / room).rglob("*.py")):
            name, source = path.relative_to(ROOT).as_posix(), path.read_bytes()
            lines = source.decode().splitlines()
            for each in find_mutations(name, source):
                text = lines[each.line - 1].strip()
                whole_line, one = (name, text), (name, text, each.before, each.after)
                if whole_line not in known and one not in known:
                    found.append(each)
    return found


class Scratch:
    """A copy of the tree, in which one mutation at a time is made."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutants-"))
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
        for name in listed.stdout.decode().splitlines():
            if name.startswith(("anabranch/", "tests/", "examples/", "benchmarks/report")) or (
                "/" not in name and not name.endswith(".whl")
            ):
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).is_file():
                    shutil.copy(ROOT / name, target)
        self._time = time.time() - 1e6  # compiled files are found by whole seconds
        self._traces: dict[str, list[dict[str, Any]]] = {}  # by test file
        self._sources = self._digest("anabranch", "tests/support", "tests/conftest.py")

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _digest(self, *names: str) -> str:
        """Of files and folders of sources."""
        found = hashlib.sha256()
        for name in names:
            path = self.root / name
            for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                found.update(each.read_bytes())
        return found.hexdigest()[:16]

    def _trace(self, test: str) -> list[dict[str, Any]]:
        """The tests of a file that pass, each with the lines it runs."""
        if test not in self._traces:
            # kept for the next run over the same sources
            name = f"mutants-{self._sources}-{self._digest(test)}-{Path(test).stem}.json"
            kept = Path(tempfile.gettempdir(), name)
            if not kept.is_file():
                self._run((test,), 3600, traced=kept)
            if not kept.is_file():
                print(f"tests do not run: {test}", flush=True)
            self._traces[test] = json.loads(kept.read_text()) if kept.is_file() else []
        return self._traces[test]

    def _chosen(self, mutation: Mutation) -> tuple[tuple[str, ...], float]:
        """Tests of the mutated line, file by file, the quickest first, and their seconds."""
        path = mutation.path.removeprefix("anabranch/")
        rows = [row for test in tests_of(mutation.path) for row in self._trace(test)]
        source = (self.root / mutation.path).read_bytes()
        place = place_of(mutation, source)
        if names := place.names or made_by(place.function, source):
            # All tests run what runs at import; those that use what it defines notice first.
            uses = self._running(rows, self._mentions(names))
        elif place.names is None:
            runs = self._running(rows, {path: {mutation.line}})
            rows = uses = runs or self._running(rows, {path: set(place.lines)}) or rows
        else:
            uses = rows
        told = {row["test"] for row in uses}
        order = lambda row: (row["test"] not in told, path not in row["files"], row["seconds"])  # noqa: E731
        chosen: dict[str, str] = {}  # the file of each
        total = limit = 0.0
        for key in (order, lambda row: row["seconds"]):  # half of the time for what is quick
            limit += MOST_SECONDS / 2
            for row in sorted(rows, key=key):
                fits = total + row["seconds"] < limit or not chosen
                if fits and row["test"] not in chosen:
                    chosen[row["test"]] = file_of(row["test"])
                    total += row["seconds"]
        places = list(dict.fromkeys(chosen.values()))
        return tuple(sorted(chosen, key=lambda test: places.index(chosen[test]))), total

    def _running(
        self, rows: list[dict[str, Any]], lines: dict[str, set[int]]
    ) -> list[dict[str, Any]]:
        """Rows of the tests that run one of these lines, by file."""
        return [
            row
            for row in rows
            if any(
                not found.isdisjoint(row["files"].get(path, ())) for path, found in lines.items()
            )
        ]

    def _mentions(self, names: frozenset[str]) -> dict[str, set[int]]:
        """Lines of the package that mention one of these names, by file."""
        word = re.compile(r"\b(" + "|".join(map(re.escape, sorted(names))) + r")\b")
        found: dict[str, set[int]] = {}
        for file in sorted((self.root / "anabranch").rglob("*.py")) if names else ():
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if word.search(line):
                    path = file.relative_to(self.root / "anabranch").as_posix()
                    found.setdefault(path, set()).add(number)
        return found

    def try_out(self, mutation: Mutation) -> Outcome | None:
        """Run the tests of a mutated line; None where there are none that pass without it.

        What fails or hangs with the mutation has to pass without it, on the machine as it is now.
        """
        start = time.monotonic()
        tests, usual = self._chosen(mutation)
        limit = max(LEAST_SECONDS, SLOWER * usual)
        result = "unknown"
        while tests and result == "unknown":
            with self._mutated(mutation):
                ran = self._run(tests, limit)
                if ran.code == USAGE_ERROR:  # its cases have other names
                    ran = self._run(tuple(dict.fromkeys(map(file_of, tests))), limit)
            if ran.code == 0:
                result = "survived"
                break
            control = self._run((ran.failed,) if ran.failed else tests, LONGEST_SECONDS)
            if control.code != 0:
                tests = tuple(test for test in tests if test not in (ran.failed, control.failed))
            elif ran.code is None and limit < SLOWER * control.seconds:
                limit = SLOWER * control.seconds
            else:
                result = "hung" if ran.code is None else "caught"
        return Outcome(mutation, result, time.monotonic() - start) if tests else None

    @contextmanager
    def _mutated(self, mutation: Mutation) -> Iterator[None]:
        source = (self.root / mutation.path).read_bytes()
        self._write(mutation.path, mutation.apply(source))
        try:
            yield
        finally:
            self._write(mutation.path, source)

    def _write(self, path: str, source: bytes) -> None:
        self._time += 10
        (self.root / path).write_bytes(source)
        os.utime(self.root / path, (self._time, self._time))

    def _run(self, tests: tuple[str, ...], limit: float, traced: Path | None = None) -> Ran:
        """Run pytest in a fork of this process."""
        start = time.monotonic()
        failed = self.root / "failed"
        failed.write_text("")
        child = os.fork()
        if not child:
            self._test(tests, [LineTraces(self.root / "anabranch", traced)] if traced else [])
        code: int | None = None
        while time.monotonic() - start < limit:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = 1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started too
        if code is None:
            os.waitpid(child, 0)
        return Ran(code, failed.read_text(), time.monotonic() - start)

    def _test(self, tests: tuple[str, ...], plugins: list[Any]) -> None:
        """Never returns."""
        code = 70
        try:
            os.setsid()
            os.chdir(self.root)
            silence = os.open(self.root / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(silence, stream)
            paths = os.environ.get("PYTHONPATH", "").split(":")
            kept = [path for path in paths if path and Path(path) != ROOT]
            os.environ["PYTHONPATH"] = ":".join([*kept, str(self.root)])
            sys.path[:] = [str(self.root), *(p for p in sys.path if p not in ("", str(ROOT)))]
            sys.path.remove(str(ROOT / "tests" / "support"))
            vars(sys.modules["__main__"]).pop("__file__", None)  # processes need not import it
            pytest: Any = import_module("pytest")
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis"]
            options += [] if plugins else ["-x"]
            plugins = plugins or [FirstFailure(self.root / "failed")]
            code = int(pytest.main([*options, *tests], plugins))
        finally:
            os._exit(code)


class FirstFailure:
    """Keeps the name of the first test that fails: a plugin of pytest."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._out.read_text():
            self._out.write_text(report.nodeid)


def warm_up() -> None:
    """Import what takes long, and nothing that is mutated."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.gettempdir() + "/mutants-hypothesis"
    os.environ["CI"] = "1"  # the same examples for every mutant
    for name in WARM:
        try:
            import_module(name)
        except ImportError:
            continue
    gc.freeze()  # what is here is not looked through again by each run
    assert "anabranch" not in sys.modules


def work(sample: list[Mutation], taken: Any, until: float, results: Any) -> None:
    """Try mutations in their order until time is up."""
    scratch = Scratch()
    try:
        while time.monotonic() < until:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(sample):
                break
            outcome = scratch.try_out(sample[number])
            if outcome is not None:
                results.put(outcome)
                print(
                    f"{outcome.result:8} {outcome.seconds:5.0f} s  {outcome.mutation}", flush=True
                )
    finally:
        scratch.close()
        results.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="paths that contain one of these, by commas")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    given = parser.parse_args()
    wanted = given.only.split(",")
    sample = [each for each in all_mutations() if any(name in each.path for name in wanted)]
    random.Random(given.seed).shuffle(sample)
    warm_up()
    context = multiprocessing.get_context("fork")
    taken, results = context.Value("i", 0), context.Queue()
    until = time.monotonic() + 60 * given.minutes
    arguments = (sample, taken, until, results)
    workers = [context.Process(target=work, args=arguments) for _ in range(given.jobs)]
    for worker in workers:
        worker.start()
    outcomes, running = list[Outcome](), given.jobs
    while running:
        outcome = results.get()
        running -= outcome is None
        outcomes += [] if outcome is None else [outcome]
    for worker in workers:
        worker.join()
    report(outcomes, len(sample), given)


def report(outcomes: list[Outcome], num_known: int, given: argparse.Namespace) -> None:
    """Print the score and the survivors, and write all outcomes."""
    survivors = [each for each in outcomes if each.result == "survived"]
    share = 1 - len(survivors) / max(len(outcomes), 1)
    caught = len(outcomes) - len(survivors)
    print(f"\n{caught} of {len(outcomes)} mutants caught ({share:.0%}), of {num_known} known")
    for each in sorted(survivors):
        print(f"survived: {each.mutation}")
    rows = [each.mutation.__dict__ | {"result": each.result} for each in outcomes]
    content = {"seed": given.seed, "minutes": given.minutes, "score": share, "mutants": rows}
    given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
