"""An answer on standard output, as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from anabranch.llm.cli.paint import LEGEND, Painter

if TYPE_CHECKING:
    from anabranch.llm.engine.llm import LLM
    from anabranch.llm.engine.outputs import RequestOutput
    from anabranch.llm.engine.prompts import Prompt
    from anabranch.llm.sampling.params import SamplingParams


def print_answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """One answer token by token; several one after the other, when all are there."""
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
