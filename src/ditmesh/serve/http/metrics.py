"""Prometheus metrics: the server's state at each scrape, and counts of jobs and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..types import ServerState

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
# For each replica and each rank: the field of its state, the metric's name, and its description.
REPLICA_GAUGES = (
    ("ready", "replica_ready", "Whether the replica's ranks are ready"),
    ("batch", "batch_rows", "Rows of the transformer's latest call"),
    ("drift", "drift", "Drift of a stale strategy, as last measured"),
)
REPLICA_COUNTERS = (
    ("restarts", "replica_restarts", "Ranks started again"),
    ("calls", "transformer_calls", "Calls of the transformer"),
    ("rows", "transformer_rows", "Rows of these calls"),
    ("synchronous_steps", "synchronous_steps", "Steps of a stale strategy that were synchronous"),
)
SENT = (("bytes", "sent_bytes", "Bytes that ranks have sent, by axis"),)
RANK_GAUGES = (
    ("step_seconds", "rank_step_seconds", "Time of the rank's last step"),
    ("waiting_seconds", "rank_waiting_seconds", "Of that, waiting for other ranks"),
    ("memory_bytes", "rank_memory_bytes", "Resident on the CPU, allocated on CUDA"),
)


class StateCollector:
    """The server's state as metrics, read at every scrape."""

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The method that `prometheus_client` calls."""
        state = self._state()
        for name, text, value in (
            ("ready", "Whether a replica takes jobs", state.ready),
            ("jobs_queued", "Jobs that wait", state.queued),
            ("jobs_running", "Jobs under way", state.running),
        ):
            yield GaugeMetricFamily(f"ditmesh_{name}", text, value=float(value))
        replicas = [
            ((replica.name,), vars(replica) | {"ready": float(replica.state == "ready")}) for replica in state.replicas
        ]
        yield from _families(GaugeMetricFamily, ("replica",), REPLICA_GAUGES, replicas)
        yield from _families(CounterMetricFamily, ("replica",), REPLICA_COUNTERS, replicas)
        sent = [
            ((replica.name, axis), {"bytes": count})
            for replica in state.replicas
            for axis, count in replica.bytes.items()
        ]
        yield from _families(CounterMetricFamily, ("replica", "axis"), SENT, sent)
        ranks = [
            ((replica.name, str(rank.rank), rank.device), vars(rank))
            for replica in state.replicas
            for rank in replica.ranks
        ]
        yield from _families(GaugeMetricFamily, ("replica", "rank", "device"), RANK_GAUGES, ranks)


def _families(kind: Any, labels: tuple[str, ...], fields: Any, rows: Any) -> Iterator[Metric]:
    for field, name, text in fields:
        family = kind(f"ditmesh_{name}", text, labels=labels)
        for values, state in rows:
            if state[field] is not None:
                family.add_metric(values, state[field])
        yield family


class Metrics:
    """All metrics of one server, in a separate registry.

    Attributes:
        requests, request_seconds: that were answered; status 0: the client went away before.
        under_way: requests.
        submitted, refused, ended, failures, restarts: jobs, by what their labels say.
        waiting, working: seconds from a job's acceptance to its first start, and to its end.
    """

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(state))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ditmesh_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"ditmesh_{name}_seconds", text, labels, buckets=SECONDS, registry=self.registry)

        self.requests = counter("http_requests", "Requests that were answered", "method", "route", "status")
        self.request_seconds = seconds(
            "http_request", "From a request to the end of its answer; of streams, too", "route"
        )
        self.under_way = Gauge(
            "ditmesh_http_requests_under_way", "Requests under way, streams among them", registry=self.registry
        )
        self.submitted = counter("jobs_submitted", "Jobs that were accepted", "model")
        self.refused = counter("jobs_refused", "Jobs that were not accepted", "code")
        self.ended = counter("jobs_ended", "Jobs that have ended, by status", "status")
        self.failures = counter("job_failures", "Jobs that failed, by the error's code", "code")
        self.restarts = counter("job_restarts", "Jobs that were begun again after a failure")
        self.waiting = seconds("job_waiting", "From a job's acceptance to its start")
        self.working = seconds("job", "From a job's acceptance to its end")

    def page(self) -> bytes:
        """The metrics that Prometheus reads."""
        return generate_latest(self.registry)
