"""A file whose reads never return: its FUSE server stops itself at the first one, as a storage server that dies.

It speaks the kernel's own protocol (include/uapi/linux/fuse.h, version 7), so it needs root and /dev/fuse alone.
"""

import ctypes
import os
import signal
import struct
import sys
import tempfile

INIT, LOOKUP, GETATTR, OPEN, READ, FORGET = 26, 1, 3, 14, 15, 2
DETACH = 2
SIZE = 4096


def attributes(node):
    mode = 0o040755 if node == 1 else 0o100644
    return struct.pack("<6Q10I", node, SIZE, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SIZE, 0)


def serve(channel):
    answers = {
        INIT: lambda node: struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 0, 0, SIZE, 1, 0, 0, *[0] * 8),
        GETATTR: lambda node: struct.pack("<Q2I", 3600, 0, 0) + attributes(node),
        LOOKUP: lambda node: struct.pack("<4Q2I", 2, 0, 3600, 3600, 0, 0) + attributes(2),
        OPEN: lambda node: struct.pack("<Q2I", 1, 0, 0),
    }
    while True:
        _, opcode, unique, node = struct.unpack_from("<2I2Q", os.read(channel, 1 << 17))
        if opcode == READ:
            os.kill(os.getpid(), signal.SIGSTOP)
        if opcode != FORGET:
            answer = answers[opcode](node) if opcode in answers else b""
            error = 0 if opcode in answers else -38  # ENOSYS
            os.write(channel, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)


def open_stalled():
    """Return the descriptor of a file whose reads never return."""
    libc = ctypes.CDLL(None, use_errno=True)
    channel = os.open("/dev/fuse", os.O_RDWR)
    with tempfile.TemporaryDirectory() as folder:
        options = f"fd={channel},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"stalled", folder.encode(), b"fuse", 0, options) != 0:
            sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        if os.fork() == 0:
            serve(channel)
        os.close(channel)
        file = os.open(f"{folder}/samples", os.O_RDONLY)
        libc.umount2(folder.encode(), DETACH)  # The open file stays; nothing is left behind.
    return file


if __name__ == "__main__":
    os.read(open_stalled(), 1)
