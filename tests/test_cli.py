"""The command: answers in the terminal, and one clear line for whatever cannot be done."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from anabranch.bench.engine.benches import BENCHES
from anabranch.cli import app
from anabranch.cli.commands import as_markdown
from anabranch.cli.paint import Painter
from anabranch.engine.outputs import CompletionOutput

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
PROMPT = "5 6 7 8 5 6 7 8 5 6"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"dummy:{tmp_path}"


def invoke(*arguments: str, **more: Any) -> Any:
    return CliRunner().invoke(app, list(arguments), **more)


def generate(model: str, *arguments: str, **more: Any) -> Any:
    return invoke("generate", "--model", model, "--device", "cpu", *arguments, **more)


def test_help_teaches() -> None:
    for words in (["generate"], *(["bench", name] for name in BENCHES)):
        shown = invoke(*words, "--help", env={"COLUMNS": "200"})
        assert shown.exit_code == 0 and f"anabranch {' '.join(words)}" in shown.output
        assert "--model" in shown.output and "--scorer" in shown.output


def test_examples_become_a_list() -> None:
    assert as_markdown("Text.\n\n    one\n    two\n") == "Text.\n\n- `one`\n- `two`"


def test_generate_streams_and_sums_up(model: str) -> None:
    done = generate(model, PROMPT, "--max-tokens", "12", "--ignore-eos", "--no-adaptive")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.split()) == 12 and "\x1b" not in done.stdout
    for row in ("prompt", "time to first token", "tokens by origin", "model", "sampling"):
        assert row in done.stderr


def test_json_has_tokens_and_figures(model: str) -> None:
    done = generate(model, PROMPT, "--max-tokens", "12", "--ignore-eos", "--json")
    answer = json.loads(done.stdout)
    (output,) = answer["outputs"]
    assert len(output["token_ids"]) == len(output["origins"]) == 12
    summary = answer["summary"]
    assert summary["output_tokens"] == 12 == sum(summary["origins"].values())
    assert summary["prompt_tokens"] == 10 and summary["speculation"]["adaptive"]
    drafted = summary["speculation"]["accepted_tokens"]
    assert summary["origins"]["accepted"] == drafted


def test_speculation_changes_no_token(model: str) -> None:
    tokens: list[str] = []
    for method in ("ngram", "off"):
        options = ("--speculative", method, "--max-tokens", "20", "--ignore-eos")
        tokens.append(generate(model, PROMPT, *options).stdout)
    assert tokens[0] == tokens[1]


def test_prompt_from_a_file_or_a_pipe(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    options = ("--max-tokens", "4")
    given = generate(model, PROMPT, *options).stdout
    assert generate(model, "--file", str(tmp_path / "prompt.txt"), *options).stdout == given
    assert generate(model, *options, input=PROMPT).stdout == given


def test_several_answers(model: str) -> None:
    options = ("--n", "2", "--max-tokens", "3", "--temperature", "1", "--seed", "4", "--ignore-eos")
    lines = generate(model, PROMPT, *options).stdout.splitlines()
    assert [line[:4] for line in lines] == ["[0] ", "[1] "]
    assert all(len(line.split()) == 4 for line in lines)


def test_profile_writes_a_trace_and_a_picture(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    done = generate(model, PROMPT, "--max-tokens", "4", "--ignore-eos", "--profile", str(folder))
    assert done.exit_code == 0 and "written to" in done.stderr
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "<svg" in (folder / "timeline.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("hello",), "token ids"),
        (("",), "empty"),
        ((PROMPT, "--file", "x.txt"), "not both"),
        (("--file", "/nowhere/x.txt"), "/nowhere/x.txt"),
        ((PROMPT, "--temperature", "-1"), "temperature"),
        ((PROMPT, "--max-tokens", "0"), "max_tokens"),
        ((PROMPT, "--scorer", "guess"), "'guess'"),
        ((PROMPT, "--speculative", "draft"), "--draft-model"),
        ((PROMPT, "--num-drafts", "99"), "num_drafts"),
        ((PROMPT, "--max-model-len", "8"), "max_model_len"),
        ((PROMPT, "--chat"), "chat template"),
        ((PROMPT, "--device", "abacus"), "abacus"),
        ((PROMPT, "--model", "dummy:nothing"), "dummy:nothing"),
        ((PROMPT, "--no-such-option",), "--no-such-option"),
    ],
)  # fmt: skip
def test_errors_are_clear(model: str, arguments: tuple[str, ...], named: str) -> None:
    done = generate(model, *arguments)
    assert done.exit_code == 2 and named in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "99999"), "port must be from 0 to 65535, got 99999"),
        (("--log-level", "loud"), "--log-level must be one of"),
        (("--api-key", ""), "api_key must not be empty"),
        (("--model-that-is-none",), "--model-that-is-none"),
    ],
)
def test_serve_refuses_before_it_loads(arguments: tuple[str, ...], said: str) -> None:
    pytest.importorskip("uvicorn")
    done = invoke("serve", "dummy:nothing", *arguments)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.output


def test_serve_says_that_its_port_is_taken() -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = invoke("serve", "dummy:nothing", "--port", str(port))
    assert done.exit_code == 2 and f"error: cannot listen on 127.0.0.1:{port}" in done.stderr


def test_an_error_is_one_line(model: str) -> None:
    assert generate(model, "hello").stderr.strip().splitlines()[-1].startswith("error: ")


class Letters:
    """A tokenizer of one letter a token."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer
        from tokenizers.decoders import Fuse
        from tokenizers.models import WordLevel

        letters = {chr(97 + i): i for i in range(26)}
        self.backend_tokenizer = Tokenizer(WordLevel(letters, unk_token="a"))
        self.backend_tokenizer.decoder = Fuse()


