"""Rates: compute, memory and network rates of a GPU as shares of its datasheet, and the time of a recorded step at
these rates. Datasheet values are in assets/gpus.csv."""

import dataclasses
import math

from harness import base, flags

# Matmul rate as a share of the dense peak, for a GPU without a share in assets/gpus.csv: assumed. The shares there are
# those of the best shape, published in stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS
# comparison table".
MATMUL_SHARE = 0.75
FP8_MATMUL_SHARE = 0.70
# Share of that rate for a model's shapes in training, from steps of this program on an H100 and an H200
# (benchmarks/results/plan_measured.json). The H100's kernels reached 0.73 of the peak at batch 1. The H200's steps,
# less all other work, give 0.72 at batch 1 and 0.68 for larger batches. One value for all: 0.70 of the peak.
MODEL_MATMUL_EFFICIENCY = 0.87
FP8_MODEL_EFFICIENCY = 0.95  # the same for float8: 1,376 TFLOPS in the kernels of one run on an H200
# Grouped matmuls of experts as a share of the rate of other matmuls. On an H100, torch's forward pass with 128 experts
# of 2048 x 768, 8 for each of 32,768 tokens, takes 10.2 ms (ByteDance-Seed/VeOmni#460). Without the 3.3 ms for moving
# 10 GB of permuted rows, that is 0.56 of a plan's rate for other matmuls.
GROUPED_SHARE = 0.56
# Causal attention, forward and backward, as a share of the dense peak. The kernels are older than Hopper.
ATTENTION_SHARE = 0.6  # the middle of 50 to 73 % on an A100 (FlashAttention-2, arXiv 2307.08691)
HOPPER_ATTENTION_SHARE = 0.45  # cuDNN, kernels of an H100 in two runs: 0.44 and 0.45
HOPPER_FLASH_SHARE = 0.35  # FlashAttention-2 on an H100 (FlashAttention-3, arXiv 2407.08608)
# Share of the datasheet's bandwidth in a step's kernels. On an H100: compiled layers 0.77 and 0.78, fused AdamW 0.78,
# casts before the gather 0.77, gradient norm 0.80. On an H200: fused AdamW 0.71, gradient norm with float8's scales
# 0.74. A device copy reaches 0.90 on both. Other GPUs have the H100's share.
MEMORY_SHARE = 0.78
MEMORY_SHARES = {"H200": 0.71, "H200 NVL": 0.71}
# Share of that for FSDP2's copy of gradients to the fp32 reduce buffer (chunk_cat): 0.70 on the H100, 0.60 on the H200.
CHUNK_CAT_SHARE = 0.65
LINK_SHARE = 0.80  # 360 of 450 GB/s: all_gather_perf on 8 H100 as NCCL's maintainers expect it (NVIDIA/nccl-tests#326)
NETWORK_SHARE = 0.94  # 47 of 50 GB/s for each 400 Gb/s card, by the same (NVIDIA/nccl-tests#290)
# Host times in microseconds. LAYER_US is fitted to one run, the demo on an H200's host: 14.5 ms for 4 layers, less 158
# launches and 99 eager kernels. With its kernels and its share of eager code, a layer of SmolLM3-3B takes 3.3 ms, in
# float8 3.5. Profiles of one run each, less the profiler's overhead in the demo, give 3.8 (an H100's host, selective
# checkpointing) and 6.7, so a host-bound float8 step is planned too fast.
HOST_US = 27.0  # per eager kernel, with modules and autograd: assumed
LAYER_US = 2450.0  # per compiled layer, forward and backward: autograd, FSDP2's hooks
LAUNCH_US = 13.0  # per kernel of a compiled region: assumed
KERNEL_US = 3.0  # minimum time of a kernel on the GPU: assumed
GAP_US = 3.3  # between two kernels: 5.7 of 393 ms on an H100, 9.7 in fp8 on an H200
LINK_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds per step of a ring: NCCL's tuning model (tuning.cc, LL128)
# Share of a collective's time by which it slows down concurrent computation: NCCL takes multiprocessors, memory
# bandwidth and power. Fitted to the published runs that name it in benchmarks/results/plan_published.json.
CONTENTION = 0.8
HOST_LINK, HOPPER_HOST_LINK = 25.0, 55.0  # GB/s of pinned copies over PCIe 4, and 5 from Hopper on; assumed
HOST_MEMORY = 100.0  # GB/s, Adam in host memory with --cpu-offload; assumed

