"""What several commands share: options, and how a table is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from training_harness.layout import HOME_VARIABLE, home_path

if TYPE_CHECKING:
    from rich.table import Table

#: Columns of a table in a pipe, so that one run stays one line.
PIPE_WIDTH = 200
#: For commands whose arguments are another command's.
PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def home_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--home`."""
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


def _parse_address(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, int] | None:
    from collector.metrics import parse_address

    try:
        return None if value is None else parse_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def outlet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what is told of a run while it goes on: `--prometheus`."""
    return click.option(
        "--prometheus",
        callback=_parse_address,
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus [default host: 127.0.0.1].",
    )(command)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a new run is given: `--name`, `--tag` and `--interval`."""
    tag_help, interval_help = "Kept with the run.", "Seconds between samples."
    for option in (
        click.option("--interval", type=float, default=1.0, show_default=True, metavar="S", help=interval_help),
        click.option("--tag", "tags", multiple=True, callback=_parse_tags, metavar="KEY=VALUE", help=tag_help),
        click.option("--name", help="Name of the run [default: the script's]."),
    ):
        command = option(command)
    return command


def show_table(table: Table) -> None:
    """Print a table on stdout, in a pipe without wrapping it."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
