"""Everything that waits for a GPU, in the order of its worth, in as many calls as it takes.

    python benchmarks/contact.py --out contact --minutes 9.5            begins, or goes on where the last call ended
    python benchmarks/contact.py --out contact --resume earlier/contact goes on from the files of a call elsewhere
    python benchmarks/contact.py --out contact --only 'tests,ladder*'   some of it
    python benchmarks/contact.py --rehearse --only 'tests,ladder*'      the same path with tiny models on the CPU

Every step is a process of its own: versions and the GPU tests (under two minutes); on several GPUs parity over stages,
HSDP and offload, and drills that kill a rank; what was mended or never measured on one (RUNS, about half a
minute each), other programs, every optimizer beside its losses on the CPU, ten kills; then each configuration of
`bench.py`. What became of it is in contact.json before the next one begins, what it printed in
contact.log, figures in the JSON files of `bench.py`. A step that is cut off by the minutes, or by a kill of this
program, is tried once more by the next call.
What lacks a package, or data that would need one, is left out and listed so.
"""

import argparse
import contextlib
import fnmatch
import glob
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import NamedTuple

import bench
import psutil

ROOT = bench.ROOT
OPTIMIZERS = [path.stem.replace("_", "-") for path in sorted((ROOT / "harness/model/optimizers").glob("[a-z]*.py"))]
STATE, LOG = "contact.json", "contact.log"
TRIES = 2
MARK = "CONTACT_STEP_OF"  # in the environment of every process of a step: the folder


class Step(NamedTuple):
    name: str
    minutes: float  # that must be left for it to begin; it may take all that is left
    words: list[str]  # of the command; OUT is the folder
    needs: tuple[str, ...] = ()  # packages
    suite: str = ""  # the one of bench.py that it belongs to
    run: str = ""  # the run of train_fsdp.py whose lines it reads


# SmolLM3-3B at 8,192 tokens on one GPU: first what none has measured, then what one has (results/plan_measured.json).
# A run takes about 20 s to import, build and compile, and then its steps: 35 s of an H200 at batch 1.
ACCUMULATED = "--batch-size 2 --gradient-accumulation-steps 4 --zero-stage 1 --num-steps 10"
RUNS = {
    "bf16": "",
    "bf16-compiled-adamw": "",
    "full": "--activation-checkpointing full",
    "full-offload": "--activation-checkpointing full --cpu-offload --num-steps 10",
    "16k": "--sequence-length 16384",
    "65k": "--sequence-length 65536 --activation-checkpointing full --num-steps 10",
    "1b-short": "--model llama3.2-1b --sequence-length 2048",  # where the host bounds a step
    "fp8": "--precision fp8 --profile",
    "fp8-rowwise": "--precision fp8 --fp8-recipe rowwise",
    "fp8-accumulated": f"--precision fp8 {ACCUMULATED}",
    "bf16-accumulated": ACCUMULATED,
    "bf16-fsdp2-copies": "",
    "muon": "--optimizer muon --profile",
    "selective": "--activation-checkpointing selective",
    "32k": "--sequence-length 32768 --activation-checkpointing selective --num-steps 12",
    "8b-selective": "--model llama3.1-8b --precision bf16-pure --sequence-length 4096 --batch-size 4 "
    "--activation-checkpointing selective --num-steps 12 --profile",
    "documents": "--document-mask --dataset demo --tokenizer assets/demo --cache-dir OUT/cache --eval-interval 0",
}
PROGRAMS = {"bf16-compiled-adamw": "benchmarks/compiled_adamw.py", "bf16-fsdp2-copies": "benchmarks/without_aliases.py"}


def steps(gpus: int, rehearse: bool) -> list[Step]:
    """All of them, what matters most first."""
    tests = ["-m", "pytest", "tests/pair/test_gpu.py", "-m", "gpu", "-s", "-rs", "-p", "no:cacheprovider"]
    beside = ["benchmarks/beside_cpu.py", "--ranks"]
    shown = "import sys; from harness import base; print(sys.version.split()[0], base.package_versions())"
    found = [Step("versions", 0.2, ["-c", shown]), Step("tests", 2, tests, ("pytest",))]
    found += bench_steps("compare", "peers", gpus, rehearse)
    found += [run_of(name, flags, rehearse) for name, flags in RUNS.items()]
    for name in OPTIMIZERS:
        needs = ("torchao",) if name == "adamw8bit" else ()
        found.append(Step(f"optimizers/{name}", 1, [*beside, "1", "--", "--optimizer", name], needs))
    found.append(Step("kills", 3, ["benchmarks/kill_test.py", "--kills", "10", "--ranks", "1", "--json", "OUT/kills"]))
    if gpus > 1:
        found[2:2] = several_gpus(gpus, rehearse)
    for part in ("ladder", "loss", "scale", "memory", "ranks"):
        found += bench_steps("gpu", part, gpus, rehearse)
    return found


