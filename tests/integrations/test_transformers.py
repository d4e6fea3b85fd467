"""transformers models with our attention against the same models with its eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import bidirectional_mask_function  # noqa: E402

from anabranch.attend import CALLS  # noqa: E402
from anabranch.integrations.transformers import attention as ours  # noqa: E402
from anabranch.integrations.transformers import decode_step, register  # noqa: E402
from anabranch.integrations.transformers.masked import attend_masked  # noqa: E402
from anabranch.integrations.transformers.paged_attention import paged_attention  # noqa: E402
from anabranch.integrations.transformers.spans import is_spans, make_mask  # noqa: E402

register()

VOCAB, WINDOW, LONGEST = 97, 5, 13
LENS = (LONGEST, 4, 1, 9)  # of a padded batch: no padding, and shorter and longer than the window
# Sums of up to 100 products in two layers, of the largest logit.
TOLERANCE = 2**7 * torch.finfo(torch.float32).eps
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, odd group": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **MIXED}),
    "qwen3": ("Qwen3", {}),
    "phi3, fused projections": ("Phi3", {"sliding_window": None}),
    "mistral, windows": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2, softcap": ("Gemma2", {"attn_logit_softcapping": 2.0, **MIXED}),
    "gemma3, windows": ("Gemma3Text", MIXED),
    "gpt-oss, sinks": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, **MIXED}),
    "qwen2-moe, windows only in the mask": (
        "Qwen2Moe",
        {"use_sliding_window": True, "shared_expert_intermediate_size": 32, **EXPERTS, **MIXED},
    ),
}

HARDEST = ["llama", "mistral, windows", "gemma2, softcap", "gpt-oss, sinks"]


def make_model(name: str, **options: Any) -> Any:
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **own, **options})
    causal = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    model = causal(config).eval()
    for key, weight in model.named_parameters():
        if "sinks" in key:
            torch.nn.init.normal_(weight)
    return model


def make_batch(side: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (len(LENS), LONGEST))
    columns = torch.arange(LONGEST).expand(len(LENS), -1)
    lens = torch.tensor(LENS)[:, None]
    mask = {"left": columns >= LONGEST - lens, "right": columns < lens, "none": columns >= 0}[side]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def logits(model: Any, name: str, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(name)
    with torch.inference_mode():
        return model(**inputs).logits


def tokens(model: Any, name: str, batch: dict[str, torch.Tensor], **options: Any) -> list[Any]:
    model.set_attn_implementation(name)
    prompt = batch["input_ids"].shape[1]
    ids = model.generate(**batch, max_new_tokens=14, do_sample=False, **options)
    return ids[:, prompt:].tolist()


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> None:
    assert actual.isfinite().all()
    allowed = TOLERANCE * expected[real].abs().max()
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=float(allowed))


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the mask was not understood")

    monkeypatch.setattr(ours, "attend_masked", refuse)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_of_a_padded_batch(name: str, side: str) -> None:
    model, batch = make_model(name), make_batch(side)
    expected, actual = (logits(model, impl, **batch) for impl in ("eager", "anabranch"))
    assert_logits_close(actual, expected, batch["attention_mask"].bool())


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "in chunks": {"prefill_chunk_size": 4},
    "static in chunks": {"cache_implementation": "static", "prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_generate_from_left_padding(name: str, cache: str) -> None:
    model, batch = make_model(name), make_batch("left")
    expected = tokens(model, "eager", batch)
    assert tokens(model, "anabranch", batch, **CACHES[cache]) == expected


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", HARDEST)
def test_new_tokens_behind_right_padding(name: str, static: bool) -> None:
    """Sequences are in two pieces then."""
    model, batch = make_model(name), make_batch("right")
    mask = batch["attention_mask"]
    steps = torch.randint(2, VOCAB, (len(LENS), 5)).split([1, 3, 1], dim=1)
    results: dict[str, list[torch.Tensor]] = {"eager": [], "anabranch": []}
    for impl, result in results.items():
        cache = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        result.append(logits(model, impl, **batch, past_key_values=cache)[mask.bool()])
        seen = mask
        for new in steps:
            seen = torch.cat([seen, torch.ones_like(new)], dim=1)
            options = {"attention_mask": seen, "past_key_values": cache}
            result.append(logits(model, impl, input_ids=new, **options).flatten(0, 1))
    actual, expected = torch.cat(results["anabranch"]), torch.cat(results["eager"])
    assert_logits_close(actual, expected, torch.ones(len(expected), dtype=torch.bool))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", HARDEST)
def test_assisted_generation(name: str) -> None:
    model, batch = make_model(name), make_batch("none")
    batch = {key: x[:1] for key, x in batch.items()}
    assistant = make_model(name, num_hidden_layers=1, layer_types=["full_attention"])
    expected = tokens(model, "eager", batch)
    assistant.set_attn_implementation("anabranch")
    assert tokens(model, "anabranch", batch, assistant_model=assistant) == expected


@pytest.mark.parametrize(
    ("name", "max_batch_tokens"),
    [("llama", 64), *((name, 6 if name in HARDEST else 64) for name in MODELS)],
)
def test_continuous_batching(name: str, max_batch_tokens: int) -> None:
    model, batch = make_model(name), make_batch("left")
    expected = tokens(model, "eager", batch)
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    model.set_attn_implementation("paged|anabranch")
    requests = model.generate_batch(
        [ids[mask].tolist() for ids, mask in rows],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=14, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=4, num_blocks=64, max_batch_tokens=max_batch_tokens
        ),
        progress_bar=False,
    )
    ordered = [requests[key] for key in sorted(requests, key=lambda key: int(key.split("_")[-1]))]
    assert [request.error for request in ordered] == [None] * len(LENS)
    assert [request.generated_tokens for request in ordered] == expected


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", HARDEST)
def test_masks_of_the_user(name: str, heads: int) -> None:
    model, batch = make_model(name), make_batch("none")
    visible = torch.rand(len(LENS), heads, LONGEST, LONGEST) < 0.5
    visible |= torch.eye(LONGEST, dtype=torch.bool)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    masks = {"full_attention": additive, "sliding_attention": additive}
    given = masks if hasattr(model.config, "layer_types") else additive
    expected = logits(model, "eager", input_ids=batch["input_ids"], attention_mask=given)
    actual = logits(model, "anabranch", input_ids=batch["input_ids"], attention_mask=given)
    assert_logits_close(actual, expected, batch["attention_mask"].bool())
    in_bool = visible if given is additive else dict.fromkeys(masks, visible)
    again = logits(model, "anabranch", input_ids=batch["input_ids"], attention_mask=in_bool)
    assert_logits_close(again, expected, batch["attention_mask"].bool())


def test_sequences_packed_by_their_positions() -> None:
    model, ids = make_model("llama"), make_batch("none")["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(LONGEST - 5)])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    expected, actual = (logits(model, impl, **inputs) for impl in ("eager", "anabranch"))
    alone = logits(model, "anabranch", input_ids=ids[:, 5:], use_cache=False)
    assert_logits_close(actual, expected, ids > 0)
    assert_logits_close(actual[:, 5:], alone, ids[:, 5:] > 0)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bidirectional_layers(side: str) -> None:
    model, batch = make_model("llama"), make_batch(side)
    causal = logits(model, "eager", **batch)
    model.config.is_causal = False
    expected, actual = (logits(model, impl, **batch) for impl in ("eager", "anabranch"))
    real = batch["attention_mask"].bool()
    assert (expected - causal)[real].abs().max() > 0.1
    assert_logits_close(actual, expected, real)


def test_the_kernel_reads_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr("anabranch.producers._default_name", lambda: "triton")
    model, batch = make_model("gpt-oss, sinks"), make_batch("left")
    expected, actual = (logits(model, impl, **batch) for impl in ("eager", "anabranch"))
    assert_logits_close(actual, expected, batch["attention_mask"].bool())


@pytest.mark.usefixtures("no_fallback")
def test_compiled_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static cache is decoded by a compiled forward on a GPU; here it is traced alone."""
    model, batch = make_model("mistral, windows"), make_batch("left")
    expected = tokens(model, "eager", batch)
    traced = torch.compile(model.forward, backend="eager", fullgraph=True)
    calls: list[object] = []
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *_: True)
    monkeypatch.setattr(model, "get_compiled_call", lambda config: calls.append(config) or traced)
    assert tokens(model, "anabranch", batch, cache_implementation="static") == expected
    assert calls


