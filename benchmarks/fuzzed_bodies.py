"""Bodies of requests that are wrong in some place, or right by chance."""

from __future__ import annotations

import json
import random
from typing import Any

WORDS = ["the", "river", "bends", "hello", "a", " ", "\n"]
STRANGE = ["\U0001f30a", "\ufffd", "\0", "<0xE4>", "▁", "각" * 9, "<end>", "[UNK]", "e\u0301"]


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is wrong in some place or right by chance."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
    text = "".join(rng.choices(WORDS + STRANGE, k=rng.randint(0, 60)))
    field: dict[str, Any] = {
        "prompt": rng.choice([text, [text] * 3, [rng.randint(0, 400) for _ in range(9)], 5]),
        "messages": [{"role": rng.choice(["user", "system", "king"]), "content": text}],
        "tokens": [rng.randint(0, 400) for _ in range(rng.randint(0, 50))],
        "max_tokens": rng.choice([1, 8, 8, 10**6]),
        "temperature": rng.choice([0, 1, 2, -1]),
        "logprobs": rng.choice([None, 0, 5, True]),
        "prompt_logprobs": rng.choice([None, 2]),
        "stop": rng.choice([None, "e", ["", "x"], [text]]),
        "stream": rng.random() < 0.3,
        "stream_options": rng.choice([None, {"include_usage": True}, {"foo": 1}]),
        "logit_bias": rng.choice([None, {"5": 100, "300": 100}, {"x": 1}]),
        "skip_special_tokens": rng.choice([True, False]),
        "return_token_origins": True,
        "n": rng.choice([1, 2, 5000]),
    }
    wanted = {"/tokenize": ["prompt"], "/detokenize": ["tokens"]}.get(path, [])
    wanted = wanted or ["messages" if "chat" in path else "prompt"]
    wanted += rng.sample(list(field), k=rng.randint(0, 4))
    body = json.dumps({name: field[name] for name in wanted}).encode()
    if rng.random() < 0.3:
        place = rng.randrange(len(body))
        body = body[:place] + rng.randbytes(rng.randint(0, 9)) + body[place + rng.randint(0, 9) :]
    return path, body
