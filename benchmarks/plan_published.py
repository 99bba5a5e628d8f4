"""Compare plans with published runs: speed and memory.

    python benchmarks/plan_published.py [--only 'torchtitan*'] [--out benchmarks/results/plan_published.json]

Each row of `runs` in the file is a published run and its plan by `train_fsdp.py --plan`. To add a run, add a row with:

    name, source               of the publication or repository, with its date if it has one
    published                  tokens/s per GPU
    memory_gib, memory_is      memory per GPU, or null; "reserved" by PyTorch's allocator, or "allocated" by tensors
    flags                      closest flags; CONFIG is the folder of `config`, a model without a preset
    config, rates              or null; rates that differ from a plan's assumptions for this GPU
    otherwise                  differences of its library, which the plan applies: keys of OTHERWISE
    not_expressed, guessed     settings that a plan does not have; settings that are not published
    chose                      CONTENTION of harness/plan/rates.py if the run was used to fit it; "" for a held-out run
    contradicts_itself         its numbers disagree: not in `published_share`
    other_kind                 the reason for a run that is in no range that plans print

The rates of torchtitan's H100 (96 GB of HBM2e at 2.4 TB/s, 500 W) are the SXM card's, products and attention as 835 to
989, the NVL card's peak to its own: torchtitan says that its peak lies between both. llm-foundry's attention is
FlashAttention 1, causal, heads of 128, forward and backward, by FlashAttention-2 (arXiv 2307.08691): figure 4 (d) for
the A100 has its Triton kernel, figure 7 (d) for the H100 only the CUDA kernel, on the A100 within 3 % of it.
KempnerForge's memory is torch.cuda.max_memory_allocated by 2**30; its batches are those of mfu_bench.sh.
"""

import argparse
import collections
import contextlib
import fnmatch
import json
import pathlib
import pkgutil
import re
import statistics
import tempfile
import warnings
from collections.abc import Iterable
from unittest import mock

import running
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

RESULTS = running.ROOT / "benchmarks" / "results" / "plan_published.json"
warnings.filterwarnings("ignore")

import train_fsdp
from harness import base
from harness import model as models
from harness import plan as planning
from harness.flags import parse_args

# ---- Differences of libraries ----------------------------------------------------------------------------------------


def every_second_matmul():
    """Replace `selective_contexts` by torchtitan's policy, which saves attention outputs, float8 scales, and the first,
    third, ... matmul of a layer."""
    matmuls: collections.Counter = collections.Counter()

    def policy(context, op, *args, **kwargs):
        keeps = op is torch.ops.aten.max.default or re.search("attention", str(op))
        if op is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keeps = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def reduces_in_fp32() -> MixedPrecisionPolicy:
    """Replace the policy of bf16-pure: gradients are accumulated and reduced in fp32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_in_bf16(logits: torch.Tensor, labels: torch.Tensor, *_, **__) -> torch.Tensor:
    """Replace `full_loss`: no fp32 copy of the logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


FULL_LOSS = models.full_loss
RATES = "harness.plan.rates.assumed_rates"
assumed_rates = pkgutil.resolve_name(RATES)


def compiled_loss(*logits_and_labels, **options) -> torch.Tensor:
    """Replace `full_loss`: compiled, it reads bf16 logits without an fp32 copy."""
    return torch.compile(FULL_LOSS)(*logits_and_labels, **options)


OTHERWISE = {  # {difference: (name to replace, replacement)}
    "recomputes every second matmul": ("harness.model.activations.selective_contexts", every_second_matmul),
    "compiles the loss": ("harness.model.loss.full_loss", compiled_loss),
    "loss in bf16": ("harness.model.loss.full_loss", loss_in_bf16),
    "accumulates and reduces gradients in fp32": ("train_fsdp.MixedPrecisionPolicy", reduces_in_fp32),
}

# ---- Plans and runs --------------------------------------------------------------------------------------------------


def plan(run: dict) -> dict:
    """Return the plan of a run, made in this process, as importing torch takes longer than a plan.

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
        "date": running.now(),
    }


def published_share(rows: Iterable[dict]) -> list[float]:
    """Return `text.PUBLISHED_SHARE`: minimum, median and maximum of published over planned speed."""
    rows = [row for row in rows if not row["contradicts_itself"] and not row["other_kind"]]
    return min_median_max([row["published"] / row["planned"] for row in rows])


def published_memory_share(rows: Iterable[dict]) -> list[float]:
    """Return the same for memory, of the runs that publish it."""
    rows = [row for row in rows if row["memory_gib"] and not row["other_kind"]]
    return min_median_max([row["memory_gib"] / row["planned_memory_gib"] for row in rows])


def min_median_max(shares: list[float]) -> list[float]:
    return [min(shares), statistics.median(shares), max(shares)]


def save(out: pathlib.Path, runs: dict[str, dict]) -> None:
    contents = {
        "suite": "plan_published",
        "about": {"date": running.now(), "versions": base.package_versions()},
        "published_share": published_share(runs.values()),
        "published_memory_share": published_memory_share(runs.values()),
        "runs": runs,
    }
    out.write_text(json.dumps(contents, indent=1) + "\n")


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


if __name__ == "__main__":
    main()
