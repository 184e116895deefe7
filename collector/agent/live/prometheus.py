"""The metrics of a run for Prometheus: their declaration, their samples at one moment, and the endpoint.

Names follow https://prometheus.io/docs/practices/naming/. Docs: docs/metrics.md. No label has a value per
process, so the number of series depends on the ranks, workers and devices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from collector.errors import TidegaugeError
from collector.findings import Finding
from training_harness.records import ROLE_WORKER, ROLES

if TYPE_CHECKING:
    from collector.store import Totals

LOCALHOST = "127.0.0.1"
#: One record of a stream: column -> value; an absent column, or None, is missing.
Sample = Mapping[str, float | None]
_RANK, _HOST, _ALL = ("host", "rank"), ("host",), ()
_PROCESS, _DEVICE, _ALLOCATOR = ("host", "rank", "role", "worker"), ("host", "device"), ("host", "rank", "device")
#: Name of a metric in `METRICS`, values of its labels (None: does not apply), and its value.
Point = tuple[str, tuple[object, ...], float | None]
_HOST_COLUMNS = {
    "host_memory_size_bytes": "memory_total_bytes",
    "host_memory_available_bytes": "memory_available_bytes",
    "cgroup_memory_limit_bytes": "cgroup_limit_bytes",
    "cgroup_memory_used_bytes": "cgroup_usage_bytes",
    "cgroup_memory_anonymous_bytes": "cgroup_anon_bytes",
    "shm_size_bytes": "shm_total_bytes",
    "shm_used_bytes": "shm_used_bytes",
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric; its labels come after `run`, which all metrics have."""

    name: str
    meaning: str
    labels: tuple[str, ...]

    @property
    def kind(self) -> str:
        """`counter` or `gauge`."""
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: dict[str, Declaration] = {
    name: Declaration(f"tidegauge_{name}", meaning, labels)
    for name, labels, meaning in (
        ("run_info", ("name",), "1; the name of the run."),
        ("steps_total", _RANK, "Steps: of the optimizer, else batches, else forward passes."),
        ("batches_total", _RANK, "Batches yielded to the training loop."),
        ("samples_total", _RANK, "Samples in those batches."),
        ("step_duration_seconds_total", _RANK, "Time in steps."),
        ("data_wait_seconds_total", _RANK, "Time in steps spent waiting for batches."),
        ("processes", _PROCESS, "Living processes of the run."),
        ("memory_pss_bytes", _PROCESS, "Resident memory, shared pages divided by their users (PSS)."),
        ("memory_private_dirty_bytes", _PROCESS, "Written pages that are a process's alone; for trends."),
        ("host_memory_size_bytes", _HOST, "Memory of the host."),
        ("host_memory_available_bytes", _HOST, "Memory of the host that can be had without swapping."),
        ("cgroup_memory_limit_bytes", _HOST, "Limit of the control group that binds."),
        ("cgroup_memory_used_bytes", _HOST, "Memory charged to that group, page cache included."),
        ("cgroup_memory_anonymous_bytes", _HOST, "The part of it that can't be dropped: anonymous memory."),
        ("shm_size_bytes", _HOST, "Size of /dev/shm."),
        ("shm_used_bytes", _HOST, "/dev/shm in use."),
        ("device_memory_size_bytes", _DEVICE, "Memory of the device."),
        ("device_memory_used_bytes", _DEVICE, "Memory of the device in use by all processes."),
        ("allocator_allocated_bytes", _ALLOCATOR, "Device memory that PyTorch's tensors have."),
        ("allocator_reserved_bytes", _ALLOCATOR, "Device memory that PyTorch's allocator holds."),
        ("records_lost_total", _ALL, "Records that could not be written."),
        ("ingest_lag_seconds", _ALL, "Age of the oldest record that is not in the lake yet."),
        ("collector_cpu_seconds_total", _ALL, "CPU time of the collector."),
        ("collector_resident_bytes", _ALL, "Resident memory of the collector."),
        (
            "finding",
            ("kind", "severity", "host", "rank", "role", "worker", "device"),
            "1 for each finding of the last verdict.",
        ),
        ("verdict_timestamp_seconds", _ALL, "When that verdict was made, Unix time."),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of a run at one moment, for the metrics.

    Attributes:
        host: host of the collector.
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


def families(view: View) -> list[Metric]:
    """Return the metrics with their samples, in the order of `METRICS`; a missing value has no sample. Pure."""
    samples_by_name: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
    for name, labels, value in _points(view):
        if value is not None:
            key = (view.run_id, *("" if label is None else str(label) for label in labels))
            samples_by_name[name][key] = value
    return [_family(METRICS[name], samples) for name, samples in samples_by_name.items() if samples]


def _family(metric: Declaration, samples: Mapping[tuple[str, ...], float]) -> Metric:
    labels = ("run", *metric.labels)
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.meaning, labels=labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
    for key, value in samples.items():
        family.add_metric(key, value)
    return family


def _points(view: View) -> Iterator[Point]:
    yield "run_info", (view.name,), 1
    if view.totals is not None:
        yield from _progress(view.totals)
    yield from _processes(view.host, view.samples.get("process", ()))
    for sample in view.samples.get("host", ()):
        for name, column in _HOST_COLUMNS.items():
            yield name, (view.host,), sample.get(column)
    for sample in view.samples.get("device", ()):
        device = (view.host, sample["device"])
        yield "device_memory_size_bytes", device, sample.get("total_bytes")
        yield "device_memory_used_bytes", device, sample.get("used_bytes")
    for sample in view.samples.get("agent", ()):
        yield "records_lost_total", (), sample.get("records_lost_count")
        yield "ingest_lag_seconds", (), _seconds(sample.get("ingest_lag_ns"))
        yield "collector_cpu_seconds_total", (), _seconds(sample.get("cpu_ns"))
        yield "collector_resident_bytes", (), sample.get("rss_bytes")
    for finding in view.findings or ():
        locus = finding.locus
        labels = (finding.kind, finding.severity, locus.host, locus.rank, locus.role, locus.worker, locus.device)
        yield "finding", labels, 1
    yield "verdict_timestamp_seconds", (), view.verdict_seconds


def _progress(totals: Totals) -> Iterator[Point]:
    for rank, sums in totals.sums.items():
        for name in ("steps", "batches", "samples"):
            yield f"{name}_total", rank, sums.get(name)
        yield "step_duration_seconds_total", rank, _seconds(sums.get("step_ns"))
        yield "data_wait_seconds_total", rank, _seconds(sums.get("data_wait_ns"))
    for device, last in totals.allocator.items():
        yield "allocator_allocated_bytes", device, last["allocated_bytes"]
        yield "allocator_reserved_bytes", device, last["reserved_bytes"]


def _processes(host: str, samples: Iterable[Sample]) -> Iterator[Point]:
    """Yield sums over the processes of the same rank, role and worker."""
    sums: dict[tuple[str, tuple[object, ...]], float] = {}
    for sample in samples:
        role = sample["role"]
        worker = sample.get("worker") if role == ROLE_WORKER else None
        group = (host, sample.get("process_rank"), ROLES[int(role or 0)], worker)
        for name, value in (
            ("processes", 1),
            ("memory_pss_bytes", sample.get("pss_bytes")),
            ("memory_private_dirty_bytes", sample.get("private_dirty_bytes")),
        ):
            if value is not None:
                sums[name, group] = sums.get((name, group), 0) + value
    for (name, labels), total in sums.items():
        yield name, labels, total


def _seconds(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e9


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
    """Serve the metrics from a thread that ends with the process.

    Args:
        address: host and port; port 0 is any free port.
        take_view: returns the present view, None without a run; called in other threads, and must not raise.

    Returns:
        The URL.

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
