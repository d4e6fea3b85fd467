"""The tokenizer of a converted GGUF file, without transformers: it starts fast and small.

Byte-level BPE needs no tokenizers library either, until something is asked that only it knows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anabranch.llm.models.byte_level import byte_level_tokens

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# What tokenizer_config.json may say: the names of tokens, and this. More is for transformers.
EXPECTED: dict[str, Any] = {
    "tokenizer_class": "TokenizersBackend",
    "backend": "tokenizers",
    "clean_up_tokenization_spaces": False,
}
KNOWN = {*NAMED, *EXPECTED, "model_max_length", "is_local", "local_files_only", "name_or_path"}


class FileTokenizer:
    """What the engine and the server ask of transformers' tokenizers; they do everything else."""

    clean_up_tokenization_spaces = False

    def __init__(self, directory: Path, config: dict[str, Any], template: str | None) -> None:
        self._directory = directory
        self.chat_template = template
        self.special_tokens_map: dict[str, str] = {
            name: config[name] for name in NAMED if config.get(name) is not None
        }
        own = byte_level_tokens(directory / FILE)
        is_whole = own is not None and own.added.keys() >= set(self.all_special_tokens)
        self.byte_level = own if is_whole else None
        if self.byte_level is None:
            _ = self.backend_tokenizer

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        """That of the tokenizers library."""
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer.from_file(str(self._directory / FILE))
        backend.no_truncation()
        backend.no_padding()
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = [token for token in self.all_special_tokens if token not in added]
        backend.add_tokens([AddedToken(token, special=True) for token in missing])
        return backend

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are no outcome of merges, by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.convert_tokens_to_ids(self.eos_token)

    def convert_tokens_to_ids(self, token: str) -> Any:
        """The id of a token, or of the unknown one."""
        if self.byte_level is not None and token in self.byte_level.added:
            return self.byte_level.added[token]
        found = self.backend_tokenizer.token_to_id(token)
        unknown = self.special_tokens_map.get("unk_token")
        if found is None and unknown is not None:
            return self.backend_tokenizer.token_to_id(unknown)
        return found

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = None
        if self.byte_level is not None:
            ids = self.byte_level.encode(text, add_special_tokens=add_special_tokens)
        if ids is None:
            ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        tokens = self.byte_level or self.backend_tokenizer
        return tokens.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        padding: Any = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Any = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The text of a conversation, or its tokens; with the parameters of transformers.

        The template sees `kwargs`.
        """
        others: dict[str, Any] = {
            "documents": documents,
            "chat_template": chat_template,
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "return_tensors": return_tensors,
            "return_assistant_tokens_mask": return_assistant_tokens_mask,
            "tokenizer_kwargs": tokenizer_kwargs,
        }
        turns: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        is_dict = tokenize and return_dict
        if is_dict or any(others.values()) or not _is_plain(conversation, tools):
            turns |= {"tools": tools, "tokenize": tokenize, "return_dict": is_dict}
            return self._whole.apply_chat_template(conversation, **turns, **others, **kwargs)
        if self.chat_template is None:
            raise ValueError(f"the tokenizer in {self._directory} has no chat template")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        from anabranch.llm.models.chat_template import render_chat  # jinja2 takes 3 MB

        field = continue_final_message
        given: dict[str, Any] = {"tools": tools, "documents": None} | self.special_tokens_map
        text = render_chat(
            self.chat_template,
            conversation,
            continued=("content" if field is True else field) or None,
            add_generation_prompt=add_generation_prompt,
            **given | kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._whole(*args, **options)

    def __len__(self) -> int:
        if self.byte_level is not None:
            return len(self.byte_level)
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    @cached_property
    def _whole(self) -> Any:
        """transformers' tokenizer of the same directory, for what is asked of it seldom."""
        from anabranch.llm.models.checkpoint import load_tokenizer

        return load_tokenizer(self._directory)


def _is_plain(conversation: Any, tools: Any) -> bool:
    """Whether messages and tools are dictionaries: no batches, and no functions to be described."""
    listed = [*cast("list[Any]", conversation), *(tools or ())]
    return bool(conversation) and all(isinstance(each, dict) for each in listed)


def file_tokenizer(directory: Path) -> FileTokenizer | None:
    """The tokenizer of a directory; None for what transformers has to read."""
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        has_file = (directory / FILE).is_file()
    except (OSError, ValueError):
        return None
    usual = all(config.get(name) == value for name, value in EXPECTED.items())
    named = all(isinstance(config.get(name), str | None) for name in NAMED)
    if not (has_file and usual and named and config.keys() <= KNOWN):
        return None
    template = directory / TEMPLATE
    try:
        text = template.read_text() if template.is_file() else None
        return FileTokenizer(directory, config, text)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
