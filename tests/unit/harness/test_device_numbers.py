"""Devices keep the number that the run's command knows them by."""

import pytest

from training_harness.hooks.training.devices import renumber
from training_harness.layout import ALL_DEVICES


@pytest.mark.parametrize(
    ("device", "own", "of_run", "number"),
    [
        (1, None, ALL_DEVICES, 1),
        (0, "1", ALL_DEVICES, 1),  # a rank that lets itself see its own GPU only
        (1, "3,2", ALL_DEVICES, 2),
        (0, "3", "2,3", 1),
        (1, "2,3", "2,3", 1),
        (3, None, "2,3", 1),  # a rank that undoes the selection
        (0, "GPU-b", "GPU-a,GPU-b", 1),
        (0, "GPU-b", ALL_DEVICES, 0),  # only the driver could resolve this one
        (0, "5", "2,3", 0),
        (0, "1", None, 0),  # no command began the run
    ],
)
def test_device_has_the_number_that_the_command_uses(device, own, of_run, number):
    assert renumber(device, own, of_run) == number
