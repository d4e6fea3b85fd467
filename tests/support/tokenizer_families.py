"""Tiny tokenizers of five families, and models of random weights that speak them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<end>", "<user>", "<assistant>", "<system>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he")]
WORDS = ["the", "river", "bends", "where", "water", "is", "slow", "and", "hello", "a", "e", "t"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_directory = tempfile.TemporaryDirectory()


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *letters, *("".join(merge) for merge in MERGES)]
    bpe = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: pieces with a mark for spaces, bytes for the rest."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "l"), ("▁", "▁")]
    words = [*SPECIAL, "<unk>", *_BYTES, *letters, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and Gemma's ancestors have it."""
    pieces = [*SPECIAL, "<unk>", *_BYTES, "▁", *(f"▁{word}" for word in WORDS), *"abcdehilorstwv"]
    vocab = [(piece, -1.0 - 0.1 * len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=len(SPECIAL), byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: long and unknown words are one token, white space is dropped."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, "[UNK]", *letters, *(f"##{letter}" for letter in letters), *WORDS[:9]]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_level() -> Tokenizer:
    """One token a word."""
    words = [*SPECIAL, "<unk>", *WORDS]
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


FAMILIES = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
    "word-piece": word_piece,
    "word-level": word_level,
}


def tokenizer_of(family: str) -> Any:
    """As transformers wraps it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=FAMILIES[family](),
        eos_token="<end>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
    )


@cache
def model_of(family: str, context: int = 1024) -> str:
    """A directory with a model whose tokens are equally likely: bytes that are no text, too."""
    tokenizer = tokenizer_of(family)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    directory = Path(_directory.name) / f"{family}-{context}"
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
