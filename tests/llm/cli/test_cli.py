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

from attention_bench.attention_options import AttentionOptions
from rich.console import Console
from source_commands import ATTENTION, ENGINE
from typer.testing import CliRunner

from anabranch.llm.bench import commands
from anabranch.llm.cli.command_group import app
from anabranch.llm.cli.engine_options import ServingOptions
from anabranch.llm.cli.generate import GenerateOptions
from anabranch.llm.cli.options import Option, add_command, new_app, options_of
from anabranch.llm.cli.printed_answer import Painter
from anabranch.llm.cli.quantize import QuantizeOptions
from anabranch.llm.cli.serve import ServeCommandOptions
from anabranch.llm.engine.request import CompletionOutput

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


COMMANDS = [
    ("generate",),
    ("serve",),
    ("quantize",),
    *(("bench", name) for name in (*commands.OPTIONS, *commands.IN_SOURCE_TREE)),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_cuts_no_option_name(words: tuple[str, ...]) -> None:
    """At 80 columns, each option is spelled out, and examples are lines of their own."""
    shown = invoke(*words, "--help", env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    kind = next(kind for name, kind in OPTIONS.items() if name == words)
    for option in options_of(kind):
        assert option.positional or option.flag in shown.output.replace(",", " ").split()
    examples = [line for line in shown.output.splitlines() if line.strip().startswith("$")]
    assert all("anabranch" in line for line in examples)


OPTIONS: dict[tuple[str, ...], type] = {
    ("generate",): GenerateOptions,
    ("quantize",): QuantizeOptions,
    ("serve",): ServeCommandOptions,
    **{("bench", name): AttentionOptions for name in ATTENTION},
    **{("bench", name): kind for name, kind in (commands.OPTIONS | ENGINE).items()},
}


def value_of(option: Option) -> Any:
    """A value that is not the default and that every check lets pass."""
    if option.type is bool:
        return not option.default
    if option.metavar and "|" in option.metavar:
        return next(each for each in option.metavar.split("|") if each != option.default)
    special = {
        "device": "cpu",
        "sweep": "1,2",
        "cases": "2x3",
        "impls": "anabranch",
        "peer": "transformers",
    }
    special |= {"contexts": "7,8", "extra_body": '{"a": 1}', "range_ratio": 0.5, "vanish": 0.5}
    if option.name in special:
        return special[option.name]
    return {int: 7, float: 1.5, str: "text", Path: Path("file")}[option.type]


@pytest.mark.parametrize("kind", OPTIONS.values(), ids=lambda kind: kind.__name__)
def test_every_option_can_be_read_from_a_command_line(kind: type) -> None:
    """Each option by itself, off its default: the dataclass receives what was typed."""
    seen: list[Any] = []
    parser = new_app()
    add_command(parser, "x", kind, seen.append)
    needs = {"draft_model": ("--speculative", "draft")}
    loads = {"compare": ("--launch", "m"), "plot": ("--sweep", "1")}
    needs |= loads if hasattr(kind, "launch") else {}
    for option in options_of(kind):
        value = value_of(option)
        if option.name == "cases" and hasattr(kind, "batch"):
            value = "2x3x4"
        if option.name == "speculative":
            value = "ngram" if option.default == "off" else "off"
        arguments = [*needs.get(option.name, ()), option.flag, str(value)]
        if option.type is bool:
            arguments = [option.flag if value else option.off_flag]
        elif option.positional:
            arguments = [str(value)]
        done = CliRunner().invoke(parser, arguments)
        assert done.exit_code == 0, (arguments, done.output)
        expected = (value,) if option.repeatable else value
        assert getattr(seen.pop(), option.name) == expected != option.default


def test_serve_offers_what_others_have() -> None:
    flags = {option.flag for option in options_of(ServeCommandOptions)}
    assert {"--kv-cache-gib", "--page-size", "--prefix-caching"} <= flags
    assert "--max-num-batched-tokens" in flags
    config = ServingOptions(
        kv_cache_gib=0.5, page_size=32, prefix_caching=False, max_num_batched_tokens=64
    ).engine_config()
    assert (config["kv_cache_gib"], config["page_size"]) == (0.5, 32)
    assert (config["prefix_caching"], config["max_num_batched_tokens"]) == (False, 64)


def test_sparse_attention_turns_drafts_off() -> None:
    for kind in (GenerateOptions, ServeCommandOptions):
        given: Any = {"prompt": "x"} if kind is GenerateOptions else {}
        assert kind(**given).speculative == "ngram"
        config = kind(**given, sparse="pages").engine_config()
        assert config["speculative"] is None and config["sparse"]["method"] == "pages"
        with pytest.raises(ValueError, match="--sparse pages excludes --speculative ngram"):
            kind(**given, sparse="pages", speculative="ngram")


def test_version() -> None:
    import anabranch

    done = invoke("--version")
    assert done.exit_code == 0 and done.output == f"anabranch {anabranch.__version__}\n"


HELP_SCRIPT = """
import sys
from typer.testing import CliRunner
from anabranch.llm.cli.command_group import app
for words in ([], ["generate"], ["serve"], ["bench"], ["bench", "latency"], ["bench", "serve"],
              ["bench", "decode"]):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
heavy = {"torch", "transformers", "numpy", "fastapi", "rich", "matplotlib", "httpx", "triton"}
print(sorted(heavy & set(sys.modules)))
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_generate_and_serve_import_no_benchmark() -> None:
    script = (
        "import sys, anabranch.llm.cli.generate, anabranch.llm.cli.serve, "
        "anabranch.llm.cli.printed_answer, anabranch.llm.cli.step_times\n"
        "print([name for name in sys.modules if name.startswith('anabranch.llm.bench')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_command_says_what_it_needs() -> None:
    code = "import sys; sys.modules['typer'] = None; from anabranch.llm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "anabranch[bench]" in done.stderr


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


def test_a_quantised_cache_is_reported(model: str) -> None:
    given = (PROMPT, "--max-tokens", "3", "--kv-cache-dtype", "int8/fp8")
    summary = json.loads(generate(model, *given, "--json").stdout)["summary"]
    assert (summary["kv_cache_dtype"], summary["saturated_elements"]) == ("int8/fp8", 0)
    assert "int8/fp8, 0 elements saturated" in generate(model, *given).stderr


def test_speculation_changes_no_token(model: str) -> None:
    tokens: list[str] = []
    for method in ("ngram", "off"):
        options = ("--speculative", method, "--max-tokens", "20", "--ignore-eos", "--seed", "3")
        tokens.append(generate(model, PROMPT, *options).stdout)
    assert tokens[0] == tokens[1]


def test_prompt_from_a_file_or_a_pipe(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    options = ("--max-tokens", "4", "--temperature", "0")
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
        ((PROMPT, "--kv-cache-dtype", "fp4"), "'fp4'"),
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
        (("--kv-cache-dtype", "int9"), "kv_cache_dtype must be one of auto, "),
        (("--api-key", ""), "api_key must not be empty"),
        (("--header-seconds", "0"), "header_seconds must be above 0 and finite, got 0.0"),
        (("--max-engine-restarts", "-1"), "max_restarts must be at least 0, got -1"),
        (("--model-that-is-none",), "--model-that-is-none"),
    ],
)
def test_serve_refuses_before_it_loads(arguments: tuple[str, ...], said: str) -> None:
    pytest.importorskip("uvicorn")
    done = invoke("serve", "dummy:nothing", *arguments)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.output


def test_serve_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "anabranch.llm.server.command.serve",
        lambda config, **more: seen.update(more, config=config),
    )
    flags = ("--cors-origin", "https://a", "--cors-origin", "https://b", "--body-seconds", "5",
             "--max-engine-restarts", "0", "--page-size", "32", "--no-prefix-caching",
             "--kv-cache-dtype", "q8_0/fp8")  # fmt: skip
    done = invoke("serve", "dummy:nothing", *flags)
    assert done.exit_code == 0, done.output
    assert seen["cors_origins"] == ("https://a", "https://b") and not seen["max_engine_restarts"]
    assert seen["limits"].body_seconds == 5.0 and seen["limits"].header_seconds == 20.0
    assert (seen["config"].page_size, seen["config"].prefix_caching) == (32, False)
    assert seen["config"].cache_formats == ("q8_0", "fp8")


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
                  "--out", str(out))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Avg latency: ") and str(out) in done.stdout
    assert json.loads(out.read_text())["options"]["output_len"] == 3
    bad = invoke("bench", "latency", "--model", model, "--batch", "0")
    assert bad.exit_code == 2 and "--batch must be at least 1, got 0" in bad.stderr


def test_the_command_line_needs_no_engine() -> None:
    code = (
        "import sys\n"
        "for name in ('transformers', 'tokenizers', 'safetensors'): sys.modules[name] = None\n"
        "import anabranch.llm.cli.command_group\n"
        "import anabranch.llm.bench.commands, attention_bench.case_runner"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
