"""`anabranch quantize`: write a model with smaller weights."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.llm.cli.options import add_command, check_options, new_app, option

if TYPE_CHECKING:
    from anabranch.llm.cli.progress import Progress

FORMATS = ("q8_0", "q4_k", "fp8", "int4")
TEXT = Path(__file__).with_name("river.txt")
WINDOW = 512  # tokens that a perplexity reads at once, the second half of them scored
MOST_WINDOWS = 4


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Write a model with smaller weights.

    q8_0 and q4_k are for CPUs: a .gguf file becomes another, which llama.cpp reads too. Rows of
    q4_k have multiples of 256 columns; other matrices, embeddings and the output layer become
    q8_0, and norms stay as they are.

    fp8 and int4 are for GPUs: a transformers directory, a .gguf file or a hub id becomes a
    directory in the layout of compressed-tensors, which vLLM and transformers read too. fp8 has a
    scale for each output, int4 one for each 128 columns; embeddings and the output layer stay in
    16 bits.

    No data is needed: each group gets the scale that fits its numbers best. The last line says how
    much smaller the weights are and how the perplexity of a text changed.

    $ anabranch quantize model-f16.gguf --to q4_k
    $ anabranch quantize ./Llama-3.1-8B-Instruct --to fp8 --out llama-fp8
    $ anabranch quantize ./Llama-3.1-8B-Instruct --to int4 --text my-domain.txt
    $ anabranch serve --model llama-fp8
    """

    model: str = option("", "A .gguf file, a transformers directory or a hub id.", positional=True)
    to: str | None = option(None, "The format.", choices=FORMATS)
    out: Path | None = option(None, "What to write; MODEL-FORMAT here unless given.")
    text: Path | None = option(None, "For the perplexity: a text; a short one unless given.")
    device: str | None = option(None, "For the perplexity: cuda or cpu; the GPU if there is one.")
    perplexity: bool = option(True, "Compare the perplexity, which loads both models.")

    def __post_init__(self) -> None:
        check_options(self)

    def check(self) -> None:
        """Refuse what cannot be done, before anything is read."""
        if not self.model:
            raise ValueError("give a model: a .gguf file, a transformers directory or a hub id")
        if self.to is None:
            raise ValueError(f"--to must be one of {', '.join(FORMATS)}")
        is_file = Path(self.model).suffix == ".gguf"
        if self.is_gguf and not is_file:
            raise ValueError(
                f"--to {self.to} writes a .gguf file from another one, with wider weights; for "
                f"{self.model} there are --to fp8 and --to int4"
            )
        if self.target.exists():
            raise ValueError(f"{self.target} exists: give another --out")

    @property
    def is_gguf(self) -> bool:
        """Whether a file is written, and not a directory."""
        return self.to in ("q8_0", "q4_k")

    @property
    def target(self) -> Path:
        name = f"{Path(self.model).stem}-{self.to}" + (".gguf" if self.is_gguf else "")
        return Path(name) if self.out is None else self.out


def quantize(options: QuantizeOptions) -> None:
    from rich.console import Console

    from anabranch.llm.cli.progress import progress_bars, quiet_transformers

    options.check()
    text = (options.text or TEXT).read_text()
    quiet_transformers()
    with progress_bars() as progress:
        source, how = _write(options, progress)
        change = _size_change(source, options.target)
        if options.perplexity:
            change += f"; {_perplexities(options, source, text, progress)}"
    Console().print(f"{options.target}: {how}; {change}", highlight=False, soft_wrap=True)


def _write(options: QuantizeOptions, progress: Progress) -> tuple[Path, str]:
    """What was read and how the weights were written."""
    from anabranch.llm.models.load import local_source

    assert options.to is not None
    if options.is_gguf:
        from anabranch.llm.models.gguf_quantise import quantise_gguf

        source = Path(options.model)
        return source, quantise_gguf(source, options.target, options.to, progress)
    from anabranch.llm.models.quantise_weights import quantise_directory

    source = Path(local_source(options.model, progress=lambda what: progress(what, 0, 0)))
    return source, quantise_directory(source, options.target, options.to, progress)


def _size_change(source: Path, target: Path) -> str:
    sizes = [_num_bytes(path) for path in (source, target)]
    ratio = sizes[1] / sizes[0]
    return f"{sizes[0] / 1e6:,.0f} MB before, {sizes[1] / 1e6:,.0f} MB now ({ratio:.2f} of it)"


def _num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(each.stat().st_size for each in files)


def _perplexities(options: QuantizeOptions, source: Path, text: str, progress: Progress) -> str:
    import torch

    from anabranch.llm.models import Activations, load_model

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found: list[float] = []
    count = 0
    for path in (source, options.target):
        progress(f"perplexity of {path.name}", 0, 0)
        loaded = load_model(str(path), device=device, activations=Activations.INT8)
        if loaded.tokenizer is None:
            return "no perplexity: the model has no tokenizer"
        value, count = perplexity(loaded.model, loaded.tokenizer, text)
        found.append(value)
        del loaded
    return (
        f"perplexity of {count} tokens {found[0]:.3f} before, {found[1]:.3f} now "
        f"({100 * (found[1] / found[0] - 1):+.1f}%)"
    )


def perplexity(model: Any, tokenizer: Any, text: str) -> tuple[float, int]:
    """How surprised a model is by the beginning of a text, and of how many tokens."""
    import torch

    ids: list[int] = tokenizer.encode(text)
    window = min(WINDOW, len(ids), model.config.max_position_embeddings)
    if window < 2:
        raise ValueError(f"the text has {len(ids)} tokens, and 2 are needed")
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for start in range(0, len(ids) - window + 1, window)[:MOST_WINDOWS]:
        some = torch.tensor(ids[start : start + window], device=device)
        first = window // 2
        with torch.inference_mode():
            logits = model(some[None], use_cache=False).logits[0, first - 1 : -1].float()
        scored = logits.log_softmax(-1).gather(1, some[first:, None])
        total -= float(scored.sum())
        count += len(scored)
    return math.exp(total / count), count


app = new_app()
add_command(app, "quantize", QuantizeOptions, quantize)
