"""Kills for lack of memory: the victim, and whose limit it was."""

import pytest
from ended_runs import (
    COLLECTOR,
    DEATHS,
    KILLED_MESSAGE,
    WORKERS,
    deaths,
    end_run,
    end_training,
    end_workers,
    exception,
    training,
    with_memory,
)
from growing_memory import FLAT, RAMP, memory, training as growing_training
from simulated_runs import MAIN, MIB, START_SECONDS, Script, ns, sample_host, sample_process

from collector.diagnosis.verdict import diagnose
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_OTHER, ROLE_WORKER


@pytest.mark.parametrize("column", ["cgroup_oom_kill_count", "host_oom_kill_count"])
def test_oom_kill_names_the_victim_and_its_memory(column):
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 4], column=column)
    end_run(end_training(end_workers(script, 0)), 1)
    found = [finding for finding in diagnose(script.tables()).findings if finding.kind in DEATHS]
    assert [(f.kind, f.locus.worker, f.locus.pid) for f in found] == [("host-oom-kill", 1, 1001)]
    assert {e.name: e.value for e in found[0].evidence}["last_held_bytes"] == 500 * MIB


@pytest.mark.parametrize("leaks", [True, False])
def test_a_kill_of_a_worker_that_leaked_says_to_fix_its_leak_first(leaks):
    """Fewer workers only delay the next kill; a worker that does not leak has nothing to fix."""
    grown = 300 * RAMP if leaks else FLAT
    script = memory(growing_training(), workers=grown, limit=1024 * MIB, cgroup_oom_kill_count=[0] * 59 + [1])
    exception(script, "RuntimeError", KILLED_MESSAGE)
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    end_run(end_training(end_workers(script, 0)), 1)
    (kill,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "host-oom-kill"]
    assert ("Fix worker-heap-leak first" in kill.advice[0].text) == leaks
    assert ("Lower num_workers" in kill.advice[0].text) != leaks


@pytest.mark.parametrize("leaks", [True, False])
def test_a_worker_that_leaked_and_was_killed_by_no_one_knows_whom_has_its_leak_to_fix(leaks):
    """A memory guard such as earlyoom kills before the kernel does, and leaves no count."""
    script = memory(growing_training(), workers=300 * RAMP if leaks else FLAT, cgroup_oom_kill_count=[0] * 60)
    exception(script, "RuntimeError", KILLED_MESSAGE)
    script.event(START_SECONDS, "collector-start", COLLECTOR, resumed=False, command_pid=MAIN[1])
    end_run(end_training(end_workers(script, 0)), 1)
    (kill,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "worker-killed"]
    assert ("Fix worker-heap-leak first" in kill.advice[0].text) == leaks
    assert "Find the sender of the signal" in kill.advice[-1].text


@pytest.mark.parametrize(
    ("path", "container", "words", "remedy"),
    [
        ("/system.slice/slurmstepd.scope/job_4711/step_0", None, "Slurm job 4711, cgroup /system", "--mem=SIZE"),
        ("/slurm/uid_1000/job_4711", None, "Slurm job 4711", "--mem=SIZE"),
        (
            "/kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice",
            None,
            "Kubernetes pod 0a1b2c3d…",
            "limits.memory",
        ),
        ("/kubepods/burstable/pod0a1b2c3d-1111/4f5e", None, "Kubernetes pod 0a1b2c3d…", "limits.memory"),
        ("/system.slice/docker-0123456789abcdef.scope", None, "Docker container 0123456789ab", "docker run"),
        ("/docker/0123456789abcdef", None, "Docker container 0123456789ab", "docker run"),
        ("/machine.slice/libpod-0123456789abcdef.scope", None, "Podman container 0123456789ab", "podman run"),
        ("/user.slice/user-1000.slice/train.scope", None, "systemd unit train.scope", "MemoryMax="),
        ("/", "kubernetes", "the Kubernetes container", "limits.memory"),
        ("/lab/jobs", None, "cgroup /lab/jobs", "Raise the memory limit"),
    ],
)
def test_a_memory_kill_names_whose_limit_it_was_and_how_to_raise_it(path, container, words, remedy):
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 4])
    script.event(
        START_SECONDS, "memory-limit", ("node", 90, 4900), path=path, limit_bytes=1024 * MIB, container=container
    )
    end_run(end_training(end_workers(script, 0)), 1)
    (found,) = [finding for finding in diagnose(script.tables()).findings if finding.kind == "host-oom-kill"]
    assert f"the limit is 1 GiB ({words}" in found.summary
    assert any(remedy in advice.text for advice in found.advice)


