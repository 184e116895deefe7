"""Check that the last commit can be released: `make release-check`.

It builds the wheel and the source distribution twice and compares their bytes, uses the wheel in an environment of
its own, writes its bill of materials (SBOM, CycloneDX), and looks its packages up in the database of known
vulnerabilities. dist/ has the result. Each check is one line: ok, FAIL, or "not run" with the reason. The exit
status is 1 if one failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DIST = REPOSITORY / "dist"
TOOLS = Path(sys.executable).parent
#: Extras whose packages the bill of materials lists.
EXTRAS = "[app,cluster]"


def main() -> int:
    """Print one line per check; return the exit status."""
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory(prefix="tidegauge-release-") as folder:
        scratch = Path(folder)
        first, second = (build(scratch / name) for name in ("first", "second"))
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
        checks = [
            check_same(checksums(first), checksums(second)),
            check_changelog((REPOSITORY / "CHANGELOG.md").read_text(), version),
            check_wheel(scratch / "installed", version),
        ]
        if checks[-1]:
            checks += [write_sbom(scratch / "installed", version), check_vulnerabilities(scratch / "installed")]
        sums = checksums(DIST)
        (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    return 0 if all(checks) else 1


def say(result: str, what: str) -> bool:
    """Print the line of a check; return whether it did not fail."""
    sys.stdout.write(f"{result:<7}  {what}\n")
    return result != "FAIL"


def run(*words: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; if it fails, its errors are shown."""
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True, check=True)
    return done.stdout.strip()


def reproducible() -> dict[str, str]:
    """Return the environment of a build, in which all files have the time of the last commit."""
    return {**os.environ, "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct")}


def build(folder: Path) -> Path:
    """Build both distributions of the last commit, the wheel from the source distribution; return their folder."""
    source, output = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    run("git", "archive", "--output", folder / "source.tar", "HEAD")
    shutil.unpack_archive(folder / "source.tar", source, filter="data")
    command = [TOOLS / "python", "-m", "build", "--no-isolation", "--outdir", output, source]
    run(*command, environment=reproducible())
    return output


def checksums(folder: Path) -> dict[str, str]:
    """Return file name -> SHA-256."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def check_same(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Both builds gave the same bytes."""
    different = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if different:
        return say("FAIL", f"two builds differ: {', '.join(different)}")
    return say("ok", f"two builds are equal byte by byte: {', '.join(first)}")


def check_changelog(changelog: str, version: str) -> bool:
    """The changelog has a section for this version; before a release it has none yet."""
    if f"\n## [{version}]" in changelog:
        return say("ok", f"CHANGELOG.md has a section for {version}")
    return say("not run", f"CHANGELOG.md has no section [{version}] yet; a release needs one")


def check_wheel(place: Path, version: str) -> bool:
    """The wheel can be installed with the pinned packages, fits them, and has the version."""
    (wheel,) = DIST.glob("*.whl")
    run(TOOLS / "python", "-m", "venv", place)
    pip = (place / "bin" / "python", "-m", "pip", "--quiet")
    run(*pip, "install", "--constraint", REPOSITORY / "requirements.txt", f"{wheel}{EXTRAS}")
    run(*pip, "check")
    said = run(place / "bin" / "tidegauge", "--version")
    return say("ok" if version in said.split() else "FAIL", f"the wheel says: {said}")


def write_sbom(place: Path, version: str) -> bool:
    """Write the bill of materials of the installed wheel."""
    path = DIST / f"tidegauge-{version}.cdx.json"
    options = ["--pyproject", REPOSITORY / "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", path]
    command = [TOOLS / "cyclonedx-py", "environment", *options, place / "bin" / "python"]
    run(*command, environment=reproducible())
    components = json.loads(path.read_text())["components"]
    return say("ok" if components else "FAIL", f"{path.name} lists {len(components)} packages")


def check_vulnerabilities(place: Path) -> bool:
    """No installed package has a known vulnerability."""
    (packages,) = place.glob("lib/python*/site-packages")
    command: Sequence[str | Path] = (
        TOOLS / "pip-audit",
        "--path",
        packages,
        "--format",
        "json",
        "--progress-spinner",
    )
    done = subprocess.run([*command, "off"], capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        return say("not run", f"pip-audit: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    looked_up = [package for package in found if "skip_reason" not in package]
    vulnerable = {package["name"]: [each["id"] for each in package["vulns"]] for package in looked_up}
    for name, ids in vulnerable.items():
        if ids:
            say("FAIL", f"pip-audit: {name} has {', '.join(ids)}")
    if len(looked_up) < len(found) / 2:
        reason = "does the network allow https://pypi.org/pypi/NAME/VERSION/json?"
        return say("not run", f"pip-audit: {len(looked_up)} of {len(found)} packages could be looked up; {reason}")
    if any(vulnerable.values()):
        return False
    return say("ok", f"pip-audit: {len(looked_up)} of {len(found)} packages have no known vulnerability")


if __name__ == "__main__":
    sys.exit(main())
