"""How the server is: health, version, metrics and counts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from anabranch.llm.server.errors import REFUSALS, ApiError
from anabranch.llm.server.service import service_of

router = APIRouter(responses=REFUSALS)


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while requests are answered, 503 when not."""
    service_of(request).check_engine()
    return {"status": "ok"}


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Of this package."""
    try:
        return {"version": version("anabranch")}
    except PackageNotFoundError:
        return {"version": "unknown"}


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
