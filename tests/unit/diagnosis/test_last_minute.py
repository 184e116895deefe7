"""The last minute of every process, as a table and in the report."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from simulated_runs import MAIN, MIB, START_SECONDS, Script, jittered, sample_process, simulate, start_training

from collector.diagnosis.deaths.last_minute import last_minute, last_states
from collector.diagnosis.verdict import diagnose
from collector.report import card
from tests.recorded_runs import recorded
from training_harness.records import ROLE_MAIN, ROLE_OTHER, ROLE_WORKER

WORKER = ("node", 1000, 7000)
FORMER = ("node", 900, 3000)


def in_words(*words):
    return " ".join(["tidegauge", *words])


def killed_training():
    """A training of 120 s whose worker's growth ends with it; another worker left in its first seconds."""
    script = simulate(workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=235)
    seconds = [START_SECONDS + second for second in range(120)]
    held = [(100 + second) * MIB for second in range(120)]
    sample_process(script, seconds[:3], MAIN, ROLE_OTHER, private=held[:3], rss=held[:3])
    sample_process(script, seconds[3:], MAIN, ROLE_MAIN, private=[200 * MIB] * 117, rss=[300 * MIB] * 117, rank=0)
    sample_process(script, seconds, WORKER, ROLE_WORKER, private=held, rss=held, worker=0, loader=0, rank=0)
    sample_process(script, seconds[:9], FORMER, ROLE_WORKER, private=held[:9], rss=held[:9], worker=1, loader=0)
    script.manifest["exit_status"] = -9
    return script


def test_last_minute_has_samples_only_of_processes_alive_then():
    samples = last_minute(killed_training().tables())
    assert set(samples["pid"]) == {MAIN[1], WORKER[1]}
    assert set(samples[samples["pid"] == MAIN[1]]["role"]) == {"main"}
    assert samples["seconds"].between(-60, 0).all()
    grown = samples[samples["pid"] == WORKER[1]]["private_dirty_bytes"]
    assert len(grown) > 50
    assert grown.is_monotonic_increasing


def test_memory_is_that_before_the_exception_which_frees_it():
    script = start_training()
    seconds = [START_SECONDS + second for second in range(30)]
    held = [(300 + 10 * second) * MIB for second in range(25)] + [200 * MIB] * 5
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held)
    script.event(seconds[24] + 0.5, "exception", type="MemoryError", message="")
    [state] = last_states(script.tables()).to_dict("records")
    assert (state["held_bytes"], state["held_rise_bytes"]) == (540 * MIB, 240 * MIB)
    assert state["seconds"] == 0


def test_report_of_a_death_has_memory_and_state_of_each_process():
    verdict = diagnose(killed_training().tables())
    body = json.loads(json.dumps(card.report(verdict, run_id="r", name="n")["summary"]["last_minute"]))
    main, worker = body
    assert (main["role"], main["pid"], main["rank"], main["step"]) == ("main", MAIN[1], 0, 234)
    assert main["phase"] in {"between steps", "forward or backward"}
    assert (worker["role"], worker["worker"], worker["batch"]) == ("worker", 0, 234)
    assert worker["private_dirty_bytes"] == 219 * MIB
    assert worker["held_rise_bytes"] == pytest.approx(60 * MIB, abs=4 * MIB)
    stream = io.StringIO()
    Console(file=stream, width=140).print(card.card(verdict, run_id="r", name="n", command=in_words))
    told = stream.getvalue().partition("last 60 s")[2]
    assert "worker 0, rank 0, pid 1000" in told
    assert "219 MiB" in told


def test_the_peak_of_a_run_that_died_is_at_least_what_a_process_last_held():
    """PSS is read seldom: after its last reading the training grew until its end."""
    script = start_training()
    seconds = START_SECONDS + np.arange(10.0)
    rss, pss = (400 + 100 * np.arange(10)) * MIB, np.full(10, np.nan)
    pss[:5] = rss[:5] - 150 * MIB
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=pss, rss=rss)
    script.now_seconds = seconds[-1] + 1
    script.event(script.now_seconds, "command-exit", ("node", 90, 4900), command_pid=MAIN[1], exit_status=-9)
    summary = diagnose(script.tables()).summary
    assert summary["last_minute"][0]["held_bytes"] == 1150 * MIB
    assert summary["peak"]["run_pss_bytes"] == 1150 * MIB


