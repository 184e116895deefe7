"""`tidegauge compare` and `tidegauge check`: runs side by side, or held to a budget, for continuous integration."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from collector import store
from collector.commands.options import format_option, home_option, say, show_table, write_json
from collector.commands.report import examine, judge
from collector.errors import TidegaugeError, one_line, printable
from training_harness.budget import Budget

if TYPE_CHECKING:
    from collector.budget.figures import ExaminedRun
    from collector.budget.judgement import Judgement
    from collector.report.comparison import Condition, Measure

#: Exit status of `compare` if a condition holds; 1 and 2 are errors.
EXIT_WORSE = 3
#: Exit status of `check` if a figure is beyond the budget.
EXIT_BEYOND = 1
_MOST_RUNS = 4


def _parse_conditions(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> tuple[Condition, ...]:
    if not values:
        return ()
    from collector.report.comparison import parse_condition

    try:
        return tuple(map(parse_condition, values))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("specs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option(
    "--fail-on",
    "conditions",
    multiple=True,
    callback=_parse_conditions,
    metavar="METRIC>PERCENT",
    help="Exit with 3 if METRIC (data_wait, samples, step_p50, …) has grown by more than PERCENT against "
    "the baseline; METRIC<-PERCENT: has shrunk.",
)
@format_option("text", "json", "markdown")
@home_option
def compare(specs: tuple[str, ...], conditions: tuple[Condition, ...], form: str, home: Path) -> None:
    """Compare the figures and settings of two to four runs. The first RUN is the baseline."""
    from collector.report import comparison

    if not 2 <= len(specs) <= _MOST_RUNS:
        raise TidegaugeError(f"give two to four runs to compare, not {len(specs)}")
    runs = [store.find_run(home, spec) for spec in specs]
    if len({run.run_id for run in runs}) < len(runs):
        raise TidegaugeError(f"{' and '.join(specs)} are not different runs: `tidegauge runs` lists them")
    results = {run.run_id: _measure(run) for run in runs}
    figures = {run_id: measures for run_id, (measures, _) in results.items()}
    differing = comparison.differences(settings for _, settings in results.values())
    if form == "json":
        write_json(comparison.as_json(figures, differing))
    else:
        is_terminal = form == "text" and sys.stdout.isatty()
        names = comparison.headings([*figures], short=is_terminal)
        tables = [comparison.table([*figures.values()], names)]
        if is_terminal:
            comparison.wrap_headings(tables[0])
        if differing:
            tables.append(comparison.settings_table(names, differing))
        if form == "markdown":
            from collector.report.terminal import markdown_table

            sys.stdout.write("\n".join(map(markdown_table, tables)))
        else:
            for place, table in enumerate(tables):
                click.echo("\n" * bool(place), nl=False)
                show_table(table)
    lines = comparison.violations(conditions, figures)
    for line in lines:
        say(line)
    if lines:
        sys.exit(EXIT_WORSE)


def _measure(run: store.Run) -> tuple[dict[str, Measure], dict[str, str]]:
    from collector.report import comparison
    from collector.store.queries import spans

    verdict, manifest = judge(run), {**run.manifest, "tags": run.tags}
    with store.read(run) as snapshot:
        reach = spans.extent(snapshot)
        if reach is None:
            raise TidegaugeError(f"{run.run_id} left no records to compare")
        origin = spans.origin_ns(manifest) or reach.first_ns
        span = spans.span(snapshot, reach, origin=origin, window="run", rank=None)
        return comparison.measures(snapshot, span, verdict), comparison.settings(snapshot, manifest)


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option(
    "--budget",
    "budget_file",
    type=click.File("rb"),
    required=True,
    metavar="FILE",
    help='TOML file with the limits, such as max_peak = "2 GiB"; - for stdin.',
)
@click.option(
    "--baseline", metavar="RUN", help="Run that min_throughput compares with, instead of that of the budget."
)
@format_option("text", "json", "markdown")
@home_option
def check(spec: str, budget_file: BinaryIO, baseline: str | None, form: str, home: Path) -> None:
    """Hold a run to a budget. Exit with 1 if it is beyond.

    A budget limits memory, its growth, waiting for data, and throughput.

    RUN is a run id, a unique part of one, the name of a run, the path of a run directory, or `latest`.
    """
    from collector.budget.figures import figures_of
    from collector.budget.judgement import judge_budget

    budget = _read_budget(budget_file, baseline)
    run = store.find_run(home, spec)
    needs_baseline = budget.baseline is not None and "min_throughput" in budget.limits
    other = store.find_run(home, budget.baseline) if budget.baseline is not None and needs_baseline else None
    if other is not None and other.run_id == run.run_id:
        raise TidegaugeError(f"{run.run_id} is the baseline itself; name another run with --baseline")
    figures = figures_of(_examined(run), None if other is None else _examined(other), budget.limits)
    judgements = judge_budget(budget, figures)
    if all(each.status == "not judged" for each in judgements):
        reasons = "; ".join(each.sentence for each in judgements)
        raise TidegaugeError(f"{run.run_id} shows no figure of the budget: {reasons}")
    _show(run, other, judgements, form)
    if any(each.status == "beyond" for each in judgements):
        sys.exit(EXIT_BEYOND)


def _read_budget(file: BinaryIO, baseline: str | None) -> Budget:
    try:
        return Budget.of(tomllib.loads(file.read().decode()), baseline=baseline)
    except ValueError as error:  # not UTF-8, no TOML, no budget
        raise TidegaugeError(f"{file.name}: {error}") from None


def _examined(run: store.Run) -> ExaminedRun:
    from collector.budget.figures import ExaminedRun

    tables, verdict = examine(run)
    return ExaminedRun(run_id=run.run_id, tables=tables, verdict=verdict)


def _show(run: store.Run, baseline: store.Run | None, judgements: Sequence[Judgement], form: str) -> None:
    from collector.budget.output import all_details, as_json, markdown_details, table

    if form == "json":
        write_json(as_json(run.run_id, None if baseline is None else baseline.run_id, judgements))
        return
    if form == "markdown":
        from collector.report.terminal import markdown_table, markdown_text

        heading = f"### Tidegauge: {markdown_text(run.run_id)}"
        parts = [heading, markdown_table(table(judgements)), markdown_details(judgements)]
        sys.stdout.write("\n\n".join(part.rstrip() for part in parts if part) + "\n")
        for each in judgements:  # stdout goes into a summary, and the log needs the reason too
            if each.status != "within":
                say(one_line(each.sentence))
    else:
        show_table(table(judgements))
        for lines in all_details(judgements):
            click.echo("\n" + printable("\n  ".join(lines)))
