"""The faults, and the rule by which a tool names one: the same for all tools.

A tool *names* a fault if one of its sentences, or lines, says all that the rule of the fault asks for. Sentences
that it says of the healthy training too do not count. A tool *shows* a fault if its output has it, but a reader
must find it: a sentence on the symptom alone, a curve, or a row of a table, each unlike that of the healthy
training.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sight.tools import Tool

_GROWS = r"leak|keeps? (taking|growing|filling|opening)|\bgrow|rising|creep|never (freed|closed)"
_WAITS = r"(input|data|loader|loading|batch|workers?)\b.*(bound|slow|wait|straggler)|wait\w* .*(batch|data|input)"
_MEMORY_CURVE = r"mem|rss"
_GPU_CURVE = r"gpu.*(mem|alloc)|allocated|aten::(ones|empty): memory"
_HELD_BY_TRAINING = r"^training process: .*program\.py|aten::(ones|empty): memory"
_LOADER_ROW = r"DataLoader.*: time"
#: A curve shows a fault if the mean of its last quarter is above that of its second by this share of the latter.
_LEAST_RISE = 0.02
#: It must be as many times that of the healthy training.
_TIMES_HEALTHY = 3.0
#: A row shows one if it has as much more than in the healthy training, in MiB or in % of the time.
_MORE_IN_ROW = 15.0
#: Other work may keep the machine's cores busy meanwhile: to warn of that is right.
_ALARM = re.compile(r"^(?!.*(HIGH CPU|capability)).*\b(warning|critical)\b", re.IGNORECASE)
#: Things that a tool has looked at and found nothing wrong with, and a warning of PyTorch itself.
_IGNORED = re.compile(r"^(checked and fine|not judged|please be aware that excessive)", re.IGNORECASE)
#: A figure, but no line number.
_FIGURE = re.compile(r"(?<!\.py:)\b\d[\d.,]*")


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        title: the fault in words.
        rule: the things that a sentence must say, in words.
        names: patterns that must all be in one sentence.
        shows: pattern of a sentence on the symptom.
        curve: pattern of the names of curves and rows that can show it; "" if none can.
        ends: whether a curve of the loss shows it, because it ends early.
    """

    title: str
    rule: str
    names: tuple[str, ...]
    shows: str = ""
    curve: str = ""
    ends: bool = False


#: Faults of trainings that use no GPU.
FAULTS = {
    "healthy": Fault("healthy", "no warning", ()),
    "main-leak": Fault(
        "leak in the training process",
        "memory grows or leaks, in the training process",
        (_GROWS, r"training process|main process|rank 0|\bRSS\b"),
        shows=_GROWS,
        curve=f"{_MEMORY_CURVE}|{_HELD_BY_TRAINING}",
    ),
    "worker-leak": Fault(
        "leak in a DataLoader worker",
        "memory grows or leaks, in workers",
        (_GROWS, r"worker"),
        shows=_GROWS,
        curve=rf"{_MEMORY_CURVE}|^worker: .*program\.py",
    ),
    "copy-on-read": Fault(
        "copy-on-read in forked workers",
        "workers copy the objects of their parent",
        (r"worker|fork", r"cop(y|ies)", r"object|refer|refcount|parent|read"),
        shows=_GROWS,
        curve=_MEMORY_CURVE,
    ),
    "shm-growth": Fault(
        "/dev/shm fills",
        "shared memory grows",
        (r"shm|shared memory", rf"{_GROWS}|fill"),
        shows=_GROWS,
        curve=rf"{_MEMORY_CURVE}|: .*(shar|filename)",
    ),
    "fd-leak": Fault(
        "file descriptors leak",
        "open files or descriptors grow",
        (r"descriptor|open files|\bfds?\b", _GROWS),
        shows=r"descriptor|open files",
        curve=r"descriptor|open_files|\bfds?\b",
    ),
    "slow-worker": Fault(
        "one slow worker",
        "worker 1 is slow",
        (r"\bworker 1\b", r"slow|holds? up|times"),
        shows=_WAITS,
        curve=_LOADER_ROW,
    ),
    "slow-workers": Fault(
        "all workers slow", "training waits for data", (_WAITS,), shows=_WAITS, curve=_LOADER_ROW
    ),
    "slow-collate": Fault(
        "slow collate function",
        "the collate function takes the time",
        (r"collat", r"take|slow|bound|time"),
        shows=rf"{_WAITS}|collate \(.*program\.py",
        curve=_LOADER_ROW,
    ),
    "oom-kill": Fault(
        "killed by the kernel at the memory limit",
        "killed, because memory ran out",
        (r"kill|died|dead", r"out of memory|\boom\b|memory.*limit|limit.*memory"),
        shows=r"sigkill|signal 9|killed|exit\w* (code|status).*(-9|137)",
        curve=f"{_MEMORY_CURVE}|{_HELD_BY_TRAINING}",
    ),
    "hang": Fault(
        "hang: a worker waits for a lock",
        "the training stands still, because of a worker",
        (r"hang|stands? still|deadlock|stuck|no progress", r"worker"),
        shows=r"__getitem__ \(.*program\.py|hang|stands? still|no progress|stall",
        ends=True,
    ),
}
#: Faults of trainings on a GPU.
CUDA_FAULTS = {
    "healthy": FAULTS["healthy"],
    "cuda-leak": Fault(
        "leak of CUDA memory",
        "GPU memory grows or leaks",
        (_GROWS, r"gpu|cuda|vram|tensors"),
        shows=_GROWS,
        curve=_GPU_CURVE,
    ),
    "cuda-oom": Fault(
        "CUDA out of memory",
        "what held the GPU's memory",
        (r"tensors?|allocator|cache|process|fragment", r"\bh(e|o)ld|\bkept|keeps?|grew|\bgrow"),
        shows=r"out of memory|\boom\b|ran out",
        curve=_GPU_CURVE,
    ),
}


