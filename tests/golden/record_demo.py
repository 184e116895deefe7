"""Record the runs of `tidegauge demo` with the tour: python -m tests.golden.record_demo.

It needs root, for the memory limit and for a host name that is not this machine's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from collector.commands.demo.replay import RECORDED
from collector.commands.demo.tour import STOPS
from tests.conftest import bare_environment
from tests.golden.journals import LEFT_OUT, keep_journals_alone, linked_journals
from tests.golden.record import REPOSITORY

#: Shell command that gives the processes below it another host name.
_AS_DEMO = 'hostname demo && exec "$@"'


def main() -> None:
    """Record the tour in a new folder, and replace the recorded runs."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        folder = Path(name)
        # Command lines and tracebacks name these folders, not those of this machine.
        (folder / "venv").symlink_to(sys.prefix)
        (folder / "source").symlink_to(REPOSITORY)
        environ = bare_environment() | {"PYTHONPATH": f"{folder}/source", "OMP_NUM_THREADS": "1"}
        command = (f"{folder}/venv/bin/python", "-P", "-m", "collector", "job", "tour", "--no-dashboard")
        with linked_journals(folder / "home", folder / "journal"):
            words = ["unshare", "--uts", "sh", "-c", _AS_DEMO, "sh", *command, "--home", "home"]
            subprocess.run(words, cwd=folder, env=environ, check=True)
        runs = sorted((folder / "home" / "runs").iterdir())
        if len(runs) != len(STOPS):
            sys.exit(f"{len(runs)} of {len(STOPS)} runs were recorded: the old ones stay")
        RECORDED.mkdir(exist_ok=True)
        for run in runs:
            keep_journals_alone(run, folder / "journal" / run.name)
            pack(run, folder)


def pack(run: Path, folder: Path) -> None:
    """Write the archive of a run, without what is of this machine: its boot, its cgroups, and the folder's name."""
    manifest = json.loads((run / "run.json").read_text())
    for anchor in manifest["anchors"].values():
        anchor["boot_id"] = "recorded"
    (run / "run.json").write_text(json.dumps(manifest, indent=1))
    archive = RECORDED / f"{manifest['name']}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(run.rglob("*")):
            if path.is_file() and not path.name.endswith(LEFT_OUT):
                content = path.read_bytes()
                if path.suffix in (".json", ".jsonl"):
                    content = content.replace(_own_cgroup(), b"").replace(bytes(folder), b"/demo")
                expect_nothing_of_this_machine(path, content)
                packed.writestr(f"{run.name}/{path.relative_to(run)}", content)
    print(f"{archive.name}: {archive.stat().st_size / 1000:.0f} kB", flush=True)


def expect_nothing_of_this_machine(path: Path, content: bytes) -> None:
    """Exit if a file names this machine or a folder of it."""
    host, user = socket.gethostname(), str(Path.home())
    for word in (f'"{host}"', str(REPOSITORY), user + os.sep, *filter(None, [_own_cgroup().decode()])):
        if word.encode() in content:
            sys.exit(f"{path} has {word}: the old recordings stay, as far as they are not replaced")


def _own_cgroup() -> bytes:
    """Return the path of this process's memory cgroup; empty for the root."""
    for line in Path("/proc/self/cgroup").read_bytes().splitlines():
        _, controllers, group = line.split(b":", 2)
        if b"memory" in controllers.split(b","):
            return group.rstrip(b"/")
    return b""


if __name__ == "__main__":
    main()
