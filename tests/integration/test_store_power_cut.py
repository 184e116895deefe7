"""State after a power cut: the order in which the kernel is asked to bring the store's files to the disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INGEST = """
import os, sys
from pathlib import Path
from store_helpers import HOST, Writer, make_run
from collector.store.lake.ingest import Ingester
run = make_run(Path(sys.argv[1]))
writer = Writer(run, os.getpid(), host=HOST)
with Ingester(run) as ingester:
    for _ in range(3):
        writer.write(500)
        assert ingester.step().problems == ()
    assert ingester.maintain() == ()
"""
OPENED = re.compile(r'openat\([^"]*"(?P<path>[^"]+)", [^)]*O_CREAT')
SYNCED = re.compile(r"(?:fsync|fdatasync)\(\d+<(?P<path>[^>]+)>\) += 0")
DELETED = re.compile(r'unlink(?:at)?\([^"]*"(?P<path>[^"]+)".* = 0')


@pytest.fixture
def calls(tmp_path) -> list[str]:
    """The file system calls of an ingest of several commits, with merges and deletions, in their order."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    done = subprocess.run(
        ["strace", "-f", "-y", "-s", "512", "-o", trace, "-e", "trace=openat,fsync,fdatasync,unlink,unlinkat",
         sys.executable, "-c", INGEST, tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return trace.read_text().splitlines()


def test_files_are_synced_before_they_are_named_or_replace_others(calls):
    data: set[str] = set()  # files, and the directories that got an entry, that a power cut would take
    uncommitted: set[str] = set()  # files that no catalog on the disk names yet
    journals = lake_files = 0
    for call in calls:
        if (opened := OPENED.search(call)) and opened["path"].endswith(".parquet"):
            path = Path(opened["path"])
            data |= {str(path), *(str(folder) for folder in path.parents[:5])}
            uncommitted.add(str(path))
        elif synced := SYNCED.search(call):
            data.discard(synced["path"])
            if re.search(r"/lake\.sqlite(-wal)?$", synced["path"]):
                assert data == set(), "the catalog must not be on the disk before the files that it names"
                uncommitted.clear()
        elif (deleted := DELETED.search(call)) and deleted["path"].endswith((".journal", ".parquet")):
            assert uncommitted == set(), (
                f"{deleted['path']} is deleted before its records are in the lake on the disk"
            )
            journals += deleted["path"].endswith(".journal")
            lake_files += deleted["path"].endswith(".parquet")
    assert journals > 3
    assert lake_files > 3
