"""The kernels of a profiled run on a GPU, the longest first: milliseconds and launches of a step.

python benchmarks/kernels.py outputs/RUN/profile/rank-0.json --steps 3
"""

import argparse
import gzip
import json
import pathlib
from collections import defaultdict


def kernels(trace: pathlib.Path, steps: int) -> list[tuple[float, float, str]]:
    """(milliseconds, launches, name) of a step, of each kernel, copy and memset in a trace of so many steps."""
    text = trace.read_bytes()
    events = json.loads(gzip.decompress(text) if trace.suffix == ".gz" else text)["traceEvents"]
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spent[event["name"]].append(event["dur"] / 1000)
    rows = [(sum(times) / steps, len(times) / steps, name) for name, times in spent.items()]
    return sorted(rows, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=3, help="that were profiled [3]")
    args = parser.parse_args()
    rows = kernels(args.trace, args.steps)
    print(f"{sum(row[0] for row in rows):.1f} ms of kernels a step, {sum(row[1] for row in rows):,.0f} launches")
    for milliseconds, launches, name in rows:
        print(f"{milliseconds:8.2f} {launches:7.1f}  {name[:140]}")


if __name__ == "__main__":
    main()
