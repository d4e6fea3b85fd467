"""Which tokens run: budget, chunks, order, preemption, drafts, padding; nothing lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.llm.engine.scheduler import Scheduler
from anabranch.llm.runner.step_layout import Scorer, lay_out
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences import page_pool
from anabranch.llm.sequences.page_pool import PagePool, SequencePages, page_digest
from anabranch.llm.sequences.sequence import Scheduled, Sequence

PAGE = 4


def sequence(pool: PagePool, prompt: int, *, tokens: int = 8, name: str = "") -> Sequence:
    ids = [1000 * sum(map(ord, name)) + i for i in range(prompt)]
    params = SamplingParams()
    return Sequence(name, 0, params, prompt, ids, SequencePages(pool, PAGE), 0, tokens)


def land(step: list[Scheduled], accepted: int = 0) -> None:
    """What the engine does with the results of a step: drafts are accepted, then one more."""
    for run in step:
        if run.samples:
            run.seq.num_pending -= 1
            more = min(accepted, run.num_drafts)
            run.seq.num_computed += more
            run.seq.tokens += [len(run.seq.tokens) + i for i in range(more + 1)]
        run.seq.pages.remember(run.seq.tokens, run.seq.num_computed)


def make(num_pages: int, num_seqs: int, budget: int) -> tuple[PagePool, Scheduler]:
    pool = PagePool(num_pages)
    return pool, Scheduler(pool, num_seqs, budget)


def shape(step: list[Scheduled]) -> list[tuple[str, int, int, bool]]:
    return [(run.seq.request_id, run.start, run.num_tokens, run.samples) for run in step]


def test_prompts_run_in_chunks_beside_decoding() -> None:
    pool, scheduler = make(32, 4, 10)
    for name, prompt in (("a", 4), ("b", 13)):
        scheduler.add(sequence(pool, prompt, name=name))
    step = scheduler.schedule()
    assert shape(step) == [("a", 0, 4, True), ("b", 0, 6, False)]
    land(step)
    step = scheduler.schedule()
    assert shape(step) == [("a", 4, 1, True), ("b", 6, 7, True)]
    land(step)
    assert shape(scheduler.schedule()) == [("a", 5, 1, True), ("b", 13, 1, True)]


def test_rows_bound_what_runs() -> None:
    pool, scheduler = make(32, 2, 100)
    seqs = [sequence(pool, 3, name=name) for name in "abc"]
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    assert [run.seq for run in step] == seqs[:2]
    assert {seq.row for seq in seqs[:2]} == {0, 1}
    land(step)
    scheduler.remove(seqs[0])
    assert [run.seq for run in scheduler.schedule()] == seqs[1:]
    assert pool.num_free == 30


def test_a_large_prompt_at_the_head_is_not_overtaken() -> None:
    pool, scheduler = make(4, 4, 100)
    for name, prompt in (("a", 8), ("big", 12), ("small", 1)):
        scheduler.add(sequence(pool, prompt, name=name))
    assert shape(scheduler.schedule()) == [("a", 0, 8, True)]
    assert [seq.request_id for seq in scheduler.waiting] == ["big", "small"]


def test_a_waiting_prompt_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, scheduler = make(6, 4, 100)
    digested: list[int] = []

    def counted(parent: bytes, tokens: list[int]) -> bytes:
        digested.append(tokens[0])
        return page_digest(parent, tokens)

    monkeypatch.setattr(page_pool, "page_digest", counted)
    first, waiting = (sequence(pool, size, name="a") for size in (13, 21))
    scheduler.add(first)
    land(scheduler.schedule())
    scheduler.add(waiting)
    digested.clear()
    for _ in range(3):
        step = scheduler.schedule()
        assert [run.seq for run in step] == [first]
        land(step)
    shared = [waiting.tokens[place] for place in (0, 4, 8)]
    assert [page for page in digested if page in shared] == shared, "once, not in every step"
    scheduler.remove(first)
    (run,) = scheduler.schedule()
    assert (run.seq, run.start) == (waiting, 12)
    assert [page for page in digested if page in shared] == shared


def test_a_prompt_under_way_is_computed_once() -> None:
    """Sequences that begin alike wait for the first, if what they share is worth it."""
    pool, scheduler = make(400, 8, 299)
    alike = [sequence(pool, 300, name="x") for _ in range(3)]
    alike[2].tokens[100:] = range(200)  # shares 100 tokens: not worth a wait
    other = sequence(pool, 9, name="y")
    for seq in (*alike, other):
        scheduler.add(seq)
    first = scheduler.schedule()
    assert [(run.seq, run.num_tokens) for run in first] == [(alike[0], 299)]
    second = scheduler.schedule()  # nothing has landed: one waits, and those after it do not
    assert [run.seq for run in second] == [alike[0], alike[2]]
    assert list(scheduler.waiting) == [alike[1], other]
    land(first)
    land(second)
    step = scheduler.schedule()
    assert {run.seq for run in step} == {*alike, other}
    assert alike[1].pages.pages[:74] == alike[0].pages.pages[:74]
    assert alike[2].pages.pages[:25] != alike[0].pages.pages[:25]


def test_few_are_overtaken_while_they_wait_for_a_prompt() -> None:
    """A look at every one of many that wait would take longer than a step."""
    pool, scheduler = make(400, 8, 299)
    alike = [sequence(pool, 300, name="x") for _ in range(65)]
    others = [sequence(pool, 9, name=name) for name in "yz"]
    scheduler.add(alike[0])
    scheduler.schedule()
    for seq in (*alike[1:64], others[0], alike[64], others[1]):
        scheduler.add(seq)
    assert [run.seq for run in scheduler.schedule()] == [alike[0], others[0]]
    assert list(scheduler.waiting) == [*alike[1:], others[1]]
    assert [run.seq for run in scheduler.schedule()] == [alike[0], others[0]], "64 are passed"


def test_prompts_that_may_not_be_shared_do_not_wait() -> None:
    pool, scheduler = make(400, 8, 1000)
    alike = [sequence(pool, 300, name="x") for _ in range(2)]
    alike[1].pages = SequencePages(pool, PAGE, b"another root")
    for seq in alike:
        scheduler.add(seq)
    assert [run.seq for run in scheduler.schedule()] == alike


def test_the_youngest_gives_its_pages_up() -> None:
    pool, scheduler = make(3, 4, 100)
    old, mid, young = seqs = [sequence(pool, 4, name=name) for name in ("old", "mid", "young")]
    for seq in seqs:
        scheduler.add(seq)
    land(scheduler.schedule())
    step = scheduler.schedule()  # old needs a second page, and so does mid
    assert [run.seq for run in step] == [old]
    assert list(scheduler.waiting) == [mid, young], "in the order they came"
    assert (young.row, young.num_computed, young.pages.pages) == (None, 0, [])
    assert scheduler.num_preemptions == 2
    land(step)
    scheduler.remove(old)
    step = scheduler.schedule()
    assert [(run.seq, run.start) for run in step] == [(mid, 4)], "its page is still there"
    assert mid.num_cached == 0, "reuse counts at the first admission"


def test_a_draft_is_not_worth_a_preemption() -> None:
    pool, scheduler = make(3, 4, 100)
    seqs = [sequence(pool, 6, name="a"), sequence(pool, 3, name="b")]
    for seq in seqs:
        scheduler.add(seq)
    land(scheduler.schedule())
    for seq in seqs:
        seq.num_drafts = 3
    step = scheduler.schedule()
    assert [(run.num_tokens, run.num_drafts) for run in step] == [(1, 0), (1, 0)]
    assert scheduler.num_preemptions == 0


def test_drafts_fit_the_budget() -> None:
    pool, scheduler = make(32, 4, 6)
    seqs = [sequence(pool, 2, name=name) for name in "ab"]
    for seq in seqs:
        scheduler.add(seq)
    land(scheduler.schedule())
    for seq in seqs:
        seq.num_drafts = 4
    step = scheduler.schedule()
    assert sum(run.num_tokens for run in step) <= 6
    assert [run.num_drafts for run in step] == [4, 0]
    assert all(run.seq.num_computed == run.start + 1 for run in step), "drafts are not computed"


def test_pending_tokens_are_run_before_they_are_known() -> None:
    pool, scheduler = make(8, 2, 10)
    seq = sequence(pool, 2, tokens=2)
    scheduler.add(seq)
    first = scheduler.schedule()
    assert shape(scheduler.schedule()) == [("", 2, 1, True)]
    assert scheduler.schedule() == [], "both tokens it may have are pending"
    land(first)
    assert seq.num_pending == 1 and seq.exhausted


def test_a_preempted_sequence_waits_for_the_step_in_flight() -> None:
    pool, scheduler = make(2, 2, 10)
    old, young = (sequence(pool, 4, name=name) for name in ("old", "young"))
    scheduler.add(old)
    scheduler.add(young)
    flying = scheduler.schedule()
    scheduler.schedule()  # old takes young's page while its token is on the way
    assert young.row is None and young.num_pending == 1
    scheduler.remove(old)
    assert scheduler.schedule() == []
    land([run for run in flying if run.seq is young])
    assert shape(scheduler.schedule()) == [("young", 0, 5, True)]


def decode_step(pool: PagePool, scheduler: Scheduler, drafts: list[int]) -> list[Scheduled]:
    seqs = [sequence(pool, 3, name=str(i), tokens=20) for i in range(len(drafts))]
    for seq in seqs:
        scheduler.add(seq)
    land(scheduler.schedule())
    for seq, count in zip(seqs, drafts, strict=True):
        seq.num_drafts, seq.drafts = count, list(range(70, 70 + count))
    return scheduler.schedule()


@pytest.mark.parametrize("scorer", Scorer)
def test_padding_makes_runs_equal_and_changes_nothing_else(scorer: Scorer) -> None:
    pool, scheduler = make(16, 4, 100)
    step = decode_step(pool, scheduler, [0, 2, 4])
    padded = scheduler.pad(step, 5)
    assert [(run.num_tokens, run.num_known, run.num_drafts) for run in padded] == [
        (5, 1, 0),
        (5, 1, 2),
        (5, 1, 4),
    ]
    layout = lay_out(padded, scorer, PAGE, 5, True)
    assert layout.num_tokens == 15
    assert len(set(layout.slots.tolist())) == 15, "every token has a place of its own"
    assert layout.positions.reshape(3, 5).tolist() == [
        [3, 3, 3, 3, 3],
        [3, 4, 5, 5, 5],
        [3, 4, 5, 6, 7],
    ]
    ends = [8] * 3 if scorer is Scorer.MULTI_QUERY else [4, 5, 6, 7, 8] * 3
    assert layout.seq_lens.tolist() == ends
    assert layout.cu_seqlens[-1] == 15
    plain = lay_out(step, scorer, PAGE, 5, False)
    assert plain.logit_rows.tolist() == list(range(9))
    assert plain.ids.tolist()[2:4] == [70, 71]


def test_prompts_are_fresh_until_something_lies_in_pages() -> None:
    pool, scheduler = make(16, 4, 6)
    scheduler.add(sequence(pool, 4, name="short"))
    scheduler.add(sequence(pool, 5, name="long"))
    step = scheduler.schedule()
    assert [(run.start, run.num_tokens) for run in step] == [(0, 4), (0, 2)]
    assert lay_out(step, Scorer.MULTI_QUERY, PAGE, 5, False).is_fresh(0)
    for run in step:
        run.seq.num_computed = run.start + run.num_tokens
    rest = [run for run in scheduler.schedule() if run.start]
    layout = lay_out(rest, Scorer.MULTI_QUERY, PAGE, 5, False)
    assert layout.num_seqs and not layout.is_fresh(0)


def test_padding_needs_pages_and_decoding() -> None:
    pool, scheduler = make(3, 4, 100)
    step = decode_step(pool, scheduler, [0, 1, 0])
    assert scheduler.pad(step, 5) is step
    pool, scheduler = make(16, 4, 100)
    step = decode_step(pool, scheduler, [2])
    scheduler.add(sequence(pool, 2, name="new"))
    mixed = [*step, *scheduler.schedule()]
    assert scheduler.pad(mixed, 5) is mixed


def test_removing_is_safe_anywhere() -> None:
    pool, scheduler = make(8, 1, 10)
    running, waiting = sequence(pool, 5, name="r"), sequence(pool, 5, name="w")
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    for seq in (waiting, running, running):
        scheduler.remove(seq)
    assert pool.num_free == 8 and not scheduler.running and not scheduler.waiting


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(8, 14),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 4),
    st.integers(0, 2**32),
)
def test_every_sequence_gets_exactly_its_tokens(
    sizes: list[tuple[int, int]],
    num_pages: int,
    num_seqs: int,
    more_budget: int,
    max_drafts: int,
    seed: int,
) -> None:
    """Random requests, drafts, acceptance and aborts on a pool that holds the longest one."""
    draws = random.Random(seed)
    pool, scheduler = make(num_pages, num_seqs, num_seqs + more_budget)
    seqs = [
        sequence(pool, prompt, tokens=tokens, name=str(i % 3))
        for i, (prompt, tokens) in enumerate(sizes)
    ]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(2000):
        if not (scheduler.running or scheduler.waiting):
            break
        for seq in scheduler.running:
            room = seq.max_tokens - seq.num_output - 1
            seq.num_drafts = min(draws.randint(0, max_drafts), room) if seq.decoding else 0
        step = scheduler.schedule()
        assert step and sum(run.num_tokens for run in step) <= scheduler.max_num_tokens
        assert len(step) <= num_seqs
        held = [page for seq in scheduler.running for page in seq.pages.pages]
        assert pool.num_free == num_pages - len(set(held))
        order = [seqs.index(seq) for seq in scheduler.running]
        assert order == sorted(order) and all(
            seqs.index(seq) > max(order, default=-1) for seq in scheduler.waiting
        ), "the oldest run"
        assert step[0].seq is scheduler.running[0], "the oldest is in every step"
        land(step, accepted=draws.randint(0, max_drafts))
        for seq in [seq for seq in scheduler.running if seq.num_output >= seq.max_tokens]:
            assert seq.num_output == seq.max_tokens
            assert seq.num_computed == len(seq.tokens) - 1
            scheduler.remove(seq)
    assert not scheduler.running and not scheduler.waiting
    assert all(seq.num_output == seq.max_tokens for seq in seqs)
    assert pool.num_free == num_pages
