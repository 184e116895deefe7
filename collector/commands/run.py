"""Commands that follow a training: run, job, watch, collect."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from collector import store
from collector.commands.dashboard import DashboardServer, show_way
from collector.commands.options import (
    NO_LIVE_OPTIONS,
    PASS_ON,
    LiveOptions,
    before_oom_options,
    home_option,
    interval_option,
    investigate_option,
    made_by,
    outlet_options,
    port_option,
    require_value,
    run_options,
    say,
)
from collector.commands.report import judge, render_html, show_card
from collector.errors import DEBUG_VARIABLE, TidegaugeError, one_line
from collector.units import counted
from training_harness.layout import (
    CARD,
    DISABLED_VARIABLE,
    FOR_TRAINING,
    MEMORY_HISTORY_VARIABLE,
    RUN_ID,
    RUN_ID_VARIABLE,
    STAGES_VARIABLE,
    STORE_VARIABLE,
    WORKERS_AUTO,
    WORKERS_VARIABLE,
    home_path,
    replace_file,
)

if TYPE_CHECKING:
    from collector.agent.launch import RunOutcome
    from collector.agent.live.before_oom import BeforeOom
    from collector.agent.live.hangs import HangReports
    from collector.agent.live.outlets import Outlets
    from collector.diagnosis import Verdict

#: The jobs of `training_harness.jobs`, which this package may not import.
JOBS = ("images", "diabetes", "accumulate", "dataparallel", "ddp", "fault")
#: Name of several jobs in turn.
TOUR = "tour"
#: Exit statuses of a command that was ended by Ctrl-C or SIGTERM.
ENDED_BY_USER = (130, 143)
#: Exit status of a job after bad input, of which it has said what to give instead.
BAD_INPUT = 2
#: Number of restarts after kills for lack of memory so far, for the command.
ATTEMPT_VARIABLE = "TIDEGAUGE_ATTEMPT"


def _check_run_id(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    value = require_value(context, option, value)
    if value and not RUN_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no run id: give up to 60 letters, digits, '_', '-' and '.'")
    return value or None


@click.command(context_settings=PASS_ON)
@run_options
@click.option(
    "--memory-history",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Record the last N CUDA allocations with their stacks, for snapshots.",
)
@click.option(
    "--no-stages", is_flag=True, help="Do not record the time of pipeline stages (reading, decoding, augmenting …)."
)
@click.option(
    "--run-id",
    envvar=RUN_ID_VARIABLE,
    callback=_check_run_id,
    metavar="ID",
    help="Id of the run; with a shared store, the same on every node of one training [default: a new id].",
)
@investigate_option
@click.option(
    "--on-hang",
    callback=made_by("hangs", "HangReports"),
    metavar="cancel|CMD",
    help="When the training hangs: end it, or run a shell command once, with the finding's JSON on stdin.",
)
@before_oom_options
@click.option(
    "--workers",
    type=click.Choice([WORKERS_AUTO]),
    help="Give each DataLoader the num_workers and prefetch_factor that its first pass suggests.",
)
@click.option(
    "--restart-on-oom",
    "restarts",
    type=click.IntRange(0, 100),
    default=0,
    metavar="N",
    help="Run the command again after a kill for lack of host memory, N times at most.",
)
@outlet_options
@home_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    name: str | None,
    tags: Mapping[str, str],
    interval: float,
    memory_history: int | None,
    no_stages: bool,
    run_id: str | None,
    investigate: bool,
    on_hang: HangReports | None,
    before_oom: BeforeOom | None,
    workers: str | None,
    restarts: int,
    live: LiveOptions,
    home: Path,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and watch it. Example: tidegauge run -- python train.py --lr 0.1."""
    if restarts and run_id is not None:
        raise TidegaugeError("--restart-on-oom makes a run of each attempt; leave --run-id out")
    if memory_history is not None:
        os.environ[MEMORY_HISTORY_VARIABLE] = str(memory_history)
    if no_stages:
        os.environ[STAGES_VARIABLE] = "0"
    if workers is not None:
        os.environ[WORKERS_VARIABLE] = workers
    if run_id is not None:
        os.environ[RUN_ID_VARIABLE] = run_id
    attempts = os.environ.get(ATTEMPT_VARIABLE, "")
    attempt = int(attempts) if attempts.isdecimal() else 0
    if restarts:
        os.environ[ATTEMPT_VARIABLE] = str(attempt)
        tags = {"attempt": str(attempt), **tags}
    open_outlets = partial(
        _open_outlets,
        live,
        investigate=investigate,
        hangs=on_hang,
        before_oom=before_oom,
        sets_workers=workers is not None,
    )
    outcome, verdict = _run(command, open_outlets, home=home, name=name, tags=tags, interval_seconds=interval)
    lacked_memory = verdict is not None and any(finding.kind == "host-oom-kill" for finding in verdict.findings)
    if attempt < restarts and outcome.exit_status and lacked_memory:
        say(f"killed for lack of memory; restart {attempt + 1} of {restarts}")
        os.environ[ATTEMPT_VARIABLE] = str(attempt + 1)
        # A new process, since everything in this one belongs to the run that ended.
        os.execv(sys.executable, sys.orig_argv)
    sys.exit(outcome.exit_status)


