"""Parts that the jobs share: argument parser, DataLoader options, ranks, generated data and errors."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class JobError(Exception):
    """Bad input to a job: the message is one line that names the value, the bound and the remedy."""


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter that omits defaults without information."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_no_default = action.default is None or action.default is False
        return action.help if has_no_default else super()._get_help_string(action)


class JobParser(argparse.ArgumentParser):
    """Argument parser with `--seed` that reports an error in one line and exits with 2."""

    def __init__(self, name: str, description: str) -> None:
        prog = f"tidegauge job {name}"
        super().__init__(prog=prog, description=description, formatter_class=_Defaults, allow_abbrev=False)
        self.add_argument("--seed", type=not_negative, default=0, metavar="N", help="seed of all random numbers")

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    """Parse a whole number of 0 or more."""
    return _at_least(text, 0)


def _at_least(text: str, bound: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < bound:
        raise argparse.ArgumentTypeError(f"{value} is below {bound}")
    return value


def cache_path() -> Path:
    """Return the folder of generated data: `$XDG_CACHE_HOME/tidegauge`, else `~/.cache/tidegauge`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tidegauge"


def ensure_data(name: str, make: Callable[[Path], object]) -> Path:
    """Return the path of `name` in the cache, after `make` has written the parts that are missing there.

    Raises:
        JobError: it cannot be written there.
    """
    path = cache_path() / name
    try:
        make(path)
    except OSError as error:
        raise JobError(f"cannot make {path}: {error.strerror}; set XDG_CACHE_HOME, or give --data") from None
    return path


def launch_ranks(ranks_count: int, arguments: Sequence[str]) -> NoReturn:
    """Become a torchrun that runs the job with these `arguments` in `ranks_count` ranks on this machine."""
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks_count}")
    words = (sys.executable, "-P", "-m", *torchrun, "-m", "--", "training_harness.jobs", *arguments)
    quiet = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun would warn that it chose 1
    os.execve(sys.executable, words, os.environ | {"PYTHONSAFEPATH": "1"} | quiet)


def add_loader_options(parser: argparse.ArgumentParser, *, num_workers: int | None) -> None:
    """Add the DataLoader's options under their own names."""
    group = parser.add_argument_group("DataLoader")
    workers = "worker processes" + ("" if num_workers is not None else " [default: depends on the kind]")
    group.add_argument("--num-workers", type=not_negative, default=num_workers, metavar="N", help=workers)
    group.add_argument("--prefetch-factor", type=positive, metavar="N", help="batches ahead per worker (torch: 2)")
    group.add_argument("--pin-memory", action="store_true", help="copy batches to page-locked memory")
    group.add_argument("--persistent-workers", action="store_true", help="keep the workers between epochs")
    group.add_argument("--start-method", choices=("fork", "forkserver", "spawn"), help="how workers are started")


def expect_many_workers() -> None:
    """Silence torch's warning about more workers than cores, in a job that shows just that."""
    warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)


def loader_arguments(options: argparse.Namespace, *, num_workers: int | None = None) -> dict[str, Any]:
    """Return the chosen DataLoader options as its keyword arguments; `num_workers` replaces `--num-workers`.

    Raises:
        JobError: an option that needs workers was given, and there are none.
    """
    workers = options.num_workers if num_workers is None else num_workers
    arguments: dict[str, Any] = {"num_workers": workers}
    if options.pin_memory:
        arguments["pin_memory"] = True
    candidates = {
        "prefetch_factor": options.prefetch_factor,
        "persistent_workers": options.persistent_workers,
        "multiprocessing_context": options.start_method,
    }
    extra = {name: value for name, value in candidates.items() if value}
    if extra and options.num_workers == 0:
        option = "start-method" if "multiprocessing_context" in extra else next(iter(extra)).replace("_", "-")
        raise JobError(f"--{option} has no effect with --num-workers 0; give 1 or more workers, or leave it out")
    return arguments | (extra if workers else {})
