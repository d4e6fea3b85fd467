"""Metrics for Prometheus, with the names that vLLM's users know and our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.messages import ServedEngine

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 600.0)
_SIZES = tuple(float(4**power) for power in range(10))
# By name: what it means, and where a snapshot of the engine has it
_GAUGES = {
    "num_requests_running": ("Sequences that run.", "num_running"),
    "num_requests_waiting": ("Sequences that wait.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the pages in use, 1 for all.", "cache_usage"),
}
_COUNTERS = {
    "num_preemptions": ("Sequences put back to wait.", "stats.num_preemptions"),
    "engine_steps": ("Steps of the engine.", "stats.num_steps"),
    "engine_graph_steps": ("Steps replayed from a CUDA graph.", "stats.num_graph_steps"),
    "kv_cache_saturated_elements": (
        "Elements of keys and values that a quantised cache could not hold.",
        "stats.num_saturated",
    ),
    "nan_logits_rows": (
        "Output tokens that had a NaN among their logits, which counts as -inf.",
        "stats.num_nan_rows",
    ),
    "spec_decode_num_drafts": (
        "Verifications of a sequence's drafts.",
        "stats.speculative.num_drafts",
    ),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", "stats.speculative.num_draft_tokens"),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens accepted.",
        "stats.speculative.num_accepted_tokens",
    ),
}


class EngineMetrics(Collector):
    """Reads the newest snapshot when asked."""

    def __init__(self, model_name: str, engine: ServedEngine) -> None:
        self._model_name, self._engine = model_name, engine

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "Whether the engine answers.", not self._engine.trouble)
        restarts = self._engine.num_restarts
        yield self._counter("engine_restarts", "Times the engine was started again.", restarts)
        snapshot = self._engine.snapshot
        if snapshot is None:
            return
        for name, (meaning, where) in _GAUGES.items():
            yield self._gauge(name, meaning, attrgetter(where)(snapshot))
        for name, (meaning, where) in _COUNTERS.items():
            yield self._counter(name, meaning, attrgetter(where)(snapshot))
        accepted = {str(i): count for i, count in enumerate(snapshot.stats.speculative.accepted_at)}
        stages = {stage: ms / 1e3 for stage, ms in snapshot.stats.stage_ms.items()}
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            "position",
            accepted,
        )
        yield self._counters("stage_time_seconds", "Time in each stage of a step.", "stage", stages)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"anabranch:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"anabranch:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counters(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"anabranch:{name}", help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family


class Metrics:
    """The metrics of one server."""

    def __init__(self, model_name: str, engine: ServedEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineMetrics(model_name, engine))
        self._model_name = model_name
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "From one arrival of tokens to the next.", _BETWEEN
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first, by continuation.",
            _BETWEEN,
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE
        )
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _SIZES)
        self.output_sizes = self._histogram(
            "request_generation_tokens", "Tokens of a request's continuations.", _SIZES
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken on.")
        self.output_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._finished = Counter(
            "anabranch:request_success",
            "Continuations by the reason they ended for; requests that were given up as abort.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )

    def watch(self, num_prompt_tokens: int, arrival: float) -> RequestWatch:
        """Begin to watch a request that arrived at this moment of `time.monotonic`."""
        self.prompt_tokens.inc(num_prompt_tokens)
        return RequestWatch(self, num_prompt_tokens, arrival)

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"anabranch:{name}", help, ["model_name"], buckets=buckets, registry=self._registry
        ).labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"anabranch:{name}", help, ["model_name"], registry=self._registry).labels(
            self._model_name
        )


class RequestWatch:
    """Times of one request's tokens."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, arrival: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival = arrival
        self._first: dict[int, float] = {}  # by continuation
        self._last: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._over = False

    def observe(self, delta: RequestDelta) -> bool:
        """Count a delta; whether it is the request's first."""
        now, metrics = time.monotonic(), self._metrics
        is_first = not self._first
        if is_first:
            metrics.first_token.observe(now - self._arrival)
            metrics.prompt_sizes.observe(self._num_prompt_tokens)
            metrics.cache_queries.inc(self._num_prompt_tokens)
            metrics.cache_hits.inc(delta.num_cached_tokens)
        metrics.output_tokens.inc(delta.num_tokens)
        for choice in delta.choices:
            index = choice.number
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(choice.token_ids)
            if index in self._last:
                metrics.between.observe(now - self._last[index])
            self._first.setdefault(index, now)
            self._last[index] = now
            if choice.finish_reason is not None:
                metrics.finished(choice.finish_reason)
        if delta.finished:
            self._finish(now)
        return is_first

    def end(self) -> None:
        """No delta follows; a request without its last token was aborted."""
        if not self._over:
            self._metrics.finished("abort")

    def _finish(self, now: float) -> None:
        self._over = True
        self._metrics.whole.observe(now - self._arrival)
        self._metrics.output_sizes.observe(sum(self._num_tokens.values()))
        for mean in self._means():
            self._metrics.per_token.observe(mean)

    def _means(self) -> Iterator[float]:
        for index, number in self._num_tokens.items():
            if number > 1:
                yield (self._last[index] - self._first[index]) / (number - 1)
