"""GPUs: the table of their dense peaks, memory and links by the vendors' datasheets, and the names by which users and
drivers call them. Imports no torch, so that a wrong --plan-gpu is answered at once."""

from __future__ import annotations  # older interpreters read this far, to be told so

import csv
import re
from typing import Any, NamedTuple, get_type_hints

from harness.base.versions import ROOT

# What a process holds of the card beyond what its tensors need, in GiB; assumed, not measured.
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and cuDNN with their workspaces
NCCL_GIB = 0.5  # buffers of each communicator that spans more than one rank


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
            for column, kind in get_type_hints(Gpu).items():
                values[column] = kind(row[column])
            gpus.append(Gpu(**values))
    return gpus


# By the vendors' datasheets, see CONTRIBUTING.md; the first whose name fits. A bare "H100" is none: its forms differ.
GPUS = read_gpus()
PLANNED = tuple(gpu.plan_name for gpu in GPUS if gpu.plan_name)  # the kinds that plans know; a name means the first


def find_gpu(name: str) -> Gpu | None:
    """The kind of a GPU by its driver's name; None, never a guess, for an unlisted one, a laptop's, a slice of one."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ]$", name):
        return None
    for gpu in GPUS:
        if re.search(rf"\b{gpu.name}", name, re.IGNORECASE):
            return gpu
    return None


def choose_kind(typed: str) -> tuple[str, list[str]]:
    """The kind that plans take a name for, and the other kinds that the name fits; ("", []) where plans know none. A
    name fits a kind whose first words it is, however they are joined: `h100-nvl`, `RTX4090`, `4090`, and `A100` two
    kinds. A driver's name stands for itself."""
    fitting = [kind for kind in PLANNED if joined(typed) in beginnings(kind)]
    if fitting:
        return fitting[0], fitting[1:]
    gpu = find_gpu(typed)
    return (typed, []) if gpu and gpu.memory_gib else ("", [])


def joined(name: str) -> str:
    """A name in capitals, without what stands between its words."""
    return re.sub(r"[\s_-]", "", name).upper()


def beginnings(kind: str) -> set[str]:
    """`RTX`, `RTX4090` and `4090` of `RTX 4090`."""
    words = kind.split()
    names = {joined("".join(words[:count])) for count in range(1, len(words) + 1)}
    return names | {joined(kind.removeprefix("RTX "))}


def unlisted(gpu: str) -> str:
    """That plans do not know a kind of GPU, as an error."""
    known = f"They know {', '.join(PLANNED)}; a row in assets/gpus.csv adds another"
    return f"--plan-gpu {gpu!r}: not a kind that plans know. {known}"
