from hypothesis import given, strategies as st

from collector.agent.samplers.processes import BUDGET_RATIO, Budget, Candidate, choose, expected_cost_ns
from collector.agent.samplers.procfs import LocalProcess

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000


def candidate(pid, *, age_seconds=1.0, cost_ns=MS_NS, growth_ratio=0.0):
    return Candidate(key=LocalProcess(pid, 1), age_seconds=age_seconds, cost_ns=cost_ns, growth_ratio=growth_ratio)


def simulate(costs_ns, *, seconds, growth=None):
    """Run the schedule with one tick per second; return the read times per pid and the time spent."""
    budget = Budget(0)
    read_at = {pid: [] for pid in costs_ns}
    for second in range(seconds):
        candidates = [
            candidate(
                pid,
                age_seconds=second - (read_at[pid] or [-1])[-1],
                cost_ns=cost,
                growth_ratio=(growth or {}).get(pid, 0.0),
            )
            for pid, cost in costs_ns.items()
        ]
        for key in choose(candidates, budget.balance_ns(second * SECOND_NS)):
            budget.charge(costs_ns[key.pid])
            read_at[key.pid].append(second)
    return read_at, budget.spent_ns


def test_nothing_is_read_without_balance():
    assert choose([candidate(1)], 0) == []


def test_reading_that_costs_more_than_the_balance_is_still_made():
    assert [key.pid for key in choose([candidate(1, cost_ns=SECOND_NS)], 1)] == [1]


def test_all_small_processes_are_read_at_every_tick_within_budget():
    read_at, _ = simulate(dict.fromkeys(range(10), MS_NS // 2), seconds=20)

    assert all(len(times) == 20 for times in read_at.values())


def test_huge_process_starves_neither_itself_nor_small_ones():
    read_at, spent_ns = simulate({1: 100 * MS_NS, **dict.fromkeys(range(2, 62), MS_NS // 2)}, seconds=120)

    assert all(len(times) >= 2 for times in read_at.values())
    assert spent_ns <= BUDGET_RATIO * 122 * SECOND_NS + 100 * MS_NS


def test_a_growing_process_is_read_more_often_than_its_steady_twin():
    read_at, _ = simulate(dict.fromkeys(range(8), 5 * MS_NS), seconds=200, growth={3: 0.05})

    others = [len(times) for pid, times in read_at.items() if pid != 3]
    assert len(read_at[3]) > 1.5 * max(others)


@given(st.lists(st.integers(10_000, 200 * MS_NS), min_size=1, max_size=30))
def test_budget_is_exceeded_by_at_most_one_reading(costs):
    seconds = 60
    _, spent_ns = simulate(dict(enumerate(costs)), seconds=seconds)

    assert spent_ns <= BUDGET_RATIO * (seconds + 2) * SECOND_NS + max(costs)


def test_expected_cost_grows_with_the_process():
    assert expected_cost_ns(0) < expected_cost_ns(2**20) < expected_cost_ns(2**33)


def test_budget_of_another_share_is_earned_at_that_rate():
    budget = Budget(0, 0.003)
    budget.charge(10 * MS_NS)  # 6 ms were saved up

    assert budget.balance_ns(SECOND_NS) < 0
    assert budget.balance_ns(2 * SECOND_NS) > 0