def test_compiled_forward() -> None:
    model, batch = make_model("mistral, windows"), make_batch("left")
    expected = logits(model, "eager", **batch)
    model.set_attn_implementation("anabranch")
    with torch.inference_mode():
        actual = torch.compile(model.forward, backend="eager", fullgraph=True)(**batch).logits
    assert_logits_close(actual, expected, batch["attention_mask"].bool())


def make_layer(
    k_len: int, dim_v: int, dim: int = 16, num_kv_heads: int = 2, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Queries of a decode step, as transformers transposes them, keys and values of its cache."""
    q = torch.randn(len(LENS), 1, 6, dim, **options).transpose(1, 2)
    k, v = (torch.randn(len(LENS), num_kv_heads, k_len, each, **options) for each in (dim, dim_v))
    return q, k, v


def bounds_of(k_len: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key and the end of each sequence, and the mask that says the same in bool."""
    ends = torch.full((len(LENS), 1), k_len - 2, **options)
    starts = ends - torch.tensor(LENS, **options)[:, None]
    columns = torch.arange(k_len, **options)
    mask = (columns >= starts) & (columns < ends)
    return torch.cat([starts, ends], 1).int(), mask[:, None, None]


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["", "sinks"])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_heads_of_a_step_are_sequences(
    impl: str,
    sinks: torch.Tensor | None,
    padded: bool,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr("anabranch.producers._default_name", lambda: impl)
    rules: dict[str, Any] = {"scale": 0.3, "softcap": 2.0}
    spans, visible = None, torch.ones(len(LENS), 1, 1, 17, dtype=torch.bool)
    if padded or window:
        bounds, visible = bounds_of(17)
        spans = bounds[:, None, None].expand(-1, -1, window or 17, -1)
    if window:
        visible = visible & (torch.arange(17) >= 17 - 2 - window)
    layers = [make_layer(17, 32) for _ in range(2)]
    step = decode_step.begin_step(layers[0][1], spans, **rules)
    for q, k, v in layers:
        expected = attend_masked(q, k, v, visible, **rules, sinks=sinks)
        torch.testing.assert_close(step.attend(q, k, v, sinks), expected)


def test_spans_that_all_sequences_share() -> None:
    q, k, v = make_layer(17, 16)
    bounds = torch.tensor([[3, 15]], dtype=torch.int32)
    step = decode_step.begin_step(
        k, bounds[:, None, None].expand(-1, -1, 17, -1), scale=0.3, softcap=None
    )
    columns = torch.arange(17)[None, None, None]
    visible = (columns >= 3) & (columns < 15)
    expected = attend_masked(q, k, v, visible, scale=0.3, softcap=None, sinks=None)
    torch.testing.assert_close(step.attend(q, k, v), expected)


def test_layers_with_windows_are_a_step_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a sequence is as long as the window, the keys of both kinds of layers are as many."""
    begun, begin = list[Any](), decode_step.begin_step
    monkeypatch.setattr(
        decode_step, "begin_step", lambda *x, **y: begun.append(begin(*x, **y)) or begun[-1]
    )
    monkeypatch.setattr(decode_step, "describe", lambda given: str([x.shape for x in given]))
    monkeypatch.setattr(decode_step, "stream_of", lambda _: 0)
    monkeypatch.setattr(decode_step.DecodeStep, "attend", lambda *_: None)
    bounds, _ = bounds_of(17)
    masks = [bounds[:, None, None].expand(-1, -1, window, -1) for window in (17, 20)]
    q, k, v = make_layer(17, 16)
    for mask in masks * 3:
        decode_step.attend_step(q, k, v, mask, scale=0.3, softcap=None)
    assert len(begun) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "num_kv_heads"), [(16, 2), (256, 1)], ids=["", "in boxes"])
def test_layers_of_a_step_share_its_launches(
    dim: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other lengths are of one kind, but for boxes; other spans are another step."""
    begun, begin = list[Any](), decode_step.begin_step
    monkeypatch.setattr(
        decode_step, "begin_step", lambda *x, **y: begun.append(begin(*x, **y)) or begun[-1]
    )
    rules: dict[str, Any] = {"scale": 0.3, "softcap": None}
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    num_kinds = None
    for k_len in (70, 71, 120):
        whole = torch.ones(len(LENS), 1, 1, k_len, dtype=torch.bool, device="cuda")
        bounds, padded = bounds_of(k_len, device="cuda")
        for visible, rows in ((whole, None), (padded, bounds), (padded, bounds.clone())):
            spans = None if rows is None else rows[:, None, None].expand(-1, -1, k_len, -1)
            for _ in range(3):
                q, k, v = make_layer(k_len, dim, dim, num_kv_heads, **options)
                actual = decode_step.attend_step(q, k, v, spans, **rules)
                expected = attend_masked(
                    *(x.float() for x in (q, k, v)), visible, **rules, sinks=None
                )
                torch.testing.assert_close(actual.float(), expected, rtol=2e-3, atol=2e-3)
        num_kinds = num_kinds or len(CALLS)
    assert len(begun) == 9
    assert all(step.launches is not None for step in begun)
    assert len(CALLS) == num_kinds or dim == 256


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static", "in chunks"])
@pytest.mark.parametrize("name", HARDEST)
def test_generate_on_a_gpu(name: str, cache: str) -> None:
    model = make_model(name).cuda()
    batch = {key: x.cuda() for key, x in make_batch("left").items()}
    expected = tokens(model, "eager", batch)
    assert tokens(model, "anabranch", batch, **CACHES[cache]) == expected


def test_what_a_mask_becomes() -> None:
    padding = make_batch("left")["attention_mask"].bool()
    spans = make_mask(4, LONGEST, LONGEST, attention_mask=padding)
    assert spans is not None
    assert is_spans(spans)
    assert spans.shape == (4, 1, LONGEST, 2)
    assert spans[:, 0, 0].tolist() == [[LONGEST - n, LONGEST] for n in LENS]
    assert make_mask(4, LONGEST, LONGEST) is None
    assert make_mask(4, 1, LONGEST, LONGEST - 1, attention_mask=padding[:1].expand(4, -1)) is None
    static = make_mask(4, 1, 32, torch.tensor(20), allow_is_causal_skip=False)
    assert static is not None
    assert static[:, 0, 0].tolist() == [[0, 21]] * 4
    for changed in (
        {"attention_mask": padding[:, torch.randperm(LONGEST)]},
        {"attention_mask": padding[:, :-1]},
        {"mask_function": bidirectional_mask_function},
        {"allow_is_causal_skip": False},
    ):
        whole = make_mask(4, LONGEST, LONGEST, **changed)
        assert whole is not None
        assert whole.dtype == torch.bool
        assert whole.shape == (4, 1, LONGEST, LONGEST)


def test_from_pretrained(tmp_path: Path) -> None:
    register()
    make_model("llama").save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = {impl: load(tmp_path, attn_implementation=impl) for impl in ("eager", "anabranch")}
    assert models["anabranch"].config._attn_implementation == "anabranch"
    batch = make_batch("left")
    assert tokens(models["anabranch"], "anabranch", batch) == tokens(
        models["eager"], "eager", batch
    )


def test_refusals() -> None:
    model, batch = make_model("llama", attention_dropout=0.5), make_batch("none")
    model.set_attn_implementation("anabranch")
    with pytest.raises(ValueError, match=r"run the model under torch.inference_mode\(\)"):
        model(**batch)
    with pytest.raises(ValueError, match=r"attention_mask must be bool or floating .* torch.int64"):
        logits(model, "anabranch", **{**batch, "attention_mask": torch.ones(4, 1, 13, 13).long()})
    with pytest.raises(
        ValueError, match=r"must broadcast to \(4, 4, 13, 13\), got \(4, 1, 13, 9\)"
    ):
        logits(model, "anabranch", **{**batch, "attention_mask": torch.ones(4, 1, 13, 9).bool()})
    with pytest.raises(ValueError, match=r"is for generate_batch"):
        logits(model, "paged|anabranch", **batch)
    with pytest.raises(ValueError, match=r"got dropout=0.5; call model.eval\(\)"):
        logits(model.train(), "anabranch", **batch)
    layer, q, k = torch.nn.Module(), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"3 queries and 5 keys without a mask"):
        ours.attention(layer, q, k, k, None)
    with pytest.raises(ValueError, match=r"output_attentions=True needs"):
        ours.attention(layer, q, k, k, None, output_attentions=True)
    with pytest.raises(ValueError, match=r"position_bias, as T5 has it, needs"):
        ours.attention(layer, q, k, k, None, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"got an attention_mask or a block_table"):
        paged_attention(layer, q, k, k, None, cache=object(), block_table=torch.zeros(1))
