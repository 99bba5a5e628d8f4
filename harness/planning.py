"""Planning: from recorded steps to memory, time, cost and advice: --plan.

Called by the script, which hands it the functions that it drives. What a step needs is recorded by `recorder`, what a
GPU gives stands in `gpus`.
"""

import collections
import math

from harness.gpus import HOST_LINK, HOST_MEMORY, LINK_HOP, NETWORK_HOP


def predict_time(counts: dict[tuple, float], rates: dict[str, float]) -> dict[str, float]:
    """Seconds of one optimizer step, by a roofline: each operator takes what bounds it, one after the other.

    Collectives run beside the computation of their pass. Exposed is what does not fit beside it, and the ends: the
    first gathers of a step before there is anything to compute, the last reductions after everything is computed.
    """
    seconds: collections.Counter = collections.Counter()
    communication: collections.Counter = collections.Counter()
    for (what, phase, *group), amount in counts.items():
        if what in ("sent_bytes", "end_bytes"):
            size, near = group[-2:]
            rate = rates["intra_node_gb_per_s"]
            if near < size:  # every GPU of the node lends the ring its network card
                rate = min(rate, near * rates["inter_node_gb_per_s"])
            communication[what, phase] += amount / rate / 1e9
        elif what in ("calls", "end_calls"):
            kind, size, near = group
            nodes = size // near
            steps = 2 * math.log2(size) / size if kind == "all_reduce" else 1  # a tree, not a ring
            latency = (size - nodes) * LINK_HOP + (nodes - 1) * NETWORK_HOP
            communication["sent_bytes" if what == "calls" else "end_bytes", phase] += amount * latency * steps
        else:
            rate, unit = {
                "matmul_flops": ("matmul_tflops", 1e12),
                "fp8_flops": ("fp8_tflops", 1e12),
                "attention_flops": ("attention_tflops", 1e12),
                "memory_bytes": ("memory_gb_per_s", 1e9),
            }.get(what, (None, 1e9))
            rate = rates[rate] if rate else {"host_bytes": HOST_MEMORY, "host_link_bytes": HOST_LINK}[what]
            name = {"matmul_flops": "matmul", "fp8_flops": "matmul", "attention_flops": "attention"}.get(what, "memory")
            seconds["optimizer" if phase == "optimizer" else name] += amount / rate / unit
            seconds[phase, "compute"] += amount / rate / unit
    exposed = communication["sent_bytes", "optimizer"]
    for phase in ("forward", "backward"):
        ends = communication["end_bytes", phase]
        exposed += ends + max(0.0, communication["sent_bytes", phase] - ends - seconds[phase, "compute"])
    total = sum(value for phase, value in seconds.items() if isinstance(phase, tuple)) + exposed
    whole = sum(value for (what, _), value in communication.items() if what == "sent_bytes")
    named = {name: seconds[name] for name in ("matmul", "attention", "memory", "optimizer")}
    return named | {"communication": whole, "exposed": exposed, "step": total}
