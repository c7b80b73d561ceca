"""Metrics for Prometheus: what the server's state says when it is asked, and what has happened to jobs and requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..types import ReplicaState, ServerState

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class StateCollector:
    """The server's state as metrics, read at every scrape.

    Args:
        state: gives it.
    """

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """What `prometheus_client` calls."""
        state = self._state()
        for name, text, value in (
            ("ready", "Whether a replica takes jobs", state.ready),
            ("jobs_queued", "Jobs that wait", state.queued),
            ("jobs_running", "Jobs under way", state.running),
        ):
            yield GaugeMetricFamily(f"ditmesh_{name}", text, value=float(value))
        yield from _of_replicas(state.replicas)
        yield from _of_ranks(state.replicas)


def _of_replicas(replicas: list[ReplicaState]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("ditmesh_replica_ready", "Whether the replica's ranks are ready", labels=["replica"])
    batch = GaugeMetricFamily("ditmesh_batch_rows", "Rows of the transformer's latest call", labels=["replica"])
    drift = GaugeMetricFamily("ditmesh_drift", "Drift of a stale strategy, as last measured", labels=["replica"])
    counters = {
        "restarts": CounterMetricFamily("ditmesh_replica_restarts", "Ranks started again", labels=["replica"]),
        "calls": CounterMetricFamily("ditmesh_transformer_calls", "Calls of the transformer", labels=["replica"]),
        "rows": CounterMetricFamily("ditmesh_transformer_rows", "Rows of these calls", labels=["replica"]),
        "synchronous_steps": CounterMetricFamily(
            "ditmesh_synchronous_steps", "Steps of a stale strategy that were synchronous", labels=["replica"]
        ),
    }
    sent = CounterMetricFamily("ditmesh_sent_bytes", "Bytes that ranks have sent, by axis", labels=["replica", "axis"])
    for replica in replicas:
        ready.add_metric([replica.name], float(replica.state == "ready"))
        batch.add_metric([replica.name], replica.batch)
        if replica.drift is not None:
            drift.add_metric([replica.name], replica.drift)
        for field, counter in counters.items():
            counter.add_metric([replica.name], getattr(replica, field))
        for axis, count in replica.bytes.items():
            sent.add_metric([replica.name, axis], count)
    yield from (ready, batch, drift, *counters.values(), sent)


def _of_ranks(replicas: list[ReplicaState]) -> Iterator[Metric]:
    labels = ["replica", "rank", "device"]
    gauges = {
        "step_seconds": GaugeMetricFamily("ditmesh_rank_step_seconds", "Time of the rank's last step", labels=labels),
        "waiting_seconds": GaugeMetricFamily(
            "ditmesh_rank_waiting_seconds", "Of that, waiting for other ranks", labels=labels
        ),
        "memory_bytes": GaugeMetricFamily(
            "ditmesh_rank_memory_bytes", "Resident on the CPU, allocated on CUDA", labels=labels
        ),
    }
    for replica in replicas:
        for rank in replica.ranks:
            for field, gauge in gauges.items():
                gauge.add_metric([replica.name, str(rank.rank), rank.device], getattr(rank, field))
    yield from gauges.values()


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        state: gives the server's state.
    """

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(state))
        more: Any = {"registry": self.registry}
        self._requests = Counter(
            "ditmesh_http_requests", "Requests that were answered", ["method", "route", "status"], **more
        )
        self._seconds = Histogram(
            "ditmesh_http_request_seconds",
            "From a request to the end of its answer; of streams, too",
            ["route"],
            buckets=SECONDS,
            **more,
        )
        self._under_way = Gauge("ditmesh_http_requests_under_way", "Requests under way, streams among them", **more)
        self._submitted = Counter("ditmesh_jobs_submitted", "Jobs that were accepted", ["model"], **more)
        self._refused = Counter("ditmesh_jobs_refused", "Jobs that were not accepted", ["code"], **more)
        self._ended = Counter("ditmesh_jobs_ended", "Jobs that have ended, by what they ended in", ["status"], **more)
        self._failures = Counter("ditmesh_job_failures", "Jobs that failed, by the error's code", ["code"], **more)
        self._again = Counter("ditmesh_job_restarts", "Jobs that were begun again after a failure", **more)
        self._waiting = Histogram(
            "ditmesh_job_waiting_seconds", "From a job's acceptance to its start", buckets=SECONDS, **more
        )
        self._working = Histogram("ditmesh_job_seconds", "From a job's acceptance to its end", buckets=SECONDS, **more)

    def page(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self.registry)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A request is under way."""
        with self._under_way.track_inprogress():
            yield

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request has been answered; status 0: its client went away before."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def submitted(self, model: str) -> None:
        """A job was accepted."""
        self._submitted.labels(model).inc()

    def refused(self, code: str) -> None:
        """A job was not accepted."""
        self._refused.labels(code).inc()

    def started(self, waited: float) -> None:
        """A job has begun for the first time, having waited some seconds."""
        self._waiting.observe(waited)

    def restarted(self) -> None:
        """A job is begun again."""
        self._again.inc()

    def ended(self, status: str, code: str | None, seconds: float) -> None:
        """A job has ended, with the code of its error if it failed."""
        self._ended.labels(status).inc()
        self._working.observe(seconds)
        if code is not None:
            self._failures.labels(code).inc()
