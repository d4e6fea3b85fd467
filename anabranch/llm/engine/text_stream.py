"""The text of tokens as they arrive, ended by stop strings.

Pieces of text join to the tokenizer's text of all tokens. A piece is final once no later token can
change it. A character may be cut in half by tokens of bytes. With byte fallback (`<0xE4>`), a run
of such tokens is text only if all its bytes are UTF-8, and one replacement character a byte
otherwise, so it is final when the run ends.

Stop strings are all looked for at once (Aho and Corasick, 1975), a step for each character. A
state is the longest end of the text that begins a stop string. It says both what was found and how
much of the text may still turn out to be the beginning of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PROMPT_TAIL = 6  # tokens of the prompt that decide how the first one after them is written
MOST_PENDING = 16  # tokens that may wait for the end of a character before some are settled
UTF8_BYTES = 4  # of a character at most, each of which may be a token
START = 0  # the state before any text


class TokenDecoder(NamedTuple):
    """What a tokenizer does with its tokens."""

    decode: Callable[[Sequence[int]], str]
    is_text: Callable[[int], bool]  # whether a token is in the vocabulary and not left out
    bytes_of: dict[int, int]  # of byte fallback
    clean: Callable[[str], str] | None  # what transformers does to the text in the end


@lru_cache(maxsize=16)
def token_decoder(tokenizer: Any, skip_special: bool) -> TokenDecoder:
    """Of a fast tokenizer of transformers, or of one that needs no library."""
    own = getattr(tokenizer, "byte_level", None)
    if own is not None:
        decode = partial(own.decode, skip_special_tokens=skip_special)
        is_text = partial(own.is_text, skip_special_tokens=skip_special)
        return TokenDecoder(decode, is_text, {}, None)
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().items()
    skipped = {token for token, entry in added if entry.special} if skip_special else set[int]()
    bytes_of = dict[int, int]()
    if b"ByteFallback" in (backend.decoder.__getstate__() if backend.decoder else b""):
        named = {f"<0x{byte:02X}>": byte for byte in range(256)}
        found = {backend.token_to_id(name): byte for name, byte in named.items()}
        bytes_of = {token: byte for token, byte in found.items() if token is not None}

    def decode(ids: Sequence[int]) -> str:
        return backend.decode(ids, skip_special_tokens=skip_special)

    def is_text(token: int) -> bool:
        return token not in skipped and backend.id_to_token(token) is not None

    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    cleans = cleans and type(backend.model).__name__ != "BPE"
    clean = tokenizer.clean_up_tokenization if cleans else None
    return TokenDecoder(decode, is_text, bytes_of, clean)


class Detokeniser:
    """`text` is final, `pending` what would follow it if no token came any more."""

    def __init__(self, texts: TokenDecoder, prompt: Sequence[int] = ()) -> None:
        self._texts = texts
        self.text = ""
        self._unclean = ""  # final but for cleaning
        self._run: list[int] = []  # of byte fallback
        self._waiting: list[int] = []
        context = list(islice(filter(texts.is_text, reversed(prompt)), PROMPT_TAIL))[::-1]
        if texts.bytes_of:
            context = context[-1:]
        elif texts.decode(context).endswith(REPLACEMENT):
            context = []  # the rest of a character would repeat what is before it
        self._remember(context)

    def push(self, token: int) -> None:
        if not self._texts.is_text(token):
            return
        if token in self._texts.bytes_of:
            if self._waiting:
                self._settle(self._waiting_text(), self._waiting)
                self._waiting = []
            self._run.append(token)
            return
        if self._run:
            self._settle(self._run_text(), self._run[-1:])
            self._run = []
        self._waiting.append(token)
        new = self._waiting_text()
        if new and not new.endswith(REPLACEMENT):
            self._settle(new, self._waiting)
            self._waiting = []
        elif len(self._waiting) >= MOST_PENDING:
            self._settle_some(new)

    @property
    def pending(self) -> str:
        """Text that a later token may change."""
        rest = self._unclean
        if self._run:
            rest += self._run_text()
        elif self._waiting:
            rest += self._waiting_text()
        return self._texts.clean(rest) if self._texts.clean else rest

    def _remember(self, context: Sequence[int]) -> None:
        """Later tokens are decoded after these, which are text already."""
        self._context = list(context)
        self._context_text = self._texts.decode(context) if context else ""

    def _settle(self, text: str, tokens: Sequence[int]) -> None:
        self._remember(tokens)
        if self._texts.clean is None:
            self.text += text
            return
        self._unclean += text
        cut = _clean_cut(self._unclean)
        self.text += self._texts.clean(self._unclean[:cut])
        self._unclean = self._unclean[cut:]

    def _settle_some(self, new: str) -> None:
        """Make room among tokens that end no character: all but the last are final."""
        for count in range(len(self._waiting) - UTF8_BYTES, 0, -1):
            some, rest = self._waiting[:count], self._waiting[count:]
            text = _added(self._context_text, self._texts.decode([*self._context, *some]))
            after = _added(self._texts.decode(some), self._texts.decode([*some, *rest]))
            if text + after == new:
                self._settle(text, some)
                self._waiting = rest
                return

    def _waiting_text(self) -> str:
        decoded = self._texts.decode([*self._context, *self._waiting])
        return _added(self._context_text, decoded)

    def _run_text(self) -> str:
        if not self._context:  # the beginning of a text may be stripped
            return self._texts.decode(self._run)
        run = bytes(self._texts.bytes_of[token] for token in self._run)
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


def _added(before: str, after: str) -> str:
    """What `after` has more than `before`, its beginning unless a decoder looks back."""
    if after.startswith(before):
        return after[len(before) :]
    pairs = zip(before, after, strict=False)
    return after[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def _clean_cut(text: str) -> int:
    """Where text can be cut before cleaning: what is cleaned is a space and up to three more."""
    for cut in range(len(text), 2, -1):
        if " " not in text[cut - 3 : cut]:
            return cut
    return 0


class StopStrings:
    """An automaton of some strings, none empty; it does not change and may be shared."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]  # of each state: the states one character on
        self._shorter = [START]  # the state of the next shorter end of the text
        self._found: list[int] = [0]  # length of the longest string that ends here, or 0
        self._open = [0]  # length of the longest end of the text that something may follow
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _add(self, string: str) -> None:
        state = START
        for letter in string:
            following = self._next[state]
            if letter not in following:
                following[letter] = len(self._next)
                self._next.append({})
                self._shorter.append(START)
                self._found.append(0)
                self._open.append(0)
            state = following[letter]
        self._found[state] = len(string)

    def _link(self) -> None:
        """Shorter states are complete before longer ones."""
        waiting = deque((state, 1) for state in self._next[START].values())
        while waiting:
            state, length = waiting.popleft()
            shorter = self._shorter[state]
            self._found[state] = self._found[state] or self._found[shorter]
            self._open[state] = length if self._next[state] else self._open[shorter]
            for letter, longer in self._next[state].items():
                self._shorter[longer] = self.step(shorter, letter)
                waiting.append((longer, length + 1))

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(letter)) is None:
            if state == START:
                return START
            state = self._shorter[state]
        return following

    def found(self, state: int) -> int:
        """Length of the longest string that ends here; 0 if none does."""
        return self._found[state]

    def held(self, state: int) -> int:
        """Characters at the end of the text that may begin a string."""
        return self._open[state]


