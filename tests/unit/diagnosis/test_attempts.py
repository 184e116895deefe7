"""Attempts of an elastic job, and a process that was watched from outside."""

from __future__ import annotations

from simulated_runs import HOST, MAIN, MIB, START_SECONDS, Script, ns

from collector.diagnosis.verdict import diagnose

LAUNCHER = 100


def rank(script, number, attempt, *, steps, begin=START_SECONDS):
    key = (HOST, 200 + 10 * attempt + number, 6000 + attempt)
    script.event(begin, "process-start", key, number, parent_pid=LAUNCHER, attempt=attempt)
    rows = [{"time_ns": ns(begin + 1 + k), "step": k, "duration_ns": ns(1)} for k in range(steps)]
    script.add("step", rows, key, number)
    return key


def restarted_job():
    """Rank 1 raises after 5 steps, rank 0 is stopped; the second attempt is at its third step."""
    script = Script()
    rank(script, 0, 0, steps=5)
    failed = rank(script, 1, 0, steps=5)
    script.event(START_SECONDS + 6, "exception", failed, 1, type="ValueError", message="no such row", traceback="")
    script.event(START_SECONDS + 6.1, "process-exit", failed, 1, lost_count=0)
    second = [rank(script, number, 1, steps=3, begin=START_SECONDS + 10) for number in (0, 1)]
    return script, second


def test_job_in_its_second_attempt_is_running():
    script, second = restarted_job()
    script.living = frozenset([MAIN, *second])
    verdict = diagnose(script.tables())
    assert (verdict.status, verdict.attempts, verdict.steps) == ("running", 2, 3)
    [restart] = [finding for finding in verdict.findings if finding.severity != "info"]
    assert (restart.kind, restart.locus.rank, restart.since_step) == ("crashed", 1, 4)
    assert "exception of rank 1: ValueError: no such row. 1 of 2 ranks recorded no end" in restart.summary


def test_verdict_is_that_of_the_last_attempt():
    script, second = restarted_job()
    script.event(START_SECONDS + 20, "exception", second[0], 0, type="KeyError", message="'x'", traceback="")
    script.event(START_SECONDS + 20, "process-exit", second[0], 0, lost_count=0)
    script.manifest |= {"exit_status": 1}
    verdict = diagnose(script.tables())
    assert verdict.status == "failed"
    assert [(f.severity, f.locus.rank) for f in verdict.findings if f.kind == "crashed"] == [
        ("critical", 0),
        ("warning", 1),
    ]


def watched_verdict(*, oom_kills):
    script = Script()
    script.manifest |= {"watched": True, "end_time_ns": ns(START_SECONDS + 10)}
    host, pid, ticks = MAIN
    for k in range(10):
        row = {"process_pid": pid, "process_start_ticks": ticks, "rss_bytes": 900 * MIB, "alive": int(k < 9)}
        script.add("process", [{"time_ns": ns(START_SECONDS + k), **row}], (host, 90, 4900))
        count = oom_kills if k >= 9 else 0
        gauges = {"cgroup_limit_bytes": 1000 * MIB, "cgroup_oom_kill_count": count}
        script.add("host", [{"time_ns": ns(START_SECONDS + k), **gauges}], (host, 90, 4900))
    return diagnose(script.tables())


def test_watched_process_that_exited_is_finished():
    verdict = watched_verdict(oom_kills=0)
    assert verdict.status == "finished"
    assert [finding.kind for finding in verdict.findings] == ["cannot-tell"]
    reasons = {check.name: check.reason for check in verdict.checks}
    names = ("how the run ended", "workers' memory", "data loading", "pauses of the training")
    assert [reasons[name] for name in names] == ["watched from outside"] * 4


def test_oom_kill_of_a_watched_process_is_critical():
    kinds = {finding.kind: finding.severity for finding in watched_verdict(oom_kills=1).findings}
    assert kinds["host-oom-kill"] == "critical"
