"""What a step of Muon takes on this machine, on one process: as a share of a training step, and beside torch.optim.Muon
over the same matrices, in turn.

    python tests/muon_cost.py

The model is the demo's; matrices, gradients and weights are real ones of a few steps. Writes
benchmarks/results/muon_cost.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from multirank import resolved
from muonranks import Reference

import train_fsdp
import utils
from harness import model as models
from harness.job.world import start_processes, stop_processes

RESULTS = ROOT / "benchmarks" / "results" / "muon_cost.json"
FLAGS = "--model demo --optimizer muon --sequence-length 256 --batch-size 4 --no-compile"


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    device = start_processes()
    settings, config = resolved(FLAGS.split())
    mesh = train_fsdp.build_mesh(settings, device)
    model = train_fsdp.build_model(settings, config, mesh)
    optimizer, reference = models.build_optimizer(settings, model), Reference(settings, model, "demo")
    tokens = torch.randint(0, 1536, (settings.batch_size, settings.sequence_length + 1))
    batch = {"input_ids": tokens[:, :-1].to(device), "labels": tokens[:, 1:].to(device)}
    rounds = []
    for index in range(arguments.rounds + 1):
        step = timed(
            lambda: train_fsdp.train_step(
                settings, model, optimizer, iter([dict(batch)]), utils.PerformanceTracker(0, 1)
            )
        )
        seconds = {"training_step": step}
        for name, of in (("muon", optimizer), ("torch.optim.Muon", reference)):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * 1e-3 + 1e-3 * parameter.detach()
            seconds[name] = timed(of.step)
            of.zero_grad()
        if index:  # the first is the warmup
            rounds.append(seconds)
    ratios = [seconds["muon"] / seconds["torch.optim.Muon"] for seconds in rounds]
    shares = [seconds["muon"] / seconds["training_step"] for seconds in rounds]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "flags": FLAGS,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "rounds": rounds,
        "seconds_beside_torch": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "share_of_a_step": {"median": statistics.median(shares), "least": min(shares), "most": max(shares)},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("seconds_beside_torch", "share_of_a_step")}))
    stop_processes()


if __name__ == "__main__":
    main()
