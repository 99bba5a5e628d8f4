"""What a checkpoint costs: how long training pauses, asynchronous and synchronous, and bytes a parameter on disk.

    python benchmarks/checkpoint_cost.py --ranks 2

Trains a Llama of 124 M parameters for a few steps with a checkpoint every few, both ways in turn.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 50304, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip


def run(args: argparse.Namespace, folder: pathlib.Path, name: str, *flags: str) -> dict:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    command = (
        f"--model {folder} --dataset synthetic --sequence-length 256 --num-steps {args.num_steps} --precision fp32 \
        --checkpoint-interval {args.checkpoint_interval} --keep-checkpoints 1 --log-interval 1 --perf-warmup-steps 2 \
        --output-dir {folder} --run-name {name}".split()
    )
    output = subprocess.run(
        [*launch, str(ROOT / "train_fsdp.py"), *command, *flags], check=True, capture_output=True, text=True
    ).stdout
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    saved = re.findall(r"saved\s+step-\d+, ([\d,.]+) MB in ([\d.]+) s(?:, training paused for ([\d.]+) s)?", output)
    parameters = int(re.search(r"([\d,]+) parameters", output)[1].replace(",", ""))
    saved = saved[:-1]  # the last one always waits
    return {
        "parameters": parameters,
        "step_seconds": statistics.median(line["step_time_ms"] for line in lines[3:-1]) / 1000,
        "stall_seconds": [float(stall or total) for _, total, stall in saved],
        "write_seconds": [float(total) for _, total, _ in saved],
        "bytes_per_parameter": float(saved[-1][0].replace(",", "")) * 1e6 / parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--checkpoint-interval", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, list[dict]] = {"async": [], "sync": []}
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for repeat in range(args.repeats):
            for way, flag in (("async", "--async-checkpoint"), ("sync", "--no-async-checkpoint")):
                results[way].append(run(args, pathlib.Path(folder), f"{way}-{repeat}", flag))
    table = {"date": time.strftime("%Y-%m-%d"), "ranks": args.ranks}
    table["parameters"] = results["async"][0]["parameters"]
    for way, runs in results.items():
        stalls = [stall for one in runs for stall in one["stall_seconds"]]
        step = statistics.median(one["step_seconds"] for one in runs)
        table[way] = {
            "step_seconds": round(step, 3),
            "stall_seconds_median": round(statistics.median(stalls), 3),
            "stall_seconds_range": [min(stalls), max(stalls)],
            "stall_in_steps": round(statistics.median(stalls) / step, 2),
            "write_seconds_median": statistics.median(s for one in runs for s in one["write_seconds"]),
            "saves": len(stalls),
            "bytes_per_parameter": round(runs[0]["bytes_per_parameter"], 3),
        }
    print(json.dumps(table, indent=2))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
