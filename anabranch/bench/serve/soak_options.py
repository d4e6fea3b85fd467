"""Options of `anabranch bench soak`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.bench.engine.engine_options import SPECULATIVE, BenchOptions
from anabranch.bench.engine.fields import check_positive, option


@dataclass(frozen=True, kw_only=True)
class SoakOptions(BenchOptions):
    """Clients, and how long they go on."""

    speculative: str = option("ngram", "Where drafts come from.", choices=SPECULATIVE)
    clients: int = option(64, "At once; each asks again as soon as it is answered.")
    seconds: float = option(120.0, "For how long new requests are made.")
    input_words: int = option(16, "Random words of a prompt.")
    output_len: int = option(64, "Tokens of an answer.")
    vanish: float = option(0.05, "Share of the requests whose client goes away mid-stream.")
    max_num_seqs: int | None = option(None, "Sequences at once: 64 on a GPU, 16 on a CPU.")
    timeout: float = option(600.0, "Seconds after which a request counts as failed.")
    seed: int = option(0, "Of prompts, and of who vanishes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "clients", "input_words", "output_len", "max_num_seqs")
        if not 0 <= self.vanish <= 1:
            raise ValueError(f"--vanish must be from 0 to 1, got {self.vanish}")
        if not (self.seconds > 0 and self.timeout > 0):
            raise ValueError(
                f"--seconds and --timeout must be above 0, got {self.seconds} and {self.timeout}"
            )

    def server_settings(self) -> dict[str, Any]:
        """What `own_server` reads; nobody is turned away."""
        engine = self.engine_config() | {"model": self.model}
        if self.max_num_seqs is not None:
            engine["max_num_seqs"] = self.max_num_seqs
        queue = max(256, 2 * self.clients)
        return {"engine": engine, "max_queue": queue, "max_seconds": self.timeout}
