import os
import shutil

import pytest

from collector.agent.samplers.host import HostSampler, headroom_bytes

MIB = 2**20
PID = 100
V1_UNLIMITED = 9223372036854771712


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Machine:
    """A file system of a host with 1000 MiB of memory, to lay out by hand."""

    def __init__(self, root):
        self.root = root
        meminfo = f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {600 * 1024} kB\nShmem: {70 * 1024} kB"
        write(root / "proc/meminfo", meminfo)
        write(root / "proc/vmstat", "nr_free_pages 1\noom_kill 5\noom_kill_other 9")
        write(root / "proc/pressure/memory", "some avg10=1.50 avg60=0.30 total=9\nfull avg10=0.25 avg60=0 total=1")
        write(root / "proc/pressure/cpu", "some avg10=40.00 avg60=0.30 total=9")
        write(root / "proc/pressure/io", "some avg10=0.00 avg60=0.00 total=0")
        (root / "dev/shm").mkdir(parents=True)
        self.state("S")

    def state(self, letter, flags=0):
        write(self.root / f"proc/{PID}/stat", f"{PID} (python) {letter} 1 0 0 0 0 {flags} " + "0 " * 12 + "7 0 0")

    def mounts(self, *lines):
        write(self.root / "proc/self/mountinfo", "\n".join(lines))

    def member(self, *lines):
        write(self.root / f"proc/{PID}/cgroup", "\n".join(lines))

    def sampler(self, cores=8):
        return HostSampler(PID, root=self.root, affinity=lambda _: set(range(cores)))

    def v1(self, path, limit, usage=0, *, rss=0, cache=0, shmem=0, failcnt=0, oom_kill=0):
        group = self.root / "sys/fs/cgroup/memory" / path.lstrip("/")
        write(group / "memory.limit_in_bytes", limit)
        write(group / "memory.usage_in_bytes", usage)
        write(group / "memory.stat", f"cache 1\nrss 1\ntotal_cache {cache}\ntotal_rss {rss}\ntotal_shmem {shmem}")
        write(group / "memory.failcnt", failcnt)
        write(group / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kill}")

    def v2(self, path, limit, usage=0, *, anon=0, file=0, shmem=0, slab=0, oom=0, oom_kill=0):
        group = self.root / "sys/fs/cgroup" / path.lstrip("/")
        write(group / "memory.max", limit)
        write(group / "memory.current", usage)
        write(
            group / "memory.stat",
            f"anon {anon}\nfile {file}\nkernel 4\nshmem {shmem}\nslab_reclaimable {slab}\nslab 9",
        )
        write(group / "memory.events", f"low 0\nhigh 0\nmax 3\noom {oom}\noom_kill {oom_kill}\noom_group_kill 0")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def v1(machine):
    machine.mounts(
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct",
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory",
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
    )
    machine.member("4:memory:/slurm/job/step", "1:cpu,cpuacct:/slurm", "0::/")
    machine.v1("/", V1_UNLIMITED)
    machine.v1("/slurm", V1_UNLIMITED)
    machine.v1(
        "/slurm/job", 400 * MIB, 300 * MIB, rss=200 * MIB, cache=90 * MIB, shmem=10 * MIB, failcnt=17, oom_kill=1
    )
    machine.v1("/slurm/job/step", 900 * MIB, 100 * MIB, oom_kill=2)
    return machine


