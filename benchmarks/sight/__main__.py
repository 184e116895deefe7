"""Show what each tool says of the same trainings with one planted fault each, as a page in Markdown.

    python -m benchmarks.sight [--tools TOOL ...] [--faults FAULT ...] [--keep DIR] > docs/sight.md
    .cuda/bin/python -m benchmarks.sight --cuda > docs/sight-cuda.md

With `--cuda`, the faults are those of GPU memory, on a simulated device, in the environment that `make test-cuda`
makes. Every tool has an environment of its own (benchmarks/environments.py). With `--keep`, runs that are there are
only judged again. It needs root: each run has a /dev/shm of its own, and one has a memory limit. Curves of the
whole host show other programs too, so nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from benchmarks.sight import runs
from benchmarks.sight.page import page
from benchmarks.sight.rules import CUDA_FAULTS, FAULTS
from benchmarks.sight.tools import ALONE, TOOLS
from tests.cgroups import lacking
from tests.cuda_sim import simulator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tools", nargs="+", choices=TOOLS, default=[*TOOLS], metavar="TOOL", help=", ".join(TOOLS)
    )
    names = [*FAULTS, *(name for name in CUDA_FAULTS if name not in FAULTS)]
    parser.add_argument("--faults", nargs="+", choices=names, default=names, metavar="FAULT", help=", ".join(names))
    parser.add_argument("--cuda", action="store_true", help="faults of GPU memory, on a simulated device")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in DIR")
    options = parser.parse_args()
    if lack := lacking():
        parser.error(lack)
    if options.cuda and not simulator.has_cuda():
        parser.error(f"{sys.executable} has no CUDA build of PyTorch; `make test-cuda` makes .cuda/bin/python")
    device, planted = ("cuda", CUDA_FAULTS) if options.cuda else ("cpu", FAULTS)
    faults = {name: planted[name] for name in planted if name == "healthy" or name in options.faults}
    with contextlib.ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sight-")))
        found: dict[str, dict[str, dict[str, object]]] = {}
        for fault in faults:
            for name in options.tools:
                print(f"{fault}, {name}", file=sys.stderr, flush=True)
                found.setdefault(fault, {})[name] = runs.said(TOOLS[name], fault, device, keep.resolve())
            found[fault][ALONE.name] = runs.said(ALONE, fault, device, keep.resolve())
        lines = page(found, faults, device, seconds=runs.TRAINING_SECONDS, patience=runs.PATIENCE_SECONDS)
        print("\n".join(lines))


if __name__ == "__main__":
    main()
