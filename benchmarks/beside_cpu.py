"""Compare training on this machine's devices with its CPU: the losses of the same few steps.

    python benchmarks/beside_cpu.py --ranks 2 -- --optimizer muon --zero-stage 2

Both start from weights that the CPU drew and exported, as devices draw different random numbers from a seed. The CPU's
run has one rank, without the flags that only divide a step. Exits with 1 if a loss differs from the CPU's by more than
1e-4, with Muon 1e-3: kernels add in other orders, and steps amplify the differences.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
STEPS = "--precision fp32 --no-compile --sequence-length 64 --num-steps 8 --log-interval 1 --eval-interval 0"
TOLERANCES = {"muon": 1e-3}  # relative; Muon's iterations are in bf16
TOLERANCE = 1e-4
DIVIDING_FLAGS = ("--zero-stage", "--dp-replicate-size", "--cpu-offload", "--defer-grad-sync")  # each may have a value


def train(folder: pathlib.Path, name: str, ranks: int, flags: list[str], **env: str) -> None:
    """Run train_fsdp.py. Raises SystemExit if it fails."""
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, f"--nproc_per_node={ranks}"]
    where = ["--output-dir", str(folder), "--run-name", name, "--no-final-checkpoint", "--cache-dir", str(folder / "c")]
    command = [*launcher, str(ROOT / "train_fsdp.py"), "--demo", *where, *flags]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def losses(folder: pathlib.Path, name: str, ranks: int, flags: list[str], **env: str) -> list[float]:
    """Return the losses of a run from the exported weights."""
    start = ["--model", str(folder / "start"), "--init", "pretrained", "--lr", "0.004"]
    train(folder, name, ranks, [*start, *STEPS.split(), *flags], **env)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "final" not in line]


def without_division(flags: list[str]) -> list[str]:
    """Return the flags without DIVIDING_FLAGS."""
    kept: list[str] = []
    divides = False
    for word in flags:
        if word.startswith("--"):
            divides = word in DIVIDING_FLAGS
        if not divides:
            kept.append(word)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the devices' run [1]")
    parser.add_argument("flags", nargs="*", help="flags of both runs, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, cpu = pathlib.Path(folder), {"CUDA_VISIBLE_DEVICES": ""}
        first = ["--num-steps", "1", "--lr", "1e-30", "--precision", "fp32", "--eval-interval", "0"]  # moves no weight
        train(path, "first", 1, [*first, "--export", str(path / "start")], **cpu)
        here = losses(path, "device", args.ranks, [*args.flags, "--batch-size", "2"])
        one_rank = [*without_division(args.flags), "--batch-size", str(2 * args.ranks)]
        reference = losses(path, "cpu", 1, one_rank, **cpu)
    tolerance = max([TOLERANCE, *(TOLERANCES.get(word, 0) for word in args.flags)])
    difference = max(abs(a / b - 1) for a, b in zip(here, reference, strict=True))
    print(f"losses {here[0]:.4f} to {here[-1]:.4f}, at most {difference:.1e} from the CPU's")
    if difference > tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
