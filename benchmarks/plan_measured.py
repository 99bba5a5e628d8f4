"""Compare plans with this program's runs on GPUs: plan each run of plan_measured.json with the assumed rates.

    python benchmarks/plan_measured.py [--only '*fp8*'] [--out benchmarks/results/plan_measured.json]

It writes `planned` of each run. The measurements stay:

    flags, plan_gpu        flags of the run, and the name of its GPU for --plan-gpu
    summary, last_window   metrics of all steps after --perf-warmup-steps, and of the last log line; `compared` names
    the
                           one to compare with the plan: the last line if a profile slowed the other steps
    kernels                of a profiled step: ms by kind, launches, ms of gaps between kernels
    note, left_out         a remark on a number; the reason for a run that is not compared with its plan
"""

import argparse
import fnmatch
import json
import pathlib
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plan_measured.json"
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

import train_fsdp
from harness import plan as planning
from harness.flags import parse_args

FLAGS = ["--plan", "--json", "--plan-seconds", "0", "--plan-gpus", "1", "--plan-gpu"]
KINDS = ("matmul", "attention", "memory", "optimizer", "gaps", "launches")


def plan(run: dict) -> dict:
    """Return the plan of a run, made in this process, as importing torch takes longer than a plan."""
    settings = parse_args([*FLAGS, run["plan_gpu"], *run["flags"].split()])
    return planning.make_plan(settings, train_fsdp.RECIPE)[1]


def planned_metrics(planned: dict) -> dict:
    """Return a plan's metrics with the keys of a run: GiB, ms and tokens/s."""
    return {
        "step_time_ms": planned["step_time_ms"],
        "tokens_per_sec": planned["tokens_per_sec"],
        "peak_memory_alloc": planned["memory_gib"]["total"],
        "peak_memory_reserved": planned["memory_gib"]["allocator"],
        "bound_by": planned["bound_by"],
        "time_ms": {kind: planned["time_ms"][kind] for kind in KINDS},
    }


def table(runs: dict[str, dict]) -> str:
    """Format measurements and plans as Markdown."""
    lines = [
        "| run | ms a step | planned | allocated | planned | reserved | planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        real, cells = run[run["compared"]], [name]
        for figure, digits in (("step_time_ms", 1), ("peak_memory_alloc", 2), ("peak_memory_reserved", 2)):
            cells += [f"{real[figure]:,.{digits}f}", f"{run['planned'][figure]:,.{digits}f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of runs to plan again, with * and ?")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    contents = json.loads(RESULTS.read_text())
    for name, run in contents["runs"].items():
        if fnmatch.fnmatch(name, args.only):
            run["planned"] = planned_metrics(plan(run))
    args.out.write_text(json.dumps(contents, indent=1) + "\n")
    print(table(contents["runs"]))


if __name__ == "__main__":
    main()
