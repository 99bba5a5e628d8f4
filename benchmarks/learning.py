"""How fast AdamW and Muon learn: a sweep of learning rates, three seeds at the best one, and what a step costs.

    python benchmarks/bench.py learn                          the demo's text; one process, on a GPU where there is one
    python benchmarks/bench.py learn --text stories.jsonl     another text beside it
    python benchmarks/bench.py learn --steps 3000 --batch-size 32 --text stories.jsonl

Two sizes: the demo's model, and one of four times as many layers. Every run is a fresh process of
train_fsdp.py with a cosine schedule over all its steps. A sweep has five rates, a quarter of a decade apart; where the
best is the first or the last of them it goes on, until it is neither. The same command again adds what is missing.
"""

import argparse
import json
import math
import pathlib
import statistics
import tempfile

from running import ROOT, Config, RunError, code_hash, describe_machine, device_name, execute, now

OPTIMIZERS = ("adamw", "muon")
STEP = 0.25  # decades between two rates
CENTERS = {"demo": 4e-3, "demo, 16 layers": 2e-3}  # the middle of each sweep: the demo's own rate, and half of it
SEEDS = (42, 43, 44)
TIMED_STEPS, TIMED_ROUNDS = 40, 3


def learn(args: argparse.Namespace, file: pathlib.Path) -> None:
    """Runs what `file` lacks, and prints the tables."""
    results = json.loads(file.read_text()) if file.exists() else {"runs": [], "times": []}
    results |= {"suite": "learn", "rehearsal": args.rehearse, "machine": describe_machine()}
    results["command"] = "python benchmarks/bench.py learn " + " ".join(options_of(args))
    texts = {"the demo's stories": "demo"} | ({args.text.stem: str(args.text.resolve())} if args.text else {})
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        sweeps = Sweeps(args, file, results, work)
        for size in CENTERS:
            for text, dataset in texts.items():
                for optimizer in OPTIMIZERS:
                    sweeps.sweep(size, text, dataset, optimizer)
        for size in CENTERS:
            sweeps.time(size)
    print(tables(results))
    print(f"written to {file}")


def options_of(args: argparse.Namespace) -> list[str]:
    options = ["--steps", str(args.steps), "--batch-size", str(args.batch_size)]
    return options + (["--text", args.text.name] if args.text else [])


