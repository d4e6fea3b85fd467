"""Which pages are in use, and which content the others still hold.

A page is counted by its users. Released, it waits at the end of a queue with its content still
findable by digest, and is taken from the front when a page is needed: the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict


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
        """Pages nobody uses, with or without findable content."""
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
