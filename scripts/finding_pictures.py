"""Takes the pictures of docs/findings/ in a real Chromium: the evidence of each kind of finding, of recorded runs.

python -m scripts.finding_pictures [KIND ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
import cv2
import numpy as np
from playwright.sync_api import FloatRect

from scripts.screenshots import ROOT, Picture, chromium, dashboard, opened
from tests.recorded_runs import unpack
from tidegauge.kinds import KINDS

PICTURES = ROOT / "docs" / "findings"
#: Kinds of finding with a recorded run of the same name.
_NAMED_ALIKE = (
    "workers-too-slow",
    "slow-worker",
    "straggler-samples",
    "inline-loading",
    "collate-bound",
    "sampler-bound",
    "copy-bound",
    "worker-startup",
    "epoch-refill",
    "shard-skew",
    "main-thread-pause",
    "rank-straggler",
    "fd-leak",
    "shm-leak",
    "gpu-fragmentation",
    "worker-killed",
    "killed",
    "cuda-oom",
)
#: Kind of finding -> the recorded run in which it is the first finding of its page.
RUNS = dict(zip(_NAMED_ALIKE, _NAMED_ALIKE, strict=True)) | {
    "copy-on-read-growth": "copy-on-read",
    "main-heap-leak": "loss-list",
    "worker-heap-leak": "worker-cache",
    "gpu-tensor-leak": "tensor-leak",
    "gpu-non-pytorch-growth": "gpu-driver-leak",
    "pinned-cache-growth": "pinned-cache",
    "gpu-oom-risk": "tensor-leak",
    "host-oom-kill": "oom-worker",
    "crashed": "crash",
}
#: Width and height of the window in pixels: all of the evidence is in sight.
SIZE = (1100, 2000)
#: Largest height of a picture: a long traceback is cut.
MOST_PIXELS = 1040
#: JavaScript: top and bottom in pixels of what answers the view's question, from the sentence to the first chart.
ANSWER_EDGES = """() => {
    const edge = which => document.querySelector(which).getBoundingClientRect();
    const chart = document.querySelector('[data-testid=stPlotlyChart]').closest('[data-testid=stVerticalBlock]');
    return [edge('[data-testid=stCaptionContainer]').bottom, chart.getBoundingClientRect().bottom];
}"""


def photograph(kinds: list[str], home: Path) -> None:
    """Photograph the answers of the pages that show these kinds, as WebP: a third of the size of a PNG."""
    for run in {RUNS[kind] for kind in kinds}:
        unpack(run, home)
    with dashboard(home) as base, chromium() as browser:
        for kind in kinds:
            picture = Picture(view=KINDS[kind].pages[0], size=SIZE, query={"run": RUNS[kind]}, whole=False)
            with opened(browser, base, picture) as page:
                top, bottom = page.evaluate(ANSWER_EDGES)
                height = min(bottom - top + 44, MOST_PIXELS)
                shot = page.screenshot(clip=FloatRect(x=30, y=top + 2, width=SIZE[0] - 60, height=height))
            pixels = cv2.imdecode(np.frombuffer(shot, np.uint8), cv2.IMREAD_COLOR)
            cv2.imwrite(str(PICTURES / f"{kind}.webp"), pixels, [cv2.IMWRITE_WEBP_QUALITY, 60])
            click.echo(f"wrote {kind}.webp")


if __name__ == "__main__":
    chosen = sys.argv[1:] or [*RUNS]
    if unknown := set(chosen) - RUNS.keys():
        sys.exit(f"no recorded run of {', '.join(sorted(unknown))}: add it to RUNS in scripts/finding_pictures.py")
    with tempfile.TemporaryDirectory() as scratch:
        photograph(chosen, Path(scratch))
