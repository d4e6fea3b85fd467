"""A vLLM engine on one backend, in a process of its own, that times the cases it is sent."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # register() and the clock are in the engine's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

WEIGHT_DEVIATION = 0.02


class Case(NamedTuple):
    """So many prompts of so many random tokens each."""

    num_seqs: int
    prompt: int

    @staticmethod
    def parse(text: str) -> Case:
        num_seqs, prompt = (int(number) for number in text.split("x"))
        return Case(num_seqs, prompt)

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.prompt}"


def serve(connection: Connection, log: str, options: dict[str, Any]) -> None:
    """A process with one engine: cases in, times out; an error as its text."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(ENVIRONMENT)
    from anabranch.integrations.vllm import register

    register()
    from vllm import LLM

    llm: Any = LLM(**options)
    llm.apply_model(draw_weights)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    attention = [layer for layer in layers.values() if hasattr(layer, "attn_backend")]
    backends = sorted({layer.attn_backend.__name__ for layer in attention})
    connection.send({"backends": backends})
    while (request := connection.recv()) is not None:
        try:
            connection.send(run_case(llm, *request))
        except Exception as error:
            traceback.print_exc()
            connection.send({"error": repr(error)})


def draw_weights(model: Any) -> None:
    """Draw weights as transformers initialises them, in place, so that captured graphs use them.

    vLLM's own are so small that the scores of experts are equal in bfloat16: all tokens would
    choose the same experts, and few weights would be read. Codes of quantised weights and their
    scales stay vLLM's.
    """
    for name, weight in model.named_parameters():
        if "scale" in name or not weight.is_floating_point() or weight.itemsize == 1:
            continue
        if weight.dim() > 1:
            weight.data.normal_(0, WEIGHT_DEVIATION)
        else:
            weight.data.fill_(float(not name.endswith("bias")))


def run_case(
    llm: Any,
    case: Case,
    num_tokens: int,
    seed: int,
    temperature: float = 0.0,
    profiled: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Milliseconds until all prompts have a token, of a step with all sequences, and in all.

    With the numbers of two steps, also those of every kernel in a step between them.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    shape = (case.num_seqs, case.prompt)
    prompts = torch.randint(100, 30000, shape, generator=generator).tolist()
    params = SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    core = llm.llm_engine.engine_core
    fetch, arrivals = core.get_output, []
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def timed() -> Any:
        outputs = fetch()
        if profiled and len(arrivals) in profiled:
            torch.cuda.synchronize()
            (profiler.start if len(arrivals) == profiled[0] else profiler.stop)()
        new = {one.request_id: len(one.new_token_ids) for one in outputs.outputs}
        arrivals.append((time.perf_counter(), {k: n for k, n in new.items() if n}))
        return outputs

    core.get_output = timed
    start = time.perf_counter()
    try:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finally:
        core.get_output = fetch
    found: dict[str, Any] = summary(arrivals, case.num_seqs, start)
    return found | {"kernels": kernel_ms(profiler, *profiled)} if profiled else found


def kernel_ms(profiler: Any, first: int, last: int) -> dict[str, float]:
    """Milliseconds of every kernel in a step of those that were profiled."""
    return {
        event.key: event.self_device_time_total / 1e3 / (last - first)
        for event in profiler.key_averages()
    }


def summary(
    arrivals: Sequence[tuple[float, dict[str, int]]], num_seqs: int, start: float
) -> dict[str, float]:
    """From when each step's tokens arrived: steps count that follow one with all sequences."""
    seen: set[str] = set()
    prompts_done = start
    steps: list[float] = []
    emitted: list[int] = []
    before: float | None = None
    for when, new in arrivals:
        if not new:
            continue
        if len(seen) < num_seqs:
            seen |= new.keys()
            prompts_done = when
            before = when if len(seen) == num_seqs else None
            continue
        if len(new) < num_seqs:
            break
        if before is not None:
            steps.append(when - before)
            emitted.append(sum(new.values()))
        before = when
    found = {
        "prompt_ms": (prompts_done - start) * 1e3,
        "total_ms": (arrivals[-1][0] - start) * 1e3,
        "num_steps": len(steps),
    }
    if steps:  # none where the first sequences end before the last begin
        step = median(steps[1:] or steps)  # the first also prepares the batch
        tokens = sum(emitted) / len(emitted) / num_seqs
        found |= {"step_ms": step * 1e3, "token_ms": step * 1e3 / tokens}
    return found


class Engine:
    """The process of one backend."""

    def __init__(self, backend: str, options: dict[str, Any], log: Path) -> None:
        context = mp.get_context("spawn")
        self.backend, self.log = backend, log
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(log), options))
        self.process.start()
        theirs.close()

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer; the end of the log if there is none."""
        try:
            if self.connection.poll(max(seconds, 1)):
                answer: dict[str, Any] = self.connection.recv()
                if "error" not in answer:
                    return answer
                why = answer["error"]
            else:
                why = f"no answer within {seconds:.0f} s"
        except (EOFError, ConnectionError):
            why = "the process ended"
        lines = self.log.read_text(errors="replace").splitlines()
        tail = [line[:240] for line in lines[-40:]]
        raise SystemExit(f"{self.backend}: {why}\n" + "\n".join(tail))

    def run(
        self,
        case: Case,
        num_tokens: int,
        seed: int,
        seconds: float,
        temperature: float = 0.0,
        profiled: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """One case, as run_case() has it."""
        self.connection.send((case, num_tokens, seed, temperature, profiled))
        return self.receive(seconds)

    def stop(self) -> None:
        """End the process, which was started here."""
        try:
            self.connection.send(None)
            self.process.join(10)
        except OSError:
            pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
