"""The `images` job: a small CNN on large photographs, where decoding and augmenting is the work."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from cv2.typing import MatLike
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset

from training_harness import stage
from training_harness.jobs.common import (
    JobError,
    JobParser,
    add_loader_options,
    ensure_data,
    loader_arguments,
    positive,
)
from training_harness.jobs.photographs import ensure_photographs

SIDE = 224
_SHORT_SIDES = (256, 448)
_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Photographs from one folder per class, read and augmented on access.

    Items are a (3, 224, 224) float32 tensor and the number of the class.

    Raises:
        JobError: the folder does not exist or holds no images; on access: a file is no image.
    """

    def __init__(self, folder: Path, *, limit: int | None = None, seed: int = 0) -> None:
        if not folder.is_dir():
            raise JobError(f"no folder {folder}; --data takes a folder with one subfolder per class")
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        items = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _SUFFIXES
        ]
        if not items:
            raise JobError(f"no images in {folder}; it needs one subfolder per class, like {folder}/cat/1.jpg")
        self.items = random.Random(seed).sample(items, min(limit or len(items), len(items)))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[index]
        data = np.fromfile(path, np.uint8)
        picture = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
        if picture is None:
            raise JobError(f"{path} is not an image that OpenCV can read; remove or replace it")
        draws = torch.rand(6).tolist()  # torch's generator: DataLoader seeds it per worker and epoch
        return torch.from_numpy(augment(picture, draws)), label


def augment(picture: MatLike, draws: Sequence[float]) -> NDArray[np.float32]:
    """Random resize, crop, flip and HSV shift, then normalise.

    Args:
        picture: (height, width, 3) uint8, BGR.
        draws: six numbers in [0, 1) that decide the size, crop row and column, flip, hue and brightness.

    Returns:
        (3, 224, 224) float32, RGB, about zero mean and unit deviation.
    """
    size, row, column, flip, hue, brightness = draws
    height, width = picture.shape[:2]
    scale = (_SHORT_SIDES[0] + size * (_SHORT_SIDES[1] - _SHORT_SIDES[0])) / min(height, width)
    resized = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    top = int(row * (resized.shape[0] - SIDE))
    left = int(column * (resized.shape[1] - SIDE))
    with stage("crop"):
        crop = resized[top : top + SIDE, left : left + SIDE]
        crop = np.ascontiguousarray(crop[:, ::-1] if flip < 0.5 else crop)
    with stage("augment"):
        hsv = cv2.cvtColor(crop, cv2.COLOR_BGR2HSV)
        hsv[..., 0] = (hsv[..., 0].astype(np.int16) + int(18 * (hue - 0.5))) % 180
        hsv[..., 2] = np.clip(hsv[..., 2] * (0.8 + 0.4 * brightness), 0, 255).astype(np.uint8)
        rgb = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    with stage("normalise"):
        scaled = (rgb.astype(np.float32) / 255 - _MEAN) / _DEVIATION
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def small_cnn(classes_count: int) -> nn.Module:
    """Make a network of three strided convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in ((3, 16, 7, 4), (16, 32, 3, 2), (32, 64, 3, 2)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes_count))


def prepare_worker(_worker: int) -> None:
    """Limit OpenCV to one thread per worker; it would otherwise start one per core in each."""
    cv2.setNumThreads(0)


def train(options: argparse.Namespace, photographs: Photographs) -> None:
    """Train, printing loss and speed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(small_cnn(len(photographs.classes)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    loader = DataLoader(
        photographs,
        batch_size=options.batch_size,
        shuffle=True,
        worker_init_fn=prepare_worker,
        **loader_arguments(options),
    )
    step, samples_count, start = 0, 0, time.monotonic()
    for epoch in range(options.epochs):
        for pictures, labels in loader:
            loss = loss_of(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, samples_count = step + 1, samples_count + len(labels)
            if step % options.log_every == 0:
                speed = samples_count / (time.monotonic() - start)
                print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}  {speed:.0f} img/s", flush=True)
                samples_count, start = 0, time.monotonic()
    print(f"done: {step} steps", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run the job."""
    parser = JobParser("images", "A small CNN on 1920x1080 photographs, read with OpenCV.")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with one subfolder per class [default: generated photographs]",
    )
    parser.add_argument("--epochs", type=positive, default=4, metavar="N", help="passes over the data")
    parser.add_argument("--limit", type=positive, metavar="N", help="use only N photographs, drawn at random")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="photographs per step")
    parser.add_argument("--log-every", type=positive, default=4, metavar="N", help="steps between two lines")
    add_loader_options(parser, num_workers=2)
    options = parser.parse_args(arguments)
    cv2.setNumThreads(0)
    torch.manual_seed(options.seed)
    folder = options.data or ensure_data("photographs", partial(ensure_photographs, count=options.limit))
    photographs = Photographs(folder, limit=options.limit, seed=options.seed)
    print(f"{len(photographs)} photographs in {len(photographs.classes)} classes from {folder}", flush=True)
    train(options, photographs)
