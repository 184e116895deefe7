"""Is the largest batch size that `tidegauge tune` reports the largest that fits? Six models on one device.

    .cuda/bin/python -m benchmarks.accuracy batch-sizes [--models NAME …] [--memory SIZE | --card RATIO]

The device is simulated, or a share of a real one.

The truth comes from a bisection with bare runs of three steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda_sim import simulator

_PROGRAM = Path(simulator.__file__).parent / "programs" / "models.py"
_MODELS = ("mlp", "cnn", "unet", "lstm", "encoder", "gpt")
_EXACT_RATIO = 0.01  # to which the truth is found
_HEAD = """| model | largest reported | is it final? | largest that runs bare | reported / truth | trials |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=_MODELS, choices=_MODELS)
    parser.add_argument("--memory", default="3G", help="of the simulated device")
    parser.add_argument("--card", type=float, metavar="RATIO", help="share of a real device instead")
    options = parser.parse_args()
    if options.card is not None:
        environ, share = dict(os.environ), ["--fraction", str(options.card)]
    elif simulator.has_cuda():
        environ = simulator.environment(simulator.build(Path(sys.prefix) / "cuda_sim"), memory=options.memory)
        share = []
    else:
        sys.exit("PyTorch's CUDA build is needed: run `make test-cuda` once, then .cuda/bin/python")
    with ThreadPoolExecutor(len(options.models) if options.card is not None else 1) as pool:
        lines = pool.map(lambda model: _row(model, share, environ), options.models)
        for line in itertools.chain([_HEAD], lines):
            print(line, flush=True)
    if options.card is None:
        simulator.remove_registry(environ["CUDA_SIM_NAME"])


def _row(model: str, share: list[str], environ: Mapping[str, str]) -> str:
    """Ask `tidegauge tune`, find the truth, and return the table's row."""
    command = [sys.executable, str(_PROGRAM), model, *share]
    tuned = [sys.executable, "-P", "-m", "collector", "tune", "--batch-size", "--trial-seconds", "4"]
    done = subprocess.run(
        [*tuned, "--format", "json", "--", *command], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{model}: tune failed:\n{done.stderr}")
    found = json.loads(done.stdout)
    told = found["largest"]["batch_size"]
    truth = _largest(command, told, environ)
    final = (
        "yes" if found["largest"]["is_complete"] else f"no: {found['trials'][-1]['failure'] or 'all trials ran'}"
    )
    return f"| {model} | {told} | {final} | {truth} | {told / truth:.2f} | {len(found['trials'])} |"


def _largest(command: list[str], first: int, environ: Mapping[str, str]) -> int:
    """Return the largest batch size that runs, by doubling and bisection."""
    fits, fails = (first, 2 * first) if _runs(command, first, environ) else (1, first)
    while fits == first and _runs(command, fails, environ):
        fits = first = fails
        fails *= 2
    while fails - fits > max(1, _EXACT_RATIO * fits):
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _runs(command, middle, environ) else (fits, middle)
    return fits


def _runs(command: list[str], batch_size: int, environ: Mapping[str, str]) -> bool:
    words = [*command, "--batch-size", str(batch_size), "--steps", "3"]
    return subprocess.run(words, env=environ, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
