"""The planned tables of docs/MEMORY.md, OPTIMIZERS.md, BENCHMARK.md and PLAN.md, in Markdown; some minutes on one core.

python benchmarks/plan_tables.py
"""

import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import train_fsdp
from harness import flags as flag_rules
from harness import plan as planning

PLAIN = "--attention flash --no-compile --no-fused-loss --plan-gpus 4"
OF_MUON = "--plan-gpus 4 --sequence-length 8192 --gradient-accumulation-steps 4 --zero-stage 2 \
--activation-checkpointing selective"
ONE_CARD_A_NODE = {"inter_node_gb_per_s": 5.9}


def planned(flags: str, given: dict | None = None) -> dict:
    """The plan of SmolLM3-3B on H100 SXM with these flags and, where given, other rates."""
    settings = flag_rules.parse_args(["--plan", "--plan-gpu", "H100 SXM", "--plan-rates", "none", *flags.split()])
    return planning.predict_run(settings, train_fsdp.RECIPE, settings.plan_gpus[0], **(given or {})).to_json()


def row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def memory() -> None:
    print("MEMORY.md: checkpointing, loss, batch, ZeRO-0 to 3, of it activations, ms a step\n")
    for checkpointing in ("none", "selective", "full"):
        for loss, flag in (("fused", ""), ("full logits", "--no-fused-loss")):
            for batch in (1, 2, 4):
                flags = f"--plan-gpus 4 --activation-checkpointing {checkpointing} --batch-size {batch} {flag}"
                plans = [planned(f"{flags} --zero-stage {stage}") for stage in range(4)]
                totals = [f"{plan['memory_gib']['total']:.1f}" + " *" * (not plan["fits"]) for plan in plans]
                times = f"{plans[2]['step_time_ms']:.0f} / {plans[3]['step_time_ms']:.0f}"
                row(checkpointing, loss, batch, *totals, f"{plans[3]['at_peak_gib']['activations']:.1f}", times)
    print("\nMEMORY.md: by kind, at the peak\n")
    stages = ("--zero-stage 0", "--zero-stage 2", "--zero-stage 3", "--zero-stage 3 --activation-checkpointing full")
    plans = [planned(f"--plan-gpus 4 {stage}") for stage in stages]
    for kind in plans[0]["at_peak_gib"]:
        row(kind, *(f"{plan['at_peak_gib'][kind]:.2f}" for plan in plans))
    row("total", *(f"{plan['memory_gib']['total']:.1f}" for plan in plans))
    row("when", *(plan["peak_at"] for plan in plans))
    print("\nMEMORY.md: the published run, ZeRO-2, ZeRO-3\n")
    for flags in ("bf16-pure", "bf16-pure --activation-checkpointing full", "bf16 --activation-checkpointing full"):
        sizes = [planned(f"{PLAIN} --precision {flags} --zero-stage {z}")["memory_gib"]["total"] for z in (2, 3)]
        row(f"`--precision {flags}`", *(f"{size:.1f} GiB ({size * 2**30 / 1e9:.1f} GB)" for size in sizes))


def optimizers() -> None:
    print("\nOPTIMIZERS.md: optimizer, ms a step, of it the optimizer, GiB of states, all-to-alls, GiB sent in them\n")
    for name in ("adamw", "muon", "normuon"):
        plan = planned(f"{OF_MUON} --optimizer {name}")
        exchanges = [of for of in plan["collectives"] if of["collective"] == "all_to_all"]
        calls, sent = (sum(of[key] for of in exchanges) for key in ("calls", "gib"))
        states = f"{plan['memory_gib']['optimizer']:.2f}"
        row(name, f"{plan['step_time_ms']:,.0f}", f"{plan['time_ms']['optimizer']:.0f}", states, calls, f"{sent:.2f}")


def world_sizes(page: str, sizes: tuple[int, ...], rates: dict | None) -> None:
    print(f"\n{page}: GPUs, replicas, GiB sent, ms a step, tok/s, MFU %, exposed %\n")
    for size in sizes:
        for replicas in (1, size // 8) if size > 8 else (1,):
            plan = planned(f"--plan-gpus {size} --dp-replicate-size {replicas}", rates)
            sent, step = f"{plan['communication_gib_per_step']:.2f}", f"{plan['step_time_ms']:,.1f}"
            speed, mfu = f"{plan['tokens_per_sec']:,.0f}", f"{plan['mfu_percent']:.1f}"
            row(f"{size:,}", replicas, sent, step, speed, mfu, f"{plan['exposed_communication_percent']:.1f}")


def main() -> None:
    memory()
    optimizers()
    world_sizes("BENCHMARK.md", (4, 8, 64, 1024), None)
    world_sizes("PLAN.md, one card a node", (8, 64, 1024), ONE_CARD_A_NODE)


if __name__ == "__main__":
    main()
