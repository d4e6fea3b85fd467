"""python benchmarks/report [--check]: tables and plots of the docs, from benchmarks/results/.

Between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` in README.md and docs/benchmarks.md stands
what the results give; docs/reference.md comes from the code. `--check` writes nothing and fails
where a document differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # attention_bench
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from document import check, write
from reference import write_reference

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments not in ([], ["--check"]):
        sys.exit(f"{__doc__}\nunknown arguments: {arguments}")
    if not arguments:
        write_reference(ROOT)
    sys.exit(check(ROOT) if arguments else write(ROOT))
