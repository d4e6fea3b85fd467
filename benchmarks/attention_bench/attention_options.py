"""Options of the benchmarks of attention."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.llm.cli.options import option


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Which cases and implementations to run; empty means all."""

    out: Path | None = option(None, "Write all rows as JSON, after every case.")
    filter: str = option("", "Only cases whose name, model or group has this: 'Qwen3'.")
    impl: tuple[str, ...] = option(
        (), "Only implementations whose name has this: 'cuda'. May be repeated."
    )
    device: str = option("", "cuda or cpu; the GPU if there is one.")
    quick: bool = option(False, "Three cases only, to see that it works.")
