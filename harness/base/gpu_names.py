"""Kinds of GPUs as users name them, and what is wrong with the flags of a plan: all that is known of them before torch
is loaded. Called by `settings` for its errors and by `gpus` for the rates. It does not know what a GPU reaches."""

import csv
import difflib
import json
import pathlib
import re

from harness.base.versions import ROOT

with (ROOT / "assets" / "gpus.csv").open() as file:
    ROWS = list(csv.DictReader(file))
# The kinds that plans know, as users name them: those rows of the table that say more than the peak. A name that fits
# several means the first of them.
PLANNED = ("GB200", "B200", "GH200", "H200", "H200 NVL", "H100 SXM", "H100 PCIe", "H100 NVL", "H20", "A100 80GB")
PLANNED += ("A100 40GB", "RTX A6000", "L40S", "RTX 5090", "RTX 4090", "RTX 3090")
FORMS = {"SXM": r"SXM\d?|HBM\d?E?", "PCIE": "PCIE", "NVL": "NVL"}
# What describes another, as an example: about what programs reach on an L40S.
DESCRIBED = {"memory_gib": 44.4, "matmul_tflops": 217, "attention_tflops": 217, "memory_gb_per_s": 778}
DESCRIBED |= {"intra_node_gb_per_s": 26, "inter_node_gb_per_s": 12}
RATES = (*DESCRIBED, "fp8_tflops", "peak_tflops", "host_us", "kernel_us")


def row_of(name: str) -> dict | None:
    """The table's row of a GPU, as `gpu_table.find_gpu` finds it."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ]$", name):
        return None
    return next((row for row in ROWS if re.search(rf"\b{row['name']}", name, re.IGNORECASE)), None)


def family_of(kind: str) -> str:
    """A kind without its form and memory: `H100` of `H100 PCIe`, `RTX 4090` of itself."""
    return re.sub(r" (SXM|PCIe|NVL|\d+GB)$", "", kind)


def choose_kind(typed: str) -> tuple[str, list[str]]:
    """(the kind that plans take a name for, the other kinds that it fits); ("", []) where plans know none.

    A driver's name stands for itself. Else the family's kinds are left that have the form and the memory in the name:
    `H100 80GB` is SXM or PCIe, `h100-nvl` one kind.
    """
    name = " ".join(re.split(r"[\s_-]+", typed.strip().upper()))
    known = row_of(typed)
    itself = (typed, []) if known and float(known["memory_gib"]) else ("", [])
    if name.startswith("NVIDIA "):
        return itself
    families = {family_of(kind).upper().replace(" ", " ?") for kind in PLANNED}
    found = re.fullmatch(rf"({'|'.join(families)})(?!\d) ?(.*)", name)
    if not found:
        return itself
    family = found[1].replace(" ", "")
    fitting = [kind for kind in PLANNED if family_of(kind).upper().replace(" ", "") == family]
    for word in found[2].split():
        memory = re.fullmatch(r"(\d+)(G|GB|GIB)?", word)
        form = next((form for form, pattern in FORMS.items() if re.fullmatch(pattern, word)), "")
        if memory:
            fitting = [kind for kind in fitting if has_memory(kind, int(memory[1]))]
        elif form:  # a kind that names no form is what the family's SXM is called
            fitting = [kind for kind in fitting if form in kind.upper()] or [
                kind for kind in fitting if not form_of(kind)
            ]
        else:
            return itself
    return (fitting[0], fitting[1:]) if fitting else ("", [])


def form_of(kind: str) -> str:
    return next((form for form in FORMS if form in kind.upper()), "")


def has_memory(kind: str, gigabytes: int) -> bool:
    """Whether a card of so many GB, as it is sold, is of this kind."""
    return abs(gigabytes / float(row_of(kind)["memory_gib"]) - 1) < 0.1


def unlisted(gpu: str, given: dict[str, float]) -> str:
    """What is wrong with a GPU of which nothing is assumed; empty where `given` describes it."""
    lacking = [name for name in DESCRIBED if name not in given]
    if not lacking:
        return ""
    if given:
        advice = f"the file has to give {', '.join(lacking)} too"
        return f"--plan-rates: {gpu!r} is not a kind that plans know, so {advice}"
    near = [kind for kind in PLANNED if gpu.lower() in kind.lower()]
    near = near or difflib.get_close_matches(gpu.upper(), PLANNED, 1, cutoff=0.7)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    own = f"describe another by --plan-rates FILE, JSON with what programs reach on it, such as {json.dumps(DESCRIBED)}"
    return f"--plan-gpu {gpu!r}: not a kind that plans know{meant} They know {', '.join(PLANNED)}; {own}"


def wrong_rates(given) -> str:
    """What is wrong with rates that a user gave; empty where nothing is."""
    numbers = given.values() if isinstance(given, dict) else [None]
    if not all(type(rate) in (int, float) and 1e-6 < rate < 1e12 for rate in numbers):
        return f"--plan-rates: needs a JSON object of positive numbers, such as {json.dumps(DESCRIBED)}"
    if unknown := set(given) - set(RATES):
        return f"--plan-rates: no such rate: {', '.join(sorted(unknown))}; there are {', '.join(RATES)}"
    return ""


def wrong_plan(s) -> str:
    """What is wrong with the settings of a plan, as far as the flags and the file of rates alone say; empty where
    nothing is."""
    given, measured = {}, False
    if s.plan_rates not in (None, "none"):
        try:
            contents = json.loads(pathlib.Path(s.plan_rates).expanduser().read_text())
        except (OSError, ValueError, RuntimeError) as error:  # also of a folder ~name, or of lists without end
            why = getattr(error, "strerror", None) or f"not JSON ({str(error).splitlines()[0]})"
            return f"--plan-rates {s.plan_rates}: {why}"
        measured = isinstance(contents, dict) and "sections" in contents
        given = contents.get("rates", contents) if isinstance(contents, dict) else contents
        if not measured and (problem := wrong_rates(given)):
            return problem
    gpu = s.plan_gpu or ""
    kind, _ = choose_kind(gpu)
    if gpu and gpu.lower() != "cpu" and not measured and not kind and (problem := unlisted(gpu, given)):
        return problem
    float8 = not kind or float(row_of(kind)["fp8"]) or s.fp8_emulate or measured or "fp8_tflops" in given
    if s.precision == "fp8" and not float8:
        return f"--precision fp8: needs a GPU with float8 (Ada, Hopper or newer), {kind} has none; use bf16"
    if s.plan:
        for world in s.plan_gpus or (s.gpus_per_node,):
            if s.zero_stage and world % s.dp_replicate_size:
                return f"--dp-replicate-size {s.dp_replicate_size}: does not divide --plan-gpus {world:,}"
    return ""
