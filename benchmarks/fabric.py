"""Bandwidth of the collectives that FSDP2 uses, in the manner of nccl-tests.

    torchrun --nproc_per_node=8 benchmarks/fabric.py [--max-mib 1024] [--out benchmarks/results]

algbw is the size over the time; busbw multiplies it by the share of the data that has to pass each link, so that it can
be held against the link's rate whatever the number of ranks: 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather
and reduce-scatter (nccl-tests, doc/PERFORMANCE.md). Size is that of the whole buffer: of the gathered output, of the
input that is scattered.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

# One direction of one GPU's links in GB/s, half of what the vendors' datasheets give for both; the first match counts.
NVLINK = ((r"B[23]00", 900), (r"H100 NVL", 300), (r"H[12]00", 450), (r"A100", 300))
PCIE = {"4": 31.5, "5": 63.0}  # x16 by generation, after 128b/130b coding
GOOD = 0.75  # of the link's rate, with the largest messages; below it the last line says LOW


def time_collective(call, device: torch.device, seconds: float) -> float:
    """Median seconds of a call on the slowest rank; about `seconds` of repeats after a warmup."""
    times = []
    repeats = 5
    while len(times) < repeats:
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
        if len(times) == 2:  # the first two are the warmup; every rank has the same times, so the same count
            repeats = 2 + max(3, min(50, int(seconds / times[1])))
    return statistics.median(times[2:])


def bus_factor(collective: str, ranks: int) -> float:
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def measure(collective: str, size: int, ranks: int, device: torch.device) -> dict:
    """One row of the table; the data are checked once."""
    dtype = torch.bfloat16 if collective == "all_gather" else torch.float32  # what FSDP2 moves with --precision bf16
    count = size // dtype.itemsize // ranks * ranks
    whole, part = torch.ones(count, dtype=dtype, device=device), torch.ones(count // ranks, dtype=dtype, device=device)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
    call = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
    }[collective]
    call()
    result = part if collective == "reduce_scatter" else whole
    expected = 1 if collective == "all_gather" else ranks
    if not (result == expected).all():
        raise RuntimeError(f"{collective} of {size} bytes gave {result.unique().tolist()}, not {expected}")
    whole.fill_(0)  # sums of zeros stay finite however often they are repeated
    part.fill_(0)
    seconds = time_collective(call, device, seconds=0.3)
    algbw = count * dtype.itemsize / seconds / 1e9
    row = {"bytes": count * dtype.itemsize, "microseconds": seconds * 1e6, "algbw_gb_per_sec": algbw}
    return row | {"busbw_gb_per_sec": algbw * bus_factor(collective, ranks)}


def expectation(device: torch.device) -> tuple[float | None, str]:
    """The rate of one GPU's link in GB/s, and what link that is."""
    if device.type == "cpu":
        size = 2**28
        source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        target.copy_(source)
        start = time.perf_counter()
        target.copy_(source)
        copy = size / (time.perf_counter() - start) / 1e9
        return None, f"gloo: no link to expect a rate of; one rank copies {copy:.1f} GB/s in memory"
    name = torch.cuda.get_device_name()
    if int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"]):
        return None, "several nodes: hold it against the rate of the network adapters together"
    try:
        links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
        if re.search(r"\bNV\d+\b", links):
            rate = next((rate for gpu, rate in NVLINK if re.search(gpu, name)), None)
            return rate, f"NVLink of a {name}" + ", not in the table here" * (rate is None)
        query = ["nvidia-smi", "--query-gpu=pcie.link.gen.max", "--format=csv,noheader"]
        generation = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        return PCIE.get(generation), f"PCIe {generation}.0 x16"
    except (OSError, IndexError):
        return None, "nvidia-smi does not tell what links the GPUs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-mib", type=int, default=1024, help="largest message [1024]")
    parser.add_argument("--out", type=pathlib.Path, help="folder for fabric.json [none: only the table]")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ranks = dist.get_world_size()
    if ranks == 1:
        sys.exit("fabric.py: error: one rank has nobody to talk to; start it with torchrun --nproc_per_node=2 or more")
    say = print if dist.get_rank() == 0 else lambda *_: None
    on = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores"
    stamp = {"on": on, "ranks": ranks, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    sizes = [2**power for power in range(16, 40, 2) if 2**power <= args.max_mib * 2**20]
    part = {"what": f"collectives, {dist.get_backend()}", "figure": "busbw_gb_per_sec", "pairs": {}, "configs": {}}
    say(f"{ranks} ranks, {on}, {dist.get_backend()}, torch {torch.__version__}")
    say(f"{'':15}{'bytes':>14}{'time us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        rows = [measure(collective, size, ranks, device) for size in sizes]
        for row in rows:
            _, time_us, algbw, busbw = row.values()
            say(f"{collective:15}{row['bytes']:>14,}{time_us:>12,.1f}{algbw:>12.3g}{busbw:>12.3g}")
        part["configs"][collective] = {"runs": [stamp | {"sizes": rows}]}
    rate, link = expectation(device)
    best = {name: max(row["busbw_gb_per_sec"] for row in c["runs"][0]["sizes"]) for name, c in part["configs"].items()}
    verdict = link
    if rate:
        low = [name for name, bus in best.items() if bus < GOOD * rate]
        state = f"LOW: {', '.join(low)} under {GOOD:.0%} of it" if low else f"all at {GOOD:.0%} of it or more"
        verdict = f"{link} gives {rate:g} GB/s in each direction; {state}"
    say(f"best busbw: {', '.join(f'{name} {bus:.3g}' for name, bus in best.items())} GB/s. {verdict}")
    if args.out and dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        machine = {"versions": {"torch": torch.__version__}}
        results = {"suite": "fabric", "rehearsal": False, "machine": machine, "verdict": verdict}
        results["parts"] = {"fabric": part}
        (args.out / "fabric.json").write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
