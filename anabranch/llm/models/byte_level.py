"""Byte-level BPE as GPT-2 cuts words, over mapped tables: the tokenizers library takes 20 MB more.

Text is cut by classes of characters. Unicode's versions differ in characters that are new, so text
that has any is left to the library, and so are tokenizers of other kinds.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.kernels.cpu.merge_pairs import BytePairs, merge_pairs
from anabranch.kernels.cpu.native import native
from anabranch.launches.build_cache import DIGEST_BYTES, build_once

if TYPE_CHECKING:
    import numpy.typing as npt

FORM = "2"  # of the tables, and which files have some
ALIGNMENT = 8
FIRST_OTHER = 128  # that is not ASCII
WORDS = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
DIGITS = re.compile("[0-9]|[^0-9]+")
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
# What a model and added tokens may say; anything else is for the library.
MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class Shapes:
    """ASCII characters of the same class as others; None, which leaves them out, for new ones."""

    def __getitem__(self, code: int) -> str | None:
        return chr(code) if code < FIRST_OTHER else _shape(chr(code))


def _shape(character: str) -> str | None:
    kind = unicodedata.category(character)
    if kind in ("Cn", "Cs") or unicodedata.ucd_3_2_0.category(character) != kind:
        return None
    is_space = kind[0] == "Z" or character == "\x85"
    return {"L": "a", "N": "1"}.get(kind[0], "\t" if is_space else "!")


class ByteLevelTokens:
    """A vocabulary: `encode` and `decode` as the tokenizers library does them."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(data[:8], "little")
        facts: dict[str, Any] = json.loads(data[8 : 8 + size])
        arrays = _read(data, 8 + size, facts["arrays"])
        self._pairs = BytePairs(arrays["byte_tokens"], arrays["keys"], arrays["merged"])
        self._ends, self._bytes = arrays["ends"], arrays["bytes"]
        self._has_single_digits: bool = facts["single_digits"]
        self._before, self._after = facts["around"]
        self.added: dict[str, int] = facts["added"]
        self._special = frozenset[int](facts["special"])
        longest_first = sorted(self.added, key=len, reverse=True)
        self._cuts = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def __len__(self) -> int:
        return len(self._ends)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """The tokens of a text; None where the library is needed."""
        found = list[int]()
        for piece in self._cuts.split(text) if self.added else [text]:
            if piece in self.added:
                found.append(self.added[piece])
                continue
            tokens = self._encode(piece)
            if tokens is None:
                return None
            found += tokens
        return [*self._before, *found, *self._after] if add_special_tokens else found

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens; those that there are not are left out."""
        kept = (token for token in tokens if self.is_text(token, skip_special_tokens))
        return b"".join(map(self._token, kept)).decode(errors="replace")

    def is_text(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether a token is in the vocabulary and not left out."""
        return 0 <= token < len(self) and not (skip_special_tokens and token in self._special)

    def _token(self, token: int) -> bytes:
        start = self._ends[token - 1] if token else 0
        return self._bytes[start : self._ends[token]].tobytes()

    def _encode(self, text: str) -> list[int] | None:
        shape = text if text.isascii() else text.translate(Shapes())
        if len(shape) != len(text):
            return None
        ends = np.fromiter(self._word_ends(shape), np.int64)
        data = text.encode()
        if len(data) != len(text):
            words = (text[start:end] for start, end in pairwise([0, *ends]))
            ends = np.cumsum([len(word.encode()) for word in words], dtype=np.int64)
        return merge_pairs(data, ends, self._pairs)

    def _word_ends(self, shape: str) -> Iterator[int]:
        if not self._has_single_digits:
            yield from (word.end() for word in WORDS.finditer(shape))
            return
        for run in DIGITS.finditer(shape):
            yield from (word.end() for word in WORDS.finditer(shape, *run.span()))


def byte_level_tokens(path: Path) -> ByteLevelTokens | None:
    """Of a `tokenizer.json`, over tables in the user's cache; None for other kinds."""
    if native() is None:
        return None
    content = path.read_bytes()
    identity = FORM, hashlib.sha256(content).hexdigest()
    tables = build_once("byte-level", identity, lambda: _tables(content))
    return ByteLevelTokens(tables) if tables.stat().st_size > DIGEST_BYTES else None


