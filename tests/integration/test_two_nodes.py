"""One training on two nodes: network namespaces with a cable each, one collector per node, one shared store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from store_services import BUCKET, Postgres, postgres_programs, s3_service

from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from tests.conftest import REPOSITORY, bare_environment, wait_for

SCRIPT = REPOSITORY / "tests" / "scripts" / "two_nodes.py"
STEPS = 120
#: Names and addresses are those of this process: another suite may run on the machine.
_NAME, _NET = f"tg{os.getpid()}", f"10.77.{os.getpid() % 254}"
NODES = {f"{_NAME}-a": f"{_NET}.2", f"{_NAME}-b": f"{_NET}.3"}
STORE_ADDRESS, BRIDGE = f"{_NET}.1", f"{_NAME}-c"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def can_make_networks() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or postgres_programs() is None:
        return False
    made = subprocess.run(["ip", "netns", "add", _NAME], capture_output=True, check=False).returncode == 0
    ip("netns", "del", _NAME, check=False)
    return made


@pytest.fixture
def network():
    """Two namespaces, each with a cable to a bridge where the store is."""

    def take_down() -> None:
        for name in NODES:
            ip("netns", "del", name, check=False)
        ip("link", "del", BRIDGE, check=False)

    take_down()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{STORE_ADDRESS}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for name, address in NODES.items():
        cable = f"{name}-0"
        ip("netns", "add", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield
    take_down()


@pytest.mark.skipif(not can_make_networks(), reason="needs root, network namespaces and PostgreSQL")
def test_link_cut_during_training_loses_no_record(network, tmp_path, monkeypatch):
    postgres = Postgres(STORE_ADDRESS)
    (tmp_path / "s3").mkdir()
    with s3_service(tmp_path / "s3", STORE_ADDRESS) as s3:
        store = {**s3, "TIDEGAUGE_STORE": postgres.url, "TIDEGAUGE_DATA": f"s3://{BUCKET}/two-nodes"}
        first = next(iter(NODES.values()))
        nodes = []
        for rank, (name, _) in enumerate(NODES.items()):
            training = [sys.executable, str(SCRIPT), str(tmp_path / name), str(STEPS)]
            command = [sys.executable, "-m", "collector", "run", "--run-id", "pair", "--", *training]
            inside = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "sh",
                "-c",
                'hostname "$0" && exec "$@"',
                name,
            ]
            variables = {
                **store,
                "TIDEGAUGE_HOME": str(tmp_path / f"home-{name}"),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": first,
                "MASTER_PORT": "29519",
            }
            nodes.append(
                subprocess.Popen(
                    [*inside, *command],
                    env=bare_environment() | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        last = list(NODES)[1]
        wait_for((tmp_path / last).exists, "the middle of the training", 120)
        ip("link", "set", f"{last}-0", "down")
        time.sleep(3)  # the cut itself
        ip("link", "set", f"{last}-0", "up")
        said = [node.communicate(timeout=180)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        with read(find_run(tmp_path / "viewer", "pair")) as snapshot:
            assert snapshot.problems == ()
            steps = snapshot.query(
                "SELECT host, rank, count(*) n, count(DISTINCT step) different, min(time_ns) t FROM step "
                "GROUP BY ALL ORDER BY host"
            )
            starts = snapshot.query("SELECT host, time_ns FROM event WHERE kind = 'collector-start'")
    postgres.close()
    assert steps["host"].tolist() == list(NODES)
    assert steps["rank"].tolist() == [0, 1]
    assert steps["n"].tolist() == steps["different"].tolist() == [STEPS, STEPS]
    assert abs(steps["t"][0] - steps["t"][1]) < 5e9, "the two nodes are on one clock"
    assert set(starts["host"]) == set(NODES)
