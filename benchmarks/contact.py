"""Runs on a GPU what was not measured yet, most important first, in as many calls as it takes.

    python benchmarks/contact.py --out contact --minutes 9.5            starts, or continues after the last call
    python benchmarks/contact.py --out contact --only 'tests,runs/*'    some steps
    python benchmarks/contact.py --rehearse --only 'tests,runs/*'       the same path with tiny models on the CPU

Each step is a process: versions, the GPU tests, RUNS, other programs, an optimizer against its losses on the CPU, ten
kills; on several GPUs also parity of stages, HSDP and offload, and runs of all of them. contact.json has the state of
each step, contact.log its output. A later call runs what is not done, last the steps that ran out of time; to continue
on another machine, copy the folder.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import bench
import psutil

ROOT = bench.ROOT
STATE, LOG = "contact.json", "contact.log"


class Step(NamedTuple):
    name: str
    minutes: float  # a step starts only if this much time is left; it may take all of it
    words: list[str]  # arguments of Python; OUT is the folder
    run: str = ""  # name of the run of train_fsdp.py whose metrics it reports


# SmolLM3-3B at 8,192 tokens on one GPU: 35 s of an H200 at batch 1, 20 of them to import, build and compile.
ACCUMULATED = "--batch-size 2 --gradient-accumulation-steps 4 --zero-stage 1 --num-steps 10"
RUNS = {
    "bf16": "",
    "bf16-torchs-adamw": "",
    "bf16-fsdp2-copies": "",
    "bf16-accumulated": ACCUMULATED,
    "flash-attention-4": "--attention flash_attention_4",
    "flash-attention-3": "--attention flash_attention_3",
    "muon": "--optimizer muon --profile",
    "fp8": "--precision fp8 --profile",
    "fp8-accumulated": f"--precision fp8 {ACCUMULATED}",
    "fp8-rowwise": "--precision fp8 --fp8-recipe rowwise",
    "adamw-bf16": "--optimizer adamw-bf16",
    "8b-base": "--model llama3.1-8b --precision bf16-pure --num-steps 1 --sequence-length 512 --export OUT/8b",
    "8b-lora": "--model OUT/8b --init pretrained --lora-rank 16 --activation-checkpointing selective --num-steps 12",
    "save": "--num-steps 16 --checkpoint-interval 8 --keep-checkpoints 1",  # in the background with torch 2.13
    "65k": "--sequence-length 65536 --activation-checkpointing full --num-steps 10",
    "1b-short": "--model llama3.2-1b --sequence-length 2048",  # the host bounds a step
    "full-offload": "--activation-checkpointing full --cpu-offload --num-steps 10",
    "16k": "--sequence-length 16384",
    "documents": "--document-mask --dataset demo --tokenizer assets/demo --cache-dir OUT/cache --eval-interval 0",
}
VARIANTS = {"bf16-torchs-adamw": "torchs-adamw", "bf16-fsdp2-copies": "fsdp2-copies"}
SEVERAL_GPUS = {  # NCCL's share of a step is in the profile
    "stage-2": "--zero-stage 2 --profile",
    "stage-3": "--zero-stage 3 --profile",
    "hsdp": "--dp-replicate-size 2",
}
TRAINER = "--no-liger --num-steps 12 --perf-warmup-steps 4"


def steps(gpus: int, rehearse: bool) -> list[Step]:
    """All steps, most important first."""
    tests = ["-m", "pytest", "tests/pair/test_gpu.py", "-m", "gpu", "-s", "-rs", "-p", "no:cacheprovider"]
    versions = "import sys; from harness import base; print(sys.version.split()[0], base.package_versions())"
    parity = ["benchmarks/beside_cpu.py", "--ranks", str(gpus), "--"]
    kills = ["benchmarks/kill_test.py", "--kills", "10", "--ranks", str(gpus), "--json", "OUT/kills"]
    found = [Step("versions", 0.2, ["-c", versions]), Step("tests", 2, tests)]
    if gpus > 1:
        found += [Step(f"parity/stage-{stage}", 1, [*parity, "--zero-stage", str(stage)]) for stage in range(4)]
        found += [Step("parity/hsdp", 1, [*parity, "--dp-replicate-size", str(gpus)])]
        found += [Step("parity/offload", 1, [*parity, "--cpu-offload"])]
        found += [run_step(name, flags, rehearse, gpus) for name, flags in SEVERAL_GPUS.items()]
    found += [run_step(name, flags, rehearse) for name, flags in RUNS.items()]
    small = ["--model", "demo", "--sequence-length", "64", "--no-compile"] if rehearse else []
    for peer, flags in (("accelerate_fsdp2", TRAINER.removeprefix("--no-liger ")), ("hf_trainer", TRAINER)):
        found.append(Step(f"peers/{peer}", 1.5, [f"benchmarks/peers/{peer}.py", *flags.split(), *small]))
    for name in ("muon", "adamw8bit"):
        found.append(Step(f"optimizers/{name}", 1, ["benchmarks/beside_cpu.py", "--", "--optimizer", name]))
    return [*found, Step("kills", 3, kills)]


def run_step(name: str, flags: str, rehearse: bool, ranks: int = 1) -> Step:
    shape = "--model smollm3-3b --sequence-length 8192 --dataset synthetic --num-steps 20 --log-interval 4"
    fixed = "--perf-warmup-steps 4 --no-own-plan --no-final-checkpoint --output-dir OUT/runs"
    program = ["benchmarks/variants.py", VARIANTS[name]] if name in VARIANTS else ["train_fsdp.py"]
    if ranks > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *program]
    words = [*program, *shape.split(), *fixed.split(), *flags.split(), "--run-name", name]
    if rehearse:  # a flag that is given twice has its last value
        small = "--sequence-length 64 --num-steps 8 --no-compile --log-interval 2"
        if "OUT/8b" not in flags.replace("--export OUT/8b", ""):
            small += " --model demo"
        words += small.split()
        if "fp8" in flags:
            words.append("--fp8-emulate")
    return Step(f"runs/{name}", 0.9, words, name)


def perform(step: Step, out: pathlib.Path, seconds: float, rehearse: bool) -> tuple[str, str]:
    """Run a step for at most `seconds`. Returns (done, failed or timed out; its metrics or last line)."""
    words = [sys.executable, *(word.replace("OUT", str(out)) for word in step.words)]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if rehearse:
        env |= {"CUDA_VISIBLE_DEVICES": "", "REHEARSE_GPU_TESTS": "1"}
    with (out / LOG).open("a+") as log:
        print(f"\n==== {step.name}: {' '.join(words)}", file=log, flush=True)
        start = log.tell()
        process = psutil.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(seconds)
        except psutil.TimeoutExpired:
            return "timed out", f"not done within {seconds:.0f} s"
        finally:
            kill_with_children(process)
        log.seek(start)
        printed = [line for line in log.read().splitlines() if line.strip()]
    if step.run and code == 0:
        return "done", run_metrics(out / "runs" / step.run)
    last_line = (printed or [f"exit code {code}"])[-1]
    return ("done" if code == 0 else "failed"), last_line[:160]


def kill_with_children(process: psutil.Popen) -> None:
    """Kill a step's process, if it still runs, and its descendants, which hold the GPU."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in [*process.children(recursive=True), process]:
            child.kill()
    process.wait()


