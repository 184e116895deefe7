"""Commands that show runs (report, runs, snapshot, stacks), and the verdict on a run: made, saved, shown."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector import store
from collector.commands.options import format_option, home_option, say, show_table, tag_option, write_json
from collector.errors import TidegaugeError, one_line
from collector.units import counted, duration
from training_harness.layout import SNAPSHOT_KINDS, SNAPSHOT_STEPS, home_path

if TYPE_CHECKING:
    from collector.diagnosis import RunTables, Verdict
    from collector.stacks import Stack


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@format_option("text", "json", "html", "markdown")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of the terminal."
)
@click.option("--verbose", is_flag=True, help="Show every measurement in the text.")
@click.option("--settings", "with_settings", is_flag=True, help="Add the setting for each DataLoader (JSON).")
@home_option
def report(spec: str, form: str, output: Path | None, verbose: bool, with_settings: bool, home: Path) -> None:
    """Show the verdict on a run, and what to change.

    RUN is a run id, a unique part of one, the name of a run, the path of a run directory, or `latest`.
    """
    if form == "html" and output is None and sys.stdout.isatty():
        raise TidegaugeError("the HTML report is some 5 MB, too much for a terminal: give --output FILE")
    if with_settings and form != "json":
        raise TidegaugeError(f"--settings is for --format json, not {form}: the advice in the text names settings")
    run = store.find_run(home, spec)
    tables, verdict = examine(run)
    if form == "json":
        body = as_report(run, verdict)
        if with_settings:
            from collector.diagnosis.tuning import settings_json
            from collector.findings import finite

            body["settings"] = finite(settings_json(tables))
        _write(json.dumps(body, indent=1, allow_nan=False) + "\n", output)
    elif form == "html":
        _write(render_html(run, verdict), output)
    elif form == "markdown":
        card = card_text(run, verdict, home=home, verbose=verbose)
        _write(f"```text\n{card}```\n", output)
    elif output is None:
        show_card(run, verdict, home=home, to_stderr=False, verbose=verbose)
    else:
        _write(card_text(run, verdict, home=home, verbose=verbose), output)


@click.command()
@click.option("--limit", type=click.IntRange(1), metavar="N", help="List only the newest N.")
@tag_option("List only runs with this tag; repeatable.")
@click.option("--trials", "with_trials", is_flag=True, help="List the trials of `tidegauge tune` too.")
@format_option("text", "json")
@home_option
def runs(limit: int | None, tags: Mapping[str, str], with_trials: bool, form: str, home: Path) -> None:
    """List the runs, newest first. Trials of `tidegauge tune` are left out."""
    from collector.findings import finite
    from collector.report.listing import as_json, list_entry, run_table

    all_runs = store.list_runs(home)
    listed = [run for run in all_runs if with_trials or not store.is_trial(run)]
    entries = map(list_entry, listed)
    shown = list(itertools.islice((entry for entry in entries if tags.items() <= entry.tags.items()), limit))
    if form == "json":
        write_json(finite([as_json(entry) for entry in shown]))
    elif shown:
        show_table(run_table(shown))
    elif tags:
        click.echo(f"no runs in {home} have {' and '.join(f'{key}={value}' for key, value in tags.items())}")
    else:
        click.echo(f"no runs in {home}; start one with: tidegauge run -- COMMAND")
    if hidden := len(all_runs) - len(listed):
        say(f"not listed: {counted(hidden, 'trial')} of `tidegauge tune`; --trials lists them")


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option(
    "--kind", type=click.Choice(SNAPSHOT_KINDS), default="allocator", show_default=True, help="What to save."
)
@click.option(
    "--steps",
    type=click.IntRange(2, 1000),
    metavar="N",
    help="Record N steps [default: 100 for growth, 5 for profile].",
)
@click.option(
    "--worker",
    type=click.IntRange(0),
    metavar="K",
    help="Save from worker K of each loader, not from the training process (growth, census).",
)
@click.option("--timeout", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds to wait.")
@home_option
def snapshot(spec: str, kind: str, steps: int | None, worker: int | None, timeout: float, home: Path) -> None:
    """Save a memory snapshot or a profile of a running training. It is taken at the end of a step."""
    from collector.agent.live.snapshot_request import take
    from collector.report.terminal import Terminal

    with Terminal(stderr=True).status("requesting the snapshot") as status:
        run, steps = store.find_run(home, spec), steps or SNAPSHOT_STEPS.get(kind, 1)
        lines, failures = take(run, kind, steps=steps, timeout_seconds=timeout, show=status.update, worker=worker)
    for line in lines:
        click.echo(one_line(line))
    if failures:
        raise TidegaugeError("; ".join(failures))


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option("--native", is_flag=True, help="Show frames of C and C++ too; pauses each process for a moment.")
@format_option("text", "json")
@home_option
def stacks(spec: str, native: bool, form: str, home: Path) -> None:
    """Show the line that each thread of a running training executes.

    Equal stacks are shown once, and the odd one first. Without --native, the training is not paused. Where the
    stacks cannot be read, as after the end, those are shown that the collector took when the training stood still.
    """
    from collector.report.stack_listing import as_json, stack_lines
    from collector.report.terminal import Terminal
    from collector.stacks import group

    run = store.find_run(home, spec)
    found, problem = _living_stacks(run, native=native)
    if not found:
        recorded, when = _recorded_stacks(run)
        if not recorded:
            raise TidegaugeError(problem)
        found = recorded
        say(f"{problem}; these were taken {when} after the start of the run")
    if form == "json":
        write_json(as_json(group(found)))
    else:
        terminal = Terminal(highlight=False, soft_wrap=True)
        for line in stack_lines(group(found)):
            terminal.print(line)


def _living_stacks(run: store.Run, *, native: bool) -> tuple[list[Stack], str]:
    """Return the stacks of a run's living processes, or none and the reason."""
    from collector.agent.samplers.stack_dumps import StackError, living, read_stacks
    from collector.report.wording import locus

    found: list[Stack] = []
    failures = []
    for process, place in living(run).items():
        try:
            found += read_stacks(process.pid, place, native=native)
        except StackError as error:
            failures.append(f"{locus(place)}: {error}")
    if found:
        for failure in failures:
            say(f"no stack of {failure}")
    elif failures:
        return [], f"no stack of {run.run_id} can be read: {failures[0]}"
    return found, f"no process of {run.run_id} runs on this machine; its stacks can be read while it runs"


