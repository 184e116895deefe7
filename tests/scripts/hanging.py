"""A training that stops for ever: argv[1] is the way in which worker 0 of 2, or the training process, hangs.

With `main_` in front, it is the training process. The function that hangs is `hang_<way>`.
"""

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import torch
from stalled_files import open_stalled
from torch.utils.data import DataLoader, Dataset, get_worker_info

WAY = sys.argv[1]
FORKED = threading.Lock()
SERVER_URL = ""
STALLED_FILE = -1
LOCK_FILE = os.path.join(tempfile.gettempdir(), f"hanging-{os.getpid()}")


def hang_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_forked():
    FORKED.acquire()  # A thread of the parent held it at the fork; here it has no owner that could release it.


def hang_openmp():
    torch.set_num_threads(4)
    torch.ones(2000, 2000).sum()


def hang_semaphore():
    multiprocessing.Semaphore(0).acquire()


def hang_flock():
    with open(LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def hang_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_pipe():
    os.read(os.pipe()[0], 1)


def hang_full_pipe():
    _, end = os.pipe()
    while True:
        os.write(end, b"x" * 65536)


def hang_network():
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).recv(1)


def hang_download():
    """Receive a byte each second, as of a slow file, until the server stops in the middle."""
    server = socket.create_server(("127.0.0.1", 0))

    def send():
        connection, _ = server.accept()
        for _ in range(40):
            time.sleep(1)
            connection.send(b"x")
        time.sleep(100_000)

    threading.Thread(target=send, daemon=True).start()
    with socket.create_connection(server.getsockname()) as connection:
        while connection.recv(1 << 16):
            pass


def hang_server():
    with urllib.request.urlopen(SERVER_URL) as answer:
        answer.read()


def hang_fuse():
    os.read(STALLED_FILE, 1)


def hang_child():
    subprocess.run(["cat"], stdin=os.pipe()[0], check=True)


def hang_pool():
    pool = multiprocessing.Pool(2)
    pool.map(time.sleep, [3, 3], chunksize=1)
    pool.apply(os._exit, (1,))  # the pool replaces the process, and the task is lost


def hang_busy():
    while True:
        sum(range(1000))


def hang_sleep():
    time.sleep(100_000)


def hang():
    globals()[f"hang_{WAY.removeprefix('main_')}"]()


class Numbers(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.01)
        if index == 80 and not WAY.startswith("main_") and WAY != "feeder" and get_worker_info().id == 0:
            hang()
        return torch.full((4,), float(index))


class Unsendable:
    """A batch that the worker's feeder thread never finishes to pickle."""

    def __reduce__(self):
        hang_lock()


def collate(samples):
    if WAY == "feeder" and get_worker_info().id == 0 and samples[0][0] >= 80:
        return Unsendable()
    return torch.stack(samples)


def hold(seconds):
    with FORKED:
        time.sleep(seconds)


def stopped_server():
    """Start a web server, stop it, and return its address: the kernel still takes connections for it."""
    program = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); "
        "print(s.server_port); s.serve_forever()"
    )
    server = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    server.send_signal(signal.SIGSTOP)
    return f"http://127.0.0.1:{port}/"


def main():
    global SERVER_URL, STALLED_FILE
    if WAY == "server":
        SERVER_URL = stopped_server()
    if WAY == "fuse":
        STALLED_FILE = open_stalled()
    if WAY == "flock":
        program = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); time.sleep(600)"
        subprocess.Popen([sys.executable, "-u", "-c", program, LOCK_FILE], stdout=subprocess.PIPE).stdout.readline()
    if WAY == "forked":
        threading.Thread(target=hold, args=(30.0,), daemon=True).start()
        time.sleep(0.1)
    torch.ones(2000, 2000).sum()  # starts the threads of OpenMP
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=8, num_workers=2, collate_fn=collate)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if step == 10 and WAY.startswith("main_"):
            hang()


if __name__ == "__main__":
    main()
