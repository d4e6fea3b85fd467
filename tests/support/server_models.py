"""A tiny model that speaks, and servers of it on a port of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizer_families import SPECIAL, tokenizer_of

pytest.importorskip("fastapi")  # whoever imports this is skipped

from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.server.app import make_app
from anabranch.llm.server.http_server import HttpServer
from anabranch.llm.server.messages import ServedEngine
from anabranch.llm.server.server_limits import ServerLimits
from anabranch.llm.server.service import Service, make_service

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the engines' processes: tests share the cores
CONTEXT = 1024
_directory = tempfile.TemporaryDirectory()


class Server(NamedTuple):
    url: str
    service: Service
    http: HttpServer

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def tiny_tokenizer() -> Any:
    return tokenizer_of("byte-level")


@cache
def talking_model() -> str:
    """A directory with random weights that mostly say ASCII, and a tokenizer."""
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if not (text.isascii() and text.isprintable()) or token < len(SPECIAL):
            model.lm_head.weight.data[token] = 0
    model.save_pretrained(_directory.name)
    tokenizer.save_pretrained(_directory.name)
    return _directory.name


def engine_config(**options: Any) -> EngineConfig:
    speculative = SpeculativeConfig(min_ngram=1, adaptive=False)
    given = {"device": "cpu", "max_num_seqs": 4, "speculative": speculative, "seed": 0} | options
    return EngineConfig(model=talking_model(), **given)


@contextlib.contextmanager
def logging_as_before() -> Iterator[None]:
    """A server configures the package's logger; other tests read its records."""
    logger = logging.getLogger("anabranch")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@contextlib.contextmanager
def running_server(
    engine: ServedEngine,
    *,
    api_key: str | None = None,
    cors_origins: tuple[str, ...] = (),
    drain_seconds: float = 60.0,
    **limits: Any,
) -> Iterator[Server]:
    """An engine served on a free port of this machine, by a thread."""
    service = make_service(
        engine, limits=ServerLimits(**limits), model_name="tiny", created=int(time.time())
    )
    app = make_app(service, api_key=api_key, cors_origins=cors_origins)
    # asyncio sends at once only on sockets that say they are TCP's
    with logging_as_before(), socket.socket(proto=socket.IPPROTO_TCP) as listener:
        server = HttpServer(app, service, drain_seconds=drain_seconds, log_level="critical")
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        yield Server(f"http://127.0.0.1:{port}", service, server)
        server.should_exit = True
        thread.join(20)


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for something to become true; a bound only so that a test ends."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


def is_idle(server: Server) -> bool:
    """Whether no page is held and nothing runs or waits."""
    snapshot = server.service.engine.snapshot
    assert snapshot is not None
    held = snapshot.num_running or snapshot.num_waiting or snapshot.cache_usage
    return not held and not server.service.admission.num_open