def _recorded_stacks(run: store.Run) -> tuple[list[Stack], str]:
    """Return the stacks that the collector took last, and how long after the start of the run that was."""
    from collector.stacks import of_event
    from collector.store import queries

    with store.read(run) as snapshot:
        rows = queries.events(snapshot, "stacks")
    if rows.empty:
        return [], ""
    origin_ns = queries.origin_ns(run.manifest)
    seconds = (rows["time_ns"].iloc[0] - origin_ns) / 1e9 if origin_ns is not None else None
    return of_event(json.loads(rows["body"].iloc[0])), duration(seconds)


def judge(run: store.Run) -> Verdict:
    """Return the verdict on a run; save it for lists of runs if its records have ended and were read as a whole."""
    return examine(run)[1]


def examine(run: store.Run) -> tuple[RunTables, Verdict]:
    """Return the tables of a run and the verdict on it, which is saved as `judge` does."""
    from collector.diagnosis import diagnose, load_tables
    from collector.report.known import with_known
    from collector.report.results import result_of, save_result

    tables = load_tables(run)
    for problem in tables.problems[:5]:
        say(one_line(problem))
    raw = diagnose(tables)
    verdict = with_known(raw, run)
    has_ended = verdict.status != "running" or run.manifest["end_time_ns"] is not None  # a watch can be given up
    if has_ended and not tables.problems:
        with contextlib.suppress(TidegaugeError):  # a home that cannot be written
            if run.has_ended_everywhere:
                save_result(run, result_of(tables, raw))
    return tables, verdict


def as_report(run: store.Run, verdict: Verdict) -> dict[str, Any]:
    """Return the JSON form of the report (docs/report.md)."""
    from collector.report import card

    return card.report(verdict, run_id=run.run_id, name=run.name)


def show_card(run: store.Run, verdict: Verdict, *, home: Path, to_stderr: bool, verbose: bool = False) -> None:
    """Print the card."""
    from collector.report.terminal import Terminal

    Terminal(stderr=to_stderr, highlight=False).print(_card(run, verdict, home, verbose=verbose), crop=False)


def card_text(run: store.Run, verdict: Verdict, *, home: Path, verbose: bool) -> str:
    """Return the card as plain text of 80 columns."""
    from collector.report.terminal import Terminal

    stream = io.StringIO()
    Terminal(file=stream, width=80, highlight=False).print(_card(run, verdict, home, verbose=verbose), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _card(run: store.Run, verdict: Verdict, home: Path, *, verbose: bool) -> Any:
    from collector.report.card import card, command_for

    return card(
        verdict,
        run_id=run.run_id,
        name=run.name,
        command=partial(command_for, home, home_path()),
        verbose=verbose,
    )


def render_html(run: store.Run, verdict: Verdict) -> str:
    """Render the dashboard's views in one file."""
    with the_app("app.html_report", "the HTML report needs") as app:
        rendered: str = app.render(run, verdict)
    return rendered


@contextlib.contextmanager
def the_app(module: str, purpose: str) -> Iterator[Any]:
    """Import a module of the dashboard by name, since it may not be installed; keep Streamlit quiet in the block.

    Raises:
        TidegaugeError: the dashboard is not installed; `purpose` says what needs it.
    """
    if any(importlib.util.find_spec(name) is None for name in ("app", "plotly", "streamlit")):
        raise TidegaugeError(f"{purpose} the dashboard; install it with: pip install 'tidegauge[app]'")
    import logging

    logging.disable(logging.WARNING)  # Streamlit warns that no session runs.
    try:
        yield importlib.import_module(module)
    finally:
        logging.disable(logging.NOTSET)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TidegaugeError(f"cannot write {output}: {error.strerror}; give --output a file in a folder") from None
