"""Whatever is sent, by the OpenAPI document or against it: an answer, and never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")

from forked_engine import forked_engine  # noqa: E402
from server_models import Server, engine_config, is_idle, running_server, until  # noqa: E402

from anabranch.llm.server.app import make_app  # noqa: E402
from anabranch.llm.server.server_limits import ServerLimits  # noqa: E402
from anabranch.llm.server.service import Service  # noqa: E402

CONTEXT = 24  # short, so that no answer is long
NO_SERVICE = cast("Service", SimpleNamespace(limits=ServerLimits()))
SCHEMA = schemathesis.openapi.from_dict(make_app(NO_SERVICE).openapi())
COMPLETIONS = SCHEMA.include(path_regex="completions$")
# values that are right by themselves may contradict each other, or the model
CONTEXTUAL = [schemathesis.checks.positive_data_acceptance]
SENSIBLE: set[int] = set()  # how requests were answered that make sense
ALWAYS = settings(derandomize=True, deadline=None)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Healthy and idle in the end, whatever was asked."""
    engine = forked_engine(engine_config(max_model_len=CONTEXT, max_num_seqs=8))
    with running_server(engine, max_body_bytes=100_000, max_queue=16) as running:
        yield running
        assert httpx.get(f"{running.url}/health").status_code == 200
        until(lambda: is_idle(running))
        assert not SENSIBLE or 200 in SENSIBLE
    engine.close()


@SCHEMA.parametrize()
@settings(ALWAYS, max_examples=20)
def test_by_the_document(case: Any, server: Server) -> None:
    """Right and wrong bodies, methods and paths: what comes back is what the document says."""
    case.validate_response(case.call(base_url=server.url), excluded_checks=CONTEXTUAL)


@COMPLETIONS.parametrize()
@settings(ALWAYS, max_examples=40)
def test_what_makes_sense_is_answered(case: Any, server: Server) -> None:
    if not isinstance(case.body, dict):
        return
    case.body = sensible(case.body)
    answer = case.call(base_url=server.url)
    assert answer.status_code < 500, answer.text
    SENSIBLE.add(answer.status_code)
    if answer.status_code == 200 and case.body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text


def sensible(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, of a model, a size and a text that there are."""
    fitted: dict[str, Any] = {"model": "tiny", "n": 2}
    if "prompt" in body:
        given = body["prompt"] or "hello"
        fitted |= {"prompt": given, "max_tokens": 8, "truncate_prompt_tokens": 8, "best_of": None}
    return body | fitted


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


TURN = {"role": "user", "content": "hello €"}
BODIES = {
    "/v1/completions": {"prompt": "hello €", "max_tokens": 2, "logit_bias": {"7": 1.5}},
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 2, "stop": ["x"], "stream": True},
    "/tokenize": {"prompt": "hello €", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
PIECES = [
    rb"\ud800", rb"\u0000", b"\xed\xa0\x80", b"\xff", b"null", b"NaN", b"1e999", b"-1", b'"', b"{}",
    b"[" * 2000, b"9" * 5000,
]  # fmt: skip
KINDS = ["application/json", "application/json; charset=utf-16", "text/plain", "json", ""]


@pytest.mark.parametrize("path", BODIES)
def test_bytes_that_are_no_request(client: Any, path: str) -> None:
    """Random ones, a body with others in the place of some, and awkward ones at every place."""
    body = json.dumps(BODIES[path], ensure_ascii=False).encode()
    start, size = st.integers(0, len(body)), st.integers(0, 9)
    broken = st.builds(lambda a, n, new: body[:a] + new + body[a + n :], start, size, st.binary())

    @given(st.binary() | broken, st.sampled_from([KINDS[0], *KINDS]))
    @settings(ALWAYS, max_examples=100)
    def check(sent: bytes, kind: str) -> None:
        answer = client.post(path, content=sent, headers={"content-type": kind})
        assert answer.status_code < 500, answer.text
        if not is_text(sent):
            assert answer.status_code in (400, 415)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    check()
    for piece in PIECES:
        for place in range(len(body) + 1):
            check.hypothesis.inner_test(body[:place] + piece + body[place:], KINDS[0])


def is_text(sent: bytes) -> bool:
    try:
        return bool(sent.decode())
    except UnicodeDecodeError:
        return False
