"""Dashboard: presentation only."""

import contextlib
import ctypes

#: Parameters of mallopt (glibc's malloc.h): free memory at an arena's end, size of mapped blocks, number of arenas.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 2**20

# Streamlit runs each script in a new thread, and glibc gives threads up to eight arenas per core. Each arena may
# hold twice the largest block that was ever freed, so in time each holds what the most demanding script needed.
# With fixed thresholds free memory goes back to the kernel, at no measurable cost.
with contextlib.suppress(AttributeError, OSError):  # another C library has no mallopt
    _mallopt = ctypes.CDLL(None).mallopt
    _mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
    _mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    _mallopt(_M_ARENA_MAX, 2)  # arenas that exist already stay
