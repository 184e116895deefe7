"""Files that stay open are found; files that are closed again are not."""

import json

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, finish, jittered, sample_host, sample_process, simulate

from collector.diagnosis import checks, verdict
from collector.diagnosis.memory.file_descriptors import find_descriptors
from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_MAIN, ROLE_WORKER

COUNT = 120
SECONDS = np.arange(COUNT) * 0.5 + START_SECONDS + 1
WORKER = ("node", 1000, 7000)
AT = np.arange(COUNT)
FLAT = np.full(COUNT, 40.0)
ZIGZAG = FLAT + AT % 3


def training(*, main=FLAT, worker=FLAT, limit=1024.0, mapped=FLAT):
    """60 s of healthy loading, with open files of the training process and of one worker."""
    script = simulate(workers=2, prefetch=2, service=jittered(0.2), consumer=jittered(0.25), batches=230)
    held, told = np.full(COUNT, 300 * MIB), np.where(AT % 10 == 0, limit, np.nan)
    sample_process(
        script,
        SECONDS,
        MAIN,
        ROLE_MAIN,
        private=held,
        rss=held,
        shm_bytes=mapped,
        fd_count=np.floor(main),
        fd_limit_count=told,
    )
    sample_process(
        script,
        SECONDS,
        WORKER,
        ROLE_WORKER,
        private=held,
        rss=held,
        worker=0,
        loader=0,
        fd_count=np.floor(worker),
        fd_limit_count=told,
    )
    return script


def findings_of(script):
    return find_descriptors(script.tables())


def kinds(script):
    return [finding.kind for finding in findings_of(script)]


@pytest.mark.parametrize(
    "healthy",
    [
        FLAT,
        ZIGZAG,
        40 + 60 * (1 - np.exp(-AT / 8)),  # warm-up
        40 + 30 * (AT > 50),  # a step: a second loader
        40 + 12 * (AT > 30) + 12 * (AT > 80),  # two
        40 + 20 * (AT % 12 < 9),  # workers that are started again in each epoch
        40 + AT / 12,  # ten files over the run: a log per epoch
        40 + 9 * np.random.default_rng(1).poisson(2, COUNT),  # batches under way
    ],
)
def test_files_that_are_closed_again_are_no_leak(healthy):
    assert kinds(training(main=healthy, worker=healthy)) == []


def test_files_that_stay_open_are_a_leak_with_a_time_to_the_limit():
    found = {finding.kind: finding for finding in diagnose(training(main=ZIGZAG + 3 * AT).tables()).findings}
    leak, risk = found["fd-leak"], found["fd-exhaustion-risk"]
    assert leak.rate.value == pytest.approx(6, rel=0.05)
    assert leak.locus.pid == MAIN[1]
    assert {e.name for e in leak.evidence} >= {"fd_rise_count", "fd_limit_count", "fd_per_step"}
    assert risk.limit.value == 1024
    assert risk.severity == "critical"
    assert risk.eta.mid_seconds == pytest.approx((1024 - 40 - 3 * COUNT) / 6, rel=0.1)


def test_worker_that_leaks_most_is_named_with_the_others_that_leak():
    script = training(worker=FLAT + AT)
    (leak,) = (f for f in findings_of(script) if f.kind == "fd-leak")
    assert (leak.locus.role, leak.locus.worker, leak.locus.loader) == ("worker", 0, 0)
    opened = {"fd_count": FLAT + 2 * AT, "fd_limit_count": np.full(COUNT, 1024.0)}
    other = (WORKER[0], WORKER[1] + 1, WORKER[2])
    sample_process(script, SECONDS, other, ROLE_WORKER, private=FLAT, rss=FLAT, worker=1, loader=0, **opened)
    (leak,) = (f for f in findings_of(script) if f.kind == "fd-leak")
    assert leak.locus.worker == 1
    assert leak.summary.endswith("Worker 0 leaks files, too.")


