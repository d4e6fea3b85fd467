"""What all requests and responses share. Unknown fields and wrong types are errors."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from anabranch.engine.sampling_params import LARGEST_FACTOR, SamplingParams

MAX_LOGPROBS = 20


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"must be text, but holds half a surrogate pair at {error.start}"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
Bias = dict[Text, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class StrictModel(BaseModel):
    """A body as a client sends it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(StrictModel):
    """Only for streams."""

    include_usage: bool = Field(False, description="A last chunk with the number of tokens.")


class SamplingFields(StrictModel):
    """Options of a request that both kinds of completion have, vLLM's extras among them."""

    model: Text | None = Field(None, description="The served model, if given.")
    n: int | None = Field(None, ge=1, le=1024)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Text | Texts | None = None
    logit_bias: Bias | None = Field(None, description="From a token id, as a string, to a number.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, description="Accepted, and of no effect.")
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1 / LARGEST_FACTOR, le=100)
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    speculate: bool | None = Field(None, description="False turns drafting off for this request.")
    return_token_ids: bool | None = Field(None, description="Adds token ids to every choice.")
    return_token_origins: bool | None = Field(
        None, description="Adds to every choice where each token came from, and in which step."
    )

    @property
    def num_choices(self) -> int:
        """Continuations of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, **options: Any) -> SamplingParams:
        """For the engine; ValueError for values that contradict each other."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams.from_dict(given | options)


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


class PromptLogprob(BaseModel):
    """Of one token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
