"""python -m anabranch.bench.serve.own_engine < JSON: requests without HTTP, for comparison.

As many are open at once as a client would have; the next begins in the step after one ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from anabranch.bench.engine.errors import EXPECTED, one_line

if TYPE_CHECKING:
    from anabranch.engine.engine import Engine

Body = dict[str, Any]  # of a request to /v1/completions


def main(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of each run."""
    from anabranch.bench.engine.benches import quiet_transformers
    from anabranch.engine.llm import LLM

    quiet_transformers()
    engine = LLM(**given["engine"]).engine
    run(engine, [_other(body) for body in given["runs"][0]["bodies"][:2]], None)
    return [run(engine, each["bodies"], each["concurrency"]) for each in given["runs"]]


def _other(body: Body) -> Body:
    """A short answer to a prompt that shares no prefix with the given one."""
    prompt = body["prompt"]
    return body | {"prompt": prompt[::-1][: max(len(prompt) // 2, 1)], "max_tokens": 2}


def run(engine: Engine, bodies: Sequence[Body], concurrency: int | None) -> dict[str, Any]:
    """Seconds and output tokens of all requests."""
    from anabranch.engine.sampling_params import SamplingParams

    known = {field.name for field in fields(SamplingParams)}
    waiting = deque(enumerate(bodies))
    num_open, before, start = 0, engine.stats.num_output_tokens, time.perf_counter()
    while waiting or num_open:
        while waiting and (concurrency is None or num_open < concurrency):
            place, body = waiting.popleft()
            params = SamplingParams.from_dict({k: v for k, v in body.items() if k in known})
            engine.add_request(f"{place}", body["prompt"], params)
            num_open += 1
        num_open -= sum(request.finished for request in engine.step())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "output_tokens": engine.stats.num_output_tokens - before}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.load(sys.stdin))))
    except EXPECTED as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(2)
