"""Compare every page of the recorded runs with the golden files, or write these; all of them take some minutes.

python -m tests.golden [--write] [NAME …]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.golden import golden_files, run_outputs
from tests.golden.cases import CASES, COMPARISON, RECORDED_GPU


def main() -> None:
    """Judge the named runs, or all; exit with 1 if one differs and is not to be written."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the golden files anew")
    parser.add_argument("names", nargs="*", metavar="NAME", help="else all")
    options = parser.parse_args()
    subjects = [*CASES, *RECORDED_GPU, COMPARISON]
    if unknown := set(options.names) - set(subjects):
        parser.error(f"unknown run {', '.join(sorted(unknown))}; there are {', '.join(subjects)}")
    changed = 0
    for name in options.names or subjects:
        with tempfile.TemporaryDirectory() as folder:
            said = (
                run_outputs.compare(Path(folder)) if name == COMPARISON else run_outputs.judge(name, Path(folder))
            )
        is_new = not golden_files.golden_path(name).exists()
        lines = "new" if is_new else golden_files.differing(name, golden_files.read_golden(name), said)
        changed += bool(lines)
        if options.write:
            golden_files.write_golden(name, said)
        print(lines or f"{name}: the same", flush=True)
    if options.write:
        golden_files.drop_unused_looks()
    sys.exit(1 if changed and not options.write else 0)


if __name__ == "__main__":
    main()
