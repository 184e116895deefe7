"""Questions to a process of Tidegauge.

Reading a run takes DuckDB and the packages `collector` and `app`. A project may have packages of these names, and a
training should not share its memory and its threads with a database. So another process reads, and this one gets
the answer in a file without a name, which it maps into memory.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, Any

from training_harness.command import missing_packages
from training_harness.layout import DISABLED_VARIABLE

_PREFIX = "tidegauge: "


class TidegaugeError(Exception):
    """The message names what is wrong, and the remedy."""


def start(
    question: str,
    home: str | os.PathLike[str] | None = None,
    details: Mapping[str, object] = MappingProxyType({}),
    *,
    answer: IO[bytes] | int,
    errors: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """Start a process that answers a question of `tidegauge api`. Ctrl-C here does not reach it.

    Raises:
        TidegaugeError: Tidegauge's packages are not installed.
    """
    if missing := missing_packages():
        raise TidegaugeError(f"reading runs needs {', '.join(missing)}: pip install 'tidegauge[collector]'")
    own_home = [] if home is None else ["--home", os.fspath(home)]
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "training_harness.command"),
            *("api", question, json.dumps(dict(details)), *own_home),
        ],
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=errors,
        env={**os.environ, DISABLED_VARIABLE: "1"},
        start_new_session=True,
    )


def messages(errors: bytes) -> list[str]:
    """Return the messages in what a process of Tidegauge wrote on stderr."""
    lines = errors.decode(errors="replace").splitlines()
    return [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]


def ask_json(question: str, home: str | os.PathLike[str] | None = None, **details: object) -> Any:
    """Return the answer to a question, from its JSON.

    Raises:
        TidegaugeError: there is no answer.
    """
    return json.loads(ask(question, home, **details)[:])


def ask(question: str, home: str | os.PathLike[str] | None = None, **details: object) -> mmap.mmap:
    """Return the answer to a question of `tidegauge api`, mapped into memory.

    Raises:
        TidegaugeError: there is no answer.
    """
    with tempfile.TemporaryFile() as answer:
        child = start(question, home, details, answer=answer, errors=subprocess.PIPE)
        try:
            _, errors = child.communicate()
        finally:
            child.kill()  # after Ctrl-C; it has ended otherwise
        problems = messages(errors)
        if child.returncode:
            raise TidegaugeError(problems[-1] if problems else f"no answer, status {child.returncode}")
        for problem in problems:
            warnings.warn(problem, stacklevel=4)
        return mmap.mmap(answer.fileno(), 0, access=mmap.ACCESS_READ)
