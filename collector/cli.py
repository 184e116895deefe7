"""The command line: its commands, and how errors are shown."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

import click
from click.shell_completion import get_completion_class

from collector.commands import compare, dashboard, doctor, report, run, storage, tune
from collector.commands.demo import replay
from collector.commands.programs import api, mcp
from collector.errors import DEBUG_VARIABLE, TidegaugeError, one_line

EXIT_UNEXPECTED = 1


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tidegauge", prog_name="tidegauge", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Watch the memory and the data loading of PyTorch training."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion for a shell. Use: eval "$(tidegauge completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "tidegauge", "_TIDEGAUGE_COMPLETE").source())


for _command in (
    run.run,
    run.job,
    replay.demo,
    run.watch,
    run.collect,
    tune.tune,
    report.report,
    report.runs,
    storage.tag,
    storage.ignore,
    compare.compare,
    compare.check,
    report.snapshot,
    report.stacks,
    storage.export,
    storage.prune,
    dashboard.dashboard,
    doctor.doctor,
    mcp.mcp,
    api.api,
    completion,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; an error is one line on stderr, and a user's mistake exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # A terminal without UTF-8 shows "?" instead of raising.
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


def _save_traceback() -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tidegauge-", suffix=".txt", delete=False) as stream:
            traceback.print_exc(file=stream)
    except OSError:
        return f"reach with {DEBUG_VARIABLE}=1"
    return stream.name


def _fail(message: str, exit_status: int) -> None:
    click.echo(f"tidegauge: {one_line(message)}", err=True)
    sys.exit(exit_status)
