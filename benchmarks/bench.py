"""Measure train_fsdp.py and other programs on a CPU, in fresh processes, in rounds. Prints a table, writes a JSON file.

    python benchmarks/bench.py cpu                     speed and start against a bare loop, as ratios
    python benchmarks/bench.py compare-cpu             against the programs in benchmarks/peers

Configurations run in rounds, A B C A B C, up to --repeats or --minutes. The same command again adds rounds: runs of the
same code, command and machine are kept. A configuration that fails is kept with its error line.
"""

import argparse
import fnmatch
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
from running import ROOT, Config, RunError, code_hash, describe_machine, execute, now, processor_name

RESULTS = ROOT / "benchmarks" / "results"
MIN_SECONDS_LEFT = 60  # a configuration that has not run yet starts only if so many are left


# ----------------------------------------------------------------------------------------------------------------------
# Suites. A part is (title, metric, pairs, configurations). A pair is (numerator, denominator, goal) and, for another
# metric than the part's, that metric.

DEMO = {"model": "demo", "dataset": "demo", "sequence_length": 256, "cache_dir": "WORK/cache", "log_interval": 1000}
BARE, TOKENS = "benchmarks/peers/bare_loop.py", {"tokens": "WORK/tokens.bin"}
SAME = {"model": "WORK/start"}  # the first weights that programs share
# Settings for the same steps as a peer's.
PLAIN = {"tokenizer": "assets/demo", "init": "pretrained", "lr": 3e-4, "lr_scheduler": "constant", "precision": "fp32"}
SAME_WAITING = {"GOMP_SPINCOUNT": "1000000"}  # as train_fsdp.py sets it on free cores (harness/job/host.py)


def harness() -> tuple:
    configs, pairs = {}, {}
    for batch, steps in ((32, 24), (8, 64)):
        size = {"sequence_length": 256, "batch_size": batch, "num_steps": steps, "perf_warmup_steps": 4}
        ours, bare = f"train_fsdp.py, batch {batch}", f"bare loop, batch {batch}"
        configs[bare] = Config(BARE, TOKENS | SAME | size)
        configs[ours] = Config("train_fsdp.py", DEMO | SAME | size | PLAIN, same_loss_as=bare)
        label = f"harness / bare loop, {batch * 256:,} tokens a step"
        pairs[f"{label}, steps/s"] = (ours, bare, "at least 0.97")
        pairs[f"{label}, CPU seconds"] = (ours, bare, "at most 1.03", "cpu_s")
    return "optimizer steps per second, demo model, fp32, one process", "steps_per_sec", pairs, configs


def start() -> tuple:
    one = DEMO | {"precision": "fp32", "num_steps": 1, "perf_warmup_steps": 0, "batch_size": 8}
    bare, cached, cold = "bare loop, tokens ready", "tokens cached", "tokens not cached"
    size = {"model": "demo", "sequence_length": 256, "batch_size": 8, "num_steps": 1, "perf_warmup_steps": 0}
    configs = {bare: Config(BARE, TOKENS | size)}
    configs[cached] = Config("train_fsdp.py", one)
    configs[cold] = Config("train_fsdp.py", one | {"cache_dir": "FRESH"})
    pairs = {}
    for seconds, key in (("seconds", "first_step_s"), ("CPU seconds", "cpu_s")):
        pairs[f"start / start of the bare loop, {seconds}"] = (cached, bare, "at most 1.3", key)
        pairs[f"start, tokens cached / not cached, {seconds}"] = (cached, cold, "under 1", key)
    return "seconds from command to the end of the first step, demo model", "first_step_s", pairs, configs


