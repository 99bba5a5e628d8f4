"""A run of the demo through five planted bad batches, beside one that leaves out those five updates and no more.

    python benchmarks/bad_batches.py --out benchmarks/results/bad-batches.json

Two ranks on the CPU. What is planted is a divisor of the loss, on one rank alone: NaN, 0 (an infinite gradient), or a
small number (a spike of the gradient norm). The second run trains on the same samples, without what was planted, and
its optimizer is not called in the steps that the first one skipped. Every loss that both log and every exported weight
have to be equal, bit for bit. Exits with 1 where they are not.
"""

import argparse
import datetime
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = 2
PLANTED = {20: (0, "nan"), 55: (1, "0.0"), 56: (1, "nan"), 90: (0, "nan"), 140: (1, "1e-4")}  # step: rank, divisor
FLAGS = "--demo --num-steps 160 --sequence-length 64 --batch-size 2 --log-interval 10 --eval-interval 80 --eval-steps 8"
FLAGS += " --skip-spikes 6 --sample-tokens 40"


def run_rank(arguments: list[str]) -> None:
    """One rank of the program. Its environment has PLANT, what is planted, and LEAVE_OUT, steps without an update."""
    sys.path.insert(0, str(ROOT))
    import torch

    from harness import data
    from harness.model import skipping

    planted = json.loads(os.environ["PLANT"])
    left_out = json.loads(os.environ["LEAVE_OUT"])
    make_batches = data.training_batches
    steps_taken = 0

    def planted_batches(*inputs):
        for step, batch in enumerate(make_batches(*inputs), 1):
            rank, divisor = planted.get(str(step), (None, ""))
            if rank == int(os.environ["RANK"]):
                batch["loss_divisor"] = torch.tensor(float(divisor))  # a plain 0 would raise
            yield batch

    def step_unless_left_out(optimizer, skip):
        nonlocal steps_taken
        steps_taken += 1
        if steps_taken not in left_out:
            optimizer.step()

    data.training_batches = planted_batches
    if left_out:
        skipping.step_or_skip = step_unless_left_out
    sys.argv = [str(ROOT / "train_fsdp.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(folder: pathlib.Path, name: str, plant: dict, left_out: list[int]) -> tuple[str, list[dict]]:
    """(what the console showed, the lines of metrics.jsonl) of a run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    flags = [*FLAGS.split(), "--output-dir", folder, "--run-name", name, "--export", folder / f"{name}-export"]
    environment = os.environ | {"PLANT": json.dumps(plant), "LEAVE_OUT": json.dumps(left_out), "OMP_NUM_THREADS": "1"}
    words = [*launcher, __file__, "--rank", *flags]
    process = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{name} ended with {process.returncode}:\n{process.stdout}{process.stderr}")
    return process.stdout, [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def weights_of(export: pathlib.Path) -> dict[str, bytes]:
    """The bytes of each exported weight."""
    from safetensors import safe_open

    with safe_open(export / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no dictionary


def compare(lines: list[dict], others: list[dict]) -> dict:
    """The largest difference of the losses that both runs logged, and how many there are."""
    differences, only_second = [], []
    for line, other in zip(lines, others, strict=True):
        for key in ("loss", "eval_loss"):
            if key in line and key in other:
                differences.append(abs(line[key] - other[key]))
            elif key in other:
                only_second.append(line["step"])
    return {
        "losses_compared": len(differences),
        "largest_difference": max(differences),
        "steps_logged_without_loss": only_second,
    }


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the result")
    parser.add_argument("--folder", type=pathlib.Path, help="where the runs stay [a temporary folder]")
    args = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or pathlib.Path(temporary)
        console, lines = run(folder, "planted", PLANTED, [])
        console = console.replace(str(folder), "outputs")
        print(console)
        skipped = [entry for line in lines for entry in line.get("skipped", [])]
        _, others = run(folder, "left-out", {}, [entry["step"] for entry in skipped])
        found = compare(lines, others)
        found["weights_equal"] = weights_of(folder / "planted-export") == weights_of(folder / "left-out-export")
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/bad_batches.py",
        "flags": FLAGS,
        "ranks": RANKS,
        "torch": torch.__version__,
        "planted": {step: {"rank": rank, "loss_divisor": divisor} for step, (rank, divisor) in PLANTED.items()},
        "skipped": skipped,
        "beside_the_run_without_these_updates": found,
        "console": [line for line in console.splitlines() if line.startswith(("step ", "skipped ", "done "))],
    }
    print(json.dumps({key: value for key, value in result.items() if key != "console"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if found["largest_difference"] or not found["weights_equal"] or [e["step"] for e in skipped] != [*PLANTED]:
        sys.exit("not as it should be")


if __name__ == "__main__":
    main()
