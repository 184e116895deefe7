"""Findings that are reported while a training on the GPU goes on."""

from __future__ import annotations

import time


def test_live_finding_comes_a_minute_before_the_limit_is_met(watched, tmp_path):
    """The limit is approached over two minutes: 1200 MiB at 10 MiB/s."""
    findings_log = tmp_path / "told"
    command = f"echo $(date +%s) $TIDEGAUGE_FINDING_KIND >> {findings_log}"
    arguments = ("tensors", "--bytes", str(512 << 10), "--seconds", "0.045", "--steps", "9000")
    run = watched("growth.py", *arguments, options=("--on-finding", command), memory="1600M")
    died = time.time()
    assert run.findings("cuda-oom")
    times = {kind: int(at) for at, kind in (line.split() for line in findings_log.read_text().splitlines())}
    assert times["gpu-oom-risk"] <= died - 60
