"""Whether another commit trains exactly as this one: the losses of five runs, and a checkpoint of it that this resumes.

    python benchmarks/same_losses.py COMMIT [--only NAME]

The commit is checked out beside this tree. Every loss, gradient norm and held-out loss has to be the same float; the
checkpoint is written by two ranks of that commit and goes on here in one. Ends with 1 where a figure differs.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURES = ("loss", "grad_norm", "eval_loss")
SMALL = "--demo --precision bf16 --sequence-length 64 --batch-size 2 --log-interval 1 --perf-warmup-steps 1 \
--sample-tokens 2"

# Name: for each start of the run its number of ranks and its flags.
RUNS = {
    "one process, fp32": [(1, "--precision fp32 --num-steps 6 --eval-interval 3")],
    "two ranks, bf16, compiled": [(2, "--precision bf16 --compile --num-steps 4")],
    "four ranks, HSDP, accumulation": [(4, "--dp-replicate-size 2 --gradient-accumulation-steps 2 --num-steps 4")],
    "two ranks, streaming, document mask": [(2, "--streaming --document-mask --num-steps 4")],
    "fp8 emulated, resumed": [
        (1, "--precision fp8 --fp8-emulate --num-steps 6 --checkpoint-interval 3 --lr-scheduler constant"),
        (1, "--precision fp8 --fp8-emulate --num-steps 9 --resume auto --lr-scheduler constant"),
    ],
}
# Flags of this tree alone, that ask for what was the only way before there was the flag.
ONLY_HERE = {"two ranks, streaming, document mask": "--streams 1"}
CONSTANT = "--precision fp32 --lr-scheduler constant"
SAVED = (2, f"{CONSTANT} --num-steps 3")
RESUMED = (1, f"{CONSTANT} --num-steps 6 --batch-size 4 --resume auto")


def start(tree: pathlib.Path, folder: pathlib.Path, ranks: int, flags: str) -> None:
    """One start of a run in `folder` by the program in `tree`.

    Raises:
        SystemExit: it did not end with 0.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    where = ["--output-dir", str(folder.parent), "--run-name", folder.name, "--cache-dir", str(folder.parent / "cache")]
    command = [*launcher, str(tree / "train_fsdp.py"), *SMALL.split(), *flags.split(), *where]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def figures_of(folder: pathlib.Path) -> list[dict]:
    """The figures of each logged step that have to be the same."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", *FIGURES) if key in line} for line in lines]


def compare(name: str, theirs: list[dict], ours: list[dict]) -> bool:
    same = theirs == ours
    print(f"{name:40} {'the same' if same else 'DIFFERS'}   last loss {theirs[-1]['loss']!r}", flush=True)
    if not same:
        for before, after in zip(theirs, ours, strict=False):
            if before != after:
                print(f"  was {before}\n  is  {after}")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--only", default="", help="runs whose name begins so")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        other = pathlib.Path(temporary, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(other), args.commit], check=True)
        same = True
        try:
            trees = {"theirs": other, "ours": ROOT}
            for number, (name, starts) in enumerate(RUNS.items()):
                if not name.startswith(args.only):
                    continue
                found = []
                for side, tree in trees.items():
                    folder = pathlib.Path(temporary, side, f"run-{number}")
                    more = ONLY_HERE.get(name, "") if tree == ROOT else ""
                    for ranks, flags in starts:
                        start(tree, folder, ranks, f"{flags} {more}")
                    found.append(figures_of(folder))
                same &= compare(name, *found)
            name = "their checkpoint of two ranks, on one"
            if name.startswith(args.only):
                found = []
                for side, tree in trees.items():
                    folder = pathlib.Path(temporary, side, "resumed")
                    start(other, folder, *SAVED)
                    start(tree, folder, *RESUMED)
                    found.append(figures_of(folder))
                same &= compare(name, *found)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
