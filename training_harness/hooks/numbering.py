"""Devices under the number that the run's command knows them by, whatever a rank lets itself see.

A rank that sets `CUDA_VISIBLE_DEVICES` to its own GPU calls that one 0; so does each other rank its own. The driver
is asked from outside, with the numbers of the command (CUDA C++ Programming Guide, "Environment Variables").
"""

from __future__ import annotations

import os

from training_harness.layout import ALL_DEVICES, RUN_DEVICES_VARIABLE

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def number_in_run(device: int) -> int:
    """Return the run's number of a device that this process numbers so; only true once CUDA is initialised."""
    return renumbered(device, os.environ.get(_VISIBLE), os.environ.get(RUN_DEVICES_VARIABLE))


def renumbered(device: int, own: str | None, of_run: str | None) -> int:
    """Return the run's number of a device; its own number where the two selections can't be compared.

    Args:
        device: as the process numbers it.
        own: the `CUDA_VISIBLE_DEVICES` of the process, None if it sees all.
        of_run: that of the run's command, `ALL_DEVICES` if it sees all; None if no command began the run.
    """
    if of_run is None or own == of_run:
        return device
    seen = [str(device)] if own is None else own.split(",")[device : device + 1]
    name = "".join(seen).strip()
    if of_run == ALL_DEVICES:
        return int(name) if name.isdigit() else device
    names = [each.strip() for each in of_run.split(",")]
    return names.index(name) if name in names else device
