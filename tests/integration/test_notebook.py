"""`attach()` and the magics in a real Jupyter kernel."""

import re

import nbclient
import nbformat
import pytest

from tests.conftest import REPOSITORY, wait_for

TRAIN = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4):
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
"""


class Notebook:
    """A notebook whose cells are added one by one and executed in one kernel."""

    def __init__(self, client: nbclient.NotebookClient) -> None:
        self._client = client

    def execute(self, source: str) -> nbformat.NotebookNode:
        """Execute a new cell and return it; its outputs change while later cells are executed."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        return self._client.execute_cell(cell, len(self._client.nb.cells) - 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def notebook(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGAUGE_HOME", str(home))
        patch.setenv("JPY_SESSION_NAME", "/somewhere/digits.ipynb")
        patch.delenv("TIDEGAUGE_RUN_DIR", raising=False)
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3")
        client.create_kernel_manager()
        with client.setup_kernel(cwd=str(REPOSITORY)):
            yield Notebook(client)


def html(cell: nbformat.NotebookNode, output: int = 0) -> str:
    return cell.outputs[output]["data"]["text/html"]


@pytest.fixture(scope="module")
def attached(notebook):
    """The cell that attaches, while its run goes on."""
    return notebook.execute("import training_harness\nrun_dir = training_harness.attach()")


def test_card_below_attach_follows_the_training(notebook, home, attached):
    [run_dir] = (home / "runs").iterdir()
    assert re.search(r"-digits-", run_dir.name), "the run has the notebook's name"
    assert run_dir.name in html(attached)

    def live():
        notebook.execute(TRAIN)
        return "data wait" in html(attached)

    wait_for(live, "the card has figures", 120)
    assert "running" in html(attached)
    assert "host memory" in html(attached)

    again = notebook.execute("training_harness.attach()")
    assert "data wait" in html(again), "a cell that attaches again shows the card of the same run"
    assert len(list((home / "runs").iterdir())) == 1
    stale = html(attached)

    def followed():
        notebook.execute(TRAIN)
        return html(again) != stale

    wait_for(followed, "the newest card is updated", 60)


def test_card_becomes_the_report_when_the_run_ends(notebook, home, attached):
    shown = notebook.execute("training_harness.attach()")
    # One cell to the end: nbclient drops an update that comes while no cell runs, and the last one comes once.
    notebook.execute(
        """
import time
training_harness.detach()
deadline = time.monotonic() + 100
while time.monotonic() < deadline and not any("finished" in card.read_text() for card in run_dir.glob("card.html")):
    time.sleep(0.1)
time.sleep(5)
"""
    )
    assert "finished" in html(shown)
    cell = notebook.execute("%load_ext tidegauge\n%tidegauge report")
    assert "finished" in html(cell)


def test_magic_links_to_a_dashboard_that_answers(notebook):
    notebook.execute("%load_ext tidegauge")
    cell = notebook.execute("%tidegauge dashboard latest")
    [run_id] = re.findall(r'href="http://localhost:\d+/\?run=([^"]+)"', html(cell))
    assert "digits" in run_id
    answer = notebook.execute("import urllib.request\nurllib.request.urlopen(repr(_)).status")
    assert answer.outputs[0]["data"]["text/plain"] == "200"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nosuch", "'nosuch' is not known; %tidegauge report"),
        ("report nosuch", "no run 'nosuch'"),
        ("report --verbose", "--verbose is no run, and there are no options here"),
    ],
)
def test_wrong_line_is_one_line(notebook, line, said):
    notebook.execute("%load_ext tidegauge")
    [output] = notebook.execute(f"%tidegauge {line}").outputs
    assert output["name"] == "stderr"
    assert said in output["text"]
    assert output["text"].count("\n") == 1


def test_captured_attach_shows_and_keeps_nothing(notebook):
    cell = notebook.execute("%%capture captured\nimport training_harness\nrun_dir = training_harness.attach()")
    assert cell.outputs == []
    asked = notebook.execute("training_harness.detach()\nlen(captured.outputs)")
    assert asked.outputs[0]["data"]["text/plain"] == "0"
