"""`anabranch serve`: a model behind OpenAI's API."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from anabranch.bench.engine.bars import progress_bars
from anabranch.bench.engine.benches import quiet_transformers
from anabranch.bench.engine.engine_options import SPECULATIVE, EngineOptions
from anabranch.bench.engine.fields import option

KEY_VARIABLE = "ANABRANCH_API_KEY"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
HELP = """Serve a model with OpenAI's API on this machine, with metrics for Prometheus and a page
to chat on. SIGTERM or Ctrl-C answers what is open, then ends.

    anabranch serve
    anabranch serve ./my-model --port 9000 --max-num-seqs 32
    anabranch serve dummy:llama-3.1-8b --speculative draft --draft-model dummy:llama-3.1-8b-draft4
    ANABRANCH_API_KEY=secret anabranch serve --host 0.0.0.0
"""


@dataclass(frozen=True, kw_only=True)
class ServeCommandOptions(EngineOptions):
    """A model, where it listens, and how much it takes on."""

    model: str = option(
        "smollm2",
        "smollm2, a transformers directory, a .gguf file, a hub id, or dummy:CONFIG.",
        argument=True,
    )
    host: str = option("127.0.0.1", "Address to listen on: this machine only unless given.")
    port: int = option(8000, "Port to listen on.")
    api_key: str | None = option(
        None, f"Clients must send it; {KEY_VARIABLE} unless given, and nothing without either."
    )
    served_name: str | None = option(None, "What clients call the model.")
    speculative: str = option("ngram", "Where drafts come from.", choices=SPECULATIVE)
    max_num_seqs: int | None = option(None, "Sequences at once: 64 on a GPU, 16 on a CPU.")
    max_queue: int = option(256, "Sequences that wait; more are answered 429.")
    max_body_mib: int = option(8, "Size of a request.")
    max_request_seconds: float = option(600.0, "Time for one request.")
    max_prompt_tokens: int | None = option(None, "Tokens of a prompt; the context unless given.")
    drain_seconds: int = option(60, "Time for open requests at the end.")
    log_level: str = option("info", "What the server says of itself.", choices=LOG_LEVELS)


def serve(options: ServeCommandOptions) -> None:
    """Serve until told to stop."""
    from anabranch.engine.config import EngineConfig, SpeculativeConfig
    from anabranch.server.command import serve as run_server
    from anabranch.server.limits import ServerLimits

    quiet_transformers()
    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    settings: dict[str, Any] = options.engine_config()
    drafts = settings.pop("speculative")
    speculative = SpeculativeConfig(**drafts) if drafts else None
    run_server(
        EngineConfig(
            model=options.model,
            speculative=speculative,
            max_num_seqs=options.max_num_seqs,
            **settings,
        ),
        host=options.host,
        port=options.port,
        api_key=key,
        model_name=options.served_name,
        limits=ServerLimits(
            max_queue=options.max_queue,
            max_body_bytes=options.max_body_mib << 20,
            max_request_seconds=options.max_request_seconds,
            max_prompt_tokens=options.max_prompt_tokens,
        ),
        drain_seconds=options.drain_seconds,
        log_level=options.log_level,
        progress=progress_bars(),
    )
