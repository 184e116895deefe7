"""Measure the dashboard as a run grows: in a real Chromium, for ten viewers at once, and over 1,000 refreshes.

    python -m benchmarks.pages [--batches 100000 1000000 10000000] [--viewers 10] [--refreshes 1000] [--home DIR]
    python -m benchmarks.pages --runs 500     # the page Runs alone, with as many runs

The runs are those of benchmarks.queries with 8 ranks of 8 workers each, and they go on: a process adds the
records of such a training and stores them in the lake. Each page is opened in a fresh window of a browser in
which the dashboard was open before, with the whole run chosen. The columns are medians:

- answer: time until the state of the run is shown, with the sentence that answers the page's question below it.
- paint: time until the first figure is shown, or the command to type if there is none.
- switch: time from the click on a page's name until everything in sight is shown, in a window of 1440 by 900.
- whole: the same, until everything below is shown too.
- refresh: time from the request to the end of the answer; slowest is the longest of those. A client measures this
  and the following columns; it speaks to the server as the browser does, and is alone but for the last table.
- CPU: CPU time of the server for it.
- sent: bytes over the WebSocket, uncompressed.

A refresh that only repeats what was read before does not count. Where a page is renewed by turns, each turn has
as many refreshes. The slope of the soak is that of Theil and Sen over the readings of the server's private dirty
memory, without the first quarter, with its 95 % interval.

The page Runs has a table of its own: time until the runs are shown and until all of the page is, in a fresh window;
then the server's answer to its opening, first with cold caches, and the median of later ones.

A run cannot be older than the machine's clock. So soon after the machine's start the batches lie closer together
than a training would make them. `unshare --time --monotonic=100000 --boottime=100000 --fork` before the command
gives the machine another day.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from scipy import stats
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from app.pages import PAGES, RUNS
from benchmarks import chrome
from benchmarks.queries import EPOCH, GPU_STREAMS, make, recorded_gpu
from collector.agent.ingest_feed import MAINTAIN_EVERY_NS, SHORTEST_PAUSE_NS, pause_ns
from collector.agent.samplers.procfs import read_rollup
from collector.report.results import Result, ResultFinding, save_result
from collector.store.catalogue import list_runs
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.journal import Identity, JournalWriter, start_ticks
from training_harness.records import MISSING, STREAMS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import screenshots  # noqa: E402 - it is in the folder of scripts

RANKS = WORKERS = 8
#: Seconds between two refreshes, as on a page; the server decides if the run is read again then.
REFRESH_SECONDS = 1.0
TIMES = 5
#: Each verdict, every minute or so, makes a few of them slow: of six, chance would decide whether one is met.
REFRESHES = 16
STEP_MS = 60
#: Steps between two samples of a device: the collector asks the driver as often.
DEVICE_EVERY_STEPS = 8
SOAK_VIEW = "overview"
#: JavaScript that is evaluated in a page.
_PAINTED = "document.querySelector('.main-svg, [data-testid=stDataFrame], .stAlert, .stCode')"
_HEADING = "document.querySelector('h2')?.textContent"
_CLICKED = f"""(title => {{
    const before = [{_HEADING}, performance.now() / 1e3];
    [...document.querySelectorAll('a')].find(link => link.textContent.includes(title)).click();
    return before;
}})"""
MIB = 2**20


def feed(run: Run) -> None:
    """Go on with a run as its training would, until the process is killed."""
    manifest = run.manifest
    me = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks("self")}
    layout.write_manifest(run.path, {**manifest, "command": me, "collector": me})
    writers = {
        (name, rank): JournalWriter(
            run.journal_dir, STREAMS[name], Identity("node", 100 + rank * (1 + WORKERS), 1, rank)
        )
        for name in ("step", "batch", "fetch", "device_memory", "device")
        for rank in range(RANKS)
    }
    recorded = {name: recorded_gpu(name).to_dict("records") for name in GPU_STREAMS}
    with Ingester(run) as ingester:
        ingester.maintain()  # a run that was kept may lack what the upkeep makes by now
        print("fed", flush=True)
        taken_ns = tidied_ns = time.monotonic_ns()
        rest_ns, step = SHORTEST_PAUSE_NS, _next_step(run)
        while True:
            for (name, rank), writer in writers.items():
                if name != "device" or step % DEVICE_EVERY_STEPS == 0:
                    rows = recorded.get(name, [{}])
                    writer.append(*_record(name, step, rank, rows[step % len(rows)]))
            step += 1
            now_ns = time.monotonic_ns()
            if now_ns - taken_ns > rest_ns:
                spent_ns = time.process_time_ns()
                records_count = ingester.step().records_count
                rest_ns = pause_ns(records_count, time.process_time_ns() - spent_ns, now_ns - taken_ns)
                taken_ns = now_ns
            if now_ns - tidied_ns > MAINTAIN_EVERY_NS:
                ingester.maintain()
                tidied_ns = now_ns
            time.sleep(STEP_MS / 1e3)


def _next_step(run: Run) -> int:
    with read(run) as snapshot:
        return int(snapshot.query("SELECT max(step_high) + 1 AS step FROM step_tiled")["step"].iloc[0])


def _record(name: str, step: int, rank: int, recorded: Mapping[Any, Any]) -> list[float]:
    """Make the record of a step; `recorded` has the values of a recorded training."""
    known = {
        "time_ns": time.monotonic_ns(),
        "step": step,
        "loader": 0,
        "epoch": step // EPOCH,
        "index": step % EPOCH,
        "worker": step % WORKERS,
        "duration_ns": STEP_MS * 10**6,
        "wait_ns": 10**6,
        "getitem_ns": STEP_MS * 10**6,
        "samples_count": 64,
        "device": rank,
        **recorded,
    }
    return [known.get(column.name, MISSING[column.code]) for column in STREAMS[name].columns]


@dataclass
class Answer:
    """One answer of the server: how long it took, its bytes, and how many records the page has seen."""

    seconds: float
    sent_bytes: int
    records: str
    error: str = ""


class Viewer:
    """A client that asks for a page and its refreshes as the browser does."""

    def __init__(self, base: str, path: str, run: Run | None = None) -> None:
        self._asked = {"query_string": f"run={run.run_id}" if run else "", "page_name": path}
        self._fragment = ""
        self._socket = connect(
            f"{base.replace('http', 'ws')}/_stcore/stream",
            origin=Origin(base),
            subprotocols=[Subprotocol("streamlit")],
            compression=None,
            max_size=None,
            open_timeout=30,
        )
        self.opened = self._ask()

    def refresh(self) -> Answer:
        return self._ask(fragment_id=self._fragment)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, **more: str) -> Answer:
        message = BackMsg()
        for name, value in {**self._asked, **more}.items():
            setattr(message.rerun_script, name, value)
        begun = time.perf_counter()
        self._socket.send(message.SerializeToString())
        answer = Answer(0.0, 0, "")
        while True:
            payload = self._socket.recv(timeout=120)
            assert isinstance(payload, bytes)
            answer.sent_bytes += len(payload)
            if found := re.search(rb"([\d,]+) records \xc2\xb7", payload):
                answer.records = found[1].decode()
            told = ForwardMsg.FromString(payload)
            kind = told.WhichOneof("type")
            if kind == "auto_rerun":
                self._fragment = told.auto_rerun.fragment_id
            elif kind == "delta" and b"cannot be shown" in payload:
                answer.error = payload.decode(errors="replace")
            elif kind == "script_finished" and told.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                answer.seconds = time.perf_counter() - begun
                return answer


def refreshed(viewer: Viewer, server: psutil.Process) -> list[tuple[Answer, float]]:
    """Return up to REFRESHES refreshes that read the run again, and the server's CPU seconds for each."""
    found: list[tuple[Answer, float]] = []
    seen = viewer.opened.records
    for _ in range(5 * REFRESHES):
        time.sleep(REFRESH_SECONDS)
        before = _cpu_seconds(server)
        answer = viewer.refresh()
        if answer.records != seen:
            found.append((answer, _cpu_seconds(server) - before))
            seen = answer.records
        if len(found) == REFRESHES:
            break
    return found


