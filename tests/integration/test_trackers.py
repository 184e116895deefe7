"""Series and findings in the real libraries of experiment trackers."""

import contextlib
import gzip
import logging
import os
import pty
import select
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from collector.agent.live.prometheus import View
from collector.agent.live.tracker_libraries import EVERY_SECONDS
from collector.agent.live.trackers import Trackers, series
from collector.findings import Finding, measurements
from collector.store import Totals
from collector.store.runs.run import Run
from tests.conftest import REPOSITORY, bare_environment, tidegauge, wait_for
from training_harness.layout import create_run

GIB = 2**30
LEAK = Finding(
    kind="main-heap-leak",
    severity="warning",
    confidence=0.9,
    summary="The training process keeps taking host memory.",
    evidence=measurements(9, "0-30 s", rise_bytes=GIB, slope_bytes=GIB),
)


def view(steps, seconds):
    sums = {
        ("node", None): {
            "steps": steps,
            "batches": steps,
            "samples": 8 * steps,
            "step_ns": round(seconds * 1e9),
            "data_wait_ns": round(seconds * 0.25e9),
        }
    }
    samples = {
        "process": [
            {"role": 0, "pss_bytes": 3.0 * GIB},
            {"role": 1, "worker": 0, "pss_bytes": 0.5 * GIB},
            {"role": 1, "worker": 1, "pss_bytes": 0.25 * GIB},
            {"role": 3, "pss_bytes": 0.1 * GIB},
        ],
        "host": [{"memory_available_bytes": 9.0 * GIB, "shm_used_bytes": None}],
        "device": [{"device": 0, "used_bytes": 2.0 * GIB}],
    }
    allocator = {("node", None, 0): {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB}}
    return View(run_id="r", name="n", host="node", totals=Totals(sums=sums, allocator=allocator), samples=samples)


@pytest.fixture
def run(tmp_path):
    return Run(create_run(tmp_path / "home", name="train", argv=["train.py"], tags={}))


def log_to(run, *names):
    """Two points, a finding and a report, as a run gives them."""
    trackers = Trackers(names)
    trackers.begin(run, "train")
    trackers.tick(0.0, lambda: view(100, 10.0))
    trackers.tick(5.0, lambda: view(150, 15.0))
    trackers.tick(10.0, lambda: view(200, 20.0))
    trackers.note([LEAK])
    trackers.note([LEAK])
    report = run.path / "report.html"
    report.write_text("<p>report</p>")
    trackers.attach_report(report)
    trackers.close()


def test_series_are_rates_since_the_point_before_and_memory_as_it_is():
    step, values = series(view(200, 20.0), view(100, 10.0), 10.0)
    assert step == 200
    assert values == {
        "steps_per_second": 10.0,
        "samples_per_second": 80.0,
        "data_wait_ratio": 0.25,
        "memory/main_bytes": 3.0 * GIB,
        "memory/worker_bytes": 0.75 * GIB,
        "host/memory_available_bytes": 9.0 * GIB,
        "gpu0/used_bytes": 2.0 * GIB,
        "gpu0/allocated_bytes": GIB,
        "gpu0/reserved_bytes": 2 * GIB,
    }


def test_nothing_is_known_before_the_first_step():
    empty = View(run_id="r", name="n", host="node", totals=Totals())
    assert series(empty, empty, 10.0) == (0, {})