def peers_cpu(ranks: int, tokens: int, threads: int, optimizer: str) -> tuple:
    """The same weights, sequences, optimizer and steps in every program: fp32, eager, no data workers, the same number
    of threads and spinning. The last losses must agree; with several ranks their mean."""
    size = {"batch_size": tokens // 256 // ranks, "num_steps": 32768 // tokens + 12, "perf_warmup_steps": 4}
    size |= {"sequence_length": 256, "optimizer": optimizer}
    options = SAME | TOKENS | size | {"precision": "fp32", "compile": False}
    fabric, sharded = "benchmarks/peers/lightning_fabric.py", "benchmarks/peers/fully_shard_loop.py"
    replicas = {
        "Trainer": Config("benchmarks/peers/hf_trainer.py", options),
        "accelerate": Config("benchmarks/peers/accelerate_fsdp2.py", options),
        "Fabric, DDP": Config(fabric, options | {"strategy": "ddp"}),
    }
    shards = {
        "bare fully_shard": Config(sharded, options),
        "Fabric, FSDP2": Config(fabric, options | {"strategy": "fsdp2"}),
        "Trainer, FSDP2": Config("benchmarks/peers/hf_trainer.py", options | {"strategy": "fsdp2"}),
    }
    others = shards | replicas
    if ranks == 1:
        others = {"bare loop": Config(BARE, SAME | TOKENS | size)} | others
    ours = {"train_fsdp.py": Config("train_fsdp.py", DEMO | SAME | size | PLAIN)}
    if ranks > 1:
        for stage in (2, 0):
            ours[f"train_fsdp.py, stage {stage}"] = Config(
                "train_fsdp.py", DEMO | SAME | size | PLAIN | {"zero_stage": stage}
            )
    configs = others | ours
    reference = next(iter(configs))  # a bare loop
    for label, config in configs.items():
        config.ranks, config.same_loss_as = ranks, "" if label == reference else reference
        config.env = {"OMP_NUM_THREADS": str(threads)} | SAME_WAITING
    pairs = {f"train_fsdp.py / {other}": ("train_fsdp.py", other, "at least 1") for other in others}
    if ranks > 1:  # each against the stage with the same communication: Fabric keeps layers gathered
        alike = {"Fabric, FSDP2": 2} | dict.fromkeys(replicas, 0)
        for other, stage in alike.items():
            pairs[f"stage {stage} / {other}"] = (f"train_fsdp.py, stage {stage}", other, "at least 1")
    who = "one process" if ranks == 1 else f"{ranks} ranks"
    each = f"{threads} thread" + ("s" if threads > 1 else "") + (" each" if ranks > 1 else "")
    return f"demo model, {who}, {each}, {tokens:,} tokens a step, {optimizer}", "steps_per_sec", pairs, configs


def compare_cpu() -> dict[str, tuple]:
    parts, cores = {}, len(os.sched_getaffinity(0))
    for optimizer in ("adamw", "muon"):
        for tokens in (2048, 8192):
            parts[f"{optimizer}-process-{tokens}"] = peers_cpu(1, tokens, cores, optimizer)
            parts[f"{optimizer}-ranks-{tokens}"] = peers_cpu(2, tokens, max(1, cores // 2), optimizer)
    return parts


def find_parts(suite: str) -> dict[str, tuple]:
    return {"harness": harness(), "start": start()} if suite == "cpu" else compare_cpu()


# ----------------------------------------------------------------------------------------------------------------------
# Running


def prepare(work: pathlib.Path) -> None:
    """Write the files that the bare loop reads: the demo's tokens, and first weights, exported after a step with a
    learning rate too small to change them."""
    first = {"num_steps": 1, "lr": 1e-30, "precision": "fp32", "export": "WORK/start"}
    execute(Config("train_fsdp.py", DEMO | first), work, 900)
    os.link(next((work / "cache").glob("tokens-*/tokens.bin")), work / "tokens.bin")


SAME_LOSS = 1e-4  # relative tolerance for two programs with the same weights and steps in fp32


def check_loss(figures: dict, config: Config, entry: dict) -> None:
    """Raise RunError if the last loss is not that of the configuration that this run is compared with."""
    others = entry["configs"].get(config.same_loss_as, {"runs": []})["runs"]
    if others and not math.isclose(figures["loss"], others[-1]["loss"], rel_tol=SAME_LOSS):
        found = f"its last loss is {figures['loss']:.6f}, that of {config.same_loss_as} {others[-1]['loss']:.6f}"
        raise RunError(f"not compared: {found}; a difference above {SAME_LOSS} means other work")


def measure(name: str, part: tuple, args, store: dict, save) -> None:
    """Run a part's configurations in rounds; save after every run."""
    what, figure, pairs, configs = part
    entry = store.setdefault(name, {"configs": {}})
    entry |= {"what": what, "figure": figure, "pairs": pairs}
    wanted = {label: config for label, config in configs.items() if fnmatch.fnmatch(f"{name}/{label}", args.only)}
    began = now()
    here = {"code": code_hash(), "on": processor_name(), "threads": torch.get_num_threads()}
    stamps = {}
    for label, config in wanted.items():
        stamps[label] = here | {"ranks": config.ranks}
        old, command = entry["configs"].get(label, {}), config.command()
        kept = [r for r in old.get("runs", []) if old["command"] == command and stamps[label].items() <= r.items()]
        entry["configs"][label] = {"command": command, "runs": kept}
    entry["configs"] = {label: entry["configs"][label] for label in configs if label in entry["configs"]}
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        if any("WORK/" in word and "cache" not in word for config in wanted.values() for word in config.words()):
            prepare(work)
        for repeat in range(args.repeats):
            for label, config in wanted.items():
                result, left = entry["configs"][label], args.deadline - time.monotonic()
                if "error" in result or (result["runs"] and left < max(run["wall_s"] for run in result["runs"])):
                    continue
                try:
                    if left < MIN_SECONDS_LEFT and not result["runs"]:
                        raise RunError("not run: --minutes are over")
                    figures = execute(config, work, left)
                    check_loss(figures, config, entry)
                    result["runs"].append(figures | stamps[label] | {"date": now(), "round": f"{began}, {repeat}"})
                    text = f"{figures.get(figure, math.nan):,.4g}"
                except RunError as error:
                    text = result["error"] = str(error)
                print(f"{name} {repeat + 1}/{args.repeats}  {label}: {text}", flush=True)
                save()


# ----------------------------------------------------------------------------------------------------------------------
# Results


def ratios(entry: dict, above: str, below: str, goal: str, key: str = "") -> list[float]:
    """Divide one configuration's metric by another's in each round, or their medians if they share no round. `key` is
    the metric, by default the part's."""
    key = key or entry["figure"]
    runs = [entry["configs"].get(name, {"runs": []})["runs"] for name in (above, below)]
    a, b = ({run["round"]: run[key] for run in side} for side in runs)
    common = [a[name] / b[name] for name in a if name in b]
    return common or ([statistics.median(a.values()) / statistics.median(b.values())] if a and b else [])


def median_and_spread(values: list[float], digits: int = 4) -> str:
    """Format the median, with minimum and maximum in brackets if they differ in these digits."""
    form = ",.0f" if max(values) >= 1000 else f".{digits}g"
    low, middle, high = (f"{value:{form}}" for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} [{low} to {high}]"


COLUMNS = {
    "step ms": "step_time_ms",
    "loss": "loss",
    "first step s": "first_step_s",
    "CPU s": "cpu_s",
    "process GiB": "peak_process_gib",
}


def table(entry: dict) -> str:
    """Format a part as Markdown: medians with minimum and maximum, then the ratios."""
    figure = entry["figure"]
    runs = [run for config in entry["configs"].values() for run in config["runs"]]
    columns = {title: key for title, key in COLUMNS.items() if key != figure and any(key in run for run in runs)}
    title = figure.replace("_per_sec", "/s").replace("_per_gpu", "/GPU").replace("_", " ")
    rows = [["", title, *columns, "runs"]]
    for name, config in entry["configs"].items():
        cells = []
        for key in (figure, *columns.values()):
            values = [run[key] for run in config["runs"] if key in run]
            digits = {figure: 4, "loss": 5}.get(key, 3)
            cells.append(median_and_spread(values, digits) if values else "")
        cells[0] = cells[0] or config.get("error", "-")
        rows.append([name, *cells, str(len(config["runs"]))])
    for label, pair in entry["pairs"].items():
        if values := ratios(entry, *pair):
            rows.append([label, f"{median_and_spread(values)} ({pair[2]})", *[""] * (len(rows[0]) - 2)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["cpu", "compare-cpu"])
    parser.add_argument("--only", default="*", help="PART, or PART/CONFIGURATION with * and ?")
    parser.add_argument("--repeats", type=int, help="rounds [3; 5 of compare-cpu]")
    parser.add_argument("--minutes", type=float, default=8.5, help="no run starts or continues after these [8.5]")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON [benchmarks/results]")
    args = parser.parse_args()
    args.deadline = time.monotonic() + 60 * args.minutes
    args.repeats = args.repeats or (3 if args.suite == "cpu" else 5)
    if "/" not in args.only:
        args.only += "/*"
    args.out.mkdir(parents=True, exist_ok=True)
    run_suite(args, args.out / f"{args.suite}.json")


def run_suite(args, file: pathlib.Path) -> None:
    parts, wanted = find_parts(args.suite), args.only.partition("/")[0]
    if not fnmatch.filter(parts, wanted):
        sys.exit(f"bench.py: error: --only {wanted}: {args.suite} has {', '.join(parts)}")
    results = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    results |= {"suite": args.suite, "machine": describe_machine()}
    results["command"] = " ".join(["python", *sys.argv])

    def save() -> None:
        file.write_text(json.dumps(results, indent=1) + "\n")

    for name in fnmatch.filter(parts, wanted):
        measure(name, parts[name], args, results["parts"], save)
        save()
        print(f"\n{name}: {parts[name][0]}\n\n{table(results['parts'][name])}\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
