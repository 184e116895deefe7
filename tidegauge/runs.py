"""Runs: found by name, with their tables, verdicts and charts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from tidegauge.findings import Check, Finding, from_json
from tidegauge.process import TidegaugeError, ask, ask_json

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow
    from plotly.graph_objects import Figure

#: Library of a table: a pandas or Polars DataFrame, or an Arrow table.
Library = Literal["pandas", "polars", "arrow"]
Theme = Literal["light", "dark"]
Status = Literal["running", "finished", "failed", "killed"]
#: Values of a query: by place for `?`, by name for `$name`.
Params = Sequence[object] | Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of a dashboard page: the question that it answers, what it shows, and the Plotly figure."""

    page: str
    title: str
    caption: str
    figure: Figure = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on a run at one moment. A notebook shows it as a card, and `print` as text.

    Attributes:
        status: state of the run.
        exit_status: the command's exit code, -n for signal n; None if it runs or its end was not seen.
        attempts: how many times the launcher started the ranks.
        steps: steps of the last attempt.
        step_unit: what ends a step; None without steps.
        batches: batches yielded in all training processes.
        workers_reporting: (k, n): k of n DataLoader workers report.
        findings: the gravest first.
        checks: everything that was looked at.
        ending: how a run that died ended, with the fields of docs/report.md; None for any other run.
        summary: figures of the whole run, with the fields of docs/report.md.
    """

    run_id: str
    name: str
    status: Status
    exit_status: int | None
    attempts: int
    steps: int
    step_unit: str | None
    batches: int
    duration_seconds: float | None
    workers_reporting: tuple[int, int]
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    ending: Mapping[str, Any] | None
    summary: Mapping[str, Any]
    _text: str = field(repr=False)
    _html: str = field(repr=False)

    def __str__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Write the report where IPython shows no HTML, as in a terminal."""
        printer.text(self._text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it was when it was opened; its methods read it again. A notebook shows its report.

    Attributes:
        status: as in `tidegauge runs`.
        started: None if it is not known.
        command: the command line, without secrets.
        gravest: the gravest finding of its last report in words; None without a report.
        steps: of its last report, as are the figures that follow. A figure that is not known is None.
        throughput: samples, batches or steps per second: `throughput_unit`.
        data_wait_ratio: share of the time in which training waited for data.
        host_peak_bytes: highest memory (PSS) of the training's processes together.
        device_peak_bytes: most memory that PyTorch's allocator reserved on a device.
    """

    run_id: str
    name: str
    path: Path
    status: str
    tags: Mapping[str, str]
    note: str
    pinned: bool
    started: datetime | None
    command: str
    git_commit: str | None
    gravest: str | None
    steps: float | None
    duration_seconds: float | None
    throughput: float | None
    throughput_unit: str | None
    data_wait_ratio: float | None
    host_peak_bytes: float | None
    device_peak_bytes: float | None

    def report(self) -> Report:
        """Judge the run, as `tidegauge report` does.

        Raises:
            TidegaugeError: it cannot be read.
        """
        body = ask_json("report", run=str(self.path))
        run = body["run"]
        return Report(
            **{**run, "workers_reporting": tuple(run["workers_reporting"])},
            findings=tuple(map(from_json, body["findings"])),
            checks=tuple(Check(**check) for check in body["checks"]),
            ending=body["ending"],
            summary=body["summary"],
            _text=body["text"],
            _html=body["html"],
        )

    @overload
    def stream(self, name: str, *, library: Literal["pandas"] = "pandas") -> pandas.DataFrame: ...
    @overload
    def stream(self, name: str, *, library: Literal["polars"]) -> polars.DataFrame: ...
    @overload
    def stream(self, name: str, *, library: Literal["arrow"]) -> pyarrow.Table: ...
    def stream(self, name: str, *, library: Library = "pandas") -> Any:
        """Return all rows of a stream (docs/streams.md), or of `event`, in order of time, up to the last record.

        Raises:
            TidegaugeError: there is no such stream, the run cannot be read, or the library is not installed.
        """
        return _rows(library, run=str(self.path), stream=name, sql=None, params=None)

    @overload
    def query(
        self, sql: str, params: Params | None = None, *, library: Literal["pandas"] = "pandas"
    ) -> pandas.DataFrame: ...
    @overload
    def query(self, sql: str, params: Params | None = None, *, library: Literal["polars"]) -> polars.DataFrame: ...
    @overload
    def query(self, sql: str, params: Params | None = None, *, library: Literal["arrow"]) -> pyarrow.Table: ...
    def query(self, sql: str, params: Params | None = None, *, library: Library = "pandas") -> Any:
        """Run DuckDB's SQL over the run, which has a view for each stream, and `event`.

        Args:
            sql: one SELECT; the stream `fetch` must be quoted, since the word is reserved.
            params: values for `?` or `$name`; numbers and texts.
            library: library of the table.

        Raises:
            TidegaugeError: the SQL is wrong, the run cannot be read, or the library is not installed.
        """
        return _rows(library, run=str(self.path), stream=None, sql=sql, params=params)

    def charts(self, page: str | None = None, *, theme: Theme = "light") -> tuple[Chart, ...]:
        """Return the charts of a dashboard page, such as `worker-stalls`, or of all pages (docs/views.md).

        Raises:
            TidegaugeError: there is no such page, the run cannot be read, or the dashboard is not installed.
        """
        charts = ask_json("charts", run=str(self.path), page=page, theme=theme)
        return tuple(Chart(**{**chart, "figure": _as_figure(chart["figure"])}) for chart in charts)

    def _repr_html_(self) -> str:
        try:
            return self.report()._repr_html_()
        except TidegaugeError as error:
            return f"<p>tidegauge: {escape(str(error))}</p>"


def open_run(run: str | os.PathLike[str] = "latest", *, home: str | os.PathLike[str] | None = None) -> Run:
    """Return a run as the command line finds it, in the shared store too where one is configured.

    Args:
        run: a run id, a name, a unique part of an id, the path of a run directory, or `latest`.
        home: folder that holds the runs; by default `$TIDEGAUGE_HOME`, else the user's data directory.

    Raises:
        TidegaugeError: there is no such run, or there are several.
    """
    return _run(ask_json("find", home, run=os.fspath(run)))


def list_runs(*, home: str | os.PathLike[str] | None = None, trials: bool = False) -> list[Run]:
    """Return the runs, newest first; those of `tidegauge tune` only with `trials`.

    Raises:
        TidegaugeError: the home or the shared store cannot be read.
    """
    return list(map(_run, ask_json("list", home, trials=trials)))


def _run(body: Mapping[str, Any]) -> Run:
    seconds = body["started_seconds"]
    started = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    known = {**body, "path": Path(body["path"]), "started": started}
    fields: dict[str, Any] = {name: known.get(name) for name in Run.__slots__}
    return Run(**fields)


def _rows(library: Library, **question: Any) -> Any:
    if library not in (libraries := get_args(Library)):
        raise TidegaugeError(f"no library {library!r}; there are {', '.join(libraries)}")
    import pyarrow

    answer = ask("query", **question)
    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(answer)).read_all()
    if library == "arrow":
        return table
    if library == "pandas":
        return table.to_pandas()
    try:
        import polars
    except ImportError:
        raise TidegaugeError("Polars is not installed: pip install polars") from None
    return polars.from_arrow(table)


def _as_figure(body: Mapping[str, Any]) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure(body)
    figure.layout.template = None  # colours and fonts are set, and Plotly's default template would add its own
    return figure
