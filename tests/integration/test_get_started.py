"""The page Get started: its commands run in one shell, in order, and print what the page shows."""

import re
import socket
import subprocess

import pytest

from tests.conftest import REPOSITORY, bare_environment

PAGE = (REPOSITORY / "docs" / "get-started.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(shell|text)\n(.*?)```", PAGE, re.DOTALL)
#: Last command of a block -> its exit status, if it is not 0.
STATUSES = {"tidegauge job fault killed": 137}
#: A person opens the page and presses Ctrl-C.
DASHBOARD = """set -m
tidegauge dashboard --port {port} & dashboard=$!
until python -c "from urllib.request import urlopen; urlopen('http://localhost:{port}/_stcore/health')" 2>/dev/null
do kill -0 $dashboard || exit; sleep 0.2; done
kill -INT $dashboard; wait $dashboard || true"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pattern(line):
    """Return what a line of the page stands for: other figures, other spaces."""
    words = (re.sub(r"\d[\d.,]*", r"\\d[\\d.,]*", re.escape(word).replace(r"\.", ".")) for word in line.split())
    return r"\s+".join(words)


@pytest.mark.timeout(300)
def test_the_commands_of_the_page_print_what_it_shows(tmp_path):
    commands = [text.strip() for kind, text in BLOCKS if kind == "shell"]
    assert "tidegauge dashboard" in commands
    script = []
    for place, block in enumerate(commands):
        block = (
            DASHBOARD.format(port=free_port()) if block == "tidegauge dashboard" else block.replace("\n", " &&\n")
        )
        script.append(f"{block}\nprintf '\\nblock {place} ended with %s\\n' $?")
    # `make` prints here what it would install: the environment of the tests is complete.
    variables = {"TIDEGAUGE_HOME": str(tmp_path), "MAKEFLAGS": "n", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash"],
        input="\n".join(script),
        cwd=REPOSITORY,
        env=bare_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    outputs = re.split(r"\nblock \d+ ended with (\d+)\n", done.stdout)
    statuses = [int(status) for status in outputs[1::2]]
    assert statuses == [STATUSES.get(block, 0) for block in commands], done.stdout
    place = -1
    for kind, text in BLOCKS:
        if kind == "shell":
            place += 1
            continue
        printed = outputs[2 * place]
        assert [line for line in text.splitlines() if not re.search(pattern(line), printed)] == [], printed
