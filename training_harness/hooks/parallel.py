"""What `nn.DataParallel` does around the model in each forward pass, as stages of the batch that is in use.

On several GPUs it scatters the batch, replicates the module, runs the replicas in threads and gathers the outputs;
on one GPU, and on the CPU, it calls the module and none of this happens. The times are the host's: what it enqueues
on a device may run later. What the backward pass does to reduce the gradients is not among them.

The functions are replaced in the module that calls them, so `data_parallel()` and subclasses are seen too
(torch/nn/parallel/data_parallel.py).
"""

from __future__ import annotations

import functools
import os
import sys

from training_harness.hooks.patching import Hook
from training_harness.hooks.stage_calls import timed
from training_harness.layout import STAGES_VARIABLE

#: function -> its stage.
_STAGES = {
    "scatter_kwargs": "scatter",
    "replicate": "replicate",
    "parallel_apply": "parallel_apply",
    "gather": "gather",
}


def install() -> Hook | None:
    """Note the time of each part; None if stages are switched off.

    Raises:
        AttributeError: this torch has no such function.
        KeyError: it has no such module.
    """
    if os.environ.get(STAGES_VARIABLE) == "0":
        return None
    module = sys.modules["torch.nn.parallel.data_parallel"]
    hook = Hook("stage:parallel")
    for function, stage in _STAGES.items():
        hook.replace(module, function, functools.partial(timed, name=stage, hook=hook))
    return hook
