"""End of a step, and where its time goes, in a real process."""

from __future__ import annotations

import json

import pytest

from tests.conftest import TRAIN

SCRIPT = TRAIN.with_name("phases.py")
PHASES = ["data_wait_ns", "h2d_ns", "forward_ns", "backward_ns", "optimizer_ns", "other_ns"]
MS = 1e6


@pytest.fixture
def run_text(run_attached, tmp_path):
    """Run the text of a script as `run_attached` does, to its good end."""

    def start(text, *arguments):
        script = tmp_path / "train.py"
        script.write_text(text)
        run = run_attached(script, *arguments)
        assert run.done.returncode == 0, run.done.stderr
        return run

    return start


def test_step_ends_and_phases_match_the_loop(run_attached):
    run = run_attached(SCRIPT)
    assert run.done.returncode == 0, run.done.stderr
    step = run.table("step")
    child = step[step.pid != step.pid[0]]
    step = step[step.pid == step.pid[0]]
    assert child.step.tolist() == [0, 1, 2], "a forked child that trains counts its own steps"
    assert step.step.tolist() == [*range(6), *range(3 + 1 + 1)], "an optimizer takes over and counts its own"
    assert step.unit.tolist() == [1] * 6 + [2] * 4 + [3]
    batches, optimized, said = step[:6], step[6:9], step[10:]

    assert (batches.batches_count == 1).all(), "without an optimizer each batch is a step"
    assert batches[["forward_ns", "backward_ns", "optimizer_ns"]].isna().all(axis=None)
    assert (batches.data_wait_ns >= 4 * MS).all()
    waits = run.table("batch").wait_ns[1:6].tolist()  # before the first one requests are read, which is none either
    assert batches.data_wait_ns[1:].tolist() == waits, "readings before a fetch are no wait for data"

    assert (optimized.batches_count == 2).all(), "two micro-batches per optimizer step"
    assert (optimized.samples_count == 8).all()
    assert (said.batches_count == 3).all(), "step() alone ends steps from its first call on"
    for steps, micro_batches in ((optimized, 2), (said, 3)):
        assert (steps.data_wait_ns >= micro_batches * 4 * MS).all()
        assert (steps.forward_ns >= micro_batches * 8 * MS).all()
        assert (steps.backward_ns >= micro_batches * 12 * MS).all()
        assert (steps.other_ns >= 20 * MS).all()
        assert (steps.optimizer_ns >= 16 * MS).all()

    timed = step[step.duration_ns.notna()]
    assert len(timed) == len(step) - 1, "when the first step began is not known"
    assert (timed[PHASES].sum(axis=1) == timed.duration_ns).all()


ENDING = """
import time
import torch
from multiprocessing.util import Finalize
from torch.utils.data import DataLoader

def close_files_late(worker):
    Finalize(None, time.sleep, args=(0.25,), exitpriority=1)

weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
data = torch.ones(8, 4)
for _ in range(3):
    for batch in DataLoader(data, batch_size=4, num_workers=1, worker_init_fn=close_files_late):
        (batch * weight).sum().backward()
        optimizer.step()
"""
EPOCHS = """
import time
import torch
from torch.utils.data import Sampler
from {module} import {name}

class Buckets(Sampler):
    def __len__(self):
        return 8
    def __iter__(self):
        time.sleep(0.25)  # sorts the samples by length
        return iter(range(8))

weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
data = torch.ones(8, 4)
loader = {name}(data, batch_size=4, sampler=Buckets(), num_workers=1, persistent_workers={persistent})
for _ in range(4):
    for batch in loader:
        (batch * weight).sum().backward()
        optimizer.step()
"""


TORCH, TORCHDATA = ("torch.utils.data", "DataLoader"), ("torchdata.stateful_dataloader", "StatefulDataLoader")