def test_tensorboard_shows_series_and_findings(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_to(run, "tensorboard")
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    [point] = events.Scalars("tidegauge/samples_per_second")
    assert (point.step, point.value) == (200, 80.0)
    [text] = events.Tensors("tidegauge/main-heap-leak")
    assert text.tensor_proto.string_val[0].decode() == LEAK.summary
    [name] = events.Tensors("tidegauge/run")
    assert name.tensor_proto.string_val[0].decode() == run.run_id
    assert run.tags["tensorboard"] == str(run.path / "tensorboard")


def test_wandb_keeps_a_run_without_a_network(run, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    log_to(run, "wandb")
    [folder] = (run.path / "wandb").glob("offline-run-*")
    [record] = folder.glob("run-*.wandb")
    parts = ("tidegauge/samples_per_second", LEAK.summary, run.run_id, "report.html")
    wait_for(
        lambda: all(part.encode() in record.read_bytes() for part in parts), "W&B wrote all that it was given", 60
    )
    assert run.tags["wandb"] == str(folder), "for `wandb sync`"
    said = capfd.readouterr()
    assert said.out == "", "stdout is the command's own"
    assert "nothing more goes to" not in said.err


def test_wandb_without_a_key_does_not_ask_in_the_terminal_of_the_command(run, tmp_path):
    pytest.importorskip("wandb")
    program = (
        "import sys; from pathlib import Path; from collector.agent.live.trackers import Trackers; "
        "from collector.store.runs.run import Run; trackers = Trackers(['wandb']); "
        "trackers.begin(Run(Path(sys.argv[1])), 'train'); trackers.close()"
    )
    terminal, inside = pty.openpty()
    environment = {name: value for name, value in bare_environment().items() if not name.startswith("WANDB_")}
    with subprocess.Popen(
        [sys.executable, "-c", program, run.path],
        cwd=REPOSITORY,
        env={**environment, "HOME": str(tmp_path)},  # where no login is
        stdin=inside,
        stderr=inside,
    ) as process:
        os.close(inside)
        shown = b""
        while b"Enter your choice" not in shown and b"\n" not in shown:
            if not select.select([terminal], [], [], 60)[0]:
                break
            shown += os.read(terminal, 1000)
        process.kill()
    os.close(terminal)
    assert shown.decode().startswith("tidegauge: nothing more goes to wandb: UsageError: No API key configured")


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_mlflow_joins_the_run_of_the_training(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("mine", artifact_location=str(tmp_path / "artifacts"))
    own = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", own)
    log_to(run, "mlflow")
    found = client.get_run(own)
    assert found.data.metrics["tidegauge/samples_per_second"] == 80.0
    assert found.data.tags["tidegauge.main-heap-leak"] == f"warning: {LEAK.summary}"
    assert found.data.tags["tidegauge.run"] == run.run_id
    assert run.tags["mlflow"] == f"run {own}", "a database has no page"
    assert [file.path for file in client.list_artifacts(own)] == ["report.html"]
    assert found.info.status == "RUNNING", "the training ends its own run"


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_trackio_keeps_series_and_the_report(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    log_to(run, "trackio")
    assert run.tags["trackio"] == "tidegauge/train"
    [database] = (tmp_path / "trackio").rglob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as tables:
        counts = [tables.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("metrics", "artifacts")]
    assert all(counts), "series, and the report"


@pytest.fixture
def otlp_endpoint():
    """An HTTP server that keeps the bodies of what it gets, by path."""
    bodies = {}

    class Keep(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            packed = self.headers.get("Content-Encoding") == "gzip"
            bodies[self.path] = gzip.decompress(body) if packed else body
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Keep)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


def test_opentelemetry_gets_gauges_and_log_records(run, monkeypatch, otlp_endpoint):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, bodies = otlp_endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    log_to(run, "otlp")
    sent = ExportMetricsServiceRequest.FromString(bodies["/v1/metrics"]).resource_metrics[0]
    gauges = {one.name: one.gauge.data_points[0] for one in sent.scope_metrics[0].metrics}
    assert gauges["tidegauge.samples_per_second"].as_double == 80.0
    assert gauges["tidegauge.gpu0.reserved_bytes"].as_double == 2 * GIB
    about = {pair.key: pair.value.string_value for pair in sent.resource.attributes}
    assert about["tidegauge.run"] == run.run_id
    [record] = ExportLogsServiceRequest.FromString(bodies["/v1/logs"]).resource_logs[0].scope_logs[0].log_records
    assert (record.severity_text, record.body.string_value) == ("WARN", LEAK.summary)


def test_opentelemetry_exports_each_point_when_it_is_made(run, monkeypatch, otlp_endpoint):
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    address, _ = otlp_endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    intervals = []

    class Reader(export.PeriodicExportingMetricReader):
        def __init__(self, exporter, interval):
            intervals.append(interval)
            super().__init__(exporter, interval)

    monkeypatch.setattr(export, "PeriodicExportingMetricReader", Reader)
    log_to(run, "otlp")
    assert intervals == [EVERY_SECONDS * 1000], "the library's own interval is 60 s"


def test_each_warning_of_a_tracker_is_said_once_and_none_of_another_library(run, monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    trackers = Trackers(["tensorboard"])
    trackers.begin(run, "train")
    for seconds in (1, 2):
        logging.getLogger("tensorboard.writer").warning("no answer, retrying in %s s", seconds)
        logging.getLogger("tensorboard.writer").warning("authentication failed")
        logging.getLogger("aiohttp.client").warning("unclosed session")
    trackers.close()
    said = capfd.readouterr().err.splitlines()
    assert sum("no answer" in line for line in said) == 1
    assert "tidegauge: tensorboard: no answer, retrying in 1 s" in said
    assert said.count("tidegauge: tensorboard: authentication failed") == 1
    assert not any(line.startswith("tidegauge: aiohttp") for line in said)


def test_receiver_that_is_unreachable_is_a_line_for_each_warning(run, monkeypatch, capfd):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    log_to(run, "otlp")
    [address, problem, outcome] = capfd.readouterr().err.splitlines()
    assert address == "tidegauge: otlp: http://127.0.0.1:9"
    assert problem.startswith("tidegauge: opentelemetry: ")
    assert "refused" in problem
    assert outcome.startswith("tidegauge: opentelemetry: Failed to export")


def test_library_that_fails_is_one_line(run, monkeypatch, capfd):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_DIR", "/proc/nowhere")
    log_to(run, "tensorboard")
    [line] = [line for line in capfd.readouterr().err.splitlines() if "tensorboard" in line]
    assert line.startswith("tidegauge: nothing more goes to tensorboard: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("comet", "'comet' is not known; give one of wandb, mlflow, tensorboard, trackio, otlp"),
        pytest.param(
            "trackio",
            "trackio is not installed where Tidegauge runs: pip install trackio",
            marks=pytest.mark.skipif(bool(find_spec("trackio")), reason="trackio is installed"),
        ),
    ],
)
def test_unusable_tracker_is_an_error_before_the_command_starts(tmp_path, name, said):
    done = tidegauge(tmp_path / "home", "run", "--log-to", name, "--", "touch", tmp_path / "made")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "made").exists()
