"""Findings about a full /dev/shm, and about processes that it kills."""

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, ns, sample_host, sample_process, simulate

from collector.diagnosis.deaths.deaths import find_deaths
from collector.diagnosis.memory.shared_memory import find_shared_memory
from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

COUNT = 60
SECONDS = np.arange(COUNT) + START_SECONDS + 1
AT = np.arange(COUNT)
FLAT = np.zeros(COUNT)
NOISE = np.random.default_rng(0).integers(0, 9, COUNT)


def training(
    *, shm=FLAT, unwritten=FLAT, mapped=FLAT, cgroup=None, counted=FLAT, total=64 * 1024, payload=1.0, files=None
):
    """Return 60 s of healthy loading, with MiB of /dev/shm in use, mapped by training, and of its cgroup."""
    script = simulate(workers=2, prefetch=2, service=jittered(0.2), consumer=jittered(0.25), batches=230)
    for part in script.parts["batch"]:
        part["payload_bytes"] = payload * MIB
    script.living = frozenset({MAIN})
    held = np.full(COUNT, 300 * MIB)
    open_files = {} if files is None else {"fd_count": 40.0 + files}
    noise = NOISE * (MIB if files is None else 1024)
    sample_process(
        script, SECONDS, MAIN, ROLE_MAIN, private=held, rss=held, shm_bytes=mapped * MIB + noise, **open_files
    )
    limits = {} if cgroup is None else {"limit": 2**50, "cgroup_shmem_bytes": (cgroup + NOISE) * MIB}
    return sample_host(
        script,
        SECONDS,
        demand=(4000 + NOISE) * MIB,
        memory_shmem_bytes=(90 + counted) * MIB,
        shm_used_bytes=(shm + NOISE) * MIB,
        shm_unwritten_bytes=unwritten * MIB,
        shm_total_bytes=np.full(COUNT, total * MIB),
        total=2**50,
        **limits,
    )


def findings_of(script):
    return [*find_shared_memory(script.tables()), *find_deaths(script.tables())]


def kinds(script):
    return [finding.kind for finding in findings_of(script)]


@pytest.mark.parametrize(
    "healthy",
    [
        FLAT,
        200 * (1 - np.exp(-AT / 5)),  # the batches under way when it begins
        300.0 * (AT > 30),  # a second loader
        200.0 * (AT % 15 > 3),  # epochs
        100.0 * np.random.default_rng(2).random(COUNT),  # batches of all sizes
    ],
)
def test_segments_that_come_and_go_are_no_leak(healthy):
    assert kinds(training(shm=healthy, mapped=healthy, cgroup=healthy)) == []


def test_a_segment_that_is_filled_with_data_is_no_leak_and_hides_none():
    filling = 5.0 * AT
    series = dict.fromkeys(("shm", "mapped", "cgroup"), filling)
    assert kinds(training(unwritten=600 - filling, **series)) == []
    leaking = dict.fromkeys(series, filling + 3.0 * AT)
    leak, *_ = findings_of(training(unwritten=600 - filling, **leaking))
    assert leak.kind == "shm-leak"
    assert leak.rate.value == pytest.approx(3 * MIB, rel=0.1)


@pytest.mark.parametrize("where", ["mapped", "cgroup"])
def test_segments_that_stay_are_a_leak_of_the_run(where):
    leak = findings_of(training(shm=10.0 * AT, **{where: 10.0 * AT}))
    assert [f.kind for f in leak] == ["shm-leak", "shm-exhaustion-risk"]
    assert leak[1].advice[1].expected == "it is full later, in proportion to its size"
    assert leak[0].rate.value == pytest.approx(10 * MIB, rel=0.05)
    assert len({e.name for e in leak[0].evidence}) >= 2


def keeping(*, private, total=64 * 1024):
    """Return a training that keeps batches of 10 MiB/s in two tensors each, and takes private memory of its own."""
    script = training(shm=10.0 * AT, mapped=10.0 * AT, cgroup=10.0 * AT, total=total)
    script.parts["process"].clear()
    held = (300 + private + NOISE / 100) * MIB
    sample_process(
        script, SECONDS, MAIN, ROLE_MAIN,
        private=held, rss=held + 10.0 * AT * MIB, shm_bytes=(10.0 * AT + NOISE) * MIB, data_bytes=held,
        fd_count=40.0 + 8 * AT, fd_limit_count=np.full(COUNT, 1e6),
    )  # fmt: skip
    return diagnose(script.tables())


def test_kept_batches_come_before_the_shared_memory_that_they_take():
    verdict = keeping(private=FLAT)
    first, *rest = verdict.findings
    assert (first.kind, first.severity) == ("fd-leak", "warning")
    assert "keeps tensors in shared memory, such as batches from its workers" in first.summary
    leak = next(finding for finding in rest if finding.kind == "shm-leak")
    assert (leak.severity, leak.consequence_of, leak.locus.pid) == ("info", "fd-leak", MAIN[1])
    assert leak.summary.endswith("It grows with what the training process keeps: fix fd-leak first.")
    assert {check.name: check.status for check in verdict.checks}["/dev/shm"] == "finding"


