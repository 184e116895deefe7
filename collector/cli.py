"""The command line. What a command needs is imported when it runs, so that each starts at once."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import collector
from collector.errors import TidegaugeError
from training_harness.layout import (
    HOME_VARIABLE,
    MEMORY_HISTORY_VARIABLE,
    SNAPSHOT_KINDS,
    STAGES_VARIABLE,
    home_path,
)

if TYPE_CHECKING:
    from collector.diagnosis.verdict import Verdict
    from collector.store.runs import Run

DEBUG_VARIABLE = "TIDEGAUGE_DEBUG"
FORMATS = ("text", "json")
#: The jobs of `training_harness.jobs`, which this package may not import.
JOBS = ("images", "diabetes", "accumulate", "dataparallel", "ddp", "fault")
EXIT_UNEXPECTED = 1
#: Columns of a table in a pipe, so that one run stays one line.
PIPE_WIDTH = 200
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _home_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        default=home_path,
        help=f"Where runs are kept [default: ${HOME_VARIABLE}, else the user's data directory].",
    )(command)


def _parse_tags(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    tags = {}
    for value in values:
        key, equals, content = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE")
        tags[key] = content
    return tags


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    tag_help, interval_help = "Kept with the run.", "Seconds between samples."
    for option in (
        click.option("--interval", type=float, default=1.0, show_default=True, metavar="S", help=interval_help),
        click.option("--tag", "tags", multiple=True, callback=_parse_tags, metavar="KEY=VALUE", help=tag_help),
        click.option("--name", help="Name of the run [default: the script's]."),
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def cli(context: click.Context) -> None:
    """Watch the memory and the data loading of PyTorch training."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(context_settings=_PASS_ON)
