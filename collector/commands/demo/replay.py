"""`tidegauge demo`: recorded runs of the tour, shown without a training."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path

import click

from collector import store
from collector.commands.dashboard import DashboardServer, show_way
from collector.commands.demo.tour import STOPS, show_runs
from collector.commands.options import port_option, say
from collector.errors import TidegaugeError
from training_harness.layout import STORE_VARIABLE

#: Recorded runs, one zip file each; `python -m tests.golden.record_demo` records them.
RECORDED = Path(__file__).with_name("recorded")


@click.command()
@click.option("--no-dashboard", is_flag=True, help="Only print the verdicts: do not serve the dashboard.")
@port_option
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to put the recorded runs into [default: a temporary one, deleted with the end of the dashboard].",
)
def demo(no_dashboard: bool, port: int, home: Path | None) -> None:
    """Show five recorded runs in the dashboard. It needs no training and no torch."""
    os.environ.pop(STORE_VARIABLE, None)  # The recorded runs belong to this machine alone.
    with ExitStack() as stack:
        folder = home or Path(tempfile.mkdtemp(prefix="tidegauge-demo-"))
        if home is None and not no_dashboard:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        runs = unpack(folder)
        server = None if no_dashboard else stack.enter_context(DashboardServer(folder, port))
        say(f"{len(runs)} runs in {folder}, recorded on {_day(runs[0])}")
        verdicts = show_runs(runs, port)
        if server is not None:
            server.await_ready()
        show_way(verdicts, folder, port, is_served=server is not None)
        if server is not None:
            server.wait()


def _day(run: store.Run) -> str:
    """Return the day on which a run was recorded, in UTC."""
    (anchor,) = run.anchors.values()
    return time.strftime("%Y-%m-%d", time.gmtime(anchor["wall_ns"] / 1e9))


def unpack(home: Path) -> list[store.Run]:
    """Unpack the recorded runs into a home, in the order of the tour; runs that are there already stay.

    Raises:
        TidegaugeError: they cannot be written there.
    """
    runs = []
    try:
        (home / "runs").mkdir(mode=0o700, parents=True, exist_ok=True)
        for stop in STOPS:
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                zipfile.ZipFile(RECORDED / f"{stop.name}.zip").extractall(scratch)
                (unpacked,) = Path(scratch).iterdir()
                run = store.Run(home / "runs" / unpacked.name)
                if not run.path.exists():
                    unpacked.rename(run.path)
            runs.append(run)
    except OSError as error:
        raise TidegaugeError(
            f"cannot write in {home} ({error.strerror}); give --home a folder that can be written"
        ) from None
    return runs
