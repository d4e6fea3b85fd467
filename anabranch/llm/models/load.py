"""`load_model`: a model and its tokenizer from any of the places they come from."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anabranch.kernels.cpu.native import native
from anabranch.llm.models.fetched_models import (
    Progress,
    WeightForm,
    gguf_directory,
    smollm2_directory,
)
from anabranch.llm.models.file_tokenizer import FileTokenizer, file_tokenizer
from anabranch.llm.models.packed_decoder import PackedDecoder, load_decoder
from anabranch.llm.models.packed_file import INDEX
from anabranch.llm.models.spent_memory import release_spent_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from anabranch.llm.models.decoder_config import DecoderConfig

DUMMY = "dummy:"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class Activations(Enum):
    """How products with quantised weights take their inputs."""

    INT8 = "int8"  # in blocks of 32 with a scale each
    FLOAT32 = "float32"  # exact, and slower


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for inference, and its tokenizer if it has one."""

    model: PreTrainedModel | PackedDecoder
    tokenizer: PreTrainedTokenizerBase | FileTokenizer | None
    name: str
    config: PreTrainedConfig | DecoderConfig


def load_model(
    source: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    progress: Progress | None = None,
    cut: Callable[[PreTrainedModel], object] | None = None,
    activations: Activations | None = None,
    whole_layers: bool = False,
) -> LoadedModel:
    """Load a model onto a device.

    `source` is `smollm2`, a transformers directory, a `.gguf` file, the id `org/name` of a model on
    a hub, or `dummy:CONFIG`: random weights, drawn with `seed`, in the shapes of a config file or
    of one that comes with anabranch. `dtype` is float32 on a CPU and 16 bits elsewhere unless
    given. `progress` is called with each step as it starts. `cut` may leave a part of the model
    only; that part of a checkpoint alone must fit on the device. With `activations`, weights
    of a GGUF file stay quantised unless `dtype` is given: as codes on a GPU, and in its formats on
    a CPU with kernels for them. With `whole_layers`, a model of these kernels is none of
    transformers where they run its layers whole.
    """
    if source.startswith(DUMMY):
        from anabranch.llm.models.dummy_model import dummy_config, dummy_model
        from anabranch.llm.models.model_config import default_dtype

        config = dummy_config(source.removeprefix(DUMMY))
        _tell(progress, f"drawing random weights for {source}")
        model = dummy_model(
            config,
            device=device,
            dtype=dtype or default_dtype(config, device),
            attn_implementation=attn_implementation,
            seed=seed,
        )
        if cut is not None:
            cut(model)
        return _loaded(model, None, source)
    keeps = activations is not None and dtype is None and cut is None
    form = _kept_form(torch.device(device)) if keeps else WeightForm.FLOATS
    name, directory = _find(source, progress, form)
    _tell(progress, f"loading {name}")
    kept = activations is not None and (directory / INDEX).is_file()
    float_inputs = activations is Activations.FLOAT32
    if kept and whole_layers:
        decoder = load_decoder(
            directory, implementation=attn_implementation, float_inputs=float_inputs
        )
        small = None if decoder is None else file_tokenizer(directory)
        if decoder is not None and small is not None:
            release_spent_memory()
            return _loaded(decoder, small, name)
    from anabranch.llm.models.checkpoint import load_tokenizer, load_weights

    tokenizer = load_tokenizer(directory)
    if kept:
        from anabranch.llm.models.packed_model import load_packed

        model = load_packed(
            directory, attn_implementation=attn_implementation, float_inputs=float_inputs
        )
        return _loaded(model, tokenizer, name)
    model = load_weights(
        directory, device=device, dtype=dtype, attn_implementation=attn_implementation, cut=cut
    )
    return _loaded(model, tokenizer, name)


def local_source(source: str, *, progress: Progress | None = None) -> str:
    """A source that needs neither download nor conversion: what others need not fetch again."""
    return source if source.startswith(DUMMY) else str(_find(source, progress)[1])


def _kept_form(device: torch.device) -> WeightForm:
    """In which form the weights of a GGUF file stay quantised on a device."""
    if device.type == "cuda":
        return WeightForm.CODES
    return WeightForm.FLOATS if native() is None else WeightForm.PACKED


def _find(
    source: str, progress: Progress | None, form: WeightForm = WeightForm.FLOATS
) -> tuple[str, Path]:
    """The name of a model and the transformers directory it lies in, fetched or converted."""
    if source == "smollm2":
        return source, smollm2_directory(form=form, progress=progress)
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.suffix == ".gguf" and path.is_file():
        return path.stem, gguf_directory(path, form=form, progress=progress)
    if path.exists():
        raise ValueError(f"{source} is neither a transformers directory nor a .gguf file")
    if path.suffix != ".gguf" and HUB_ID.fullmatch(source):
        _tell(progress, f"downloading {source}")
        from anabranch.llm.models.hub_model import hub_directory

        return source, hub_directory(source)
    raise FileNotFoundError(
        f"no model {source!r}: a source is smollm2, a transformers directory, a .gguf file, "
        "a hub id org/name, or dummy:CONFIG"
    )


def _loaded(
    model: PreTrainedModel | PackedDecoder,
    tokenizer: PreTrainedTokenizerBase | FileTokenizer | None,
    name: str,
) -> LoadedModel:
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, name, model.config)


def _tell(progress: Progress | None, step: str) -> None:
    if progress:
        progress(step)
