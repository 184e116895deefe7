"""The ingest in a process of its own, so that the memory of DuckDB and PyArrow is not the collector's.

The process begins at the first request. A run's own lake needs it for a moment every few minutes, so it ends after
each ingest; that of a store on the network stays. Requests and answers are lines of JSON in pipes. It ends, too,
when the collector does. The last ingest of a run's own lake takes place in the collector's process: the verdict,
which is next, needs DuckDB and PyArrow there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import collector
from collector.agent.samplers import procfs
from collector.errors import TidegaugeError, last_line
from collector.store import Counts, IngestResult, Run, Totals, follow_run

if TYPE_CHECKING:
    from collector.store import Ingester

#: Starts a process that imports from the folders of this one, in which those of the user's PYTHONPATH come last.
_COMMAND = """
import os, sys
sys.path[:] = sys.argv[1].split(os.pathsep)
from collector.agent.ingest_process import main
main()
"""
_NICENESS = 10
#: Makes the kernel kill this process, not the training, if memory runs out (Documentation/filesystems/proc.rst).
_OOM_SCORE_ADJ = "1000"
_ROOT = Path(collector.__file__).resolve().parent.parent


class IngestProcess:
    """An `Ingester` in another process; this one holds the run's lock.

    Attributes:
        spent_ns: CPU time of its processes so far.

    Raises:
        TidegaugeError: another collector follows the run.
    """

    def __init__(self, run: Run, counts: Counts | None = None) -> None:
        self.spent_ns = 0
        self._run = run
        self._counts = counts
        self._child: subprocess.Popen[bytes] | None = None
        self._last_words = ""
        self._child_ns = 0
        self._is_here = False
        self._ingester: Ingester | None = None
        self._lock = follow_run(run)

    def open(self) -> None:
        """Open the lake.

        Raises:
            TidegaugeError: it cannot be opened.
        """
        self._ask("open")

    def step(self) -> IngestResult:
        """Move all whole records beyond the stored offsets into the lake."""
        answer = self._ask("step")
        return IngestResult(**{**answer, "problems": tuple(answer["problems"])})

    def maintain(self) -> tuple[str, ...]:
        """Merge small files and delete those that no snapshot needs; return the problems."""
        return tuple(self._ask("maintain"))

    def close(self) -> tuple[str, ...]:
        """Maintain a last time, close the lake and release the lock; return the problems."""
        try:
            return tuple(self._ask("close"))
        finally:
            self.rest()
            os.close(self._lock)

    def rest(self) -> None:
        """End the process until the next request."""
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            return
        with suppress(OSError):
            self._child.stdin.close()
        self._child.stdout.close()
        assert self._child.stderr is not None
        self._last_words = last_line(self._child.stderr.read().decode(errors="replace")) or "it said nothing"
        self._child.stderr.close()
        self._child.wait()
        self._child = None

    def move_here(self) -> None:
        """Ingest in this process from now on."""
        self.rest()
        self._is_here = True

    def kill(self) -> None:
        """End the process at once: its store does not answer."""
        if (child := self._child) is not None:
            child.kill()

    @property
    def anon_bytes(self) -> int:
        """Anonymous memory of the process; 0 while there is none."""
        child = self._child
        return (
            procfs.anon_bytes(procfs.PROC, child.pid) or 0 if child is not None and child.returncode is None else 0
        )

    def _ask(self, request: str) -> Any:
        if self._is_here:
            self._ingester = self._ingester or _open(self._run, self._lock, self._counts)
            return _perform(self._ingester, request)
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, request)
            while line := child.stdout.readline():
                answer = json.loads(line)
                self.spent_ns += answer["cpu_ns"] - self._child_ns
                self._child_ns = answer["cpu_ns"]
                if "error" in answer:
                    raise TidegaugeError(answer["error"])
                if "result" in answer:
                    return answer["result"]
                if self._counts is not None:
                    _update(self._counts, answer)
                _send(child.stdin, "go on")
        except OSError:
            pass  # the process has ended
        except Exception:
            self.rest()
            raise
        self.rest()
        raise RuntimeError(f"the ingest ended with status {child.returncode}: {self._last_words}")

    def _start(self) -> subprocess.Popen[bytes]:
        words = [str(self._run.path), str(self._lock)]
        if self._counts is not None:
            words.append("begun" if self._counts.has_begun else "new")
        self._child_ns = 0
        # Its own session, since Ctrl-C is for the command alone. NumPy's threads would cost memory.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, os.pathsep.join([str(_ROOT), *sys.path]), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self._lock],
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        stand_back(self._child.pid)
        return self._child


def stand_back(pid: int) -> None:
    """Let the training go before a process of the collector."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        Path(f"/proc/{pid}/oom_score_adj").write_text(_OOM_SCORE_ADJ)


def _update(counts: Counts, answer: Mapping[str, Any]) -> None:
    if "begin" in answer:
        sums, allocator = answer["begin"]
        totals = Totals({tuple(key): value for key, value in sums}, {tuple(key): value for key, value in allocator})
        counts.begin(totals, answer["offsets"])
    else:
        counts.catch_up()


def _send(pipe: IO[bytes], message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _open(run: Run, lock: int, counts: Counts | _CountsOfParent | None) -> Ingester:
    """Open the lake of a run whose lock is held.

    Raises:
        TidegaugeError: it cannot be opened.
    """
    from collector.store import Ingester

    return Ingester(run, counts=counts, lock=os.dup(lock))


def _perform(ingester: Ingester, request: str) -> Any:
    """Return the result of a request; that of an ingest is a dictionary."""
    match request:
        case "step":
            return asdict(ingester.step())
        case "maintain":
            return ingester.maintain()
        case "close":
            return ingester.close()
    return None


class _CountsOfParent:
    """The totals in the process that asks."""

    def __init__(self, *, has_begun: bool) -> None:
        self.has_begun = has_begun

    def begin(self, totals: Totals, offsets: Mapping[str, int]) -> None:
        """Hand over the totals of the lake."""
        pairs = [[[list(key), value] for key, value in each.items()] for each in (totals.sums, totals.allocator)]
        _answer(begin=pairs, offsets=offsets)
        sys.stdin.readline()
        self.has_begun = True

    def catch_up(self) -> None:
        """Wait until the journals are counted."""
        _answer(catch_up=True)
        sys.stdin.readline()


def _answer(**fields: object) -> None:
    _send(sys.stdout.buffer, {**fields, "cpu_ns": time.process_time_ns()})


class _WithoutPandas(MetaPathFinder):
    """Makes pandas missing: PyArrow would import it, in half a second, to ask whether a list is a table of it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise an error for pandas; leave all else to the other finders."""
        if fullname == "pandas":
            raise ModuleNotFoundError(f"no {fullname} here", name=fullname)


def main() -> None:
    """Answer requests until their pipe is closed."""
    sys.meta_path.insert(0, _WithoutPandas())
    path, lock, *counts = sys.argv[2:]
    ingester: Ingester | None = None
    while request := sys.stdin.readline():
        try:
            if ingester is None:
                totals = _CountsOfParent(has_begun=counts == ["begun"]) if counts else None
                ingester = _open(Run(Path(path)), int(lock), totals)
            _answer(result=_perform(ingester, json.loads(request)))
        except TidegaugeError as error:
            _answer(error=str(error))
    os._exit(0)  # The interpreter's own end takes 50 ms, and nothing is left to do.