PHASES = ("forward", "backward", "optimizer")
DIVIDES_WORK = ("all_to_all", "all_gather")  # collectives of an optimizer that overlap its computation


@dataclasses.dataclass
class Rates:
    """Rates of a plan: TFLOPS, GB/s and microseconds, with the keys of `assumed_rates`."""

    device: str
    memory_gib: float
    peak_tflops: float
    values: dict[str, float]
    resolved_from: str = ""  # the GPU chosen for a missing or ambiguous name

    def operator_seconds(self, unit: str, flops: float, nbytes: float) -> float:
        """Return the seconds of an operator: the longer of its FLOPs and its traffic, at least KERNEL_US. `unit` is
        from `operators.find_unit`."""
        seconds = nbytes / self.values["host_link_gb_per_s" if unit == "host_link" else "memory_gb_per_s"] / 1e9
        if unit == "chunk_cat":
            seconds /= CHUNK_CAT_SHARE
        if flops:
            seconds = max(seconds, flops / self.tflops(unit) / 1e12)
        return max(seconds, self.values["kernel_us"] / 1e6)

    def tflops(self, unit: str) -> float:
        if unit == "grouped":
            return GROUPED_SHARE * self.values["matmul_tflops"]
        return self.values.get(f"{unit}_tflops") or self.values["matmul_tflops"]

    def collective_seconds(
        self, kind: str, ranks: int, nodes: int, ranks_per_node: int, calls: float, sent: float
    ) -> float:
        """Return the seconds of `calls` collectives among `ranks` on `nodes`, with at least `ranks_per_node` on each. A
        rank sends `sent` bytes in all of them together."""
        if ranks == 1 or not calls:
            return 0.0
        rate = self.values["intra_node_gb_per_s"]
        if nodes > 1:  # the ring uses the network cards of all its GPUs in a node
            rate = min(rate, ranks_per_node * self.values["inter_node_gb_per_s"])
        steps = 2 * math.log2(ranks) / ranks if kind == "all_reduce" else 1  # a tree instead of a ring
        latency = (ranks - nodes) * LINK_HOP + (nodes - 1) * NETWORK_HOP
        return sent / rate / 1e9 + calls * latency * steps


