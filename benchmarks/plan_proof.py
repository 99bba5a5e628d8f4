"""How near a planned step is to a measured one on this machine: --measure, --plan, then the run itself, in turn.

    python benchmarks/plan_proof.py [--rounds 3] [--only 'demo*'] [--out benchmarks/results/plan_proof.json]

Each round measures the five rates anew, so that plan and run meet the same neighbours on a shared machine; the error
of a configuration is the median over the rounds of planned over measured step time. Threads: one a rank, as torchrun
has it.
Rounds are added to those that the file has: remove it for other code or another machine.
"""

import argparse
import datetime
import fnmatch
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

DEMO = "--model demo --sequence-length 256"
SMALL = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
# What is timed: (ranks, flags of --measure, {name: flags of plan and run beside them}).
CALIBRATIONS = [
    (1, f"{DEMO} --batch-size 4 --precision fp32", {
        "demo, fp32, 4 x 256": "",
        "demo, fp32, 8 x 256 in 2 microbatches": "--batch-size 8 --gradient-accumulation-steps 2",
        "demo, fp32, 4 x 256, full checkpointing": "--activation-checkpointing full",
    }),
    (1, f"{DEMO} --batch-size 4 --precision bf16 --compile", {
        "demo, bf16, compiled, 4 x 256": "",
        "demo, bf16, compiled, 8 x 256": "--batch-size 8",
    }),
    (1, "--model WORK/small --sequence-length 256 --batch-size 2 --precision bf16", {
        "93M, bf16, 2 x 256": "",
        "93M, bf16, 2 x 256, selective checkpointing": "--activation-checkpointing selective",
    }),
    (2, f"{DEMO} --batch-size 4 --precision bf16", {
        "demo, bf16, 4 x 256, 2 ranks": "",
        "demo, bf16, 4 x 256 in 4 microbatches, ZeRO-2, 2 ranks": "--gradient-accumulation-steps 4 --zero-stage 2",
    }),
    (4, f"{DEMO} --batch-size 2 --precision bf16", {"demo, bf16, 2 x 256, 4 ranks": ""}),
]  # fmt: skip


def start(ranks: int, flags: str, work: pathlib.Path, seconds: float = 900) -> str:
    """What train_fsdp.py prints; a RuntimeError with its last line where it fails."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "train_fsdp.py"), *flags.replace("WORK", str(work)).split()]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    return done.stdout


def run(ranks: int, flags: str, work: pathlib.Path, steps: int) -> float:
    """Median milliseconds of a step, of a real run on random tokens."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        of_run = f"--dataset synthetic --log-interval 1 --perf-warmup-steps 2 --num-steps {steps}"
        start(ranks, f"{flags} {of_run} --output-dir {folder} --run-name run", work)
        lines = [json.loads(line) for line in pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_time_ms"] for line in lines[:-1] if "step_time_ms" in line)


def one_round(args, work: pathlib.Path, results: dict) -> None:
    for ranks, flags, variants in CALIBRATIONS:
        wanted = {name: change for name, change in variants.items() if fnmatch.fnmatch(name, args.only)}
        if not wanted:
            continue
        cache = f"--cache-dir {work}/cache"
        eager = "" if "--compile" in flags else "--no-compile"
        said = start(ranks, f"--measure {flags} {cache}", work)
        print("; ".join(line[11:] for line in said.splitlines() if line.startswith("measured")), flush=True)
        for name, change in wanted.items():
            plan = f"--plan --json --plan-gpu cpu --plan-gpus {ranks} --gpus-per-node {ranks} {eager} {cache}"
            planned = json.loads(start(1, f"{plan} {flags} {change}", work))
            measured = run(ranks, f"{flags} {change}", work, 14)
            row = {"planned_ms": planned["step_time_ms"], "measured_ms": measured, "load": os.getloadavg()[0]}
            row |= {"of_ms": planned["time_ms"]}
            entry = results.setdefault(name, {"ranks": ranks, "flags": f"{flags} {change}".strip(), "rounds": []})
            entry["rounds"].append(row)
            error = 100 * (row["planned_ms"] / measured - 1)
            print(f"{name:58}{row['planned_ms']:10,.1f}{measured:10,.1f} ms{error:+7.1f} %", flush=True)
            save(args.out, work, results)


def save(out: pathlib.Path, work: pathlib.Path, results: dict) -> None:
    about = json.loads((work / "cache" / "rates" / "cpu.json").read_text()) | {"cores": os.cpu_count()}
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    errors = sorted(abs(error_of(entry)) for entry in results.values())
    summary = {"median_error": statistics.median(errors), "worst_error": errors[-1]}
    contents = {"suite": "plan_proof", "machine": about, "summary": summary, "configs": results}
    out.write_text(json.dumps(contents, indent=1) + "\n")


def error_of(entry: dict) -> float:
    """Planned over measured, less one: the median of the rounds."""
    return statistics.median(row["planned_ms"] / row["measured_ms"] for row in entry["rounds"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="*", help="names of configurations, with * and ?")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "plan_proof.json")
    args = parser.parse_args()
    results: dict = json.loads(args.out.read_text())["configs"] if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "small").mkdir()
        (work / "small" / "config.json").write_text(json.dumps(SMALL))
        for _ in range(args.rounds):
            one_round(args, work, results)
    print("\n| configuration | planned ms | measured ms | error |\n|---|---|---|---|")
    for name, entry in results.items():
        planned, measured = (
            statistics.median(row[of] for row in entry["rounds"]) for of in ("planned_ms", "measured_ms")
        )
        print(f"| {name} | {planned:,.1f} | {measured:,.1f} | {100 * error_of(entry):+.1f} % |")
    summary = json.loads(args.out.read_text())["summary"]
    print(f"\nmedian {100 * summary['median_error']:.1f} %, worst {100 * summary['worst_error']:.1f} %, in {args.out}")


if __name__ == "__main__":
    main()
