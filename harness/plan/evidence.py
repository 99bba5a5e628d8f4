"""Evidence: this program's own runs on GPUs, each beside its plan, from benchmarks/results/gpu.json."""

import json

from harness import base

FIGURES = ("step_time_ms", "tokens_per_sec", "peak_memory_alloc", "peak_memory_reserved")


def own_runs() -> list[dict]:
    """Of each run its device, configuration, the plan's figures and the measured ones: ms, tokens/s and GiB. `note`
    says where a measured figure needs a word, `left_out` why it is not compared with its plan."""
    runs = json.loads((base.ROOT / "benchmarks" / "results" / "gpu.json").read_text())["runs"]
    rows = []
    for name, run in runs.items():
        row = {"configuration": name, "device": run["device"], "flags": run["flags"], "planned": run.get("planned")}
        row["measured"] = {figure: run[run["compared"]][figure] for figure in FIGURES}
        rows.append(row | {key: run[key] for key in ("note", "left_out") if key in run})
    return rows