def _cpu_seconds(server: psutil.Process) -> float:
    spent = server.cpu_times()
    return spent.user + spent.system


def rows_of(run: Run, base: str, server: psutil.Process, browser: chrome.Chrome) -> Iterator[tuple[str, ...]]:
    """The lines of the table about one run, as a browser sees it."""
    address = screenshots.address(base, SOAK_VIEW, run=run.run_id)
    for _ in range(TIMES):  # it keeps what it has compiled once a script came again
        _standing(browser, address).close()
    window = _standing(browser, address)
    filled, stood = _switches(window)
    window.close()
    for page in PAGES:
        paints = [_paint(browser, screenshots.address(base, page.path, run=run.run_id)) for _ in range(TIMES)]
        viewer = Viewer(base, page.path, run)
        answers = refreshed(viewer, server)
        viewer.close()
        if error := next((answer.error for answer, _ in answers if answer.error), ""):
            print(page.title, error, file=sys.stderr)
        yield (
            page.title,
            *(f"{statistics.median(each):.2f}" for each in zip(*paints, strict=True)),
            f"{statistics.median(filled[page.path]):.2f}",
            f"{statistics.median(stood[page.path]):.2f}",
            *_medians(answers),
        )


def make_ended_runs(home: Path, count: int) -> None:
    """Write runs of three commands that have ended, one an hour, with their results."""
    now_ns = time.time_ns()
    for number in range(count):
        name = ("train", "finetune", "evaluate")[number % 3]
        run = Run(layout.create_run(home, name=name, argv=["python", f"{name}.py"]))
        manifest = run.manifest
        anchor = {**layout.wall_anchor(), "wall_ns": now_ns - (count - number) * 3600 * 10**9}
        ended = {"anchors": {manifest["host"]: anchor}, "end_time_ns": anchor["time_ns"] + 10**9, "exit_status": 0}
        layout.write_manifest(run.path, {**manifest, **ended, "git_commit": f"{number // 20:040x}"})
        is_slow = 2 * number > count
        slow = ResultFinding(kind="workers-too-slow", place="train_loader", severity="warning")
        result = Result(
            status="finished",
            steps=1000,
            duration_seconds=600.0,
            throughput=(260.0 if is_slow else 400.0) + number % 5,
            throughput_unit="samples/second",
            data_wait_ratio=(0.4 if is_slow else 0.1) + number % 5 / 100,
            host_peak_bytes=2.0**31,
            memory_bytes=tuple(2.0**31 * min(1.0, point / 20) for point in range(40)),
            findings=(slow,) if is_slow else (),
        )
        save_result(run, result)


