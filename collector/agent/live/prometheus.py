"""The metrics of a run for Prometheus: their declaration, their samples at one moment, and the endpoint.

Names follow https://prometheus.io/docs/practices/naming/. Docs: docs/metrics.md. No label has a value per
process, so the number of series depends on the ranks, workers and devices alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from collector.agent.samplers.samples import Sample
from collector.errors import TidegaugeError
from collector.findings import Finding
from training_harness.records import ROLE_WORKER, ROLES

if TYPE_CHECKING:
    from collector.store import Totals

LOCALHOST = "127.0.0.1"
#: Source and labels of metrics, without the label `run` that all have -> name, column and help text of each.
_DECLARED: dict[tuple[str, tuple[str, ...]], tuple[tuple[str, str, str], ...]] = {
    ("run", ("name",)): (("run_info", "count", "1; the name of the run."),),
    ("rank", ("host", "rank")): (
        ("steps_total", "steps", "Optimizer steps, else batches, else forward passes."),
        ("batches_total", "batches", "Batches yielded to the training loop."),
        ("samples_total", "samples", "Samples in those batches."),
        ("step_duration_seconds_total", "step_ns", "Time in steps."),
        ("data_wait_seconds_total", "data_wait_ns", "Time in steps spent waiting for batches."),
    ),
    ("process", ("host", "rank", "role", "worker")): (
        ("processes", "count", "Living processes of the run."),
        ("memory_pss_bytes", "pss_bytes", "Resident memory, shared pages divided by their users (PSS)."),
        (
            "memory_private_dirty_bytes",
            "private_dirty_bytes",
            "Written pages that only one process has; used for trends.",
        ),
    ),
    ("host", ("host",)): (
        ("host_memory_size_bytes", "memory_total_bytes", "Memory of the host."),
        (
            "host_memory_available_bytes",
            "memory_available_bytes",
            "Memory of the host that is available without swapping.",
        ),
        (
            "cgroup_memory_limit_bytes",
            "cgroup_limit_bytes",
            "Smallest memory limit of the command's control groups.",
        ),
        (
            "cgroup_memory_used_bytes",
            "cgroup_usage_bytes",
            "Memory charged at the level of that limit, page cache included.",
        ),
        (
            "cgroup_memory_anonymous_bytes",
            "cgroup_anon_bytes",
            "Anonymous part of that memory, which cannot be dropped.",
        ),
        ("shm_size_bytes", "shm_total_bytes", "Size of /dev/shm."),
        ("shm_used_bytes", "shm_used_bytes", "/dev/shm in use."),
    ),
    ("device", ("host", "device")): (
        ("device_memory_size_bytes", "total_bytes", "Memory of the device."),
        ("device_memory_used_bytes", "used_bytes", "Memory of the device in use by all processes."),
    ),
    ("allocator", ("host", "rank", "device")): (
        ("allocator_allocated_bytes", "allocated_bytes", "Device memory in use by PyTorch's tensors."),
        ("allocator_reserved_bytes", "reserved_bytes", "Device memory reserved by PyTorch's allocator."),
    ),
    ("agent", ()): (
        ("records_lost_total", "records_lost_count", "Records that could not be written."),
        ("ingest_lag_seconds", "ingest_lag_ns", "Age of the oldest record that is not in the lake yet."),
        ("collector_cpu_seconds_total", "cpu_ns", "CPU time of the collector."),
        ("collector_resident_bytes", "rss_bytes", "Resident memory of the collector."),
    ),
    ("finding", ("kind", "severity", "host", "rank", "role", "worker", "device")): (
        ("finding", "count", "1 for each finding of the last verdict."),
    ),
    ("verdict", ()): (("verdict_timestamp_seconds", "seconds", "Unix time of the last verdict."),),
}


class Declaration(NamedTuple):
    """A metric: its value is the `column` of a sample of its `source`; a column in ns is served in seconds."""

    name: str
    source: str
    labels: tuple[str, ...]
    column: str
    meaning: str


METRICS: dict[str, Declaration] = {
    name: Declaration(f"tidegauge_{name}", source, labels, column, meaning)
    for (source, labels), metrics in _DECLARED.items()
    for name, column, meaning in metrics
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of a run at one moment, for the metrics.

    Attributes:
        samples: stream -> its newest samples; those of `process` include the newest smaps reading of each process.
        findings: findings of the last verdict; None before the first.
        verdict_seconds: Unix time of that verdict.
    """

    run_id: str
    name: str
    host: str
    totals: Totals | None = None
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    findings: Sequence[Finding] | None = None
    verdict_seconds: float | None = None

    @property
    def steps(self) -> int:
        """The steps of the rank that has most."""
        ranks = self.totals.sums.values() if self.totals else ()
        return max((sums.get("steps", 0) for sums in ranks), default=0)


