"""Drafts that a server counted during a run, by its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from anabranch.bench.engine.run_results import Record
from anabranch.bench.serve.api import Api

SETTLE_SECONDS = 0.3  # our server renews its counts five times a second
SETTLE_TRIES = 10
_SAMPLE = re.compile(
    r"^(?:anabranch|vllm):spec_decode_num_(drafts|draft_tokens|accepted_tokens|"
    r"accepted_tokens_per_pos)_total(?:\{([^}]*)\})?\s+(\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Since a server began."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: dict[int, int] = field(default_factory=dict[int, int])  # by position


def parse_counts(metrics: str) -> DraftCounts | None:
    """Sums over all models and engines; None where nothing is counted."""
    sums = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    accepted_at: dict[int, int] = {}
    found = _SAMPLE.findall(metrics)
    for name, labels, value in found:
        number = int(float(value))
        if name != "accepted_tokens_per_pos":
            sums[name] += number
        elif position := _POSITION.search(labels):
            place = int(position[1])
            accepted_at[place] = accepted_at.get(place, 0) + number
    return DraftCounts(**sums, accepted_at=accepted_at) if found else None


async def read_counts(api: Api) -> DraftCounts | None:
    """What the server says now."""
    metrics = await api.get("/metrics")
    return parse_counts(metrics) if isinstance(metrics, str) else None


async def settled_counts(api: Api) -> DraftCounts | None:
    """Once two readings agree: counts may lag behind the tokens."""
    counts = await read_counts(api)
    for _ in range(SETTLE_TRIES if counts else 0):
        await asyncio.sleep(SETTLE_SECONDS)
        before, counts = counts, await read_counts(api)
        if counts == before:
            break
    return counts


def speculation(before: DraftCounts | None, after: DraftCounts | None) -> Record | None:
    """Figures of what happened between; None if nothing was drafted."""
    if before is None or after is None or after.drafts <= before.drafts:
        return None
    drafts = after.drafts - before.drafts
    draft_tokens = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    positions = range(max(after.accepted_at, default=-1) + 1)
    return {
        "acceptance_rate": 100 * accepted / draft_tokens if draft_tokens else 0.0,
        "acceptance_length": 1 + accepted / drafts,
        "num_drafts": drafts,
        "draft_tokens": draft_tokens,
        "accepted_tokens": accepted,
        "per_position_acceptance": [
            100 * (after.accepted_at.get(i, 0) - before.accepted_at.get(i, 0)) / drafts
            for i in positions
        ],
    }
