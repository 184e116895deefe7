"""`tidegauge compare`: runs side by side, for a person or for continuous integration."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from collector.commands.options import format_option, home_option, show_table
from collector.commands.report import judge
from collector.errors import TidegaugeError

if TYPE_CHECKING:
    from collector.report.comparison import Condition, Measure
    from collector.store import Run

#: Exit status if a condition holds; 1 and 2 are errors.
EXIT_WORSE = 3
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
    help="Exit with 3 if METRIC has grown by more than PERCENT against the baseline; METRIC<-PERCENT: has shrunk.",
)
@format_option("text", "json")
@home_option
def compare(specs: tuple[str, ...], conditions: tuple[Condition, ...], form: str, home: Path) -> None:
    """Compare two to four runs: their figures against those of the baseline, the first RUN, and their settings."""
    from collector.report import comparison
    from collector.store import find_run

    if not 2 <= len(specs) <= _MOST_RUNS:
        raise TidegaugeError(f"two to {_MOST_RUNS} runs can be compared, not {len(specs)}")
    runs = [find_run(home, spec) for spec in specs]
    if len({run.run_id for run in runs}) < len(runs):
        raise TidegaugeError(f"{' and '.join(specs)} are not different runs: `tidegauge runs` lists them")
    results = {run.run_id: _measure(run) for run in runs}
    figures = {run_id: measures for run_id, (measures, _) in results.items()}
    differing = comparison.differences(settings for _, settings in results.values())
    if form == "json":
        sys.stdout.write(json.dumps(comparison.as_json(figures, differing), indent=1, allow_nan=False) + "\n")
    else:
        show_table(comparison.table(figures, differing))
    lines = comparison.violations(conditions, figures)
    for line in lines:
        click.echo(f"tidegauge: {line}", err=True)
    if lines:
        sys.exit(EXIT_WORSE)


def _measure(run: Run) -> tuple[dict[str, Measure], dict[str, str]]:
    from collector.report import comparison
    from collector.store import read
    from collector.store.queries import spans

    verdict, manifest = judge(run), {**run.manifest, "tags": run.tags}
    with read(run) as snapshot:
        reach = spans.extent(snapshot)
        if reach is None:
            raise TidegaugeError(f"{run.run_id} left no records to compare")
        origin = spans.origin_ns(manifest) or reach.first_ns
        span = spans.span(snapshot, reach, origin=origin, window="run", rank=None)
        return comparison.measures(snapshot, span, verdict), comparison.settings(snapshot, manifest)
