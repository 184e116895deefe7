"""The replay of a DataLoader, against an event-driven simulation, closed forms and simulated runs."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from simulated_runs import MAIN, MIB, jittered, sample_host, sample_process, simulate

from collector.diagnosis.loading.loaders import loops
from collector.diagnosis.stalls.verdict import find_stalls
from collector.diagnosis.tuning.calibration import calibrate
from collector.diagnosis.tuning.loader_memory import LoaderMemory, PrivateMemory, held_memory
from collector.diagnosis.tuning.overheads import Overheads
from collector.diagnosis.tuning.replay import Setting, Trace, predict
from collector.diagnosis.tuning.what_if import forecast, option_text
from training_harness.records import ROLE_MAIN, ROLE_WORKER


def simulate_events(fetches, loop, *, workers, prefetch, in_order=True, cores=float("inf"), stood=None):
    """Return when the last batch is yielded, step by step as torch's DataLoader does it.

    Each fetch, and each pass of the loop, is a list of (computes, seconds); threads that compute share the cores.
    `stood` receives the time for which each batch was ready.
    """
    sent = min(workers * prefetch, len(fetches))
    queues = [list(range(worker, sent, workers)) for worker in range(workers)]
    # Thread -> what is left of its work (-1: the loop) and its batch; batch -> worker.
    doing, making, made = {}, {}, {}
    yielded, now, since = 0, 0.0, {}
    while True:
        for worker, queue in enumerate(queues):
            if worker not in doing and queue:
                making[worker] = queue.pop(0)
                doing[worker] = [list(part) for part in fetches[making[worker]]]
        index = yielded if in_order else next(iter(made), None)
        if -1 not in doing and index in made:
            worker = made.pop(index)
            if stood is not None:
                stood.append(now - since[index])
            if sent < len(fetches):
                queues[sent % workers if in_order else worker].append(sent)
                sent += 1
            doing[-1] = [list(part) for part in loop[yielded]]
            yielded += 1
            if yielded == len(fetches):
                return now
            continue
        computing = sum(parts[0][0] for parts in doing.values())
        pace = min(1.0, cores / max(computing, 1))
        wait = min(parts[0][1] / (pace if parts[0][0] else 1.0) for parts in doing.values())
        now += wait
        for thread, parts in list(doing.items()):
            parts[0][1] -= wait * (pace if parts[0][0] else 1.0)
            if parts[0][1] <= 1e-12:
                parts.pop(0)
                if not parts:
                    del doing[thread]
                    if thread >= 0:
                        made[making[thread]] = thread
                        since[making[thread]] = now


times = st.lists(st.floats(0.001, 1.0), min_size=8, max_size=60)


@settings(max_examples=150)
@given(
    fetches=times,
    workers=st.integers(1, 6),
    prefetch=st.integers(1, 4),
    in_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_throughput_equals_that_of_an_event_driven_simulation(fetches, workers, prefetch, in_order, seed):
    loop = np.random.default_rng(seed).uniform(0.001, 0.3, len(fetches))
    fetches = np.array(fetches) + np.random.default_rng(seed).uniform(0, 1e-6, len(fetches))  # no two are alike
    trace = Trace(cpu=np.zeros(len(loop)), blocked=fetches, loop=loop, epochs=(len(loop),))
    setting = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=in_order)
    work, pauses = ([[(False, took)] for took in part] for part in (fetches, loop))
    seconds = simulate_events(work, pauses, workers=workers, prefetch=prefetch, in_order=in_order)
    assert predict(trace, [setting])[0].batches_per_second == pytest.approx(len(loop) / seconds, rel=1e-6)


def constant(*, fetch_cpu=0.0, fetch_blocked=0.0, loop, **more):
    ones = np.ones(200)
    return Trace(cpu=fetch_cpu * ones, blocked=fetch_blocked * ones, loop=loop * ones, **more)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 12])
def test_throughput_of_equal_workers_equals_the_closed_form(workers):
    of = Setting(num_workers=workers, prefetch_factor=2)
    asleep = predict(constant(fetch_blocked=0.06, loop=0.01), [of])[0]
    assert asleep.batches_per_second == pytest.approx(min(1 / 0.01, workers / 0.06), rel=0.02)
    assert asleep.wait_ratio == pytest.approx(max(0, 1 - workers / 6), abs=0.02)
    computing = predict(constant(fetch_cpu=0.06, loop=0.01, cores=4.0), [of])[0]
    assert computing.batches_per_second == pytest.approx(min(1 / 0.01, min(workers, 4) / 0.06), rel=0.03)


@pytest.mark.parametrize("cores", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("computing", [0.3, 0.7, 1.0])
def test_threads_that_compute_share_the_cores(cores, computing):
    generator = np.random.default_rng(int(10 * computing + cores))
    fetches, loop = generator.uniform(0.01, 0.05, 150), generator.uniform(0.005, 0.015, 150)
    slices = [[(True, took * computing / 4), (False, took * (1 - computing) / 4 + 1e-9)] * 4 for took in fetches]
    loops_work = [[(True, took * computing), (False, took * (1 - computing) + 1e-9)] for took in loop]
    trace = Trace(
        cpu=fetches * computing,
        blocked=fetches * (1 - computing),
        loop=loop,
        loop_cpu_ratio=computing,
        cores=cores,
        epochs=(150,),
    )
    for workers in (1, 2, 4, 7):
        found = predict(trace, [Setting(num_workers=workers, prefetch_factor=2)])[0]
        seconds = simulate_events(slices, loops_work, workers=workers, prefetch=2, cores=cores)
        assert found.batches_per_second == pytest.approx(150 / seconds, rel=0.12)


def test_loop_takes_its_share_of_the_cores():
    crowded = constant(fetch_cpu=0.02, loop=0.005, loop_cpu_ratio=1.0, cores=2.0)
    found = predict(crowded, [Setting(num_workers=8, prefetch_factor=2)])[0]
    assert found.batches_per_second == pytest.approx(2 / (0.02 + 0.005), rel=0.1)


@pytest.mark.parametrize("workers", [2, 3])
def test_threads_bound_to_a_core_delay_each_other(workers):
    computing = constant(fetch_cpu=0.02, loop=0.001, cores=2.0)
    found = predict(computing, [Setting(num_workers=workers, prefetch_factor=1)])[0].batches_per_second
    assert found > 0.85 * 2 / 0.02
    assert (found < 0.95 * 2 / 0.02) is (workers == 3), "two of three share a core, and the loop waits for these"


@settings(max_examples=60)
@given(
    fetch=st.floats(0.001, 0.1),
    loop=st.floats(0.001, 0.05),
    busy=st.floats(0.0, 1.0),
    threads=st.floats(1.0, 4.0),
    workers=st.integers(0, 16),
    in_order=st.booleans(),
)
def test_no_prediction_exceeds_the_capacity_of_the_cores(fetch, loop, busy, threads, workers, in_order):
    trace = constant(fetch_cpu=fetch, loop=loop, loop_cpu_ratio=busy, threads=threads, cores=2.0)
    found = predict(trace, [Setting(num_workers=workers, prefetch_factor=2, in_order=in_order)])[0]
    assert found.batches_per_second <= 1.001 * 2 / (fetch * threads + loop * busy)
    assert 0 <= found.wait_ratio <= 1


@pytest.mark.parametrize("in_order", [True, False])
def test_transfer_is_slow_only_while_its_worker_computes(in_order):
    quick = constant(fetch_cpu=0.02, loop=0.004, overheads=Overheads(hand_over=0.001))
    slow = constant(fetch_cpu=0.02, loop=0.004, overheads=Overheads(hand_over=0.001, busy_hand_over=0.01))

    def ratio(workers, prefetch):
        asked = [Setting(num_workers=workers, prefetch_factor=prefetch, in_order=in_order)]
        return predict(slow, asked)[0].batches_per_second / predict(quick, asked)[0].batches_per_second

    assert ratio(2, 1) == pytest.approx(1.0), "it waits for its next index"
    assert ratio(4, 4) < 0.97


def test_creating_workers_for_each_epoch_costs_time():
    made_anew = constant(fetch_blocked=0.004, loop=0.01, epochs=(50,) * 4, creation=0.05)
    few, many = predict(made_anew, [Setting(num_workers=workers, prefetch_factor=2) for workers in (2, 6)])
    assert 50 / many.batches_per_second - 50 / few.batches_per_second == pytest.approx(4 * 0.05, rel=0.05)


def test_loop_without_workers_waits_for_each_fetch():
    found = predict(constant(fetch_blocked=0.03, loop=0.01), [Setting(num_workers=0, prefetch_factor=2)])[0]
    assert found.batches_per_second == pytest.approx(25, rel=0.01)
    assert found.wait_ratio == pytest.approx(0.75, abs=0.01)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0.001, 0.2))
def test_memory_grows_with_workers_and_with_prefetch(workers, prefetch, worker, payload, fetch):
    pairs = [(2, 2), (workers, prefetch), (workers + 1, prefetch), (workers, prefetch + 1)]
    asked = [Setting(num_workers=number, prefetch_factor=depth) for number, depth in pairs]
    own, here, *more = predict(constant(fetch_blocked=fetch, loop=0.01), asked)
    flat = PrivateMemory(
        ages=np.array([0.0, 1e9]), sizes=np.full(2, worker), copied=np.zeros(2), late_ages=np.ones(1)
    )
    room = {"room": 1e9, "shm_room": 1e9, "step": 1e7}
    memory = LoaderMemory(held=1e9, worker=flat, current=own, payload=payload, largest=payload, **room)
    assert memory.needed(own) == pytest.approx(1e9)
    for other in more:
        assert memory.most(here) <= memory.most(other) + 1
    for one in (here, *more):
        assert memory.needed(one) <= memory.most(one) + 1


@settings(max_examples=100)
@given(workers=st.integers(1, 6), prefetch=st.integers(1, 4), in_order=st.booleans(), seed=st.integers(0, 99))
def test_held_batches_equal_those_of_an_event_driven_simulation(workers, prefetch, in_order, seed):
    generator = np.random.default_rng(seed)
    fetches, loop = generator.uniform(0.01, 0.5, 60), generator.uniform(0.001, 0.3, 60)
    trace = Trace(cpu=np.zeros(60), blocked=fetches, loop=loop, epochs=(60,))
    setting = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=in_order)
    work, pauses = ([[(False, took)] for took in part] for part in (fetches, loop))
    stood = []
    seconds = simulate_events(work, pauses, workers=workers, prefetch=prefetch, in_order=in_order, stood=stood)
    found = predict(trace, [setting])[0].held_batches
    assert found == pytest.approx(1 + sum(stood) / seconds, rel=1e-6)


def outlook(script, **more):
    tables = script.tables()
    return forecast(loops(tables)[0], **more)


RUN = {"service": jittered(0.06, 0.5), "consumer": jittered(0.01), "batches": 600}


@pytest.mark.parametrize(("workers", "prefetch", "in_order"), [(2, 2, True), (4, 2, True), (2, 2, False)])
def test_one_run_predicts_other_settings(workers, prefetch, in_order):
    found = outlook(simulate(workers=workers, prefetch=prefetch, in_order=in_order, **RUN))
    assert abs(found.error) < 0.02
    options = {(option.setting.num_workers, option.setting.prefetch_factor): option for option in found.options}
    for workers, prefetch in ((1, 2), (4, 1), (6, 4), (8, 2)):
        tables = simulate(workers=workers, prefetch=prefetch, in_order=in_order, seed=3, **RUN).tables()
        there = calibrate(loops(tables)[0]).batches_per_second
        option = options[workers, prefetch]
        assert option.low < there < option.high
        assert option.batches_per_second == pytest.approx(there, rel=0.08)


@pytest.mark.parametrize("in_order", [True, False])
def test_epochs_begin_with_empty_queues(in_order):
    short = outlook(simulate(workers=4, prefetch=2, epochs=12, in_order=in_order, **{**RUN, "batches": 12}))
    assert short.measured.trace.epochs == (12,) * 11
    assert abs(short.error) < 0.05
    assert short.best.wait_ratio > 0.1  # no number of workers makes the first batches be there at once


@pytest.mark.filterwarnings("error")
def test_epochs_of_one_batch_give_no_prediction():
    assert "one batch" in outlook(simulate(workers=1, prefetch=2, epochs=60, **{**RUN, "batches": 1}))


def test_run_that_the_replay_does_not_reproduce_has_no_prediction():
    script = simulate(workers=4, prefetch=2, split=(1.0, 0.0, 0.0), cores=1.0, **RUN)  # yet the workers used four
    assert "were measured" in outlook(script)
    advice = find_stalls(script.tables())[0].advice
    assert advice[0].text.startswith("Measure other settings: `tidegauge tune")
    assert not any("num_workers=" in one.text for one in advice)


@pytest.mark.parametrize("workers", [0, 1])
def test_run_with_fewer_than_two_workers_has_two_predictions(workers):
    found = outlook(simulate(workers=workers, prefetch=2, **RUN))
    assert found.best.if_shared.batches_per_second < 0.3 * found.best.batches_per_second
    assert found.best.if_shared.high < found.best.low


def test_workers_that_wait_independently_have_one_prediction():
    found = outlook(simulate(workers=2, prefetch=2, **RUN))
    assert found.measured.alternative is None
    assert found.best.if_shared is None
    assert found.best.low > 1.5 * found.measured.batches_per_second


UNDECIDED = RUN | {"service": jittered(0.06, 0.01), "batches": 300}


def test_undecided_sharing_gives_two_predictions():
    found = outlook(simulate(workers=2, prefetch=2, **UNDECIDED))
    now, best = found.measured.batches_per_second, found.best
    assert best.low > 2 * now, "if each worker waits for itself"
    assert best.if_shared.batches_per_second == pytest.approx(now, rel=0.1)
    for rate in (best, best.if_shared):
        assert rate.high - rate.low <= 0.25 * rate.batches_per_second
    assert found.current.if_shared is None, "the same either way"


def test_advice_has_both_predictions_and_the_deciding_command():
    advice = find_stalls(simulate(workers=2, prefetch=2, **UNDECIDED).tables())[0].advice
    (first, *_) = [one for one in advice if "num_workers=" in one.text]
    assert "if each worker waits for itself, " in first.expected
    assert "if they share one thing; `tidegauge tune -- COMMAND` measures which" in first.expected


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("in_order", [True, False])
def test_shared_resource_sets_the_pace_of_all_workers(workers, in_order):
    one_by_one = constant(fetch_cpu=0.01, fetch_blocked=0.03, loop=0.005, in_turn=True)
    found = predict(one_by_one, [Setting(num_workers=workers, prefetch_factor=2, in_order=in_order)])[0]
    assert found.batches_per_second == pytest.approx(1 / 0.04 if workers == 1 else 1 / 0.03, rel=0.02)


def test_workers_that_share_a_resource_are_not_advised_to_be_more():
    script = simulate(workers=2, prefetch=2, in_turn=True, **RUN | {"service": jittered(0.03, 0.2)})
    found = outlook(script)
    assert found.measured.shared is not None
    assert found.best is None
    assert all(option.high < 1.3 * found.measured.batches_per_second for option in found.options)
    (fewer,) = found.at([Setting(num_workers=1, prefetch_factor=2)])
    apart = fewer.if_apart.batches_per_second
    assert apart < 0.7 * found.measured.batches_per_second, "a part of their waiting may be for themselves"
    (more,) = found.at([Setting(num_workers=4, prefetch_factor=2)])
    assert more.if_apart.batches_per_second > 1.5 * more.batches_per_second, "so a part of more workers' would be"
    assert "if they share all that they wait for, " in option_text(more)
    told = find_stalls(script.tables())[0]
    assert "one thing in common" in told.summary
    assert not any("num_workers=" in advice.text for advice in told.advice)
    assert {"fetches_alike_sigmas", "fetches_beside_sigmas"} < {each.name for each in told.evidence}


def test_interval_for_more_workers_is_wider_if_others_use_the_cores():
    def width(split, workers):
        found = outlook(simulate(workers=2, prefetch=2, split=split, cores=2.0, **RUN | {"batches": 300}))
        options = {option.setting: option for option in found.options}
        option = options[Setting(num_workers=workers, prefetch_factor=2)]
        return option.high / option.low

    waiting, free = (0.2, 0.2, 0.6), (0.3, 0.0, 0.7)  # of a fetch: computing, without a core, blocked
    assert width(waiting, 6) > 1.3 * width(waiting, 2)
    assert width(free, 6) < 1.2 * width(free, 2)


CHILDREN = RUN | {"service": jittered(0.4, 0.1), "split": (0.01, 0.0, 0.99), "children": 0.9, "cores": 2.0}


def test_children_of_workers_are_bound_by_the_cores():
    found = outlook(simulate(workers=2, prefetch=2, **CHILDREN))
    spent = 0.4 * (0.9 + 0.01)
    assert max(option.batches_per_second for option in found.options) <= 1.02 * 2 / spent


def test_waiting_children_are_faster_with_fewer_workers():
    found = outlook(simulate(workers=4, prefetch=2, **CHILDREN | {"children": 0.49}))  # 2 of 4 compute at a time
    fewer, more = found.at([Setting(num_workers=workers, prefetch_factor=2) for workers in (2, 8)])
    assert fewer.batches_per_second == pytest.approx(found.measured.batches_per_second, rel=0.1)
    assert more.batches_per_second == pytest.approx(found.measured.batches_per_second, rel=0.05)


def test_run_without_cpu_time_of_children_still_has_a_prediction():
    script = simulate(workers=2, prefetch=2, **CHILDREN | {"children": 0.0})
    for rows in script.parts["fetch"]:
        del rows["children_cpu_ns"]
    assert outlook(script).best.setting.num_workers > 2


def with_memory(*, limit):
    """Return a run with a memory limit: 1 GiB of the training process, 200 MiB per worker, batches of 50 MiB."""
    script = simulate(workers=2, prefetch=2, cores=8.0, **RUN)
    for rows in script.parts["batch"]:
        rows["payload_bytes"] = 50 * MIB
    seconds = 1000 + np.arange(5.0)

    def much(size):
        return np.full(5, size * MIB)

    sample_host(script, seconds, demand=much(2000), limit=limit * MIB, total=2**36)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=much(1024), rss=much(1024))
    for worker in range(2):
        who = ("node", 1000 + worker, 7000 + worker)
        sample_process(script, seconds, who, ROLE_WORKER, private=much(200), rss=much(900), worker=worker, loader=0)
    return script


def test_batches_in_queues_count_as_held_memory():
    script = with_memory(limit=64_000)
    shm_mib = np.array([10, 10, 110, 1010, 60])  # 1 GB is not this loader's
    script.parts["host"][-1]["shm_used_bytes"] = shm_mib * MIB
    tables = script.tables()
    found = held_memory(loops(tables)[0])
    assert found.most == (1024 + 2 * 200 + 5 * 50) * MIB  # of 1 GB, what five batches are
    assert found.usual == (1024 + 2 * 200 + 150) * MIB


def test_advice_fits_into_the_free_memory():
    roomy, tight = outlook(with_memory(limit=64_000)), outlook(with_memory(limit=4000))
    assert roomy.best.setting.num_workers > tight.best.setting.num_workers > 2
    own = (1024 + 2 * 200) * MIB
    assert roomy.current.memory_bytes == pytest.approx(own)
    assert tight.best.most_bytes - own <= (0.9 * 4000 - 2000) * MIB
    assert not all(option.fits for option in tight.options)


def test_pareto_front_trades_memory_for_waiting():
    found = outlook(with_memory(limit=64_000))
    front = found.front
    assert len(front) > 3
    assert found.at([front[0].setting, front[-1].setting]) == [front[0], front[-1]]
    assert [option.memory_bytes for option in front] == sorted(option.memory_bytes for option in front)
    assert [option.wait_ratio for option in front] == sorted((o.wait_ratio for o in front), reverse=True)


def test_advice_has_throughput_and_memory():
    advice = find_stalls(with_memory(limit=64_000).tables())[0].advice[0]
    assert "num_workers=" in advice.text
    assert "prefetch_factor=" in advice.text
    assert "batches/s (" in advice.expected
    assert "Host memory: now " in advice.expected
    assert "with full queues" in advice.expected


def test_no_prediction_for_computing_workers_without_core_count():
    script = simulate(workers=2, prefetch=2, split=(1.0, 0.0, 0.0), **RUN)
    del script.parts["host"]
    assert "cores" in outlook(script)
