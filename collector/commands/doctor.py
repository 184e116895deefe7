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
    help="Python of your training, with its torch [default: this Python].",
)
@home_option
def doctor(python: str, home: Path) -> None:
    """Check what Tidegauge can measure on this machine; show the remedy for what it cannot."""
    from collector.commands.checks import check_all, checks_table
    from collector.report.terminal import Terminal

    Terminal().print(checks_table(check_all(home, python)))
