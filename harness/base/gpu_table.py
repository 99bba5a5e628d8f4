"""The table of GPUs: dense peaks, memory and links by the vendors' datasheets."""

import csv
import re
from typing import Any, NamedTuple

from harness.base.versions import ROOT


class Gpu(NamedTuple):
    """A row of assets/gpus.csv; 0 is a figure that is not known."""

    name: str  # a pattern of the driver's device name
    plan_name: str  # what users of --plan-gpu call it; empty where nothing but the peak is known
    peak_tflops: float  # dense, bf16, fp32 accumulation
    memory_gib: float
    memory: float  # GB/s
    link: float  # GB/s in each direction, to the GPUs of its node
    network: float  # GB/s in each direction, its share of the node's network cards
    fp8: float  # float8's matmul rate over that of bf16; 0 without float8
    hopper: float  # 1 for a data-centre GPU of Hopper's generation or a later one
    matmul_share: float  # the most of the peak that a bf16 matmul reaches
    fp8_share: float  # the same of a float8 matmul, of its own peak
    source: str


def read_gpus() -> list[Gpu]:
    gpus = []
    with (ROOT / "assets" / "gpus.csv").open() as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = dict(row)
            for column, kind in Gpu.__annotations__.items():
                values[column] = kind(row[column])
            gpus.append(Gpu(**values))
    return gpus


# By the vendors' datasheets, see CONTRIBUTING.md; the first whose name fits. A bare "H100" is none: its forms differ.
GPUS = read_gpus()


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
