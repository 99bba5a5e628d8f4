"""Whether the devices of this machine train as its CPU does: the same few steps on both, and their losses.

    python benchmarks/beside_cpu.py --ranks 2 -- --optimizer muon --zero-stage 2

Both begin with the same weights, which the CPU draws and exports first: each device draws other random numbers from one
seed. The CPU's run is one rank without the flags that only say how a step is divided. Ends with 1 where a loss is more
than 1e-4 from the CPU's, with Muon 1e-3: kernels add in other orders, and steps amplify it.
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
TOLERANCES = {"muon": 1e-3}  # relative; its iterations are in bf16
TOLERANCE = 1e-4
DIVIDES = ("--zero-stage", "--dp-replicate-size", "--cpu-offload", "--defer-grad-sync")  # each with its value, if any


def train(folder: pathlib.Path, name: str, ranks: int, flags: list[str], **env: str) -> None:
    """One run.

    Raises:
        SystemExit: it did not end with 0.
    """
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, f"--nproc_per_node={ranks}"]
    where = ["--output-dir", str(folder), "--run-name", name, "--no-final-checkpoint", "--cache-dir", str(folder / "c")]
    command = [*launcher, str(ROOT / "train_fsdp.py"), "--demo", *where, *flags]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def losses(folder: pathlib.Path, name: str, ranks: int, flags: list[str], **env: str) -> list[float]:
    """The losses of one run from the exported weights."""
    start = ["--model", str(folder / "start"), "--init", "pretrained", "--lr", "0.004"]
    train(folder, name, ranks, [*start, *STEPS.split(), *flags], **env)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "final" not in line]


def without_division(flags: list[str]) -> list[str]:
    """These flags without those that say how a step is divided among ranks."""
    kept: list[str] = []
    divides = False
    for word in flags:
        if word.startswith("--"):
            divides = word in DIVIDES
        if not divides:
            kept.append(word)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="of the devices' run [1]")
    parser.add_argument("flags", nargs="*", help="of both runs, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, cpu = pathlib.Path(folder), {"CUDA_VISIBLE_DEVICES": ""}
        first = ["--num-steps", "1", "--lr", "1e-30", "--precision", "fp32", "--eval-interval", "0"]  # moves no weight
        train(path, "first", 1, [*first, "--export", str(path / "start")], **cpu)
        here = losses(path, "device", args.ranks, [*args.flags, "--batch-size", "2"])
        one_rank = [*without_division(args.flags), "--batch-size", str(2 * args.ranks)]
        reference = losses(path, "cpu", 1, one_rank, **cpu)
    tolerance = max([TOLERANCE, *(TOLERANCES.get(word, 0) for word in args.flags)])
    apart = max(abs(a / b - 1) for a, b in zip(here, reference, strict=True))
    print(f"losses {here[0]:.4f} to {here[-1]:.4f}, at most {apart:.1e} from the CPU's")
    if apart > tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
