"""`anabranch serve`: a model with OpenAI's API."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from anabranch.llm.cli.engine_options import DRAFTS, SPECULATIVE, ServingOptions
from anabranch.llm.cli.options import add_command, new_app, option

KEY_VARIABLE = "ANABRANCH_API_KEY"
TOOL_FORMATS = ("auto", "hermes", "llama3", "mistral", "deepseek", "gpt-oss")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
# Options that the server has by the same name
PASSED_ON = (
    "host",
    "port",
    "max_engine_restarts",
    "max_step_seconds",
    "drain_seconds",
    "log_level",
    "tool_format",
    "reasoning",
)


@dataclass(frozen=True, kw_only=True)
class ServeCommandOptions(ServingOptions):
    """Serve a model with OpenAI's API, metrics for Prometheus, and a page to chat on.

    It listens on this machine only, unless --host says otherwise. SIGTERM or Ctrl-C finishes open
    requests, then ends.

    $ anabranch serve
    $ anabranch serve ./my-model --port 9000 --max-num-seqs 32
    $ anabranch serve dummy:llama-3.1-8b --speculative draft --draft-model MODEL
    $ ANABRANCH_API_KEY=secret anabranch serve --host 0.0.0.0
    """

    model: str = option(
        "smollm2",
        "smollm2, a transformers directory, a .gguf file, a hub id, or dummy:CONFIG.",
        positional=True,
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on.")
    api_key: str | None = option(
        None, f"Key that clients must send; {KEY_VARIABLE} unless given; none without either."
    )
    served_name: str | None = option(None, "Name of the model for clients.")
    speculative: str | None = option(None, DRAFTS, choices=SPECULATIVE)
    max_queue: int = option(256, "Sequences that may wait; further requests get 429.")
    max_body_mib: int = option(8, "Largest request body, in MiB.")
    max_request_seconds: float = option(600.0, "Longest time for one request.")
    max_prompt_tokens: int | None = option(None, "Longest prompt; the context length unless given.")
    max_prompt_logprobs: int = option(
        1 << 18, "Most logprobs of prompts in an answer: tokens times likely tokens at each."
    )
    header_seconds: float = option(20.0, "Time for the headers of a request to arrive.")
    body_seconds: float = option(60.0, "Time for the body of a request to arrive.")
    max_connections: int = option(
        1024, "Open connections; one more ends the one that has waited longest for a request."
    )
    drain_seconds: float = option(60.0, "Time for open requests to finish after SIGTERM.")
    max_engine_restarts: int = option(
        3, "Restarts of a failed engine in ten minutes; after these, or with 0, exit with code 3."
    )
    max_step_seconds: float = option(
        600.0, "Longest step of an engine; one that takes longer hangs, and is started again."
    )
    cors_origin: tuple[str, ...] = option(
        (), "Origin whose pages may call the server, or '*' for any. May be repeated."
    )
    tool_format: str = option("auto", "How the model writes calls of tools.", choices=TOOL_FORMATS)
    reasoning: bool = option(True, "Separate reasoning from the text of chat answers.")
    allowed_host: tuple[str, ...] = option(
        (),
        "Name under which requests may come, beside this machine's own, or '*' for any; on an "
        "address of this machine only, others are refused. May be repeated.",
    )
    log_level: str = option("info", "Least severe messages that are logged.", choices=LOG_LEVELS)


def serve(options: ServeCommandOptions) -> None:
    from anabranch.llm.cli.progress import progress_bars, quiet_transformers
    from anabranch.llm.engine.config import EngineConfig
    from anabranch.llm.server.command import serve as run_server
    from anabranch.llm.server.server_limits import ServerLimits

    quiet_transformers()
    given = vars(options)
    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    limits = {each.name: given[each.name] for each in fields(ServerLimits) if each.name in given}
    run_server(
        EngineConfig(model=options.model, **options.engine_config()),
        api_key=key,
        model_name=options.served_name,
        limits=ServerLimits(max_body_bytes=options.max_body_mib << 20, **limits),
        cors_origins=options.cors_origin,
        allowed_hosts=options.allowed_host,
        progress=progress_bars(),
        **{name: given[name] for name in PASSED_ON},
    )


app = new_app()
add_command(app, "serve", ServeCommandOptions, serve)
