"""Pages of the cache: which are in use, which content the others still hold, and whose they are.

A page is counted by its users. Released, it waits at the end of a queue with its content still
findable by digest, and is taken from the front when a page is needed: the least recently used.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Pages by number; no tensors here."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._users = [0] * num_pages
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._drafted: set[int] = set()  # pages that hold a draft model's keys as well
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    @property
    def num_free(self) -> int:
        """Free pages, with or without findable content."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pages in use."""
        return 1 - len(self._free) / self.num_pages

    def take(self) -> int:
        """A page for new content; the caller has seen that one is free."""
        page, _ = self._free.popitem(last=False)
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
        self._drafted.discard(page)
        self._users[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        """The page that holds this content, still unshared."""
        return self._page_of.get(digest)

    def share(self, page: int) -> None:
        """One more user of a page."""
        if not self._users[page]:
            del self._free[page]
        self._users[page] += 1

    def release(self, page: int) -> None:
        """One user less; a page without users keeps its content until it is taken."""
        assert self._users[page] > 0, f"page {page} is released more often than it was taken"
        self._users[page] -= 1
        if not self._users[page]:
            self._free[page] = None
            if page not in self._digest_of:  # nothing to keep: the first to be taken
                self._free.move_to_end(page, last=False)

    def remember(self, page: int, digest: bytes) -> None:
        """Make a full page findable; the first page with a content stays the findable one."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def mark_drafted(self, page: int) -> None:
        """The draft model has computed all of a page as well."""
        self._drafted.add(page)

    def is_drafted(self, page: int) -> bool:
        """Whether the draft model's keys of a page are there as well."""
        return page in self._drafted


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page's tokens and of everything before them."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class SequencePages:
    """A page table on the host, and the digests of full pages of the sequence's tokens.

    Tokens that were given once never change, so a digest is made once, however often a sequence
    waits for pages or gives them up.
    """

    def __init__(self, pool: PagePool, page_size: int, root: bytes = b"") -> None:
        self.pool = pool
        self.page_size = page_size
        self.root = root  # prefixes are shared among sequences of the same root only
        self.pages = array("i")  # as the device has them, so that a row is one copy
        self._digests: list[bytes] = []
        self._num_findable = 0  # pages that are full, computed and known to the pool
        self._num_drafted = 0  # pages at the front that the draft model has computed as well

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """Share the pages that hold a prefix of `tokens`; how many tokens that are.

        The last token is never matched: it must be computed for its logits.
        """
        assert not self.pages
        for index in range((len(tokens) - 1) // self.page_size):
            page = self.pool.find(self._digest(tokens, index))
            if page is None:
                break
            self.pool.share(page)
            self.pages.append(page)
        self._num_findable = len(self.pages)
        while self._num_drafted < len(self.pages):
            if not self.pool.is_drafted(self.pages[self._num_drafted]):
                break
            self._num_drafted += 1
        return len(self.pages) * self.page_size

    def num_promised(
        self, tokens: Sequence[int], other: SequencePages, theirs: Sequence[int]
    ) -> int:
        """How many tokens after those that were matched another sequence is yet to compute.

        tokens, theirs  of this sequence and the other
        """
        index, size = len(self.pages), self.page_size
        start, room = index * size, min(len(tokens) - 1, len(theirs))
        if other._num_findable > index or start + size > room or other.root != self.root:
            return 0
        if len(other._digests) < index or self._digest(tokens, index) != other._digest(
            theirs, index
        ):
            return 0
        pairs = zip(tokens[start:room], theirs[start:room], strict=True)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), room - start)
        return differs // size * size

    @property
    def num_drafted(self) -> int:
        """Tokens at the front whose pages hold the draft model's keys as well."""
        return self._num_drafted * self.page_size

    def mark_drafted(self, num_tokens: int) -> None:
        """The draft model has computed this many tokens; a page that it has not is not marked.

        Pages are found by what the target has computed. The draft model computes what it lacks of
        a page that was found, for all that share it.
        """
        full = num_tokens // self.page_size
        for page in self.pages[self._num_drafted : full]:
            self.pool.mark_drafted(page)
        self._num_drafted = max(full, self._num_drafted)

    def num_missing(self, num_tokens: int) -> int:
        """Pages to take before the sequence can hold this many tokens."""
        missing = -(-num_tokens // self.page_size) - len(self.pages)
        return missing if missing > 0 else 0

    def grow(self, num_tokens: int) -> bool:
        """Take pages for this many tokens, all or none; whether there were enough."""
        missing = self.num_missing(num_tokens)
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            self.pages.append(self.pool.take())
        return True

    def remember(self, tokens: Sequence[int], num_computed: int) -> None:
        """Make pages findable whose tokens are all known and computed."""
        full = min(num_computed, len(tokens)) // self.page_size
        while self._num_findable < full:
            index = self._num_findable
            self.pool.remember(self.pages[index], self._digest(tokens, index))
            self._num_findable += 1

    def release(self) -> None:
        """Give all pages back, the last first: a prefix outlives what follows it."""
        for page in reversed(self.pages):
            self.pool.release(page)
        del self.pages[:]
        self._num_findable = self._num_drafted = 0

    def _digest(self, tokens: Sequence[int], index: int) -> bytes:
        """Of a full page; those before it have been asked for already."""
        if index == len(self._digests):
            parent = self._digests[-1] if self._digests else self.root
            start = index * self.page_size
            self._digests.append(page_digest(parent, tokens[start : start + self.page_size]))
        return self._digests[index]
