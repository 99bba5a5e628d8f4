"""Kinds of GPUs as users name them, and what is wrong with the flags of a plan, before torch is loaded. Called by
`flags.parser` for its errors and by `plan.gpus` for the rates. Independent of how fast a GPU is."""

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
PLANNED = tuple(row["plan_name"] for row in ROWS if row["plan_name"])
FORMS = {"SXM": r"SXM\d?|HBM\d?E?", "PCIE": "PCIE", "NVL": "NVL"}
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


def row_of(name: str) -> dict | None:
    """The table's row of a GPU, as `gpu_table.find_gpu` finds it."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ]$", name):
        return None
    for row in ROWS:
        if re.search(rf"\b{row['name']}", name, re.IGNORECASE):
            return row
    return None


def family_of(kind: str) -> str:
    """A kind without its form and memory: `H100` of `H100 PCIe`, `RTX 4090` of itself."""
    return re.sub(r" (SXM|PCIe|NVL|\d+GB)$", "", kind)


def choose_kind(typed: str) -> tuple[str, list[str]]:
    """The kind that plans take a name for, and the other kinds that the name fits; ("", []) where plans know none.

    A driver's name stands for itself. Any other name is a family, of which those kinds are left that have the form and
    the memory in the name: `H100 80GB` is SXM or PCIe, `h100-nvl` one kind.
    """
    name = " ".join(re.split(r"[\s_-]+", typed.strip().upper()))
    row = row_of(typed)
    as_typed: tuple[str, list[str]] = (typed, []) if row and float(row["memory_gib"]) else ("", [])
    if name.startswith("NVIDIA "):
        return as_typed
    families = {family_of(kind).upper().replace(" ", " ?") for kind in PLANNED}
    parts = re.fullmatch(rf"({'|'.join(families)})(?!\d) ?(.*)", name)
    if not parts:
        return as_typed
    family = parts[1].replace(" ", "")
    fitting = [kind for kind in PLANNED if family_of(kind).upper().replace(" ", "") == family]
    for word in parts[2].split():
        memory, form = re.fullmatch(r"(\d+)(G|GB|GIB)?", word), form_in(word)
        if memory:
            fitting = [kind for kind in fitting if has_memory(kind, int(memory[1]))]
        elif form:
            of_form = [kind for kind in fitting if form in kind.upper()]
            without_form = [kind for kind in fitting if not form_of(kind)]  # how the family's SXM is called
            fitting = of_form or without_form
        else:
            return as_typed
    if not fitting:
        return "", []
    return fitting[0], fitting[1:]


def form_in(word: str) -> str:
    """The form that a word of a name means: `SXM` for SXM5 and HBM3; empty for any other word."""
    for form, pattern in FORMS.items():
        if re.fullmatch(pattern, word):
            return form
    return ""


def form_of(kind: str) -> str:
    """The form in a kind's name; empty where it names none."""
    for form in FORMS:
        if form in kind.upper():
            return form
    return ""


def has_memory(kind: str, gigabytes: int) -> bool:
    """Whether a card of so many GB, as it is sold, is of this kind."""
    return abs(gigabytes / float(row_of(kind)["memory_gib"]) - 1) < 0.1


def unlisted(gpu: str, given: dict[str, float]) -> str:
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


def wrong_plan(s) -> str:
    """What is wrong with the settings of a plan, by the flags and the file of rates alone; empty where nothing is."""
    given = {}
    if s.plan_rates not in (None, "none"):
        try:
            given = json.loads(pathlib.Path(s.plan_rates).expanduser().read_text())
        except (OSError, ValueError, RuntimeError) as error:  # also of a folder ~name, or of lists without end
            why = getattr(error, "strerror", None) or f"not JSON ({str(error).splitlines()[0]})"
            return f"--plan-rates {s.plan_rates}: {why}"
        if problem := wrong_rates(given):
            return problem
    gpu = s.plan_gpu or ""
    kind, _ = choose_kind(gpu)
    if gpu and gpu.lower() != "cpu" and not kind and (problem := unlisted(gpu, given)):
        return problem
    float8 = not kind or float(row_of(kind)["fp8"]) or s.fp8_emulate or "fp8_tflops" in given
    if s.precision == "fp8" and not float8:
        return f"--precision fp8: needs a GPU with float8 (Ada, Hopper or newer), {kind} has none; use bf16"
    if s.plan:
        for world in s.plan_gpus or (s.gpus_per_node,):
            if s.zero_stage and world % s.dp_replicate_size:
                return f"--dp-replicate-size {s.dp_replicate_size}: does not divide --plan-gpus {world:,}"
    return ""
