"""The `anabranch` command."""

from __future__ import annotations


def main() -> None:
    """Entry point of the installed command."""
    try:
        from anabranch.cli.command_group import app
    except ImportError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            "the anabranch command needs typer and rich: pip install 'anabranch[bench]'"
        ) from missing
    app()
