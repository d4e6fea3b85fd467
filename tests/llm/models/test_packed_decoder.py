"""Decoders made without transformers: the numbers and tokens of its models, none of its modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf_files import SIZES, tiny_llama, write_gguf  # noqa: E402

from anabranch import LLM, SamplingParams  # noqa: E402
from anabranch.kernels.cpu.linear import F32, pack  # noqa: E402
from anabranch.kernels.cpu.native import native  # noqa: E402
from anabranch.llm.models import Activations, load_model  # noqa: E402
from anabranch.llm.models.decoder_config import read_decoder_config  # noqa: E402
from anabranch.llm.models.file_tokenizer import FileTokenizer  # noqa: E402
from anabranch.llm.models.packed_decoder import PackedDecoder, load_decoder  # noqa: E402
from anabranch.llm.models.packed_file import PLAIN, KeptWeight, write_packed  # noqa: E402
from anabranch.llm.models.packed_model import load_packed  # noqa: E402
from anabranch.llm.models.replaced_parts import replace_parts  # noqa: E402
from anabranch.llm.runner.model_attention import NAME, collecting, register  # noqa: E402

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")
IDS = torch.tensor([[5, 17, 250, 3, 99, 1, 0, 42]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one layer": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 4}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("llama", {"rope_parameters": YARN}),
    "biases everywhere": ("llama", {"attention_bias": True}),
    "biases in the feed-forward block": ("llama", {"mlp_bias": True}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "layers in between": ("granite", {"residual_multiplier": 0.5}),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    native()  # from the cache of all tests


def packed_directory(path: Path, model_type: str, **changes: Any) -> Path:
    """A random model of transformers as a directory of packed floats."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, "initializer_range": 0.2, **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    path.mkdir()
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    kept: dict[str, KeptWeight] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind, data = (F32, pack(weight)) if weight.ndim == 2 else (PLAIN, weight)
        kept[name] = KeptWeight(kind, tuple(weight.shape), data)
    write_packed(path, kept.items())
    return path


@torch.inference_mode()
def logits(model: Any, **given: Any) -> torch.Tensor:
    register()
    with collecting() as layers:
        found = model(input_ids=IDS, use_cache=False, **given).logits
    assert len(layers) == model.config.num_hidden_layers
    return found


@pytest.mark.parametrize("case", OURS)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = OURS[case]
    path = packed_directory(tmp_path / "model", model_type, **changes)
    options: Any = {"float_inputs": True}
    register()
    theirs = load_packed(path, attn_implementation=NAME, **options)
    ours = load_decoder(path, implementation=NAME, **options)
    assert isinstance(ours, PackedDecoder)
    replace_parts(theirs)
    rows = torch.tensor([1, 5])
    for given in ({}, {"logits_to_keep": 2}, {"position_ids": IDS % 64}, {"logits_to_keep": rows}):
        assert torch.equal(logits(ours, **given), logits(theirs, **given)), given


@pytest.mark.parametrize("case", THEIRS)
def test_what_is_left_to_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = THEIRS[case]
    path = packed_directory(tmp_path / "model", model_type, **changes)
    assert load_decoder(path, implementation=NAME, float_inputs=True) is None


def test_files_that_are_not_as_expected(tmp_path: Path) -> None:
    """Weights in other shapes, missing ones, no configuration: transformers says what is wrong."""
    path = packed_directory(tmp_path / "model", "llama")
    config = json.loads((path / "config.json").read_text())
    wrong = [{"vocab_size": 301}, {"num_hidden_layers": 3}, {"tie_word_embeddings": True}]
    for change in wrong:
        (path / "config.json").write_text(json.dumps(config | change))
        assert read_decoder_config(path / "config.json") is not None
        assert load_decoder(path, implementation=NAME, float_inputs=True) is None
    without = [dict(config), dict(config), dict(config)]
    del without[0]["head_dim"], without[1]["rope_parameters"]["rope_type"]
    for text in (*map(json.dumps, without[:2]), "[]", "{"):
        (path / "config.json").write_text(text)
        assert read_decoder_config(path / "config.json") is None


