"""Checks the loader hooks against other versions of torch, each in an environment of its own.

    python scripts/versions.py [--keep DIR] [SPEC…]

A SPEC is what pip takes: `2.6.*`, or `newest`; by default the oldest supported version, one in the middle and the
newest. CPU builds are taken where torch's own index can be reached, else the builds of PyPI (5 GB each with CUDA).
Environments are kept in DIR and used again. What cannot be installed, or not imported, is said in the table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SPECS = ("2.2.*", "2.6.*", "newest")
CHECKS = ("tests/integration/test_loaders.py", "tests/integration/test_matrix.py")
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
#: torch before 2.3 was built against NumPy 1; torchdata is where the checks of its StatefulDataLoader are.
BESIDES = ("numpy<2", "torchdata==0.11.0")
ROW = "{:<8} {:<16} {:<44} {}"


def main() -> int:
    """Print one row per version; 1 if a check failed, or nothing could be checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=REPOSITORY / ".versions", metavar="DIR")
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    options = parser.parse_args()
    say(ROW.format("asked", "torch", "hooks", "checks of loaders"))
    outcomes = [row(spec, options.keep / spec.replace("*", "x")) for spec in options.specs]
    return 0 if any(outcomes) and False not in outcomes else 1


def row(spec: str, environment: Path) -> bool | None:
    """Return whether all checks passed; None if this version cannot be had here."""
    python = environment / "bin" / "python"
    problem = "" if python.exists() and version(python) else install(spec, environment)
    found = version(python)
    if problem or not found:
        say(ROW.format(spec, found or "-", problem or "cannot be imported", "not run"))
        return None
    passed, words = check(python)
    say(ROW.format(spec, found, ", ".join(missing_hooks(python)) or "all found", words))
    return passed


def install(spec: str, environment: Path) -> str:
    """Make the environment; what went wrong, in pip's own words."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    torch = "torch" if spec == "newest" else f"torch=={spec}"
    pip: list[str | Path] = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for where in (["--index-url", CPU_BUILDS, "--retries", "0", torch], [torch]):
        done = subprocess.run([*pip, *where], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            done = subprocess.run([*pip, *BESIDES], capture_output=True, text=True, check=False)
            break
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1] if done.returncode != 0 and errors else ""


def version(python: Path) -> str:
    """The version of torch there, empty if it cannot be imported."""
    code = "import torch; print(torch.__version__)"
    try:
        done = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def missing_hooks(python: Path) -> list[str]:
    """Return the hooks that `tidegauge doctor` misses in this torch."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "collector", "doctor", "--python", python],
        env=os.environ | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    return [f"no {name}" for name in re.findall(r"warning +hook (\S+)", done.stdout)]


def check(python: Path) -> tuple[bool, str]:
    """Run the checks with that interpreter for the scripts; pytest's last line."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS],
        env=os.environ | {"TIDEGAUGE_TEST_PYTHON": str(python)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-100:]]
    failed = [re.sub(r".*::(\w+).*", r"\1", line) for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = re.sub(r" in [\d.]+s.*", "", lines[-1])
    return done.returncode == 0, f"{counts} ({time.monotonic() - begun:.0f} s) {' '.join(failed)}".rstrip()


def say(line: str) -> None:
    """Print at once: a version takes minutes."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
