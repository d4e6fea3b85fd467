"""Byte-level BPE beside the tokenizers library."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

from anabranch.kernels.cpu.native import native
from anabranch.llm.models import byte_level
from anabranch.llm.models.byte_level import ByteLevelTokens, byte_level_tokens

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")
SPECIAL = ["<end>", "<start>", "<start>more"]
TRAINING = ["The longest river in the world isn't 4,132 miles long.", "é中 déjà-vu 中文   \n\n x_y"]
LETTERS = [*" \n\t\x1c\x85\xa0\u3000", *"aeiIosStTlLrRvVmd'’.,_-1²Ⅷ5é中ßΩ𝐀", *SPECIAL, "<", "start"]


@pytest.fixture(autouse=True)
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are made by the code at hand."""
    native()
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))


def library(*, single_digits: bool = True) -> Tokenizer:
    """Merges of a few sentences; added tokens of which one begins another."""
    tokenizer = Tokenizer(models.BPE())
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens([AddedToken("added", normalized=False)])
    tokenizer.post_processor = TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 0)]
    )
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> ByteLevelTokens | None:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return byte_level_tokens(path)


@pytest.mark.parametrize("single_digits", [True, False])
def test_tokens(single_digits: bool, tmp_path: Path) -> None:
    theirs = library(single_digits=single_digits)
    ours = saved(theirs, tmp_path)
    assert ours is not None and len(ours) == theirs.get_vocab_size()
    draw = random.Random(0)
    texts = ["", *TRAINING, "is added to <start>more<end>", "a" * 512]
    texts += ["".join(draw.choices(LETTERS, k=draw.randrange(40))) for _ in range(2000)]
    for text in texts:
        for special in (False, True):
            expected = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == expected, text


def test_every_character_is_cut_as_the_library_cuts_it_or_left_to_it(tmp_path: Path) -> None:
    theirs = library()
    ours = saved(theirs, tmp_path)
    assert ours is not None
    for code in (*range(0x3000), *range(0x3000, sys.maxunicode, 97)):
        if unicodedata.category(chr(code)) == "Cs":
            continue
        text = "a{0}b {0}{0} {0}1{0} \n{0}'s".format(chr(code))
        found = ours.encode(text, add_special_tokens=False)
        assert found is None or found == theirs.encode(text, add_special_tokens=False).ids, code
        assert found is not None or code >= 128


def test_texts(tmp_path: Path) -> None:
    """Of bytes that are no characters, too, and of tokens that there are not."""
    theirs = library()
    ours = saved(theirs, tmp_path)
    assert ours is not None
    draw = random.Random(0)
    count = theirs.get_vocab_size()
    for _ in range(2000):
        tokens = draw.choices(range(count + 2), k=draw.randrange(12))
        for skip in (False, True):
            expected = theirs.decode(tokens, skip_special_tokens=skip)
            assert ours.decode(tokens, skip_special_tokens=skip) == expected
    assert [ours.is_text(token, True) for token in (-1, 0, 3, count - 1, count)] == (
        [False, False, True, True, False]
    )


def test_what_is_left_to_the_library(tmp_path: Path) -> None:
    ours = saved(library(), tmp_path)
    assert ours is not None
    for text in ("\U0001fae8", "\ud800", "a" * 513):  # new, no character, too long a word
        assert ours.encode(text, add_special_tokens=False) is None


def test_bytes_that_are_no_tokens(tmp_path: Path) -> None:
    theirs = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    ours = saved(theirs, tmp_path)
    assert ours is not None
    assert ours.encode("aba", add_special_tokens=True) == theirs.encode("aba").ids == [2, 0]
    assert ours.encode("abc", add_special_tokens=True) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.NFC()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"decoder": decoders.Fuse()},
        {"model": models.BPE({"a": 0}, [], ignore_merges=True)},
        {"model": models.WordLevel({"a": 0}, "a")},
    ],
    ids=str,
)
def test_other_kinds(change: dict[str, object], tmp_path: Path) -> None:
    tokenizer = library()
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert saved(tokenizer, tmp_path) is None


def without_cutters(file: dict[str, Any]) -> None:
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": []}


def text_twice(file: dict[str, Any]) -> None:
    file["post_processor"]["single"][1:1] = [{"Sequence": {"id": "A", "type_id": 0}}]


def token_without_text(file: dict[str, Any]) -> None:
    file["added_tokens"].append(file["added_tokens"][-1] | {"content": "", "id": NUM_TOKENS})


def ids_that_the_model_does_not_give(file: dict[str, Any]) -> None:
    first, second = file["added_tokens"][:2]
    first["id"], second["id"] = second["id"], first["id"]


def new_tokens_in_another_order(file: dict[str, Any]) -> None:
    last = file["added_tokens"][-1]
    file["added_tokens"].append(last | {"content": "new", "id": last["id"]})
    last["id"] += 1


NUM_TOKENS = library().get_vocab_size()


@pytest.mark.parametrize(
    "change",
    [
        without_cutters,
        text_twice,
        token_without_text,
        ids_that_the_model_does_not_give,
        new_tokens_in_another_order,
    ],
)
def test_files_that_the_library_reads_otherwise(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    library().save(str(path))
    file = json.loads(path.read_bytes())
    change(file)
    path.write_text(json.dumps(file))
    Tokenizer.from_file(str(path))
    assert byte_level_tokens(path) is None


def test_a_file_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables kept under its digest are its own."""
    build, path = byte_level.build_once, tmp_path / "tokenizer.json"
    library().save(str(path))

    def replace_first(*given: Any) -> Path:
        path.write_bytes(path.read_bytes().replace(b"<end>", b"<fin>"))
        return build(*given)

    monkeypatch.setattr(byte_level, "build_once", replace_first)
    ours = byte_level_tokens(path)
    assert ours is not None and "<end>" in ours.added


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    library().save(str(tmp_path / "tokenizer.json"))
    script = "import sys, pathlib; from anabranch.llm.models.byte_level import byte_level_tokens"
    script += "; print(len(byte_level_tokens(pathlib.Path(sys.argv[1]))))"
    command = [sys.executable, "-X", "utf8=0", "-c", script, str(tmp_path / "tokenizer.json")]
    places = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == str(NUM_TOKENS), run.stderr
