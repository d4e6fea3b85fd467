"""What ptxas made of the loop of a warp-specialised kernel: warnings and the order of parts."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def serialised(log: str) -> list[str]:
    """Warnings of ptxas that matrix instructions wait for each other (C7510 to C7519)."""
    assert re.search(r"ptxas[\w-]* info", log), "ptxas has not run"
    return sorted(set(re.findall(r"C75\d\d", log)))


def waits_after_exponentials(cubin: bytes) -> bool:
    """Whether the loop waits for P V only when all exponentials of a tile are under way.

    ptxas likes to lift that wait; the tensor cores then idle while weights are computed.
    """
    body = _consumer_loops(cubin)[0]
    scores = next(i for i, line in enumerate(body) if re.search(r"DEPBAR.LE gsb0, 0x[12]", line))
    values = next(i for i, line in enumerate(body) if "DEPBAR.LE gsb0, 0x0" in line)
    exponentials = [i for i, line in enumerate(body) if "MUFU.EX2" in line]
    return scores < min(exponentials) and max(exponentials) < values


def products_follow_each_other(cubin: bytes) -> bool:
    """Whether no barrier stands between the two products of a tile, in the loop of either consumer.

    There all warps would wait for each other before they multiply weights and values.
    """
    for body in _consumer_loops(cubin):
        products = [i for i, line in enumerate(body) if "HGMMA" in line]
        if any("BAR.SYNC" in line for line in body[products[0] : products[-1]]):
            return False
    return True


def tiles_stay_in_registers(cubin: bytes) -> bool:
    """Whether the loop over tiles, the shortest with products, keeps off local memory."""
    loops = _loops(_disassembled(cubin))
    products = (body for body in loops if any(re.search(r"\bHG?MMA", line) for line in body))
    return not any(re.search(r"\b(LDL|STL)\b", line) for line in min(products, key=len, default=[]))


def loops_stay_in_registers(cubin: bytes) -> bool:
    """Whether both loops that multiply matrices, one for each consumer, touch no local memory."""
    loops = _product_loops(cubin)
    return not any(re.search(r"\b(LDL|STL)\b", line) for body in loops for line in body)


def loops_overlap_products(cubin: bytes) -> bool:
    """Whether both loops that multiply matrices go on while the last product is under way."""
    waits = [
        [found[1] for line in body if (found := re.search(r"DEPBAR.LE gsb0, (0x\d)", line))]
        for body in _product_loops(cubin)
    ]
    return waits == [["0x1"], ["0x1"]]


def _product_loops(cubin: bytes) -> list[list[str]]:
    """The shortest two loops with matrix instructions, one for each consumer."""
    loops = (
        body for body in _loops(_disassembled(cubin)) if sum("HGMMA" in line for line in body) > 1
    )
    return sorted(loops, key=len)[:2]


def loops_join_no_halves(cubin: bytes) -> bool:
    """Whether weights stay packed in pairs from one tile to the next: a byte permutation in the
    loop of a consumer joins two of them."""
    return not any("PRMT" in line for body in _consumer_loops(cubin) for line in body)


def _consumer_loops(cubin: bytes) -> list[list[str]]:
    """The loops over tiles of the consumers, which wait for scores while more is under way."""
    loops = (
        body
        for body in _loops(_disassembled(cubin))
        if any(re.search(r"DEPBAR.LE gsb0, 0x[12]", line) for line in body)
    )
    return sorted(loops, key=len)[:2]


@lru_cache(maxsize=1)  # several checks look at one kernel
def _disassembled(cubin: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-c", file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()


def _loops(lines: list[str]) -> list[list[str]]:
    """The lines between each jump back and where it goes."""
    labels = {
        found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\.L_x_\d+):", line))
    }
    loops: list[list[str]] = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], i) < i:
            loops.append(lines[labels[jump[1]] : i + 1])
    return loops
