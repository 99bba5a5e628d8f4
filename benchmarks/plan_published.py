"""How near plans by data sheets are to published runs: speed beside speed, memory beside memory.

    python benchmarks/plan_published.py [--only 'torchtitan*'] [--out benchmarks/results/plan_published.json]

Each row of `runs` in the file is a run that somebody published, and beside it what `train_fsdp.py --plan` says of it
without any measured rate. To add a run, add a row with the first of these:

    name, source               of the publication or repository, with its date where it has one
    published                  tokens/s a GPU
    memory_gib, memory_is      what it says of a GPU's memory, null where nothing; "reserved" by PyTorch's allocator, or
                               "allocated": what tensors take
    flags                      those that come nearest to it; CONFIG is the folder of `config`, a model without a preset
    config, rates              or null; rates are those that differ from what a plan assumes of this GPU
    otherwise                  what its library does otherwise than this program, and is planned so: of OTHERWISE
    not_expressed, guessed     what the run has and a plan cannot say; what is not published
    chose                      CONTENTION of harness/plan/rates.py where it was used to choose that, on several GPUs;
                               "" for a run that is held out
    contradicts_itself         its figures do not agree with each other: not in `published_share`
    other_kind                 what it is, where it is none of `text.PUBLISHED_KINDS`: in no range that plans print

The rates of torchtitan's H100 (96 GB of HBM2e at 2.4 TB/s, 500 W) are the SXM card's, products and attention as 835 to
989, the NVL card's peak to its own: torchtitan says that its peak lies between both. llm-foundry's attention is
FlashAttention 1, causal, heads of 128, forward and backward, by FlashAttention-2 (arXiv 2307.08691): figure 4 (d) for
the A100 has its Triton kernel, figure 7 (d) for the H100 only the CUDA kernel, on the A100 within 3 % of it.
KempnerForge's memory is torch.cuda.max_memory_allocated by 2**30; its batches are those of mfu_bench.sh.
"""

import argparse
import collections
import contextlib
import datetime
import fnmatch
import importlib.metadata
import json
import pathlib
import pkgutil
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plan_published.json"
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

import train_fsdp
from harness import model as models
from harness import plan as planning
from harness.flags import parse_args

# ---- What libraries do otherwise -------------------------------------------------------------------------------------


def every_second_matmul():
    """In the place of the model wing's `selective_contexts`: torchtitan's policy, which keeps what attention gives,
    float8's scales, and of the matmuls of a layer the first, third, ..."""
    matmuls: collections.Counter = collections.Counter()

    def policy(context, op, *args, **kwargs):
        keeps = op is torch.ops.aten.max.default or re.search("attention", str(op))
        if op is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keeps = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def reduces_in_fp32() -> MixedPrecisionPolicy:
    """In the place of the policy of bf16-pure: gradients are accumulated and reduced in fp32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_in_bf16(logits: torch.Tensor, labels: torch.Tensor, *_, **__) -> torch.Tensor:
    """In the place of the model wing's `full_loss`: no copy of the logits in fp32."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


FULL_LOSS = models.full_loss
RATES = "harness.plan.rates.assumed_rates"
assumed_rates = pkgutil.resolve_name(RATES)


def compiled_loss(*logits_and_labels, **options) -> torch.Tensor:
    """In the place of the model wing's `full_loss`: compiled, it reads the logits in bf16 and holds no copy in fp32."""
    return torch.compile(FULL_LOSS)(*logits_and_labels, **options)


OTHERWISE = {  # what is replaced, and by what
    "recomputes every second matmul": ("harness.model.activations.selective_contexts", every_second_matmul),
    "compiles the loss": ("harness.model.loss.full_loss", compiled_loss),
    "loss in bf16": ("harness.model.loss.full_loss", loss_in_bf16),
    "accumulates and reduces gradients in fp32": ("train_fsdp.MixedPrecisionPolicy", reduces_in_fp32),
}

# ---- Plans beside runs -----------------------------------------------------------------------------------------------