def measure_runs_page(count: int, browser: chrome.Chrome) -> Table:
    """Measure the page Runs of a home with `count` runs."""
    table = Table("runs", "table s", "whole s", "cold ms", "answer ms", "sent KiB", title="the page Runs")
    stands = f"document.querySelectorAll('.main-svg').length >= 3 && {screenshots.RESTS}"
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as folder:
        home = Path(folder)
        make_ended_runs(home, count)
        with screenshots.dashboard(home) as base:
            first, *answers = [_open_once(base, RUNS.path) for _ in range(1 + TIMES)]
            times = []
            for _ in range(1 + TIMES):
                window = browser.window(f"{base}/{RUNS.path}")
                times.append((window.until(_PAINTED), window.until(stands)))
                window.close()
    shown, whole = (statistics.median(each) for each in zip(*times[1:], strict=True))
    table.add_row(
        f"{count:,}",
        f"{shown:.2f}",
        f"{whole:.2f}",
        f"{first.seconds * 1e3:,.0f}",
        f"{statistics.median(answer.seconds for answer in answers) * 1e3:,.0f}",
        f"{answers[0].sent_bytes / 1024:,.0f}",
    )
    return table


def _open_once(base: str, path: str) -> Answer:
    viewer = Viewer(base, path)
    viewer.close()
    return viewer.opened


def _standing(browser: chrome.Chrome, address: str) -> chrome.Window:
    window = browser.window(address)
    window.until(screenshots.STANDS)
    return window


def _medians(answers: list[tuple[Answer, float]]) -> tuple[str, str, str, str]:
    if not answers:
        return "-", "-", "-", "-"
    seconds = [answer.seconds for answer, _ in answers]
    return (
        f"{statistics.median(seconds) * 1e3:,.0f}",
        f"{max(seconds) * 1e3:,.0f}",
        f"{statistics.median(cpu for _, cpu in answers) * 1e3:,.0f}",
        f"{statistics.median(answer.sent_bytes for answer, _ in answers) / 1024:,.0f}",
    )


def _paint(browser: chrome.Chrome, address: str) -> tuple[float, float]:
    window = browser.window(address)
    answered, painted = window.until(screenshots.ANSWERED), window.until(_PAINTED)
    window.close()
    return answered, painted