@pytest.mark.parametrize(
    ("persistent", "loader"), [(True, TORCH), (False, TORCH), (True, TORCHDATA), (False, TORCHDATA)]
)
def test_start_of_an_epoch_is_a_wait_for_data(run_text, persistent, loader):
    module, name = loader
    pytest.importorskip(module)
    run = run_text(EPOCHS.format(persistent=persistent, module=module, name=name))
    step = run.table("step")
    assert (step.data_wait_ns[[2, 4, 6]] >= 250 * MS).all(), "the sampler draws while the iterator is made"
    assert (step[PHASES].sum(axis=1)[1:] == step.duration_ns[1:]).all()


def test_sampler_of_a_loader_is_the_one_that_draws(run_text):
    run = run_text(
        "import torch\n"
        "from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler\n"
        "class Buckets(BatchSampler):\n"
        "    def __len__(self): raise RuntimeError('not known before the epoch')\n"
        "data = torch.ones(8, 4)\n"
        "own = Buckets(RandomSampler(data), 2, False)\n"
        "part = DistributedSampler(data, num_replicas=2, rank=0)\n"
        "loaders = [DataLoader(data, batch_sampler=own), DataLoader(data, 2, shuffle=True), DataLoader(data)]\n"
        "loaders += [DataLoader(data, sampler=part)]\n"
        "for loader in loaders:\n    for batch in loader: pass\n"
    )
    loaders = [json.loads(body) for body in run.events("loader")["body"]]
    assert [(loader["sampler"], loader["shuffle"]) for loader in loaders] == [
        ("Buckets", None),
        ("RandomSampler", None),
        ("SequentialSampler", None),
        ("DistributedSampler", True),
    ]


def test_end_of_the_workers_of_an_epoch_is_a_wait_for_data(run_text):
    run = run_text(ENDING)
    ended = run.events("workers-ended")
    assert len(ended) == 3
    took_ns = ended.time_ns - [json.loads(body)["begun_ns"] for body in ended.body]
    step = run.table("step")
    assert (took_ns[:2] >= 200 * MS).all()
    assert (step.data_wait_ns[[2, 4]].to_numpy() >= took_ns[:2].to_numpy()).all()


THREADS = """
import queue, sys, threading, time
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4)

def ahead():
    batches = queue.Queue(2)

    def load():
        for batch in DataLoader(Slow(), batch_size=4):
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=load).start()
    return iter(batches.get, None)

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in DataLoader(Slow(), batch_size=4) if "own" in sys.argv else ahead():
            model(batch).sum().backward()
            optimizer.step()
        for batch in DataLoader(torch.ones(8, 4), batch_size=4):
            model(batch)

if "own" in sys.argv:
    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join()
else:
    train()
"""


def test_waits_for_a_thread_that_loads_ahead_are_time_outside_the_step(run_text):
    run = run_text(THREADS)
    step = run.table("step")
    assert len(step) == 20
    assert step.data_wait_ns.isna().all(), (
        "the thread's waits are not the training's, before a validation and after"
    )
    assert (step.forward_ns[3:] < 20 * MS).all()
    assert step.other_ns[3:].median() >= 30 * MS
    assert step.batches_count.sum() in (22, 24)
    ahead = {json.loads(body)["loader"] for body in run.events("loads-ahead").body}
    assert ahead == {0}, "the batches of loader 1, of the validations, are taken by the training itself"


def test_a_training_in_a_thread_of_its_own_waits_for_its_own_loader(run_text):
    run = run_text(THREADS, "own")
    step = run.table("step")
    assert len(step) == 20
    assert (step.data_wait_ns[1:] >= 40 * MS).all()


def test_forward_pass_that_raises_is_no_step(run_text):
    """A batch that does not fit is split, or skipped."""
    run = run_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if len(x) > 4: raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "        return super().forward(x)\n"
        "model = Model(8, 8)\n"
        "for step in range(40):\n"
        "    try: model(torch.zeros(8 if step % 4 == 3 else 4, 8))\n"
        "    except torch.OutOfMemoryError: pass\n"
    )
    step = run.table("step")
    assert (step.step.max() + 1, set(step.unit)) == (30, {0})
