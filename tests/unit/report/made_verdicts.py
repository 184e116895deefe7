"""Verdicts made by hand, and their cards."""

from __future__ import annotations

import io
import math

from rich.console import Console

from collector.diagnosis.checks import Check
from collector.diagnosis.verdict import Verdict
from collector.findings import Advice, Eta, Evidence, Finding, Limit, Locus, Rate
from collector.report import card as report

MIB, GIB = 2**20, 2**30

SLOW_WORKER = Finding(
    kind="slow-worker",
    severity="warning",
    confidence=0.97,
    summary="Worker 1 takes 60 ms for a batch, the others 20 ms; every fourth batch is waited for.",
    locus=Locus(rank=0, loader=0, worker=1),
    since_step=14,
    evidence=(
        Evidence(name="worker_fetch_ratio", value=2.94, unit="ratio", n=300, window="steps 20-1200"),
        Evidence(name="idle_of_the_others", value=0.038, unit="seconds", n=900, window="steps 20-1200"),
    ),
    advice=(Advice(text="Look at what worker 1 reads.", expected="about 61 steps/s instead of 40"),),
)
HOST_RISK = Finding(
    kind="host-oom-risk",
    severity="critical",
    confidence=0.9,
    summary="The run grows towards the limit of its control group.",
    locus=Locus(role="main", pid=4711, rank=0),
    evidence=(
        Evidence(name="growth", value=math.nan, unit="bytes/second", n=50, window="last 60 s"),
        Evidence(name="pressure", value=0.02, unit="ratio", n=50, window="last 60 s"),
    ),
    rate=Rate(value=5 * 2**20, low=4 * 2**20, high=6 * 2**20, unit="bytes/second"),
    limit=Limit(name="cgroup", value=4 * GIB, unit="bytes"),
    eta=Eta(low_seconds=600, mid_seconds=720, high_seconds=math.inf, mid_steps=8000.0),
)
HEALTHY = Finding(
    kind="compute-bound",
    severity="info",
    confidence=0.95,
    summary="The training waits for data 1 % of the time.",
    evidence=(
        Evidence(name="data_wait_share", value=0.01, unit="ratio", n=1200, window="steps 20-1200"),
        Evidence(name="workers_idle", value=0.6, unit="ratio", n=1200, window="steps 20-1200"),
    ),
)


STALL = {
    "rank": 0,
    "loader": 0,
    "batches": 1200,
    "wait_seconds": 19.0,
    "wait_ratio": 0.31,
    "head_of_line_seconds": 14.0,
    "stages": [
        {
            "stage": "decode",
            "seconds": 15.2,
            "batch_seconds": 0.035,
            "enough_seconds": 0.014,
            "free_wait_ratio": 0.0,
        },
        {
            "stage": "transfer",
            "seconds": 3.7,
            "batch_seconds": None,
            "enough_seconds": None,
            "free_wait_ratio": None,
        },
        {"stage": "idle", "seconds": 0.1, "batch_seconds": None, "enough_seconds": None, "free_wait_ratio": None},
    ],
}


CHECKS = (
    Check(name="open files", status="fine"),
    Check(name="data loading", status="finding"),
    Check(name="GPU memory", status="not judged", reason="no GPU in use"),
)


def verdict(*findings: Finding, **changes) -> Verdict:
    values = {
        "findings": findings,
        "checks": CHECKS,
        "status": "finished",
        "exit_status": 0,
        "attempts": 1,
        "steps": 1200,
        "step_unit": "optimizer step",
        "watch_ended": False,
        "batches": 1200,
        "duration_seconds": 61.2,
        "workers_reporting": (4, 4),
        "summary": {
            "peak": {"run_pss_bytes": 1.9 * GIB, "device_reserved_bytes": None},
            "start": None,
            "throughput": {"steps_per_second": 19.6, "samples_per_second": None, "slowdown": None},
            "data_wait_ratio": 0.31,
            "exposed_stall": [STALL],
            "outside_step": None,
            "overhead": {"collector_cpu_ratio": math.nan, "collector_private_dirty_bytes": 79 * MIB},
            "last_minute": [],
            "earlier_workers_count": 0,
        },
    }
    return Verdict(**(values | changes))


def card(made: Verdict, *, width: int = 80, color: bool = False, verbose: bool = False, crop: bool = True) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    console.print(
        report.card(
            made,
            run_id="20261121-101500-demo-1a2b",
            name="demo",
            command=lambda *words: " ".join(["tidegauge", *words]),
            verbose=verbose,
        ),
        crop=crop,
    )
    return stream.getvalue()
