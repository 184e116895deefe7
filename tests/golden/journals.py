"""Runs kept as their journals, without the lake that the collector made of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

#: Files of the lake in a run directory.
LAKE = ("lake.sqlite", "lake.sqlite-wal", "lake.sqlite-shm", "data")
#: Names that an archive omits: scratch files of the store, its locks, and a verdict of another day.
LEFT_OUT = ("-shm", ".lock", "/result.json")


@contextlib.contextmanager
def linked_journals(home: Path, links: Path) -> Iterator[None]:
    """Hold a second name of each run's journal files, because the collector deletes what it has ingested."""
    links.mkdir()
    ended = threading.Event()

    def link() -> None:
        while not ended.wait(0.05):
            for path in home.glob("runs/*/journal/*.journal"):
                of_run = links / path.parent.parent.name
                of_run.mkdir(exist_ok=True)
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(path, of_run / path.name)

    linker = threading.Thread(target=link)
    linker.start()
    try:
        yield
    finally:
        ended.set()
        linker.join()


def keep_journals_alone(run: Path, links: Path) -> None:
    """Take the lake away and give the run its journals back."""
    for name in LAKE:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.rmtree(run / "journal")
    links.rename(run / "journal")