def run_metrics(folder: pathlib.Path) -> str:
    """Last speed, median step time and memory of a run of train_fsdp.py."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_time_ms" in line and "final" not in line]
    texts = [f"{timed[-1]['tokens_per_sec']:,.0f} tokens/s at the end"]
    texts.append(f"{statistics.median(line['step_time_ms'] for line in timed):.1f} ms a step (median of the lines)")
    for key, unit in (("mfu_percent", "% MFU"), ("peak_memory_alloc", "GiB"), ("peak_memory_reserved", "GiB reserved")):
        if key in timed[-1]:
            texts.append(f"{timed[-1][key]:.2f} {unit}")
    return ", ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="output folder [contact; a temporary one with --rehearse]")
    parser.add_argument("--minutes", type=float, default=9.5, help="length of this call [9.5]")
    parser.add_argument("--only", default="*", help="steps, comma-separated, with * and ? [all]")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    out = (args.out or pathlib.Path(tempfile.mkdtemp(prefix="contact-") if args.rehearse else "contact")).resolve()
    if not (args.rehearse or bench.torch.cuda.is_available()):
        parser.error("there is no GPU; --rehearse takes the same path on the CPU")
    if out.is_relative_to(bench.RESULTS):
        parser.error(f"--out: {bench.RESULTS} is for reviewed results; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    state = json.loads((out / STATE).read_text()) if (out / STATE).exists() else {}
    found = steps(1 if args.rehearse else max(1, bench.torch.cuda.device_count()), args.rehearse)
    chosen = [step for step in found if any(fnmatch.fnmatch(step.name, pattern) for pattern in args.only.split(","))]
    for step in sorted(chosen, key=lambda step: step.name in state):
        left = deadline - time.monotonic()
        if state.get(step.name, {}).get("state") in ("done", "failed") or left < 60 * step.minutes:
            continue
        print(f"{step.name} ...", flush=True)
        result, text = perform(step, out, left - 5, args.rehearse)
        state[step.name] = {"state": result, "text": text}
        (out / STATE).write_text(json.dumps(state, indent=1) + "\n")
        print(f"{step.name}: {result}, {text}", flush=True)
    left_out = [step.name for step in chosen if state.get(step.name, {}).get("state") not in ("done", "failed")]
    print(f"\nnot done: {', '.join(left_out) or 'none'}\nin {out}")


if __name__ == "__main__":
    main()
