"""Modules that a light path must not load: each would cost every start."""

from __future__ import annotations

import json
import subprocess
import sys

#: Packages whose import takes tens of milliseconds or more.
HEAVY = {"duckdb", "numpy", "pandas", "plotly", "psutil", "pyarrow", "rich", "scipy", "streamlit", "torch"}


def run(code: str) -> str:
    """Return the output of a program in a new interpreter, outside of any run."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code: str) -> set[str]:
    """Return the modules that a program loads in a new interpreter, besides those of the interpreter itself."""
    program = (
        f"import sys; before = set(sys.modules)\n{code}\nloaded = [*sys.modules.keys() - before]\n"
        "import json; print(json.dumps(loaded))"
    )
    return set(json.loads(run(program).splitlines()[-1]))


def test_harness_is_imported_with_the_standard_library_alone():
    loaded = modules_after("import training_harness")
    ours = {name for name in loaded if name.startswith("training_harness")}
    assert ours == {"training_harness", "training_harness.standard_library"}
    assert {name.partition(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "training_harness"}
    assert loaded.isdisjoint({"inspect", "multiprocessing", "pathlib", "socket", "subprocess"})


def test_hooks_are_imported_without_heavy_packages():
    loaded = modules_after("from training_harness import *")
    assert "training_harness.installation" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_verdict_is_made_without_packages_that_it_does_not_use():
    loaded = modules_after("import collector.diagnosis, collector.report, collector.report.card")
    assert "pandas" in loaded
    assert loaded.isdisjoint({"plotly", "scipy", "streamlit", "torch"})


def test_runs_are_listed_without_table_libraries(tmp_path):
    code = "from collector.cli import cli; cli.main(['runs', '--home', {!r}], standalone_mode=False)"
    loaded = modules_after(code.format(str(tmp_path)))
    assert "collector.report.listing" in loaded
    assert loaded.isdisjoint(HEAVY - {"rich"})


def test_public_names_are_functions_however_the_package_is_imported():
    code = (
        "import training_harness.installation, training_harness.hooks.stages.stages, training_harness as harness\n"
        "print([name for name in harness.__all__ if not callable(getattr(harness, name))])\n"
        "print(set(harness.__all__) - set(dir(harness)), hasattr(harness, 'atach'))\n"
    )
    assert run(code) == "[]\nset() False\n"
