"""Set-up of all tests: the interpreter where there is no GPU, NaN in fresh memory, hypothesis."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import distributions
from zlib import crc32

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    if any(each.version.startswith("3.6.") for each in distributions(name="triton")):
        from interpreter_cost import spare_repetitions

        spare_repetitions()  # which replaces private functions of that version

hypothesis.settings.register_profile(
    "anabranch",
    max_examples=50,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    # Examples are small already, and shrinking them under the interpreter takes minutes.
    phases=set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain},
)
hypothesis.settings.load_profile("anabranch")
torch.set_num_threads(1)  # pytest-xdist runs one worker on each core


def pytest_configure(config: pytest.Config) -> None:
    for warning in ("Conversion of an array with ndim", "divide by zero encountered in log2"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}::triton.runtime.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shard := os.environ.get("ANABRANCH_TEST_SHARD"):  # "3/14", as gpu_shards.py deals tests out
        index, count = map(int, shard.split("/"))
        items[:] = [x for x in items if crc32(x.nodeid.encode()) % count == index]
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison_fresh_memory() -> Iterator[None]:
    """Under deterministic algorithms torch fills the memory of `torch.empty` with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def forget_calls() -> Callable[[], None]:
    """Forgets the kinds of calls that were checked, so that producers are asked again."""

    def forget() -> None:
        for module, table in (("anabranch.attend", "CALLS"), ("anabranch.plan", "PLANS")):
            getattr(import_module(module), table).clear()

    forget()
    return forget
