"""Run trainers of other libraries bare and attached, and compare Tidegauge's figures with an independent count.

    python tests/compat/run.py [PROGRAM…]

Without arguments all programs run. The environment in `.compat/` is made once: it sees the packages of this
interpreter and has those of `requirements.txt`. The table of docs/compatibility.md is written again; a program that
did not run this time keeps the row of its newest run. Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import truth
from programs_list import PROGRAMS, Program

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
ENVIRONMENT = REPOSITORY / ".compat" / "environment"
RESULTS = REPOSITORY / ".compat" / "results"
PAGE = REPOSITORY / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
#: Line of a counter.pth: Python runs it at start-up.
START = (
    'import os, sys; "COMPAT_COUNTS" in os.environ and (sys.path.insert(0, os.environ["COMPAT_COUNTER"]), '
    '__import__("counter"), sys.path.pop(0))\n'
)
LOSS = re.compile(r"(loss|sum|accuracy|probabilities)\b.* \S+$")
TIMEOUT_SECONDS = 300
#: Variables that limit the threads: with more of them, a finding about too few cores would be right.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """One run of a program."""

    status: int
    losses: list[str]
    counted: truth.Truth
    errors: str


def main() -> int:
    """Run the programs, write the table, and return 1 if something differs."""
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(names))
    chosen = parser.parse_args().programs or names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no program {unknown[0]!r}; there are {', '.join(names)}")
    make_environment()
    good = True
    for program in PROGRAMS:
        if program.name in chosen:
            begun = time.monotonic()
            result = compare(program)
            (RESULTS / f"{program.name}.json").write_text(json.dumps(result, indent=1))
            good = good and not result["differences"]
            words = "; ".join(result["differences"]) or "same"
            print(f"{program.name}: {words} ({time.monotonic() - begun:.0f} s)", flush=True)
    write_page()
    return 0 if good else 1


def make_environment() -> None:
    """Create the environment, unless it is there with these very requirements."""
    pins, stamp = (HERE / "requirements.txt").read_text(), ENVIRONMENT / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != pins:
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages() / "project.pth").write_text("\n".join(ours) + "\n")
        pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "-qq", "--no-deps"]
        subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
        # Apart: without CUDA its operators do not load, and other libraries would try to import it.
        vision = HERE / "requirements-vision.txt"
        subprocess.run([*pip, "--target", ENVIRONMENT / "vision", "-r", vision], check=True)
        stamp.write_text(pins)
    (packages() / "counter.pth").write_text(START)
    RESULTS.mkdir(exist_ok=True)


def packages() -> Path:
    """Return the folder of packages of the environment."""
    return next(ENVIRONMENT.glob("lib/python*/site-packages"))


def compare(program: Program) -> dict[str, Any]:
    """Run a program bare and attached; return what was seen and where it differs."""
    scratch = Path(tempfile.mkdtemp(prefix=f"compat-{program.name}-"))
    bare = execute(program, scratch / "bare", ())
    home = ("--home", str(scratch / "home"))
    tidegauge = (sys.executable, "-P", "-m", "collector")
    attached = execute(program, scratch / "attached", (*tidegauge, "run", *home, "--"))
    report = subprocess.run(
        [*tidegauge, "report", *home, "--format", "json"], capture_output=True, text=True, check=False
    )
    said = json.loads(report.stdout) if report.stdout.startswith("{") else {"run": {}, "findings": []}
    result = {
        "bare": asdict(bare),
        "attached": asdict(attached),
        "run": said["run"],
        "findings": [[finding["severity"], finding["kind"]] for finding in said["findings"]],
    }
    result["differences"] = differences(program, bare, attached, result)
    if not result["differences"]:
        shutil.rmtree(scratch)
    return result


def execute(program: Program, place: Path, before: tuple[str, ...]) -> Outcome:
    """Run the program in a folder of its own, behind these words."""
    counts = place / "counts"
    counts.mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGAUGE", "PYTHON"))}
    ours = {"COMPAT_COUNTS": str(counts), "COMPAT_COUNTER": str(HERE), "PYTHONHASHSEED": "0", **ONE_THREAD}
    script = str(HERE / "programs" / program.file)
    command = [*before, str(ENVIRONMENT / "bin" / "python"), *program.launcher, script]
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=clean | ours,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, [], truth.read(counts), f"not done after {TIMEOUT_SECONDS} s")
    (place / "stdout").write_text(done.stdout)
    (place / "stderr").write_text(done.stderr)
    losses = sorted(line for line in done.stdout.splitlines() if LOSS.match(line))
    return Outcome(done.returncode, losses, truth.read(counts), done.stderr[-2000:])


def differences(program: Program, bare: Outcome, attached: Outcome, result: dict[str, Any]) -> list[str]:
    """Return one line for each thing that is not as it should be."""
    run, counted = result["run"], attached.counted
    pairs = (
        ("exit status bare", bare.status, 0),
        ("exit status attached", attached.status, bare.status),
        ("exit status reported", run.get("exit_status"), bare.status),
        ("counts attached and bare", counted, bare.counted),
        ("steps", run.get("steps"), counted.steps),
        ("batches", run.get("batches"), counted.batches),
        ("workers", run.get("workers_reporting"), [counted.workers] * 2),
    )
    found = [f"{name}: {seen} for {expected}" for name, seen, expected in pairs if seen != expected]
    if not bare.losses or bare.losses != attached.losses:
        found.append("losses")
    return found + [f"finding {kind}" for kind in unexpected(program, result)]


def unexpected(program: Program, result: dict[str, Any]) -> list[str]:
    """Return the kinds of findings above info that this program does not call for."""
    return [kind for severity, kind in result["findings"] if severity != "info" and kind not in program.expected]


def write_page() -> None:
    """Write the table of the page again, from the newest result of every program."""
    versions = {
        package.name.lower().replace("_", "-"): package.version
        for package in distributions(path=[*sys.path, str(packages())])
    }
    rows = [
        "| program | what it runs | processes | exit status | losses | steps | batches | workers | findings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    count, good, days = 0, 0, set[datetime.date]()
    for program in PROGRAMS:
        path = RESULTS / f"{program.name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            rows.append(row(program, result, versions))
            count, good = count + 1, good + (not result["differences"])
            days.add(datetime.date.fromtimestamp(path.stat().st_mtime))
    begin, rest = PAGE.read_text().split(BEGIN)
    span = " to ".join(dict.fromkeys(f"{day:%-d %B %Y}" for day in (min(days), max(days))))
    words = f"{good} of {count} programs: nothing differs. {span}, torch {versions['torch']}.\n\n"
    PAGE.write_text(begin + BEGIN + words + "\n".join(rows) + "\n" + END + rest.split(END)[1])


def row(program: Program, result: dict[str, Any], versions: dict[str, str]) -> str:
    """Return a program's row of the table; bold is what differs."""
    bare, attached, run = result["bare"], result["attached"], result["run"]
    counted = attached["counted"]
    names = " ".join(f"{name} {versions.get(name, '?')}" for name in program.packages)
    what = f"{names}: {program.about}" if names else program.about
    reported = run.get("workers_reporting") or [None, None]
    same = bare["losses"] == attached["losses"] and bare["losses"]
    above = [kind for severity, kind in result["findings"] if severity != "info"]
    strange = unexpected(program, result)
    statuses = {bare["status"], attached["status"], run.get("exit_status")}
    findings = ", ".join(f"**{kind}**" if kind in strange else f"{kind} (expected)" for kind in above) or "none"
    cells = [
        program.name,
        what,
        counted["processes"],
        "0" if statuses == {0} else f"**{bare['status']}, {attached['status']}**",
        f"{len(bare['losses'])} the same" if same else "**differ**",
        pair(run.get("steps"), counted["steps"]),
        pair(run.get("batches"), counted["batches"]),
        f"{counted['workers']}"
        if reported == [counted["workers"]] * 2
        else f"**{reported} for {counted['workers']}**",
        findings,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def pair(reported: Any, counted: int) -> str:
    """Return the figure, or both where they differ."""
    return f"{counted}" if reported == counted else f"**{reported} for {counted}**"


if __name__ == "__main__":
    sys.exit(main())
