"""Measure the cost of reading a run as it grows: every query of every page, and the verdict.

    python -m benchmarks.queries [--batches 100000 1000000 10000000] [--window run] [--home DIR] [--full]

The runs are created in the lake itself, with plausible values: steps of 60 ms, four workers, a sample of six
processes each second, and of a GPU for each rank twice as often, whose cache is flushed once an epoch. They are
compacted as the collector does it. A triple is a step, a batch and a fetch.

Each page is built by a process of its own, as the dashboard builds it. The figure is the median of three such
processes, of the second build in each. Peak is the memory (VmHWM) of that process; read is the bytes that it read
from files (rchar of /proc/self/io). The verdict is that of a process that has made none before. The row below it
is the cost to each second of a live page: its part of the verdicts that the server makes, and reading the newest
one. With `--full` there is a line for each query too. With `--home` the runs are kept and found again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pandas as pd
from rich.console import Console
from rich.table import Table

from collector.store.catalogue import list_runs
from collector.store.duck import quote
from collector.store.lake import lake
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import Snapshot, read
from collector.store.lake.store import store_of
from collector.store.queries import spans
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.records import STREAMS as DECLARED

STEP_NS = 60_000_000
WORKERS = 4
#: Batches of a rank.
EPOCH = 1_000
#: Nanoseconds between two rows of each stream of samples.
SAMPLED_NS = {"process": 10**9, "host": 10**9, "device": 10**9 // 2}
#: Rows of one insert: a file of some 5 MB, so that compaction has its work.
INSERT_ROWS = 500_000
#: Streams whose rows a GPU made: those of a recorded training follow each other again and again.
GPU_STREAMS = ("device", "device_memory")
TIMES = 3
STREAMS = ("step", "batch", "fetch", "device_memory", *SAMPLED_NS)
PAGES = ("overview", "oom_risk", "leak_timeline", "gpu_memory", "worker_stalls", "pipeline_stages")
REFRESH = "verdict, cost of a refresh"
LOGNORMAL_NS = "exp(16 + 0.3 * sqrt(-2 * ln(1 - random())) * cos(6.283185 * random()))"


def make(
    home: Path, batches: int, *, name: str = "queries", ranks: int = 1, workers: int = WORKERS, ago_ns: int = 0
) -> Run:
    """Make a run of `batches` batches, steps and fetches; with `ago_ns` begun at most that long ago, ending now."""
    run = Run(layout.create_run(home, name=f"{name}-{batches}", argv=[]))
    every_ns = STEP_NS // ranks if not ago_ns else min(STEP_NS // ranks, ago_ns // batches)
    if ago_ns:
        begin_earlier(run, batches * every_ns)
    origin_ns = spans.origin_ns(run.manifest) or 0
    many = {"ranks": ranks, "workers": workers}
    with store_of(run).open_writable() as connection:
        for name in GPU_STREAMS:
            connection.register(f"recorded_{name}", recorded_gpu(name).reset_index(names="row"))
        for name in STREAMS:
            rows_every_ns = SAMPLED_NS.get(name, every_ns)
            times, at_once = batches * every_ns // rows_every_ns, INSERT_ROWS // places_of(name, **many)
            for begin in range(0, times, at_once):
                insert(connection, name, begin, min(begin + at_once, times), rows_every_ns, origin_ns, **many)
        tell(connection, origin_ns, every_ns, epochs_count=batches // ranks // EPOCH + 1, **many)
        connection.execute(
            f"INSERT INTO {lake.LAKE}.journal_offset SELECT 'node.1.' || s || '.0.journal', 1, NULL, 0, 0 "
            f"FROM (VALUES {', '.join(f'({quote(name)})' for name in STREAMS)}) t(s) "
            "UNION ALL SELECT 'node.1.jsonl', 1, NULL, 0, 0"
        )
    with Ingester(run) as ingester:
        assert ingester.maintain() == ()
    return run


@functools.cache
def recorded_gpu(stream: str) -> pd.DataFrame:
    """Return what a training whose batches differ in length recorded of its GPU, without times and places."""
    from tests.recorded_runs import recorded

    places = {"time_ns", "step", "device"}
    columns = [column.name for column in DECLARED[stream].columns if column.name not in places]
    rows = recorded("uneven-batches").stream(stream)[columns]
    if stream == "device":  # the recording is older than this column
        rows = rows.assign(recorded_used_bytes=rows["process_used_bytes"])
    return rows.dropna().reset_index(drop=True)


def tell(connection: Any, origin_ns: int, every_ns: int, *, ranks: int, workers: int, epochs_count: int) -> None:
    """Write the events of each rank: its start, its loader, and each epoch."""
    loader = {"loader": 0, "num_workers": workers, "prefetch_factor": 2, "batch_size": 64}
    pids = f"range(101 + rank * {1 + workers}, {101 + workers} + rank * {1 + workers})"
    begins = f"{origin_ns} + (epoch * {EPOCH * ranks} + rank) * {every_ns}"
    for kind, body, count in (
        ("process-start", """'{"torch": "2", "capabilities": {}}'""", 1),
        ("loader", f"'{json.dumps(loader)}'", 1),
        ("epoch-start", f"json_object('loader', 0, 'epoch', epoch, 'worker_pids', {pids})", epochs_count),
    ):
        connection.execute(
            f"INSERT INTO {lake.LAKE}.event BY NAME SELECT {begins} AS time_ns, ? AS kind, {body} AS body, "
            f"'node' AS host, {main_pid('rank', workers)} AS pid, 1 AS start_ticks, "
            f"{'rank' if ranks > 1 else 'NULL'} AS rank "
            f"FROM range({ranks}) r(rank), range({count}) e(epoch)",
            [kind],
        )


def begin_earlier(run: Run, by_ns: int) -> None:
    """Move the beginning of a run, so that what goes on for so long ends now."""
    manifest = run.manifest
    for anchor in manifest["anchors"].values():
        anchor["time_ns"] -= by_ns
        anchor["wall_ns"] -= by_ns
    layout.write_manifest(run.path, manifest)


def main_pid(rank: str, workers: int) -> str:
    """SQL: the pid of the main process of a rank; those of its workers follow."""
    return f"100 + ({rank}) * {1 + workers}"


def places_of(stream: str, *, ranks: int, workers: int) -> int:
    """Return the rows of a stream per time: processes are those of the ranks, their workers, the collector."""
    return {"process": ranks * (1 + workers) + 1, "device": ranks}.get(stream, 1)


def insert(
    connection: Any,
    table: str,
    begin: int,
    end: int,
    every_ns: int,
    origin_ns: int,
    *,
    ranks: int,
    workers: int,
) -> None:
    """Records `begin` to `end` of a stream: what matters for the queries is right, the rest is noise.

    The processes of a rank have places in a row: its main process, then its workers. The collector is last.
    """
    of_process, several, is_sampled = table == "process", ranks > 1, table in SAMPLED_NS
    place_rank, worker = f"place // {1 + workers}", f"place % {1 + workers} - 1"
    place_role = f"CASE WHEN {place_rank} = {ranks} THEN 3 WHEN {worker} >= 0 THEN 1 ELSE 0 END"
    known = {
        # The samples of one tick have one time.
        "time_ns": f"{origin_ns} + i * {every_ns}" + ("" if is_sampled else " + (random() * 1e6)::BIGINT"),
        "step": f"i // {ranks}",
        "epoch": f"i // {ranks} // {EPOCH}",
        "index": f"i // {ranks} % {EPOCH}",
        "worker": f"CASE WHEN {place_role} = 1 THEN {worker} END" if of_process else f"i // {ranks} % {workers}",
        "loader": f"CASE WHEN {place_role} = 1 THEN 0 END" if of_process else "0",
        "samples_count": "64",
        "unit": "2",
        "host": "'node'",
        "pid": "1" if is_sampled else main_pid(f"i % {ranks}", workers),
        "start_ticks": "1",
        "rank": f"i % {ranks}" if several and not is_sampled else "NULL",
        "device": "place" if table == "device" else f"i % {ranks}",
        "role": place_role,
        "process_pid": "100 + place",
        "process_start_ticks": "1",
        "process_rank": f"nullif({place_rank}, {ranks})" if several else "NULL",
        "alive": "1",
        "memory_total_bytes": "68719476736",
        "cgroup_limit_bytes": "34359738368",
        "duration_ns": f"{ranks * every_ns} + {LOGNORMAL_NS}" if table == "step" else LOGNORMAL_NS,
    }
    recording = ""
    if table in GPU_STREAMS:
        gpu = recorded_gpu(table)
        known |= {str(name): f"r.{name}" for name in gpu}
        recording = f" JOIN recorded_{table} r ON r.row = {'i' if is_sampled else f'i // {ranks}'} % {len(gpu)}"
    values = []
    for name, kind in lake.TABLES[table]:
        if name in known:
            value = known[name]
        elif name.endswith("_ns"):
            value = LOGNORMAL_NS
        elif name.endswith("_bytes"):
            value = "1073741824 + 4096 * (random() * 10000)::BIGINT"
        else:
            value = "random() * 8"
        values.append(f'({value})::{kind} AS "{name}"')
    places_count = places_of(table, ranks=ranks, workers=workers)
    places = f" CROSS JOIN range({places_count}) u(place)" if is_sampled else ""
    rows = f"SELECT {', '.join(values)} FROM range({begin}, {end}) t(i){places}{recording} ORDER BY i"
    connection.execute(f"INSERT INTO {lake.LAKE}.{table} BY NAME {rows}")


class Measured:
    """A snapshot that notes what each query cost, by the function that asked."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.costs: list[dict[str, Any]] = []

    def query(self, sql: str, params: Any = None) -> pd.DataFrame:
        frame = sys._getframe(1)
        while frame.f_code.co_name in ("query", "lines", "<dictcomp>") and frame.f_back is not None:
            frame = frame.f_back
        with costs_of(self.costs, frame.f_code.co_name):
            return self._snapshot.query(sql, params)


