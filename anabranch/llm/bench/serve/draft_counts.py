"""Drafts that a server counted during a run, from its Prometheus metrics."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from anabranch.llm.bench.run_results import Record
from anabranch.llm.bench.serve.endpoint import Endpoint

SETTLE_SECONDS = 0.3  # our server renews its counts five times a second
SETTLE_TRIES = 10
SAMPLE = re.compile(
    r'^(?:anabranch|vllm):spec_decode_num_(\w+)_total(?:\{.*?(?:position="(\d+)".*)?\})?\s+(\S+)',
    re.MULTILINE,
)
DraftCounts = Counter[str | int]  # drafts, draft_tokens, accepted_tokens; accepted by position


def parse_counts(metrics: str) -> DraftCounts:
    """Sums over all models and engines since the server started."""
    counts: DraftCounts = Counter()
    for name, position, value in SAMPLE.findall(metrics):
        counts[int(position) if position else name] += int(float(value))
    return counts


async def read_counts(endpoint: Endpoint) -> DraftCounts:
    metrics = await endpoint.get("/metrics")
    return parse_counts(metrics if isinstance(metrics, str) else "")


async def settled_counts(endpoint: Endpoint) -> DraftCounts:
    """The counts once two readings agree: they may lag the tokens."""
    counts = await read_counts(endpoint)
    for _ in range(SETTLE_TRIES if counts else 0):
        await asyncio.sleep(SETTLE_SECONDS)
        before, counts = counts, await read_counts(endpoint)
        if counts == before:
            break
    return counts


def speculation_between(before: DraftCounts, after: DraftCounts) -> Record | None:
    """Acceptance between two readings; None if nothing was drafted."""
    new = Counter({name: count - before[name] for name, count in after.items()})
    drafts, tokens, accepted = new["drafts"], new["draft_tokens"], new["accepted_tokens"]
    if not drafts:
        return None
    positions = [name for name in after if isinstance(name, int)]
    return {
        "acceptance_rate": 100 * accepted / tokens if tokens else 0.0,
        "acceptance_length": 1 + accepted / drafts,
        "num_drafts": drafts,
        "draft_tokens": tokens,
        "accepted_tokens": accepted,
        "per_position_acceptance": [
            100 * new[place] / drafts for place in range(max(positions, default=-1) + 1)
        ],
    }