def price_step(counts: dict[tuple, float], rates: Rates) -> dict[str, float]:
    """Return the seconds of one optimizer step by kind of work, from the counts of a `StepRecorder`. `step` is the
    total.

    Operators run one after the other. Collectives overlap the computation of their pass and slow it down. Exposed is
    the communication that does not fit behind the computation, the first gathers of a step, the last reductions, and an
    optimizer's collectives except DIVIDES_WORK. The host launches ahead of the GPU: the step takes the longer of the
    GPU's and the host's time, and `launches` is the time that the GPU waits for the host.
    """
    units = dict.fromkeys(("matmul", "attention", "memory", "host_link", "optimizer"), 0.0)
    kernels = 0.0
    compute = dict.fromkeys(PHASES, 0.0)
    overlapping = dict.fromkeys(PHASES, 0.0)  # collectives that may overlap the computation of their phase
    exposed = communication = host = 0.0
    for (name, part, *key), count in counts.items():
        phase = "optimizer" if part == "update" else part
        if name == "seconds":
            compute[phase] += count
            (unit,) = key
            unit = {"fp8": "matmul", "grouped": "matmul", "chunk_cat": "memory"}.get(unit, unit)
            units["optimizer" if phase == "optimizer" else unit] += count
        elif name == "dispatches":
            host += count * rates.values["host_us"] / 1e6
        elif name == "layers":
            host += count * rates.values["layer_us"] / 1e6
        elif name == "launches":
            host += count * rates.values["launch_us"] / 1e6
        elif name == "kernels":
            kernels += count
        elif name == "calls":
            kind, ranks, nodes, ranks_per_node = key
            sent = counts["sent_bytes", part, *key]
            seconds = rates.collective_seconds(kind, ranks, nodes, ranks_per_node, count, sent)
            calls, sent = counts.get(("exposed_calls", part, *key), 0), counts.get(("exposed_bytes", part, *key), 0)
            at_ends = rates.collective_seconds(kind, ranks, nodes, ranks_per_node, calls, sent)
            if phase == "optimizer" and kind not in DIVIDES_WORK:
                at_ends = seconds
            communication += seconds
            exposed += at_ends
            overlapping[phase] += seconds - at_ends
    gaps = kernels * GAP_US / 1e6
    in_all = sum(compute.values()) + gaps
    exposed += sum(max(0.0, overlapping[phase] - compute[phase]) for phase in PHASES)
    contention = CONTENTION * (communication - exposed)
    launches = max(0.0, host - in_all - exposed - contention)
    return units | {
        "gaps": gaps,
        "host": host,
        "launches": launches,
        "communication": communication,
        "exposed": exposed,
        "contention": contention,
        "step": in_all + exposed + contention + launches,
    }


# ---- Choice of rates -------------------------------------------------------------------------------------------------


def assumed_rates(kind: base.Gpu, flash: bool) -> dict[str, float]:
    """Return the assumed rates of a kind of GPU, with FlashAttention-2 if `flash`: GiB, TFLOPS, GB/s, microseconds."""
    attention_share = ATTENTION_SHARE
    if kind.hopper:
        attention_share = HOPPER_FLASH_SHARE if flash else HOPPER_ATTENTION_SHARE
    return {
        "memory_gib": kind.memory_gib,
        "matmul_tflops": MODEL_MATMUL_EFFICIENCY * (kind.matmul_share or MATMUL_SHARE) * kind.peak_tflops,
        "fp8_tflops": FP8_MODEL_EFFICIENCY * (kind.fp8_share or FP8_MATMUL_SHARE) * kind.peak_tflops * kind.fp8,
        "attention_tflops": attention_share * kind.peak_tflops,
        "memory_gb_per_s": MEMORY_SHARES.get(kind.plan_name, MEMORY_SHARE) * kind.memory,
        "host_link_gb_per_s": HOPPER_HOST_LINK if kind.hopper else HOST_LINK,
        "intra_node_gb_per_s": LINK_SHARE * kind.link,
        "inter_node_gb_per_s": NETWORK_SHARE * kind.network,
        "host_us": HOST_US,
        "layer_us": LAYER_US,
        "launch_us": LAUNCH_US,
        "kernel_us": KERNEL_US,
    }


def choose_rates(settings: flags.Args) -> Rates:
    """Return the assumed rates for --plan-gpu, else for this machine's GPU, else for an H100 SXM.

    Raises:
        UserError: the GPU is not in the table.
    """
    typed = settings.plan_gpu or base.gpu_name() or ""
    name, others = base.choose_kind(typed or "H100 SXM")
    kind = base.find_gpu(name)
    if kind is None:
        raise base.UserError(base.unlisted(typed))
    values = assumed_rates(kind, flash=settings.attention in ("flash", "flash_attention_2"))
    rates = Rates(name, values.pop("memory_gib"), settings.peak_tflops or kind.peak_tflops, values)
    if not typed:
        rates.resolved_from = f"{name}, as there is none here and no --plan-gpu"
    elif others:
        rates.resolved_from = f"{name}; --plan-gpu {' or '.join(map(repr, others))} names another"
    return rates