@dataclass(frozen=True)
class Verdict:
    """A cell of the table, and the lines that decide it."""

    mark: str
    lines: tuple[str, ...]


def judge(
    tool: Tool, fault: Fault, said: Mapping[str, Any], healthy: Mapping[str, Any], printed: str = ""
) -> Verdict:
    """Return the verdict on what a tool said of a fault, compared with what it said of the healthy training.

    Args:
        printed: what the training with the fault prints without a tool: those sentences do not count either.
    """
    if not fault.names:
        alarms = [line for line in sentences(said["text"]) if _ALARM.search(line)]
        return Verdict("alarm" if alarms else "none", tuple(alarms))
    usual = {_FIGURE.sub("#", line) for line in sentences(f"{healthy['text']}\n{printed}")}
    lines = [
        line
        for line in sentences(said["text"])
        if _FIGURE.sub("#", line) not in usual and not _IGNORED.search(line)
    ]
    if named := [line for line in lines if all(_has(pattern, line) for pattern in fault.names)]:
        return Verdict("✓", tuple(named))
    if fault.shows and (shown := [line for line in lines if _has(fault.shows, line)]):
        return Verdict("hint" if tool.shows == "curve" else tool.shows, tuple(shown))
    if curves := shown_curves(fault, said["series"], healthy["series"]):
        return Verdict(tool.shows, tuple(curves))
    return Verdict("—", ())


def sentences(text: str) -> list[str]:
    """Split a text into sentences, lines and the columns of a box, without frames and repeated spaces."""
    parts = re.split(r"\n|\|\||(?<=[.;]) (?=[A-Z])", text)
    return [line for part in parts if (line := " ".join(re.sub(r"[│┃|+─━═-]{2,}|[│┃|]", " ", part).split()))]


def _has(pattern: str, line: str) -> bool:
    return re.search(pattern, line, re.IGNORECASE) is not None


def shown_curves(fault: Fault, series: Mapping[str, Any], healthy: Mapping[str, Any]) -> list[str]:
    """Return the curves and rows that show a fault, in words."""
    found = []
    for name, points in series.items():
        values, usual = ([value for _at, value in each] for each in (points, healthy.get(name, ())))
        if fault.ends and name == "loss" and len(values) < len(usual) / 2:
            found.append(f"loss: ends after {len(values)} of {len(usual)} values")
        if not fault.curve or not _has(fault.curve, name):
            continue
        if len(values) == 1:
            before = usual[0] if usual else 0.0
            if values[0] - before >= _MORE_IN_ROW:
                found.append(f"{name}: {values[0]:.0f}, healthy: {before:.0f}")
        elif len(values) >= 8 and _rise(values) > max(_LEAST_RISE, _TIMES_HEALTHY * abs(_rise(usual))):
            found.append(f"{name}: {_figure(values[len(values) // 4])} → {_figure(values[-1])}")
    return found


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rise(values: Sequence[float]) -> float:
    """Return the mean of the last quarter over that of the second, less 1; 0 for a short curve."""
    quarter = len(values) // 4
    if quarter < 2:
        return 0.0
    early = statistics.fmean(values[quarter : 2 * quarter])
    return statistics.fmean(values[-quarter:]) / early - 1 if early > 0 else 0.0
