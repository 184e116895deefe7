"""Installs this tree in environments of its own, from the package index, and uses it as a user would.

    python scripts/install_check.py

Checks the base install (the harness alone), `[collector]` and `[app]`: the lake opens with the extensions of the
pinned packages and the network out of reach, each thing that is lacking is said in one line, and no package named
`app` or `collector` can be imported, nor shadows one of the user's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
_IS_WHOLE = "print(open('report.html').read().rstrip().endswith('</html>'))"
_ASK = (
    "import tidegauge; run = tidegauge.open_run(); "
    "print(run.report().status, len(run.stream('process')) > 0, isinstance(run.charts('overview'), tuple))"
)
_ASK_BASE = """
import tidegauge
try:
    tidegauge.open_run()
except tidegauge.TidegaugeError as error:
    print(error)
"""
ATTACH = "import training_harness; training_harness.attach(); training_harness.detach()"
#: Proxy that refuses: DuckDB would look there for an extension that has no package.
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def main() -> int:
    """Print one line per check; 1 if one failed."""
    with tempfile.TemporaryDirectory(prefix="tidegauge-install-") as scratch:
        source = Path(shutil.copytree(REPOSITORY, Path(scratch) / "source", ignore=shutil.ignore_patterns(".*")))
        base = Installed(Path(scratch) / "base", source, "")
        full = Installed(Path(scratch) / "full", source, "[collector]")
        app = Installed(Path(scratch) / "app", source, "[app]")
        return 0 if all([*check_base(base), *check_collector(full), *check_app(app)]) else 1


class Installed:
    """An environment with Tidegauge in it, a home, and a user's directory."""

    def __init__(self, place: Path, source: Path, extra: str) -> None:
        self.name = f"tidegauge{extra}"
        self.bin = place / "bin"
        self._place = place
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        self.pip("install", f"{source}{extra}")

    def pip(self, *words: str) -> None:
        """Run pip there, quietly."""
        subprocess.run([self.bin / "python", "-m", "pip", "--quiet", *words], check=True)

    def check(self, what: str, *command: str, status: int, said: str) -> bool:
        """Run a program of the environment and print whether it ended and said what it should."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGAUGE", "PYTHON"))}
        home = {"TIDEGAUGE_HOME": str(self._place / "runs"), "HOME": str(self._place)}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            env=ours | home | NO_NETWORK,
            cwd=self._place,
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        good = done.returncode == status and said in output and "Traceback" not in output
        sys.stdout.write(f"{'ok  ' if good else 'FAIL'}  {self.name}: {what}\n")
        if not good:
            sys.stdout.write(f"exit status {done.returncode} for {status}, and no {said!r} in:\n{output}\n")
        return good


def check_names(environment: Installed) -> bool:
    """No package `app` or `collector` can be imported."""
    code = "from importlib.util import find_spec; print([n for n in ('app', 'collector') if find_spec(n)])"
    return environment.check("its own names stay its own", "python", "-P", "-c", code, status=0, said="[]")


def check_app(app: Installed) -> list[bool]:
    """The pages of a run are drawn next to packages `app` and `collector` of the user, installed and not."""
    packages = next((app.bin.parent / "lib").glob("python*/site-packages"))
    for folder in (packages, app.bin.parent):
        for name in ("app", "collector"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text("raise ImportError('the user's own')\n")
    code = "print('trained')"
    return [
        app.check("run", "tidegauge", "run", "--", str(app.bin / "python"), "-c", code, status=0, said="trained"),
        app.check("report", "tidegauge", "report", status=0, said="finished"),
        app.check(
            "its pages", "tidegauge", "report", "--format", "html", "--output", "report.html", status=0, said=""
        ),
        app.check("they are there", "python", "-c", _IS_WHOLE, status=0, said="True"),
        app.check("the Python API", "python", "-c", _ASK, status=0, said="finished True True"),
    ]


def check_base(base: Installed) -> list[bool]:
    """The harness alone: it records, and every command says what to install."""
    lacking = "pip install 'tidegauge[collector]'"
    commands = ("--help", "run", "report", "runs", "doctor", "dashboard", "job", "collect", "check")
    return [
        check_names(base),
        base.check("attach() works without a collector", "python", "-W", "error", "-c", ATTACH, status=0, said=""),
        base.check("the Python API says what is lacking", "python", "-c", _ASK_BASE, status=0, said=lacking),
        *(
            base.check(f"{word} says what is lacking", "tidegauge", word, status=2, said=lacking)
            for word in commands
        ),
    ]


def check_collector(full: Installed) -> list[bool]:
    """The collector: a run is followed, kept, reported, listed and exported; a lacking package is one line."""
    code = "print('trained')"
    checks = [
        check_names(full),
        full.check("run", "tidegauge", "run", "--", str(full.bin / "python"), "-c", code, status=0, said="trained"),
        full.check("report", "tidegauge", "report", status=0, said="finished"),
        full.check("runs", "tidegauge", "runs", status=0, said="finished"),
        full.check("export", "tidegauge", "export", "--to", "exported", status=0, said="process.parquet"),
        full.check("doctor", "tidegauge", "doctor", status=0, said="DuckDB's extensions load"),
        full.check("demo without torch", "tidegauge", "demo", "--no-dashboard", status=0, said="Look first: "),
        full.check("no dashboard", "tidegauge", "dashboard", status=2, said="pip install 'tidegauge[app]'"),
    ]
    full.pip("uninstall", "--yes", "duckdb-extension-ducklake")
    lacking = "pip install duckdb-extension-ducklake=="
    checks.append(full.check("without an extension", "tidegauge", "report", status=2, said=lacking))
    full.pip("install", "--no-deps", "duckdb-extension-ducklake<1.5.5")
    checks.append(full.check("an extension of another version", "tidegauge", "report", status=2, said=lacking))
    return checks


if __name__ == "__main__":
    sys.exit(main())
