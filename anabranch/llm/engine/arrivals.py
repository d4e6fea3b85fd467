"""New tokens of a sequence: stored, turned into text, and checked for a reason to stop."""

from __future__ import annotations

import time

from anabranch.llm.engine.request import Request
from anabranch.llm.sampling.samples import HostLogprobs
from anabranch.llm.sampling.token_logprobs import sampled_entry
from anabranch.llm.sequences.sequence import Origin, Sequence


def arrive(
    request: Request,
    seq: Sequence,
    tokens: list[int],
    *,
    rejects: bool,  # the last token stands where drafts were rejected
    step: int,
    logprobs: HostLogprobs | None,
) -> int:
    """Add tokens until one stops the sequence; how many were added."""
    now = time.monotonic()
    request.first_token = request.first_token or now
    request.last_token = now
    for place, token in enumerate(tokens):
        wanted = seq.params.logprobs
        if logprobs is not None and wanted is not None:  # first: it may fail
            seq.logprobs.append(sampled_entry(token, logprobs, place, wanted))
        seq.tokens.append(token)
        if seq.rules is not None:
            seq.rules.accept(token)
        seq.steps.append(step)
        accepted = place + 1 < len(tokens)
        seq.origins.append(_origin(accepted, rejects))
        if _stops(request, seq, token):
            return place + 1
    return len(tokens)


def _origin(accepted: bool, rejects: bool) -> Origin:
    if accepted:
        return Origin.ACCEPTED
    return Origin.CORRECTED if rejects else Origin.SAMPLED


def _stops(request: Request, seq: Sequence, token: int) -> bool:
    stream = request.texts[seq.index]
    early = seq.num_output < seq.params.min_tokens
    if not early and token in seq.stop_ids:
        seq.finish_reason = "stop"
        if token in seq.params.stop_token_ids:
            seq.stop_reason = token
    written = seq.params.include_stop_str_in_output or not seq.params.skip_special_tokens
    if seq.finish_reason is None or written:
        stopped = stream.push(token, may_stop=not early and seq.finish_reason is None)
        if stopped:
            seq.finish_reason, seq.stop_reason = "stop", stream.stopped_by
    if seq.finish_reason is None and seq.rules is not None and seq.rules.over:
        seq.finish_reason = "stop"
    if seq.finish_reason is None and seq.num_output >= seq.max_tokens:
        seq.finish_reason = "length"
    return seq.finished
