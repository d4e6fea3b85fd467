"""The `anabranch` command."""

from __future__ import annotations

try:
    import typer as _  # noqa: F401
except ImportError as missing:
    raise SystemExit(
        "the anabranch command needs typer and rich: pip install 'anabranch[bench]'\n"
        "(python -m anabranch.bench and python -m anabranch.bench.engine run the benchmarks "
        "without them)"
    ) from missing

from anabranch.cli.commands import app


def main() -> None:
    """Entry point of the installed command."""
    app()