@pytest.mark.parametrize(
    ("slurm", "limit", "kind"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, None, "host-oom-kill"),
        ({"SLURM_MEM_PER_CPU": "250", "SLURM_CPUS_ON_NODE": "4"}, None, "host-oom-kill"),
        ({"SLURM_MEM_PER_NODE": "2000"}, None, "killed"),
        ({"SLURM_MEM_PER_NODE": "0"}, None, "killed"),
        ({"SLURM_MEM_PER_CPU": "250"}, None, "killed"),
        ({"SLURM_MEM_PER_NODE": "1000"}, 1000 * MIB, "killed"),  # a control group holds it, and counted no kill
        ({}, None, "killed"),
    ],
)
def test_a_job_killed_at_slurms_own_limit_died_for_lack_of_memory(slurm, limit, kind):
    script = end_workers(training(), 0, 1, reason="parent-gone")
    seconds = [script.now_seconds - at for at in (3, 2, 1)]
    sample_host(script, seconds, demand=[900 * MIB] * 3, limit=limit)
    held, collector = [400 * MIB] * 3, [200 * MIB] * 3
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=held, rss=held)
    sample_process(script, seconds, WORKERS[0], ROLE_WORKER, private=held, rss=held, loader=0, worker=0)
    sample_process(script, seconds, COLLECTOR, ROLE_COLLECTOR, private=collector, rss=collector)
    script.manifest |= {"host": "node", "slurm": {"SLURM_JOB_ID": "4711", **slurm}}
    found = [f for f in diagnose(end_run(script).tables()).findings if f.locus.role == "main" and f.kind in DEATHS]
    assert [finding.kind for finding in found] == [kind]
    if kind == "host-oom-kill":
        assert "its job 4711 used 1000 MiB of its 1000 MiB" in found[0].summary
        assert any("sbatch --mem" in advice.text for advice in found[0].advice)


@pytest.mark.parametrize(
    ("held", "grows"), [([300, 300, 300, 300, 590, 800], True), ([760] * 3 + [800] * 3, False)]
)
def test_a_kill_after_a_short_growth_says_how_much_and_where_to_look(held, grows):
    """Six samples are too few for a leak, and no reason to call the memory of the process fine."""
    script, count = training(), len(held)
    seconds, values = [START_SECONDS + 0.5 * n for n in range(count)], [each * MIB for each in held]
    counts = [0] * (count - 1) + [1]
    sample_host(script, seconds, demand=[1000 * MIB] * count, limit=1024 * MIB, cgroup_oom_kill_count=counts)
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=values, rss=values)
    script.now_seconds = seconds[-1] + 0.5
    verdict = diagnose(end_run(end_workers(script), -9).tables())
    (kill,) = [finding for finding in verdict.findings if finding.kind == "host-oom-kill"]
    assert ("it last held 800 MiB, 500 MiB of it since training began, the limit" in kill.summary) == grows
    assert kill.advice[0].text.startswith("Find what the training process keeps") == grows
    assert [each.status for each in verdict.checks if each.name == "training process's memory"] == ["finding"]


def test_a_kill_after_a_growth_at_once_asks_what_followed_the_last_step():
    """A checkpoint's copy, for example: nothing was kept from step to step."""
    script = training()
    seconds = [START_SECONDS + at for at in (1.1, 1.4, 1.7, 2.0, 3.2)]
    values = [each * MIB for each in [300] * 4 + [800]]
    sample_host(script, seconds, demand=values, limit=1024 * MIB, cgroup_oom_kill_count=[0] * 4 + [1])
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=values, rss=values)
    script.now_seconds = seconds[-1] + 0.5
    (kill,) = [f for f in diagnose(end_run(end_workers(script), -9).tables()).findings if f.kind == "host-oom-kill"]
    assert "it last held 800 MiB, 500 MiB of it after the last step or batch, the limit" in kill.summary
    assert "checkpoint" in kill.advice[0].text


