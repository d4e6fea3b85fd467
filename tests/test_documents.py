"""What documents list is what the code has: files, rooms, sources, producers, commands, options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")

from source_commands import ATTENTION, ENGINE, AttentionOptions

import anabranch
from anabranch.keys import KINDS
from anabranch.llm.bench import commands
from anabranch.llm.cli.command_group import MODULES
from anabranch.llm.cli.generate import GenerateOptions
from anabranch.llm.cli.options import options_of
from anabranch.llm.cli.quantize import QuantizeOptions
from anabranch.llm.cli.serve import ServeCommandOptions
from anabranch.merge import IMPLEMENTATIONS
from anabranch.producers import PRODUCERS

ROOT = Path(__file__).resolve().parents[1]
DESIGN, CONTRIBUTING, README = (
    (ROOT / f"{name}.md").read_text() for name in ("DESIGN", "CONTRIBUTING", "README")
)
ATTEND = (ROOT / "docs" / "attend.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
COMMANDS: dict[str, type] = {
    "generate": GenerateOptions,
    "serve": ServeCommandOptions,
    "quantize": QuantizeOptions,
    **{f"bench {name}": kind for name, kind in (commands.OPTIONS | ENGINE).items()},
    **{f"bench {name}": AttentionOptions for name in ATTENTION},
}


def first_cells(text: str, heading: str) -> list[str]:
    """The first column of the table below a line that begins like this."""
    lines = text[text.index(heading) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [line.split("|")[1].strip().replace("`", "") for line in table]


def files() -> set[str]:
    folders = ("anabranch", "benchmarks", "tests", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return {"/" + path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.parametrize("text", [DESIGN, CONTRIBUTING], ids=["DESIGN", "CONTRIBUTING"])
def test_files_that_are_named_exist(text: str) -> None:
    known = files()
    named = set(re.findall(r"`([\w/]+\.(?:py|c|h|cu))`", text))
    assert len(named) > 20 or text is CONTRIBUTING
    assert not {x for x in named if not any(path.endswith("/" + x) for path in known)}


def test_every_room_is_described() -> None:
    package = ROOT / "anabranch"
    rooms = {path.parent for path in package.rglob("__init__.py")} - {package, package / "llm"}
    missing = {
        room.relative_to(ROOT).as_posix()
        for room in rooms
        if f"`{room.relative_to(ROOT).as_posix()}/" not in DESIGN
        and f"`{room.parent.relative_to(ROOT).as_posix()}/`" not in DESIGN
    }
    assert not missing


def test_key_sources() -> None:
    named = [cell.partition("(")[0] for cell in first_cells(ATTEND, "| keys |")]
    assert {*named} == {source.__name__ for source in KINDS.values()}
    for text in (inspect.getdoc(anabranch.attend) or "", DESIGN):
        assert all(name in text for name in named)


def test_parameters_of_attend() -> None:
    given = [*inspect.signature(anabranch.attend).parameters][2:]
    assert first_cells(ATTEND, "| option |") == given


def test_implementations() -> None:
    named = {cell.strip('"') for cell in first_cells(ATTEND, "| | `attend` |")}
    assert named == {*PRODUCERS, *IMPLEMENTATIONS}
    text = inspect.getdoc(anabranch.attend) or ""
    assert all(f'"{name}"' in text for name in PRODUCERS)


def commands_of_the_readme() -> Iterator[str]:
    table = README[README.index("| command | what it does |") :].partition("\n\n")[0]
    for cell in re.findall(r"^\| `anabranch ([^`]*)`", table, re.MULTILINE):
        first, *others = (part.strip() for part in cell.split("\\|"))
        words = first.split()
        if words[0] != "bench":
            yield words[0]
            continue
        yield from (f"bench {name}" for name in (words[1], *others))


def test_commands() -> None:
    assert {*COMMANDS} == {*commands_of_the_readme()}
    assert {*MODULES} == {name.split()[0] for name in COMMANDS}


def test_options_of_commands() -> None:
    """Every option that a document gives to a command is one of that command."""
    seen, unknown = 0, list[tuple[str, str]]()
    for path in DOCUMENTS:
        for line in re.findall(r"anabranch ((?:bench )?\w+ [^`\n#]*)", path.read_text()):
            name = next((x for x in COMMANDS if line.startswith(f"{x} ")), None)
            if name is None:
                continue
            options = options_of(COMMANDS[name])
            flags = {flag for each in options for flag in (each.flag, each.off_flag) if flag}
            for flag in re.findall(r"(?<!\S)--[a-z-]+", line):
                seen += 1
                if flag not in flags | {"--help"}:
                    unknown.append((path.name, f"{name} {flag}"))
    assert seen > 20
    assert not unknown
