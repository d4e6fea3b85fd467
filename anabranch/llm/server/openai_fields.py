"""Fields that OpenAI's requests and responses share. Unknown fields and wrong types are errors."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, WithJsonSchema

from anabranch.llm.sampling.params import LARGEST_FACTOR, SamplingParams

MAX_LOGPROBS = 20
# Each sequence of a request pays for these at its start or at every token.
MAX_STOPS = 256
MAX_STOP_CHARS = 8192  # of all stop strings together
MAX_STOP_IDS = 1024
MAX_BIASES = 1024


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"must be text, but holds half a surrogate pair at {error.start}"
        ) from None
    return text


def _short_enough(strings: list[str]) -> list[str]:
    if (size := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise ValueError(
            f"must have at most {MAX_STOP_CHARS} characters in all its strings, got {size}"
        )
    return strings


Text = Annotated[str, AfterValidator(_encodable)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
Stops = Annotated[
    list[Text], Field(fail_fast=True, max_length=MAX_STOPS), AfterValidator(_short_enough)
]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS), AfterValidator(_encodable)]
StopIds = Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)]
Bias = Annotated[
    dict[Text, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
    Field(max_length=MAX_BIASES),
]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


def without_nulls(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Without the fields that are null, which count as absent."""
    return {name: field for name, field in fields.items() if field is not None}