def painted(text: str, upto: str | None = None, **options: Any) -> str:
    """What a terminal gets; small letters are sampled, the next two kinds by their origin."""
    file = io.StringIO()
    console = Console(file=file, width=80, **options)
    painter = Painter(console, Letters(), [])
    tokens = [ord(letter) - 97 for letter in text]
    origins = [0, 1, 1, 2, 0][: len(tokens)]
    for stop in (2, len(tokens)):
        shown = text[:stop] if upto is None else upto[:stop]
        painter.show(CompletionOutput(0, shown, tokens[:stop], origins=origins[:stop]))
    return file.getvalue()


def test_tokens_have_the_colour_of_their_origin() -> None:
    shown = painted("hello", force_terminal=True, color_system="standard", no_color=False)
    assert shown == "h\x1b[32me\x1b[0m\x1b[32ml\x1b[0m\x1b[33ml\x1b[0mo"


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert painted("hello") == "hello"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in painted("hello", force_terminal=True, color_system="standard")


def test_text_behind_a_stop_string_is_not_shown() -> None:
    assert painted("hello", upto="hel") == "hel"


def test_bench_from_the_command_line(model: str, tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    sizes = ("--input-len", "4", "--output-len", "3", "--iterations", "1", "--warmup", "0")
    done = invoke("bench", "latency", "--model", model, "--device", "cpu", *sizes,
                  "--out", str(out), "--plot", str(tmp_path / "x.svg"))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Avg latency: ") and str(out) in done.stdout
    assert json.loads(out.read_text())["options"]["output_len"] == 3
    assert "<svg" in (tmp_path / "x.svg").read_text()
    bad = invoke("bench", "latency", "--model", model, "--batch", "0")
    assert bad.exit_code == 2 and "--batch must be at least 1, got 0" in bad.stderr


def test_attention_benches_need_no_engine() -> None:
    code = (
        "import sys\n"
        "for name in ('transformers', 'tokenizers', 'safetensors'): sys.modules[name] = None\n"
        "import anabranch.cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
