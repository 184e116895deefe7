"""What the words of the figures mean, for whoever meets them first. docs/views.md tells more of each."""

from __future__ import annotations

import re

#: Of the page of all, in the address.
PATH = "terms"
TERMS = {
    "allocated": "what live tensors hold, of what PyTorch's allocator has from the driver",
    "reserved": "what PyTorch's caching allocator holds from the driver: allocated, and cached for later",
    "cached": "what the allocator holds and no tensor uses: it is handed out again before the driver is asked",
    "fragmentation": "free pieces between live blocks, which cannot be given back and may be too small to use",
    "non-PyTorch": "what the run's processes hold on the device beside the allocator: context, NCCL, libraries",
    "PSS": "proportional set size: a page that n processes share counts 1/n in each, so it adds up over processes",
    "private dirty": "pages that belong to one process alone and were written: what it would free by ending",
    "RSS": "resident set size: all pages that a process has in memory; pages that are shared count in each process",
    "anonymous": "memory without a file behind it: the kernel cannot drop it, as it can drop page cache",
    "parked": "batches that have arrived before their turn and wait for an earlier one",
    "outstanding": "batches asked for and not yet there",
    "run queue": "ready to compute, and waiting for a core",
}


def anchor(term: str) -> str:
    """Where a term stands on the page of all."""
    return re.sub(r"\W+", "-", term.lower())


def explained(text: str) -> str | None:
    """Each term of a text with its meaning, for a tooltip in Markdown; None if there is none.

    The term is a link to the page of all, from any other page.
    """
    found = [
        f"[**{term}**]({PATH}#{anchor(term)}): {meaning}"
        for term, meaning in TERMS.items()
        if re.search(rf"\b{re.escape(term)}\b", text)
    ]
    return "\n\n".join(found) or None
