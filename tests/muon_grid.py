"""Muon and NorMuon on every kind of sharding beside a plain reference in one process: the worst relative difference of
20 losses, for each combination of ranks, ZeRO stage, replicas, accumulation and offloading.

    python tests/muon_grid.py

The reference is that of tests/muonranks.py: torch.optim.Muon over whole matrices; with fp32 iterations torch's formula
without its cast to bf16. Writes benchmarks/results/muon_grid.json after each world. `--ranks 4` runs one of them, and
keeps the others there that the same versions gave.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest
import muonranks
import torch
import transformers

RANKS = (1, 2, 3, 4, 8)
RESULTS = ROOT / "benchmarks" / "results" / "muon_grid.json"
LIMITS = {"fp32": 1e-5, "bf16": 1e-4}
# What is run at 4 ranks beside the whole grid of the model of which nothing divides.
KINDS = {
    "normuon": ("uneven", "--optimizer normuon", ""),
    "normuon, original scale": ("uneven", "--optimizer normuon --muon-scale original", ""),
    "original scale": ("uneven", "--optimizer muon --muon-scale original", ""),
    "polar express": ("uneven", "--optimizer muon --muon-iteration polar-express", ""),
    "frozen projections": ("uneven", "--optimizer muon", "gate_proj"),
    "sizes that divide": ("llama", "--optimizer muon", ""),
    "fused projections": ("fused", "--optimizer muon", ""),
    "fused projections, normuon": ("fused", "--optimizer normuon", ""),
    "experts": ("experts", "--optimizer muon", ""),
    "experts, normuon": ("experts", "--optimizer normuon", ""),
    "stored input by output": ("transposed", "--optimizer muon", ""),
    "stored input by output, normuon": ("transposed", "--optimizer normuon", ""),
    "interleaved experts": ("interleaved", "--optimizer muon", ""),
}
KIND_LAYOUTS = {"stage 3": "", "stage 0": "--zero-stage 0", "2 replicas": "--dp-replicate-size 2"}


def runs_of(ranks: int) -> dict[str, dict]:
    runs = {}
    for iteration in LIMITS:
        for layout, flags in muonranks.layouts(ranks).items():
            runs[f"{layout}, {iteration}"] = muonranks.case("uneven", flags, "--optimizer muon", iteration)
    if ranks == 4:
        for name, (model, flags, frozen) in KINDS.items():
            for layout, of_layout in KIND_LAYOUTS.items():
                runs[f"{name}, {layout}, fp32"] = muonranks.case(model, of_layout, flags, "fp32", frozen)
    return runs


def losses_of(ranks: int, folder: pathlib.Path, runs: dict[str, dict], is_reference: bool = False) -> dict:
    out = folder / f"losses-{ranks}-{is_reference}.json"
    conftest.forked(ranks, muonranks.main, folder, runs, out, is_reference, timeout=7200)
    return json.loads(out.read_text())


def compare(ranks: int, folder: pathlib.Path, references: dict[str, list[float]]) -> dict[str, dict]:
    """The table of one world; `references` are kept for the next."""
    runs = runs_of(ranks)
    wanted = {key_of(run): muonranks.reference_of(run) for run in runs.values()}
    missing = {key: run for key, run in wanted.items() if key not in references}
    if missing:
        references |= losses_of(1, folder, missing, is_reference=True)
    table = {}
    for name, losses in losses_of(ranks, folder, runs).items():
        worst = muonranks.worst_difference(losses, references[key_of(runs[name])])
        limit = LIMITS[runs[name]["iteration"]]
        table[name] = {"worst_relative_difference": worst, "limit": limit, "last_loss": losses[-1]}
    return table


def key_of(run: dict) -> str:
    return " ".join(str(run[name]) for name in ("model", "flags", "iteration", "frozen"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"date": time.strftime("%Y-%m-%d"), "versions": versions, "steps": muonranks.STEPS, "ranks": {}}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if before["versions"] == versions:
            result["ranks"] = before["ranks"]
    references: dict[str, list[float]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        muonranks.write_models(folder)
        for ranks in arguments.ranks:
            table = compare(ranks, folder, references)
            result["ranks"][str(ranks)] = table
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            for name, row in table.items():
                is_near = row["worst_relative_difference"] <= row["limit"]
                failed |= not is_near
                verdict = "" if is_near else f", more than {row['limit']:g}"
                print(f"{ranks} ranks  {name:50} {row['worst_relative_difference']:.1e}{verdict}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
