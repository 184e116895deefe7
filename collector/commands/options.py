"""Options that several commands share, and how a table is printed."""

from __future__ import annotations

import functools
import importlib
import json
import re
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
    from collector.agent.live.before_oom import BeforeOom
    from collector.agent.live.trackers import Trackers

T = TypeVar("T")
#: Width in characters of a table in a pipe, so that one run stays one line.
PIPE_WIDTH = 200
#: Settings of commands that run another one: its arguments begin at the first word that is no option.
PASS_ON = {"allow_interspersed_args": False}
_LEAD = "60s"
_LEAD_BOUNDS_SECONDS = (1.0, 3600.0)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
_SPAN_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


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


home_option = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=home_path,
    callback=require_value,
    metavar="DIRECTORY",
    help=f"Folder that holds the runs [default: ${HOME_VARIABLE}, else the user's data directory].",
)
investigate_option = click.option(
    "--investigate",
    is_flag=True,
    help="Name the lines behind a leak or a wait: trace a process that leaks, once; sample stacks.",
)
interval_option = click.option(
    "--interval", type=float, default=1.0, show_default=True, metavar="S", help="Seconds between samples."
)
port_option = click.option(
    "--port", type=click.IntRange(1, 65535), default=8501, show_default=True, help="Port of the dashboard."
)


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
    """Options of a run's live output: address of the metrics, senders of alerts, and experiment trackers."""

    prometheus: tuple[str, int] | None = None
    senders: tuple[Sender, ...] = ()
    trackers: Trackers | None = None


NO_LIVE_OPTIONS = LiveOptions()


def outlet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--prometheus`, `--log-to`, `--on-finding` and `--webhook`, which the command gets as one `live`."""

    @functools.wraps(command)
    def with_live(
        *args: Any,
        prometheus: tuple[str, int] | None,
        on_finding: Sender | None,
        webhook: Sender | None,
        log_to: Trackers | None,
        **rest: Any,
    ) -> Any:
        senders = tuple(filter(None, (on_finding, webhook)))
        return command(*args, live=LiveOptions(prometheus, senders, log_to), **rest)

    metrics_help = "Serve metrics for Prometheus [default host: 127.0.0.1]."
    command_help = "Run a shell command for each new warning or critical finding, with its JSON on stdin."
    tracker_help = "Add series and findings to wandb, mlflow, tensorboard, trackio or otlp; repeatable."
    webhook_help = "Post each new warning or critical finding, with its run, to this URL as JSON."
    for option in (
        click.option(
            "--log-to",
            multiple=True,
            callback=made_by("trackers", "Trackers"),
            metavar="TRACKER",
            help=tracker_help,
        ),
        click.option("--webhook", callback=made_by("alerts", "webhook_sender"), metavar="URL", help=webhook_help),
        click.option(
            "--on-finding", callback=made_by("alerts", "command_sender"), metavar="CMD", help=command_help
        ),
        click.option(
            "--prometheus",
            callback=made_by("prometheus", "parse_address"),
            metavar="[HOST:]PORT",
            help=metrics_help,
        ),
    ):
        with_live = option(with_live)
    return with_live


def made_by(module: str, name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Make a callback that gives an option's value to a function of `collector.agent.live`, imported only then.

    An option that is not given stays None. A value that the function refuses is an error of the option.
    """

    def make(context: click.Context, option: click.Parameter, value: Any) -> Any:
        if require_value(context, option, value) in (None, ()):
            return None
        function = getattr(importlib.import_module(f"collector.agent.live.{module}"), name)
        try:
            return function(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return make


def before_oom_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--before-oom` and `--lead`, which the command gets as one `before_oom`."""

    @functools.wraps(command)
    def with_action(*args: Any, before_oom: str | None, lead: float | None, **rest: Any) -> Any:
        return command(*args, before_oom=_before_oom(before_oom, lead), **rest)

    action_help = "Before memory runs out: send this signal to each training process, or run a shell command."
    lead_help = f"How long before, with --before-oom [default: {_LEAD}]."
    for option in (
        click.option("--lead", callback=_parse_span, metavar="TIME", help=lead_help),
        click.option("--before-oom", callback=require_value, metavar="SIGNAL|CMD", help=action_help),
    ):
        with_action = option(with_action)
    return with_action


def _before_oom(action: str | None, lead_seconds: float | None) -> BeforeOom | None:
    if action is None and lead_seconds is None:
        return None
    if action is None:
        raise click.UsageError("--lead belongs to --before-oom: give both", click.get_current_context())
    from collector.agent.live.before_oom import LEAD_SECONDS, BeforeOom, parse_action

    try:
        return BeforeOom(parse_action(action), LEAD_SECONDS if lead_seconds is None else lead_seconds)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--before-oom") from None


def _parse_span(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of a time such as `90`, `90s` or `5m`."""
    if value is None:
        return None
    match = _SPAN.fullmatch(value.strip())
    seconds = float(match[1]) * _SPAN_SECONDS[match[2]] if match else 0.0
    if not _LEAD_BOUNDS_SECONDS[0] <= seconds <= _LEAD_BOUNDS_SECONDS[1]:
        raise click.BadParameter(f"{value!r} is no time between 1 s and 1 h; give one such as 90s or 5m")
    return seconds


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
    for option in (
        interval_option,
        tag_option("Tag stored with the run; repeatable."),
        click.option(
            "--name", callback=require_value, metavar="NAME", help="Name of the run [default: the script's]."
        ),
    ):
        command = option(command)
    return command


def say(text: str) -> None:
    """Report progress, or what is wrong, on stderr."""
    click.echo(f"tidegauge: {text}", err=True)


def write_json(body: object) -> None:
    """Write what a command found as JSON on stdout; an unknown value must be null."""
    click.echo(json.dumps(body, indent=1, allow_nan=False))


def show_table(table: Table) -> None:
    """Print a table on stdout; do not wrap it in a pipe."""
    from collector.report.terminal import Terminal

    Terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH).print_table(table)
