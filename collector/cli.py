"""The command line: its commands, and how errors are shown."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys

import click

from collector.errors import DEBUG_VARIABLE, TidegaugeError, one_line

EXIT_UNEXPECTED = 1
#: A suggestion of click's in brackets, as if the sentence before it went on.
_SUGGESTION = re.compile(r" \((Did you mean .*\?)\)$")
#: Module of `collector.commands` -> its commands.
_MODULES = {
    "compare": ("check", "compare"),
    "dashboard": ("dashboard",),
    "demo.replay": ("demo",),
    "doctor": ("doctor",),
    "programs.api": ("api",),
    "programs.mcp": ("mcp",),
    "report": ("report", "runs", "snapshot", "stacks"),
    "run": ("collect", "job", "run", "watch"),
    "storage": ("export", "ignore", "prune", "tag"),
    "tune": ("tune",),
}


class _Group(click.Group):
    """The group of all commands. A command's module is imported when it is asked for, so that others start fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return sorted({*self.commands, *itertools.chain(*_MODULES.values())})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command of this name; None if there is none, and then all are there to suggest another."""
        if name not in self.commands:
            modules = [module for module, names in _MODULES.items() if name in names]
            for module in modules or _MODULES:
                loaded = importlib.import_module(f"collector.commands.{module}")
                for each in _MODULES[module]:
                    self.add_command(getattr(loaded, each))
        return super().get_command(context, name)


@click.group(cls=_Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tidegauge", prog_name="tidegauge", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Watch the memory and the data loading of PyTorch training."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion for a shell. Use: eval "$(tidegauge completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "tidegauge", "_TIDEGAUGE_COMPLETE").source())


def main() -> None:
    """Run the command line; an error is one line on stderr, and a user's mistake exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # A terminal without UTF-8 shows "?" instead of raising.
    try:
        sys.exit(cli.main(prog_name="tidegauge", standalone_mode=False))
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tidegauge"
        message = _SUGGESTION.sub(r" \1", error.format_message()).rstrip(".")
        message = message.replace("valid integer range", "whole number").replace("valid float range", "number")
        _fail(f"{message}{' See' if message.endswith('?') else '; see'} {path} --help", error.exit_code)
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
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="tidegauge-", suffix=".txt", delete=False) as stream:
            traceback.print_exc(file=stream)
    except OSError:
        return f"reach with {DEBUG_VARIABLE}=1"
    return stream.name


def _fail(message: str, exit_status: int) -> None:
    click.echo(f"tidegauge: {one_line(message)}", err=True)
    sys.exit(exit_status)
