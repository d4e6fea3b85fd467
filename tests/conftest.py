"""Set-up of all tests: the interpreter where there is no GPU, NaN in fresh memory, hypothesis."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import requires, version
from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest
import torch
from claimed_tests import Claims, run_claimed


def triton_version() -> tuple[int, ...] | None:
    """Of the Triton that will be imported, the first on the path."""
    if find_spec("triton") is None:
        return None
    return tuple(map(int, version("triton").split(".")[:2]))


def compiler_refusal() -> str | None:
    """Why torch compiles nothing for a GPU here: it does with the Triton it was built for."""
    needed = [x for x in requires("torch") or [] if re.match(r"triton\b", x)]
    if not needed or (found := triton_version()) is None:
        return None
    built_for = tuple(map(int, re.findall(r"\d+", needed[0])[:2]))
    if found == built_for:
        return None
    return f"torch {torch.__version__} compiles with {needed[0]}, and {version('triton')} is here"


HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    if (installed := triton_version()) is not None:
        from interpreter_cost import spare_repetitions
        from interpreter_masks import keep_masks_boolean

        if installed >= (3, 9):
            keep_masks_boolean()
        if installed <= (3, 9):  # it replaces private functions, which later versions may not have
            spare_repetitions()

SAMPLE = int(os.environ.get("ANABRANCH_TEST_SAMPLE", "1"))  # every so many cases of a test are run
hypothesis.settings.register_profile(
    "anabranch",
    max_examples=max(50 // SAMPLE, 1),
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
    if SAMPLE > 1:
        items[:] = sampled(items)
    # The longest first: at the end they would keep one process busy, and the others idle.
    items.sort(key=lambda item: "test_kernels_fit" not in item.nodeid)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With others, as gpu_shards.py says."""
    claims = os.environ.get("ANABRANCH_TEST_CLAIMS")
    options = session.config.option
    broken = session.testsfailed and not options.continue_on_collection_errors
    if claims is None or broken or options.collectonly:
        return None
    run_claimed(session, Claims.of(claims))
    return True


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """One of every SAMPLE cases of each test that can run here, Triton's if it names producers."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if HAS_GPU or not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for each in cases.values() for item in sampled_cases(each)]


def sampled_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    if cases[0].get_closest_marker("unsampled"):
        return cases
    cases = [x for x in cases if "triton" in given_to(x)] or cases
    # from the next group of cases the next one, or a parameter of SAMPLE values would have one
    places = (divmod(i, SAMPLE) for i in range(len(cases)))
    return [
        case
        for case, (group, place) in zip(cases, places, strict=True)
        if (group + place) % SAMPLE == 0
    ]


def given_to(item: pytest.Item) -> list[Any]:
    """The parameters of a case."""
    return [*item.callspec.params.values()] if hasattr(item, "callspec") else []  # pyright: ignore


@pytest.fixture(autouse=True)
def _skip_what_torch_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with another Triton than torch's, as `make test-gpu` may be given."""
    if not HAS_GPU or (reason := compiler_refusal()) is None:
        return
    compile_with = torch.compile

    def skip_inductor(*given: Any, backend: Any = "inductor", **options: Any) -> Any:
        if backend == "inductor":
            pytest.skip(reason)
        return compile_with(*given, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", skip_inductor)


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
