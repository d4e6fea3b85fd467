"""A bystander who asks a server for two tokens, again and again, and prints how long it took.

    python benchmarks/soak_bystander.py URL

A process of its own: what attackers compute must not count as waiting. A line has the begin and the
end of a request, in seconds of time.monotonic, and what was wrong with the answer, if anything.
"""

from __future__ import annotations

import json
import sys
import time

import httpx

PAUSE_SECONDS = 0.1
BODY = {"prompt": "hello the", "max_tokens": 2, "ignore_eos": True}


def main() -> None:
    """Until the process is ended."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=sys.argv[1], timeout=120, limits=limits) as client:
        while True:
            start, wrong = time.monotonic(), None
            try:
                answer = client.post("/v1/completions", json=BODY)
                if answer.status_code != 200:
                    wrong = f"{answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                wrong = repr(error)
            print(json.dumps([start, time.monotonic(), wrong]), flush=True)
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