NO_STOPS = StopStrings()


class TextStream:
    """The text of one continuation.

    Text may lag behind tokens: some of it depends on the tokens that follow. Text that may turn
    out to be the beginning of a stop string is held back from `stable_text` as well. Of several
    stop strings the first to be complete ends the text, and the longest of those.
    """

    def __init__(
        self,
        tokenizer: Any | None,  # a fast tokenizer of transformers
        *,
        prompt: Sequence[int] = (),
        stop: StopStrings = NO_STOPS,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._pieces: Detokeniser | None = None
        if tokenizer is not None:
            self._pieces = Detokeniser(token_decoder(tokenizer, skip_special), prompt)
        self._stop = stop
        self._state, self._num_read = START, 0  # of the stop strings, after this much final text
        self._include_stop = include_stop
        self._floor = 0  # characters in which no stop string counts
        self._whole: str | None = None  # up to a stop string
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; whether it completes a stop string, with or before which the text ends."""
        if self._pieces is None:
            return False
        self._pieces.push(token)
        if not self._stop:
            return False
        if not may_stop:
            self._floor = len(self.text)
        final = self._pieces.text
        end, self._state = self._read(final, self._num_read, self._state)
        self._num_read = len(final)
        if end is None and (pending := self._pieces.pending):
            end, _ = self._read(final + pending, len(final), self._state)
        if end is None:
            return False
        place, stop = end
        text = self.text
        begin = place - stop
        self.stopped_by = text[begin:place]
        self._whole = text[: place if self._include_stop else begin]
        return True

    def _read(self, text: str, start: int, state: int) -> tuple[tuple[int, int] | None, int]:
        """Where the first stop string ends and its length, if one does; the state at the end."""
        stop = self._stop
        for place in range(start, len(text)):
            state = stop.step(state, text[place])
            if (length := stop.found(state)) and place >= self._floor:
                return (place + 1, length), state
        return None, state

    @property
    def text(self) -> str:
        """All of it, as if no token followed."""
        if self._whole is not None:
            return self._whole
        return self._pieces.text + self._pieces.pending if self._pieces else ""

    @property
    def stable_text(self) -> str:
        """The text that no later token can take back."""
        if self._whole is not None or self._pieces is None:
            return self.text
        text = self._pieces.text
        return text[: len(text) - self._stop.held(self._state)]
