"""`tidegauge dashboard`, and the same server next to another command."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

import collector
from collector import store
from collector.commands.options import home_option, port_option, say
from collector.errors import TidegaugeError
from training_harness.layout import HOME_VARIABLE, home_path

if TYPE_CHECKING:
    from collector.diagnosis import Verdict

#: Seconds that the server may take to answer, and to end.
_START_SECONDS, _END_SECONDS = 60.0, 10.0
_POLL_SECONDS = 0.1


@click.command()
@port_option
@home_option
def dashboard(port: int, home: Path) -> None:
    """Serve the dashboard until Ctrl-C."""
    command, environment = _server(home, port)
    click.echo(f"dashboard of {home} on {address(port)}, Ctrl-C ends it", err=True)
    os.execve(command[0], command, environment)


def address(port: int) -> str:
    """Return the address of the dashboard's first page."""
    return f"http://localhost:{port}"


def show_way(verdicts: Sequence[tuple[store.Run, Verdict]], home: Path, port: int, *, is_served: bool) -> None:
    """Print what to click first: the first of these runs that asks for action, else the first one."""
    from collector.report.card import command_for
    from collector.report.signpost import gravest, look_first

    run, verdict = next((each for each in verdicts if gravest(each[1])), verdicts[0])
    command = "" if is_served else command_for(home, home_path(), "dashboard")
    if is_served:
        say("Ctrl-C ends the dashboard")
    click.echo(look_first(verdict, run.run_id, address(port), command=command), err=True)


class DashboardServer:
    """The dashboard of a home, served by a child process until the block ends.

    The child stays in the process group, so that Ctrl-C and a terminal that closes end it too.

    Raises:
        TidegaugeError: the dashboard is not installed, or the port cannot be used.
    """

    def __init__(self, home: Path, port: int) -> None:
        self.address = address(port)
        self._port = port
        self._command, self._environment = _server(home, port)

    def __enter__(self) -> DashboardServer:
        # The block's end ends the child, unlike a signal.
        self._before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        quiet = subprocess.DEVNULL
        self._child = subprocess.Popen(
            self._command, env=self._environment, stdin=quiet, stdout=quiet, stderr=quiet
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._child.terminate()
        try:
            self._child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def await_ready(self) -> None:
        """Wait until the server answers, and print its address.

        Raises:
            TidegaugeError: it has ended, or does not answer.
        """
        import http.client

        deadline = time.monotonic() + _START_SECONDS
        while self._child.poll() is None and time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("localhost", self._port, timeout=1)
                connection.request("GET", "/_stcore/health")
                if connection.getresponse().status == http.client.OK:
                    say(f"the dashboard is on {self.address}")
                    return
            time.sleep(_POLL_SECONDS)
        raise TidegaugeError(f"the dashboard does not start; `tidegauge dashboard --port {self._port}` shows why")

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        with suppress(KeyboardInterrupt):
            self._child.wait()


def _server(home: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves a home, and its environment.

    Raises:
        TidegaugeError: the dashboard is not installed, or the port cannot be used.
    """
    app = Path(collector.__file__).parent.parent / "app"
    if importlib.util.find_spec("streamlit") is None or not app.is_dir():
        raise TidegaugeError("the dashboard is not installed; install it with: pip install 'tidegauge[app]'")
    _check_port(port)
    # The user's PYTHONPATH may contain another package `collector` or `app`.
    path = os.pathsep.join(filter(None, [str(app.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    return command, {**os.environ, HOME_VARIABLE: str(home.absolute()), "PYTHONPATH": path}


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # A port just closed is free.
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise TidegaugeError(
                f"port {port} cannot be used ({error.strerror}): give another with --port"
            ) from None
