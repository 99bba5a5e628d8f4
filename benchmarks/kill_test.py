"""Kill a training run with SIGKILL at random moments, many times, and check that nothing is lost.

    python benchmarks/kill_test.py --kills 50

A run under torchrun is killed (one random rank, or torchrun and every rank), also during saves, and restarted by the
same command with `--resume auto`. At the end metrics.jsonl must equal that of an undisturbed run: every step once,
bitwise equal losses. Exits with 1 if not.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent


def command(args: argparse.Namespace, folder: pathlib.Path, name: str) -> list[str]:
    interval = args.checkpoint_interval if name == "killed" else 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    flags = f"--demo --precision fp32 --sequence-length 64 --batch-size 1 --eval-interval 0 --log-interval 1 --lr 1e-3 \
        --num-steps {args.num_steps} --checkpoint-interval {interval} --resume auto --run-name {name}"
    return [*launch, str(ROOT / "train_fsdp.py"), *flags.split(), "--output-dir", str(folder)]


def logged_steps(path: pathlib.Path) -> list[dict]:
    """Return the logged steps, without the final line and lines that a kill cut off."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return [entry for entry in entries if "final" not in entry]


def saving(run: pathlib.Path) -> bool:
    return any((run / "checkpoints").glob(".step-*.writing"))


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> bool:
    """Wait for `condition`. Returns False if the process ends or the time is over before it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.002)
    return False


def kill_once(process: subprocess.Popen, run: pathlib.Path, choose: random.Random) -> dict | None:
    """Kill at a random moment of training; return None if the run ended before."""
    before = len(logged_steps(run / "metrics.jsonl"))
    if not wait_for(lambda: len(logged_steps(run / "metrics.jsonl")) != before, process):
        return None
    wait_for(lambda: False, process, choose.uniform(0, 3))
    if choose.random() < 0.5:  # aim at a save
        wait_for(lambda: saving(run), process, 10)
        time.sleep(choose.uniform(0, 0.1))
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = [p for p in psutil.Process(process.pid).children() if "train_fsdp.py" in " ".join(p.cmdline())]
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        if process.poll() is None and ranks:
            victims = everyone if choose.random() < 0.5 else [choose.choice(ranks)]
            during = saving(run)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            process.wait()
            psutil.wait_procs(everyone, timeout=60)
            return {"whole": len(victims) > 1, "during_save": during}
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=1500)
    parser.add_argument("--checkpoint-interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    choose, kills, lost = random.Random(args.seed), [], []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        run, reference = (pathlib.Path(folder, name) for name in ("killed", "whole"))
        while True:
            process = subprocess.Popen(command(args, run.parent, run.name), stdout=subprocess.PIPE, text=True)
            kill = kill_once(process, run, choose) if len(kills) < args.kills else None
            output = process.communicate()[0]
            if kill is None:
                if process.returncode:
                    sys.exit(f"the run failed by itself:\n{output}")
                break
            done = max((entry["step"] for entry in logged_steps(run / "metrics.jsonl")), default=0)
            complete = max((path.name for path in run.glob("checkpoints/step-*")), default="step-0")
            kills.append(kill)
            lost.append(done - int(complete.removeprefix("step-")))
            who, when = "all" if kill["whole"] else "one rank", "during a save" if kill["during_save"] else ""
            print(f"kill {len(kills):3}: {who:8} at step {done:5}  {when:13} {lost[-1]:3} steps to repeat", flush=True)
        subprocess.run(command(args, reference.parent, reference.name), check=True, stdout=subprocess.DEVNULL)
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
        survived, whole = (
            [[entry[key] for key in keys] for entry in logged_steps(path / "metrics.jsonl")]
            for path in (run, reference)
        )
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "kills": len(kills),
        "of_one_rank": sum(not kill["whole"] for kill in kills),
        "during_a_save": sum(kill["during_save"] for kill in kills),
        "steps_lost_at_most": max(lost, default=0),
        "checkpoint_interval": args.checkpoint_interval,
        "ranks": args.ranks,
        "steps": len(survived),
        "every_step_once": [entry[0] for entry in survived] == list(range(1, args.num_steps + 1)),
        "same_losses_to_the_bit": survived == whole,
        "final_loss": [survived[-1][1], whole[-1][1]],
    }
    print(json.dumps(result, indent=2))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(not (result["every_step_once"] and result["same_losses_to_the_bit"]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