def sweep(leaked):
    """Epochs with 0, 2, … 14 workers, each of which has four descriptors open in the training process."""
    workers = 2 * (AT // 15)
    script = training(main=FLAT + 4 * workers + leaked)
    for epoch in range(1, 8):
        for worker in range(2 * epoch):
            seconds = SECONDS[workers == 2 * epoch]
            held = np.full(len(seconds), MIB)
            who = ("node", 2000 + 100 * epoch + worker, 8000)
            sample_process(
                script,
                seconds,
                who,
                ROLE_WORKER,
                private=held,
                rss=held,
                loader=epoch,
                worker=worker,
                fd_count=held,
            )
    return script


def restarts(*, are_kept, batch=0, seen_after=0.0):
    """Two workers in each of 18 epochs, three descriptors each; they live on while their iterator is kept.

    The collector sees them `seen_after` seconds after they began.
    Each feeds on a thread of the training process, which keeps 8 MiB per iterator and maps the last `batch` (MiB).
    """
    script = simulate(
        workers=2,
        prefetch=2,
        service=jittered(0.2),
        consumer=jittered(0.25),
        batches=10,
        epochs=18,
        persistent=False,
    )
    starts = [event for event in script.events if event["kind"] == "epoch-start"]
    begins = [event["time_ns"] / 1e9 for event in starts]
    living = np.searchsorted(begins, SECONDS, side="right") if are_kept else np.ones(COUNT)
    held = dict.fromkeys(("private", "rss"), (300 + 8 * living) * MIB)
    held |= {"thread_count": 3 + 2 * living, "shm_bytes": 0.1 * living * batch * MIB}
    for part in script.parts["batch"]:
        part["payload_bytes"] = batch * MIB
    shared = {"shm_used_bytes": living * batch * MIB, "memory_shmem_bytes": living * batch * MIB}
    shared["shm_total_bytes"] = np.full(COUNT, 10**13)
    sample_host(script, SECONDS, demand=held["rss"], total=10**14, **shared)
    opened = {"fd_count": FLAT + 6 * living, "fd_limit_count": np.full(COUNT, 1024.0)}
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, **held, **opened)
    for begin, end, event in zip(begins, [*begins[1:], np.inf], starts, strict=True):
        seconds = SECONDS[(begin + seen_after <= SECONDS) & (are_kept | (end > SECONDS))]
        held = np.full(len(seconds), 30 * MIB)
        for worker, pid in enumerate(event["worker_pids"]):
            key = ("node", pid, 6000 + pid)
            slot = {"worker": worker, "loader": 0, "fd_count": np.full(len(seconds), 12.0)}
            sample_process(script, seconds, key, ROLE_WORKER, private=held, rss=held, **slot)
    return script


