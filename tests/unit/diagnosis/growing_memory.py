"""Runs of 60 s whose processes grow by given amounts, and what is found in them."""

import numpy as np
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, ns, sample_host, sample_process, simulate

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

MEMORY = {"main-heap-leak", "worker-heap-leak", "copy-on-read-growth", "host-oom-risk"}
SECONDS = np.arange(60) + START_SECONDS + 1
COLLECTOR = ("node", 90, 4900)
WORKERS = [("node", 1000 + worker, 7000 + worker) for worker in range(2)]
FLAT = np.zeros(60)
RAMP = np.arange(60) / 60
#: Private memory that was never read.
UNREAD = np.full(60, np.nan)
SATURATING = 1 - np.exp(-np.arange(60) / 8)


def training(**settings):
    """60 s of healthy loading by two persistent, forked workers."""
    return simulate(workers=2, prefetch=2, service=jittered(0.2), consumer=jittered(0.25), batches=230, **settings)


def memory(
    script,
    *,
    main=FLAT,
    main_private=None,
    workers=FLAT,
    workers_private=None,
    host=FLAT,
    noise=0.3,
    free=None,
    free_in_workers=None,
    files_known=False,
    **host_settings,
):
    """Add samples of all processes: growth in MiB over their first size; `free` is free memory of a heap.

    With `files_known`, the kernel counts the mapped files of the training process, and its address space.
    """
    generator = np.random.default_rng(0)

    def series(base, growth):
        return (base + growth + noise * generator.normal(size=60)) * MIB

    private = main if main_private is None else main_private
    held = series(300, private), series(500, main)
    more = {"file_bytes": FLAT, "data_bytes": held[1]} if files_known else {}
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, private=held[0], rss=held[1], **more)
    private = workers if workers_private is None else workers_private
    for worker, key in enumerate(WORKERS):
        held, resident = series(10, private), series(320, workers)
        sample_process(script, SECONDS, key, ROLE_WORKER, private=held, rss=resident, worker=worker, loader=0)
    take_faults(script, private)
    for key, holes in ((MAIN, free), *((key, free_in_workers) for key in WORKERS)):
        if holes is not None:
            readings = zip(SECONDS, holes, strict=True)
            script.add("heap", [{"time_ns": ns(at), "free_bytes": value * MIB} for at, value in readings], key)
    return sample_host(script, SECONDS, demand=series(4000, host), **host_settings)


def take_faults(script, private):
    """Set the page faults of the fetches: one per page that becomes private; missing values lie on a line."""
    known = np.isfinite(private)
    for fetches in script.parts["fetch"] if known.any() else ():
        held = np.interp(fetches["time_ns"] / 1e9, SECONDS[known], np.asarray(private)[known])
        rises = np.diff(held, prepend=private[0])
        fetches["minor_fault_count"] = np.maximum(0.0, rises) * MIB // 4096


def findings_of(script):
    return [finding for finding in diagnose(script.tables()).findings if finding.kind in MEMORY]


def kinds(script):
    return [finding.kind for finding in findings_of(script)]
