"""Loaders of all kinds in one process, one case after the other, as scripts use them.

Print what the training would have seen. With `--truth FILE` write, for each batch in the order in which
the loop got it, which worker made it and how many samples it holds: rows carry the id of their worker.

    python loaders.py [--truth FILE] [CASE…]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

FORK = {"multiprocessing_context": "fork"}
IN_ORDER = "in_order" in inspect.signature(DataLoader).parameters
if not IN_ORDER:
    # Before 2.3 each worker imports this in a thread at its first tensor, which takes long and may hang.
    with contextlib.suppress(ImportError):
        import torch.nested._internal.nested_tensor
SETUP_MS, ROW_MS, COLLATE_MS = 50, 3, 6

truth = []
case = ""


def maker():
    info = get_worker_info()
    return -1 if info is None else info.id


def row(index):
    return torch.tensor([index, maker()])


class Rows(Dataset):
    def __init__(self, length=16, slow=(), slow_ms=0, do=None):
        self.length, self.slow, self.slow_ms, self.do = length, slow, slow_ms, do

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.slow:
            time.sleep(self.slow_ms / 1e3)
        if self.do is not None:
            self.do(index)
        return row(index)


class Batched(Rows):
    def __getitems__(self, indices):
        return [row(index) for index in indices]


class Stream(IterableDataset):
    """Uneven shards: worker k yields 2k + 3 rows."""

    def __iter__(self):
        return (row(index) for index in range(2 * max(0, maker()) + 3))


class Uneven:
    """A batch sampler with batches of 1, 2, 3, 4 rows."""

    def __iter__(self):
        rest = itertools.count()
        return (tuple(itertools.islice(rest, size)) for size in (1, 2, 3, 4))

    def __len__(self):
        return 4


class Around(IterableDataset):
    """A dataset that passes on what another loader yields."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def see(batch):
    """Note that the loop got a batch."""
    batch = torch.as_tensor(batch).reshape(-1, 2)
    truth.append({"case": case, "worker": int(batch[0, 1]), "samples": len(batch)})
    print(case, batch[:, 0].tolist())
    return batch


def run(loader):
    for batch in loader:
        see(batch)


def slow_collate(rows):
    until = time.monotonic() + COLLATE_MS / 1e3
    while time.monotonic() < until:
        pass
    return torch.stack(rows)


def set_up(worker):
    time.sleep(SETUP_MS / 1e3)


def crash(index):
    if index == 5:
        raise ValueError("a bad row")


def kill(index):
    if index == 9:
        time.sleep(0.1)  # the thread that sends the batches before is idle, and holds no lock of the queue's
        os.kill(os.getpid(), signal.SIGKILL)


def leave(index, status=3):
    if index == 9:
        time.sleep(0.1)
        os._exit(status)


leave_as_done = functools.partial(leave, status=0)


def as_lists(rows):
    """Tensors would be fetched from the worker that is dying, and fail in more ways than one."""
    return [row.tolist() for row in rows]


# --------------------------------------------------------------------------------------------- cases


def map_style():
    run(DataLoader(Rows(10), batch_size=4, num_workers=2, **FORK))
    run(DataLoader(Rows(), batch_sampler=Uneven(), num_workers=2, **FORK))
    run(DataLoader(Batched(), batch_size=4, num_workers=2, prefetch_factor=3, **FORK))
    run(DataLoader(Rows(6), batch_size=None, num_workers=2, **FORK))
    run(DataLoader(Rows(3), batch_size=None))


def iterable_style():
    run(DataLoader(Stream(), batch_size=2, num_workers=3, **FORK))
    run(DataLoader(Stream(), batch_size=None, num_workers=2, **FORK))
    again = DataLoader(Stream(), batch_size=2, num_workers=2, persistent_workers=True, **FORK)
    run(again)
    run(again)
    run(DataLoader(Stream(), batch_size=2))


def out_of_order():
    if IN_ORDER:
        late = DataLoader(Rows(slow=[0], slow_ms=200), batch_size=2, num_workers=2, in_order=False, **FORK)
        truth.extend({"case": case, "worker": int(batch[0, 1]), "samples": len(batch)} for batch in late)


def parked():
    """The first row is late, so that what follows arrives before its turn."""
    run(DataLoader(Rows(slow=[0], slow_ms=400), batch_size=2, num_workers=2, **FORK))


def ready():
    """The loop is late, so that batches wait in the queue."""
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1, prefetch_factor=3, **FORK):
        see(batch)
        time.sleep(0.1)


def split():
    """Known sleep in the dataset, known work in collate, known set-up."""
    run(
        DataLoader(
            Rows(slow=range(16), slow_ms=ROW_MS),
            batch_size=4,
            num_workers=2,
            collate_fn=slow_collate,
            worker_init_fn=set_up,
            timeout=60,
            **FORK,
        )
    )


def left_early():
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=True, **FORK)
    for _ in range(3):
        for number, batch in enumerate(loader):
            see(batch)
            if number == 2:
                break
    for batch in DataLoader(Rows(), batch_size=2, num_workers=2, **FORK):
        see(batch)
        break


