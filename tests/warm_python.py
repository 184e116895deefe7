"""Python that has imported torch already: a script begins as a fork of it, three seconds of CPU sooner.

The fork is to its script what a new interpreter would be: environment, directory, streams, arguments, `sys.path`,
`sitecustomize` and the end of the process are its own. The hooks are installed when the script begins, as
`attach()` does, and not while torch is imported: a test of the start itself needs a new interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType

_REPOSITORY = Path(__file__).resolve().parents[1]
_MESSAGE_BYTES = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
#: The program of the server; in a fork it goes on with the script, in the same `__main__`.
_BEGIN = "from tests.warm_python import serve; exec(serve())"
#: Modules that a training imports, the last two with its first optimizer.
_MODULES = ("torch", "torch.utils.data", "torch._dynamo", "torch.profiler._cupti_monitor")


class WarmPython:
    """A Python with torch imported, which runs one script after the other; it starts with the first."""

    def __init__(self, python: str) -> None:
        self._command = [python, "-P", "-c", _BEGIN]
        self._server: socket.socket | None = None

    def run(
        self, script: Path | str, *arguments: str, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, or `-m` and a module, to its end; return its output and exit status."""
        words = [str(script), *arguments]
        server = self._connect()
        server.settimeout(timeout)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            pid = self._ask(words, env, output.fileno(), errors.fileno())
            try:
                status = int(server.recv(_MESSAGE_BYTES))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                server.settimeout(None)
                server.recv(_MESSAGE_BYTES)
                raise subprocess.TimeoutExpired(words, timeout) from None
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(words, status, output.read(), errors.read())

    def begin(
        self, *words: str, env: Mapping[str, str], outputs: Sequence[int] = (1, 2), process_group: int | None = None
    ) -> WarmChild:
        """Begin a script, or `-m` and a module, as a child of this process; by default its output is this one's."""
        server = self._connect()
        server.settimeout(None)
        _inherit_orphans(True)
        try:
            child = WarmChild(self._ask([*words], env, *outputs, is_child=True, process_group=process_group))
            server.recv(_MESSAGE_BYTES)  # the process between has ended
        finally:
            _inherit_orphans(False)
        return child

    def _ask(
        self,
        words: list[str],
        env: Mapping[str, str],
        *streams: int,
        is_child: bool = False,
        process_group: int | None = None,
    ) -> int:
        """Ask for a script; return its pid."""
        request = {"words": words, "env": dict(env), "folder": os.getcwd(), "process_group": process_group}
        server = self._connect()
        socket.send_fds(server, [json.dumps([is_child, request]).encode()], streams)
        return int(server.recv(_MESSAGE_BYTES))

    def _connect(self) -> socket.socket:
        if self._server is None:
            self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGAUGE")}
            with theirs:
                process = subprocess.Popen(
                    self._command, stdin=theirs, cwd="/", env=environ | {"PYTHONPATH": str(_REPOSITORY)}
                )
            atexit.register(process.wait)
            atexit.register(self._server.close)  # called first; it ends the server
        return self._server


class WarmChild:
    """A script that has begun, as much of `subprocess.Popen` as its collector needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None before the end."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; return the exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout if timeout is not None else None
        while deadline is not None and self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal unless the script has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, options))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


def _inherit_orphans(inherits: bool) -> None:
    """Set whether this process is the next parent of processes below it whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(inherits), 0, 0, 0)


def serve() -> CodeType:
    """Import torch, then fork for each script; return, in the fork, the code of the script."""
    for name in _MODULES:
        with suppress(ImportError):  # versions differ
            importlib.import_module(name)
    sys.path.remove(str(_REPOSITORY))
    gc.collect()
    gc.freeze()  # forks share what is imported to their end
    with socket.socket(fileno=os.dup(0)) as tests:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        while True:
            message, descriptors, *_ = socket.recv_fds(tests, _MESSAGE_BYTES, 2)
            if not message:
                sys.exit()
            is_child, request = json.loads(message)
            pid = os.fork()
            if pid == 0 and is_child and (pid := os.fork()):  # its parent ends, so the tests' process is its next
                tests.send(str(pid).encode())
                os._exit(0)
            if pid == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
            if not is_child:
                tests.send(str(pid).encode())
            tests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    for place, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    return _begin(**request)


def _begin(words: list[str], env: dict[str, str], folder: str, process_group: int | None) -> CodeType:
    if process_group is not None:
        os.setpgid(0, process_group)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv[:] = [sys.executable, *words]
    python_path, is_safe = env.get("PYTHONPATH", ""), words[0] == "-P"
    words = words[is_safe:]
    script, is_module = words[0], words[0] == "-m"
    first = [] if is_safe else [folder if is_module else str(Path(script).parent)]
    sys.path[:0] = [*first, *(python_path.split(os.pathsep) if python_path else ())]
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if env.get("TIDEGAUGE_RUN_DIR") and env.get("TIDEGAUGE_DISABLED") != "1":
        installation = importlib.import_module("training_harness.installation")
        for name in sorted(installation.TRIGGERS & sys.modules.keys()):
            installation.on_import(name)
    main = vars(sys.modules["__main__"])
    del main["serve"]
    sys.argv[:] = words[is_module:]
    if is_module:
        return compile(f"import runpy; runpy._run_module_as_main({words[1]!r})", "<string>", "exec")
    main["__file__"] = script
    return compile(Path(script).read_bytes(), script, "exec")
