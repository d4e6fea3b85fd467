"""Frameworks that ask for typed answers and tools, against a server of a tiny model.

They are installed by `make test-clients` only; elsewhere these tests skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")

import openai
import pydantic
from forked_engine import forked_engine
from server_models import Server, engine_config, running_server


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=8)
    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = forked_engine(engine_config())
    with running_server(engine) as running:
        yield running
    engine.close()


@pytest.fixture
def chat_model(server: Server) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(model="tiny", base_url=server.v1, api_key="none", max_retries=0)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_with_structured_output(chat_model: Any, method: str) -> None:
    answer = chat_model.with_structured_output(City, method=method).invoke("hello")
    assert isinstance(answer, City)


def test_langchain_bind_tools(chat_model: Any) -> None:
    bound = chat_model.bind_tools([City], tool_choice="required")
    calls = bound.invoke("hello").tool_calls
    assert calls and City(**calls[0]["args"])
    streamed = None
    for chunk in bound.stream("hello"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls and City(**streamed.tool_calls[0]["args"])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_instructor(server: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    plain = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    answer = client.chat.completions.create(
        model="tiny",
        response_model=City,
        messages=[{"role": "user", "content": "hello"}],
        max_retries=0,
    )
    assert isinstance(answer, City)


@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai(server: Server, output: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    wanted: Any = City if output == "tool" else NativeOutput(City)
    agent = Agent(OpenAIChatModel("tiny", provider=provider), output_type=wanted)
    assert isinstance(agent.run_sync("hello").output, City)
