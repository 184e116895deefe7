"""`python -P -m training_harness.jobs NAME [options]`: run one of the built-in jobs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from training_harness.jobs.common import JobError

#: job -> (module with its `main(arguments)`, imported only when the job runs; meaning). It raises `JobError` where
#: an option does not fit, or data or a device is missing.
JOBS = {
    "images": ("training_harness.jobs.images", "a CNN on JPEG photographs: decoding and augmenting"),
    "diabetes": ("training_harness.jobs.diabetes", "a tiny network on a tiny table: when workers cost more"),
    "accumulate": (
        "training_harness.jobs.accumulate",
        "a small transformer: what each micro-batch needs in memory",
    ),
    "dataparallel": ("training_harness.jobs.dataparallel", "a small transformer under nn.DataParallel on all GPUs"),
    "ddp": ("training_harness.jobs.ddp", "a small transformer in several ranks, started by torchrun"),
    "fault": ("training_harness.jobs.faults.command", "a small job with one known fault, or its healthy twin"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the job that the first argument names; return 2 and print one line on bad input."""
    usage = "\n".join(f"  {name:13} {meaning}" for name, (_, meaning) in JOBS.items())
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: tidegauge job NAME [options]\n\n{usage}\n\ntidegauge job NAME --help lists the options.")
        return 0
    if not arguments or arguments[0] not in JOBS:
        named = repr(arguments[0]) if arguments else "none"
        print(f"tidegauge job: unknown job {named}; choose one of {', '.join(JOBS)}", file=sys.stderr)
        return 2
    try:
        importlib.import_module(JOBS[arguments[0]][0]).main(list(arguments[1:]))
    except JobError as error:
        # An error from a worker begins with the worker's traceback: the last line is the message.
        message = str(error).strip().splitlines()[-1].rpartition("JobError: ")[2]
        print(f"tidegauge job {arguments[0]}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
