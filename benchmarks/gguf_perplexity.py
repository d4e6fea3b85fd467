"""Perplexity of GGUF files on a CPU: as kept with 8-bit inputs, exact, expanded, and llama.cpp's.

    python benchmarks/gguf_perplexity.py --peer LLAMA_CPP_PYTHON_VENV/bin/python FILE.gguf ...

Over windows of 512 tokens of two texts of this repository, the second half of each scored; all
engines get the same token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEXTS = ("examples/river.txt", "DESIGN.md")
WINDOW, NUM_WINDOWS = 512, 3
Windows = list[list[int]]


def windows_of(text: str, tokenizer: Any) -> Windows:
    """The beginning of a text in windows; a short text is one window."""
    ids = tokenizer(text).input_ids
    starts = range(0, max(len(ids) - WINDOW + 1, 1), WINDOW)
    return [ids[start : start + WINDOW] for start in starts][:NUM_WINDOWS]


def ours(path: str, windows: Windows, **options: Any) -> float:
    """By a model as it is loaded, without the engine."""
    import torch

    from anabranch.llm.models import load_model

    model: Any = load_model(path, device="cpu", **options).model
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in windows:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            scored = range(len(ids) // 2, len(ids))
            total -= sum(float(logits[i - 1, ids[i]]) for i in scored)
            count += len(scored)
    return math.exp(total / count)


def peer_child(path: str, windows: Windows) -> float:
    """By llama.cpp, in an interpreter that has it."""
    import llama_cpp as api  # pyright: ignore[reportMissingImports]
    import numpy as np

    llama: Any = api.Llama(path, n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
    total, count = 0.0, 0
    for ids in windows:
        llama.reset()
        llama.eval(ids)
        logits = np.array(llama.scores[: len(ids)], np.float64)
        for i in range(len(ids) // 2, len(ids)):
            row = logits[i - 1]
            largest = row.max()
            total -= row[ids[i]] - largest - math.log(np.exp(row - largest).sum())
            count += 1
    return math.exp(total / count)


def peer(python: str, path: str, windows: Windows) -> float:
    """The same, from a process of its own."""
    command = [python, __file__, "--child", path]
    run = subprocess.run(
        command, input=json.dumps(windows), capture_output=True, text=True, check=True
    )
    return float(run.stdout.split("@")[-1])


def main() -> None:
    """Print a row for every file and text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", help="GGUF files")
    parser.add_argument("--peer", help="Python interpreter that has llama-cpp-python")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(f"@{peer_child(options.files[0], json.loads(input()))}")
        return
    from anabranch.llm.models import Activations, load_model

    print("| file | text | kept, 8-bit inputs | kept, exact | expanded | llama.cpp |")
    print("|---|---|---|---|---|---|")
    for path in options.files:
        tokenizer = load_model(path, device="cpu", activations=Activations.INT8).tokenizer
        for text in TEXTS:
            windows = windows_of((ROOT / text).read_text(), tokenizer)
            found = [
                ours(path, windows, activations=Activations.INT8),
                ours(path, windows, activations=Activations.FLOAT32),
                ours(path, windows),
            ]
            found += [peer(options.peer, path, windows)] if options.peer else []
            numbers = " | ".join(f"{value:.3f}" for value in found)
            print(f"| {Path(path).stem} | {text} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
