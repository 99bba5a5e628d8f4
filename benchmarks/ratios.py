"""The ratios that bench.py prints and plots.py draws, in a file of its own so that neither has to import the other."""

import statistics


def ratios(entry: dict, above: str, below: str, goal: str, key: str = "") -> list[float]:
    """One configuration's figure divided by another's in each round, or once their medians if they had no round in
    common; `key` where it is not the part's figure."""
    key = key or entry["figure"]
    runs = [entry["configs"].get(name, {"runs": []})["runs"] for name in (above, below)]
    a, b = ({run["round"]: run[key] for run in side} for side in runs)
    common = [a[name] / b[name] for name in a if name in b]
    return common or ([statistics.median(a.values()) / statistics.median(b.values())] if a and b else [])
