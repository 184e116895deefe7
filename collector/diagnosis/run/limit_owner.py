"""The owner of a memory limit, by the path of its control group: a batch job, a container, a unit of systemd."""

from __future__ import annotations

import re
from typing import NamedTuple

from collector.diagnosis.run.tables import RunTables


class LimitOwner(NamedTuple):
    """The owner of a limit in words, and how to raise the limit; None where that depends on how it was set."""

    words: str
    remedy: str | None


SLURM_REMEDY = "Ask Slurm for more memory: sbatch --mem=SIZE, or --mem-per-cpu"
_KUBERNETES = "Raise resources.limits.memory of the container in the pod's specification"
_DOCKER = "Raise the container's limit: docker run --memory=SIZE"
_PODMAN = "Raise the container's limit: podman run --memory=SIZE"
_SYSTEMD = "Raise MemoryMax= of that unit"
#: Form of a path, the owner in words with what the form captures, and the remedy. The first form that fits counts.
#: Slurm: cgroup.html and the cgroup/v2 plugin; Kubernetes: pkg/kubelet/cm; Docker and Podman: runc's and systemd's
#: cgroup drivers; PBS: the cgroups hook.
_FORMS = (
    (re.compile(r"slurm.*/job_(\d+)"), "Slurm job {}", SLURM_REMEDY),
    (re.compile(r"kubepods.*pod([0-9a-f]{8})"), "Kubernetes pod {}…", _KUBERNETES),
    (re.compile(r"(?:/docker/|docker-)([0-9a-f]{12})"), "Docker container {}", _DOCKER),
    (re.compile(r"libpod-(?:payload-)?([0-9a-f]{12})"), "Podman container {}", _PODMAN),
    (re.compile(r"pbs.*/(\d+[\w.-]*)$"), "PBS job {}", "Ask PBS for more memory: qsub -l mem=SIZE"),
    (re.compile(r"/([^/]+\.(?:service|scope|slice))$"), "systemd unit {}", _SYSTEMD),
)
_CONTAINERS = {
    "kubernetes": LimitOwner("the Kubernetes container", _KUBERNETES),
    "docker": LimitOwner("the Docker container", _DOCKER),
    "podman": LimitOwner("the Podman container", _PODMAN),
}


def limit_owner(tables: RunTables, host: str) -> LimitOwner | None:
    """Return the owner of the memory limit that bound last on a host; None if no limit of a group bound."""
    limits = [event for event in tables.events_of("memory-limit") if event["host"] == host]
    return owner_of(str(limits[-1].get("path")), limits[-1].get("container")) if limits else None


def owner_of(path: str, container: str | None) -> LimitOwner:
    """Return the owner of a group's limit, by its path and the kind of container around it, None without one."""
    for form, words, remedy in _FORMS:
        if match := form.search(path):
            return LimitOwner(f"{words.format(match[1])}, cgroup {path}", remedy)
    if container in _CONTAINERS:
        return _CONTAINERS[container]
    return LimitOwner(f"cgroup {path}", None)
