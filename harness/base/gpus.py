"""GPUs: dense peaks, memory and links from the vendors' datasheets, and the names that users and drivers have for them.
Imports no torch, so that a wrong --plan-gpu fails at once."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import csv
import re
from typing import Any, NamedTuple, get_type_hints

from harness.base.versions import ROOT

# GPU memory of a process beyond its tensors, in GiB; assumed, not measured
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and cuDNN with their workspaces
NCCL_GIB = 0.5  # buffers of each communicator that spans more than one rank


class Gpu(NamedTuple):
    """A row of assets/gpus.csv; 0 for unknown."""

    name: str  # pattern of the driver's device name
    plan_name: str  # for --plan-gpu; empty if only the peak is known
    peak_tflops: float  # dense, bf16, fp32 accumulation
    memory_gib: float
    memory: float  # GB/s
    link: float  # GB/s per direction, to GPUs of the same node
    network: float  # GB/s per direction, its share of the node's network cards
    fp8: float  # float8 matmul rate over bf16's; 0 without float8
    hopper: float  # 1 for data-centre GPUs from Hopper on
    matmul_share: float  # best bf16 matmul over the peak
    fp8_share: float  # best float8 matmul over its peak
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


# The first row that matches a name counts. A bare "H100" matches none, as its variants differ.
GPUS = read_gpus()
PLANNED = tuple(gpu.plan_name for gpu in GPUS if gpu.plan_name)  # for --plan-gpu


def find_gpu(name: str) -> Gpu | None:
    """The row for a driver's device name; None for unlisted GPUs, laptop variants and slices (MIG, and vGPUs such as
    A100-40C and A100-1-5CME), never a guess."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ][A-Z]*$", name):
        return None
    for gpu in GPUS:
        if re.search(rf"\b{gpu.name}", name, re.IGNORECASE):
            return gpu
    return None


def choose_kind(typed: str) -> tuple[str, list[str]]:
    """(kind for a name of --plan-gpu, other matching kinds); ("", []) for an unknown name. A name matches a kind whose
    first words it is, however joined: `h100-nvl`, `RTX4090`, `4090`; `A100` matches two. A driver's name is its own
    kind."""
    matching = [kind for kind in PLANNED if without_separators(typed) in short_names(kind)]
    if matching:
        return matching[0], matching[1:]
    gpu = find_gpu(typed)
    return (typed, []) if gpu and gpu.memory_gib else ("", [])


def without_separators(name: str) -> str:
    """A name in capitals without spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", name).upper()


def short_names(kind: str) -> set[str]:
    """`RTX`, `RTX4090` and `4090` for `RTX 4090`."""
    words = kind.split()
    names = {without_separators("".join(words[:count])) for count in range(1, len(words) + 1)}
    return names | {without_separators(kind.removeprefix("RTX "))}


def unlisted(gpu: str) -> str:
    """The error for an unknown --plan-gpu."""
    advice = f"give one of {', '.join(PLANNED)}, or add a row to assets/gpus.csv"
    return f"--plan-gpu {gpu!r}: unknown GPU; {advice}"