@click.command(context_settings=PASS_ON)
@click.option("--dashboard", "serves", is_flag=True, help="Serve the dashboard meanwhile, and after the job.")
@port_option
@investigate_option
@outlet_options
@home_option
@click.argument("name", metavar="NAME", type=click.Choice([*JOBS, TOUR]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def job(
    serves: bool,
    port: int,
    investigate: bool,
    live: LiveOptions,
    home: Path,
    name: str,
    arguments: tuple[str, ...],
) -> None:
    """Run the built-in job NAME and watch it. Its options: tidegauge job NAME --help.

    Jobs: images, diabetes, accumulate, dataparallel, ddp, fault KIND, and tour: five short jobs in turn, one
    healthy and four with a fault.
    """
    if importlib.util.find_spec("torch") is None:
        raise TidegaugeError(
            "the jobs train with torch; install it with: pip install 'tidegauge[jobs]'. `tidegauge demo` shows "
            "recorded runs without it"
        )
    if name == TOUR:
        from collector.commands.demo.tour import tour

        if investigate or live != NO_LIVE_OPTIONS:
            raise TidegaugeError("the tour takes only --port, --home and --no-dashboard")
        words = ["--port", str(port), "--home", str(home), *arguments]
        tour.main(words, prog_name="tidegauge job tour", standalone_mode=False)
        return
    home, arguments = _take_home(arguments, home)
    command = job_command((name, *arguments))
    if not {"--help", "-h", "--list"}.isdisjoint(arguments):
        os.execv(sys.executable, command)
    kind = [word.lstrip("-") for word in arguments if word == "--fixed" or word == arguments[0]]
    title = "-".join([name, *kind]) if name == "fault" else name
    with DashboardServer(home, port) if serves else nullcontext() as server:
        if server is not None:
            server.await_ready()
        open_outlets = partial(_open_outlets, live, investigate=investigate)
        outcome, verdict = _run(command, open_outlets, home=home, name=title, discards=BAD_INPUT)
        if outcome.run is not None and verdict is not None:
            show_way([(outcome.run, verdict)], home, port, is_served=server is not None)
        if server is not None and outcome.exit_status not in ENDED_BY_USER:
            server.wait()
    sys.exit(outcome.exit_status)


def job_command(job: Sequence[str]) -> list[str]:
    """Return the command of a job with its options."""
    return [sys.executable, "-P", "-m", "training_harness.jobs", *job]


def _take_home(arguments: Sequence[str], home: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the home that a job's arguments name, else `home`; and the arguments without it."""
    rest, words = [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--home":
            rest.append(word)
            continue
        path = value if equals else next(words, "")
        if not path:
            raise click.UsageError("Option '--home' requires an argument", click.get_current_context())
        home = Path(path)
    return home, tuple(rest)


@click.command()
@run_options
@outlet_options
@home_option
@click.argument("pid", type=click.IntRange(1))
def watch(
    name: str | None,
    tags: Mapping[str, str],
    interval: float,
    live: LiveOptions,
    home: Path,
    pid: int,
) -> None:
    """Watch a running process from outside. It reads memory, host and devices."""
    from collector.agent.watch import watch as watch_process

    def announce(run: store.Run) -> None:
        say(f"watching process {pid} as {run.run_id}; Ctrl-C ends the watch, not the process")

    outlets = _open_outlets(live)
    run = watch_process(
        pid, home=home, name=name, tags=tags, interval_seconds=interval, on_ready=announce, outlets=outlets
    )
    show_card(run, _judge_and_publish(run, outlets), home=home, to_stderr=True)
    process = run.manifest["command"]
    if store.living_processes(run, [(process["host"], process["pid"], process["start_ticks"])]):
        say(f"the watch is over; process {pid} goes on")
    _close(outlets)


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option("--follow", type=click.IntRange(1), metavar="PID", help="Follow this training process until it ends.")
@click.option("--card", is_flag=True, help="Write the card that a notebook shows.")
@interval_option
@investigate_option
@outlet_options
@home_option
def collect(
    spec: str,
    follow: int | None,
    card: bool,
    interval: float,
    investigate: bool,
    live: LiveOptions,
    home: Path,
) -> None:
    """Resume a run whose collector has ended. Store its records and follow its processes."""
    from collector.agent import loop
    from collector.agent.samplers.procfs import LocalProcess
    from training_harness.journal import start_ticks

    run = store.find_run(home, spec)
    if follow is not None and run.manifest["command"] is None:
        try:
            command = loop.manifest_process(LocalProcess(follow, start_ticks(follow)))
        except OSError:
            raise TidegaugeError(
                f"no process {follow} runs here; leave --follow out to store the waiting records"
            ) from None
        loop.update_manifest(run, command=command)
    outlets = _open_outlets(live, investigate=investigate, card=card)
    if not loop.collect(run, interval_seconds=interval, outlets=outlets):
        raise TidegaugeError(
            f"not all records of {run.run_id} could be stored; the rest waits in {run.journal_dir}: "
            "`tidegauge doctor` says why; then collect again"
        )
    verdict = _judge_and_publish(run, outlets)
    if card:
        from collector.report.html import verdict_card

        replace_file(run.path / CARD, verdict_card(verdict, run_id=run.run_id, name=run.name), FOR_TRAINING)
    click.echo(
        f"{run.run_id}: all records are stored; {verdict.status}, {counted(verdict.steps, 'step')}", err=True
    )
    _close(outlets)


def _run(
    command: Sequence[str],
    open_outlets: Callable[[], Outlets | None],
    *,
    home: Path,
    name: str | None,
    tags: Mapping[str, str] | None = None,
    interval_seconds: float = 1.0,
    discards: int | None = None,
) -> tuple[RunOutcome, Verdict | None]:
    """Run and follow a command, and show the card; return its outcome and the verdict, None if there is none.

    A command that ends with the exit status `discards` leaves neither run nor card.
    """
    from collector.agent.launch import EXIT_SIGNAL_BASE, run_command

    disabled = os.environ.get(DISABLED_VARIABLE) == "1"
    if os.environ.get(STORE_VARIABLE) and not disabled:
        store.store_address()  # A wrong setting is reported before the command starts.
    outlets = None if disabled else open_outlets()
    outcome = run_command(
        command, home=home, name=name, tags=tags, interval_seconds=interval_seconds, outlets=outlets
    )
    verdict = None
    if outcome.run is not None and outcome.exit_status == discards:
        shutil.rmtree(outcome.run.path, ignore_errors=True)
    elif outcome.run is not None and outcome.is_stored:
        before = signal.getsignal(signal.SIGTERM)
        if outcome.exit_status == EXIT_SIGNAL_BASE + signal.SIGTERM:
            # A scheduler may repeat the SIGTERM that ended the command. One is ignored; another ends this process.
            signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))
        try:
            verdict = _judge_and_publish(outcome.run, outlets)
            show_card(outcome.run, verdict, home=home, to_stderr=True)
        except KeyboardInterrupt:
            from collector.report.card import command_for

            command = command_for(home, home_path(), "report", outcome.run.run_id)
            say(f"interrupted before the verdict: `{command}` shows it")
        except Exception as error:  # noqa: BLE001 - the command's exit status stands
            if os.environ.get(DEBUG_VARIABLE) == "1":
                import traceback

                traceback.print_exc()
            reason = one_line(f"{type(error).__name__}: {error}")
            say(f"no verdict on {outcome.run.run_id} ({reason})")
        signal.signal(signal.SIGTERM, before)
    _close(outlets)
    return outcome, verdict


def _open_outlets(
    live: LiveOptions,
    *,
    investigate: bool = False,
    hangs: HangReports | None = None,
    before_oom: BeforeOom | None = None,
    sets_workers: bool = False,
    card: bool = False,
) -> Outlets | None:
    """Open the live output of a run; None if no option asks for any.

    Raises:
        TidegaugeError: the metrics cannot be served at the given address.
    """
    is_regular = live != NO_LIVE_OPTIONS or investigate or before_oom is not None or card
    if not is_regular and hangs is None and not sets_workers:
        return None
    from collector.agent.live import prometheus
    from collector.agent.live.outlets import Outlets
    from collector.agent.loader_settings import LoaderSettings

    outlets = Outlets(
        live.senders,
        investigate=investigate,
        hangs=hangs,
        before_oom=before_oom,
        trackers=live.trackers,
        settings=LoaderSettings(is_auto=sets_workers),
        card=card,
        is_regular=is_regular,
    )
    if live.prometheus is not None:
        say(f"metrics at {prometheus.serve(live.prometheus, outlets.view)}")
    return outlets


def _judge_and_publish(run: store.Run, outlets: Outlets | None) -> Verdict:
    verdict = judge(run)
    if outlets is not None:
        outlets.publish(verdict.findings)
        if outlets.trackers.is_wanted:
            with suppress(TidegaugeError, OSError):  # no dashboard is installed, or the disk is full
                report = run.path / "report.html"
                report.write_text(render_html(run, verdict), encoding="utf-8")
                outlets.trackers.attach_report(report)
    return verdict


def _close(outlets: Outlets | None) -> None:
    if outlets is not None:
        outlets.close()