def test_a_kill_in_an_evaluation_asks_what_is_kept_of_its_batches():
    kill = kill_after_growth_with_batches_of(MAIN)
    assert "it last held 800 MiB, 500 MiB of it with the batches after the last step, the limit" in kill.summary
    assert kill.advice[0].text.startswith("Find what is kept of the batches after the last step")


def test_a_kill_after_the_last_step_of_a_rank_blames_no_batches_of_another_rank():
    """Rank 0 gathers the state of all ranks."""
    kill = kill_after_growth_with_batches_of(("node", 101, 5001))
    assert "it last held 800 MiB, 500 MiB of it after the last step or batch, the limit" in kill.summary
    assert "checkpoint" in kill.advice[0].text


def kill_after_growth_with_batches_of(key):
    """Return the kill of a training process that grew after its last step, while a process had batches."""
    script = training()
    seconds = [START_SECONDS + at for at in (1.1, 1.4, 1.7, 2.0, 3.2, 3.6, 3.9)]
    values = [each * MIB for each in [300] * 4 + [500, 700, 800]]
    batches = [{"time_ns": ns(START_SECONDS + at), "loader": 1} for at in (3.0, 3.2, 3.4, 3.6, 3.8)]
    script.add("batch", batches, key)
    sample_host(script, seconds, demand=values, limit=1024 * MIB, cgroup_oom_kill_count=[0] * 6 + [1])
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=values, rss=values)
    script.now_seconds = seconds[-1] + 0.5
    (kill,) = [f for f in diagnose(end_run(end_workers(script), -9).tables()).findings if f.kind == "host-oom-kill"]
    return kill


def test_a_kill_of_a_worker_that_grew_asks_for_what_it_keeps():
    """Fewer workers would only delay it."""
    script = training()
    seconds = [START_SECONDS + at for at in (0.8, 1.2, 1.6, 2.0, 2.4)]
    values = [n * MIB for n in (20, 90, 150, 300, 500)]
    sample_host(script, seconds, demand=values, limit=512 * MIB, cgroup_oom_kill_count=[0] * 4 + [1])
    sample_process(script, seconds, WORKERS[1], ROLE_WORKER, private=values, rss=values, loader=0, worker=1)
    end_run(end_training(end_workers(exception(script, "RuntimeError", KILLED_MESSAGE), 0)), 1)
    (kill,) = [f for f in diagnose(script.tables()).findings if f.kind == "host-oom-kill"]
    assert "it last held 500 MiB, 410 MiB of it since its first batch, the limit" in kill.summary
    assert kill.advice[0].text.startswith("Look for a cache in the dataset")


def test_earlier_oom_kills_are_not_blamed():
    script = with_memory(exception(training(), "RuntimeError", KILLED_MESSAGE), [3, 3, 3])
    end_run(end_training(end_workers(script, 0)), 1)
    assert deaths(script) == [("worker-killed", "worker", 1, "critical")]


def test_one_oom_kill_has_one_victim():
    script = with_memory(training(), [0, 0, 1])
    end_run(end_workers(script, 0, reason="parent-gone"), -9)
    assert sorted(deaths(script)) == [
        ("host-oom-kill", "worker", 1, "critical"),
        ("killed", "main", None, "critical"),
    ]


def deaths_after_kill(counts, column, demand):
    """Return the deaths in a training that SIGKILL ends after as many ticks as the kill counter has values."""
    script = Script().event(START_SECONDS, "process-start")
    count = len(counts)
    seconds = [START_SECONDS + second for second in range(count)]
    sample_host(script, seconds, demand=[demand] * count, limit=1024 * MIB, **{column: counts})
    sample_process(script, seconds, MAIN, ROLE_MAIN, private=[300 * MIB] * count, rss=[300 * MIB] * count)
    script.now_seconds = START_SECONDS + count
    return [kind for kind, *_ in deaths(end_run(script, -9)) if kind != "host-oom-risk"]


