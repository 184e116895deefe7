"""Commands on stored runs: tag, ignore, export, prune."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector import store
from collector.commands.options import home_option, parse_tags, say, show_table
from collector.errors import TidegaugeError, one_line
from collector.units import counted, size
from training_harness.budget import parse_size

if TYPE_CHECKING:
    from collector.findings import Identity
    from collector.store.prune.home import StoredRun


@click.command()
@click.argument("spec", metavar="RUN")
@click.argument("name", required=False)
@click.option(
    "--add", multiple=True, callback=parse_tags, metavar="KEY=VALUE", help="Add a tag, or change it; repeatable."
)
@click.option("--remove", multiple=True, metavar="KEY", help="Remove a tag; repeatable.")
@click.option("--note", metavar="TEXT", help='Replace the note; "" removes it.')
@click.option("--pin/--unpin", "is_pinned", default=None, help="Keep the run from being deleted, or no longer.")
@home_option
def tag(
    spec: str,
    name: str | None,
    add: Mapping[str, str],
    remove: Sequence[str],
    note: str | None,
    is_pinned: bool | None,
    home: Path,
) -> None:
    """Show or change the name, tags, note and pin of a run.

    NAME is the run's new name: every command takes it as RUN, as long as no other run has it. The id stays.
    """
    run = store.find_run(home, spec)
    if missing := [key for key in remove if key not in run.tags]:
        others = f"its tags are {', '.join(run.tags)}" if run.tags else "it has no tags"
        raise TidegaugeError(f"{run.run_id} has no tag {missing[0]!r}, so nothing was changed; {others}")
    edit = store.Edit(name=name, add=add, remove=frozenset(remove), note=note, is_pinned=is_pinned)
    if not edit.is_empty:
        store.annotate(run, edit)
    lines = {
        "run": run.run_id,
        "name": run.name,
        "tags": ", ".join(f"{key}={value}" for key, value in run.tags.items()),
        "note": run.annotation.note,
        "pinned": "yes" if run.annotation.is_pinned else "no",
    }
    for label, text in lines.items():
        click.echo(f"{label:<8}{one_line(text)}".rstrip())


@click.command()
@click.argument("spec", metavar="RUN")
@click.argument("kind", required=False)
@click.option("--reason", metavar="TEXT", help="Why the finding is accepted.")
@click.option("--stop", is_flag=True, help="Count the finding again.")
@home_option
def ignore(spec: str, kind: str | None, reason: str | None, stop: bool, home: Path) -> None:
    """Accept a finding for all runs of a command. Without KIND, list the accepted ones.

    It stays visible as information, with the reason, but leads no verdict and sends no alert. KIND is a kind of
    finding that RUN has.
    """
    from collector.report.known import change_known, command_of, known_findings

    run = store.find_run(home, spec)
    command = command_of(run.manifest)
    if kind is not None:
        if stop == bool(reason):
            raise TidegaugeError("give --reason TEXT to ignore the finding, or --stop to count it again")
        change_known(run, _identities(run, kind), reason)
    elif reason or stop:
        raise TidegaugeError("no KIND was given: name a finding of the run, such as workers-too-slow")
    rows = {one: why for (of, one), why in known_findings(run.home).items() if of == command}
    click.echo(one_line(f"known in runs of {command.text}:{'' if rows else ' nothing'}"))
    for one, why in sorted(rows.items()):
        click.echo(f"  {one_line(f'{one}: {why}')}")


def _identities(run: store.Run, kind: str) -> set[Identity]:
    """Return the identities of a run's findings of a kind, by its result or by a verdict made now."""
    from collector.report.listing import list_entry
    from collector.report.results import result_of

    result = list_entry(run).result
    if result is None:
        from collector.diagnosis import diagnose, load_tables

        tables = load_tables(run)
        result = result_of(tables, diagnose(tables))
    found = {finding.identity for finding in result.findings if finding.kind == kind}
    if not found:
        kinds = ", ".join(sorted({finding.kind for finding in result.findings})) or "none"
        raise TidegaugeError(f"{run.run_id} has no finding {kind!r}; it has: {kinds}")
    return found


