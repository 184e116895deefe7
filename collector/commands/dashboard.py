"""`tidegauge dashboard`."""

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
@click.option("--port", type=click.IntRange(1, 65535), default=8501, show_default=True, help="Port to serve on.")
@home_option
def dashboard(port: int, home: Path) -> None:
    """Serve the dashboard until Ctrl-C."""
    app = Path(collector.__file__).parent.parent / "app"
    if importlib.util.find_spec("streamlit") is None or not app.is_dir():
        raise TidegaugeError("the dashboard is not installed; install it with: pip install 'tidegauge[app]'")
    _check_port(port)
    os.environ[HOME_VARIABLE] = str(home.absolute())
    # The user's PYTHONPATH may contain another package `collector` or `app`.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(app.parent), os.environ.get("PYTHONPATH")]))
    arguments = ["-P", "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    click.echo(f"dashboard of {home} on http://localhost:{port}, Ctrl-C ends it", err=True)
    os.execv(sys.executable, [sys.executable, *arguments])


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # A port just closed is free.
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise TidegaugeError(
                f"port {port} cannot be used ({error.strerror}): give another with --port"
            ) from None
