"""The card that `attach()` shows in a notebook: how the run goes on.

The collector writes the card to a file. Jupyter's kernel has a thread that sends the output of cells, and this
thread looks at the file each second. So nothing runs in the thread that trains, and no thread is added.
"""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_harness import command, layout

#: Seconds between two looks at the file.
EVERY_SECONDS = 1.0
#: Environment variable in which a Jupyter server gives its kernels the path of the notebook.
_NOTEBOOK_VARIABLE = "JPY_SESSION_NAME"

_newest: Card | None = None


def find_shell() -> Any | None:
    """Return IPython's shell in a Jupyter kernel; None elsewhere, and where a cell captures its output."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    has_thread = hasattr(getattr(shell, "kernel", None), "iopub_thread")
    return shell if has_thread and hasattr(getattr(shell, "display_pub", None), "pub_socket") else None


def notebook_name() -> str:
    """Return the name of the notebook, empty if it is not known."""
    return Path(os.environ.get(_NOTEBOOK_VARIABLE, "")).stem


def show_card(shell: Any, run_dir: Path, collector: subprocess.Popen[bytes] | None) -> None:
    """Show the card of a run below the cell that runs; this one is updated then, and no earlier one. Never raises.

    Args:
        shell: IPython's shell.
        run_dir: the run.
        collector: its collector, if this call of `attach()` started it.
    """
    global _newest
    try:
        if collector is None and _newest is not None and _newest.run_dir == run_dir:
            collector = _newest.collector
        _newest = Card(shell, run_dir, collector)
        _newest.show()
    except Exception:
        pass


class Card:
    """A card in the output of a cell."""

    def __init__(self, shell: Any, run_dir: Path, collector: subprocess.Popen[bytes] | None) -> None:
        self.run_dir = run_dir
        self.collector = collector
        self._loop = shell.kernel.iopub_thread.io_loop
        self._publisher = shell.display_pub  # a later cell may capture its output, and not this
        self._display_id = os.urandom(16).hex()
        self._shown = ""

    def show(self) -> None:
        """Show what is known now, and begin to update it."""
        self._publish(self._read() or f"<p>{self._first_words()}</p>", update=False)
        if self.collector is not None:
            # In an empty context: an update then belongs to the cell that runs when it is sent.
            contextvars.Context().run(self._loop.add_callback, self._look)

    def _look(self) -> None:
        """Update the card if it has changed, until the collector has ended."""
        try:
            if self.collector is None or _newest is not self:
                return
            status = self.collector.poll()  # before reading: it writes the last card before it ends
            html = self._read()
            if status:
                log = self.run_dir / "collector.log"
                html = f"<p>tidegauge: the collector ended with status {status}; {log} says why</p>"
            if html and html != self._shown:
                self._publish(html, update=True)
            if status is None:
                self._loop.call_later(EVERY_SECONDS, self._look)
        except Exception:
            pass

    def _read(self) -> str:
        try:
            return (self.run_dir / layout.CARD).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _first_words(self) -> str:
        run_id = f"<code>{self.run_dir.name}</code>"
        if command.missing_packages():
            return f"Tidegauge records run {run_id}. To read it: pip install 'tidegauge[collector]'"
        if self.collector is None:
            return f"Tidegauge records run {run_id}. <code>%tidegauge report</code> shows the verdict."
        return f"Tidegauge records run {run_id}. The first figures come in a few seconds."

    def _publish(self, html: str, *, update: bool) -> None:
        self._shown = html
        plain = f"Tidegauge records run {self.run_dir.name}"
        self._publisher.publish(
            data={"text/html": html, "text/plain": plain},
            metadata={},
            transient={"display_id": self._display_id},
            update=update,
        )
