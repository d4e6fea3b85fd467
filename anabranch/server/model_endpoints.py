"""The served model and its tokens."""

from __future__ import annotations

import asyncio
from typing import Literal, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from anabranch.server.chat_models import Message
from anabranch.server.errors import REFUSALS, ApiError
from anabranch.server.protocol import StrictModel, Text, TokenIds
from anabranch.server.service import service_of

router = APIRouter(responses=REFUSALS)


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "anabranch"
    max_model_len: int


class ModelList(BaseModel):
    """All served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(StrictModel):
    """A text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = Field(True, description="Of a text; a chat template has its own.")
    add_generation_prompt: bool = Field(True, description="Of a conversation.")
    return_token_strs: bool = False


class TokenizerInfo(BaseModel):
    """What a client that tokenizes here has to know, as vLLM names it."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Tokens(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Tokens."""

    model: Text | None = None
    tokens: TokenIds


class Detokenized(BaseModel):
    """Text of tokens."""

    prompt: str


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(request)])


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    """The served model, by its name."""
    service_of(request).check_model(model)
    return _card(request)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """Special tokens and the chat template; lm-eval asks for them."""
    tokenizer = service_of(request).engine.info.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this model has no tokenizer: give token ids")
    template = cast("str | dict[str, str] | None", tokenizer.chat_template)
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")},
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )


@router.post("/tokenize", response_model_exclude_none=True)
async def tokenize(request: Request, body: TokenizeRequest) -> Tokens:
    """Tokens of a text or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    ids = await asyncio.to_thread(_encode, request, body)
    strings = [service.texts.text_of(token) for token in ids] if body.return_token_strs else None
    limit = service.engine.info.max_model_len
    return Tokens(count=len(ids), max_model_len=limit, tokens=ids, token_strs=strings)


def _encode(request: Request, body: TokenizeRequest) -> list[int]:
    encoder = service_of(request).encoder
    if body.messages is not None:
        return encoder.chat(body.messages, generation_prompt=body.add_generation_prompt)
    return encoder.text(body.prompt or "", special=body.add_special_tokens)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """The text of tokens."""
    service = service_of(request)
    service.check_model(body.model)
    size = service.engine.info.vocab_size
    if any(token >= size for token in body.tokens):
        raise ApiError(400, f"tokens must be below the vocabulary of {size}", param="tokens")
    return Detokenized(prompt=await asyncio.to_thread(service.texts.decode, body.tokens))


def _card(request: Request) -> ModelCard:
    service = service_of(request)
    limit = service.engine.info.max_model_len
    return ModelCard(id=service.model_name, created=service.created, max_model_len=limit)