def _switches(window: chrome.Window) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Each page from the one before it, by a click: until what is in sight stands, and until all of it does."""
    filled, stood = ({each.path: list[float]() for each in PAGES} for _ in range(2))
    for _ in range(TIMES):
        for to in (*PAGES[1:], PAGES[0]):
            was, clicked = window.evaluate(f"{_CLICKED}({json.dumps(to.title)})")
            is_new = f"{_HEADING} !== {json.dumps(was)}"
            filled[to.path].append(window.until(f"{is_new} && {screenshots.FILLS}") - clicked)
            stood[to.path].append(window.until(screenshots.STANDS) - clicked)
    return filled, stood


@dataclass
class Soak:
    """Seconds of each answer to a viewer, and (answers so far, private dirty bytes of the server)."""

    seconds: list[float] = field(default_factory=list)
    private_dirty: list[tuple[int, int]] = field(default_factory=list)


def soak(run: Run, base: str, server: psutil.Process, viewers: int, refreshes: int) -> Soak:
    """Let `viewers` viewers follow a live run at once, until `refreshes` refreshes have read it again."""
    found, lock, over = Soak(), threading.Lock(), threading.Event()

    def look() -> None:
        viewer = Viewer(base, SOAK_VIEW, run)
        seen = viewer.opened.records
        while not over.wait(REFRESH_SECONDS):
            answer = viewer.refresh()
            if answer.records == seen:
                continue
            seen = answer.records
            with lock:
                found.seconds.append(answer.seconds)
                count = len(found.seconds)
                if count % max(1, refreshes // 100) == 0:
                    rollup = read_rollup("/proc", server.pid)
                    assert rollup is not None
                    assert rollup.private_dirty_bytes is not None
                    found.private_dirty.append((count, rollup.private_dirty_bytes))
                if count >= refreshes:
                    over.set()
        viewer.close()

    threads = [threading.Thread(target=look) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def told(found: Soak, viewers: int) -> str:
    """The soak in words."""
    later = found.private_dirty[len(found.private_dirty) // 4 :]
    counts, held = zip(*later, strict=True)
    slope, _, low, high = stats.theilslopes([each / MIB for each in held], [count / 1000 for count in counts])
    twentieths = statistics.quantiles(found.seconds, n=20)
    return (
        f"{viewers} viewers of {SOAK_VIEW}: {len(found.seconds):,} refreshes, median "
        f"{statistics.median(found.seconds) * 1e3:,.0f} ms, 95th percentile {twentieths[-1] * 1e3:,.0f} ms.\n"
        f"Server, private dirty: {found.private_dirty[0][1] / MIB:,.0f} MiB first, {held[0] / MIB:,.0f} after a "
        f"quarter, {held[-1] / MIB:,.0f} last; {slope:+.2f} ({low:+.2f} to {high:+.2f}) MiB per 1,000 refreshes."
    )


@contextlib.contextmanager
def fed(run: Run) -> Iterator[None]:
    """A process that goes on with a run."""
    words = [sys.executable, "-m", "benchmarks.pages", "--feed", str(run.path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as feeder:
        assert feeder.stdout is not None
        feeder.stdout.readline()
        try:
            yield
        finally:
            feeder.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--refreshes", type=int, default=1000)
    parser.add_argument("--runs", type=int, help="measures the page Runs alone, with as many runs")
    parser.add_argument("--home", type=Path, help="keeps the runs, which grow with each use")
    parser.add_argument("--feed", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.feed:
        feed(Run(options.feed))
        return
    console = Console(width=int(os.environ.get("COLUMNS", "110")))
    with contextlib.ExitStack() as stack:
        home = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegauge-bench-")))
        folder = tempfile.TemporaryDirectory(prefix="tidegauge-browser-", ignore_cleanup_errors=True)
        profile = Path(stack.enter_context(folder))
        words = (*screenshots.ARGUMENTS, "--window-size=1440,900")
        browser = stack.enter_context(chrome.started(screenshots.executable() or "chromium", profile, words))
        if options.runs:
            console.print(measure_runs_page(options.runs, browser))
            return
        for batches in options.batches:
            made = [run for run in list_runs(home) if f"-pages-{batches}-" in run.run_id]
            ago_ns = time.monotonic_ns() * 9 // 10  # there is no time before the machine's
            run = (
                made[0] if made else make(home, batches, name="pages", ranks=RANKS, workers=WORKERS, ago_ns=ago_ns)
            )
            table = Table(
                "page",
                *("answer s", "paint s", "switch s", "whole s"),
                *("refresh ms", "slowest ms", "CPU ms", "sent KiB"),
                title=f"{batches:,} batches",
            )
            with fed(run), screenshots.dashboard(home) as base:
                server = _server(base)
                for row in rows_of(run, base, server, browser):
                    table.add_row(*row)
                console.print(table)
                if batches == options.batches[0] and options.refreshes:
                    console.print(
                        told(soak(run, base, server, options.viewers, options.refreshes), options.viewers)
                    )


def _server(base: str) -> psutil.Process:
    """The process of the dashboard, which is a child of this one."""
    port = base.rpartition(":")[2]
    return next(child for child in psutil.Process().children() if port in child.cmdline())


if __name__ == "__main__":
    main()
