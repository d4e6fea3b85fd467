"""The README's few ratios: this library against the fastest peer of the same run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from drawn_table import drawn_results
from hopper_table import hopper_results

ATTENTION = {
    "merge": "merge of two 16-bit states",
    "decode": "decode over pages",
    "verify": "verify: 3 to 8 queries a sequence",
    "prefill": "prefill, the portable Triton kernel",
}
GROUPS = {"table", "models"}


def headline_section(root: Path) -> str | None:
    """A table of ratios with their GPU and date; None without results."""
    folder = root / "benchmarks" / "results"
    rows = [
        _attention_row(path, label)
        for bench, label in ATTENTION.items()
        for path in sorted(folder.glob(f"*-{bench}.json"))
    ]
    rows += _drawn_row(root)
    rows += _hopper_rows(root)
    rows += [_fp8_prompts_row(path) for path in folder.glob("quantised/h200-prompts.json")]
    rows += [_latent_row(path) for path in folder.glob("latent/h200.json")]
    rows += [_fp8_row(path) for path in folder.glob("latent/h200-formats.json")]
    rows += [_deepseek_row(path) for path in folder.glob("engine/h200-deepseek.json")]
    rows += [_throughput_row(path) for path in sorted(folder.glob("engine/*throughput.json"))]
    rows += [row for path in folder.glob("engine/cpu.json") for row in _cpu_rows(path)]
    head = ["| speed of anabranch / that of the fastest peer | median | range | peers | run |"]
    return "\n".join([*head, "|---|---:|---:|---|---|", *rows]) if rows else None


def _attention_row(path: Path, label: str) -> str:
    results = json.loads(path.read_text())
    cases: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        groups = set(row["shape"]["groups"])
        is_merge = "grid" in groups and row["shape"]["num_heads"] == 32
        counted = is_merge or GROUPS & groups
        if row["role"] == "ours" and row["ratio"] and row["best_peer"] != "torch" and counted:
            cases.setdefault(row["case"], row)  # the first of ours is the one that is rated
    ratios = [row["ratio"] for row in cases.values()]
    peers = sorted({row["best_peer"].removesuffix(" paged") for row in cases.values()})
    return _row(label, ratios, ", ".join(peers), results["header"])


def _drawn_row(root: Path) -> list[str]:
    """Calls that nobody chose."""
    results = drawn_results(root)
    if results is None:
        return []
    ratios = [row["ratio"] for row in results["rows"]]
    label = f"{len(ratios)} calls drawn at random"
    return [_row(label, ratios, "FA3, cuDNN, FlashMLA", results["header"])]


def _hopper_rows(root: Path) -> list[str]:
    """Prompts, and pieces of prompts beside decodes, on the producer that a GPU's default is."""
    results = hopper_results(root)
    if results is None:
        return []
    rows = [row for row in results["rows"] if row["producer"] == "gluon"]
    chunks = [row["ratio"] for row in rows if row["case"].startswith("chunk")]
    prompts = [row["ratio"] for row in rows if not row["case"].startswith(("chunk", "verify"))]
    return [
        _row("prefill", prompts, "FA3, cuDNN", results["header"]),
        _row("chunks of prompts over pages", chunks, "FA3", results["header"]),
    ]


def _latent_row(path: Path) -> str:
    """Decode over latent rows, on the producer that a GPU's default is."""
    results = json.loads(path.read_text())
    default = [row for row in results["rows"] if row["implementation"] == "anabranch gluon"]
    ratios = [row["ratio"] for row in default]
    return _row("decode over latent rows (DeepSeek)", ratios, "FlashMLA", results["header"])


def _fp8_row(path: Path) -> str:
    """Decode over fp8 with one scale, beside the fastest peer over the same cache."""
    results = json.loads(path.read_text())
    times = {row["format"]: row["us"] for row in results["rows"]}
    peers = {name.removesuffix(" fp8"): us for name, us in times.items() if name.endswith(" fp8")}
    ratio = min(peers.values()) / times["fp8_tensor"]
    return _row("decode over an fp8 cache", [ratio], ", ".join(sorted(peers)), results["header"])


def _fp8_prompts_row(path: Path) -> str:
    """Prompts and chunks over fp8 pages with one scale, beside FlashAttention-3's over the same."""
    results = json.loads(path.read_text())
    ways = {("fp8_tensor", "decoded first"): "ours", ("FA3 fp8", "pages"): "theirs"}
    times: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        if (row["format"], row["way"]) in ways:
            times.setdefault(row["case"], {})[ways[row["format"], row["way"]]] = row["us"]
    ratios = [each["theirs"] / each["ours"] for each in times.values()]
    return _row("prompts and chunks over an fp8 cache", ratios, "FA3", results["header"])


def _deepseek_row(path: Path) -> str:
    """Decode steps of an engine beside vLLM's."""
    results = json.loads(path.read_text())
    ours, theirs = (
        {row["case"]: row["step_ms"] for row in results["rows"] if row["engine"].startswith(name)}
        for name in ("anabranch", "vllm")
    )
    ratios = [theirs[case] / ms for case, ms in ours.items()]
    return _row("decode steps of DeepSeek-V2-Lite", ratios, "vLLM 0.26", results["header"])


def _throughput_row(path: Path) -> str:
    results = json.loads(path.read_text())
    ours, *others = (row for row in results["rows"] if "error" not in row)
    best = max(others, key=lambda row: row["output_tokens_s"])
    options = results["options"]
    label = f"{options['num_prompts']} prompts at once, {options['model'].removeprefix('dummy:')}"
    ratio = ours["output_tokens_s"] / best["output_tokens_s"]
    return _row(label, [ratio], best["name"].partition(" (")[0], results["header"])


def _cpu_rows(path: Path) -> list[str]:
    results = json.loads(path.read_text())
    ratios = {row["ratio_of"]: row["ratio"] for row in results["rows"] if "ratio_of" in row}
    labels = {
        "batch 1 to transformers": ("one answer on a CPU, SmolLM2-135M", "transformers generate"),
        "n-gram to no drafts": ("a summary on a CPU with n-gram drafts", "without drafts"),
    }
    return [
        _row(label, [ratios[name]], peer, results["header"])
        for name, (label, peer) in labels.items()
        if name in ratios
    ]


def _row(label: str, ratios: list[float], peers: str, header: dict[str, Any]) -> str:
    span = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    run = f"{header['device'].removeprefix('NVIDIA ')}, {header['date'][:10]}"
    return f"| {label} | **{median(ratios):.2f}x** | {span} | {peers} | {run} |"
