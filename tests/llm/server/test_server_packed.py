"""A server of a model that neither its process nor the engine's needs transformers for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from forked_engine import forked_engine
from gguf_files import tiny_llama, write_gguf
from server_models import running_server

from anabranch.kernels.cpu.native import native
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.models.file_tokenizer import FileTokenizer

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")
HI: dict[str, Any] = {"role": "user", "content": "hello 1234"}


def test_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_0"})
    engine = forked_engine(EngineConfig(model=str(path), device="cpu", max_num_seqs=2))
    with running_server(engine) as server:
        info = server.service.engine.info
        assert isinstance(info.tokenizer, FileTokenizer)

        def post(path: str, **body: Any) -> httpx.Response:
            given = {"model": "tiny", "max_tokens": 4, "messages": [HI]} | body
            return httpx.post(f"{server.url}{path}", json=given, timeout=120)

        answer = post("/v1/chat/completions", structured_outputs={"choice": ["123", "hello"]})
        assert answer.json()["choices"][0]["message"]["content"] in ("123", "hello"), answer.text
        begun = {"role": "assistant", "content": "hello 12"}
        lengths = [
            post(
                "/v1/chat/completions",
                messages=[HI, begun],
                continue_final_message=continues,
                add_generation_prompt=False,
            ).json()["usage"]["prompt_tokens"]
            for continues in (True, False)
        ]
        assert lengths[0] == lengths[1] - 1, "without the mark of its end"
        refused = post("/v1/chat/completions", chat_template_kwargs={"padding": True})
        assert refused.status_code == 400 and "padding" in refused.text
        called = httpx.get(f"{server.url}/tokenizer_info").json()
        assert called["bos_token"] == "<start>" and called["eos_token"] == "<end>"
    engine.close()
