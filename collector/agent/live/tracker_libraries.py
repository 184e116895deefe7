"""The libraries of experiment trackers, each behind the same few calls.

A tracker that the environment names for the training is joined, so that everything is on one page: `WANDB_RUN_ID`
and `MLFLOW_RUN_ID` are those that the libraries themselves read.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collector.findings import Finding
from collector.store import Run
from training_harness.redaction import redact_text

#: Seconds between two points of a series.
EVERY_SECONDS = 10.0
PREFIX = "tidegauge"
_PROJECT = "tidegauge"
#: Characters of a tag of MLflow at most (mlflow/utils/validation.py, MAX_TAG_VAL_LENGTH is larger).
_TAG_CHARACTERS = 4000


class Tracker(ABC):
    """The calls of a tracker; `address` is where to look: a URL, a folder, or the name of its run."""

    address: str

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to series; their names begin with `PREFIX`."""

    @abstractmethod
    def note(self, finding: Finding) -> None:
        """Show a finding."""

    def attach_report(self, path: Path) -> None:  # noqa: B027 - where no files are kept, it stays in the run's folder
        """Keep the HTML report with the run."""

    @abstractmethod
    def close(self) -> None:
        """Finish."""


class _Wandb(Tracker):
    """W&B (https://docs.wandb.ai/guides/track/log/distributed-training: several writers of one run are shared)."""

    def __init__(self, run: Run, name: str) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        joined = os.environ.get("WANDB_RUN_ID")
        # Without a key it would ask for one in the terminal, which belongs to the command.
        self._wandb.setup(settings=self._wandb.Settings(silent=True))
        settings: dict[str, Any] = {"silent": True, "console": "off", "x_disable_stats": True}
        if joined and os.environ.get("WANDB_MODE", "online") == "online":
            settings |= {"mode": "shared", "x_primary": False, "x_label": PREFIX}
        self._run = self._wandb.init(
            id=joined,
            name=None if joined else name,
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            dir=str(run.path),
            config={"tidegauge_run": run.run_id},
            settings=self._wandb.Settings(**settings),
        )
        self._name = f"{PREFIX}-{run.run_id}"
        self.address = str(self._run.url or Path(self._run.dir).parent)  # offline it is a folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, f"{PREFIX}/step": step})

    def note(self, finding: Finding) -> None:
        _alert(self._run, self._wandb.AlertLevel, finding)
        self._run.summary[f"{PREFIX}/{finding.kind}"] = finding.summary

    def attach_report(self, path: Path) -> None:
        artifact = self._wandb.Artifact(self._name, type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _alert(run: Any, levels: Any, finding: Finding) -> None:
    """Send an alert with a run of W&B or trackio, whose calls are alike."""
    level = levels.ERROR if finding.severity == "critical" else levels.WARN
    run.alert(title=finding.kind, text=finding.summary, level=level)


class _Mlflow(Tracker):
    """MLflow, by the client that other runs of the same process do not share."""

    def __init__(self, run: Run, name: str) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        joined = os.environ.get("MLFLOW_RUN_ID")
        self._is_own = not joined
        found = (
            self._client.get_run(joined) if joined else self._client.create_run(self._experiment(), run_name=name)
        )
        self._id = found.info.run_id
        self._client.set_tag(self._id, f"{PREFIX}.run", run.run_id)
        uri = redact_text(self._mlflow.get_tracking_uri())
        page = f"{uri}/#/experiments/{found.info.experiment_id}/runs/{self._id}"
        self.address = page if uri.startswith(("http://", "https://")) else f"run {self._id}"

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        make = self._mlflow.entities.Metric
        metrics = [make(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def note(self, finding: Finding) -> None:
        text = f"{finding.severity}: {finding.summary}"
        self._client.set_tag(self._id, f"{PREFIX}.{finding.kind}", text[:_TAG_CHARACTERS])

    def attach_report(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        if self._is_own:
            self._client.set_terminated(self._id)


class _Tensorboard(Tracker):
    """TensorBoard's event files, without torch: in `tensorboard` of the run's folder, or in $TENSORBOARD_DIR."""

    def __init__(self, run: Run, _name: str) -> None:
        writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        proto = "tensorboard.compat.proto"
        self._event: Any = importlib.import_module(f"{proto}.event_pb2").Event
        self._summary: Any = importlib.import_module(f"{proto}.summary_pb2")
        self._tensor: Any = importlib.import_module(f"{proto}.tensor_pb2").TensorProto
        self.address = os.environ.get("TENSORBOARD_DIR") or str(run.path / "tensorboard")
        self._writer = writers.EventFileWriter(self.address, filename_suffix=f".{PREFIX}")
        self._step = 0
        self._add_text("run", run.run_id)

    def _add_text(self, name: str, words: str) -> None:
        data = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        text = self._tensor(dtype="DT_STRING", string_val=[words.encode()])
        value = self._summary.Summary.Value(
            tag=f"{PREFIX}/{name}", metadata=self._summary.SummaryMetadata(plugin_data=data), tensor=text
        )
        self._add(self._step, value)

    def _add(self, step: int, *values: Any) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        make, self._step = self._summary.Summary.Value, step
        self._add(step, *(make(tag=name, simple_value=value) for name, value in values.items()))
        self._writer.flush()

    def note(self, finding: Finding) -> None:
        self._add_text(finding.kind, finding.summary)

    def close(self) -> None:
        self._writer.close()


class _Trackio(Tracker):
    """trackio, on this machine or in the Space that its own variables name."""

    def __init__(self, run: Run, name: str) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        self.address = f"{project}/{name}"
        self._name = f"{PREFIX}-{run.run_id}"
        self._run = trackio.init(
            project=project,
            name=name,
            config={"tidegauge_run": run.run_id},
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def note(self, finding: Finding) -> None:
        _alert(self._run, self._trackio.AlertLevel, finding)

    def attach_report(self, path: Path) -> None:
        if hasattr(self._run, "log_artifact"):  # older versions keep no files
            self._run.log_artifact(path, name=self._name, type="report")

    def close(self) -> None:
        self._run.finish()


class _Otlp(Tracker):
    """OpenTelemetry over HTTP: gauges and log records; the library reads the endpoint from its own variables."""

    def __init__(self, run: Run, name: str) -> None:
        sdk, exporters = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
        metrics: Any = importlib.import_module(f"{sdk}.metrics")
        export: Any = importlib.import_module(f"{sdk}.metrics.export")
        logs: Any = importlib.import_module(f"{sdk}._logs")
        processors: Any = importlib.import_module(f"{sdk}._logs.export")
        resource = importlib.import_module(f"{sdk}.resources").Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", PREFIX),
                "tidegauge.run": run.run_id,
                "run.name": name,
            }
        )
        to_metrics: Any = importlib.import_module(f"{exporters}.metric_exporter").OTLPMetricExporter()
        to_logs: Any = importlib.import_module(f"{exporters}._log_exporter").OTLPLogExporter()
        every_ms = None if "OTEL_METRIC_EXPORT_INTERVAL" in os.environ else EVERY_SECONDS * 1000
        reader = export.PeriodicExportingMetricReader(to_metrics, every_ms)
        self._metrics = metrics.MeterProvider(resource=resource, metric_readers=[reader])
        self._logs = logs.LoggerProvider(resource=resource)
        self._logs.add_log_record_processor(processors.BatchLogRecordProcessor(to_logs))
        self._api: Any = importlib.import_module("opentelemetry._logs")
        self._meter, self._logger = self._metrics.get_meter(PREFIX), self._logs.get_logger(PREFIX)
        self._gauges: dict[str, Any] = {}
        self.address = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, f"{PREFIX}/step": float(step)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name.replace("/", "."))
            self._gauges[name].set(value)

    def note(self, finding: Finding) -> None:
        level = "ERROR" if finding.severity == "critical" else "WARN"
        record = self._api.LogRecord(
            timestamp=time.time_ns(),
            severity_text=level,
            severity_number=self._api.SeverityNumber[level],
            body=finding.summary,
            attributes={f"{PREFIX}.kind": finding.kind, f"{PREFIX}.severity": finding.severity},
        )
        self._logger.emit(record)

    def close(self) -> None:
        self._metrics.shutdown()
        self._logs.shutdown()


#: Value of `--log-to` -> the package that it needs, and what opens the tracker for a run and its name.
LIBRARIES: dict[str, tuple[str, Callable[[Run, str], Tracker]]] = {
    "wandb": ("wandb", _Wandb),
    "mlflow": ("mlflow", _Mlflow),
    "tensorboard": ("tensorboard", _Tensorboard),
    "trackio": ("trackio", _Trackio),
    "otlp": ("opentelemetry-exporter-otlp-proto-http", _Otlp),
}