def test_files_that_workers_close_with_their_epoch_do_not_run_out():
    """Two epochs of 30 s, whose workers open one file in each half second: far fewer than 1,024 in an epoch."""

    def script(*, epochs, is_tried=False):
        loading = {"workers": 2, "prefetch": 2, "service": jittered(0.2), "consumer": jittered(0.25)}
        made = simulate(**loading, batches=228 // epochs, epochs=epochs, persistent=False)
        events = [event for event in made.events if event["kind"] == "epoch-start"]
        begins = [event["time_ns"] / 1e9 for event in events]
        if is_tried:
            made.events.insert(0, {**events[0], "time_ns": events[0]["time_ns"] - 10**9, "worker_pids": [900, 901]})
        for begin, end, event in zip(begins, [*begins[1:], np.inf], events, strict=True):
            seconds = SECONDS[(begin <= SECONDS) & (end > SECONDS)]
            held, opened = np.full(len(seconds), 30 * MIB), 12.0 + np.arange(len(seconds))
            for worker, pid in enumerate(event["worker_pids"]):
                slot = {"worker": worker, "loader": 0, "fd_count": opened, "fd_limit_count": opened * 0 + 1024}
                sample_process(
                    made, seconds, ("node", pid, 6000 + pid), ROLE_WORKER, private=held, rss=held, **slot
                )
        return made

    assert kinds(script(epochs=2)) == ["fd-leak"]
    assert kinds(script(epochs=1)) == ["fd-leak", "fd-exhaustion-risk"], "how long its workers live is not known"
    tried = kinds(script(epochs=1, is_tried=True))
    assert tried == ["fd-leak", "fd-exhaustion-risk"], "a first look at the loader says nothing about an epoch"


def test_workers_of_iterators_that_are_kept_are_a_leak():
    (leak,) = (finding for finding in findings_of(restarts(are_kept=True)) if finding.kind == "fd-leak")
    assert leak.severity == "warning"
    assert leak.value_of("kept_workers_count") == 34
    assert "34 workers of earlier iterators still live." in leak.summary
    assert "iterators" in leak.advice[0].text
    assert kinds(restarts(are_kept=False)) == []
    assert "fd-leak" in kinds(restarts(are_kept=True, seen_after=4)), "epochs are shorter than that"


def test_check_whose_rule_failed_is_not_fine(monkeypatch):
    monkeypatch.setattr(verdict, "find_descriptors", lambda _: 1 / 0)
    [check] = [one for one in diagnose(training().tables()).checks if one.name == "open files"]
    assert (check.status, check.reason) == ("not judged", "its rule failed")


def test_each_rule_belongs_to_a_check_that_is_not_fine_without_it(monkeypatch):
    names = set()

    def guarded(name, rule, *arguments):
        names.add(name)
        return rule(*arguments)

    monkeypatch.setattr(verdict, "_guarded", guarded)
    diagnose(training().tables())
    assert names == {name for rules in checks._RULES.values() for name in rules}


def test_descriptors_of_living_workers_are_no_leak():
    assert kinds(sweep(0 * AT)) == []


def test_descriptors_beyond_those_of_living_workers_are_a_leak():
    leak = next(f for f in findings_of(sweep(3 * AT)) if f.kind == "fd-leak")
    assert leak.rate.value == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize(("later", "kinds_found"), [(0, []), (1, ["fd-leak", "fd-exhaustion-risk"])])
def test_batches_held_only_in_the_first_epoch_are_no_leak(later, kinds_found):
    filled = COUNT * 11 // 20
    script = training(main=40 + 3 * np.minimum(AT, filled) + 3 * later * np.maximum(AT - filled, 0))
    held = np.full(filled, MIB)
    who = ("node", 1001, 7001)  # lives as long as the first epoch
    sample_process(script, SECONDS[:filled], who, ROLE_WORKER, private=held, rss=held, worker=1, loader=0)
    assert kinds(script) == kinds_found


def test_increase_in_each_of_many_epochs_is_a_leak():
    assert "fd-leak" in kinds(training(main=40 + 8 * (AT // 10)))


def test_limit_of_a_million_files_is_no_risk():
    assert kinds(training(main=FLAT + AT, limit=2.0**20)) == ["fd-leak"]


def test_leak_with_growing_shared_memory_is_blamed_on_held_batches():
    leak = next(
        f for f in findings_of(training(main=FLAT + 3 * AT, mapped=MIB + 3 * AT * 8192)) if f.kind == "fd-leak"
    )
    assert "batches" in leak.advice[0].text
    assert "process_shm_rise_bytes" in {e.name for e in leak.evidence}


def test_unconfirmed_leak_is_not_claimed():
    script = training(main=FLAT + 3 * AT, limit=np.nan)
    del script.parts["step"]
    assert kinds(script) == ["cannot-tell"]


def test_nearly_all_files_in_use_is_a_risk_without_growth():
    risk = findings_of(training(main=np.full(COUNT, 1000.0)))
    assert [(f.kind, f.eta) for f in risk] == [("fd-exhaustion-risk", None)]


def test_finding_of_a_finished_run_uses_the_past_tense():
    risk = next(f for f in findings_of(finish(training(main=FLAT + 3 * AT))) if f.kind == "fd-exhaustion-risk")
    assert "would have lasted" in risk.summary


def test_what_workers_of_kept_iterators_hold_is_told_as_theirs():
    """Their threads are no threads that never end, and their descriptors no batches that training keeps."""
    found = {finding.kind: finding for finding in diagnose(restarts(are_kept=True, batch=4).tables()).findings}
    assert "never end" not in found["main-heap-leak"].advice[0].text
    assert (found["fd-leak"].severity, found["fd-leak"].consequence_of) == ("warning", None)
    assert json.loads(json.dumps(found["fd-leak"].value_of("kept_workers_count"))) == 34
    assert (found["shm-leak"].severity, found["shm-leak"].consequence_of) == ("info", "fd-leak")
    assert "holds it" not in found["shm-leak"].summary