class Sweeps:
    """The runs of one command, each kept as it ends."""

    def __init__(self, args: argparse.Namespace, file: pathlib.Path, results: dict, work: pathlib.Path):
        self.args, self.file, self.results, self.work = args, file, results, work
        self.stamp = {"code": code_hash(), "on": device_name(args.rehearse)}
        for kind in ("runs", "times"):
            results[kind] = [run for run in results[kind] if self.stamp.items() <= run.items()]
        demo = json.loads((ROOT / "assets" / "demo" / "config.json").read_text())
        deeper = {"num_hidden_layers": 16, "no_rope_layers": 4 * demo["no_rope_layers"]}
        (work / "deeper").mkdir()
        (work / "deeper" / "config.json").write_text(json.dumps(demo | deeper))

    def flags(self, size: str, dataset: str, optimizer: str, rate: float, seed: int) -> dict:
        flags = {"model": "demo" if size == "demo" else "WORK/deeper", "tokenizer": "assets/demo", "dataset": dataset}
        flags |= {"cache_dir": "WORK/cache", "sequence_length": 256, "batch_size": self.args.batch_size}
        flags |= {"optimizer": optimizer, "lr": rate, "seed": seed, "log_interval": 10, "own_plan": False}
        return flags | {"num_steps": self.args.steps, "warmup_steps": self.args.steps // 20}

    def sweep(self, size: str, text: str, dataset: str, optimizer: str) -> None:
        """The rates with the first seed, further ones while the best is at an end, and the other seeds at the best."""
        ends = [-2, 2]
        losses: dict[int, float] = {}
        while True:
            for number in range(ends[0], ends[1] + 1):
                if number not in losses:
                    losses[number] = self.train(size, text, dataset, optimizer, number, SEEDS[0])
            best = min(losses, key=losses.get)
            if best == ends[0]:
                ends[0] -= 1
            elif best == ends[1]:
                ends[1] += 1
            else:
                break
        for seed in SEEDS[1:]:
            self.train(size, text, dataset, optimizer, best, seed)

    def train(self, size: str, text: str, dataset: str, optimizer: str, number: int, seed: int) -> float:
        """The held-out loss at the end of one run; infinite where it diverged."""
        rate = float(f"{CENTERS[size] * 10 ** (STEP * number):.3g}")
        identity = {"size": size, "text": text, "optimizer": optimizer, "lr": rate, "seed": seed}
        identity |= {"steps": self.args.steps, "batch_size": self.args.batch_size}
        for run in self.results["runs"]:
            if identity.items() <= run.items():
                return run["eval_loss"] or math.inf
        flags = self.flags(size, dataset, optimizer, rate, seed)
        flags |= {"eval_interval": max(1, self.args.steps // 10), "eval_steps": self.args.eval_steps}
        figures = self.execute(flags)
        run = identity | {"eval_loss": figures.get("eval_loss"), "error": figures.get("error")}
        run |= {"held_out": figures.get("held_out", []), "curve": figures.get("curve", [])}
        self.keep("runs", run | {"wall_s": figures.get("wall_s")})
        print(f"{size}, {text}, {optimizer}, lr {rate:g}, seed {seed}: {run['eval_loss'] or run['error']}", flush=True)
        return run["eval_loss"] or math.inf

    def time(self, size: str) -> None:
        """Milliseconds of a step of each optimizer, in turn."""
        for number in range(TIMED_ROUNDS):
            for optimizer in OPTIMIZERS:
                identity = {"size": size, "optimizer": optimizer, "round": number, "batch_size": self.args.batch_size}
                if any(identity.items() <= run.items() for run in self.results["times"]):
                    continue
                flags = self.flags(size, "demo", optimizer, CENTERS[size], SEEDS[0])
                figures = self.execute(flags | {"num_steps": min(TIMED_STEPS, self.args.steps), "perf_warmup_steps": 5})
                measured = {key: figures.get(key) for key in ("step_time_ms", "load")}
                self.keep("times", identity | measured)

    def execute(self, flags: dict) -> dict:
        try:
            return execute(Config("train_fsdp.py", flags), self.work, 1, 3600, self.args.rehearse)
        except RunError as error:
            return {"error": str(error)}

    def keep(self, kind: str, run: dict) -> None:
        self.results[kind].append(run | self.stamp | {"date": now()})
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# Telling


def runs_of(results: dict, **identity) -> list[dict]:
    return [run for run in results["runs"] if identity.items() <= run.items() and run["eval_loss"]]


def best_rate(runs: list[dict]) -> float:
    """The rate whose run with the first seed ends with the lowest held-out loss."""
    return min((run for run in runs if run["seed"] == SEEDS[0]), key=lambda run: run["eval_loss"])["lr"]


def tokens_until(run: dict, loss: float) -> float | None:
    """Tokens at which a run's held-out loss first is at most `loss`, on the line between its evaluations; None where it
    never is."""
    before = None
    for tokens, held_out in run["held_out"]:
        if held_out <= loss:
            if before is None:
                return tokens
            share = (before[1] - loss) / (before[1] - held_out)
            return before[0] + share * (tokens - before[0])
        before = (tokens, held_out)
    return None


def summary(results: dict) -> list[dict]:
    """For each size, text and optimizer its best rate, the losses of the seeds there, and how soon the median loss of
    AdamW is reached."""
    rows = []
    for size in CENTERS:
        for text in dict.fromkeys(run["text"] for run in results["runs"]):
            target = None
            for optimizer in OPTIMIZERS:
                runs = runs_of(results, size=size, text=text, optimizer=optimizer)
                if not runs:
                    continue
                rate = best_rate(runs)
                at_best = [run for run in runs if run["lr"] == rate]
                losses = sorted(run["eval_loss"] for run in at_best)
                target = target or statistics.median(losses)
                reached = [tokens_until(run, target) for run in at_best]
                if optimizer == OPTIMIZERS[0]:  # its own median, at the end of its runs
                    reached = [at_best[0]["held_out"][-1][0]]
                row = {"size": size, "text": text, "optimizer": optimizer, "lr": rate, "losses": losses}
                row |= {"tokens": at_best[0]["held_out"][-1][0], "reached": reached}
                row["step_ms"] = median_step(results, size, optimizer)
                rows.append(row)
    return rows


def median_step(results: dict, size: str, optimizer: str) -> float | None:
    """Milliseconds of a step; None where none was timed."""
    timed = [run for run in results["times"] if run["size"] == size and run["optimizer"] == optimizer]
    times = [run["step_time_ms"] for run in timed if run["step_time_ms"]]
    return statistics.median(times) if times else None


def tables(results: dict) -> str:
    """Two tables in Markdown: the sweep, and the seeds at the best rate."""
    lines = ["| size, text, optimizer | held-out loss by learning rate |", "|---|---|"]
    for row in summary(results):
        runs = runs_of(results, size=row["size"], text=row["text"], optimizer=row["optimizer"], seed=SEEDS[0])
        cells = [f"{run['lr']:g}: {run['eval_loss']:.3f}" for run in sorted(runs, key=lambda run: run["lr"])]
        lines.append(f"| {row['size']}, {row['text']}, {row['optimizer']} | {', '.join(cells)} |")
    lines += ["", "| size, text | optimizer | best rate | held-out loss of three seeds: median (least, most) | "]
    lines[-1] += "tokens to AdamW's median loss | ms a step | seconds to it |"
    lines.append("|---|---|---|---|---|---|---|")
    for row in summary(results):
        low, middle, high = row["losses"][0], statistics.median(row["losses"]), row["losses"][-1]
        reached = [tokens for tokens in row["reached"] if tokens]
        words, seconds = f"{len(reached)} of {len(row['reached'])} reach it", ""
        if len(reached) == len(row["reached"]):
            tokens = statistics.median(reached)
            words = f"{tokens:,.0f}, {tokens / row['tokens']:.2f} of all"
            if row["step_ms"]:
                seconds = f"{tokens * row['step_ms'] / 1e3 / tokens_of_step(results):,.0f}"
        step = f"{row['step_ms']:,.0f}" if row["step_ms"] else ""
        losses = f"{middle:.3f} ({low:.3f}, {high:.3f})"
        cells = [f"{row['size']}, {row['text']}", row["optimizer"], f"{row['lr']:g}", losses, words, step, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tokens_of_step(results: dict) -> int:
    return 256 * results["runs"][0]["batch_size"]
