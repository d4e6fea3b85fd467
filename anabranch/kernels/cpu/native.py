"""The C kernels of this folder, compiled for this machine on first use and kept on disk."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from anabranch.launches.build_cache import build_once

FOLDER = Path(__file__).parent
OPTIONS = ("-O3", "-fopenmp", "-fno-math-errno", "-fPIC")
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "packed_linear": (*[POINTER] * 5, LONG, INT),
    "packed_rows": (*[POINTER] * 3, LONG, INT),
    "rms_norm": (POINTER, POINTER, POINTER, LONG, LONG, FLOAT, INT),
    "silu_gate": (POINTER, POINTER, LONG, LONG, INT),
    "hold_team": (INT,),
    "layer_inputs": (*[POINTER] * 9, *[LONG] * 3, FLOAT, INT),
    "layer_outputs": (*[POINTER] * 9, LONG, FLOAT, INT),
    "run_layers": (*[POINTER] * 5, *[LONG] * 4, INT),
    "attend_pages": (*[POINTER] * 15, FLOAT, INT),
    "select_splits": (*[POINTER] * 2, *[LONG] * 3, INT),
    "encode_rows": (*[POINTER] * 5, INT),
    "ban_tokens": (*[POINTER] * 3, *[LONG] * 4),
    "find_largest": (*[POINTER] * 3, LONG, LONG, INT),
    "merge_pairs": (*[POINTER] * 6, LONG, LONG),
}
NUMBERED = {
    "packed_rows",
    "run_layers",
    "attend_pages",
    "select_splits",
    "encode_rows",
    "merge_pairs",
}
_log = logging.getLogger(__name__)


@cache
def native() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler for them: torch runs instead."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        _log.warning("no C compiler (cc, or $CC): CPU kernels are torch's, which are slower")
        return None
    try:
        return load_kernels(compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or error
        _log.warning("CPU kernels are torch's, since ours cannot be compiled: %s", detail)
        return None


def load_kernels(compiler: str, target: str = "native") -> ctypes.CDLL:
    """The kernels compiled for a target of the compiler's -march, which this machine can run."""
    library = ctypes.CDLL(str(_build(compiler, (*OPTIONS, f"-march={target}"))))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = LONG if name in NUMBERED else None
    return library


def _build(compiler: str, options: tuple[str, ...]) -> Path:
    sources = sorted(FOLDER.glob("*.c"))
    texts = [path.read_text() for path in (*sources, *sorted(FOLDER.glob("*.h")))]
    version = _run([compiler, "--version"])
    identity = (*texts, *options, version, _processor(), torch.__version__)
    return build_once("cpu.so", identity, lambda: _compile(compiler, options, sources))


def _compile(compiler: str, options: tuple[str, ...], sources: list[Path]) -> bytes:
    """Compiled with OpenMP but linked without: the runtime that torch has loaded is used."""
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        for source, target in zip(sources, objects, strict=True):
            _run([compiler, *options, "-c", str(source), "-o", target])
        library = Path(folder, "cpu.so")
        _run([compiler, "-shared", *objects, "-o", str(library), "-lm"])
        return library.read_bytes()


def _processor() -> str:
    """What code compiled for the machine at hand depends on: a cache may serve several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join(sorted(kinds))


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
