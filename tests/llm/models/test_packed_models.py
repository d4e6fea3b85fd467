"""Models whose weights stay in the formats of their GGUF file: what the expanded ones compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf_files import GGUF_NAMES, SIZES, tiny_llama, write_gguf  # noqa: E402

from anabranch import LLM, SamplingParams  # noqa: E402
from anabranch.kernels.cpu.decoder import LayerRun  # noqa: E402
from anabranch.kernels.cpu.native import native  # noqa: E402
from anabranch.llm.models import Activations, load_model  # noqa: E402
from anabranch.llm.models.cpu_layers import PackedEmbedding, PackedLinear  # noqa: E402
from anabranch.llm.models.fetched_models import models_directory  # noqa: E402
from anabranch.llm.models.packed_file import DATA, INDEX  # noqa: E402

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0", "weight": "Q4_K"}
PROMPT = torch.tensor([[5, 17, 250, 3, 99, 1, 0, 42]])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    native()  # from the cache of all tests


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(PROMPT, use_cache=False).logits


CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Q4_0": ({"weight": "Q4_0"}, {}),
    "Q8_0, tied": ({"weight": "Q8_0"}, {"tie_word_embeddings": True}),
    "Q5_1 and F16": ({"attn": "F16", "weight": "Q5_1"}, {}),
    "K": (MIXED, WIDE),
    "floats": ({}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    formats, changes = CASES[case]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(**changes), formats=formats)
    expected = logits(load_model(str(path), device="cpu").model)
    exact, fast = (
        load_model(str(path), device="cpu", activations=each).model
        for each in (Activations.FLOAT32, Activations.INT8)
    )
    assert isinstance(exact.model.embed_tokens, PackedEmbedding)
    assert isinstance(exact.model.layers[0].mlp.down_proj, PackedLinear)
    size = expected.abs().max()
    assert (logits(exact) - expected).abs().max() <= 1e-5 * size
    error = (logits(fast) - expected).abs().max()
    assert error <= 0.05 * size
    assert (error > 1e-5 * size) == bool(formats), "activations in 8 bits"


def test_other_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are found by their values, whatever converts them."""
    pytest.importorskip("accelerate")
    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 128}, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config).eval()
    monkeypatch.setitem(GGUF_NAMES, "self_attn.q_norm", "attn_q_norm")
    monkeypatch.setitem(GGUF_NAMES, "self_attn.k_norm", "attn_k_norm")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, pre="qwen2", arch="qwen3", formats={"weight": "Q4_1"})
    expected = logits(load_model(str(path), device="cpu").model)
    loaded = load_model(str(path), device="cpu", activations=Activations.FLOAT32).model
    packed = [x for x in loaded.modules() if isinstance(x, PackedLinear)]
    assert len(packed) == 2 * 7 + 1
    assert {kind for x in packed for kind, _ in x.packed.formats} == {"Q4_1"}
    assert (logits(loaded) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_engine_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call a step; the same tokens in any batch and with drafts."""
    model = tiny_llama(initializer_range=0.4, **WIDE)
    path = str(write_gguf(tmp_path / "tiny.gguf", model, formats=MIXED))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 17, 250, 3], [8] * 20]
    runs: list[int] = []
    run = LayerRun.__call__

    def counted(self: LayerRun, x: torch.Tensor, *given: Any) -> torch.Tensor:
        runs.append(len(x))
        return run(self, x, *given)

    monkeypatch.setattr(LayerRun, "__call__", counted)

    def tokens(**options: Any) -> list[Any]:
        llm = LLM(path, device="cpu", max_num_seqs=4, **options)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = tokens(dtype="float32")
    assert runs == [24, *[2] * 11]  # tokens of both prompts, then one of each
    assert tokens(dtype="auto", activations="float32", page_size=4) == expected
    fast = tokens()
    assert len(runs) == 36
    assert tokens(speculative="ngram") == fast
    assert tokens(kv_cache_dtype="q8_0") and len(runs) > 36


def test_a_run_refuses_tokens_that_it_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_llama(**WIDE), formats=MIXED))
    run, refused = LayerRun.__call__, list[int]()

    def checked(self: LayerRun, x: torch.Tensor, *given: Any) -> torch.Tensor:
        step = given[-1]
        wrong = step._replace(cu_seqlens_q=step.cu_seqlens_q + 1)
        with pytest.raises(IndexError, match=f"num_tokens = {len(x)}, got 1 to {len(x) + 1}"):
            run(self, x, *given[:-1], wrong)
        refused.append(len(x))
        return run(self, x, *given)

    monkeypatch.setattr(LayerRun, "__call__", checked)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    LLM(path, device="cpu", dtype="float32").generate([[8] * 20], params)
    assert refused == [20, 1]


def test_files_are_packed_once_and_mapped(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"})
    steps: list[str] = []
    for _ in range(2):
        load_model(str(path), device="cpu", activations=Activations.INT8, progress=steps.append)
    assert steps == ["packing tiny.gguf", "loading tiny", "loading tiny"]
    (directory,) = models_directory().iterdir()
    index = json.loads((directory / INDEX).read_text())
    kept = sum(place["bytes"] for place in index.values() if place["format"] == "Q4_0")
    weights = sum(x.numel() for x in tiny_llama().parameters() if x.ndim == 2)
    assert kept == pytest.approx(weights * 18 / 32, rel=0.05), "as many bits as in the file"
    (directory / DATA).write_bytes((directory / DATA).read_bytes()[:-4096])
    with pytest.raises(ValueError, match="ends before"):
        load_model(str(path), device="cpu", activations=Activations.INT8)


def test_a_dtype_expands(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"})
    options: Any = {"device": "cpu", "activations": Activations.INT8}
    loaded = load_model(str(path), dtype=torch.float32, **options).model
    assert not any(isinstance(x, PackedLinear) for x in loaded.modules())


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="activations must be one of int8, float32, got 'fp4'"):
        LLM("dummy:llama-3.2-1b", activations="fp4")
    with pytest.raises(ValueError, match="dtype must be one of auto, float16"):
        LLM("dummy:llama-3.2-1b", dtype="int4")