def families(view: View) -> list[Metric]:
    """Return the metrics with their samples, in the order of `METRICS`; a missing value has no sample. Pure."""
    values: defaultdict[str, dict[tuple[str, ...], Sample]] = defaultdict(dict)
    for source, labels, sample in _values(view):
        values[source][view.run_id, *("" if label is None else str(label) for label in labels)] = sample
    metrics = [_family(metric, values[metric.source]) for metric in METRICS.values()]
    return [metric for metric in metrics if metric.samples]


def _family(metric: Declaration, values: Mapping[tuple[str, ...], Sample]) -> Metric:
    make = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = make(metric.name, metric.meaning, labels=("run", *metric.labels))
    for labels, sample in values.items():
        value = sample.get(metric.column)
        if value is not None:
            family.add_metric(labels, value / 1e9 if metric.column.endswith("_ns") else value)
    return family


def _values(view: View) -> Iterator[tuple[str, tuple[object, ...], Sample]]:
    """Yield sources with the values of their labels (None: does not apply) and of their columns."""
    yield "run", (view.name,), {"count": 1}
    if view.totals is not None:
        for rank, sums in view.totals.sums.items():
            yield "rank", rank, sums
        for device, newest in view.totals.allocator.items():
            yield "allocator", device, newest
    for role, total in by_role(view.samples.get("process", ())).items():
        yield "process", (view.host, *role), total
    for sample in view.samples.get("host", ()):
        yield "host", (view.host,), sample
    for sample in view.samples.get("device", ()):
        yield "device", (view.host, sample["device"]), sample
    for sample in view.samples.get("agent", ()):
        yield "agent", (), sample
    for finding in view.findings or ():
        locus = finding.locus
        labels = (finding.kind, finding.severity, locus.host, locus.rank, locus.role, locus.worker, locus.device)
        yield "finding", labels, {"count": 1}
    yield "verdict", (), {"seconds": view.verdict_seconds}


def by_role(samples: Sequence[Sample]) -> Mapping[tuple[object, ...], Counter[str]]:
    """Return the sums over the processes of the same rank, role and worker."""
    sums: defaultdict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
    for sample in samples:
        role = int(sample["role"] or 0)
        total = sums[sample.get("process_rank"), ROLES[role], sample.get("worker") if role == ROLE_WORKER else None]
        total["count"] += 1
        for column in ("pss_bytes", "private_dirty_bytes"):
            if (value := sample.get(column)) is not None:
                total[column] += int(value)
    return sums


class _ScrapeCollector(Collector):
    """A collector that computes the samples at each scrape, and at no other time."""

    def __init__(self, take_view: Callable[[], View | None]) -> None:
        self._take_view = take_view

    def collect(self) -> list[Metric]:
        view = self._take_view()
        return [] if view is None else families(view)


def parse_address(text: str) -> tuple[str, int]:
    """Parse host and port from `PORT`, `HOST:PORT` or `[IPV6]:PORT`; the default host is localhost.

    Raises:
        ValueError: the text has none of these forms, or the port is out of bounds.
    """
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not PORT or HOST:PORT with a port from 0 to 65535 (0: any that is free)")
    return host.removeprefix("[").removesuffix("]") or LOCALHOST, int(port)


def serve(address: tuple[str, int], take_view: Callable[[], View | None]) -> str:
    """Serve the metrics from a thread that ends with the process; return their URL.

    Args:
        address: host and port; port 0 is any free port.
        take_view: returns the present view, None without a run; called in other threads, and must not raise.

    Raises:
        TidegaugeError: the address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(_ScrapeCollector(take_view))
    host, port = address
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise TidegaugeError(
            f"metrics cannot be served at {host}:{port} ({error.strerror}): give --prometheus an address of this "
            "machine with a port that is free (0: any)"
        ) from None
    url_host = f"[{host}]" if ":" in host else host
    return f"http://{url_host}:{server.server_port}/metrics"
