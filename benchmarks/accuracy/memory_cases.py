"""The labelled cases of the memory benchmark: each training, and its fault."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training_harness.jobs.faults import FAULTS

KIB = 1024
#: Faults of `tidegauge job fault` that are of memory, and need no GPU.
BUILT_IN = (
    "copy-on-read",
    "worker-cache",
    "main-leak",
    "loss-list",
    "loss-sum",
    "create-graph",
    "activation-hook",
    "cycled-loader",
    "fd-leak",
    "kept-batches",
    "shm-leak",
)
#: Findings that are also true of a leak: a batch that is kept keeps its descriptors and its shared memory.
ALSO = {"kept-batches": ("shm-leak",)}
ROLES = {"main-heap-leak": "main", "worker-heap-leak": "worker", "copy-on-read-growth": "worker", "fd-leak": "main"}
LEAKS = {
    "main-heap": "main-heap-leak",
    "worker-heap": "worker-heap-leak",
    "descriptors": "fd-leak",
    "shared": "shm-leak",
}
NEGATIVES = (
    "warm-up",
    "gc-sawtooth",
    "epoch-outputs",
    "one-step-up",
    "two-steps-up",
    "high-water",
    "slow-lengths",
    "mapped-in-main",
    "mapped-in-workers",
    "checkpoints-on-disk",
    "arena-retention",
    "iterator-per-step",
    "cycle-plateau",
    "replay-buffer",
    "bounded-cache",
    "epoch-caches",
    "evaluations",
    "scalar-history",
    "late-optimizer",
    "collecting-workers",
)
#: rate, seconds of sleep per step, seconds of all steps: enough of them for a rise that matters at all.
_RATES = (
    (2 * KIB, 0.0005, 14.0),
    (20 * KIB, 0.005, 26.0),
    (200 * KIB, 0.020, 32.0),
    (2048 * KIB, 0.200, 36.0),
    (64 * KIB, 0.010, 30.0),
    (640 * KIB, 0.060, 34.0),
)
#: Times that a leak to a limit is run, each with other noise.
_REPEATS = 2
#: Rates that were run first after the model of the forecasts had been chosen.
UNSEEN = ("64k", "640k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        group: `leak`, `twin`, `healthy`, `kill` (a leak that the kernel ends) or `death`.
        job: the words after `python`.
        kind: the finding that is right; None where none is.
        role: of its locus, None where it has none.
        also: findings that are right besides.
        limit_mib: of its memory cgroup.
        shm_mib: of its own /dev/shm.
        steady: what leaks does so at one rate, so that the time to a limit has a true value.
    """

    name: str
    group: str
    job: tuple[str, ...]
    kind: str | None = None
    role: str | None = None
    also: tuple[str, ...] = ()
    limit_mib: int = 8192
    shm_mib: int = 4096
    steady: bool = False


def cases() -> list[Case]:
    """All of them; the slow ones first, so that none is waited for alone."""
    to_limits = (case for again in range(_REPEATS) for case in (*_leaks_to_limits(again), *_kills(again)))
    return [*to_limits, *_others(), *_built_in(), *_healthy(), *_deaths()]


