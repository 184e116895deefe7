"""One run as tables: its processes, how they ended, and what held its memory.

Rules read tables with the helpers of `columns`.
"""