def plan(run: dict) -> dict:
    """What `train_fsdp.py --plan --json` says of a run, in this process: loading torch takes longer than a plan.

    Raises:
        UserError: the flags or the config are refused.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pathlib.Path(folder, "config.json").write_text(json.dumps(run["config"]))
        stack.enter_context(mock.patch(RATES, lambda kind, flash: assumed_rates(kind, flash) | (run["rates"] or {})))
        flags = ["--plan", "--json", "--plan-seconds", "0"]
        for name in run["otherwise"]:
            stack.enter_context(mock.patch(*OTHERWISE[name]))
        settings = parse_args([*flags, *run["flags"].replace("CONFIG", folder).split()])
        return planning.make_plan(settings, train_fsdp.RECIPE)[1]


def compared(run: dict, planned: dict) -> dict:
    """The row of a run with its plan. Memory is in GiB, without what CUDA and NCCL take."""
    speed = planned["tokens_per_sec_per_gpu"]
    memory = planned["memory_gib"]["total" if run["memory_is"] == "allocated" else "allocator"]
    return run | {
        "planned": speed,
        "error": speed / run["published"] - 1,
        "planned_memory_gib": memory,
        "memory_error": memory / run["memory_gib"] - 1 if run["memory_gib"] else None,
        "verdict": planned["verdict"],
        "mfu_percent": planned["mfu_percent"],
        "step_time_ms": planned["step_time_ms"],
        "time_ms": planned["time_ms"],
        "date": now(),
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def summary_of(rows: list[dict]) -> dict:
    """Median and worst size of the errors of a group, of speed and of memory."""
    summary = {"runs": len(rows)}
    for name in ("error", "memory_error"):
        sizes = [abs(row[name]) for row in rows if row[name] is not None]
        if sizes:
            summary |= {f"median_{name}": statistics.median(sizes), f"worst_{name}": max(sizes)}
    return summary


def published_share(rows: Iterable[dict]) -> list[float]:
    """`text.PUBLISHED_SHARE`: published speed over the planned, the least, the median and the most."""
    rows = [row for row in rows if not row["contradicts_itself"] and not row["other_kind"]]
    return ends_and_median([row["published"] / row["planned"] for row in rows])


def published_memory_share(rows: Iterable[dict]) -> list[float]:
    """The same of the memory, of the runs that say it."""
    rows = [row for row in rows if row["memory_gib"] and not row["other_kind"]]
    return ends_and_median([row["memory_gib"] / row["planned_memory_gib"] for row in rows])


def ends_and_median(shares: list[float]) -> list[float]:
    return [min(shares), statistics.median(shares), max(shares)]


def groups_of(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """The runs that chose a constant, and those held out."""
    groups: dict[str, list[dict]] = {"set": [], "held out": []}
    for row in rows:
        groups["set" if row["chose"] else "held out"].append(row)
    return groups


def save(out: pathlib.Path, runs: dict[str, dict]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "torchao")}
    contents = {
        "suite": "plan_published",
        "about": {"date": now(), "versions": versions},
        "summary": {name: summary_of(group) for name, group in groups_of(runs.values()).items()},
        "published_share": published_share(runs.values()),
        "published_memory_share": published_memory_share(runs.values()),
        "runs": runs,
    }
    out.write_text(json.dumps(contents, indent=1) + "\n")


def percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.0f} %"


def table(rows: list[dict]) -> str:
    """The runs beside their plans, in Markdown."""
    lines = ["| run | tokens/s a GPU | planned | error | GiB | planned | error |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["name"], f"{row['published']:,.0f}", f"{row['planned']:,.0f}", percent(row["error"])]
        cells.append(f"{row['memory_gib']:.1f}" if row["memory_gib"] else "")
        cells += [f"{row['planned_memory_gib']:.1f}", percent(row["memory_error"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of runs to plan again, with * and ?")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    runs = json.loads(RESULTS.read_text())["runs"]
    for name, run in runs.items():
        if fnmatch.fnmatch(name, args.only):
            runs[name] = compared(run, plan(run))
            print(f"{name:60}{runs[name]['planned']:10,.0f}{100 * runs[name]['error']:+7.1f} %", flush=True)
    save(args.out, runs)
    for group_name, group in groups_of(runs.values()).items():
        summary = summary_of(group)
        error, worst = 100 * summary["median_error"], 100 * summary["worst_error"]
        print(f"\n{group_name}: median {error:.0f} %, worst {worst:.0f} %\n\n{table(group)}")


if __name__ == "__main__":
    main()