def test_it_is_not_moved(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "model", "llama")
    model = load_decoder(path, implementation=NAME, float_inputs=True)
    assert model is not None
    with pytest.raises(NotImplementedError, match="not moved or converted"):
        model.double()


def wide_gguf(path: Path) -> str:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    formats = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0", "weight": "Q4_K"}
    return str(write_gguf(path, tiny_llama(initializer_range=0.4, **wide), formats=formats))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": "float32", "page_size": 4},
        {"speculative": "ngram"},
        {"kv_cache_dtype": "q8_0"},
        {"sparse": "pages"},
    ],
)
def test_engines_give_the_same_tokens(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wide_gguf(tmp_path / "tiny.gguf")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    params = [greedy, replace(greedy, temperature=1.0, seed=3), replace(greedy, prompt_logprobs=1)]
    prompts = [[5, 17, 250, 3], [8] * 20, "hello 1234"]

    def answers() -> tuple[type[Any], list[Any]]:
        llm = LLM(path, device="cpu", max_num_seqs=4, **options)
        found = llm.generate(prompts, params)
        texts = [(x.outputs[0].token_ids, x.outputs[0].text) for x in found]
        scores = [(x.outputs[0].logprobs, x.prompt_logprobs) for x in found]
        return type(llm.engine._launcher._built.target.model), [*texts, *scores]  # pyright: ignore

    kind, ours = answers()
    assert kind is PackedDecoder
    monkeypatch.setattr("anabranch.llm.models.load.load_decoder", lambda *_, **__: None)
    kind, theirs = answers()
    assert kind is not PackedDecoder
    assert ours == theirs


@pytest.mark.parametrize("options", [{"join_projections": False}, {"dtype": "float32"}])
def test_options_that_need_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"})
    llm = LLM(str(path), device="cpu", **options)
    assert not isinstance(llm.engine._launcher._built.target.model, PackedDecoder)  # pyright: ignore
    assert not isinstance(llm.tokenizer, FileTokenizer)


def test_both_draft_and_target(tmp_path: Path) -> None:
    path = wide_gguf(tmp_path / "tiny.gguf")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(path, device="cpu").generate("hello", params)
    drafted = LLM(path, device="cpu", speculative={"method": "draft", "model": path})
    found = drafted.generate("hello", params)
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert drafted.stats.speculative.num_accepted_tokens > 0


SCRIPT = """
import sys
from anabranch import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", speculative="ngram", max_num_seqs=2)
params = SamplingParams(temperature=0, max_tokens=6, stop=["?"], bad_words=["x"])
schema = SamplingParams(max_tokens=4, structured_outputs={"choice": ["1", "2"]})
llm.generate("hello 123 hello 123", params)
llm.chat([{"role": "user", "content": "hello"}], schema)
print(*sorted({name.partition(".")[0] for name in sys.modules} | set(sys.modules)))
"""
HEAVY = {"transformers", "huggingface_hub", "gguf", "triton", "sympy", "torch._dynamo"}
HEAVY |= {"torch._inductor", "torch.distributed.tensor", "safetensors", "typer", "fastapi"}


def test_a_server_needs_no_more() -> None:
    """Beyond what a generation imports."""
    for needed in ("uvicorn", "prometheus_client"):
        pytest.importorskip(needed)
    modules = "anabranch.llm.cli.serve, anabranch.llm.server.app, anabranch.llm.server.engine_child"
    script = f"import sys, {modules}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not (HEAVY - {"typer", "fastapi"}) & set(run.stdout.split())


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """From the second run on, when the file is packed."""
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"}))
    load_model(path, device="cpu", activations=Activations.INT8)
    command = [sys.executable, "-c", SCRIPT, path]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert not HEAVY & set(run.stdout.split())


def test_a_prompt_of_text_needs_no_library_of_tokens_or_templates(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"}))
    load_model(path, device="cpu", activations=Activations.INT8)
    script = SCRIPT.replace("llm.chat(", "# ")
    command = [sys.executable, "-c", script, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not {"tokenizers", "jinja2"} & set(run.stdout.split())
