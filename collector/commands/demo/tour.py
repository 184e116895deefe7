"""`tidegauge job tour`: short runs in turn, a healthy one and four with a fault, then the dashboard on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from collector import store
from collector.commands.dashboard import DashboardServer, address, show_way
from collector.commands.demo.memory_limit import NoLimitError, memory_limited
from collector.commands.options import home_option, port_option, say
from collector.commands.report import judge
from collector.commands.run import ENDED_BY_USER, job_command
from training_harness.layout import RUN_ID_VARIABLE, STORE_VARIABLE

if TYPE_CHECKING:
    from collector.diagnosis import Verdict

#: Seconds between two samples: the runs are short.
_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One run of the tour.

    Attributes:
        job: the words after `tidegauge job`.
        shows: description of the run in a few words.
        memory_mib: memory limit of the run, None for none.
    """

    name: str
    job: tuple[str, ...]
    shows: str
    memory_mib: int | None = None


STOPS = (
    Stop(
        name="healthy",
        job=("fault", "slow-worker", "--fixed", "--steps", "500"),
        shows="four workers that keep up with the training",
    ),
    Stop(
        name="slow-worker",
        job=("fault", "slow-worker", "--steps", "500"),
        shows="the same, but worker 1 takes six times as long",
    ),
    Stop(
        name="worker-leak",
        job=("fault", "worker-cache", "--limit-mb", "2048", "--steps", "1600"),
        shows="each worker keeps every picture that it decodes",
    ),
    Stop(
        name="copy-on-read",
        job=("fault", "copy-on-read", "--steps", "500"),
        shows="reading a list of Python objects copies it into each worker",
    ),
    Stop(
        name="memory-limit",
        job=("fault", "main-leak", "--limit-mb", "4096", "--steps", "3000"),
        shows="the training keeps something of each step, until the kernel kills it at 512 MiB",
        memory_mib=512,
    ),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--no-dashboard", is_flag=True, help="Only train: do not serve the dashboard.")
@port_option
@home_option
def tour(no_dashboard: bool, port: int, home: Path) -> None:
    """Train five short runs, one healthy and four with a fault, and serve the dashboard on them."""
    for variable in (STORE_VARIABLE, RUN_ID_VARIABLE):  # The runs belong to this machine alone.
        os.environ.pop(variable, None)
    with ExitStack() as stack:
        server = None if no_dashboard else stack.enter_context(DashboardServer(home, port))
        if server is not None:
            server.await_ready()
        runs = [run for number in range(len(STOPS)) if (run := _train(number, home))]
        say(f"{len(runs)} runs in {home}")
        verdicts = show_runs(runs, port)
        if verdicts:
            show_way(verdicts, home, port, is_served=server is not None)
        if server is not None:
            server.wait()


def show_runs(runs: Sequence[store.Run], port: int) -> list[tuple[store.Run, Verdict]]:
    """Print a short card of each run; return the runs with their verdicts."""
    from collector.report.signpost import short_card
    from collector.report.terminal import Terminal

    terminal = Terminal(stderr=True, highlight=False)
    verdicts = []
    for run in runs:
        verdict = judge(run)
        verdicts.append((run, verdict))
        card = short_card(verdict, run_id=run.run_id, name=run.manifest["name"], address=address(port))
        terminal.print(card, crop=False)
    return verdicts


def _train(number: int, home: Path) -> store.Run | None:
    """Train one run; return None if it was not recorded."""
    from collector.agent.launch import run_command

    stop = STOPS[number]
    say(f"{number + 1} of {len(STOPS)}, {stop.name}: {stop.shows}")
    own, mib = job_command(stop.job), stop.memory_mib
    try:
        with nullcontext(own) if mib is None else memory_limited(own, mib << 20) as command:
            outcome = run_command(command, home=home, name=stop.name, interval_seconds=_INTERVAL_SECONDS)
    except NoLimitError as error:
        say(f"{error}; this run is left out")
        return None
    if outcome.exit_status in ENDED_BY_USER:
        sys.exit(outcome.exit_status)
    return outcome.run