def test_short_training_is_named_as_one_although_it_was_sampled_before_it_trained():
    script = simulate(workers=0, prefetch=2, service=jittered(0.1), consumer=jittered(0.1), batches=5)
    sample_process(script, [START_SECONDS], MAIN, ROLE_OTHER, private=[MIB], rss=[MIB])
    script.manifest["exit_status"] = 1
    assert list(last_states(script.tables())["role"]) == ["main"]


def test_workers_of_earlier_epochs_are_counted_and_not_listed():
    script = killed_training()
    earlier = [("node", 1100 + epoch, 7100 + epoch) for epoch in range(3)]
    for epoch, worker in enumerate([*earlier, WORKER]):
        begin = START_SECONDS + 70 + 10 * epoch
        script.event(begin, "epoch-start", loader=0, epoch=epoch, worker_pids=[worker[1]], begun_ns=0)
        if worker != WORKER:
            rows = [(begin, 1), (begin + 8, 1), (begin + 9, 0)]
            script.add(
                "process",
                [
                    {
                        "time_ns": round(seconds * 1e9),
                        "process_pid": worker[1],
                        "process_start_ticks": worker[2],
                        "role": ROLE_WORKER,
                        "loader": 0,
                        "worker": 0,
                        "rss_bytes": 50 * MIB,
                        "alive": alive,
                    }
                    for seconds, alive in rows
                ],
                ("node", 90, 4900),
            )
    verdict = diagnose(script.tables())
    assert [state["pid"] for state in verdict.summary["last_minute"]] == [MAIN[1], WORKER[1]]
    assert verdict.summary["earlier_workers_count"] == 3
    stream = io.StringIO()
    Console(file=stream, width=140).print(card.card(verdict, run_id="r", name="n", command=in_words))
    assert "3 workers of earlier epochs had ended before." in stream.getvalue()


def test_training_that_ended_minutes_before_the_others_has_its_last_memory():
    script = killed_training()
    first = ("node", 800, 2000)
    seconds = [START_SECONDS + second for second in range(20)]
    held = [150 * MIB] * 20
    start_training(script, key=first, rank=1)
    sample_process(script, seconds, first, ROLE_MAIN, private=held, rss=held, rank=1)
    verdict = diagnose(script.tables())
    [state] = [state for state in verdict.summary["last_minute"] if state["pid"] == first[1]]
    assert (state["rank"], state["held_bytes"]) == (1, 150 * MIB)
    assert state["seconds"] < -60
    stream = io.StringIO()
    Console(file=stream, width=140).print(card.card(verdict, run_id="r", name="n", command=in_words))
    assert "last seen 1 min 40 s before the end" in stream.getvalue()


def test_the_process_that_died_stays_on_the_card_of_many_earlier_trainings():
    script = killed_training()
    seconds = [START_SECONDS + second for second in range(20)]
    for pid in range(801, 807):
        start_training(script, key=("node", pid, 2000), rank=None)
        sample_process(
            script, seconds, ("node", pid, 2000), ROLE_MAIN, private=[900 * MIB] * 20, rss=[900 * MIB] * 20
        )
    stream = io.StringIO()
    verdict = diagnose(script.tables())
    Console(file=stream, width=140).print(card.card(verdict, run_id="r", name="n", command=in_words))
    processes = [line for line in stream.getvalue().splitlines() if "training" in line and "MiB" in line]
    assert "200 MiB" in processes[0]
    assert "900 MiB" in processes[1]


def test_phase_of_a_step_is_open_where_no_loader_says_when_it_begins():
    script = killed_training()
    del script.parts["batch"]
    [main] = [state for state in last_states(script.tables()).to_dict("records") if state["role"] == "main"]
    assert main["phase"] == "outside the optimizer"


def test_live_run_has_no_last_minute_and_unsampled_run_has_steps():
    script = killed_training()
    del script.manifest["exit_status"]
    script.living = frozenset({MAIN})
    assert diagnose(script.tables()).summary["last_minute"] == []
    blind = simulate(workers=1, prefetch=2, service=jittered(0.1), consumer=jittered(0.5), batches=20)
    states = last_states(blind.tables())
    assert list(states["step"]) == [19]
    assert states["rss_bytes"].isna().all()
    assert last_states(Script().tables()).empty


def test_error_in_a_forward_pass_is_not_told_as_one_in_the_optimizer():
    """The allocators are recorded at an error too, in whatever phase."""
    [state] = last_states(recorded("out-of-memory")).to_dict("records")
    assert state["phase"] == "forward or backward"
