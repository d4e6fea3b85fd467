"""An answer in the terminal: tokens as they come, in the colour of their origin, then figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from anabranch.llm.engine.request import CompletionOutput
from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.sequences.sequence import Origin

if TYPE_CHECKING:
    from anabranch.llm.cli.step_times import RecordedStats
    from anabranch.llm.engine.admission import Prompt
    from anabranch.llm.engine.llm import LLM
    from anabranch.llm.engine.request import RequestOutput
    from anabranch.llm.sampling.params import SamplingParams

STYLES = {Origin.SAMPLED: None, Origin.ACCEPTED: "green", Origin.CORRECTED: "yellow"}
LEGEND = "plain: sampled, [green]green: drafted and accepted[/], [yellow]yellow: corrected[/]"
DRAFT_COUNTS = ("drafts", "draft_tokens", "accepted_tokens", "emitted_tokens")
DRAFT_RATES = (
    "acceptance_rate",
    "acceptance_length",
    "system_efficiency",
    "acceptance_by_position",
)


class Painter:
    """Writes a continuation to a console, as far as it is certain."""

    def __init__(
        self, console: Console, tokenizer: Any, prompt: Sequence[int], skip_special: bool = True
    ) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt=prompt, skip_special=skip_special)
        self._styles: list[str | None] = []  # of each character of the stream
        self._num_tokens = 0
        self._num_shown = 0

    def show(self, output: CompletionOutput) -> None:
        start = self._num_tokens
        new = zip(output.token_ids[start:], output.origins[start:], strict=True)
        for token, origin in new:
            self._num_tokens += 1
            style = STYLES[Origin(origin)]
            if self._tokenizer is None:
                self._write(f"{token} ", style)
                continue
            self._stream.push(token)
            missing = len(self._stream.text) - len(self._styles)
            self._styles += [style] * missing
        self._show_text(output.text)

    def _show_text(self, text: str) -> None:
        """The text may be shorter than the tokens': what could be a stop string is held back."""
        start = self._num_shown
        while start < len(text):
            style = self._style(start)
            stop = start + 1
            while stop < len(text) and self._style(stop) == style:
                stop += 1
            self._write(text[start:stop], style)
            start = stop
        self._num_shown = max(start, self._num_shown)

    def _style(self, place: int) -> str | None:
        return self._styles[place] if place < len(self._styles) else None

    def _write(self, text: str, style: str | None) -> None:
        self._console.out(text, style=style, end="", highlight=False)
        self._console.file.flush()