@pytest.fixture
def v2(machine):
    machine.mounts("30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
    machine.member("0::/pod/container")
    (machine.root / "sys/fs/cgroup").mkdir(parents=True)
    machine.v2("/pod", "max")
    machine.v2(
        "/pod/container",
        500 * MIB,
        450 * MIB,
        anon=400 * MIB,
        file=40 * MIB,
        shmem=6 * MIB,
        slab=5 * MIB,
        oom=3,
        oom_kill=2,
    )
    return machine


def cgroup(sample):
    return {name.removeprefix("cgroup_"): value for name, value in sample.items() if name.startswith("cgroup_")}


def test_sample_has_the_gauges_of_the_host(machine):
    sample = machine.sampler().sample()

    assert sample["memory_total_bytes"] == 1000 * MIB
    assert sample["memory_available_bytes"] == 600 * MIB
    assert sample["memory_shmem_bytes"] == 70 * MIB
    assert sample["host_oom_kill_count"] == 5
    assert sample["memory_some_avg10_ratio"] == pytest.approx(0.015)
    assert sample["memory_full_avg10_ratio"] == pytest.approx(0.0025)
    assert sample["cpu_some_avg10_ratio"] == pytest.approx(0.4)
    assert sample["io_some_avg10_ratio"] == 0.0
    assert sample["usable_cores_count"] == 8
    assert sample["shm_total_bytes"] >= sample["shm_used_bytes"] > 0


def test_pages_of_a_segment_that_were_never_written_are_counted(machine):
    with (machine.root / "dev/shm/psm_cache").open("wb") as segment:
        segment.truncate(8 * MIB)
        segment.write(bytes(MIB))

    assert machine.sampler().sample()["shm_unwritten_bytes"] == 7 * MIB


def test_host_without_cgroups_pressure_and_shm_has_missing_values(machine):
    shutil.rmtree(machine.root / "proc/pressure")
    shutil.rmtree(machine.root / "dev")

    sample = machine.sampler().sample()

    assert set(cgroup(sample).values()) == {None}
    assert sample["memory_some_avg10_ratio"] is None
    assert sample.get("shm_used_bytes") is None


def test_v1_parent_limit_binds_and_kills_of_every_level_count(v1):
    assert cgroup(v1.sampler().sample()) == {
        "limit_bytes": 400 * MIB,
        "usage_bytes": 300 * MIB,
        "anon_bytes": 200 * MIB,
        "file_bytes": 90 * MIB,
        "shmem_bytes": 10 * MIB,
        "slab_reclaimable_bytes": None,
        "oom_count": 17,
        "oom_kill_count": 3,
    }


def test_v2_smallest_limit_binds(v2):
    assert cgroup(v2.sampler().sample()) == {
        "limit_bytes": 500 * MIB,
        "usage_bytes": 450 * MIB,
        "anon_bytes": 400 * MIB,
        "file_bytes": 40 * MIB,
        "shmem_bytes": 6 * MIB,
        "slab_reclaimable_bytes": 5 * MIB,
        "oom_count": 3,
        "oom_kill_count": 2,
    }


def test_outer_one_of_equal_limits_binds(v2):
    v2.v2("/pod", 500 * MIB, 490 * MIB)

    assert cgroup(v2.sampler().sample())["usage_bytes"] == 490 * MIB


@pytest.mark.parametrize("limit", [V1_UNLIMITED, 1000 * MIB])
def test_v1_unlimited_group_has_a_missing_limit(v1, limit):
    v1.v1("/slurm/job", limit, 300 * MIB)
    v1.v1("/slurm/job/step", limit, 100 * MIB, oom_kill=2)

    sample = cgroup(v1.sampler().sample())

    assert sample["limit_bytes"] is None
    assert sample["usage_bytes"] is None
    assert sample["oom_kill_count"] == 2


def test_v2_max_is_no_limit_and_kills_are_still_counted(v2):
    v2.v2("/pod/container", "max", 450 * MIB, oom_kill=2)

    sample = cgroup(v2.sampler().sample())

    assert sample["limit_bytes"] is None
    assert sample["oom_kill_count"] == 2


def test_v2_kills_are_counted_if_the_inner_group_lacks_the_controller(v2):
    v2.member("0::/pod/container/task")
    v2.v2("/pod/container", "max", oom_kill=2)
    (v2.root / "sys/fs/cgroup/pod/container/task").mkdir()

    assert cgroup(v2.sampler().sample())["oom_kill_count"] == 2


def test_headroom_is_that_of_the_nearest_limit_without_page_cache(v2):
    assert headroom_bytes(v2.sampler().sample()) == (500 - 400 - 6) * MIB
    v2.v2("/pod/container", "max")
    assert headroom_bytes(v2.sampler().sample()) == 600 * MIB
    assert headroom_bytes({}) is None


def test_limit_is_found_if_the_container_sees_its_group_as_root(v1):
    v1.member("4:memory:/", "0::/")
    v1.v1("/", 256 * MIB, 200 * MIB)

    assert cgroup(v1.sampler().sample())["limit_bytes"] == 256 * MIB


def test_limit_is_found_if_the_container_sees_the_hosts_path(v1):
    v1.mounts("35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory")
    v1.member("4:memory:/docker/abc")
    v1.v1("/", 256 * MIB, 200 * MIB)
    sampler = v1.sampler()

    assert cgroup(sampler.sample())["limit_bytes"] == 256 * MIB
    assert sampler.limit == ("/docker/abc", 256 * MIB, None)


def test_the_limit_of_a_parent_has_the_parents_path_and_a_container_its_kind(v2):
    write(v2.root / f"proc/{PID}/root/.dockerenv", "")
    v2.member("0::/slurm/job_7/step_0")
    v2.v2("/slurm/job_7", 300 * MIB)
    v2.v2("/slurm/job_7/step_0", "max")
    sampler = v2.sampler()
    sampler.sample()

    assert sampler.limit == ("/slurm/job_7", 300 * MIB, "docker")


def test_mount_is_the_group_if_it_lacks_the_path(v2):
    v2.member("0::/../../elsewhere")
    v2.v2("/", 256 * MIB, 200 * MIB)

    assert cgroup(v2.sampler().sample())["limit_bytes"] == 256 * MIB


@pytest.mark.parametrize("process_is_gone", [True, False])
def test_vanished_group_keeps_its_last_reading_and_counts_no_kill(v2, process_is_gone):
    sampler = v2.sampler()
    before = cgroup(sampler.sample())
    shutil.rmtree(v2.root / "sys/fs/cgroup/pod")
    if process_is_gone:
        shutil.rmtree(v2.root / f"proc/{PID}")
    else:
        v2.member("0::/pod/container (deleted)")

    assert cgroup(sampler.sample()) == {**before, "oom_kill_count": None}


def test_kills_are_counted_after_the_command_has_ended(v2):
    sampler = v2.sampler()
    sampler.sample()
    shutil.rmtree(v2.root / f"proc/{PID}")
    v2.v2("/pod/container", 500 * MIB, 20 * MIB, oom=4, oom_kill=3)

    assert cgroup(sampler.sample())["oom_kill_count"] == 3


@pytest.mark.parametrize("state", [("Z", 0), ("R", 0x4)])
def test_v1_exiting_process_keeps_its_group(v1, state):
    sampler = v1.sampler()
    sampler.sample()
    v1.state(*state)
    v1.member("4:memory:/", "0::/")

    assert cgroup(sampler.sample())["limit_bytes"] == 400 * MIB


def test_v1_quota_leaves_fewer_cores_than_the_affinity(v1):
    group = v1.root / "sys/fs/cgroup/cpu"
    write(group / "cpu.cfs_quota_us", -1)
    write(group / "slurm/cpu.cfs_quota_us", 250_000)
    write(group / "slurm/cpu.cfs_period_us", 100_000)

    assert v1.sampler().sample()["usable_cores_count"] == 2.5
    assert v1.sampler(cores=1).sample()["usable_cores_count"] == 1


def test_v2_quota_of_a_parent_limits_the_cores(v2):
    write(v2.root / "sys/fs/cgroup/pod/cpu.max", "150000 100000")
    write(v2.root / "sys/fs/cgroup/pod/container/cpu.max", "max 100000")

    assert v2.sampler().sample()["usable_cores_count"] == 1.5


def test_cores_of_an_ended_command_are_its_last_ones(v2):
    def affinity(_pid):
        if not (v2.root / f"proc/{PID}").exists():
            raise ProcessLookupError
        return {0, 1, 2}

    sampler = HostSampler(PID, root=v2.root, affinity=affinity)
    sampler.sample()
    shutil.rmtree(v2.root / f"proc/{PID}")

    assert sampler.sample()["usable_cores_count"] == 3


def test_sampler_works_on_this_host():
    sample = HostSampler(os.getpid()).sample()

    assert 0 < sample["memory_available_bytes"] < sample["memory_total_bytes"]
    assert 0 < sample["usable_cores_count"] <= os.cpu_count()


def test_busy_cores_are_those_of_the_affinity_since_the_last_sample(machine):
    sampler = machine.sampler(cores=2)
    write(
        machine.root / "proc/stat",
        "cpu  0 0 0 0\ncpu0 10 0 0 90 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 0 0 0 9 0 0 0 0",
    )
    assert sampler.sample()["busy_cores_count"] is None, "one sample has no span"
    # Half of core 0 is busy, and a hypervisor takes all of core 1; core 2 is not for this job.
    write(
        machine.root / "proc/stat",
        "cpu  0 0 0 0\ncpu0 50 0 10 130 10 0 0 0 9 9\ncpu1 0 0 0 0 0 0 0 80\ncpu2 80 0 0 9 0 0 0 0",
    )
    assert sampler.sample()["busy_cores_count"] == pytest.approx(0.5 + 1.0)
