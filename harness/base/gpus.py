"""GPUs: the table of their dense peaks, memory and links by the vendors' datasheets, and the names by which users and
drivers call them. Imports no torch, so that a wrong --plan-gpu is answered at once."""

import csv
import difflib
import json
import re
from typing import Any, NamedTuple

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
FORMS = {"SXM": r"SXM\d?|HBM\d?E?", "PCIE": "PCIE", "NVL": "NVL"}  # words of a name that mean a form

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
            for column, kind in Gpu.__annotations__.items():
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


def family_of(kind: str) -> str:
    """A kind without its form and memory, in capitals without blanks: `H100` of `H100 PCIe`, `RTX4090` of itself."""
    return re.sub(r" (SXM|PCIe|NVL|\d+GB)$", "", kind).upper().replace(" ", "")


def choose_kind(typed: str) -> tuple[str, list[str]]:
    """The kind that plans take a name for, and the other kinds that the name fits; ("", []) where plans know none.

    A driver's name stands for itself. Any other name is a family, of which those kinds are left that have the form and
    the memory in the name: `H100 80GB` is SXM or PCIe, `h100-nvl` one kind.
    """
    gpu = find_gpu(typed)
    as_typed: tuple[str, list[str]] = (typed, []) if gpu and gpu.memory_gib else ("", [])
    name = " ".join(re.split(r"[\s_-]+", typed.strip().upper()))
    families = {re.sub(r"^RTX", "RTX ?", family_of(kind)) for kind in PLANNED}
    parts = re.fullmatch(rf"({'|'.join(families)})(?!\d) ?(.*)", name)
    if not parts:
        return as_typed
    fitting = [kind for kind in PLANNED if family_of(kind) == parts[1].replace(" ", "")]
    for word in parts[2].split():
        memory = re.fullmatch(r"(\d+)(G|GB|GIB)?", word)
        forms = [form for form, pattern in FORMS.items() if re.fullmatch(pattern, word)]
        if memory:  # as it is sold, near what the driver has
            fitting = [kind for kind in fitting if abs(int(memory[1]) / find_gpu(kind).memory_gib - 1) < 0.1]
        elif forms:
            without_form = [kind for kind in fitting if not any(form in kind.upper() for form in FORMS)]
            fitting = [kind for kind in fitting if forms[0] in kind.upper()] or without_form  # as an SXM is called
        else:
            return as_typed
    return (fitting[0], fitting[1:]) if fitting else ("", [])


def unlisted(gpu: str, given: dict[str, Any]) -> str:
    """What is wrong with a kind of GPU that is not in the table; empty where the rates in `given` describe it."""
    lacking = [name for name in DESCRIBED if name not in given]
    if not lacking:
        return ""
    if given:
        advice = f"the file has to give {', '.join(lacking)} too"
        return f"--plan-rates: {gpu!r} is not a kind that plans know, so {advice}"
    near = [kind for kind in PLANNED if gpu.lower() in kind.lower()]
    if not near:
        near = difflib.get_close_matches(gpu.upper(), PLANNED, 1, cutoff=0.7)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    own = f"describe another by --plan-rates FILE, JSON with what programs reach on it, such as {json.dumps(DESCRIBED)}"
    return f"--plan-gpu {gpu!r}: not a kind that plans know{meant} They know {', '.join(PLANNED)}; {own}"


def wrong_rates(contents) -> str:
    """What is wrong with the contents of a file of rates; empty where nothing is."""
    example = json.dumps(DESCRIBED)
    if not isinstance(contents, dict):
        return f"--plan-rates: needs a JSON object of positive numbers, such as {example}"
    if unknown := set(contents) - {*RATES, *ABOUT}:
        return f"--plan-rates: no such rate: {', '.join(sorted(unknown))}; there are {', '.join(RATES)}"
    numbers = [value for name, value in contents.items() if name in RATES]
    texts = [value for name, value in contents.items() if name in ABOUT]
    is_valid = all(type(rate) in (int, float) and 1e-6 < rate < 1e12 for rate in numbers)
    if not is_valid or not all(isinstance(text, str) for text in texts):
        return f"--plan-rates: needs a JSON object of positive numbers, such as {example}"
    return ""