@click.command()
@click.argument("spec", metavar="[RUN]", default="latest")
@click.option(
    "--to",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="A new or empty folder.",
)
@click.option(
    "--format", "form", default="parquet", show_default=True, metavar="parquet|csv", help="Format of the files."
)
@click.option("--redact", is_flag=True, help="Replace command lines, paths, host names and other texts.")
@home_option
def export(spec: str, directory: Path, form: str, redact: bool, home: Path) -> None:
    """Write a run as one file per stream. DuckDB, pandas and Polars read them."""
    from collector.report.listing import export_table
    from collector.report.terminal import Terminal

    run = store.find_run(home, spec)
    with Terminal(stderr=True).status("exporting") as status:
        result = store.export_run(
            run, directory, form, is_redacted=redact, say=lambda name: status.update(f"writing {name}")
        )
    for problem in result.problems[:5]:
        say(one_line(problem))
    show_table(export_table(result.files))
    click.echo(f"\n{one_line(run.run_id)} is in {directory}")
    if redact:
        click.echo("Its texts are replaced: read the files before you publish them.")


def _parse_size(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Parse bytes from `20GB` (powers of 1000), `20GiB` (powers of 1024) or a bare number."""
    if value is None:
        return None
    size_bytes = parse_size(value.strip())
    if size_bytes is None:
        raise click.BadParameter(f"{value!r} is not a size; write it like 20GB or 500MiB")
    return size_bytes


@click.command()
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep at most this many runs, the newest.")
@click.option(
    "--max-size", callback=_parse_size, metavar="SIZE", help="Keep at most this much of all runs, like 20GB."
)
@click.option(
    "--store", "of_store", is_flag=True, help="Delete from the shared store, for all nodes, not from this home."
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Delete without a question.")
@home_option
def prune(keep: int | None, max_size: int | None, of_store: bool, dry_run: bool, yes: bool, home: Path) -> None:
    """Delete the oldest runs, until --keep and --max-size are met.

    Runs that are still running, or that a collector or a reader uses, stay.
    """
    from collector.report.listing import prune_table
    from collector.store.prune import home as home_prune

    pruning: Any = home_prune
    if of_store:  # it needs packages of its own
        from collector.store.prune import cluster as pruning
    if keep is None and max_size is None:
        raise TidegaugeError("no limit was given: give --keep N, --max-size SIZE, or both")
    stored = pruning.stored_runs(home)
    candidates = home_prune.runs_beyond(stored, keep=keep, max_bytes=max_size)
    to_delete = [stored_run for stored_run in candidates if not stored_run.keep_reason]
    unfinished = len(pruning.leftovers(home))
    if candidates:
        show_table(prune_table(candidates))
        click.echo()
    click.echo(f"to delete: {_size_text(to_delete, unfinished)} (of {_size_text(stored, 0)})")
    if dry_run or not (to_delete or unfinished):
        return
    if to_delete and not yes:
        if not sys.stdin.isatty():
            raise TidegaugeError("nothing was deleted, because no terminal can confirm it: give --yes")
        click.confirm("delete?", abort=True)
    staying = pruning.delete(home, [stored_run.run for stored_run in to_delete])
    for run, reason in staying.items():
        say(one_line(f"{run.run_id} stays: {reason}"))
    deleted = [stored_run for stored_run in to_delete if stored_run.run not in staying]
    click.echo(f"deleted: {_size_text(deleted, unfinished)}")


def _size_text(stored: Sequence[StoredRun], unfinished: int) -> str:
    """Return number and size of runs, `3 runs, 1.2 GiB`, and the rests of others from an interrupted prune."""
    runs = counted(len(stored), "run")
    words = f"{runs}, {size(sum(run.size_bytes for run in stored))}"
    return f"{words}, and the rest of {unfinished} whose deletion was interrupted" if unfinished else words
