"""All tests that need a GPU, in processes side by side; kernels are compiled once for all of them.

    python tests/gpu_shards.py [--processes 14] [--out FILE] [--minutes 9] [TEST ...]
    python tests/gpu_shards.py --memcheck tests/kernels tests/attention tests/compositions

Prints what failed and the counts, writes them with the commit, and exits with 1 if a test failed
or did not run. With --memcheck, one case of each test runs under compute-sanitizer, which notices
what is read or written beside an allocation; every tensor is one of its own, so graphs, which need
the allocator's pools, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENDED = r"^tests/.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) .*\[ *\d+%\]$"  # a line of pytest -v


def main() -> int:
    """Run, report, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14))
    parser.add_argument("--minutes", type=float, default=9.0, help="after which all are stopped")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memcheck", action="store_true", help="one case of each, checked")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{shard}.log") for shard in range(options.processes)]
        claims = Path(folder, "claims")
        claims.mkdir()
        running = [start(f"{claims}:{shard}", log, options) for shard, log in enumerate(logs)]
        for process in running:
            try:
                process.wait(max(options.minutes * 60 - (time.monotonic() - begun), 0.1))
            except subprocess.TimeoutExpired:
                for each in running:  # all at once: who started this may not wait for long
                    each.kill()
                process.wait()
        texts = [log.read_text() for log in logs]
    counts = Counter[str]()
    for process, text in zip(running, texts, strict=True):
        counts += Counter(re.findall(ENDED, text, re.MULTILINE))
        counts["unfinished processes"] += process.returncode not in (0, 1, 5)  # 5: no tests
        if process.returncode not in (0, 5):
            print(text[-6000:])
    seconds = round(time.monotonic() - begun)
    print(f"{dict(counts)} in {seconds} s with {options.processes} processes")
    if options.out is not None:
        save(options.out, counts, seconds)
    return int(any(process.returncode not in (0, 5) for process in running))


def start(claims: str, log: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """One process with its share of the tests."""
    environment = os.environ | {"ANABRANCH_TEST_CLAIMS": f"{claims}/{options.processes}"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-vv", "--durations=8", "--continue-on-collection-errors", *options.tests]
    if options.memcheck:
        environment |= {"ANABRANCH_TEST_SAMPLE": "1000", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        command = [checker, "--report-api-errors", "no", "--error-exitcode", "99", *command]
        command += ["-k", "not graph and not compile"]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def save(path: Path, counts: Counter[str], seconds: int) -> None:
    """The counts, and what they hold for."""
    import torch
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    about = {
        "commit": os.environ.get("ANABRANCH_COMMIT") or commit.stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": seconds,
    }
    path.write_text(json.dumps(about | dict(counts), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
