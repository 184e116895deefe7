"""Generated JPEG files, 840 of them and made once, that cost as much to read, decode and augment as photographs.

Natural images have a 1/f amplitude spectrum, and the spectrum decides how large a JPEG gets and how
long it takes to decode. Such a spectrum has about equal contrast in each octave. So the texture of
each picture is a sum of noise octaves of nearly equal strength, over a ground of slow colours and
the shapes of its class, with sensor grain on top.

`python -P -m training_harness.jobs.photographs [COUNT]` makes them beforehand, so that no watched run does.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from cv2.typing import MatLike

from training_harness.jobs.common import ensure_data

CLASSES = ("boxes", "crosses", "discs", "dunes", "rings", "stripes", "triangles")
PER_CLASS = 120
WIDTH, HEIGHT = 1920, 1080

_QUALITY = 90
_OCTAVES_PIXELS = (512, 256, 128, 64, 32, 16, 8, 4)
_SHAPES_PER_PICTURE = (6, 14)


def ensure_photographs(folder: Path, count: int | None = None) -> Path:
    """Make the photographs that are missing in `folder`, one subfolder per class, and return it.

    With `count`, only the first `count` of them are needed, as many of each class.

    Each file appears whole or not at all, so an interrupted call can be repeated. When two processes
    call this at once, one makes the files and the other waits.

    Raises:
        OSError: the folder cannot be written.
    """
    if _missing(folder, count):
        for name in CLASSES:
            (folder / name).mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make_all(folder, _missing(folder, count))
    return folder


def compose(class_name: str, number: int) -> MatLike:
    """Compose picture `number` of a class: (1080, 1920, 3) uint8, BGR, always the same."""
    rng = np.random.default_rng([CLASSES.index(class_name), number])
    cv2.setRNGSeed(int(rng.integers(2**31)))
    picture = _lit_ground(rng)
    for _ in range(int(rng.integers(*_SHAPES_PER_PICTURE))):
        _draw_shape(picture, class_name, rng)
    light = cv2.add(_octaves(rng), _grain(rng.uniform(2.0, 4.6)))
    return cv2.add(picture, cv2.merge([light, light, light]), dtype=cv2.CV_8U)


def _missing(folder: Path, count: int | None) -> list[Path]:
    wanted = [folder / name / f"{number:03d}.jpg" for number in range(PER_CLASS) for name in CLASSES]
    return [path for path in wanted[:count] if not path.exists()]


def _make_all(folder: Path, missing: list[Path]) -> None:
    """Make the missing files on all cores. Spawned makers do not inherit the lock, so it ends with this process."""
    if not missing:
        return
    print(f"making {len(missing)} photographs of {WIDTH}x{HEIGHT} in {folder} (once)", flush=True)
    spawn = multiprocessing.get_context("spawn")
    makers_count = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(makers_count, mp_context=spawn, initializer=_prepare_maker) as pool:
        sizes_bytes = list(_with_progress(pool.map(_make, missing, chunksize=4), len(missing)))
    mean_bytes = sum(sizes_bytes) / len(sizes_bytes)
    print(f"made {len(missing)} photographs, {mean_bytes / 1000:.0f} kB on average", flush=True)


def _prepare_maker() -> None:
    """Set up a maker: one OpenCV thread, Ctrl-C left to the parent, and an exit when the parent ends."""
    cv2.setNumThreads(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, name="leave-with-parent", daemon=True).start()


def _make(path: Path) -> int:
    """Write one photograph atomically; return its size in bytes."""
    picture = compose(path.parent.name, int(path.stem))
    _, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    scratch = path.with_suffix(".part")
    scratch.write_bytes(data.tobytes())
    os.replace(scratch, path)
    return len(data)


def _with_progress(sizes_bytes: Iterable[int], total: int) -> Iterator[int]:
    """Yield the sizes, and print the progress: one line on a terminal, a line per tenth in a file."""
    on_terminal = sys.stdout.isatty()
    stride = 10 if on_terminal else max(1, total // 10)
    for done, size in enumerate(sizes_bytes, start=1):
        yield size
        if done % stride == 0 or done == total:
            last = "\n" if done == total or not on_terminal else ""
            lead = "\r" if on_terminal else ""
            print(f"{lead}  {done}/{total} photographs", end=last, flush=True)


def _lit_ground(rng: np.random.Generator) -> MatLike:
    """Draw a ground with slow changes of colour: random colours at a few points, smoothly joined."""
    points = rng.integers(60, 190, size=(3, 4, 3), dtype=np.uint8)
    return cv2.resize(points, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)


def _octaves(rng: np.random.Generator) -> MatLike:
    """Draw noise with a 1/f amplitude spectrum, (1080, 1920) int16; each octave is a smaller noise, enlarged."""
    field = np.zeros((HEIGHT // 2, WIDTH // 2), np.float32)
    roughness = rng.uniform(0.55, 0.8)
    for wavelength in _OCTAVES_PIXELS:
        shape = (HEIGHT // wavelength + 2, WIDTH // wavelength + 2)
        noise = rng.standard_normal(shape, dtype=np.float32)
        amplitude = 20.0 * (wavelength / 512) ** (1 - roughness)
        field += amplitude * cv2.resize(noise, (WIDTH // 2, HEIGHT // 2), interpolation=cv2.INTER_CUBIC)
    return cv2.resize(field, (WIDTH, HEIGHT), interpolation=cv2.INTER_LINEAR).astype(np.int16)


def _grain(deviation: float) -> MatLike:
    grain = np.empty((HEIGHT, WIDTH), np.int16)
    cv2.randn(grain, np.zeros(1), np.full(1, deviation))
    return grain


def _draw_shape(picture: MatLike, class_name: str, rng: np.random.Generator) -> None:
    """Draw one shape of the class, in place, smooth-edged."""
    x, y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
    size, angle = int(rng.integers(60, 320)), float(rng.uniform(0, 360))
    colour = tuple(int(value) for value in rng.integers(20, 236, size=3))
    if class_name == "discs":
        cv2.circle(picture, (x, y), size, colour, cv2.FILLED, cv2.LINE_AA)
    elif class_name == "rings":
        cv2.circle(picture, (x, y), size, colour, size // 4, cv2.LINE_AA)
    elif class_name == "dunes":
        cv2.ellipse(picture, (x, HEIGHT), (size * 3, size), 0, 180, 360, colour, cv2.FILLED, cv2.LINE_AA)
    elif class_name == "crosses":
        for turn in (0.0, 90.0):
            _fill(picture, cv2.boxPoints(((x, y), (size * 2, size // 2), angle + turn)), colour)
    elif class_name == "stripes":
        _fill(picture, cv2.boxPoints(((x, y), (WIDTH * 2, size // 3), 25.0)), colour)
    elif class_name == "boxes":
        _fill(picture, cv2.boxPoints(((x, y), (size * 2, size * 1.4), angle)), colour)
    else:
        corner_angles = np.deg2rad(angle + np.array([0, 120, 240]))
        _fill(
            picture, np.stack([x + size * np.cos(corner_angles), y + size * np.sin(corner_angles)], axis=1), colour
        )


def _fill(picture: MatLike, corners: MatLike, colour: tuple[int, ...]) -> None:
    cv2.fillConvexPoly(picture, np.rint(corners).astype(np.int32), colour, cv2.LINE_AA)


if __name__ == "__main__":
    ensure_data("photographs", partial(ensure_photographs, count=int(sys.argv[1]) if sys.argv[1:] else None))