@_run_options
@click.option(
    "--memory-history",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Record the last N CUDA allocations with their stacks, for snapshots.",
)
@click.option("--no-stages", is_flag=True, help="Do not note what reading, decoding, augmenting … take.")
@_home_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    name: str | None,
    tags: Mapping[str, str],
    interval: float,
    memory_history: int | None,
    no_stages: bool,
    home: Path,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and watch it: tidegauge run -- python train.py --lr 0.1."""
    if memory_history is not None:
        os.environ[MEMORY_HISTORY_VARIABLE] = str(memory_history)
    if no_stages:
        os.environ[STAGES_VARIABLE] = "0"
    _run(command, home=home, name=name, tags=tags, interval_seconds=interval)


@cli.command(context_settings=_PASS_ON)
@_home_option
@click.argument("name", type=click.Choice(JOBS))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def job(home: Path, name: str, arguments: tuple[str, ...]) -> None:
    """Run the built-in job NAME and watch it; tidegauge job NAME --help tells its options."""
    home, arguments = _take_home(arguments, home)
    command = (sys.executable, "-P", "-m", "training_harness.jobs", name, *arguments)
    if not {"--help", "-h", "--list"}.isdisjoint(arguments):
        os.execv(sys.executable, command)
    kind = [word.lstrip("-") for word in arguments if word == "--fixed" or word == arguments[0]]
    _run(command, home=home, name="-".join([name, *kind]) if name == "fault" else name)


def _take_home(arguments: Sequence[str], home: Path) -> tuple[Path, tuple[str, ...]]:
    """The home that a job's arguments name, else `home`; and the arguments without it."""
    rest, words = [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--home":
            rest.append(word)
            continue
        given = value if equals else next(words, "")
        if not given:
            raise click.UsageError("Option '--home' requires an argument", click.get_current_context())
        home = Path(given)
    return home, tuple(rest)


@cli.command()
@_run_options
@_home_option
@click.argument("pid", type=click.IntRange(1))
def watch(name: str | None, tags: Mapping[str, str], interval: float, home: Path, pid: int) -> None:
    """Watch the process PID, which already runs, from outside: its memory, the host and the devices."""
    from collector.agent.watch import watch as watch_process

    def say(run: Run) -> None:
        words = f"tidegauge: watching process {pid} as {run.run_id}; Ctrl-C ends the watch, not the process"
        click.echo(words, err=True)

    run = watch_process(pid, home=home, name=name, tags=tags, interval_seconds=interval, on_ready=say)
    _show_card(run, _judge(run), home=home, to_stderr=True)


@cli.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option(
    "--format", "form", default="text", show_default=True, metavar="|".join(FORMATS), help="Of the report."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there, not to the terminal.")
@_home_option
def report(spec: str, form: str, output: Path | None, home: Path) -> None:
    """Tell what a run's memory and data loading are like, and what to change.

    RUN is a run id, a unique prefix, the path of a run directory, or `latest`.
    """
    from collector.store.runs import find_run

    if form not in FORMATS:
        raise TidegaugeError(f"no format {form!r}; this version writes {' and '.join(FORMATS)}")
    found = find_run(home, spec)
    verdict = _judge(found)
    if form == "json":
        text = json.dumps(_as_report(found, verdict), indent=1, allow_nan=False) + "\n"
        _write(text, output)
    elif output is None:
        _show_card(found, verdict, home=home, to_stderr=False)
    else:
        _write(_card_text(found, verdict, home=home), output)


@cli.command()
@_home_option
def runs(home: Path) -> None:
    """List the runs, newest first."""
    from rich.console import Console

    from collector.listing import run_table
    from collector.store.runs import list_runs

    listed = list_runs(home)
    if not listed:
        click.echo(f"no runs in {home}; start one with: tidegauge run -- COMMAND")
        return
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(width=width).print(run_table(listed))


@cli.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option("--follow", type=click.IntRange(1), metavar="PID", help="The training process, as long as it lives.")
@_home_option
def collect(spec: str, follow: int | None, home: Path) -> None:
    """Resume a run whose collector has ended: store what waits, follow what lives."""
    from collector.agent import loop
    from collector.agent.procfs import ProcessKey
    from collector.store.runs import find_run
    from training_harness.journal import start_ticks

    found = find_run(home, spec)
    if follow is not None and found.manifest["command"] is None:
        try:
            command = loop.manifest_process(ProcessKey(follow, start_ticks(follow)))
        except OSError:
            raise TidegaugeError(f"no process {follow} to follow; leave --follow out to store what waits") from None
        loop.update_manifest(found, command=command)
    loop.collect(found)
    verdict = _judge(found)
    click.echo(f"{found.run_id}: all records are stored; {verdict.status}, {verdict.steps} steps", err=True)


@cli.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option("--kind", type=click.Choice(SNAPSHOT_KINDS), default="allocator", show_default=True, help="Of what.")
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="That a profile lasts.")
@click.option("--timeout", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds to wait.")
@_home_option
def snapshot(spec: str, kind: str, steps: int, timeout: float, home: Path) -> None:
    """Have a running training save what only it can see of its memory, at the end of a step."""
    from rich.console import Console

    from collector.snapshot import take
    from collector.store.runs import find_run

    with Console(stderr=True).status("asking") as status:
        taken, refused = take(find_run(home, spec), kind, steps=steps, timeout_seconds=timeout, say=status.update)
    for line in taken:
        click.echo(line)
    if refused:
        raise TidegaugeError("; ".join(refused))


@cli.command()
@click.option("--port", type=click.IntRange(1, 65535), default=8501, show_default=True, help="To serve on.")
@_home_option
def dashboard(port: int, home: Path) -> None:
    """Serve the dashboard until Ctrl-C."""
    app = Path(collector.__file__).parent.parent / "app"
    if importlib.util.find_spec("streamlit") is None or not app.is_dir():
        raise TidegaugeError("the dashboard is not installed; install it with: pip install 'tidegauge[app]'")
    os.environ[HOME_VARIABLE] = str(home.absolute())
    # The user's own PYTHONPATH may hold another package `collector` or `app`.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(app.parent), os.environ.get("PYTHONPATH")]))
    words = ["-P", "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    click.echo(f"dashboard of {home} on http://localhost:{port}, Ctrl-C ends it", err=True)
    os.execv(sys.executable, [sys.executable, *words])


@cli.command()
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, executable=True),
    default=sys.executable,
    help="The Python of your training, with its torch; this one by default.",
)
@_home_option
def doctor(python: str, home: Path) -> None:
    """Tell what works here and what does not, each with the remedy."""
    from rich.console import Console

    from collector.doctor import check_all, checks_table

    Console().print(checks_table(check_all(home, python)))


def main() -> None:
    """Entry point: an error is one line on stderr; a mistake of the user's exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets "?", not an exception
    try:
        sys.exit(cli.main(prog_name="tidegauge", standalone_mode=False))
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tidegauge"
        _fail(f"{error.format_message().rstrip('.')}; see {path} --help", error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except TidegaugeError as error:
        _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_UNEXPECTED)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        _fail(
            f"unexpected {type(error).__name__}: {error}; the traceback is in {_save_traceback()}", EXIT_UNEXPECTED
        )


def _run(
    command: Sequence[str],
    *,
    home: Path,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    interval_seconds: float = 1.0,
) -> None:
    """Run and follow a command, show the card, and exit as the command did."""
    from collector.agent.launch import run_command

    outcome = run_command(command, home=home, name=name, tags=tags, interval_seconds=interval_seconds)
    if outcome.run is not None:
        try:
            _show_card(outcome.run, _judge(outcome.run), home=home, to_stderr=True)
        except Exception as error:  # noqa: BLE001 - the command's exit status stands, whatever fails here
            if os.environ.get(DEBUG_VARIABLE) == "1":
                traceback.print_exc()
            reason = _one_line(f"{type(error).__name__}: {error}")
            click.echo(f"tidegauge: no verdict on {outcome.run.run_id} ({reason})", err=True)
    sys.exit(outcome.exit_status)


def _judge(run: Run) -> Verdict:
    """The verdict on a run; kept for `tidegauge runs` if the run has ended and all of it could be read."""
    from collector.diagnosis.tables import load_tables
    from collector.diagnosis.verdict import diagnose
    from collector.listing import keep_report

    tables = load_tables(run)
    for problem in tables.problems[:5]:
        click.echo(f"tidegauge: {problem}", err=True)
    verdict = diagnose(tables)
    if verdict.status != "running" and not tables.problems:
        keep_report(run, _as_report(run, verdict))
    return verdict


def _as_report(run: Run, verdict: Verdict) -> dict[str, Any]:
    from collector.report import report as as_report

    return as_report(verdict, run_id=run.run_id, name=run.manifest["name"])


def _show_card(run: Run, verdict: Verdict, *, home: Path, to_stderr: bool) -> None:
    from rich.console import Console

    Console(stderr=to_stderr, highlight=False).print(_card(run, verdict, home))


def _card_text(run: Run, verdict: Verdict, *, home: Path) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False).print(_card(run, verdict, home))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _card(run: Run, verdict: Verdict, home: Path) -> Any:
    from collector.report import card, dashboard_command

    return card(
        verdict, run_id=run.run_id, name=run.manifest["name"], dashboard=dashboard_command(home, home_path())
    )


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise TidegaugeError(f"cannot write {output}: {error.strerror}; give --output a file in a folder") from None


def _save_traceback() -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tidegauge-", suffix=".txt", delete=False) as stream:
            traceback.print_exc(file=stream)
    except OSError:
        return f"reach with {DEBUG_VARIABLE}=1"
    return stream.name


def _fail(message: str, exit_status: int) -> None:
    click.echo(f"tidegauge: {_one_line(message)}", err=True)
    sys.exit(exit_status)


def _one_line(text: str) -> str:
    return " ".join(text.split())
