"""The pool of pages and the pages of sequences: counts, order, digests, shared prefixes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.llm.runner.kv_cache import LayerShape, allocate_layers, page_bytes
from anabranch.llm.sequences.page_pool import PagePool, SequencePages, page_digest

NUM_PAGES, PAGE = 5, 4
DIGESTS = st.integers(0, 7).map(lambda n: bytes([n]))


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model of it: users by page, and free pages in the order of their taking."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.users = dict.fromkeys(range(NUM_PAGES), 0)
        self.free = list(range(NUM_PAGES))
        self.content: dict[int, bytes] = {}

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        page = self.pool.take()
        assert page == self.free.pop(0)
        assert self.users[page] == 0
        self.content.pop(page, None)
        self.users[page] = 1

    @rule(digest=DIGESTS)
    def find_and_share(self, digest: bytes) -> None:
        page = self.pool.find(digest)
        assert page == next((p for p, d in self.content.items() if d == digest), None)
        if page is None:
            return
        if not self.users[page]:
            self.free.remove(page)
        self.pool.share(page)
        self.users[page] += 1

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def release(self, page: int) -> None:
        if not self.users[page]:
            with pytest.raises(AssertionError, match=f"page {page}"):
                self.pool.release(page)
            return
        self.pool.release(page)
        self.users[page] -= 1
        if not self.users[page]:
            self.free.insert(len(self.free) if page in self.content else 0, page)

    @rule(page=st.integers(0, NUM_PAGES - 1), digest=DIGESTS)
    def remember(self, page: int, digest: bytes) -> None:
        if not self.users[page]:
            return
        self.pool.remember(page, digest)
        if page not in self.content and digest not in self.content.values():
            self.content[page] = digest

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free) == sum(not n for n in self.users.values())
        assert self.pool.usage == pytest.approx(1 - len(self.free) / NUM_PAGES)


TestPool = PoolMachine.TestCase


def make(pool: PagePool, tokens: list[int], root: bytes = b"") -> SequencePages:
    pages = SequencePages(pool, PAGE, root)
    matched = pages.match_prefix(tokens)
    assert pages.grow(len(tokens))
    pages.remember(tokens, len(tokens))
    assert matched < max(len(tokens), 1)
    return pages


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=6))
def test_a_match_is_the_longest_known_prefix_and_never_the_last_token(
    prompts: list[list[int]],
) -> None:
    pool = PagePool(64)
    known: set[tuple[int, ...]] = set()
    for tokens in prompts:
        pages = SequencePages(pool, PAGE)
        full = (len(tokens) - 1) // PAGE * PAGE
        expected = next((n for n in range(full, 0, -PAGE) if tuple(tokens[:n]) in known), 0)
        assert pages.match_prefix(tokens) == expected
        assert pages.grow(len(tokens))
        pages.remember(tokens, len(tokens))
        known |= {tuple(tokens[:n]) for n in range(PAGE, len(tokens) + 1, PAGE)}
        assert len(pages.pages) == -(-len(tokens) // PAGE)
        pages.release()
    assert pool.num_free == pool.num_pages


def test_sequences_that_share_a_prefix_hold_the_same_pages() -> None:
    pool = PagePool(8)
    first = make(pool, list(range(10)))
    second = make(pool, [*range(8), 99, 98])
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    assert pool.num_free == 4
    first.release()
    assert pool.num_free == 5, "shared pages stay with the other"


def test_equal_pages_behind_different_prefixes_differ() -> None:
    assert page_digest(page_digest(b"", [1]), [3]) != page_digest(page_digest(b"", [2]), [3])
    pool = PagePool(8)
    make(pool, [1, 1, 1, 1, 5, 5, 5, 5, 0]).release()
    assert SequencePages(pool, PAGE).match_prefix([2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert SequencePages(pool, PAGE).match_prefix([5, 5, 5, 5, 0]) == 0


def test_roots_keep_prefixes_apart() -> None:
    pool = PagePool(8)
    make(pool, list(range(9)), b"a").release()
    assert SequencePages(pool, PAGE, b"b").match_prefix(list(range(9))) == 0
    assert SequencePages(pool, PAGE, b"a").match_prefix(list(range(9))) == 8


def test_only_computed_pages_are_found() -> None:
    pool = PagePool(8)
    pages = SequencePages(pool, PAGE)
    tokens = list(range(12))
    pages.grow(12)
    pages.remember(tokens, 7)
    other = SequencePages(pool, PAGE)
    assert other.match_prefix(tokens) == 4
    other.release()
    pages.remember(tokens, 12)
    assert SequencePages(pool, PAGE).match_prefix(tokens) == 8


def test_pages_are_found_without_the_draft_models_keys() -> None:
    """Only pages that it has computed to their end count, from the first on, until taken."""
    pool, tokens = PagePool(5), list(range(17))
    first = SequencePages(pool, PAGE)
    assert first.grow(16)
    first.remember(tokens, 16)
    assert first.num_drafted == 0
    first.mark_drafted(2 * PAGE + 3)
    first.mark_drafted(PAGE)
    assert first.num_drafted == 2 * PAGE
    second = SequencePages(pool, PAGE)
    assert (second.match_prefix(tokens), second.num_drafted) == (16, 8)
    second.mark_drafted(12)
    third = SequencePages(pool, PAGE)
    assert (third.match_prefix(tokens), third.num_drafted) == (16, 12)
    third.release()
    second.mark_drafted(16)
    assert (third.match_prefix(tokens), third.num_drafted) == (16, 16)
    for each in (first, second, third):
        each.release()
        assert each.num_drafted == 0
    other = SequencePages(pool, PAGE)
    assert other.grow(20)
    other.remember(tokens, 16)
    assert not any(pool.is_drafted(page) for page in other.pages), "keys of other tokens"


def test_a_preempted_sequence_finds_its_own_pages_until_they_are_taken() -> None:
    pool = PagePool(4)
    tokens = list(range(13))
    pages = make(pool, tokens)
    pages.release()
    other = make(pool, [50, 51, 52])  # takes what holds nothing, then the tail of the prefix
    assert pages.match_prefix(tokens) == 12
    pages.release()
    big = SequencePages(pool, PAGE)
    assert not big.grow(16) and pool.num_free == 3, "all or none"
    assert big.grow(8)
    assert pages.match_prefix(tokens) == 4, "a prefix outlives what follows it"
    for each in (big, pages, other):
        each.release()
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("size", "theirs", "promised"),
    [
        (9, [*range(12)], 8),
        (8, [*range(12)], 4),  # the last token is computed for its logits
        (9, [*range(8)], 8),
        (9, [*range(7)], 4),
        (9, [0, 1, 2, 3, 4, 50, 6, 7, 8], 4),
        (9, [50, *range(1, 12)], 0),
        (4, [*range(12)], 0),
    ],
)
def test_whole_pages_that_another_is_to_compute_are_promised(
    size: int, theirs: list[int], promised: int
) -> None:
    pool, tokens = PagePool(NUM_PAGES), list(range(size))
    mine, other = SequencePages(pool, PAGE), SequencePages(pool, PAGE)
    assert mine.num_promised(tokens, other, theirs) == promised
    assert mine.num_promised(tokens, SequencePages(pool, PAGE, b"apart"), theirs) == 0
    assert other.grow(len(theirs))
    other.remember(theirs, PAGE)
    assert mine.num_promised(tokens, other, theirs) == 0, "a page is there to be shared"
    assert mine.match_prefix(tokens) == (PAGE if promised else 0)
    assert mine.num_promised(tokens, other, theirs) == max(promised - PAGE, 0)


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="got 0"):
        PagePool(0)


def test_bytes_are_what_is_allocated() -> None:
    layers = [LayerShape(2, 24, 8, torch.float16), LayerShape(1, 4, 4, torch.float32)]
    caches = allocate_layers(layers, 3, PAGE, torch.device("cpu"))
    assert sum(c.k.nbytes + c.v.nbytes for c in caches) == 3 * page_bytes(layers, PAGE)
    assert caches[0].k.shape == (3, PAGE, 2, 24) and caches[0].v.shape == (3, PAGE, 2, 8)
    assert not any(c.k.any() or c.v.any() for c in caches)
