"""The magic `%tidegauge` of IPython, and the dashboard that it serves."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from html import escape
from typing import Any
from urllib.parse import urlencode

from tidegauge.process import TidegaugeError, messages, start
from tidegauge.runs import open_run

_USAGE = "%tidegauge report [RUN] | %tidegauge dashboard [RUN]"


def add_magic(shell: Any) -> None:
    """Add the magic `%tidegauge` to IPython's shell."""
    dashboard = _Dashboard()
    atexit.register(dashboard.close)

    def answer(line: str) -> Any:
        match line.split():
            case ["report" | "dashboard", option] if option.startswith("-"):
                raise TidegaugeError(f"{option} is no run, and there are no options here; {_USAGE}")
            case ["report", *run] if len(run) <= 1:
                return open_run(*run).report()
            case ["dashboard", *run] if len(run) <= 1:
                return _Link(dashboard.address(), open_run(*run).run_id if run else None)
            case _:
                raise TidegaugeError(f"{line!r} is not known; {_USAGE}")

    def magic(line: str) -> Any:
        try:
            return answer(line)
        except TidegaugeError as error:
            print(f"tidegauge: {error}", file=sys.stderr)  # noqa: T201
            return None

    magic.__doc__ = f"Show the report on a run, or serve the dashboard: {_USAGE}"
    shell.register_magic_function(magic, magic_kind="line", magic_name="tidegauge")


class _Link:
    """A link to the dashboard; plain text where no HTML is shown."""

    def __init__(self, address: str, run_id: str | None) -> None:
        self._address = address if run_id is None else f"{address}/?{urlencode({'run': run_id})}"

    def __repr__(self) -> str:
        return self._address

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self._address)}" target="_blank" rel="noopener">{escape(self._address)}</a>'


class _Dashboard:
    """The dashboard of the home, served from the first question for its address until this process ends."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._address = ""

    def address(self) -> str:
        """Return the address of the dashboard, once it answers.

        Raises:
            TidegaugeError: it does not start.
        """
        if self._server is not None and self._server.poll() is None:
            return self._address
        with tempfile.TemporaryFile() as errors:
            self._server = start("dashboard", answer=subprocess.PIPE, errors=errors)
            assert self._server.stdout is not None
            line = self._server.stdout.readline()
            if not line:
                self.close()
                errors.seek(0)
                raise TidegaugeError((messages(errors.read()) or ["the dashboard does not start"])[-1])
        self._address = str(json.loads(line))
        return self._address

    def close(self) -> None:
        """End the server, which waits for the end of its input."""
        if self._server is not None:
            self._server.communicate()
            self._server = None
