"""The metrics alone: the samples of one moment, and the documentation."""

import json
import re
from pathlib import Path

import pytest

from collector.agent.live.prometheus import METRICS, View, families, parse_address
from collector.findings import Evidence, Finding, Locus
from collector.store.lake.counters import Totals
from tests.recorded_runs import recorded
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_WORKER

DOCS = Path(__file__).parents[3] / "docs"
NAMES = {metric.name for metric in METRICS.values()}


def samples_of(**known):
    view = View(**{"run_id": "r", "name": "demo", "host": "node"} | known)
    return {
        (
            sample.name,
            *(sample.labels[label] for label in METRICS[sample.name.removeprefix("tidegauge_")].labels),
        ): (sample.value)
        for family in families(view)
        for sample in family.samples
        if sample.labels["run"] == "r"
    }


def process(role, pss, *, rank=None, loader=None, worker=None):
    pages = {} if pss is None else {"pss_bytes": pss, "private_dirty_bytes": pss // 2}
    return {"role": role, "process_rank": rank, "loader": loader, "worker": worker, "process_pid": 1, **pages}


#: The last record of the allocator and of the driver in a recorded run.
ALLOCATOR, GPU = (
    recorded("uneven-batches").streams[name].iloc[-1].to_dict() for name in ("device_memory", "device")
)
FULL = {
    "totals": Totals(
        sums={
            ("node", 1): {"steps": 9, "step_ns": 2 * 10**9, "data_wait_ns": 5 * 10**8, "batches": 9, "samples": 36}
        },
        allocator={("node", 1, 0): ALLOCATOR},
    ),
    "samples": {
        "process": [process(ROLE_MAIN, 100, rank=1), process(ROLE_WORKER, 10, rank=1, loader=0, worker=3)],
        "host": [
            dict.fromkeys(
                (
                    "memory_total_bytes",
                    "memory_available_bytes",
                    "cgroup_limit_bytes",
                    "cgroup_usage_bytes",
                    "cgroup_anon_bytes",
                    "shm_total_bytes",
                    "shm_used_bytes",
                ),
                7,
            )
        ],
        "device": [GPU],
        "agent": [{"records_lost_count": 0, "ingest_lag_ns": 10**9, "cpu_ns": 10**9, "rss_bytes": 6}],
    },
    "findings": [
        Finding(
            kind="slow-worker",
            severity="warning",
            confidence=1.0,
            summary="",
            locus=Locus(rank=1, worker=3),
            evidence=tuple(Evidence(name=name, value=1, unit="ratio", n=1, window="run") for name in "ab"),
        )
    ],
    "verdict_seconds": 1e9,
}


def test_samples_have_the_labels_of_rank_device_and_finding():
    samples = samples_of(**FULL)
    assert samples["tidegauge_steps_total", "node", "1"] == 9
    assert samples["tidegauge_step_duration_seconds_total", "node", "1"] == 2.0
    assert samples["tidegauge_data_wait_seconds_total", "node", "1"] == 0.5
    assert samples["tidegauge_allocator_reserved_bytes", "node", "1", "0"] == ALLOCATOR["reserved_bytes"] > 0
    assert samples["tidegauge_device_memory_used_bytes", "node", "0"] == GPU["used_bytes"] > 0
    assert samples["tidegauge_memory_private_dirty_bytes", "node", "1", "worker", "3"] == 5
    assert samples["tidegauge_finding", "slow-worker", "warning", "", "1", "", "3", ""] == 1
    assert {name for name, *_ in samples} == NAMES


def test_unknown_values_have_no_sample():
    process_unread = [process(ROLE_MAIN, None)]
    samples = samples_of(samples={"process": process_unread, "agent": [{"rss_bytes": 6, "ingest_lag_ns": None}]})
    assert samples == {
        ("tidegauge_run_info", "demo"): 1,
        ("tidegauge_processes", "node", "", "main", ""): 1,
        ("tidegauge_collector_resident_bytes",): 6,
    }


def test_number_of_series_does_not_grow_with_processes():
    crowd = [process(ROLE_WORKER, 10, loader=n, worker=n % 2) for n in range(1000)]
    samples = samples_of(samples={"process": [*crowd, process(ROLE_COLLECTOR, 1)]})
    assert {key[1:]: value for key, value in samples.items() if key[0] == "tidegauge_memory_pss_bytes"} == {
        ("node", "", "worker", "0"): 5000,
        ("node", "", "worker", "1"): 5000,
        ("node", "", "collector", ""): 1,
    }


def test_every_metric_is_documented_as_it_is_served():
    rows = re.findall(
        r"^\| `(tidegauge_\w+)` \| (.*?) \| (.*) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE
    )
    assert rows == [
        (metric.name, " ".join(f"`{label}`" for label in metric.labels) or "—", metric.meaning)
        for metric in METRICS.values()
    ]


def test_grafana_dashboard_queries_existing_metrics():
    body = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in body["panels"] for target in panel["targets"]]
    assert len(expressions) >= len(body["panels"]) > 5
    asked = set(re.findall(r"tidegauge_\w+", json.dumps(body)))
    assert asked <= NAMES
    assert all("run=~" in expression for expression in expressions)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("node-1:65535", ("node-1", 65535)),
    ],
)
def test_an_address_is_a_port_or_a_host_with_a_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "metrics", "65536", "-1", "localhost:", "1.5", "²"])
def test_invalid_address_is_refused_with_its_value_and_the_bounds(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + ".*from 0 to 65535"):
        parse_address(text)
