"""Terms: the meaning of the words in the figures. Explanations on hover link here; the page needs no run."""

from __future__ import annotations

import streamlit as st

from app.format import plain
from app.terms import TERMS, anchor


def explain() -> None:
    """Show each term under its own heading, which has an anchor."""
    st.header("What do the words mean?", anchor=False)
    for term, meaning in TERMS.items():
        st.subheader(term, anchor=anchor(term))
        st.markdown(plain(f"{meaning[0].upper()}{meaning[1:]}."))
    st.caption("How to read each figure, and how each finding comes about: docs/views.md and docs/findings.md.")


if __name__ == "__main__":
    explain()
