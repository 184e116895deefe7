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
    "parked": "batches that have arrived before their turn and wait for an earlier one",
    "outstanding": "batches requested from the workers and not yet received",
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
        if re.search(rf"\b{re.escape(term)}\b", text)
    ]
    return "\n\n".join(explanations) or None
