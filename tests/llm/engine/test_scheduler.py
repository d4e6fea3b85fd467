"""Which tokens run: budget, chunks, order, preemption, drafts, padding; nothing lost."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.llm.engine.scheduler import WORTH_WAITING, Scheduler
from anabranch.llm.runner.step_layout import Scorer, lay_out
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences import page_pool
from anabranch.llm.sequences.page_pool import PagePool, SequencePages, page_digest
from anabranch.llm.sequences.sequence import Origin, Scheduled, Sequence

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


def test_a_new_sequence_has_nothing() -> None:
    seq = sequence(PagePool(4), 3)
    assert (seq.num_computed, seq.num_draft_computed, seq.num_pending) == (0, 0, 0)
    assert (seq.num_cached, seq.num_preemptions, seq.num_drafts, seq.num_output) == (0, 0, 0, 0)
    assert (seq.length, seq.num_uncomputed, seq.draft_room) == (3, 3, 7)
    assert not (seq.speculates or seq.decoding or seq.exhausted or seq.finished)
    assert seq.output == seq.drafts == seq.origins == seq.steps == seq.logprobs == []
    assert list(Origin) == [0, 1, 2] and Origin.ACCEPTED == 1 and Origin.CORRECTED == 2


def test_a_sequence_decodes_when_its_last_token_alone_is_left() -> None:
    seq = sequence(PagePool(4), 1)
    assert seq.num_uncomputed == 1 and not seq.decoding  # a prompt of one token
    seq.tokens += [7]
    assert not seq.decoding  # it was preempted
    seq.num_computed = 1
    assert seq.decoding


def test_drafts_are_cut_where_rules_forbid_them() -> None:
    seq = sequence(PagePool(4), 3)
    seq.drafts, seq.num_drafts = [5, 6, 7], 2
    seq.cut_invalid_drafts()
    assert seq.num_drafts == 2
    seq.rules = cast("Any", SimpleNamespace(num_valid=lambda drafts: drafts.index(6)))
    for parents, kept in (([-1, 0, 1], 2), (None, 1)):
        seq.draft_parents = parents
        seq.cut_invalid_drafts()
        assert seq.num_drafts == kept
    seq.drafts, seq.num_drafts = [], 2  # the host does not know them
    seq.cut_invalid_drafts()
    assert seq.num_drafts == 2


def test_drafts_of_a_tree_keep_their_parents() -> None:
    pool, scheduler = make(32, 4, 5)
    tree, plain = sequence(pool, 2, name="t"), sequence(pool, 2, name="p")
    for seq in (tree, plain):
        scheduler.add(seq)
    land(scheduler.schedule())
    for drafts, parents in ((3, (-1, -1, 0)), (9, (-1, -1, 0, 0)), (0, None)):
        tree.num_drafts, tree.draft_parents = drafts, [-1, -1, 0, 0, 1, 1, 1, 1, 1]
        step = scheduler.schedule()
        assert [run.parents for run in step][:1] == [parents]
        land(step)


def test_drafts_of_chains_and_trees() -> None:
    seq = sequence(PagePool(4), 3)
    chain, plain = Scheduled(seq, 3, 4, 3), Scheduled(seq, 0, 3)
    tree = Scheduled(seq, 3, 5, 4, parents=(-1, -1, 1, 0))
    assert (chain.depths, tree.depths, plain.depths) == ([1, 2, 3], [1, 1, 2, 2], [])
    assert (chain.draft_parents, tree.draft_parents) == ((-1, 0, 1), (-1, -1, 1, 0))
    assert [chain.has_drafts_after(path) for path in ([], [0], [0, 1], [0, 1, 2])] == [
        *(True, True, True, False)
    ]
    paths = ([], [0], [1], [1, 2], [0, 3])
    assert [tree.has_drafts_after(path) for path in paths] == [True, True, True, False, False]
    assert not plain.has_drafts_after([]) and Scheduled(seq, 3, 2, 1).has_drafts_after([])
    assert (chain.num_known, tree.num_known, plain.num_known) == (1, 1, 3)
    assert chain.decoding and tree.decoding and not plain.decoding
    assert plain.samples and not plain.by_draft_model and plain.num_drafts == plain.num_padding == 0
    with pytest.raises(ValueError, match="has 2 drafts, 1 parents"):
        Scheduled(seq, 3, 3, 2, parents=(-1,))


def test_drafts_are_cut_at_the_room_that_is_left() -> None:
    seq = sequence(PagePool(4), 3, tokens=4)
    seq.tokens += [7]
    assert seq.draft_room == 2  # and one token beyond the drafts
    for number, kept in ((1, 1), (2, 2), (3, 2)):
        seq.num_drafts = number
        seq.cut_drafts()
        assert seq.num_drafts == kept
    for parents, kept in (([-1, 0, -1, 1], 3), ([-1, 0, 1, -1], 2), ([-1, -1, 0], 3)):
        seq.draft_parents, seq.num_drafts = parents, len(parents)
        seq.cut_drafts()
        assert seq.num_drafts == kept


def test_a_prompt_is_scored_by_the_first_sequence_once() -> None:
    seq = sequence(PagePool(4), 3)
    assert not seq.scores_prompt
    seq.params = SamplingParams(prompt_logprobs=0)
    assert seq.scores_prompt
    assert [Scheduled(seq, start, 1).scores_prompt for start in (0, 2, 3)] == [True, True, False]
    assert not Scheduled(seq, 0, 1, by_draft_model=True).scores_prompt
    seq.index = 1
    assert not seq.scores_prompt


def test_prompts_are_expected_while_some_wait_or_are_under_way() -> None:
    pool, scheduler = make(32, 2, 4)
    assert not scheduler.expects_prompts
    short, long = sequence(pool, 1, name="s"), sequence(pool, 6, name="l", tokens=1)
    scheduler.add(short)
    assert scheduler.expects_prompts
    land(scheduler.schedule())
    assert not scheduler.expects_prompts
    scheduler.add(long)
    land(scheduler.schedule())
    assert not scheduler.waiting and long.num_uncomputed and scheduler.expects_prompts
    scheduler.schedule()
    assert long.exhausted and not scheduler.expects_prompts


def test_scored_prompts_share_the_rows_of_logits() -> None:
    """Others are not held back; one scored prompt may take what another leaves."""
    pool = PagePool(64)
    scheduler = Scheduler(pool, 8, 100, 10)
    assert scheduler.max_num_scored == 10 and Scheduler(pool, 8, 100).max_num_scored == 100
    scored = [sequence(pool, size, name=name) for size, name in ((7, "a"), (6, "b"), (1, "c"))]
    for seq in scored:
        seq.params = SamplingParams(prompt_logprobs=1)
        scheduler.add(seq)
    plain = sequence(pool, 30, name="p")
    step = scheduler.schedule()
    assert shape(step) == [("a", 0, 7, True), ("b", 0, 3, False)]
    scheduler.add(plain)
    land(step)
    assert shape(scheduler.schedule()) == [
        *(("a", 7, 1, True), ("b", 3, 3, True)),
        *(("c", 0, 1, True), ("p", 0, 30, True)),
    ]


def test_a_promise_is_of_whole_pages_that_are_yet_to_be_found() -> None:
    def promised(tokens: list[int], theirs: list[int], **options: bytes) -> int:
        pool = PagePool(32)
        first, second = SequencePages(pool, PAGE), SequencePages(pool, PAGE, **options)
        assert first.match_prefix(theirs) == second.match_prefix(tokens) == 0
        return second.num_promised(tokens, first, theirs)

    ten = list(range(10))
    assert promised(ten, ten) == 8
    assert promised(ten[:9], ten) == 8
    assert promised(ten[:8], ten) == 4  # the last token is its own
    assert promised(ten[:5], ten) == 4 and promised(ten[:4], ten) == 0
    assert promised(ten, ten[:4]) == 4 and promised(ten, ten[:3]) == 0
    assert promised([*ten[:7], 99, *ten], ten) == 4
    assert promised([99, *ten], [98, *ten]) == 0
    assert promised(ten, ten, root=b"another") == 0
    pool = PagePool(32)
    first, second = SequencePages(pool, PAGE), SequencePages(pool, PAGE)
    first.grow(10)
    first.remember(ten, 4)
    assert second.match_prefix(ten) == 4
    assert second.num_promised(ten, first, ten) == 4
    first.remember(ten, 8)
    assert second.num_promised(ten, first, ten) == 0  # it can be found
    third, other = SequencePages(pool, PAGE), [*range(50, 54), *ten[4:]]
    assert third.match_prefix(other) == 0
    assert second.num_promised(ten, third, other) == 0, "what comes before differs"
    third = SequencePages(pool, PAGE)
    assert third.num_promised(ten[:3], SequencePages(pool, PAGE), ten) == 0
    assert third.match_prefix(ten) == 8, "a page has a digest when it is full, and no sooner"


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


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_worth_a_wait(more: int) -> None:
    pool, scheduler = make(400, 8, 1000)
    shared = WORTH_WAITING - more * PAGE
    alike = [sequence(pool, WORTH_WAITING + 9, name="x") for _ in range(2)]
    alike[1].tokens[shared:] = range(len(alike[1].tokens) - shared)
    for seq in alike:
        scheduler.add(seq)
    assert [run.seq for run in scheduler.schedule()] == alike[: 1 + more]


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
    assert (young.row, young.num_computed, len(young.pages.pages)) == (None, 0, 0)
    assert (mid.num_preemptions, young.num_preemptions, scheduler.num_preemptions) == (1, 1, 2)
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
