"""Dashboard: presentation only."""

import contextlib
import ctypes

#: Of mallopt, in glibc's malloc.h: what an arena may keep at its end, which blocks are mapped, how many arenas.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 2**20

# Streamlit runs each script in a new thread, and for threads glibc has up to eight arenas per core. Each may hold
# twice the largest block that was ever freed, so each came to keep what the most demanding script needed. With
# thresholds that stay, what is free goes back, at no cost that could be measured.
with contextlib.suppress(AttributeError, OSError):  # of another C library
    _mallopt = ctypes.CDLL(None).mallopt
    _mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
    _mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    _mallopt(_M_ARENA_MAX, 2)  # or those that there are by now