def run_of(name: str, flags: str, rehearse: bool) -> Step:
    shape = "--model smollm3-3b --sequence-length 8192 --dataset synthetic --num-steps 20 --log-interval 4"
    fixed = "--perf-warmup-steps 4 --no-own-plan --no-final-checkpoint --output-dir OUT/runs"
    words = [PROGRAMS.get(name, "train_fsdp.py"), *shape.split(), *fixed.split(), *flags.split(), "--run-name", name]
    if rehearse:  # the last one counts; float8 is emulated there
        small = "--model demo --sequence-length 64 --num-steps 8 --no-compile --log-interval 2"
        words += [*small.split(), *["--fp8-emulate"] * ("fp8" in flags)]
    return Step(f"runs/{name}", 0.9, words, ("torchao",) if "fp8" in flags else (), run=name)


def several_gpus(gpus: int, rehearse: bool) -> list[Step]:
    """What NCCL has a part in."""
    ways = {f"stage-{stage}": ["--zero-stage", str(stage)] for stage in range(4)}
    if gpus % 2 == 0:
        ways["hsdp"] = ["--dp-replicate-size", "2"]
    ways["offload"] = ["--cpu-offload"]
    beside = ["benchmarks/beside_cpu.py", "--ranks", str(gpus), "--"]
    found = [Step(f"parity/{name}", 1, [*beside, *flags]) for name, flags in ways.items()]
    found.append(Step("drills/kills", 5, ["benchmarks/kill_test.py", "--kills", "3", "--ranks", str(gpus)]))
    if not rehearse:  # a CPU has no symmetric memory
        program = ["-m", "torch.distributed.run", f"--nproc_per_node={gpus}", "benchmarks/symmetric_memory.py"]
        run = "--model smollm3-3b --dataset synthetic --num-steps 30 --run-name symmetric-memory --output-dir OUT"
        found.append(Step("symmetric-memory", 2, [*program, *run.split()]))
    return found


def bench_steps(suite: str, part: str, gpus: int, rehearse: bool) -> list[Step]:
    """The configurations of a part of bench.py, each by itself."""
    found = []
    configs = bench.parts_of(suite, gpus).get(part, ((),) * 4)[3] or {}
    for label, config in configs.items():
        words = ["benchmarks/bench.py", suite, "--only", f"{part}/{glob.escape(label)}", "--repeats", "1"]
        words += ["--gpus", str(gpus), "--out", "OUT", *["--rehearse"] * rehearse]
        package = bench.PEERS.get(pathlib.Path(config.program).stem)
        needs = [package] if package else []
        needs += ["liger_kernel"] * ("Liger" in label)
        needs += ["torchao"] * (config.flags.get("precision") == "fp8" or "8bit" in str(config.flags))
        found.append(Step(f"{part}/{label}", 0.9, words, tuple(needs), suite))
    return found


def perform(step: Step, out: pathlib.Path, seconds: float, rehearse: bool) -> tuple[str, str]:
    """(done, failed or cut off; what there is to say), after at most `seconds`."""
    words = [sys.executable, *(word.replace("OUT", str(out)) for word in step.words)]
    words += ["--minutes", f"{seconds / 60 - 0.1:.2f}"] if step.suite else []
    env = os.environ | {"PYTHONUNBUFFERED": "1", MARK: str(out)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "REHEARSE_GPU_TESTS": "1"} if rehearse else {}
    with (out / LOG).open("a+") as log:
        print(f"\n==== {step.name}: {' '.join(words)}", file=log, flush=True)
        start = log.tell()
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "cut off", f"not done within {seconds:.0f} s"
        finally:
            end_what_is_left(out)
            process.wait()
        log.seek(start)
        printed = [line for line in log.read().splitlines() if line.strip()]
    if step.suite:
        return figures(step, out)
    if step.run and code == 0:
        return "done", run_figures(out / "runs" / step.run)
    said = (printed or [f"exit code {code}"])[-1]
    return ("done" if code == 0 else "failed"), said[:160]


