"""Are the verdicts on GPU memory right? Trainings with known faults on simulated devices, and their healthy twins.

    .cuda/bin/python -m benchmarks.accuracy gpu [--cases WORD …] [--minutes N] [--keep DIR] [--side-by-side N]

The devices are those of tests/cuda_sim: the allocator of PyTorch's CUDA build, without a card. `make test-cuda`
sets up the environment. Recordings stay in `--keep`: a case that ran is not run again, but judged again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.accuracy.memory_replay import (
    CLOCKS,
    FORECASTS_HEAD,
    HALF,
    THREE_QUARTERS,
    Forecast,
    forecasts_row,
    of_both_clocks,
    until,
)
from collector.diagnosis.run.columns import SECOND_NS, floats
from collector.diagnosis.run.tables import RunTables, load_tables
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding
from collector.store.catalogue import find_run
from tests.cuda_sim import simulator
from training_harness.jobs.faults import FAULTS

_HEAD = """# Are the verdicts on GPU memory right?

These figures come from trainings with known leaks on simulated devices, and their healthy twins. [How it is
measured](#how-it-is-measured) says what is real. `.cuda/bin/python -m benchmarks.accuracy gpu >
docs/accuracy-gpu.md` writes this page.
"""
_METHOD = """
## How it is measured

The devices are simulated (tests/cuda_sim). PyTorch's caching allocator and its statistics are real, and so are
bytes, processes and NVML's account. Times on the device are not.

Leaks take 64 KiB to 4 MiB a step: as tensors, as memory that a library takes from the driver, or as pinned
memory. Their pace is even, uneven or slowing, or they start late. Some run beside batches of variable length, of
other lengths in each case, and evaluations (noise). Half of the way to the limit is half of the steps to it.

No threshold was fitted to these cases. But the model of the time to a limit was improved with recordings of such
programs at hand."""
_PROGRAM = Path(simulator.__file__).parent / "programs" / "growth.py"
_FINDINGS = {
    "tensors": "gpu-tensor-leak",
    "library": "gpu-non-pytorch-growth",
    "pinned": "pinned-cache-growth",
}
_NEGATIVES = ("variable", "evaluation", "filling", "outputs", "late_optimizer", "unfreezing", "graphs", "nothing")
_KIB, _MIB = 1 << 10, 1 << 20
#: Bytes that PyTorch and the driver take of a device before anything grows.
_BASE_BYTES = 340 * _MIB
_STEPS, _STEPS_TO_LIMIT = 1500, 1200
#: Kinds that follow from a leak of GPU memory.
_CONSEQUENCES = ("gpu-oom-risk", "cuda-oom", "crashed")
#: Finding of a fault -> what is true of it besides: it keeps tensors.
_ALSO = {"cuda-oom": ("gpu-tensor-leak",), "gpu-fragmentation": ("gpu-tensor-leak",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        job: the words after `tidegauge run --`.
        kind: the finding that is right; None where none is.
        memory: of the device, as the simulator reads it.
        onset: share of the program's steps after which it leaks until memory runs out; None if it does not run out.
    """

    name: str
    job: tuple[str, ...]
    kind: str | None = None
    memory: str = "6G"
    onset: float | None = None


def cases() -> list[Case]:
    """Return all cases, the long ones first."""
    return [*_leaks_to_limits(), *_other_leaks(), *_healthy()]


def _program(*words: object) -> tuple[str, ...]:
    return (sys.executable, str(_PROGRAM), *map(str, words))


def _leaks_to_limits() -> Iterator[Case]:
    sizes = {"64k": 64 * _KIB, "256k": 256 * _KIB, "1m": _MIB, "4m": 4 * _MIB}
    variants = {
        "": (),
        "-noise": ("--noise",),
        "-uneven": ("--pace", "uneven"),
        "-slowing": ("--pace", "slowing"),
        "-late": ("--onset", 0.3),
    }
    every = itertools.product(("tensors", "library"), sizes.items(), variants.items())
    for seed, (kind, (size, size_bytes), (variant, words)) in enumerate(every):
        onset = 0.3 if variant == "-late" else 0.0
        noise_bytes = 60 * size_bytes if variant == "-noise" else 0  # of its peaks
        limit = _BASE_BYTES + noise_bytes + size_bytes * int(_STEPS_TO_LIMIT - onset * _STEPS)
        yield Case(
            name=f"{kind}-{size}{variant}",
            job=_program(kind, "--bytes", size_bytes, "--steps", _STEPS, "--seed", seed, *words),
            kind=_FINDINGS[kind],
            memory=f"{limit // _MIB}M",
            onset=onset,
        )


def _other_leaks() -> Iterator[Case]:
    for size, pace in itertools.product((64, 256), ("even", "uneven", "slowing")):
        words = ("--bytes", size * _KIB, "--pace", pace)
        yield Case(name=f"pinned-{size}k-{pace}", job=_program("pinned", *words), kind=_FINDINGS["pinned"])
    for name, fault in _faults():
        yield Case(name=name, job=fault, kind=FAULTS[name].finding)


def _healthy() -> Iterator[Case]:
    for kind, size, noise in itertools.product(_FINDINGS, (256, 1024), ((), ("--noise",))):
        name = f"{kind}-{size}k-fixed{'-noise' if noise else ''}"
        yield Case(name=name, job=_program(kind, "--fixed", "--bytes", size * _KIB, *noise))
    for name, fault in _faults():
        yield Case(name=f"{name}-fixed", job=(*fault, "--fixed"))
    for kind, size, noise in itertools.product(_NEGATIVES, (256, 1024), ((), ("--noise",))):
        name = f"{kind}-{size}k{'-noise' if noise else ''}"
        yield Case(name=name, job=_program(kind, "--bytes", size * _KIB, *noise, "--seed", 1))


def _faults() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Built-in faults; without pin-bound, since pinning takes no time on simulated devices."""
    for name in sorted(name for name, fault in FAULTS.items() if fault.needs_gpu and name != "pin-bound"):
        yield name, (sys.executable, "-P", "-m", "training_harness.jobs", "fault", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], metavar="WORD", help="those whose name has it")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no further training is started")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/tidegauge-accuracy-gpu"))
    parser.add_argument("--side-by-side", type=int, default=4, metavar="N", help="trainings at a time")
    options = parser.parse_args()
    if not simulator.has_cuda():
        sys.exit("PyTorch's CUDA build is needed: run `make test-cuda` once, then .cuda/bin/python")
    chosen = [each for each in cases() if not options.cases or any(word in each.name for word in options.cases)]
    libraries = simulator.build(Path(sys.prefix) / "cuda_sim")
    deadline = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(lambda case: _run(case, options.keep / case.name, libraries, deadline), chosen))
    for line in page([case for case in chosen if _done(options.keep / case.name).exists()], options.keep):
        print(line, flush=True)


def _done(home: Path) -> Path:
    return home / "done"


def _run(case: Case, home: Path, libraries: Path, deadline: float) -> None:
    """Run a case if it has not run yet and there is time for it."""
    if _done(home).exists() or time.monotonic() > deadline:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    environ = simulator.environment(libraries, memory=case.memory)
    words = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--", *case.job]
    with (home / "output").open("wb") as output:
        done = subprocess.run(
            words, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False
        )
    simulator.remove_registry(environ["CUDA_SIM_NAME"])
    _done(home).write_text(f"{done.returncode}\n")
    print(f"{case.name}: status {done.returncode}", file=sys.stderr, flush=True)


def page(ran: Sequence[Case], keep: Path) -> Iterator[str]:
    """Write the page from the recordings, as lines of Markdown."""
    warned: dict[str, list[Finding]] = {}
    forecasts: list[Forecast] = []
    for case in ran:
        tables = load_tables(find_run(keep / case.name, "latest"))
        warned[case.name] = [finding for finding in diagnose(tables).findings if finding.severity != "info"]
        if case.onset is not None:
            forecasts += _forecasts(case, tables)
    yield _HEAD
    yield (
        f"{len(ran)} of {len(cases())} cases on {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{date.today()}."
    )
    yield from _verdicts(ran, warned)
    if forecasts:
        yield from ("", "## Time to the limit", "", *FORECASTS_HEAD)
        for ratio, clock in itertools.product((HALF, THREE_QUARTERS), CLOCKS):
            for leaks in ("all", "noise", "uneven", "slowing", "late"):
                group = [each for each in forecasts if leaks == "all" or each.case.endswith(leaks)]
                yield from filter(None, [forecasts_row(ratio, clock, leaks, group)])
        worst = sorted((each for each in forecasts if each.mid == each.mid), key=lambda each: -each.error_ratio)
        named = (f"{w.case} at {w.way_ratio:.0%} in {w.clock}: {w.error_ratio:.0%}" for w in worst[:4])
        yield from ("", f"Worst: {', '.join(named)}.")
    yield _METHOD


def _verdicts(ran: Sequence[Case], warned: dict[str, list[Finding]]) -> Iterator[str]:
    sick, well = [case for case in ran if case.kind], [case for case in ran if not case.kind]
    wrong = {case.name: [f.kind for f in warned[case.name] if _is_wrong(case, f)] for case in ran}
    found = [case for case in sick if any(f.kind == case.kind for f in warned[case.name])]
    count = sum(map(len, wrong.values()))
    yield from ("", "## Leaks", "", "| finding | found |", "|---|---|")
    for kind in dict.fromkeys(case.kind for case in sick):
        yield f"| {kind} | {sum(c.kind == kind for c in found)} of {sum(c.kind == kind for c in sick)} |"
    if sick:
        recall = f"{len(found) / len(sick):.2f} ({len(found)} of {len(sick)})"
        yield from ("", f"Precision {len(found) / max(len(found) + count, 1):.2f}, recall {recall}.")
    yield f"Findings on {sum(bool(wrong[case.name]) for case in well)} of {len(well)} healthy runs."
    yield f"Not found: {', '.join(case.name for case in sick if case not in found) or 'none'}."
    yield f"Wrong: {', '.join(f'{kind} of {name}' for name, kinds in wrong.items() for kind in kinds) or 'none'}."


def _is_wrong(case: Case, finding: Finding) -> bool:
    if case.kind is None:
        return True
    is_of_memory = finding.group in ("memory leak", "memory forecast", "death")
    return is_of_memory and finding.kind not in (case.kind, *_CONSEQUENCES, *_ALSO.get(case.kind, ()))


def _forecasts(case: Case, tables: RunTables) -> list[Forecast]:
    """Forecasts half of the way to the end of memory, and at three quarters, in steps of one process."""
    rows = tables.stream("step")
    times, steps = floats(rows, "time_ns"), floats(rows, "step")
    ooms = [event["error_time_ns"] for event in tables.events_of("cuda-oom") if event.get("error_time_ns")]
    end_ns, end_step = float(ooms[-1] if ooms else times[-1]), float(steps[-1])
    assert case.onset is not None
    begin = case.onset * _STEPS
    found = []
    for ratio in (HALF, THREE_QUARTERS):
        step = begin + ratio * (end_step - begin)
        at_ns = float(np.interp(step, steps, times))
        risks = [each for each in diagnose(until(tables, at_ns)).findings if each.kind == "gpu-oom-risk"]
        eta = next((each.eta for each in risks if each.eta), None)
        found += of_both_clocks(case.name, ratio, eta, ((end_ns - at_ns) / SECOND_NS, end_step - step))
    return found
