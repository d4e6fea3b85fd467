"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from anabranch.llm.models.gguf_metadata import GGUFModel

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
# How text is cut before the merges, by tokenizer.ggml.pre: regular expressions, each cutting what
# the one before it left, or, where there are none, GPT-2's own.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3")
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), ()),
    **dict.fromkeys(LLAMA3, (WORDS % "1,3",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (WORDS % "1",)),
    "deepseek-llm": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
}
SINGLE_DIGITS = ("smollm",)


def gguf_tokenizer(model: GGUFModel) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its special tokens and chat template."""
    kind = model.required("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(model)
    elif kind == "llama":
        tokenizer = _sentencepiece(model)
    else:
        raise ValueError(f"{model.path} has a tokenizer of kind {kind!r}: only gpt2 and llama")
    _add_special_tokens(model, tokenizer)
    named = _named_tokens(model)
    if _adds_bos(model, kind) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=model.get("tokenizer.chat_template"),
        model_max_length=model.shape("context_length"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def has_known_words(model: GGUFModel) -> bool:
    """Whether the tokenizer is byte-level BPE and cuts words in one of the ways known here."""
    name = model.get("tokenizer.ggml.pre", "default")
    return model.get("tokenizer.ggml.model") == "gpt2" and name in PATTERNS


def _byte_level(model: GGUFModel) -> Tokenizer:
    name = model.get("tokenizer.ggml.pre", "default")
    if not has_known_words(model):
        raise ValueError(f"{model.path} cuts words as {name!r}: not one of {sorted(PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in model.required("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(_vocabulary(model), merges, ignore_merges=name in LLAMA3))
    patterns = PATTERNS[name]
    steps: list[Any] = [pre.Digits(individual_digits=True)] if name in SINGLE_DIGITS else []
    steps += [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(model: GGUFModel) -> Tokenizer:
    vocabulary = _vocabulary(model)
    scores = model.required("tokenizer.ggml.scores")
    unknown = model.required("tokenizer.ggml.tokens")[
        model.get("tokenizer.ggml.unknown_token_id", 0)
    ]
    bpe = models.BPE(
        vocabulary,
        _merges_by_score(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefixed = bool(model.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefixed else "never"
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the piece of the highest score first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _vocabulary(model: GGUFModel) -> dict[str, int]:
    return {token: index for index, token in enumerate(model.required("tokenizer.ggml.tokens"))}


def _add_special_tokens(model: GGUFModel, tokenizer: Tokenizer) -> None:
    tokens = model.required("tokenizer.ggml.tokens")
    kinds = model.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _named_tokens(model: GGUFModel) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = model.required("tokenizer.ggml.tokens")
    ids = {ours: model.get(f"tokenizer.ggml.{its}_token_id") for ours, its in names.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _adds_bos(model: GGUFModel, kind: str) -> bool:
    by_default = kind == "llama" or model.get("tokenizer.ggml.pre") in LLAMA3
    return bool(model.get("tokenizer.ggml.add_bos_token", by_default))
