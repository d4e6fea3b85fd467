"""Every row of the README that a GPU makes, measured anew: `make bench`.

    ANABRANCH_PEERS=SITE python benchmarks/every_row.py            # all pieces, one after the other
    ANABRANCH_PEERS=SITE python benchmarks/every_row.py hopper drawn

A piece takes less than ten minutes on an H200 and writes its own file in benchmarks/results/; what
fails is named at the end, and the others are run all the same. `make docs` then makes the tables.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BENCH = [sys.executable, "-m", "anabranch", "bench"]
MODEL = ["--model", "dummy:llama-3.1-8b"]
# The result of each piece, and what makes it but for --out.
PIECES: dict[str, tuple[str, list[str]]] = {
    "merge": ("h200-merge.json", [*BENCH, "merge"]),
    "decode": ("h200-decode.json", [*BENCH, "decode"]),
    "verify": ("h200-verify.json", [*BENCH, "verify"]),
    "prefill": ("h200-prefill.json", [*BENCH, "prefill"]),
    "hopper": ("hopper/h200.json", ["benchmarks/hopper.py"]),
    "drawn": ("drawn/h200.json", ["benchmarks/drawn_calls.py", "--seed", "0", "--count", "120"]),
    "prompts": ("quantised/h200-prompts.json", ["benchmarks/quantised_prompts.py"]),
    "latent": ("latent/h200.json", ["benchmarks/latent.py"]),
    "formats": ("latent/h200-formats.json", ["benchmarks/formats.py"]),
    "products": (
        "linear/h200-quantised-layer.json",
        ["benchmarks/quantised_variants.py", "--layer"],
    ),
    "latency": (
        "engine/h200-latency.json",
        [*BENCH, "latency", *MODEL, "--cases", "1x1024x128,8x1024x128,64x1024x128,64x4096x64"],
    ),
    "deepseek": ("engine/h200-deepseek.json", ["benchmarks/deepseek.py"]),
    "structured": (
        "structured/h200.json",
        ["benchmarks/structured.py", *MODEL, "--batch", "64", "--rounds", "2"],
    ),
}


def run_piece(name: str) -> bool:
    """Whether a piece came to its end."""
    file, command = PIECES[name]
    if command[0] != sys.executable:
        command = [sys.executable, *command]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--out", str(RESULTS / file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    print(f"{name}: {'done' if done.returncode == 0 else 'failed'}", end=" ")
    print(f"in {time.monotonic() - began:.0f} s, {file}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run what was named, or all; 1 if a piece failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}")
    named = parser.parse_args().pieces
    if unknown := [name for name in named if name not in PIECES]:
        parser.error(f"no piece {', '.join(unknown)}; there are {', '.join(PIECES)}")
    failed = [name for name in named or PIECES if not run_piece(name)]
    print("failed:", ", ".join(failed) or "none")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
