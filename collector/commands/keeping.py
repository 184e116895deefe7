"""Commands about what is kept: export."""

from __future__ import annotations

from pathlib import Path

import click

from collector.commands.options import home_option, show_table


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
@click.option("--format", "form", default="parquet", show_default=True, metavar="parquet|csv", help="Of the files.")
@home_option
def export(spec: str, directory: Path, form: str, home: Path) -> None:
    """Write a run as one file per stream, for pandas, Polars, DuckDB and their like."""
    from rich.console import Console

    from collector.listing import export_table
    from collector.store.export import export as export_run
    from collector.store.runs import find_run

    found = find_run(home, spec)
    with Console(stderr=True).status("exporting") as status:
        done = export_run(found, directory, form, say=lambda name: status.update(f"writing {name}"))
    for problem in done.problems[:5]:
        click.echo(f"tidegauge: {problem}", err=True)
    show_table(export_table(done.files))
    click.echo(f"\n{found.run_id} is in {directory}")
