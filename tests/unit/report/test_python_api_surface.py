"""The names and signatures of the Python API: a change here is a change for its users (docs/python.md)."""

import dataclasses
import inspect
import subprocess
import sys
import typing

import tidegauge
from tests.conftest import REPOSITORY
from tidegauge.runs import Chart, Report, Run

NAMES = {
    *("Advice", "AllocationSite", "Chart", "Check", "Eta", "Evidence", "Finding", "Limit", "Locus", "Rate"),
    *("Report", "Run", "TidegaugeError", "WaitingLine", "list_runs", "load_ipython_extension", "open_run"),
}
SIGNATURES = {
    tidegauge.open_run: "(run: 'str | os.PathLike[str]' = 'latest', *, "
    "home: 'str | os.PathLike[str] | None' = None) -> 'Run'",
    tidegauge.list_runs: "(*, home: 'str | os.PathLike[str] | None' = None, trials: 'bool' = False) -> 'list[Run]'",
    Run.report: "(self) -> 'Report'",
    Run.stream: "(self, name: 'str', *, library: 'Library' = 'pandas') -> 'Any'",
    Run.query: "(self, sql: 'str', params: 'Params | None' = None, *, library: 'Library' = 'pandas') -> 'Any'",
    Run.charts: "(self, page: 'str | None' = None, *, theme: 'Theme' = 'light') -> 'tuple[Chart, ...]'",
}
#: Fields may be added, and none may go.
FIELDS = {
    Run: "run_id name path status tags note pinned started command git_commit gravest steps duration_seconds "
    "throughput throughput_unit data_wait_ratio host_peak_bytes device_peak_bytes",
    Report: "run_id name status exit_status attempts steps step_unit batches duration_seconds workers_reporting "
    "findings checks ending summary",
    Chart: "page title caption figure",
    tidegauge.Finding: "kind severity confidence summary locus since_step evidence rate limit eta held_by waits_in "
    "advice limited_by fault consequence_of known",
    tidegauge.Evidence: "name value unit n window",
    tidegauge.Locus: "host rank device role pid main_pid worker loader loader_name stage",
    tidegauge.Advice: "text expected effect",
    tidegauge.Check: "name status reason",
}


def test_names_are_exported():
    assert set(tidegauge.__all__) == NAMES
    assert all(hasattr(tidegauge, name) for name in NAMES)


def test_signatures_stay():
    for function, signature in SIGNATURES.items():
        assert str(inspect.signature(function)) == signature, function.__qualname__


def test_fields_stay_and_are_frozen():
    for kind, names in FIELDS.items():
        public = [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        assert public == names.split(), kind.__name__
        assert kind.__dataclass_params__.frozen


def test_every_public_function_is_documented():
    text = (REPOSITORY / "docs" / "python.md").read_text()
    names = [*NAMES - {"load_ipython_extension"}, "report()", "stream(", "query(", "charts("]
    assert [name for name in names if name not in text] == []
    assert all(word in text for word in typing.get_args(tidegauge.runs.Library))


def test_import_takes_the_standard_library_and_the_harness_alone():
    code = (
        "import sys; before = set(sys.modules); import tidegauge; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names; "
        "print(sorted(name for name in new if not name.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tidegauge', 'training_harness']"
