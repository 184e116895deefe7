"""An ingester that is killed at random moments while records arrive."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

from store_world import HOST, Writer, in_the_lake, journalled, make_run, on_disk, seen

from collector.store.ingest import Ingester
from collector.store.reader import read

KILLS = 20
ZYGOTE = """
import os, sys
from pathlib import Path
from collector.store.ingest import Ingester
from collector.store.runs import Run
run = Run(Path(sys.argv[1]))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        ingester = Ingester(run, chunk_records=400)
        while True:
            for _ in range(4):
                ingester.step()
            ingester.maintain()
    print(child, flush=True)
    os.waitpid(child, 0)
"""


def test_sigkill_at_any_moment_loses_and_doubles_nothing(tmp_path):
    run = make_run(tmp_path)
    writers = [Writer(run, pid, host=HOST) for pid in (1, os.getppid(), os.getpid())]
    finished = threading.Event()

    def keep_writing():
        while not finished.wait(0.01):
            for writer in writers:
                writer.write(5)

    def start_ingester():
        zygote.stdin.write("go\n")
        zygote.stdin.flush()
        return int(zygote.stdout.readline())

    chance = random.Random(7)
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        begun = time.monotonic()
        child = start_ingester()
        while not run.catalog_path.exists() or not in_the_lake(run):
            finished.wait(0.02)
        start_seconds = time.monotonic() - begun
        os.kill(child, signal.SIGKILL)
        for _ in range(KILLS):
            child = start_ingester()
            finished.wait(chance.uniform(0, 1.5 * start_seconds))
            os.kill(child, signal.SIGKILL)
    finally:
        finished.set()
        thread.join()
        zygote.stdin.close()
        assert zygote.wait() == 0
        zygote.stdout.close()
    before = in_the_lake(run)
    assert seen(run) == journalled(run)
    with Ingester(run) as ingester:
        result = ingester.step()
    total = sum(writer.written for writer in writers)
    assert 0 < before < total, "the kills came too early or too late to prove anything"
    assert (result.problems, in_the_lake(run)) == ((), total)
    assert len(on_disk(run)) == 2 * len(writers), "all but the open segments are deleted"
    assert seen(run) == journalled(run)
    with read(run) as snapshot:
        events = snapshot.query("SELECT pid, body, count(*) AS n FROM event GROUP BY ALL")
    assert set(events["n"]) == {1}
    assert len(events) == sum((writer.written + 99) // 100 for writer in writers)
