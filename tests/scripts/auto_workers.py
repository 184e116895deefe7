"""A training whose DataLoader gets other settings from pass to pass, as from the collector; the case is its loader.

    python auto_workers.py CASE SETTING…

The settings, such as `2,2`, are those for the passes after the first. Without Tidegauge they are not used, so the
losses of both can be compared. Print them, and the number of workers of each pass on stderr.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import training_harness
from training_harness import session
from training_harness.layout import loader_settings_path


class Rows(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((8,), float(index)), float(index % 2)


class Noisy(Rows):
    """Rows with augmentation that the worker's own random numbers decide."""

    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row + torch.randn(8) + random.random(), label


class WithFile(Rows):
    def __init__(self):
        self.parts = [{"file": tempfile.TemporaryFile()}]  # noqa: SIM115


class Labels(list):
    """Labels that cannot be sent from a worker."""

    def __init__(self, labels):
        super().__init__(labels)
        self.source = lambda: None


def with_labels(samples):
    rows, labels = zip(*samples, strict=True)
    return torch.stack(rows), Labels(labels)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((8,), float(index)), 1.0) for index in range(60)])


class Eager:
    """A sampler that draws its order when it begins, not when it is asked for the first index."""

    def __len__(self):
        return 60

    def __iter__(self):
        return iter(torch.randperm(60).tolist())


class OneWorker(type(torch.multiprocessing.get_context("fork"))):
    """A context that cannot start the second of several workers."""

    def Process(self, *arguments, args, **options):  # noqa: N802
        worker = args[10]  # torch.utils.data.dataloader._MultiProcessingDataLoaderIter
        if worker == 1:
            raise OSError("Resource temporarily unavailable")
        return super().Process(*arguments, args=args, **options)


def make_loader(case):
    options = {"batch_size": 4, "shuffle": True}
    match case:
        case "inline" | "held" | "recreated":
            return DataLoader(Rows(), **options)
        case "seeded":
            return DataLoader(Rows(), generator=torch.Generator().manual_seed(3), **options)
        case "workers":
            return DataLoader(Rows(), num_workers=1, **options)
        case "persistent" | "persistent-held":
            return DataLoader(Rows(), num_workers=1, persistent_workers=True, **options)
        case "noisy":
            return DataLoader(Noisy(), num_workers=1, **options)
        case "failing":
            return DataLoader(Rows(), num_workers=1, multiprocessing_context=OneWorker(), **options)
        case "file":
            return DataLoader(WithFile(), **options)
        case "unordered":
            return DataLoader(Rows(), num_workers=1, in_order=False, **options)
        case "lambda":
            return DataLoader(Rows(), collate_fn=with_labels, **options)
        case "stream":
            return DataLoader(Stream(), batch_size=4)
        case "eager":
            return DataLoader(Rows(), batch_size=None, sampler=Eager())
    raise AssertionError(case)


def put_setting(loader_number, setting):
    """Write the file as the collector does, for each number that the loader has had so far."""
    workers, prefetch = map(int, setting.split(","))
    who = session.active.identity
    wanted = {
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        "is_undo": False,
        "measured": 1.0,
        "expected": None,
    }
    process = f"{who.host}.{who.pid}.{who.start_ticks}"
    settings = {process: {str(number): wanted for number in range(loader_number + 1)}}
    loader_settings_path(session.active.run_dir, who.host).write_text(json.dumps(settings))


def main():
    case, *settings = sys.argv[1:]
    torch.manual_seed(0)
    random.seed(0)
    loader, held = make_loader(case), None
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for number, setting in enumerate([None, *settings]):
        if setting is not None and session.active is not None:
            put_setting(number, setting)
        if case == "recreated":
            loader = make_loader(case)
        iterator = iter(loader)
        print(f"pass {number}: {loader.num_workers},{loader.prefetch_factor}", file=sys.stderr)
        print(f"recommended: {training_harness.recommended(loader)}", file=sys.stderr)
        for rows, labels in iterator:
            loss = (model(rows).squeeze(-1) - torch.as_tensor(labels).float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.17g}")
        held = iterator if case.endswith("held") else None
        del iterator
    print(f"held: {held is not None}", file=sys.stderr)


if __name__ == "__main__":
    main()