@pytest.mark.parametrize("column", ["cgroup_oom_kill_count", "host_oom_kill_count"])
def test_oom_kill_long_before_the_end_is_not_blamed(column):
    assert deaths_after_kill([0] * 10 + [1] * 90, column, 1000 * MIB) == ["killed"]


def test_only_the_hosts_kill_count_needs_a_memory_shortage():
    late = [0] * 9 + [1]
    assert deaths_after_kill(late, "cgroup_oom_kill_count", 300 * MIB) == ["host-oom-kill"]
    assert deaths_after_kill(late, "host_oom_kill_count", 1000 * MIB) == ["host-oom-kill"]
    assert deaths_after_kill(late, "host_oom_kill_count", 300 * MIB) == ["killed"]


@pytest.mark.parametrize(("kills", "kinds"), [(0, []), (1, ["host-oom-kill"])])
def test_oom_killed_trial_of_a_finished_sweep_is_a_warning(kills, kinds):
    script, sweep = Script(), ("node", 99, 4000)
    script.manifest["command"].update(pid=sweep[1], start_ticks=sweep[2])
    seconds = [START_SECONDS + second for second in range(10)]
    counts = [0] * 6 + [kills] * 4
    sample_host(script, seconds, demand=[900 * MIB] * 10, limit=1024 * MIB, cgroup_oom_kill_count=counts)
    for trial, died in ((("node", 200, 8000), 5), (("node", 201, 8001), 9)):
        script.event(START_SECONDS, "process-start", trial, parent_pid=sweep[1])
        held = [300 * MIB] * died
        sample_process(script, seconds[:died], trial, ROLE_MAIN, private=held, rss=held)
    script.now_seconds = START_SECONDS + 10
    script.event(START_SECONDS + 9, "process-exit", ("node", 201, 8001), lost_count=0)
    found = [f for f in diagnose(end_run(script, 0).tables()).findings if f.kind in DEATHS]
    assert [f.kind for f in found] == kinds
    assert all((f.locus.pid, f.severity, "command went on" in f.summary) == (200, "warning", True) for f in found)


@pytest.mark.parametrize(("kills", "kinds"), [(0, []), (1, [("host-oom-kill", "other", None, "warning")])])
def test_oom_killed_child_of_a_training_that_goes_on_is_a_warning(kills, kinds):
    """An evaluation in a child process; a small helper ends at the same time."""
    script = with_memory(training(), [0, 0, kills, kills])
    for pid, size in ((700, 400 * MIB), (701, 4 * MIB)):
        seconds = [START_SECONDS, START_SECONDS + 1]
        sample_process(script, seconds, ("node", pid, 1), ROLE_OTHER, private=[size] * 2, rss=[size] * 2)
    end_run(end_training(end_workers(script)), 0)
    assert deaths(script) == kinds
    if kills:
        [kill] = [finding for finding in diagnose(script.tables()).findings if finding.kind == "host-oom-kill"]
        assert kill.locus.pid == 700


@pytest.mark.parametrize(("after_exit", "kinds"), [(True, ["crashed"]), (False, ["worker-killed"])])
def test_a_worker_that_the_exiting_training_terminates_is_no_victim(after_exit, kinds):
    """The training failed by another error; torch's handler of SIGTERM then ends its workers with status 0."""
    script = exception(training(), "ConnectionResetError", "[Errno 104] Connection reset by peer")
    exit_at = script.now_seconds - 0.3
    died = {"worker": 1, "worker_pid": 1001, "exit_code": 0, "last_index": 7}
    script.event(exit_at + (0.2 if after_exit else -0.3), "worker-died", loader=0, epoch=0, **died)
    script = end_run(end_training(end_workers(script, 0)), 1)
    assert [kind for kind, *_ in deaths(script)] == kinds
