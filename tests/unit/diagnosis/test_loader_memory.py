"""Host memory of a loop: what is measured of it, and what other settings hold."""

import numpy as np
import pytest
from simulated_runs import MAIN, MIB, START_SECONDS, jittered, sample_host, sample_process, simulate

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.tuning.loader_memory import held_memory
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.what_if import forecast
from training_harness.records import ROLE_MAIN, ROLE_WORKER

SECONDS = START_SECONDS + np.arange(-1.0, 25.0)
SHARED = 300.0  # MiB that the training process and its workers share


def simulate_training(*, workers=2, prefetch=2, fetch=0.06, payload=0, private=100.0, copied=0.0, late_pss=None):
    """Return a loop of ten seconds or more with forked workers; sizes in MiB, by second where they grow."""
    script = simulate(
        workers=workers, prefetch=prefetch, service=jittered(fetch), consumer=jittered(0.03), batches=400
    )
    for rows in script.parts["batch"]:
        rows["payload_bytes"] = payload * MIB
    much = np.ones(len(SECONDS))
    sample_host(script, SECONDS, demand=much * 2**30, shm_used_bytes=much * 0)
    share = SHARED / (workers + 1)
    running = SECONDS > START_SECONDS
    pss = np.where(running, 200 + share, 200 + SHARED if late_pss is None else late_pss) * MIB
    main = {"private": much * 200 * MIB, "rss": much * (200 + SHARED) * MIB, "pss_bytes": pss}
    sample_process(script, SECONDS, MAIN, ROLE_MAIN, **main)
    own = (private + copied) * much[running]
    for worker in range(workers):
        sample_process(
            script,
            SECONDS[running],
            ("node", 1000 + worker, 7000 + worker),
            ROLE_WORKER,
            private=own * MIB,
            rss=(private + SHARED) * much[running] * MIB,
            pss_bytes=(own + share) * MIB,
            worker=worker,
            loader=0,
        )
    return script


def predicted_memory(script, workers, prefetch):
    """Return the usual and most memory predicted from a run for another setting, MiB."""
    tables = script.tables()
    (option,) = forecast(loops(tables)[0]).at([Setting(num_workers=workers, prefetch_factor=prefetch)])
    return option.memory_bytes / MIB, option.most_bytes / MIB


def measured_memory(script):
    tables = script.tables()
    return held_memory(loops(tables)[0]).usual / MIB


def test_shared_memory_is_counted_once():
    assert measured_memory(simulate_training()) == pytest.approx(200 + SHARED + 2 * 100)
    assert predicted_memory(simulate_training(), 6, 2)[0] == pytest.approx(200 + SHARED + 6 * 100)
    assert measured_memory(simulate_training(workers=6)) == pytest.approx(200 + SHARED + 6 * 100)


def test_memory_before_the_workers_start_is_ignored():
    assert predicted_memory(simulate_training(late_pss=5000.0), 4, 2) == predicted_memory(simulate_training(), 4, 2)


def test_usual_and_most_memory_count_batches_in_queues():
    expected, most = predicted_memory(
        simulate_training(fetch=0.3, payload=10), 2, 8
    )  # workers are the slow side: queues stay empty
    assert expected == pytest.approx(200 + SHARED + 2 * 100, abs=5)
    assert most == pytest.approx(expected + 16 * 10, abs=10)


def test_worker_with_fewer_batches_grows_less_but_copies_as_much():
    grown = 100 + 20 * np.arange((SECONDS > START_SECONDS).sum())
    own = simulate_training(
        private=grown, fetch=0.02
    )  # the loop sets the pace: each of four makes half as many as each of two
    at_first = 2 * 120  # MiB of the two more, when the first batch came
    assert predicted_memory(own, 4, 2)[0] == pytest.approx(measured_memory(own) + at_first, rel=0.02)
    copied = simulate_training(copied=grown, fetch=0.02)
    assert predicted_memory(copied, 4, 2)[0] - 500 == pytest.approx(2 * (measured_memory(copied) - 500), rel=0.01)


def test_memory_is_unknown_without_a_main_reading_since_workers_began():
    script = simulate_training()
    for rows in script.parts["process"]:
        main, running = rows["process_pid"] == MAIN[1], rows["time_ns"] > START_SECONDS * 1e9
        rows.loc[main & running, "pss_bytes"] = np.nan
    assert np.isnan(measured_memory(script))
    assert np.isnan(predicted_memory(script, 4, 2)[0])
