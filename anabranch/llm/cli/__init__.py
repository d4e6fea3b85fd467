"""The `anabranch` command."""

from __future__ import annotations

import gc

IMPORTED_OBJECTS = 100_000  # torch and transformers make so many, to stay: 0.5 s of collections


def main() -> None:
    gc.set_threshold(IMPORTED_OBJECTS, 50, 50)
    try:
        from anabranch.llm.cli.command_group import app
    except ImportError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            "the anabranch command needs typer and rich: pip install 'anabranch[bench]'"
        ) from missing
    app()