@contextlib.contextmanager
def costs_of(costs: list[dict[str, Any]], name: str) -> Iterator[None]:
    """Note the time, the peak memory and the bytes read of a block."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    begun, cpu_before, read_before = time.perf_counter(), time.process_time(), proc_number("io", "rchar")
    yield
    costs.append(
        {
            "name": name,
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu_before,
            "peak_bytes": proc_number("status", "VmHWM") * 1024,
            "read_bytes": proc_number("io", "rchar") - read_before,
        }
    )


def proc_number(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def ask(run: Run, page: str, window: spans.Window) -> dict[str, Any]:
    """Build a page twice, the second time measured; the verdict is drawn up next to the pages, so is its own."""
    from collector.diagnosis.run.tables import load_tables
    from collector.diagnosis.verdict import diagnose

    costs: list[dict[str, Any]] = []
    if page == "verdict":
        with costs_of(costs, page):
            diagnose(load_tables(run))
        return {**costs[0], "points": 0, "queries": []}
    logging.disable(logging.WARNING)  # Streamlit's, about running without a browser
    if page == REFRESH:
        return refresh_cost(run)
    from app.figures.base import Chart
    from app.runtime import moment
    from app.theme import LIGHT

    view = importlib.import_module(f"app.views.{page}").VIEW
    points = 0
    for _ in range(2):
        costs.clear()
        with costs_of(costs, page), read(run) as snapshot:
            measured = Measured(snapshot)
            memo = spans.Memo(measured)
            reach = spans.extent(memo)
            assert reach is not None
            selection = moment.Selection(run=run, rank=None, window=window, live=False)
            now = moment.moment_of(
                view,
                selection,
                run,
                cast("spans.Memo", measured),
                reach,
                verdict=None,
                theme=LIGHT,
                address=lambda page: page.path,
            )
            blocks = [block for row in view.rows for each in row for block in moment.build(each, now)]
        charts = [block for block in blocks if isinstance(block, Chart)]
        points = max(
            (len(trace.x) for chart in charts for trace in chart.figure.data if trace.x is not None), default=0
        )
    costs[0]["peak_bytes"] = max(each["peak_bytes"] for each in (*costs, *measured.costs))
    return {**costs[0], "points": points, "queries": measured.costs}


def refresh_cost(run: Run) -> dict[str, Any]:
    """Measure the cost per second of a live page: reading the verdict, and its share of computing the next."""
    from app.runtime.verdicts import compute_verdict, current_verdict

    compute_verdict(run)  # as in a running server, which has loaded all modules
    costs: list[dict[str, Any]] = []
    with costs_of(costs, "new"):
        lifetime_seconds = compute_verdict(run).lifetime_seconds
    while current_verdict(run).is_pending:
        pass
    with costs_of(costs, "current"):
        current_verdict(run)
    new, current = costs
    per_second = {
        name: new[name] / lifetime_seconds + current[name] for name in ("seconds", "cpu_seconds", "read_bytes")
    }
    return {**new, **per_second, "points": 0, "queries": []}


def asked(run: Run, page: str, window: str) -> list[dict[str, Any]]:
    """Return the answers of TIMES processes."""
    words = [sys.executable, "-m", "benchmarks.queries", "--ask", str(run.path), page, window]
    return [
        json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        for _ in range(TIMES)
    ]


def rows_of(run: Run, batches: int, window: str, full: bool) -> Iterator[tuple[str, ...]]:
    """The lines of the table about one run."""
    for page in (*PAGES, "verdict", REFRESH):
        answers = asked(run, page, window)
        yield (f"{batches:,}", page, *figures(answers), f"{answers[0]['points']:,}" if page in PAGES else "")
        if full:
            for number in range(len(answers[0]["queries"])):
                each = [answer["queries"][number] for answer in answers]
                yield ("", f"  {each[0]['name']}", *figures(each), "")


def figures(answers: list[dict[str, Any]]) -> tuple[str, str, str, str]:
    seconds, cpu_seconds, peak, taken = (
        statistics.median(each[key] for each in answers)
        for key in ("seconds", "cpu_seconds", "peak_bytes", "read_bytes")
    )
    return f"{seconds:.3f}", f"{cpu_seconds:.3f}", f"{peak / 2**20:.0f}", f"{taken / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--window", choices=spans.WINDOWS, default="run")
    parser.add_argument("--home", type=Path, help="keeps the runs")
    parser.add_argument("--full", action="store_true", help="a line for each query")
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        path, page, window = options.ask
        print(json.dumps(ask(Run(Path(path)), page, window)))
        return
    table = Table(
        "batches", "page", "s", "CPU s", "peak MiB", "read MiB", "most points", title=f"Window: {options.window}"
    )
    with contextlib.ExitStack() as stack:
        home = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegauge-bench-")))
        for batches in options.batches:
            made = [run for run in list_runs(home) if run.run_id.split("-")[-2] == str(batches)]
            run = made[0] if made else make(home, batches)
            for row in rows_of(run, batches, options.window, options.full):
                table.add_row(*row)
            triple_bytes = sum(
                path.stat().st_size
                for name in ("step", "batch", "fetch")
                for path in run.data_dir.rglob(f"{name}/*")
            )
            table.add_row("", f"disk: {triple_bytes / batches:.1f} bytes per triple", end_section=True)
    Console(width=int(os.environ.get("COLUMNS", "110"))).print(table)


if __name__ == "__main__":
    main()
