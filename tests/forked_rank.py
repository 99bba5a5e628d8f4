"""Forked rank: makes a forked process a rank of the program. Called by the drivers that start it many times."""

import os
import sys
import warnings

import torch


def become_rank(rank: int, ranks: int, port: int, output: int) -> None:
    """One thread, what is printed into the descriptor `output`, and of several ranks the environment of torchrun."""
    torch.set_num_threads(1)  # a fork's first call makes a new thread pool: two threads at once can abort (2.11)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    warnings.filterwarnings("ignore")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if ranks > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
