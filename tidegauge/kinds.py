"""The kinds of findings, each declared once, with what is the same for all findings of a kind.

Sentences, evidence and advice are those of the rules, since they depend on what a rule measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

#: Place of a finding's cause.
Fault = Literal["your code", "your settings", "this machine", "outside"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding.

    Attributes:
        group: the group that it is part of.
        pages: paths of the pages of the dashboard that list it; the first one has its evidence.
        shows: what that page shows about it.
        checks: names of the checks that fail by it (`collector/diagnosis/checks.py`).
        fault: place of its cause, if that is always the same; else its rule says it.
        stacks_of: processes whose stacks can name the lines behind it; to sample "main" alone costs far less.
        has_allocation_sites: True if a process can report the lines that allocate what it leaks.
    """

    group: str
    pages: tuple[str, ...]
    shows: str
    checks: tuple[str, ...] = ()
    fault: Fault | None = None
    stacks_of: Literal["main", "all"] | None = None
    has_allocation_sites: bool = False


_FORECAST = Kind("memory forecast", ("oom-risk",), "when memory runs out, and where")
_LEAK = Kind("memory leak", ("leak-timeline",), "which process grows, how fast, and since when")
_MAIN_LEAK = replace(_LEAK, checks=("training process's memory",), fault="your code")
_WORKER_LEAK = replace(_LEAK, checks=("workers' memory",), fault="your code")
_GPU_PAGES, _GPU_SHOWS = ("gpu-memory", "leak-timeline"), "what fills the GPU, and since when"
_GPU_LEAK = replace(_LEAK, pages=_GPU_PAGES, shows=_GPU_SHOWS, checks=("GPU memory",))
_FULL = replace(_LEAK, pages=("oom-risk", "leak-timeline"), shows="what fills up, and when it is full")
_LOADING = Kind(
    "data loading",
    ("worker-stalls",),
    "which worker and which stage make training wait",
    checks=("data loading",),
)
_LOADING_CODE = replace(_LOADING, fault="your code")
_LOADING_SETTINGS = replace(_LOADING, fault="your settings")
_TRAINING = Kind("training", ("worker-stalls",), "what holds up the training process")
_DEATH = Kind("death", ("post-mortem",), "what ended the run, and its last minute", checks=("how the run ended",))
_TRUST = Kind("trust", ("agent-health",), "what was recorded, and what is missing", checks=("records",))

#: Kinds of findings by name. There are no other kinds.
KINDS = {
    "gpu-oom-risk": replace(_FORECAST, pages=("oom-risk", "gpu-memory"), checks=("GPU memory",)),
    "host-oom-risk": replace(_FORECAST, checks=("host memory",)),
    "shm-exhaustion-risk": replace(_FORECAST, checks=("/dev/shm",)),
    "fd-exhaustion-risk": replace(_FORECAST, checks=("open files",)),
    "gpu-tensor-leak": replace(_GPU_LEAK, fault="your code", has_allocation_sites=True),
    "gpu-non-pytorch-growth": _GPU_LEAK,
    "gpu-fragmentation": replace(_GPU_LEAK, fault="your settings"),
    "pinned-cache-growth": replace(_GPU_LEAK, checks=("training process's memory",)),
    "main-heap-leak": replace(_MAIN_LEAK, has_allocation_sites=True),
    "worker-heap-leak": replace(_WORKER_LEAK, has_allocation_sites=True),
    "copy-on-read-growth": _WORKER_LEAK,
    "fd-leak": replace(_FULL, checks=("open files",), fault="your code"),
    "shm-leak": replace(_FULL, checks=("/dev/shm",)),
    "bounded-growth": Kind("growth that is no leak", ("leak-timeline",), "which process grows, and until when"),
    "workers-too-slow": replace(_LOADING, stacks_of="all"),
    "slow-worker": replace(_LOADING, stacks_of="all"),
    "straggler-samples": _LOADING_CODE,
    "collate-bound": replace(_LOADING_CODE, stacks_of="all"),
    "copy-bound": _LOADING_CODE,
    "pin-bound": _LOADING_SETTINGS,
    "sampler-bound": replace(_LOADING_CODE, stacks_of="main"),
    "worker-startup": _LOADING_SETTINGS,
    "epoch-refill": _LOADING_SETTINGS,
    "inline-loading": replace(_LOADING, stacks_of="main"),
    "shard-skew": _LOADING_CODE,
    "idle-workers": _LOADING_SETTINGS,
    "caught-errors": _LOADING_CODE,
    "main-thread-pause": replace(
        _TRAINING, checks=("pauses of the training",), fault="your code", stacks_of="main"
    ),
    "rank-straggler": replace(
        _TRAINING, pages=("overview", "worker-stalls"), shows="the steps of each rank", checks=("ranks",)
    ),
    "compute-bound": replace(_TRAINING, stacks_of="all"),
    "cuda-oom": replace(
        _DEATH, pages=("post-mortem", "oom-risk", "gpu-memory"), checks=(*_DEATH.checks, "GPU memory")
    ),
    "host-oom-kill": replace(
        _DEATH, pages=("post-mortem", "oom-risk", "leak-timeline"), checks=(*_DEATH.checks, "host memory")
    ),
    "worker-killed": replace(_DEATH, pages=("post-mortem", "oom-risk", "worker-stalls")),
    "shm-bus-error": replace(
        _DEATH, pages=("post-mortem", "oom-risk"), checks=(*_DEATH.checks, "/dev/shm"), fault="this machine"
    ),
    "crashed": _DEATH,
    "killed": _DEATH,
    "hang": replace(_DEATH, pages=("post-mortem", "worker-stalls")),
    "workers-not-reporting": replace(_TRUST, pages=("agent-health", "worker-stalls")),
    "samples-lost": _TRUST,
    "cannot-tell": replace(_TRUST, checks=()),
}
