"""Small tokenizers of every family, whose tokens cut characters and words in all ways."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁a", "a", "b", "▁the", "é", "中", "🙂", "�", ".", "▁.", "'", "n", "t", "\n"]
SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def numbered(tokens: list[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(dict.fromkeys(tokens))}


def wrapped(tokenizer: Tokenizer, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    """As transformers has it, with special tokens and one that is added but not special."""
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<|tool|>", rstrip=True, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def by_pieces(decoder: Any) -> PreTrainedTokenizerFast:
    vocab = numbered([*SPECIAL, *BYTES, *PIECES])
    return wrapped(Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")), decoder)


def by_unigram(decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    vocab = [(token, -1.0) for token in numbered([*SPECIAL, *BYTES, *PIECES])]
    return wrapped(Tokenizer(models.Unigram(vocab, 0, byte_fallback=True)), decoder, **options)


def by_bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [level.pre_tokenize_str(word)[0][0] for word in (" the", "中", "🙂", "é", " a")]
    halves = [word[cut:] for word in words for cut in range(len(word))]
    halves += [word[:cut] for word in words for cut in range(1, len(word) + 1)]
    vocab = numbered([*SPECIAL, *alphabet, *halves])
    return wrapped(Tokenizer(models.BPE(vocab, [])), decoders.ByteLevel())


def by_words(**options: Any) -> PreTrainedTokenizerFast:
    words = ["a", "the", "do", "n't", "##n't", "n", "'", "t", "##s", "##ing", "中", "[UNK]"]
    words += [".", ",", "!", "##.", "'s", "'ve", "##re"]
    model = models.WordPiece(numbered([*SPECIAL, *words]), unk_token="[UNK]")
    return wrapped(Tokenizer(model), decoders.WordPiece(cleanup=True), **options)


def by_suffixes() -> PreTrainedTokenizerFast:
    vocab = numbered([*SPECIAL, "a", "b</w>", "the</w>", ".</w>", "中"])
    return wrapped(Tokenizer(models.BPE(vocab, [])), decoders.BPEDecoder(suffix="</w>"))


FAMILIES: dict[str, Any] = {
    "byte-level BPE": by_bytes,
    "byte-fallback BPE": lambda: by_pieces(decoders.Sequence(LLAMA)),
    "byte-fallback BPE, unstripped": lambda: by_pieces(decoders.Sequence(LLAMA[:3])),
    "unigram with byte fallback": lambda: by_unigram(decoders.Sequence(LLAMA[:3])),
    "unigram, metaspace after bytes": lambda: by_unigram(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "unigram, metaspace": lambda: by_unigram(decoders.Metaspace()),
    "unigram, cleaned": lambda: by_unigram(decoders.Metaspace(), clean_up_tokenization_spaces=True),
    "wordpiece": by_words,
    "wordpiece, cleaned": lambda: by_words(clean_up_tokenization_spaces=True),
    "suffixes": by_suffixes,
    "no decoder": lambda: by_pieces(None),
}
