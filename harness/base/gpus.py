"""GPUs: the table of their dense peaks, memory and links by the vendors' datasheets, and the names by which users and
drivers call them. Imports no torch, so that a wrong --plan-gpu is answered at once."""

from __future__ import annotations  # older interpreters read this far, to be told so

import csv
import json
import pathlib
import re
from typing import Any, NamedTuple, get_type_hints

from harness.base.errors import UserError
from harness.base.text import first_line
from harness.base.versions import ROOT

# The rates that describe a kind that is not in the table, with an example: about what programs reach on an L40S.
DESCRIBED = {
    "memory_gib": 44.4,
    "matmul_tflops": 217,
    "attention_tflops": 217,
    "memory_gb_per_s": 778,
    "intra_node_gb_per_s": 26,
    "inter_node_gb_per_s": 12,
}
RATES = (*DESCRIBED, "fp8_tflops", "peak_tflops", "host_us", "kernel_us")
ABOUT = ("device", "date", "torch")  # what --measure says beside its rates: text

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


def unlisted(gpu: str, given: dict[str, Any]) -> str:
    """What is wrong with a kind of GPU that is not in the table; empty where the rates in `given` describe it."""
    lacking = [name for name in DESCRIBED if name not in given]
    if not lacking:
        return ""
    if given:
        advice = f"the file has to give {', '.join(lacking)} too"
        return f"--plan-rates: {gpu!r} is not a kind that plans know, so {advice}"
    own = f"describe another by --plan-rates FILE, JSON with what programs reach on it, such as {json.dumps(DESCRIBED)}"
    return f"--plan-gpu {gpu!r}: not a kind that plans know. They know {', '.join(PLANNED)}; {own}"


def read_rates(path: pathlib.Path) -> dict[str, Any]:
    """The contents of a file of rates: of `RATES`, and of `ABOUT` where --measure wrote it.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or f"it is no JSON ({first_line(error)})"
        raise UserError(f"--plan-rates {path}: {why}") from error
    rates = contents.items() if isinstance(contents, dict) else ()
    if unknown := {name for name, _ in rates} - {*RATES, *ABOUT}:
        problem = f"no such rate: {', '.join(sorted(unknown))}; there are {', '.join(RATES)}"
        raise UserError(f"--plan-rates {path}: {problem}")
    numbers = [rate for name, rate in rates if name in RATES]
    if not rates or not all(type(rate) in (int, float) and 1e-6 < rate < 1e12 for rate in numbers):
        problem = f"needs a JSON object of positive numbers, such as {json.dumps(DESCRIBED)}"
        raise UserError(f"--plan-rates {path}: {problem}")
    return contents
