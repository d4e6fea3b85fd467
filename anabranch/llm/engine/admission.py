"""From what a user asks to a request with its sequences; what cannot be run is refused here."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

from anabranch.llm.engine.limits import Limits
from anabranch.llm.engine.request import Request
from anabranch.llm.engine.text_stream import StopStrings, TextStream
from anabranch.llm.grammar.bad_words import BadWords, bad_word_tokens
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar, GrammarCompiler
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.grammar.token_rules import TokenRules, token_mask
from anabranch.llm.sampling.logits import child_seed, fresh_seed
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.page_pool import PagePool, SequencePages
from anabranch.llm.sequences.sequence import Sequence

Prompt = str | Seq[int]
# Options that the model's generation_config.json may set, by their name in it.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
log = logging.getLogger("anabranch")


def encode_prompt(
    prompt: Prompt,
    params: SamplingParams,
    *,
    tokenizer: Any | None,
    vocab_size: int,
    max_model_len: int,
) -> list[int]:
    """Tokens of a prompt, truncated from the left if asked to; refuses what cannot be run."""
    ids = _text_ids(prompt, tokenizer) if isinstance(prompt, str) else _given_ids(prompt)
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is not in the vocabulary of {vocab_size}")
    if params.truncate_prompt_tokens is not None:
        ids = ids[-params.truncate_prompt_tokens :]
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with room for one more, "
            f"max_model_len {max_model_len} allows {max_model_len - 1}"
        )
    return ids


def _text_ids(prompt: str, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    check_unicode(prompt)
    return cast("list[int]", tokenizer.encode(prompt))


def _given_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Seq):
        kind = type(prompt).__name__
        raise ValueError(f"a prompt is text or a list of token ids, got {kind} {prompt!r:.80}")
    ids = list(cast("Seq[Any]", prompt))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"a prompt of token ids holds integers, got {token!r:.80}")
    return ids


def message_text(message: Mapping[str, Any]) -> str:
    """The content of a message of a conversation: text, a list of text parts, or nothing."""
    content: Any = message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(
            f"the content of a message is text or a list of parts, got {content!r:.80}"
        )
    texts = [_part_text(part) for part in cast("list[Any]", parts)]
    for text in texts:
        check_unicode(text)
    return "".join(texts)


def _part_text(part: Any) -> str:
    found = part
    if isinstance(part, Mapping):
        found = cast("Mapping[str, Any]", part)
        if found.get("type") != "text":
            raise ValueError(
                f"a part of a message is of type 'text', got {found.get('type')!r:.80}"
            )
        found = found.get("text")
    if not isinstance(found, str):
        raise ValueError(f"a part of a message holds text, got {found!r:.80}")
    return found


def check_unicode(text: str) -> None:
    """Refuse text with a lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start]
        raise ValueError(
            f"the prompt is no valid Unicode: a lone surrogate {wrong!r} at {error.start}"
        ) from None


def sampling_defaults(model: Any, wanted: str) -> dict[str, Any]:
    """Options of SamplingParams that generation_config.json sets; none if `wanted` is "none"."""
    generation: Any = getattr(model, "generation_config", None)
    if wanted == "none" or generation is None:
        return {}
    given: dict[str, Any] = generation.to_diff_dict()
    found = {ours: given[name] for name, ours in NAMES.items() if given.get(name) is not None}
    for name, value in list(found.items()):
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            log.warning("generation_config.json is not used for %s: %s", name, error)
            del found[name]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What every request of an engine is checked against and made with."""

    tokenizer: Any | None
    vocab_size: int
    eos_ids: frozenset[int]
    limits: Limits
    pool: PagePool
    prefix_caching: bool
    makes_drafts: bool
    seed: int | None  # of requests that give none
    grammars: GrammarCompiler

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Raises ValueError for what cannot be run."""
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"params must be SamplingParams, got {params!r:.80}")
        ids = encode_prompt(
            prompt,
            params,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.limits.max_model_len,
        )
        self._check(params)
        seed = params.seed if params.seed is not None else self.seed
        seed = fresh_seed() if seed is None else seed
        grammar = grammar or self.grammar(params)
        seqs = [self.sequence(request_id, i, ids, params, seed) for i in range(params.n)]
        if params.constrained:
            for seq in seqs:
                seq.rules = self._rules(params, grammar)
        stop = StopStrings(params.stop)
        texts = [self._text_stream(ids, params, stop) for _ in seqs]
        text = prompt if isinstance(prompt, str) else None
        return Request(request_id, text, ids, params, seqs, texts)

    def grammar(self, params: SamplingParams, *, aside: bool = False) -> CompiledGrammar | None:
        """Of a request, if it has one; `params` may not have been checked yet."""
        wanted: StructuredOutputs | None = getattr(params, "structured_outputs", None)
        return None if wanted is None else self.grammars.compile(wanted, params.n, aside=aside)

    def sequence(
        self, request_id: str, index: int, ids: list[int], params: SamplingParams, seed: int
    ) -> Sequence:
        """One of the n continuations of a prompt."""
        room = self.limits.max_model_len - len(ids)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        root = b"" if self.prefix_caching else secrets.token_bytes(16)
        return Sequence(
            request_id=request_id,
            index=index,
            params=params,
            prompt_len=len(ids),
            tokens=list(ids),
            pages=SequencePages(self.pool, self.limits.page_size, root),
            seed=child_seed(seed, index),
            max_tokens=min(params.max_tokens or room, room),
            stop_ids=frozenset(stop_ids),
            speculates=self.makes_drafts and params.speculate is not False,
        )

    def _rules(self, params: SamplingParams, grammar: CompiledGrammar | None) -> TokenRules:
        """Which tokens may follow in a sequence of its own."""
        allowed, words = None, None
        if params.allowed_token_ids is not None:
            allowed = token_mask(params.allowed_token_ids, self.vocab_size)
        if params.bad_words:
            words = BadWords(bad_word_tokens(params.bad_words, self.tokenizer))
        return TokenRules(grammar.begin() if grammar else None, allowed, words)

    def _text_stream(self, ids: list[int], params: SamplingParams, stop: StopStrings) -> TextStream:
        return TextStream(
            self.tokenizer,
            prompt=ids,
            stop=stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    def _check(self, params: SamplingParams) -> None:
        ids = [*params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ())]
        wrong = next((token for token in ids if token >= self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop strings cannot be seen")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: bad_words cannot be seen")
        if params.speculate and not self.makes_drafts:
            raise ValueError(
                "speculate=True needs an engine with drafts: give LLM or EngineConfig "
                "speculative, such as SpeculativeConfig(method='ngram')"
            )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.vocab_size:
                raise ValueError(f"{name} {wanted} exceeds the vocabulary of {self.vocab_size}")
