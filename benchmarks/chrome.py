"""Windows of Chromium as a user has them, without the extras of a test driver.

Playwright enables the inspector's runtime in every page. V8 then looks up where in the source each error was
made, and reads the whole script again for that (`V8.CollectSourcePositions` in a trace): four times while
Plotly's script is evaluated, which takes twice as long then. This module only opens a window and evaluates
expressions, by the DevTools protocol (https://chromedevtools.github.io).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

START_SECONDS = 30
ANSWER_SECONDS = 120


class Chrome:
    """A running Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._asked = 0

    def window(self, address: str) -> Window:
        """A new window that has begun to load an address."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.navigate", session, url=address)
        return Window(self, target, session)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer of a method of the protocol.

        Raises:
            RuntimeError: it failed.
            TimeoutError: there was no answer in ANSWER_SECONDS.
        """
        self._asked += 1
        of_session = {} if session is None else {"sessionId": session}
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters, **of_session}))
        while True:
            told = json.loads(self._socket.recv(timeout=ANSWER_SECONDS))
            if told.get("id") == self._asked:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                answer: dict[str, Any] = told["result"]
                return answer


class Window:
    """One window of it."""

    def __init__(self, chrome: Chrome, target: str, session: str) -> None:
        self._chrome, self._target, self._session = chrome, target, session

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited.

        Raises:
            RuntimeError: it threw.
        """
        told = self._chrome.ask(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"].get("description", script))
        return told["result"].get("value")

    def until(self, test: str) -> float:
        """Return when an expression became true and was painted, in seconds since the page was asked for."""
        script = f"""new Promise(done => {{
            const painted = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1e3)));
            const look = () => {test} ? painted() : requestAnimationFrame(look);
            look();
        }})"""
        return float(self.evaluate(script))

    def close(self) -> None:
        self._chrome.ask("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def started(executable: str, profile: Path, arguments: Sequence[str]) -> Iterator[Chrome]:
    """A Chromium that keeps in `profile` what it has loaded and compiled.

    Raises:
        TimeoutError: it did not start.
    """
    written = profile / "DevToolsActivePort"
    written.unlink(missing_ok=True)  # of one that was killed
    words = [executable, *arguments, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_address(written), max_size=None) as socket:
                yield Chrome(socket)
        finally:
            process.terminate()  # so that it ends its children, which write into the profile


def _address(written: Path) -> str:
    """Return the address that Chromium listens at, which it writes to a file."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            port, path = written.read_text().split()
            return f"ws://localhost:{port}{path}"
        time.sleep(0.05)
    raise TimeoutError(f"Chromium did not start within {START_SECONDS} s")
