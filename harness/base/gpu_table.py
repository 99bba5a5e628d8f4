"""The table of GPUs: dense peaks, memory and links by the vendors' datasheets."""

import csv
import re
from collections import namedtuple

from harness.base.versions import ROOT

# By the vendors' datasheets, see CONTRIBUTING.md; the first whose name fits. A bare "H100" is none: its forms differ.
with (ROOT / "assets" / "gpus.csv").open() as file:
    header, *rows = csv.reader(file)
Gpu = namedtuple("Gpu", header)
GPUS = [Gpu(name, *map(float, figures), source) for name, *figures, source in rows]


def find_gpu(name: str) -> Gpu | None:
    """The kind of a GPU by its driver's name; None, never a guess, for an unlisted one, a laptop's, a slice of one."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ]$", name):
        return None
    for gpu in GPUS:
        if re.search(rf"\b{gpu.name}", name, re.IGNORECASE):
            return gpu
    return None


# What a process holds of the card beyond what its tensors need, in GiB; assumed, not measured.
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and cuDNN with their workspaces
NCCL_GIB = 0.5  # buffers of each communicator that spans more than one rank
