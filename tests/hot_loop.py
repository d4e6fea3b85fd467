"""What ptxas made of the loop of a warp-specialised kernel: warnings and the order of parts."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def serialised(ptx: str) -> list[str]:
    """Warnings that matrix instructions wait for each other (C7510 to C7519)."""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sorted(set(re.findall(r"C75\d\d", log)))


def waits_after_exponentials(cubin: bytes) -> bool:
    """Whether the loop waits for P V only when all exponentials of a tile are under way.

    ptxas likes to lift that wait; the tensor cores then idle while weights are computed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-c", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    body = _hot_loop(sass.splitlines())
    scores = next(i for i, line in enumerate(body) if re.search(r"DEPBAR.LE gsb0, 0x[12]", line))
    values = next(i for i, line in enumerate(body) if "DEPBAR.LE gsb0, 0x0" in line)
    exponentials = [i for i, line in enumerate(body) if "MUFU.EX2" in line]
    return scores < min(exponentials) and max(exponentials) < values


def _hot_loop(lines: list[str]) -> list[str]:
    """The shortest loop that waits for scores while something else is under way."""
    labels = {
        found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\.L_x_\d+):", line))
    }
    loops: list[list[str]] = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], i) < i:
            body = lines[labels[jump[1]] : i + 1]
            if any(re.search(r"DEPBAR.LE gsb0, 0x[12]", each) for each in body):
                loops.append(body)
    return min(loops, key=len)
