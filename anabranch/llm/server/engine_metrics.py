"""The engine's own counts, as Prometheus collects them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.llm.server.served_engine import ServedEngine


class EngineMetrics(Collector):
    """Reads the newest snapshot when asked."""

    def __init__(self, model_name: str, engine: ServedEngine) -> None:
        self._model_name, self._engine = model_name, engine

    def collect(self) -> Iterator[Metric]:
        """All metrics of the engine."""
        yield self._gauge("engine_up", "Whether the engine answers.", not self._engine.trouble)
        yield self._counter(
            "engine_restarts", "Times the engine was started again.", self._engine.num_restarts
        )
        snapshot = self._engine.snapshot
        if snapshot is None:
            return
        stats, spec = snapshot.stats, snapshot.stats.speculative
        yield self._gauge("num_requests_running", "Sequences that run.", snapshot.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", snapshot.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the pages in use, 1 for all.", snapshot.cache_usage
        )
        yield self._counter("num_preemptions", "Sequences put back to wait.", stats.num_preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter(
            "engine_graph_steps", "Steps replayed from a CUDA graph.", stats.num_graph_steps
        )
        yield self._counter(
            "kv_cache_saturated_elements",
            "Elements of keys and values that a quantised cache could not hold.",
            stats.num_saturated,
        )
        yield self._counter(
            "nan_logits_rows",
            "Output tokens that had a NaN among their logits, which counts as -inf.",
            stats.num_nan_rows,
        )
        yield self._counter(
            "spec_decode_num_drafts", "Verifications of a sequence's drafts.", spec.num_drafts
        )
        yield self._counter(
            "spec_decode_num_draft_tokens", "Tokens drafted.", spec.num_draft_tokens
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", spec.num_accepted_tokens
        )
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            "position",
            {str(place): number for place, number in enumerate(spec.accepted_at)},
        )
        yield self._counters(
            "stage_time_seconds",
            "Time in each stage of a step.",
            "stage",
            {stage: taken / 1e3 for stage, taken in stats.stage_ms.items()},
        )

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"anabranch:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"anabranch:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counters(self, name: str, help: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(f"anabranch:{name}", help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
