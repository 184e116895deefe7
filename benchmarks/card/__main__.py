"""Measure on a GPU what simulated devices cannot show, and judge the runs recorded there.

    benchmarks/gpu.sh FOLDER [--parts PART …] [--names WORD …] [--minutes N] [--side-by-side N]
    benchmarks/gpu.sh FOLDER --judge

The first form measures. It leaves in the folder the table of costs, and the runs as archives of their journals.
The second form reads such a folder on any machine, and writes the page: are the verdicts right, are the figures of
errors those of PyTorch's messages, and are the times on the GPU those of the training's own events?
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.card.judgement import page
from benchmarks.card.trainings import ALONE, HEALTHY, SHARE, SICK, Training, trainings
from tests.golden.journals import LEFT_OUT, keep_journals_alone, linked_journals

_PARTS = ("cost", "trainings", "batch-sizes")
_ARCHIVE_BYTES = 15 << 20
_REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    """Measure, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="*", default=_PARTS, choices=_PARTS)
    parser.add_argument("--names", nargs="*", default=[], metavar="WORD", help="trainings whose name has it")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further training is started")
    parser.add_argument("--side-by-side", type=int, default=10, metavar="N", help="trainings at a time")
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, for the cost")
    parser.add_argument("--judge", action="store_true", help="write the page of recorded runs")
    options = parser.parse_args()
    if options.judge:
        for line in page(options.folder):
            print(line, flush=True)
        return
    deadline = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    _print_to(options.folder / "doctor.txt", "-m", "collector", "doctor")
    if "cost" in options.parts:
        _print_to(options.folder / "cost.md", "-m", "benchmarks.card.hook_cost", "--pairs", str(options.pairs))
    with tempfile.TemporaryDirectory(prefix="train-") as name, ThreadPoolExecutor(1) as beside:
        work = Path(name)
        tuned = None
        if "batch-sizes" in options.parts:
            words = ("-m", "benchmarks.accuracy", "batch-sizes", "--card", str(SHARE))
            tuned = beside.submit(_print_to, options.folder / "batch-sizes.md", *words)
        if "trainings" in options.parts:
            chosen = [one for one in trainings() if not options.names or any(w in one.name for w in options.names)]
            _run_all(chosen, work, options.side_by_side, deadline, options.folder)
        if tuned is not None:
            tuned.result()


def _print_to(path: Path, *words: str) -> None:
    """Run a part in a process of its own, and show what it prints as it comes."""
    command = [sys.executable, "-P", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        with path.open("w") as file:
            for line in process.stdout:
                file.write(line)
                print(line, end="", flush=True)


def _run_all(chosen: Sequence[Training], work: Path, at_a_time: int, deadline: float, folder: Path) -> None:
    (work / "venv").symlink_to(sys.prefix)
    (work / "source").symlink_to(_REPOSITORY)
    for group in (HEALTHY, SICK, ALONE):
        with ThreadPoolExecutor(1 if group == ALONE else at_a_time) as pool:
            done = pool.map(lambda one: _run(one, work, deadline), [one for one in chosen if one.group == group])
            for line in done:
                print(line, flush=True)
        _archive(work / "kept", folder)


def _run(training: Training, work: Path, deadline: float) -> str:
    """Run a training if there is time for it, and keep its run with its journals instead of a lake."""
    if time.monotonic() > deadline:
        return f"{training.name}: no time left"
    begun = time.monotonic()
    home = work / training.name
    home.mkdir()
    command = ["-P", "-m", "collector", "run", "--home", "home", "--name", training.name, *training.options]
    with linked_journals(home / "home", home / "journal"), (home / "output").open("wb") as output:
        done = subprocess.run(
            [sys.executable, *command, "--", *training.words],
            cwd=home,
            env={**os.environ, **training.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    (run,) = (home / "home" / "runs").iterdir()
    keep_journals_alone(run, home / "journal" / run.name)
    for path in (home / "output", *home.glob("*.json")):
        shutil.copy(path, run / path.name.replace("output", "output.txt"))
    kept = work / "kept" / training.name
    kept.parent.mkdir(exist_ok=True)
    run.rename(kept)
    return f"{training.name}: status {done.returncode}, {time.monotonic() - begun:.0f} s"


def _archive(kept: Path, folder: Path) -> None:
    """Put the runs into archives of a size that can be sent."""
    archive, path = None, folder
    for run in sorted(kept.iterdir()) if kept.exists() else ():
        if archive is None or path.stat().st_size > _ARCHIVE_BYTES:
            if archive is not None:
                archive.close()
            path = folder / f"runs-{len(list(folder.glob('runs-*'))) + 1}.tar.gz"
            archive = tarfile.open(path, "w:gz", compresslevel=6)  # noqa: SIM115
        archive.add(run, run.name, filter=lambda entry: None if entry.name.endswith(LEFT_OUT) else entry)
    if archive is not None:
        archive.close()
    shutil.rmtree(kept, ignore_errors=True)


if __name__ == "__main__":
    main()