def end_what_is_left(out: pathlib.Path) -> None:
    """Ends the processes of a step, and those that an earlier call left when it was killed: they hold the GPU."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == str(out):
                process.kill()


def run_figures(folder: pathlib.Path) -> str:
    """Of a run of train_fsdp.py: the speed of its last log line, the median of all, and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_time_ms" in line and "final" not in line]
    said = [f"{timed[-1]['tokens_per_sec']:,.0f} tokens/s at the end"]
    said.append(f"{statistics.median(line['step_time_ms'] for line in timed):.1f} ms a step (median of the lines)")
    for key, unit in (("mfu_percent", "% MFU"), ("peak_memory_alloc", "GiB"), ("peak_memory_reserved", "GiB held")):
        if key in timed[-1]:
            said.append(f"{timed[-1][key]:.2f} {unit}")
    return ", ".join(said)


def figures(step: Step, out: pathlib.Path) -> tuple[str, str]:
    """What bench.py wrote of a configuration."""
    part, _, label = step.name.partition("/")
    try:
        part = json.loads((out / f"{step.suite}.json").read_text())["parts"][part]
        config = part["configs"][label]
    except (OSError, KeyError, ValueError):
        return "failed", f"bench.py wrote nothing, see {LOG}"
    if "error" in config:
        late = config["error"].startswith(("did not end within", "not run: the --minutes"))
        return "cut off" if late else "failed", config["error"][:160]
    run = config["runs"][-1]
    said = [f"{run[part['figure']]:,.5g} {part['figure']}"]
    said += [f"{run[key]:.4g} {title}" for title, key in bench.COLUMNS.items() if key in run and key != part["figure"]]
    if predicted := config["predicted"].get(part["figure"]):
        said.append(f"predicted {predicted:,}")
    return "done", ", ".join(said)


def summary(found: list[Step], state: dict) -> str:
    rows = [["step", "state", "s", "what it said"]]
    for step in found:
        entry = state.get(step.name, {"state": "left"})
        seconds = f"{entry['seconds']:.0f}" if "seconds" in entry else ""
        rows.append([step.name, entry["state"], seconds, entry.get("said", "")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    counts = {name: sum(row[1] == name for row in rows[1:]) for name in dict.fromkeys(row[1] for row in rows[1:])}
    return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder of all that it writes [contact; a temporary one]")
    parser.add_argument("--resume", type=pathlib.Path, help="the --out of an earlier call, to go on from")
    parser.add_argument("--minutes", type=float, default=9.5, help="after these this call ends [9.5]")
    parser.add_argument("--only", default="*", help="steps, comma-separated, with * and ? [all]")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    out = (args.out or pathlib.Path(tempfile.mkdtemp(prefix="contact-") if args.rehearse else "contact")).resolve()
    if not (args.rehearse or bench.torch.cuda.is_available()):
        parser.error("there is no GPU; --rehearse takes the same path on the CPU")
    if out.is_relative_to(bench.RESULTS):
        parser.error(f"--out: {bench.RESULTS} is for figures that were looked at; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    end_what_is_left(out)
    if args.resume and not (out / STATE).exists():
        if not (args.resume / STATE).is_file():
            parser.error(f"--resume {args.resume}: there is no {STATE}")
        shutil.copytree(args.resume, out, dirs_exist_ok=True, copy_function=shutil.copyfile)
    state = json.loads((out / STATE).read_text()) if (out / STATE).exists() else {}
    # SIGTERM too ends the step at work before this program
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def note(name: str, **entry) -> None:
        state[name] = entry
        (out / f".{STATE}").write_text(json.dumps(state, indent=1) + "\n")
        (out / f".{STATE}").replace(out / STATE)

    found = steps(1 if args.rehearse else max(1, bench.torch.cuda.device_count()), args.rehearse)
    chosen = [step for step in found if any(fnmatch.fnmatch(step.name, pattern) for pattern in args.only.split(","))]
    lacking = dict.fromkeys(package for step in chosen for package in step.needs if not find_spec(package))
    if lacking:
        print(f"not installed: {', '.join(lacking)}; what needs it is left out", flush=True)
    for step in chosen:
        before = state.get(step.name, {"state": "left", "tries": 0})
        left, tries = deadline - time.monotonic(), before.get("tries", 0)
        if before["state"] in ("done", "failed") or tries >= TRIES:
            continue
        if missing := [package for package in step.needs if not find_spec(package)]:
            note(step.name, state="left out", said=f"not installed: {', '.join(missing)}")
            continue
        if left < 60 * step.minutes:
            continue
        note(step.name, state="cut off", tries=tries + 1, said="by a kill of this program")  # unless it ends
        print(f"{step.name} ...", flush=True)
        began = time.monotonic()
        became, said = perform(step, out, left - 5, args.rehearse)
        note(step.name, state=became, tries=tries + 1, seconds=round(time.monotonic() - began, 1), said=said)
        print(f"{step.name}: {became}, {said}", flush=True)
    print(f"\n{summary(found, state)}\nin {out}")


if __name__ == "__main__":
    main()
