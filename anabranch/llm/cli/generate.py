"""`anabranch generate`: answer one prompt in the terminal."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.llm.cli.engine_options import DRAFTS, SPECULATIVE, EngineOptions
from anabranch.llm.cli.options import add_command, new_app, option

if TYPE_CHECKING:
    from anabranch.llm.engine.admission import Prompt
    from anabranch.llm.engine.llm import LLM
    from anabranch.llm.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineOptions):
    """Answer a prompt in the terminal.

    Tokens stream as they are sampled: drafted and accepted ones green, corrected ones yellow.
    Speeds, acceptance and stage times follow on standard error.

    $ anabranch generate "Why do rivers meander?"
    $ anabranch generate --file examples/river.txt --prefix "Summarise:"
    $ anabranch generate --raw "Once upon a time" --temperature 0.8 --seed 1
    $ anabranch generate "Count to ten." --json | jq '.outputs[0].text'
    $ echo "What is a delta?" | anabranch generate
    """

    prompt: str | None = option(
        None, "The prompt; standard input if neither it nor --file is given.", positional=True
    )
    file: Path | None = option(None, "Read the prompt from a file.")
    prefix: str = option("", "Put before the prompt, with a blank line between.")
    chat: bool | None = option(
        None,
        "By the chat template, or the text as it is; a chat if the model has a template.",
        off_flag="--raw",
    )
    system: str | None = option(None, "Instructions to a chat model.")
    max_tokens: int = option(256, "Tokens of the answer, at most.")
    min_tokens: int = option(0, "Tokens of the answer, at least.")
    temperature: float | None = option(
        None, "0 takes the most likely token. The model's own, or 1, unless given."
    )
    top_p: float | None = option(
        None, "Keep the likeliest tokens that have this probability together."
    )
    top_k: int | None = option(None, "Keep this many of the likeliest tokens; 0 keeps all.")
    min_p: float | None = option(
        None, "Keep tokens at least this likely relative to the likeliest."
    )
    presence_penalty: float = option(0.0, "Against tokens that are in the answer.")
    frequency_penalty: float = option(0.0, "The same, for each time they are in it.")
    repetition_penalty: float | None = option(
        None, "Against tokens of prompt and answer; 1 is none."
    )
    seed: int | None = option(None, "The same seed gives the same answer.")
    n: int = option(1, "How many answers.")
    stop: tuple[str, ...] = option((), "Ends the answer. May be repeated.")
    ignore_eos: bool = option(False, "Continue after the end-of-text token.")
    logprobs: int | None = option(None, "With --json: log probabilities of this many tokens.")
    speculative: str | None = option(None, DRAFTS, choices=SPECULATIVE)
    json: bool = option(False, "Print answer and figures as JSON.")
    profile: Path | None = option(
        None, "Folder for a torch profiler trace and a picture of the stages.", metavar="DIR"
    )

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The options that the engine takes by the same name, and the model's for the others."""
        from anabranch.llm.sampling.params import SamplingParams

        names = {each.name for each in fields(SamplingParams)} & set(vars(self))
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(**(defaults | given))

    def text(self) -> str:
        """The prompt, from wherever it comes."""
        if self.prompt is not None and self.file is not None:
            raise ValueError("give a prompt or --file, not both")
        if self.file is not None:
            given = self.file.read_text().strip()
        elif self.prompt is not None:
            given = self.prompt
        elif sys.stdin.isatty():
            raise ValueError("no prompt: give one, or --file, or pipe it in")
        else:
            given = sys.stdin.read().strip()
        if not given:
            raise ValueError("the prompt is empty")
        return f"{self.prefix}\n\n{given}" if self.prefix else given


def generate(options: GenerateOptions) -> None:
    from rich.console import Console

    from anabranch.llm.cli.printed_answer import print_answer, print_summary, summary_of
    from anabranch.llm.cli.progress import progress_bars, quiet_transformers
    from anabranch.llm.cli.step_times import profiled, record_steps

    text = options.text()
    options.sampling_params({})  # refused before a model is loaded
    quiet_transformers()
    with progress_bars() as progress:
        llm = options.make(progress)
    prompt, params = (
        prompt_of(llm, text, options),
        options.sampling_params(llm.engine.sampling_defaults),
    )
    recording = (
        profiled(llm, options.profile) if options.profile else nullcontext(record_steps(llm))
    )
    with recording as stats:
        output = (
            print_answer(llm, prompt, params)
            if not options.json
            else llm.generate([prompt], params)[0]
        )
    summary = summary_of(llm, output, stats)
    if options.json:
        print(json.dumps(asdict(output) | {"summary": summary}))
        return
    console = Console(stderr=True)
    print_summary(console, summary)
    if options.profile:
        console.print(f"written to {options.profile}", highlight=False)


def prompt_of(llm: LLM, text: str, options: GenerateOptions) -> Prompt:
    """A chat, if the model was trained for it or the user says so; or the text itself."""
    template = getattr(llm.tokenizer, "chat_template", None)
    chat = template is not None if options.chat is None else options.chat
    if not chat:
        if options.system is not None:
            raise ValueError("--system needs a chat: the text is given as it is")
        return text if llm.tokenizer is not None else token_ids(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return llm.chat_prompt([*system, {"role": "user", "content": text}])


def token_ids(text: str) -> list[int]:
    """A model without a tokenizer takes token ids with spaces between them."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            f"this model has no tokenizer: the prompt must be token ids, got {text[:40]!r}"
        ) from None


app = new_app()
add_command(app, "generate", GenerateOptions, generate)
