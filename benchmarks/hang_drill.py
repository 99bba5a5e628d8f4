"""Stops one rank of a run and looks whether the others name it and end.

python benchmarks/hang_drill.py --ranks 2
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MINUTES = 0.3  # that ranks wait for each other
FLAGS = f"--demo --num-steps 1000000 --log-interval 1 --eval-interval 0 --timeout-minutes {MINUTES}"
PATIENCE = 300  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *TORCHRUN,
            f"--nproc_per_node={args.ranks}",
            str(ROOT / "train_fsdp.py"),
            *FLAGS.split(),
            "--output-dir",
            folder,
        ]
        job = subprocess.Popen(
            [*command, "--run-name", "r"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        metrics, deadline = pathlib.Path(folder, "r", "metrics.jsonl"), time.monotonic() + PATIENCE
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            if job.poll() is not None or time.monotonic() > deadline:
                job.kill()
                sys.exit(f"no step was taken: {job.communicate()[1][-2000:]}")
            time.sleep(0.2)
        ranks = [child for child in psutil.Process(job.pid).children() if child.environ().get("RANK")]
        victim = next(child for child in ranks if child.environ()["RANK"] == str(args.ranks - 1))
        os.kill(victim.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            _, said = job.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            for process in (*ranks, job):
                process.kill()
            sys.exit(f"still there {PATIENCE} s after a rank was stopped")
    (line, *_) = [*re.findall("train_fsdp.py: error: .*", said), "no line"]
    print(f"after {time.monotonic() - stopped:.0f} s: {line}")
    if f"rank {args.ranks - 1} (" not in line or psutil.pid_exists(victim.pid):
        sys.exit(1)


if __name__ == "__main__":
    main()