def test_kept_graphs_come_before_the_batches_that_they_hold():
    found = keeping(private=5.0 * AT).findings
    assert (found[0].kind, found[0].severity) == ("main-heap-leak", "warning")
    followers = {finding.kind: finding for finding in found if finding.consequence_of == "main-heap-leak"}
    assert {"fd-leak", "shm-leak"} <= set(followers)
    assert {followers[kind].severity for kind in ("fd-leak", "shm-leak")} == {"info"}


def test_a_limit_that_kept_batches_will_meet_stays_urgent_and_names_the_cause():
    risk = next(
        finding for finding in keeping(private=FLAT, total=1200).findings if finding.kind == "shm-exhaustion-risk"
    )
    assert (risk.severity, risk.consequence_of) == ("critical", "fd-leak")


def test_segments_that_several_processes_map_are_a_leak_of_the_run():
    script = training(shm=10.0 * AT, mapped=3.0 * AT)
    held = np.full(COUNT, 300 * MIB)
    for pid in (71, 72):
        other = (MAIN[0], pid, 4800 + pid)
        sample_process(script, SECONDS, other, ROLE_MAIN, private=held, rss=held, shm_bytes=3.0 * AT * MIB)
    leak = next(f for f in findings_of(script) if f.kind == "shm-leak")
    assert leak.value_of("process_shm_rise_bytes") > 0.7 * leak.value_of("shm_used_rise_bytes")
    assert leak.confidence == 0.9


def test_a_process_that_does_not_train_is_named_as_the_holder():
    """An actor keeps what it sends to the training."""
    script, held, actor = training(shm=10.0 * AT), np.full(COUNT, 300 * MIB), (MAIN[0], 71, 4871)
    sample_process(script, SECONDS, actor, ROLE_OTHER, private=held, rss=held, shm_bytes=10.0 * AT * MIB)
    leak = next(f for f in findings_of(script) if f.kind == "shm-leak")
    assert leak.locus.pid == 71
    assert "holds it" in leak.summary


def test_leak_has_the_rate_of_the_run_if_others_fill_shm_too():
    leak = next(
        f for f in findings_of(training(shm=10.0 * AT, mapped=4.0 * AT, counted=10.0 * AT)) if f.kind == "shm-leak"
    )
    assert leak.rate.value == pytest.approx(4 * MIB, rel=0.1)
    assert "other programs fill it too" in leak.summary


def test_unmapped_segments_are_found_by_the_kernels_count():
    leak = next(f for f in findings_of(training(shm=10.0 * AT, counted=10.0 * AT)) if f.kind == "shm-leak")
    assert "batches that are kept and not read" in leak.summary
    assert (leak.fault, leak.severity) == (None, "warning")  # it may be another program's
    assert leak.confidence < 0.9


def test_growth_beside_a_run_that_uses_no_shared_memory_is_no_warning():
    script, nearly_full = (training(shm=10.0 * AT, counted=10.0 * AT, total=total) for total in (64 * 1024, 2048))
    for part in (*script.parts["process"], *nearly_full.parts["process"]):
        part["shm_bytes"] = 4096  # a semaphore
    found = findings_of(script)
    assert [(finding.kind, finding.severity) for finding in found] == [("shm-leak", "info")]
    assert {finding.severity for finding in findings_of(nearly_full)} == {"info"}
    assert "shm-exhaustion-risk" in kinds(nearly_full)
    assert "another program's, or files that the run writes there" in found[0].summary
    tracker = {
        "process_pid": 71,
        "process_start_ticks": 4871,
        "argv": ["python", "-c", "multiprocessing.resource_tracker"],
    }
    script.event(START_SECONDS, "process-seen", **tracker)
    assert findings_of(script)[0].severity == "warning", "it makes segments and closes them"


def test_segments_of_another_job_are_a_risk_and_no_leak_of_the_run():
    assert kinds(training(shm=10.0 * AT, counted=10.0 * AT, cgroup=FLAT)) == ["shm-exhaustion-risk"]


def test_segments_released_at_the_end_are_still_a_leak():
    script = training(shm=10.0 * AT, counted=10.0 * AT)
    for name in ("batch", "step"):
        script.parts[name] = [part[part["time_ns"] < SECONDS[45] * 1e9] for part in script.parts[name]]
    for name in ("shm_used_bytes", "memory_shmem_bytes"):
        script.parts["host"][-1].loc[AT > 45, name] = 90 * MIB
    assert kinds(script)[0] == "shm-leak"


def test_unconfirmed_growth_is_not_claimed():
    assert kinds(training(shm=10.0 * AT)) == ["cannot-tell"]


def test_little_growth_in_a_nearly_empty_dev_shm_is_not_running_out():
    risk = next(f for f in findings_of(training(shm=10.0 * AT, mapped=10.0 * AT)) if "risk" in f.kind)
    assert risk.severity == "info"
    assert "63.4 GiB are left of 64 GiB, too much for a warning" in risk.summary


