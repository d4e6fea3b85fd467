"""Summarise a text on the CPU: what the answer copies from the text is drafted, not computed.

Green tokens were drafted by looking up n-grams and accepted, yellow ones corrected a draft.
`--file FILE` summarises another text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from anabranch import LLM, SamplingParams
from anabranch.llm.cli.printed_answer import print_answer, print_summary, summary_of
from anabranch.llm.cli.progress import progress_bars, quiet_transformers
from anabranch.llm.cli.step_times import record_steps

RIVER = Path(__file__).parent / "river.txt"


def main() -> None:
    """Fetch the model if need be, stream a summary, and show how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=RIVER)
    text = parser.parse_known_args()[0].file.read_text().strip()
    quiet_transformers()
    with progress_bars() as progress:
        llm = LLM("smollm2", device="cpu", speculative={"method": "ngram"}, progress=progress)
    request = f"Please summarise the following text.\n\n{text}"
    prompt = llm.chat_prompt([{"role": "user", "content": request}])
    stats = record_steps(llm)
    output = print_answer(llm, prompt, SamplingParams(temperature=0.0, max_tokens=128))
    print_summary(Console(stderr=True), summary_of(llm, output, stats))


if __name__ == "__main__":
    main()