def print_answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Stream one answer token by token; print several when all are complete."""
    console = Console()
    output: RequestOutput | None = None
    painter: Painter | None = None
    for output in llm.stream(prompt, params):
        if painter is None:
            painter = _painter(llm, console, output, params)
        if params.n == 1:
            painter.show(output.outputs[0])
    assert output is not None
    for each in output.outputs if params.n > 1 else ():
        console.out(f"[{each.index}] ", end="", highlight=False)
        _painter(llm, console, output, params).show(each)
        console.out("")
    if params.n == 1:
        console.out("")
    if llm.engine.config.speculative is not None and console.is_terminal:
        Console(stderr=True).print(f"\n{LEGEND}", style="dim", highlight=False)
    return output


def _painter(llm: LLM, console: Console, output: RequestOutput, params: SamplingParams) -> Painter:
    prompt = output.prompt_token_ids
    return Painter(console, llm.tokenizer, prompt, params.skip_special_tokens)


def summary_of(llm: LLM, output: RequestOutput, stats: RecordedStats) -> dict[str, Any]:
    """Figures by name; what was not measured is missing."""
    times = output.times
    assert times is not None and times.first_token is not None and times.last_token is not None
    to_first = times.first_token - times.arrival
    num_output = sum(len(each.token_ids) for each in output.outputs)
    num_first = sum(each.steps.count(each.steps[0]) for each in output.outputs if each.steps)
    decoding = times.last_token - times.first_token
    origins = Counter(origin for each in output.outputs for origin in each.origins)
    prompt_tokens = len(output.prompt_token_ids)
    summary: dict[str, Any] = {
        "model": llm.engine.model_name,
        "device": str(llm.engine.device),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": num_output,
        "time_to_first_token_ms": 1e3 * to_first,
        "prompt_tokens_s": (prompt_tokens - output.num_cached_tokens) / max(to_first, 1e-9),
        "origins": {origin.name.lower(): origins[int(origin)] for origin in Origin},
        "steps": stats.num_steps,
        "graph_steps": stats.num_graph_steps,
        "stages": stats.stage_summary(),
    }
    if decoding > 0:
        summary["output_tokens_s"] = (num_output - num_first) / decoding
    if not llm.engine.config.cache_formats.is_plain:
        summary["kv_cache_dtype"] = llm.engine.config.kv_cache_dtype
        summary["saturated_elements"] = stats.num_saturated
    if llm.engine.config.speculative is not None:
        summary["speculation"] = _speculation(llm, stats)
    return summary


def _speculation(llm: LLM, stats: RecordedStats) -> dict[str, Any]:
    drafts = stats.speculative
    found: dict[str, Any] = {name: getattr(drafts, f"num_{name}") for name in DRAFT_COUNTS}
    found |= {name: getattr(drafts, name) for name in DRAFT_RATES}
    if "proposal" in stats.stage_ms and drafts.num_draft_tokens:
        found["proposal_ms_a_token"] = stats.stage_ms["proposal"] / drafts.num_draft_tokens
    if llm.engine.adaptive.enabled:
        found["adaptive"] = llm.engine.adaptive.reason
    return found


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(summary):
        table.add_row(name, value)
    console.print(table, highlight=False)


def _lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    cached = summary["cached_tokens"]
    lines = [
        ("model", f"{summary['model']} on {summary['device']}"),
        (
            "prompt",
            f"{summary['prompt_tokens']} tokens ({cached} cached), "
            f"{summary['prompt_tokens_s']:.1f} tokens/s",
        ),
        ("time to first token", f"{summary['time_to_first_token_ms']:.1f} ms"),
        ("output", _output(summary)),
        ("tokens by origin", ", ".join(f"{n} {name}" for name, n in summary["origins"].items())),
    ]
    if "kv_cache_dtype" in summary:
        saturated = f"{summary['saturated_elements']} elements saturated"
        lines.append(("KV cache", f"{summary['kv_cache_dtype']}, {saturated}"))
    if "speculation" in summary:
        lines += _speculation_lines(summary["speculation"])
    for stage, times in summary["stages"].items():
        lines.append(
            (stage, f"{times['mean_ms']:.2f} ms a step, {times['steps']} of {summary['steps']}")
        )
    return lines


def _output(summary: dict[str, Any]) -> str:
    if "output_tokens_s" not in summary:
        return f"{summary['output_tokens']} tokens"
    return f"{summary['output_tokens']} tokens, {summary['output_tokens_s']:.1f} tokens/s"


def _speculation_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("drafts", "none were made")] if not found["drafts"] else _acceptance_lines(found)
    if "proposal_ms_a_token" in found:
        lines.append(("cost of drafts", f"{found['proposal_ms_a_token']:.3f} ms a draft token"))
    if "adaptive" in found:
        lines.append(("adaptive", found["adaptive"]))
    return lines


def _acceptance_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    positions = " ".join(f"{share:.0%}" for share in found["acceptance_by_position"])
    return [
        (
            "acceptance rate",
            f"{found['acceptance_rate']:.1%}, {found['accepted_tokens']} of "
            f"{found['draft_tokens']} draft tokens",
        ),
        ("by position", positions),
        ("system efficiency", f"{found['system_efficiency']:.1%}"),
        ("tokens a verification", f"{found['acceptance_length']:.2f}"),
    ]