def test_risk_has_the_time_until_shm_is_full():
    risk = next(f for f in findings_of(training(shm=10.0 * AT, mapped=10.0 * AT, total=1200)) if "risk" in f.kind)
    assert risk.severity == "critical"
    assert risk.eta.mid_seconds == pytest.approx(60, rel=0.2)


def test_no_room_for_the_next_batches_is_a_risk_without_growth():
    risk = findings_of(training(shm=FLAT + 40, total=64, payload=10))
    assert [(f.kind, f.severity, f.eta) for f in risk] == [("shm-exhaustion-risk", "warning", None)]
    assert kinds(training(shm=FLAT + 40, total=64, payload=4)) == []


def killed_by_sigbus(script, *, message=None):
    script.living = frozenset()
    end = SECONDS[-1] - 0.5
    if message is None:
        script.event(end, "worker-died", loader=0, epoch=0, worker=1, worker_pid=1001, exit_code=-7, last_index=7)
    text = message or "DataLoader worker (pid(s) 1001) exited unexpectedly"
    script.event(end + 0.1, "exception", type="RuntimeError", message=text, traceback="")
    script.event(end + 0.2, "process-exit", lost_count=0)
    return script.event(end + 0.3, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=1)


BUS_ERROR = "DataLoader worker (pid 1001) is killed by signal: Bus error. It is possible that"


@pytest.mark.parametrize("message", [None, BUS_ERROR])
def test_worker_killed_by_sigbus_with_full_shm_is_blamed_on_it(message):
    full = np.where(AT >= 56, 55.0, 20.0)  # the sample after its end finds room again
    full[-1] = 20
    death = next(
        f
        for f in findings_of(killed_by_sigbus(training(shm=full, total=64), message=message))
        if "risk" not in f.kind
    )
    assert (death.kind, death.locus.worker, death.limit.value) == ("shm-bus-error", 1, 64 * MIB)
    assert {"shm_used_bytes", "signal"} <= {e.name for e in death.evidence}


@pytest.mark.parametrize("message", [None, BUS_ERROR])
def test_a_bus_error_with_room_in_dev_shm_is_not_blamed_on_it(message):
    assert kinds(killed_by_sigbus(training(shm=FLAT + 20), message=message)) == ["worker-killed"]


@pytest.mark.parametrize(("files", "kind"), [(2.0, "shm-bus-error"), (40.0, "worker-killed")])
def test_burst_between_two_ticks_is_seen_in_the_samples_between_unless_the_worker_maps_files(files, kind):
    script = training(shm=FLAT + 4, total=64)
    worker = ("node", 1001, 7001)
    held, read = np.full(COUNT, 90 * MIB), files * MIB * AT / COUNT
    sample_process(
        script, SECONDS, worker, ROLE_WORKER, private=held, rss=held + read, worker=1, loader=0, file_bytes=read
    )
    early = SECONDS[-2] + 0.2 * np.arange(1, 4)
    rows = [
        {
            "time_ns": ns(at),
            "process_pid": worker[1],
            "process_start_ticks": worker[2],
            "rss_bytes": (90 + mapped) * MIB,
            "anon_bytes": 80 * MIB,
        }
        for at, mapped in zip([early[0] - 0.3, *early], (0, 0, 20, 45), strict=True)
    ]
    script.add("early_process", rows, ("node", 90, 4900))
    found = [f for f in findings_of(killed_by_sigbus(script)) if f.locus.role == "worker"]
    assert [f.kind for f in found] == [kind]
    if kind == "shm-bus-error":
        assert "probably when /dev/shm was full" in found[0].summary
        assert found[0].confidence < 0.9


@pytest.mark.parametrize(("payload", "advice"), [(10, "Give /dev/shm more room"), (0.01, "List the segments")])
def test_main_process_can_die_of_full_shm_that_batches_or_other_things_fill(payload, advice):
    script = training(shm=np.where(AT >= 50, 63.0, 55.0), total=64, payload=payload)
    script.living = frozenset()
    script.event(SECONDS[-1], "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=-7)
    (death,) = [f for f in findings_of(script) if f.kind == "shm-bus-error" and f.locus.role == "main"]
    assert death.advice[0].text.startswith(advice)


@pytest.mark.parametrize(("files", "kinds"), [(AT, ["shm-leak"]), (FLAT, [])])
def test_batches_that_are_kept_and_never_read_are_a_leak_of_the_run(files, kinds):
    """The training maps only the pages that it reads; the descriptors of the batches show that it keeps them."""
    script = training(shm=10.0 * AT, counted=10.0 * AT, payload=10.0, files=files)
    warnings = [finding for finding in find_shared_memory(script.tables()) if finding.severity != "info"]
    assert [finding.kind for finding in warnings] == kinds
    assert all("(pid 100) holds it" in finding.summary for finding in warnings)
    leak = next(f for f in diagnose(script.tables()).findings if f.kind == "shm-leak")
    assert (leak.consequence_of == "fd-leak") == bool(kinds)
