"""The terms of the figures and their meanings. docs/views.md has more about each."""

from __future__ import annotations

import re

#: Path of the page of terms in the address.
PATH = "terms"
TERMS = {
    "allocated": "memory in use by live tensors",
    "reserved": "memory that PyTorch's allocator has from the driver: allocated memory and cache",
    "cached": "memory that the allocator holds for new tensors and that no tensor uses",
    "fragmentation": "free memory between live blocks: it cannot go back to the driver and may be too small to use",
    "non-PyTorch": "device memory of the run's processes outside the allocator: CUDA context, NCCL, libraries",
    "PSS": "proportional set size: a page that n processes share counts 1/n in each, so it adds up over processes",
    "private dirty": "written pages that only this process has: the memory that is freed when it ends",
    "RSS": "resident set size: all pages that a process has in memory; pages that are shared count in each process",
    "anonymous": "memory without a file behind it: the kernel cannot drop it, as it can drop page cache",
    "data wait": "time that training spends in the DataLoader's `__iter__` and `__next__`, waiting for its next "
    "batch",
    "fetch": "making one batch: `__getitem__` of its samples, then collate",
    "collate": "joining samples into one batch",
    "stage": "a part of a fetch, such as decoding",
    "transfer": "moving a batch from its worker to the training process",
    "prefetch factor": "number of batches that each worker makes ahead of training",
    "in order": "batches reach training in the order of the sampler, so a late one delays those after it",
    "outstanding": "batches requested from the workers and not yet received",
    "ready": "batches in the queue, which training can take at once",
    "parked": "batches that have arrived before their turn and wait for an earlier one",
    "later batch ready": "the part of a wait in which a later batch was finished, and parked until its turn",
    "straggler": "a sample, worker or rank that takes much longer than the others",
    "stall": "a wait for a batch that was not made in time",
    "exposed stall": "the wait, divided by what the awaited worker did meanwhile",
    "worker idle": "time a worker had no batch to make",
    "blocked": "time a thread waited for I/O, a lock or a sleep",
    "run queue": "time a thread was ready to run but had no CPU core",
}


def anchor(term: str) -> str:
    """Return a term's anchor on the page of terms."""
    return re.sub(r"\W+", "-", term.lower())


def explain_terms(text: str) -> str | None:
    """Return the terms in a text with their meanings, as Markdown for a tooltip; None if there are none.

    Each term links to the page of terms.
    """
    explanations = [
        f"[**{term}**]({PATH}#{anchor(term)}): {meaning}"
        for term, meaning in TERMS.items()
        if _has_term(text, term)
    ]
    return "\n\n".join(explanations) or None


def _has_term(text: str, term: str) -> bool:
    words = re.escape(term).replace(r"\ ", "[ _]")  # settings have `_` between their words
    return re.search(rf"\b{words}\b", text) is not None
