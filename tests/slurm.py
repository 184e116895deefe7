"""A real Slurm of one node, with configuration, state and ports of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, bare_environment, wait_for

EXAMPLES = REPOSITORY / "examples" / "slurm"
#: States in which a job does not run any more.
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL")
_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobRequeue=1
SchedulerParameters=bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
PlugStackConfig={folder}/plugstack.conf
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
Prolog={folder}/prolog.sh
Epilog={folder}/epilog.sh
{limits}
"""
#: Ways to hold a job to its memory: a control group, or Slurm's own count.
LIMITS = {
    "cgroup": "TaskPlugin=task/cgroup",
    "count": "TaskPlugin=task/none\nJobAcctGatherParams=OverMemoryKill",
}
_CGROUP = "CgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainRAMSpace=yes\n"


class Slurm:
    """A running Slurm; its jobs begin in `work`, which has the examples, with Tidegauge on their PATH."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.homes = folder / "homes"
        self.home = self.homes / getpass.getuser()
        self.environment = bare_environment() | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TIDEGAUGE_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def submit(self, *words: str) -> int:
        """Submit a job and return its number."""
        return int(self.call("sbatch", "--parsable", *words).strip())

    def job(self, number: int) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(number)).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: int) -> dict[str, str]:
        """Return the fields of a job that has ended."""
        wait_for(lambda: self.job(number)["JobState"] in _ENDED, f"job {number} has not ended", seconds=150)
        return self.job(number)

    def output(self, number: int) -> str:
        """Return the output of a job so far."""
        path = self.work / f"slurm-{number}.out"
        return path.read_text() if path.exists() else ""

    def call(self, *words: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            words, env=self.environment, cwd=self.work, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _missing() -> str:
    """Return the reason for which no Slurm can be started here; empty if one can."""
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def running_slurm(folder: Path, limits: str) -> Iterator[Slurm]:
    """Run a Slurm in an empty folder, which holds jobs to their memory in one of the ways of `LIMITS`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = {"controller_port": one.getsockname()[1], "daemon_port": other.getsockname()[1]}
    host = socket.gethostname().partition(".")[0]
    text = _SETTINGS.format(host=host, folder=folder, limits=LIMITS[limits], **ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(_CGROUP)
    shutil.copytree(EXAMPLES, folder / "work")
    slurm = Slurm(folder)
    for name in ("prolog.sh", "epilog.sh"):
        script = (EXAMPLES / name).read_text().replace("/var/lib/tidegauge", str(slurm.homes))
        (folder / name).write_text(script.replace("/opt/tidegauge/bin", str(Path(sys.executable).parent)))
        (folder / name).chmod(0o755)
    daemons = []
    try:
        for words in (("slurmctld", "-D", "-c"), ("slurmd", "-D", "-N", host)):
            log = (folder / f"{words[0]}.out").open("w")
            with log:
                daemons.append(subprocess.Popen(words, env=slurm.environment, stdout=log, stderr=log))
        wait_for(lambda: _is_idle(slurm), "Slurm has no idle node")
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _is_idle(slurm: Slurm) -> bool:
    words = ("sinfo", "--noheader", "--format=%t")
    done = subprocess.run(words, env=slurm.environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def slurm_or_skip(folder: Path, limits: str) -> Iterator[Slurm]:
    """Yield a running Slurm for a fixture; skip its tests where none can be started."""
    if reason := _missing():
        pytest.skip(reason)
    with running_slurm(folder, limits) as slurm:
        yield slurm
