"""A training that saves a checkpoint on SIGUSR1 and goes on from it when it is started again.

After that checkpoint it ends, and leaves a file CHECKPOINT.unfinished, by which train.sbatch knows that the job has
to go on. To try it out, --leak-mib 64 keeps 64 MiB more with each step.
"""

import argparse
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--leak-mib", type=int, default=0, help="memory that each step keeps")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pause in each step")
    options = parser.parse_args()

    asked = []
    process = os.getpid()
    # Slurm signals every process of a step. Workers inherit the handler, and must not save.
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True) if os.getpid() == process else None)

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    step = 0
    if os.path.exists(options.checkpoint):
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print("resumed at step", step, flush=True)

    unfinished = options.checkpoint + ".unfinished"
    kept = []
    rows = TensorDataset(torch.ones(4096, 8), torch.zeros(4096, 1))
    while step < options.steps:
        for inputs, targets in DataLoader(rows, batch_size=32, num_workers=1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(bytearray(os.urandom(1) * (options.leak_mib << 20)))
            time.sleep(options.step_seconds)
            step += 1
            if asked or step == options.steps:
                break
        if asked or step == options.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, options.checkpoint + ".new")
            os.replace(options.checkpoint + ".new", options.checkpoint)
            print("saved at step", step, flush=True)
        if asked and step < options.steps:
            open(unfinished, "w").close()
            return


if __name__ == "__main__":
    main()
