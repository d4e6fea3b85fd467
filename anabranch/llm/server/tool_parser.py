"""Calls of tools in an answer, as its text arrives."""

from __future__ import annotations

import json
from typing import Any, cast

from anabranch.llm.server.answer_pieces import AnswerPiece, MarkedText, PieceKind
from anabranch.llm.server.tool_format import ToolFormat

LONGEST_HEAD = 4096  # characters of a call before its arguments, or of one written otherwise
_BETWEEN = " \t\r\n,;]}`"


class JsonValueEnd:
    """Counts brackets outside strings. Values are objects, arrays or strings; others end at once.

    `push` says how much of a piece belongs to the value, and `done` whether it is complete.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Characters up to the end of the value; all of them if it goes on."""
        for place, mark in enumerate(text):
            self._take(mark)
            if self.done:
                return place + 1
        return len(text)

    def _take(self, mark: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._in_string = False
                self.done = not self._depth
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


class ToolParser:
    """Reads text until a mark or a bare object begins a call, then its name and arguments.

    What begins like a call and turns out not to be one is text.
    """

    def __init__(self, written: ToolFormat) -> None:
        self._format = written
        self._marks = (*written.opens, *([written.closes] if written.closes else ()))
        self._text = MarkedText()
        self._state = self._begin if written.bare else self._content
        self._end = JsonValueEnd()
        self._opened = ""  # what the head came after, to be text if it is none
        self._spaces = ""  # written only if text follows

    def push(self, text: str, *, final: bool) -> list[AnswerPiece]:
        self._text.push(text)
        pieces: list[AnswerPiece] = []
        while self._state(pieces, final):
            pass
        if final:
            rest, self._text.held = self._text.held, ""
            if self._state == self._head:
                pieces += [AnswerPiece(PieceKind.TEXT, self._opened + rest)]
            elif self._spaces and not any(piece.kind is PieceKind.CALL for piece in pieces):
                pieces += [AnswerPiece(PieceKind.TEXT, self._spaces)]
        return pieces

    def _begin(self, pieces: list[AnswerPiece], final: bool) -> bool:
        """An answer that is an object with a name is a call."""
        start = self._text.held.lstrip()
        if not start:
            return False
        self._state = self._head if start[0] == "{" else self._content
        return True

    def _content(self, pieces: list[AnswerPiece], final: bool) -> bool:
        before, mark = self._text.take(self._marks, final=final)
        self._write(pieces, before)
        if mark is None:
            return False
        if mark in self._format.opens:
            self._spaces, self._opened, self._state = "", mark, self._head
        return True

    def _write(self, pieces: list[AnswerPiece], text: str) -> None:
        whole = self._spaces + text
        kept = whole.rstrip()
        self._spaces = whole[len(kept) :]
        if kept:
            pieces.append(AnswerPiece(PieceKind.TEXT, kept))

    def _head(self, pieces: list[AnswerPiece], final: bool) -> bool:
        held = self._text.held
        match = self._format.head.match(held)
        if match is not None and (self._format.has_header or match.end() < len(held)):
            pieces.append(AnswerPiece(PieceKind.CALL, match[match.lastindex or 1]))
            self._text.held = held[match.end() :]
            self._end, self._state = JsonValueEnd(), self._arguments
            return True
        no_call = self._is_no_call()
        if not (self._format.has_header or no_call) and self._take_whole(pieces):
            return True
        if no_call or len(held) > LONGEST_HEAD:
            self._write(pieces, self._opened)
            self._opened, self._state = "", self._content  # a call may yet follow
            return True
        return False

    def _is_no_call(self) -> bool:
        if self._format.has_header:
            return False
        start = self._text.held.lstrip().removeprefix("[").lstrip()
        return bool(start) and start[0] != "{"

    def _take_whole(self, pieces: list[AnswerPiece]) -> bool:
        """A call whose object names its arguments first."""
        held = self._text.held
        begin = held.find("{")
        if begin < 0:
            return False
        end = JsonValueEnd()
        size = end.push(held[begin:])
        if not end.done:
            return False
        call = _loaded(held[begin : begin + size])
        name = call.get("name")
        if not isinstance(name, str):
            self._text.held = held[begin + size :]
            self._write(pieces, self._opened + held[: begin + size])
            self._opened, self._state = "", self._content
            return True
        arguments = call.get("arguments", call.get("parameters", {}))
        pieces += [
            AnswerPiece(PieceKind.CALL, name),
            AnswerPiece(PieceKind.ARGUMENTS, json.dumps(arguments)),
        ]
        self._text.held, self._state = held[begin + size :], self._between
        return True

    def _arguments(self, pieces: list[AnswerPiece], final: bool) -> bool:
        size = self._end.push(self._text.held)
        if size:
            pieces.append(AnswerPiece(PieceKind.ARGUMENTS, self._text.held[:size]))
        self._text.held = self._text.held[size:]
        if self._end.done:
            self._state = self._between
        return self._end.done

    def _between(self, pieces: list[AnswerPiece], final: bool) -> bool:
        """After a call: the next one, or text."""
        held = self._text.held.lstrip(_BETWEEN)
        if self._format.closes:
            held = held.removeprefix(self._format.closes).lstrip(_BETWEEN)
        self._text.held = held
        if not held or (self._format.closes.startswith(held) and not final):
            return False
        again = held[0] == "{" and (self._format.listed or self._format.bare)
        self._opened, self._state = "", self._head if again else self._content
        return True


def _loaded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
