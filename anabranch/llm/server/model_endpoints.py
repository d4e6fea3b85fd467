"""The served model, its tokens, and how the server is: health, version, metrics and counts."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, cast

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from anabranch import __version__
from anabranch.llm.server.chat_models import Message
from anabranch.llm.server.errors import REFUSALS, ApiError, refused, unsupported
from anabranch.llm.server.openai_fields import StrictModel, Text, TokenIds, described
from anabranch.llm.server.reply import as_json
from anabranch.llm.server.service import Service, service_of

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

    model: Text | None = described(
        None, "Name of the served model. Any other name is refused.", "smollm2"
    )
    prompt: Text | None = described(
        None, "Text to tokenize. Give either this or messages.", "The longest river is"
    )
    messages: list[Message] | None = described(
        None,
        "Conversation to tokenize.",
        [{"role": "user", "content": "Name three rivers."}],
        min_length=1,
    )
    add_special_tokens: bool = described(
        True, "Add the tokenizer's special tokens to a text; a chat template has its own.", False
    )
    add_generation_prompt: bool = described(
        True, "End a conversation with the start of an answer.", False
    )
    return_token_strs: bool = described(False, "Return the text of each token, too.", True)


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

    model: Text | None = described(
        None, "Name of the served model. Any other name is refused.", "smollm2"
    )
    tokens: TokenIds = described(..., "Tokens to turn into text, as many as a context.", [72, 105])


class Detokenized(BaseModel):
    """Text of tokens."""

    prompt: str


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The served model; 503 while its engine does not answer."""
    service_of(request).check_engine()
    return ModelList(data=[_card(request)])


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    """The served model, by its name."""
    service_of(request).check_model(model)
    service_of(request).check_engine()
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


@router.post("/tokenize", response_model=Tokens)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Tokens of a text or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "give either prompt or messages")
    texts = [text for message in body.messages or () for text in message.texts]
    texts += [body.prompt or ""]
    service.encoder.refuse_by_bytes(texts, "prompt")
    async with service.open_requests.limited():
        num_chars = sum(map(len, texts))
        ids = await service.encoding.run(num_chars, lambda: _encode(service, body))
        strings = bool(body.return_token_strs)
        written = await service.writing.run(len(ids), lambda: _written(service, ids, strings))
    return Response(written, media_type="application/json")


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return service.encoder.chat(
            body.messages, generation_prompt=body.add_generation_prompt, unlimited=True
        )
    return service.encoder.text(body.prompt or "", special=body.add_special_tokens, unlimited=True)


def _written(service: Service, ids: list[int], with_strings: bool) -> bytes:
    texts: dict[str, Any] = {}
    if with_strings:
        texts["token_strs"] = [service.texts.text_of(token) for token in ids]
    limit = service.engine.info.max_model_len
    return as_json(Tokens(count=len(ids), max_model_len=limit, tokens=ids, **texts))


@router.post("/v1/embeddings")
async def create_embeddings(body: dict[str, Any]) -> None:
    """Not supported: the served model makes text, and was not trained for embeddings."""
    raise unsupported(
        "model",
        "this server runs models that write text; their hidden states are no embeddings. "
        "Serve a model that was trained for embeddings by another server",
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """The text of tokens."""
    service = service_of(request)
    service.check_model(body.model)
    size, most = service.engine.info.vocab_size, service.engine.info.max_model_len
    if len(body.tokens) > most:
        raise refused("tokens", f"give at most {most} tokens, got {len(body.tokens)}")
    if any(token >= size for token in body.tokens):
        raise refused("tokens", f"tokens must be below the vocabulary of {size}")
    return Detokenized(prompt=await asyncio.to_thread(service.texts.decode, body.tokens))


def _card(request: Request) -> ModelCard:
    service = service_of(request)
    limit = service.engine.info.max_model_len
    return ModelCard(id=service.model_name, created=service.created, max_model_len=limit)


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while requests are answered, 503 when not."""
    service_of(request).check_engine()
    return {"status": "ok"}


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Of this package."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Counts of the engine since its start, as the page at / draws them."""
    service = service_of(request)
    service.check_engine()
    snapshot, info = service.engine.snapshot, service.engine.info
    if snapshot is None:
        raise ApiError(503, "the engine has not reported any counts yet")
    counts, spec = snapshot.stats, snapshot.stats.speculative
    return {
        "model": service.model_name,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "max_drafts": info.max_drafts,
        "cache_tokens": info.cache_tokens,
        "restarts": service.engine.num_restarts,
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "cache_usage": snapshot.cache_usage,
        "steps": counts.num_steps,
        "output_tokens": counts.num_output_tokens,
        "preemptions": counts.num_preemptions,
        "stage_ms": counts.stage_ms,
        "drafts": spec.num_drafts,
        "draft_tokens": spec.num_draft_tokens,
        "accepted_tokens": spec.num_accepted_tokens,
        "drafted_at": spec.drafted_at,
        "accepted_at": spec.accepted_at,
    }