def _own(kind: str, *words: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.accuracy.memory_jobs", kind, *map(str, words))


def _leaks_to_limits(again: int) -> Iterator[Case]:
    for number, (rate, step, seconds) in enumerate(_RATES):
        pace = ("--rate", rate, "--step-seconds", step, "--seed", _seed(number, again))
        for onset in (0.0, 0.5):
            for noise in (False, True):
                name = f"main-heap-{rate // KIB}k{'-late' if onset else ''}{'-noise' if noise else ''}"
                words: tuple[object, ...] = (*pace, "--seconds", seconds * (1.5 if onset else 1), "--onset", onset)
                words = (*words, "--noise") if noise else words
                yield _leak(_again(name, again), "main-heap", *words)
                if noise and not (onset or again):
                    yield Case(name=f"{name}-fixed", group="twin", job=_own("main-heap", *words, "--fixed"))
    for rate, onset, noise in ((200, 0.0, False), (200, 0.5, True), (2048, 0.0, True)):
        yield from _with_twin("worker-heap", rate, onset, noise, again)


def _others() -> Iterator[Case]:
    yield from _with_twin("descriptors", 2, 0.0, False)
    yield from _with_twin("descriptors", 1, 0.5, True)
    yield from _with_twin("shared", 20, 0.0, True)
    yield from _with_twin("shared", 200, 0.5, False)


def _with_twin(kind: str, rate: int, onset: float, noise: bool, again: int = 0) -> Iterator[Case]:
    words = ("--rate", rate * KIB, "--onset", onset, "--seed", _seed(rate, again), *(("--noise",) if noise else ()))
    if rate == 2048:
        words = (*words, "--step-seconds", 0.2)
    name = f"{kind}-{rate}k{'-late' if onset else ''}{'-noise' if noise else ''}"
    yield _leak(_again(name, again), kind, *words)
    if not again:
        yield Case(name=f"{name}-fixed", group="twin", job=_own(kind, *words, "--fixed"))


def _seed(number: int, again: int) -> int:
    return number + 10_000 * again


def _again(name: str, again: int) -> str:
    return f"{name}-again" if again else name


def _leak(name: str, kind: str, *words: object, **traits: Any) -> Case:
    found = LEAKS[kind]
    steady = kind in ("main-heap", "worker-heap")
    return Case(
        name=name,
        group="kill" if traits else "leak",
        job=_own(kind, *words),
        kind=found,
        role=ROLES.get(found),
        steady=steady,
        **traits,
    )


def _kills(again: int) -> Iterator[Case]:
    """Yield leaks in a cgroup of `limit` MiB, which the kernel ends after about half a minute."""
    for name, kind, rate, step, limit, words in (
        ("kill-main-200k", "main-heap", 200, 0.020, 520, ()),
        ("kill-main-200k-noise", "main-heap", 200, 0.020, 620, ("--noise",)),
        ("kill-main-2048k", "main-heap", 2048, 0.200, 520, ()),
        ("kill-main-2048k-noise", "main-heap", 2048, 0.200, 660, ("--noise",)),
        ("kill-main-20k", "main-heap", 20, 0.003, 350, ()),
        ("kill-main-late", "main-heap", 400, 0.020, 560, ("--onset", 0.3)),
        ("kill-worker-200k", "worker-heap", 200, 0.020, 520, ()),
        ("kill-worker-2048k", "worker-heap", 2048, 0.200, 640, ("--noise",)),
    ):
        pace = ("--rate", rate * KIB, "--step-seconds", step, "--seconds", 60, "--seed", _seed(0, again), *words)
        yield _leak(_again(name, again), kind, *pace, limit_mib=limit)


def _built_in() -> Iterator[Case]:
    for name in BUILT_IN:
        job = (sys.executable, "-P", "-m", "training_harness.jobs", "fault", name)
        kind = FAULTS[name].finding
        yield Case(name=name, group="leak", job=job, kind=kind, role=ROLES.get(kind), also=ALSO.get(name, ()))
        yield Case(name=f"{name}-fixed", group="twin", job=(*job, "--fixed"))


def _healthy() -> Iterator[Case]:
    for kind in NEGATIVES:
        yield Case(name=kind, group="healthy", job=_own(kind))
    for kind in ("warm-up", "one-step-up", "high-water", "epoch-outputs", "replay-buffer", "slow-lengths"):
        yield Case(name=f"{kind}-noise", group="healthy", job=_own(kind, "--noise", "--seed", 5))


def _deaths() -> Iterator[Case]:
    kill, term, bus, abort = signal.SIGKILL, signal.SIGTERM, signal.SIGBUS, signal.SIGABRT
    deaths: tuple[tuple[int, str, str, str, tuple[object, ...], dict[str, Any]], ...] = (
        (14, "main-heap", "host-oom-kill", "main", ("--rate", 4096 * KIB), {"limit_mib": 450}),
        (14, "worker-heap", "host-oom-kill", "worker", ("--rate", 4096 * KIB), {"limit_mib": 450}),
        (10, "die-worker", "worker-killed", "worker", ("--rate", int(kill)), {}),
        (10, "die-main", "killed", "main", ("--rate", int(kill)), {}),
        (6, "die-main", "killed", "main", ("--rate", int(term)), {}),
        (4, "die-worker", "worker-killed", "worker", ("--rate", int(bus)), {}),
        (8, "die-of-full-shm", "shm-bus-error", "worker", (), {"shm_mib": 64}),
        (8, "die-of-address-space", "crashed", "main", (), {}),
        (6, "die-of-descriptors", "crashed", "main", (), {}),
        (6, "die-of-exception", "crashed", "main", (), {}),
        (4, "die-of-item", "crashed", "main", (), {}),
        (4, "die-of-null", "crashed", "main", (), {}),
        (3, "die-main", "crashed", "main", ("--rate", int(abort)), {}),
        (3, "die-of-exit", "crashed", "main", ("--rate", 3), {}),
    )
    for count, name, kind, role, words, traits in deaths:
        for number in range(count):
            yield Case(
                name=f"{name}-{kind}{'-'.join(['', *map(str, words[1:])])}-{number}",
                group="death",
                job=_own(name, *words, "--seconds", 8, "--onset", round(0.2 + 0.6 * number / count, 3)),
                kind=kind,
                role=role,
                **traits,
            )
