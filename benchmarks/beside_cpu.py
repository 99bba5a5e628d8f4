"""Whether the devices of this machine train as its CPU does: the same few steps on both, and their losses.

    python benchmarks/beside_cpu.py --ranks 2 -- --optimizer muon --zero-stage 2

The CPU's run is one rank without the flags that only say how a step is divided. Ends with 1 where a loss is more than
2 % from the CPU's: kernels add in other orders, and steps amplify it.
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
STEPS = "--demo --precision fp32 --no-compile --sequence-length 64 --num-steps 8 --log-interval 1 --eval-interval 0"
TOLERANCE = 0.02  # relative
DIVIDES = ("--zero-stage", "--dp-replicate-size", "--cpu-offload", "--defer-grad-sync")  # each with its value, if any


def losses(folder: pathlib.Path, name: str, ranks: int, flags: list[str], **env: str) -> list[float]:
    """The losses of one run.

    Raises:
        SystemExit: it did not end with 0.
    """
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, f"--nproc_per_node={ranks}"]
    where = ["--output-dir", str(folder), "--run-name", name, "--no-final-checkpoint", "--cache-dir", str(folder / "c")]
    command = [*launcher, str(ROOT / "train_fsdp.py"), *STEPS.split(), *where, *flags]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
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
        path = pathlib.Path(folder)
        here = losses(path, "device", args.ranks, [*args.flags, "--batch-size", "2"])
        one_rank = [*without_division(args.flags), "--batch-size", str(2 * args.ranks)]
        reference = losses(path, "cpu", 1, one_rank, CUDA_VISIBLE_DEVICES="")
    apart = max(abs(a / b - 1) for a, b in zip(here, reference, strict=True))
    print(f"losses {here[0]:.4f} to {here[-1]:.4f}, at most {100 * apart:.3f} % from the CPU's")
    if apart > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main()
