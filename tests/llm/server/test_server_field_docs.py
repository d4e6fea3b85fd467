"""The OpenAPI document explains every field, with examples that the server takes."""

from __future__ import annotations

import pytest

for needed in ("fastapi", "httpx", "transformers"):
    pytest.importorskip(needed)

from fastapi import FastAPI  # noqa: E402

from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server import chat, chat_models, completions, model_endpoints  # noqa: E402
from anabranch.llm.server.completion_models import CompletionRequest  # noqa: E402

BODIES = (
    chat_models.ChatRequest,
    CompletionRequest,
    model_endpoints.TokenizeRequest,
    model_endpoints.DetokenizeRequest,
)


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict[str, dict[str, object]]]:
    app = FastAPI()
    for module in (completions, chat, model_endpoints):
        app.include_router(module.router)
    return app.openapi()["components"]["schemas"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_examples_are_accepted(
    body: type, schemas: dict[str, dict[str, dict[str, object]]]
) -> None:
    schema = schemas[body.__name__]
    fields = schema["properties"]
    assert all(field["description"] for field in fields.values())
    unshown = [name for name, field in fields.items() if "examples" not in field]
    assert unshown in ([], ["suffix"])  # not supported, so no example would be accepted
    needed = {name: fields[name]["examples"][0] for name in schema.get("required", ())}
    for name, field in fields.items():
        for value in (*field.get("examples", ()), field.get("default")):
            if value is not None:
                body.model_validate(needed | {name: value})


def test_defaults_are_those_of_the_engine(
    schemas: dict[str, dict[str, dict[str, object]]],
) -> None:
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert fields["temperature"]["default"] == SamplingParams().temperature
        assert fields["top_k"]["default"] == SamplingParams().top_k
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["default"] == 16
    assert schemas["ChatRequest"]["properties"]["max_tokens"].get("default") is None