def _tables(content: bytes) -> bytes:
    """The tables of a file; nothing for other kinds, and for damaged files."""
    try:
        file = json.loads(content)
        facts = _facts(file)
        arrays = None if facts is None else _arrays(file["model"], facts["added"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return b""
    if facts is None or arrays is None:
        return b""
    facts["arrays"] = {name: (each.dtype.str, each.shape) for name, each in arrays.items()}
    text = json.dumps(facts).encode()
    data = len(text).to_bytes(ALIGNMENT, "little") + text
    for array in arrays.values():
        data += bytes(-len(data) % ALIGNMENT) + array.tobytes()
    return data


def _read(data: mmap.mmap, start: int, arrays: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, shape) in arrays.items():
        start += -start % ALIGNMENT
        each = np.frombuffer(data, kind, prod(shape), start)
        found[name] = each.reshape(shape)
        start += each.nbytes
    return found


def _facts(file: dict[str, Any]) -> dict[str, Any] | None:
    """What tables are not about; None where something is said that is not known here."""
    cutters = file["pre_tokenizer"]
    steps = cutters["pretokenizers"] if cutters["type"] == "Sequence" else [cutters]
    added, around = file["added_tokens"], _around(file["post_processor"])
    is_known = (
        all(file[name] is None for name in ("normalizer", "truncation", "padding"))
        and all(file["model"][name] == value for name, value in MODEL.items())
        and all(token[name] == value for token in added for name, value in ADDED.items())
        and all(token["content"] for token in added)
        and steps[:-1] in ([], [SINGLE_DIGITS])
        and BYTE_LEVEL.items() <= steps[-1].items()
        and file["decoder"]["type"] == "ByteLevel"
    )
    if not is_known or around is None:
        return None
    return {
        "single_digits": len(steps) > 1,
        "around": around,
        "added": {token["content"]: token["id"] for token in added},
        "special": [token["id"] for token in added if token["special"]],
    }


def _around(processor: dict[str, Any] | None) -> tuple[list[int], list[int]] | None:
    """The special tokens before and after a text."""
    if processor is None or processor["type"] == "ByteLevel":
        return [], []
    if processor["type"] != "TemplateProcessing":
        return None
    sides: tuple[list[int], list[int]] = [], []
    is_after = 0
    for step in processor["single"]:
        if "Sequence" in step:
            is_after += 1
        else:
            sides[is_after].extend(processor["special_tokens"][step["SpecialToken"]["id"]]["ids"])
    return sides if is_after == 1 else None


def _arrays(model: dict[str, Any], added: dict[str, int]) -> dict[str, npt.NDArray[Any]] | None:
    """The tables of a model; None where tokens have gaps or two have one id.

    The library numbers added tokens itself: as the model does, and those that are new in order.
    """
    ids: dict[str, int] = model["vocab"]
    new = [token for text, token in added.items() if text not in ids]
    if new != sorted(new) or any(ids.get(text, token) != token for text, token in added.items()):
        return None
    texts = {token: text for text, token in (ids | added).items()}
    if sorted(texts) != list(range(len(ids | added))):
        return None
    letters = _byte_letters()
    byte_of = {letter: byte for byte, letter in enumerate(letters)}

    def spelt(text: str) -> bytes:
        found = [byte_of.get(letter) for letter in text]
        known = [byte for byte in found if byte is not None]
        return bytes(known) if len(known) == len(found) else text.encode()

    spellings = [spelt(texts[token]) for token in range(len(texts))]
    merged: dict[int, tuple[int, int]] = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        merged[ids[left] << 32 | ids[right]] = rank, ids[left + right]
    keys = sorted(merged)
    return {
        "byte_tokens": np.array([ids.get(letter, -1) for letter in letters], np.int32),
        "keys": np.array(keys, np.int64),
        "merged": np.array([merged[key] for key in keys], np.int32).reshape(-1, 2),
        "ends": np.cumsum([len(each) for each in spellings], dtype=np.int32),
        "bytes": np.frombuffer(b"".join(spellings), np.uint8),
    }


def _byte_letters() -> list[str]:
    """The letters that stand for bytes: themselves, or from U+0100 on where they are no print."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