class StrictModel(BaseModel):
    """A body as a client sends it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def described(default: Any, meaning: str, example: Any, **rules: Any) -> Any:
    """A field of a request with what the OpenAPI document says of it.

    A default of `...` makes it required. An example of None stands for none: no value is accepted.
    """
    examples = None if example is None else [example]
    return Field(default, description=meaning, examples=examples, **rules)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = described(
        False, "End the stream with a chunk that counts the tokens.", True
    )
    continuous_usage_stats: bool | None = described(
        False, "With include_usage: count the tokens of a choice so far in each chunk.", True
    )


class IgnoredFields(StrictModel):
    """Fields that frameworks send and that change nothing here."""

    user: Text | None = described(None, "Accepted without effect.", "ada")
    metadata: dict[Text, Any] | None = described(None, "Accepted without effect.", {"run": "7"})
    store: bool | None = described(None, "Accepted without effect.", False)
    service_tier: Text | None = described(None, "Accepted without effect.", "auto")
    safety_identifier: Text | None = described(None, "Accepted without effect.", "ada")
    prompt_cache_key: Text | None = described(
        None, "Accepted without effect: prefixes are found by their tokens.", "chat-7"
    )


class SamplingFields(IgnoredFields):
    """Options of completions and chats, with those that vLLM adds. Null is the default."""

    model: Text | None = described(
        None, "Name of the served model. Any other name is refused.", "smollm2"
    )
    n: int | None = described(1, "Number of answers to each prompt.", 2, ge=1, le=1024)
    temperature: float | None = described(
        1.0,
        "0 always takes the most likely token; higher values vary more.",
        0.7,
        ge=0,
        le=100,
        allow_inf_nan=False,
    )
    top_p: float | None = described(
        1.0, "Keep the most likely tokens that together have this probability.", 0.95, gt=0, le=1
    )
    top_k: int | None = described(
        0, "Keep this many of the most likely tokens. 0 and -1 keep all.", 40, ge=-1, lt=1 << 31
    )
    min_p: float | None = described(
        0.0, "Keep tokens at least this probable, relative to the most likely.", 0.05, ge=0, le=1
    )
    presence_penalty: float | None = described(
        0.0, "Lowers the scores of tokens that the answer contains.", 0.5, ge=-2, le=2
    )
    frequency_penalty: float | None = described(
        0.0, "Lowers scores by how often the answer contains the token.", 0.5, ge=-2, le=2
    )
    repetition_penalty: float | None = described(
        1.0,
        "Divides the scores of tokens in the prompt or the answer. 1 is off.",
        1.1,
        ge=1 / LARGEST_FACTOR,
        le=100,
    )
    seed: int | None = described(
        None, "Repeats the same random choices.", 42, ge=-(1 << 63), lt=1 << 63
    )
    stop: StopText | Stops | None = described(
        None,
        f"A text, or a list of at most {MAX_STOPS} texts, before which the answer ends; together "
        f"at most {MAX_STOP_CHARS} characters.",
        ["\n\n", "User:"],
    )
    stop_token_ids: StopIds | None = described(None, "Tokens at which the answer ends.", [2])
    include_stop_str_in_output: bool | None = described(
        False, "Keep the stop text at the end of the answer.", True
    )
    ignore_eos: bool | None = described(False, "Continue after the end-of-text token.", True)
    min_tokens: Count | None = described(
        0, "The answer does not end before it has this many tokens.", 16
    )
    skip_special_tokens: bool | None = described(
        True, "Leave special tokens out of the text.", False
    )
    logit_bias: Bias | None = described(
        None, "Added to scores: from a token id, as a string, to a number.", {"50": -100}
    )
    prompt_logprobs: int | None = described(
        None,
        "Return this many likely tokens at each place of the prompt, with its first choice. Not in "
        "a stream.",
        1,
        ge=0,
        le=MAX_LOGPROBS,
    )
    truncate_prompt_tokens: int | None = described(
        None, "Keep only this many tokens, from the end of the prompt.", 1024, ge=1, lt=1 << 31
    )
    stream: bool | None = described(
        False, "Send the answer in chunks, as server-sent events.", True
    )
    stream_options: StreamOptions | None = described(
        None, "Options of a stream; they need stream: true.", {"include_usage": True}
    )
    speculate: bool | None = described(
        None, "False turns speculative decoding off for this request.", False
    )
    return_token_ids: bool | None = described(False, "Add token ids to every choice.", True)
    return_token_origins: bool | None = described(
        False,
        "Add to every choice whether each token was sampled, accepted or corrected, and its step.",
        True,
    )

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        """Whether every chunk of a stream has the number of tokens so far, as vLLM does it."""
        options = self.stream_options
        return options is not None and self.includes_usage and bool(options.continuous_usage_stats)

    def sampling_params(self, defaults: dict[str, Any], **options: Any) -> SamplingParams:
        """For the engine; ValueError for values that contradict each other.

        `defaults` are the model's own, for what the body does not give.
        """
        names = _SAMPLING & self.model_fields_set
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        limit = options.get("max_tokens")
        options["max_tokens"] = defaults.get("max_tokens") if limit is None else limit
        return SamplingParams.from_dict(defaults | given | options)


# max_tokens, logprobs and logit_bias are written differently over HTTP
_SAMPLING = {field.name for field in fields(SamplingParams)} & (
    SamplingFields.model_fields.keys() - {"logit_bias"}
)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11):
        raise ValueError(f"a key of logit_bias must be a token id, got {key[:40]!r}")
    return int(key)


class CachedTokens(BaseModel):
    """Of a prompt."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenOrigin(BaseModel):
    """Where a token came from."""

    id: int
    text: str
    origin: Literal["sampled", "accepted", "corrected"]
    step: int
    logprob: float | None


_PROMPT_LOGPROB = {
    "type": "object",
    "properties": {
        "logprob": {"type": "number"},
        "rank": {"type": "integer"},
        "decoded_token": {"type": "string"},
    },
    "required": ["logprob", "rank", "decoded_token"],
}
# At each place of a prompt None or, by token id, what `_PROMPT_LOGPROB` describes. There may be
# hundreds of thousands: as models they take ten times as long to make and to write.
PromptLogprobs = Annotated[
    list[Any],
    SkipValidation,
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "object", "additionalProperties": _PROMPT_LOGPROB},
                    {"type": "null"},
                ]
            },
        }
    ),
]
