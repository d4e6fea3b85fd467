"""What the model's generation_config.json says of sampling holds in the library and over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from server_models import talking_model

pytest.importorskip("fastapi")

from anabranch.llm.cli.generate import GenerateOptions
from anabranch.llm.engine.llm import LLM
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.completion_models import CompletionRequest

FILE = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "repetition_penalty": -3.0}
DEFAULTS = {"temperature": 0.25, "top_k": 7, "top_p": 0.5}  # what is out of range is not used


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(talking_model(), folder, dirs_exist_ok=True)
    path = Path(folder) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FILE | {"do_sample": True}))
    return str(folder)


def test_the_library_takes_them(model: str) -> None:
    llm = LLM(model, device="cpu")
    assert llm.engine.sampling_defaults == DEFAULTS
    assert llm.default_params == SamplingParams(**DEFAULTS)
    given = SamplingParams(**DEFAULTS, seed=3)
    plain = LLM(model, device="cpu", generation_config="none")
    assert plain.default_params == SamplingParams()
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    assert llm.chat(messages, given)[0].outputs == plain.chat([messages], given)[0].outputs
    (goes_on,) = llm.chat(
        [*messages, {"role": "assistant", "content": "the"}], given, continue_final_message=True
    )
    assert llm.tokenizer.decode(goes_on.prompt_token_ids).endswith("<assistant>the")


def test_bodies_and_the_command_line_take_them() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "top_k": 2, "temperature": None})
    found = body.sampling_params(dict(DEFAULTS))
    assert (found.temperature, found.top_k, found.top_p) == (0.25, 2, 0.5)
    options = GenerateOptions(prompt="a", top_p=0.75)
    params = options.sampling_params(dict(DEFAULTS))
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 7, 0.75)
    assert GenerateOptions(prompt="a").sampling_params({}).temperature == 1.0


def test_other_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="generation_config must be 'auto' or 'none', got 'vllm'"):
        LLM("smollm2", generation_config="vllm")
