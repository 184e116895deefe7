"""Scripted runs that end in a known way, and the deaths that the verdict finds in them."""

from simulated_runs import MAIN, MIB, START_SECONDS, jittered, sample_host, sample_process, simulate

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

COLLECTOR = ("node", 90, 4900)
WORKERS = [("node", 1000 + worker, 7000 + worker) for worker in range(2)]
DEATHS = {"killed", "worker-killed", "host-oom-kill", "crashed"}
KILLED_MESSAGE = "DataLoader worker (pid 1001) is killed by signal: Killed. "


def training(*, collector=True):
    """Return a run of two workers in the middle of its training, with all processes alive."""
    script = simulate(workers=2, prefetch=2, service=jittered(0.01), consumer=jittered(0.02), batches=60)
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    script.living = frozenset({MAIN, COLLECTOR, *WORKERS})
    if not collector:
        script.living -= {COLLECTOR}
    return script


def end_run(script, exit_status=None, *, alive=()):
    """End all processes except `alive`; with an exit status, the collector saw the end."""
    end = script.now_seconds
    script.living = frozenset(alive)
    if exit_status is not None:
        script.event(end, "command-exit", COLLECTOR, command_pid=MAIN[1], exit_status=exit_status)
        script.event(end + 0.1, "collector-stop", COLLECTOR, records_count=1)
    return script


def end_training(script):
    return script.event(script.now_seconds - 0.3, "process-exit", lost_count=0)


def end_workers(script, *who, reason="done"):
    for worker in who or (0, 1):
        script.event(
            script.now_seconds - 0.4, "worker-exit", WORKERS[worker], loader=0, worker=worker, reason=reason
        )
    return script


def exception(script, kind, message="", **fields):
    return script.event(script.now_seconds - 0.5, "exception", type=kind, message=message, traceback="…", **fields)


def deaths(script):
    return [
        (f.kind, f.locus.role, f.locus.worker, f.severity)
        for f in diagnose(script.tables()).findings
        if f.kind in DEATHS
    ]


def with_memory(script, counts, *, column="cgroup_oom_kill_count"):
    seconds = [START_SECONDS + second for second in range(len(counts))]
    sample_host(script, seconds, demand=[900 * MIB] * len(counts), limit=1024 * MIB, **{column: counts})
    sample_process(
        script, seconds, MAIN, ROLE_MAIN, private=[300 * MIB] * len(counts), rss=[400 * MIB] * len(counts)
    )
    for worker, key in enumerate(WORKERS):
        held = [(worker + 1) * 250 * MIB] * len(counts)
        sample_process(script, seconds, key, ROLE_WORKER, private=held, rss=held, worker=worker, loader=0)
    return script
