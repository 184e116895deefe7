"""Commands about Tidegauge itself: dashboard, doctor."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

import click

import collector
from collector.commands.options import home_option
from collector.errors import TidegaugeError
from training_harness.layout import HOME_VARIABLE


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=8501, show_default=True, help="To serve on.")
@home_option
def dashboard(port: int, home: Path) -> None:
    """Serve the dashboard until Ctrl-C."""
    app = Path(collector.__file__).parent.parent / "app"
    if importlib.util.find_spec("streamlit") is None or not app.is_dir():
        raise TidegaugeError("the dashboard is not installed; install it with: pip install 'tidegauge[app]'")
    _refuse_taken(port)
    os.environ[HOME_VARIABLE] = str(home.absolute())
    # The user's own PYTHONPATH may hold another package `collector` or `app`.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(app.parent), os.environ.get("PYTHONPATH")]))
    words = ["-P", "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    click.echo(f"dashboard of {home} on http://localhost:{port}, Ctrl-C ends it", err=True)
    os.execv(sys.executable, [sys.executable, *words])


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just closed is free
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise TidegaugeError(f"port {port} cannot be had ({error.strerror}): give --port another") from None


@click.command()
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, executable=True),
    default=sys.executable,
    help="The Python of your training, with its torch; this one by default.",
)
@home_option
def doctor(python: str, home: Path) -> None:
    """Tell what works here and what does not, each with the remedy."""
    from collector.doctor import check_all, checks_table
    from collector.terminal import Terminal

    Terminal().print(checks_table(check_all(home, python)))
