"""Options that several commands share, and how a table is printed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from collector.errors import TidegaugeError
from training_harness.layout import HOME_VARIABLE, home_path

if TYPE_CHECKING:
    from rich.table import Table

    from collector.agent.live.alerts import Sender
    from collector.agent.live.hangs import HangReports

T = TypeVar("T")
#: Width in characters of a table in a pipe, so that one run stays one line.
PIPE_WIDTH = 200
#: Settings of commands that run another one: its arguments begin at the first word that is no option.
PASS_ON = {"allow_interspersed_args": False}


def require_value(_context: click.Context, option: click.Parameter, value: T) -> T:
    """Return the value of an option; refuse the `--` before a command, and the option that follows.

    Raises:
        click.BadParameter: the value was left out.

    """
    text = str(value)
    if text.startswith("--"):
        what = "the end of the options" if text == "--" else "another option"
        metavar = option.metavar or "a value"
        raise click.BadParameter(f"{text!r} is {what}, not a value; give {metavar} before it", param=option)
    return value


def home_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--home`."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        default=home_path,
        callback=require_value,
        metavar="DIRECTORY",
        help=f"Folder that holds the runs [default: ${HOME_VARIABLE}, else the user's data directory].",
    )(command)


def parse_tags(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return key -> value of tags like `lr=0.1`."""
    tags = {}
    for value in values:
        key, equals, content = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE")
        tags[key] = content
    return tags


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options of a run's live output: address of the metrics, and senders of alerts."""

    prometheus: tuple[str, int] | None
    senders: tuple[Sender, ...]


NO_LIVE_OPTIONS = LiveOptions(None, ())


def outlet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--prometheus`, `--on-finding` and `--webhook`, which the command gets as one `live`."""

    @functools.wraps(command)
    def with_live(
        *args: Any,
        prometheus: tuple[str, int] | None,
        on_finding: Sender | None,
        webhook: Sender | None,
        **rest: Any,
    ) -> Any:
        return command(*args, live=LiveOptions(prometheus, tuple(filter(None, (on_finding, webhook)))), **rest)

    metrics_help = "Serve metrics for Prometheus [default host: 127.0.0.1]."
    command_help = "Run a shell command for each new warning or critical finding, with its JSON on stdin."
    webhook_help = "Post each new warning or critical finding, with its run, to this URL as JSON."
    for option in (
        click.option("--webhook", callback=_parse_webhook, metavar="URL", help=webhook_help),
        click.option("--on-finding", callback=_parse_command, metavar="CMD", help=command_help),
        click.option("--prometheus", callback=_parse_address, metavar="[HOST:]PORT", help=metrics_help),
    ):
        with_live = option(with_live)
    return with_live


def investigate_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--investigate`."""
    help_text = "Name the lines behind a leak or a wait: trace a process that leaks, once; sample stacks."
    return click.option("--investigate", is_flag=True, help=help_text)(command)


def _parse_address(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, int] | None:
    from collector.agent.live.prometheus import parse_address

    return _parse(parse_address, require_value(context, option, value))


def _parse_command(context: click.Context, option: click.Parameter, value: str | None) -> Sender | None:
    from collector.agent.live.alerts import command_sender

    return _parse(command_sender, require_value(context, option, value))


def _parse_webhook(context: click.Context, option: click.Parameter, value: str | None) -> Sender | None:
    from collector.agent.live.alerts import webhook_sender

    return _parse(webhook_sender, require_value(context, option, value))


def parse_on_hang(context: click.Context, option: click.Parameter, value: str | None) -> HangReports | None:
    """Return the reports of hangs with the action of `--on-hang`."""
    from collector.agent.live.hangs import HangReports

    return _parse(HangReports, require_value(context, option, value))


def _parse(parse: Callable[[str], T], value: str | None) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def format_option(*forms: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `--format`, one of `forms`, the first by default; the command gets it as `form`."""

    def check(_context: click.Context, _option: click.Parameter, value: str) -> str:
        if value not in forms:
            raise TidegaugeError(f"no format {value!r}; give one of {', '.join(forms)}")
        return value

    return click.option(
        "--format",
        "form",
        default=forms[0],
        show_default=True,
        callback=check,
        metavar="|".join(forms),
        help="Output format.",
    )


def tag_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `--tag`, which the command gets as `tags`."""
    return click.option("--tag", "tags", multiple=True, callback=parse_tags, metavar="KEY=VALUE", help=help_text)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a new run: `--name`, `--tag` and `--interval`."""
    interval_help = "Seconds between samples."
    for option in (
        click.option("--interval", type=float, default=1.0, show_default=True, metavar="S", help=interval_help),
        tag_option("Tag stored with the run; repeatable."),
        click.option(
            "--name", callback=require_value, metavar="NAME", help="Name of the run [default: the script's]."
        ),
    ):
        command = option(command)
    return command


def say(text: str) -> None:
    """Report progress on stderr."""
    click.echo(f"tidegauge: {text}", err=True)


def show_table(table: Table) -> None:
    """Print a table on stdout; do not wrap it in a pipe."""
    from collector.report.terminal import Terminal

    Terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
