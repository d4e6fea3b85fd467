"""Who is let in: which keys, which hosts, and which paths need neither."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

for needed in ("fastapi", "httpx", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from fastapi.testclient import TestClient  # noqa: E402
from starlette.routing import Route  # noqa: E402

from anabranch.llm.server import command  # noqa: E402
from anabranch.llm.server.app import make_app  # noqa: E402
from anabranch.llm.server.command import serve  # noqa: E402
from anabranch.llm.server.gate import (  # noqa: E402
    HostNames,
    has_many_values,
    is_loopback,
)
from anabranch.llm.server.server_limits import ServerLimits  # noqa: E402
from anabranch.llm.server.service import Service  # noqa: E402

SERVICE = cast("Service", SimpleNamespace(limits=ServerLimits()))
KEY = "s3cret"
JSON = "application/json"
NEED_NO_KEY = {"/", "/docs", "/openapi.json", "/health", "/version", "/metrics", "/stats"}


def status(path: str, *, key: str | None = KEY, host: str = "localhost", **headers: str) -> int:
    """With which status an app refuses a request; 404 where it would answer."""
    app = make_app(SERVICE, api_key=key)
    app.router.routes[:] = []  # of the app that the gate is before, only the gate is asked
    client = TestClient(app, base_url=f"http://{host}")
    return client.get(path, headers={name: value for name, value in headers.items()}).status_code


def test_every_path_needs_the_key_but_those_that_are_named() -> None:
    app = make_app(SERVICE)
    paths = set(app.openapi()["paths"])
    paths |= {route.path for route in app.routes if isinstance(route, Route)}
    assert {"/v1/completions", "/tokenize", "/tokenizer_info", "/v1/models"} < paths
    assert paths > NEED_NO_KEY
    for path in paths - NEED_NO_KEY:
        assert status(path) == 401, path
        assert status(path, key=None) == 404
        assert status(path, authorization=f"Bearer {KEY}") == 404
    for path in (*NEED_NO_KEY, "/page/page.js"):
        assert status(path) == 404, path
    for path in ("/v1/responses", "/v2", "/pages", "/health/x", "/stats2"):  # whatever there may be
        assert status(path) == 401


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", KEY, "Bearer s3cre", "Bearer s3cretX", "Bearer Xs3cret", "Bearer s3",
     "Basic s3cret", "Bearer S3CRET", "Bearer s3cret s3cret"],
)  # fmt: skip
def test_no_other_key_will_do(given: str) -> None:
    assert status("/v1/models", authorization=given) == 401


@pytest.mark.parametrize("key", [" s3cret", "s3cret\n", "\t s3cret "])
@pytest.mark.parametrize("given", ["Bearer s3cret", "Bearer  s3cret", "bearer s3cret"])
def test_blanks_around_a_key_do_not_count(key: str, given: str) -> None:
    assert status("/v1/models", key=key, authorization=given) == 404
    assert status("/v1/models", key=key, authorization="Bearer s3cre") == 401


@pytest.mark.parametrize("key", ["", " ", "\n"])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must not be empty"):
        make_app(SERVICE, api_key=key)
    with pytest.raises(ValueError, match="api_key must not be empty"):
        serve(cast("Any", None), api_key=key)


def test_a_time_to_drain_that_is_none_is_refused() -> None:
    for seconds in (-1, math.nan):
        with pytest.raises(ValueError, match="drain_seconds must be at least 0"):
            serve(cast("Any", None), drain_seconds=seconds)


OURS = ["localhost", "LOCALHOST:8000", "a.localhost:1", "127.0.0.1:8000", "[::1]:8000", "[::1]",
        "192.168.0.7:80", "localhost."]  # fmt: skip
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
           "evillocalhost", "1e999", "", ".", "[evil.example]"]  # fmt: skip


def test_hosts() -> None:
    for header in OURS:
        assert HostNames().holds(header), header
    for header in FOREIGN:
        assert not HostNames().holds(header), header
    assert HostNames(["Chat.example"]).holds("chat.EXAMPLE:443")
    for wrong in (["http://a"], ["a:80"], [""], "abc"):
        with pytest.raises(ValueError, match="allowed_hosts"):
            HostNames(wrong)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/page/page.js"])
def test_foreign_hosts_are_refused(path: str) -> None:
    """With a key and without: a page that rebinds its name must not read anything."""
    for key in (None, KEY):
        assert status(path, key=key, host="evil.example:8000", authorization=f"Bearer {KEY}") == 403
        assert status(path, key=key, host="127.0.0.1:8000", authorization=f"Bearer {KEY}") == 404


@pytest.mark.parametrize(
    ("host", "allowed", "answers"),
    [
        ("127.0.0.1", (), {"localhost": True, "a.example": False}),
        ("::1", (), {"localhost": True, "a.example": False}),
        ("127.0.0.1", ("a.example",), {"a.example": True, "b.example": False}),
        ("127.0.0.1", ("*",), {"a.example": True}),
        ("0.0.0.0", (), {"a.example": True}),
        ("0.0.0.0", ("a.example",), {"a.example": True, "b.example": False}),
    ],
)
def test_what_a_server_is_called(
    monkeypatch: pytest.MonkeyPatch, host: str, allowed: tuple[str, ...], answers: dict[str, bool]
) -> None:
    apps: list[Any] = []
    engine = SimpleNamespace(close=lambda: None, given_up=False)
    server = SimpleNamespace(run=lambda: None)
    monkeypatch.setattr(command, "RestartingEngine", lambda *_, **__: engine)
    monkeypatch.setattr(command, "make_service", lambda *_, **__: SERVICE)
    monkeypatch.setattr(command, "HttpServer", lambda app, *_, **__: apps.append(app) or server)
    monkeypatch.setattr(command, "check_address", lambda *_: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    serve(cast("Any", None), host=host, allowed_hosts=allowed, drain_seconds=0)
    for name, answered in answers.items():
        client = TestClient(apps[0], base_url=f"http://{name}")
        assert client.get("/version").status_code == (200 if answered else 403)


@pytest.mark.parametrize(
    ("body", "many"),
    [
        ({"prompt": [5] * (1 << 19)}, False),
        ({"prompt": [5] * ((1 << 19) + 1)}, True),
        ({"prompt": ["a"] * ((1 << 19) + 1)}, True),
        ({"prompt": [[5]] * ((1 << 15) - 2)}, False),
        ({"prompt": [[5]] * (1 << 15)}, True),
        ({"messages": [{"role": "user"}] * (1 << 15)}, True),
        ({"prompt": '[{,"' * (1 << 19)}, False),
        ({"prompt": ['\\"[{,' * (1 << 18), "\\", [5]]}, False),
    ],
)
def test_bodies_of_many_values_are_not_parsed(body: Any, many: bool) -> None:
    """Marks within texts are no values."""
    encoded = json.dumps(body, separators=(",", ":")).encode()
    assert has_many_values([encoded[:1000], encoded[1000:]]) == many
    client = TestClient(make_app(SERVICE), base_url="http://localhost")
    answer = client.post("/detokenize", content=encoded, headers={"content-type": JSON})
    assert answer.status_code == (413 if many else 400)  # there is no field `tokens`


@pytest.mark.parametrize("says_its_length", [True, False])
def test_the_largest_body(says_its_length: bool) -> None:
    service = cast("Service", SimpleNamespace(limits=ServerLimits(max_body_bytes=100)))
    client = TestClient(make_app(service), base_url="http://localhost")
    for size, status in ((100, 400), (101, 413)):  # there is no field `tokens`
        body = b"{}".ljust(size)
        content = body if says_its_length else iter([body[:60], body[60:]])
        answer = client.post("/detokenize", content=content, headers={"content-type": JSON})
        assert answer.status_code == status
        assert ("exceeds 100 bytes" in answer.text) == (status == 413)


def test_addresses_of_this_machine_only() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.7", "example.org"]))