def cycled():
    for batch in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=4, num_workers=1, **FORK)), 10):
        print(case, len(batch))
    truth.extend({"case": case, "worker": 0, "samples": 4} for _ in range(4))


def several():
    loader = DataLoader(Rows(8), batch_size=2, num_workers=1, **FORK)
    inner = DataLoader(Stream(), batch_size=3, num_workers=2, **FORK)
    for left, right in zip(loader, DataLoader(Rows(8), batch_size=2), strict=True):
        # The loop gets both at once; each loader's records are in the order of its batches.
        see(left)
        see(right)
    for batch in DataLoader(Rows(4), batch_size=2, num_workers=1, **FORK):
        see(batch)
        run(inner)


def inside():
    """A loader inside the dataset of another one that loads inline."""
    run(DataLoader(Around(DataLoader(Rows(6), batch_size=2)), batch_size=None))
    outer = DataLoader(Around(DataLoader(Rows(6), batch_size=2, num_workers=1, **FORK)), batch_size=None)
    for batch in outer:
        see(batch)  # the inner loader's record
        truth.append({"case": case, "worker": -1, "samples": len(batch)})


def thrown_away():
    """Make one more loader in each epoch, as Lightning, Accelerate and most evaluation code do."""

    def evaluate():
        run(DataLoader(TensorDataset(torch.arange(4)), batch_size=2, collate_fn=stack, num_workers=1, **FORK))

    for _ in range(4):
        evaluate()
    kept = [DataLoader(Rows(4), batch_size=4) for _ in range(3)]
    for loader in kept:
        run(loader)


def by_hand():
    """Make an iterator of a new loader in each epoch, while the one before lives; then two that take turns."""
    for is_counted in (False, True, False):
        it = iter(DataLoader(Rows(6), batch_size=2))
        for batch in itertools.islice(it, 3 if is_counted else None):
            see(batch)
    turns = [iter(DataLoader(Rows(4), batch_size=1)) for _ in range(2)]
    for batches in zip(*turns, strict=True):
        for batch in batches:
            see(batch)


def stack(rows):
    return torch.stack([row(int(value)) for (value,) in rows])


def contexts():
    for context in (multiprocessing.get_context("fork"), torch.multiprocessing.get_context("fork")):
        run(DataLoader(Rows(4), batch_size=2, num_workers=1, multiprocessing_context=context))


def in_a_thread():
    thread = threading.Thread(target=run, args=(DataLoader(Rows(4), batch_size=2, num_workers=1, **FORK),))
    thread.start()
    thread.join()


def failing():
    for do in (crash, leave, leave_as_done, kill):
        loader = DataLoader(Rows(do=do), batch_size=1, num_workers=2, collate_fn=as_lists, **FORK)
        try:
            truth.extend({"case": case, "worker": batch[0][1], "samples": 1} for batch in loader)
        except (ValueError, RuntimeError) as error:
            print(case, type(error).__name__)
    try:
        run(DataLoader(Rows(slow=[0], slow_ms=700), batch_size=1, num_workers=1, timeout=0.3, **FORK))
    except RuntimeError as error:
        print(case, error)


def stateful():
    if importlib.util.find_spec("torchdata") is None:
        return
    from torchdata.stateful_dataloader import StatefulDataLoader

    for data, options in (
        (Rows(), {"num_workers": 2, **FORK}),
        (Rows(), {"num_workers": 2, "persistent_workers": True, **FORK}),
        (Stream(), {"num_workers": 2, **FORK}),
        (Rows(), {}),
    ):
        loader = StatefulDataLoader(data, batch_size=2, **options)
        batches = iter(loader)
        for _ in range(3):
            see(next(batches))
        state = loader.state_dict()
        rest = [see(batch).tolist() for batch in batches]
        run(loader)
        resumed = StatefulDataLoader(data, batch_size=2, **options)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        if isinstance(data, Stream):  # it keeps no state: torchdata fetches the first batches once more
            truth.extend({**seen, "case": case} for seen in truth[-first_of(rest) :][:3])
        assert [see(batch).tolist() for batch in batches] == rest


class OwnIterator(_BaseDataLoaderIter):
    """An iterator without torch's `_task_info`."""

    def _next_data(self):
        return torch.stack([self._dataset[index] for index in self._next_index()])


class OwnLoader(DataLoader):
    def _get_iterator(self):
        return OwnIterator(self)


def foreign():
    run(OwnLoader(Rows(4), batch_size=2, num_workers=2, **FORK))
    for seen in truth[-2:]:
        seen["worker"] = None


def first_of(rest):
    return len(rest) + 3


CASES = (map_style, iterable_style, out_of_order, parked, ready, split, left_early, cycled, several, inside,
         thrown_away, by_hand, contexts, in_a_thread, failing, stateful, foreign)  # fmt: skip


def main():
    global case
    parser = argparse.ArgumentParser()
    parser.add_argument("--truth")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    torch.manual_seed(0)
    for function in CASES:
        if function.__name__ in options.cases or not options.cases:
            case = function.__name__
            function()
    if options.truth:
        with open(options.truth, "w") as file:
            json.dump(truth, file)


if __name__ == "__main__":
    main()
