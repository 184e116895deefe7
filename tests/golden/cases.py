"""The recorded runs in tests/data/runs, and the training of each."""

from __future__ import annotations

from dataclasses import dataclass

from app.pages import COMPARE, PAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        job: the words after `tidegauge job`.
        interval_seconds: between two samples of the collector.
        memory_mib: limit of a memory cgroup of its own, which the kernel ends it at.
        files_count: the number of files that a process may have open.
        gpu_memory: of the simulated device that the job runs on.
    """

    job: tuple[str, ...]
    interval_seconds: float = 0.5
    memory_mib: int | None = None
    files_count: int | None = None
    gpu_memory: str = ""


def _fault(kind: str, *words: str, **traits: object) -> tuple[str, Case]:
    return kind, Case(job=("fault", kind, *words), **traits)  # type: ignore[arg-type]


def _steps(count: int) -> tuple[str, str]:
    return "--steps", str(count)


#: Options of a small transformer.
_SMALL = ("--length", "8", "--depth", "1", "--num-workers", "1")
_HEALTHY = {
    "images": Case(job=("images", "--data", "pictures", "--epochs", "4", "--batch-size", "4")),
    "diabetes": Case(job=("diabetes", "--epochs", "12")),
    "accumulate": Case(
        job=("accumulate", "--effective-batch", "16", "--micro-batch", "4", *_steps(40), *_SMALL),
        interval_seconds=0.25,
    ),
    "dataparallel": Case(job=("dataparallel", "--batch-size", "8", *_steps(120), *_SMALL), interval_seconds=0.25),
    "ddp": Case(
        job=("ddp", "--nproc", "2", "--backend", "gloo", "--batch-size", "8", *_steps(80), *_SMALL),
        interval_seconds=0.25,
    ),
}
_LOADING = dict(
    [
        _fault("slow-worker", *_steps(300)),
        _fault("workers-too-slow", *_steps(400)),
        _fault("straggler-samples", *_steps(400)),
        _fault("cpu-bound", *_steps(300)),
        _fault("oversubscribed", *_steps(300)),
        _fault("io-bound", *_steps(300)),
        _fault("collate-bound", *_steps(250)),
        _fault("copy-bound", *_steps(120)),
        _fault("sampler-bound", *_steps(300)),
        _fault("worker-startup", *_steps(250)),
        _fault("fresh-iterator", *_steps(60)),
        _fault("epoch-refill", *_steps(160)),
        _fault("inline-loading", *_steps(300)),
        _fault("shard-skew", *_steps(800)),
        _fault("main-thread-pause", *_steps(800)),
        _fault("rank-straggler", *_steps(200)),
    ]
)
_DEATHS = dict(
    [
        _fault("worker-killed", "--at-batch", "100", interval_seconds=0.25),
        _fault("shm-bus-error", "--at-batch", "100", interval_seconds=0.25),
        _fault("crash", "--at-batch", "100", interval_seconds=0.25),
        _fault("killed", "--at-batch", "100", interval_seconds=0.25),
    ]
)
_MEMORY = dict(
    [
        _fault("copy-on-read", *_steps(400)),
        _fault("worker-cache", "--limit-mb", "2048", *_steps(1000)),
        _fault("main-leak", *_steps(500)),
        _fault("loss-list", *_steps(600)),
        _fault("loss-sum", *_steps(2000)),
        _fault("create-graph", *_steps(400)),
        _fault("activation-hook", *_steps(400)),
        _fault("cycled-loader", *_steps(400)),
        _fault("fd-leak", *_steps(450), files_count=1024),
        _fault("kept-batches", *_steps(450), files_count=2048),
        _fault("shm-leak", *_steps(450)),
    ]
)
#: A limit of memory that the kernel keeps.
_LIMITED = {
    "oom-main": Case(job=("fault", "main-leak", "--limit-mb", "4096"), memory_mib=360),
    "oom-worker": Case(job=("fault", "worker-cache", "--limit-mb", "4096"), memory_mib=420),
}
#: `pin-bound` is left out: on simulated devices pinning takes no time.
_GPU = dict(
    [
        _fault("gpu-loss-list", *_steps(400), gpu_memory="1G"),
        _fault("cuda-oom", gpu_memory="1G"),
        _fault("gpu-driver-leak", *_steps(400), gpu_memory="2G"),
        _fault("gpu-fragmentation", *_steps(400), gpu_memory="2G"),
        _fault("pinned-cache", *_steps(400), gpu_memory="1G"),
    ]
)
#: name -> the training
CASES: dict[str, Case] = {**_HEALTHY, **_LOADING, **_DEATHS, **_MEMORY, **_LIMITED, **_GPU}
#: Runs of tests/data/gpu, recorded by tests/cuda_sim/record.py, that have golden files.
RECORDED_GPU = ("tensor-leak", "library-growth", "out-of-memory", "share-met", "two-devices")
#: Every page of one run.
ALL_PAGES = tuple(page.path for page in PAGES if page is not COMPARE)
#: Runs with every page compared each time. Other runs have the one or two pages that show their subject.
_THOROUGH = ("images", "ddp", "tensor-leak")
_PAGES = (
    (_THOROUGH, ALL_PAGES),
    (_HEALTHY, ("overview", "agent-health")),
    (("sampler-bound", "fresh-iterator"), ("pipeline-stages",)),
    (("slow-worker", "workers-too-slow", "collate-bound", "inline-loading", "copy-bound"), ("worker-stalls",)),
    (_LOADING, ("overview",)),
    (("fd-leak", "shm-leak"), ("oom-risk",)),
    (_MEMORY, ("leak-timeline",)),
    ((*_DEATHS, *_LIMITED), ("overview", "post-mortem")),
    (("cuda-oom",), ("oom-risk", "post-mortem")),
    ((*_GPU, *RECORDED_GPU), ("gpu-memory",)),
)


#: Pages that differ from time to time and are left out: any of several equally full moments of a GPU is drawn.
_UNSTEADY = {"cuda-oom": ("gpu-memory",)}


def steady_pages(name: str) -> tuple[str, ...]:
    """Return the pages of a run that can be compared."""
    return tuple(page for page in ALL_PAGES if page not in _UNSTEADY.get(name, ()))


def pages_of(name: str) -> tuple[str, ...]:
    """Return the pages of a run that the tests compare; `python -m tests.golden` compares all that are steady."""
    return next(pages for names, pages in _PAGES if name in names)


#: Runs that `tidegauge compare` and the page Compare show side by side.
COMPARISON, COMPARED = "compare", ("slow-worker", "workers-too-slow")
