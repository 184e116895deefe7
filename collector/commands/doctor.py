"""`tidegauge doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from collector.commands.options import home_option


@click.command()
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, executable=True),
    default=sys.executable,
    metavar="PATH",
    help="Python of your training, with its torch; another program is a warning [default: this Python].",
)
@home_option
def doctor(python: str, home: Path) -> None:
    """Check what Tidegauge can measure here. Show the remedy for what it cannot.

    The exit status is 0 whatever the checks find.
    """
    from collector.commands.checks import check_all, checks_table
    from collector.report.terminal import Terminal

    Terminal().print(checks_table(check_all(home, python)))
