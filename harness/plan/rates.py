"""Rates: how fast a GPU computes, reads its memory and reaches other GPUs, as shares of its datasheet, and what a
recorded step takes so. The datasheets' figures stand in assets/gpus.csv, where an MFU needs them too."""

import dataclasses
import math

import torch

from harness import base, flags

# Matmuls, of the dense peak, of a kind without a share in assets/gpus.csv: assumed. The shares there are the best shape
# of a search, published in stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS comparison
# table".
MATMUL_SHARE = 0.75
FP8_MATMUL_SHARE = 0.70
# Of that what a model's own shapes reach in training, by the steps of this program that were measured on an H100 and an
# H200 (benchmarks/results/plan_measured.json). The H100's kernels reached 0.73 of the peak at batch 1; what is left of
# the H200's steps, less all other kinds of work, gives 0.72 at batch 1 and 0.68 where larger batches multiply without a
# pause. One number for all of them, 0.70 of the peak.
MODEL_MATMUL_EFFICIENCY = 0.87
FP8_MODEL_EFFICIENCY = 0.95  # the same of float8: 1,376 TFLOPS in the kernels of one run on an H200
# Grouped matmuls of experts, of the rate of other matmuls: of torch's on an H100 with 128 experts of 2048 x 768, 8 of
# them for each of 32,768 tokens, the whole forward pass takes 10.2 ms (ByteDance-Seed/VeOmni#460). Less the 3.3 ms in
# which 10 GB of permuted rows are moved, that is 0.56 of what a plan takes for other matmuls there.
GROUPED_SHARE = 0.56
# Attention, causal, forward and backward, of the dense peak. Its kernels are older than Hopper.
ATTENTION_SHARE = 0.6  # the middle of 50 to 73 % on an A100 (FlashAttention-2, arXiv 2307.08691)
HOPPER_ATTENTION_SHARE = 0.45  # cuDNN, of an H100's kernels in two runs: 0.44 and 0.45
HOPPER_FLASH_SHARE = 0.35  # what FlashAttention-2 reaches on an H100 (FlashAttention-3, arXiv 2407.08608)
# Of the datasheet's bandwidth what a step's kernels reach. An H100's: compiled layers 0.77 and 0.78, fused AdamW 0.78,
# casts before the gather 0.77, gradient norm 0.80. An H200's: fused AdamW 0.71, gradient norm with float8's scales
# 0.74. A device copy reaches 0.90 on both; others are taken for an H100.
MEMORY_SHARE = 0.78
MEMORY_SHARES = {"H200": 0.71, "H200 NVL": 0.71}
# Of that FSDP2's copy of gradients into what it reduces (chunk_cat), to fp32: 0.70 on the H100, 0.60 on the H200.
CHUNK_CAT_SHARE = 0.65
LINK_SHARE = 0.80  # 360 of 450 GB/s: all_gather_perf on 8 H100 as NCCL's maintainers expect it (NVIDIA/nccl-tests#326)
NETWORK_SHARE = 0.94  # 47 of 50 GB/s for each 400 Gb/s card, by the same (NVIDIA/nccl-tests#290)
# Microseconds of the host. A compiled layer's are fitted to one run, the demo on an H200's host: 14.5 ms for 4 layers,
# less 158 launches and 99 kernels of eager code. With its kernels and its share of eager code a layer of SmolLM3-3B
# takes 3.3 ms, in float8 3.5. Profiles of one run each, less what profiling adds to the demo, give 3.8 (an H100's host,
# selective checkpointing) and 6.7: a step of float8 that the host bounds is planned too fast.
HOST_US = 27.0  # each kernel of eager code, with modules and autograd: assumed
LAYER_US = 2450.0  # each compiled layer, forward and backward: autograd, FSDP2's hooks
LAUNCH_US = 13.0  # each kernel of a compiled region: assumed
KERNEL_US = 3.0  # the least that a kernel takes on the GPU: assumed
GAP_US = 3.3  # between two kernels that a plan counts the GPU idles: 5.7 of 393 ms on an H100, 9.7 in fp8 on an H200
LINK_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds for each step of a ring: NCCL's tuning model (tuning.cc, LL128)
# Of the time of a collective that runs beside computation, the share by which it slows that down: NCCL takes
# multiprocessors, memory bandwidth and power. One number for the published runs that
# name it in benchmarks/results/plan_published.json.
CONTENTION = 0.8
HOST_LINK, HOST_MEMORY = 25.0, 100.0  # GB/s, for --cpu-offload: pinned copies over PCIe, Adam in host memory; assumed

PHASES = ("forward", "backward", "optimizer")  # of a step
DIVIDES_WORK = ("all_to_all", "all_gather")  # what an optimizer moves while it computes something else


@dataclasses.dataclass
class Rates:
    """What a plan computes with: TFLOPS, GB/s and microseconds by the names of `assumed_rates`."""

    device: str
    memory_gib: float
    peak_tflops: float
    values: dict[str, float]
    resolved_from: str = ""  # what a name that fits several kinds was taken for

    def operator_seconds(self, unit: str, flops: float, nbytes: float) -> float:
        """Of one operator: by its FLOPs or by the bytes that it moves, whichever takes longer, and at least a kernel's
        launch. `unit` is one of `operators.find_unit`."""
        seconds = nbytes / self.values["memory_gb_per_s"] / 1e9
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
        """Seconds of `calls` of one kind among `ranks` on `nodes`, at least `ranks_per_node` of them on each. In all of
        them together each rank sends `sent` bytes."""
        if ranks == 1 or not calls:
            return 0.0
        rate = self.values["intra_node_gb_per_s"]
        if nodes > 1:  # every GPU of a node lends the ring its network card
            rate = min(rate, ranks_per_node * self.values["inter_node_gb_per_s"])
        steps = 2 * math.log2(ranks) / ranks if kind == "all_reduce" else 1  # a tree, not a ring
        latency = (ranks - nodes) * LINK_HOP + (nodes - 1) * NETWORK_HOP
        return sent / rate / 1e9 + calls * latency * steps


def price_step(counts: dict[tuple, float], rates: Rates) -> dict[str, float]:
    """Seconds of one optimizer step, from the counts of a `StepRecorder`: its operators one after the other.

    Collectives run beside the computation of their pass, which they slow down. Exposed is what does not fit
    beside it, and the ends: the first gathers of a step before there is anything to compute, the last reductions after
    everything is computed. An optimizer's are exposed, but those by which it divides its work. The host launches ahead
    of the GPU: the step takes what the GPU or what the host takes, whichever is more, and `launches` is what it waits
    for the host.
    """
    units = dict.fromkeys(("matmul", "attention", "memory", "optimizer"), 0.0)
    kernels = 0.0
    compute = dict.fromkeys(PHASES, 0.0)
    beside = dict.fromkeys(PHASES, 0.0)  # collectives that may run beside the computation of their phase
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
            beside[phase] += seconds - at_ends
    gaps = kernels * GAP_US / 1e6
    in_all = sum(compute.values()) + gaps
    exposed += sum(max(0.0, beside[phase] - compute[phase]) for phase in PHASES)
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


# ---- Where they are from ---------------------------------------------------------------------------------------------


def assumed_rates(kind: base.Gpu, flash: bool) -> dict[str, float]:
    """What programs reach of the datasheet of a kind of GPU, with FlashAttention-2 if `flash`."""
    attention_share = ATTENTION_SHARE
    if kind.hopper:
        attention_share = HOPPER_FLASH_SHARE if flash else HOPPER_ATTENTION_SHARE
    return {
        "memory_gib": kind.memory_gib,
        "matmul_tflops": MODEL_MATMUL_EFFICIENCY * (kind.matmul_share or MATMUL_SHARE) * kind.peak_tflops,
        "fp8_tflops": FP8_MODEL_EFFICIENCY * (kind.fp8_share or FP8_MATMUL_SHARE) * kind.peak_tflops * kind.fp8,
        "attention_tflops": attention_share * kind.peak_tflops,
        "memory_gb_per_s": MEMORY_SHARES.get(kind.plan_name, MEMORY_SHARE) * kind.memory,
        "intra_node_gb_per_s": LINK_SHARE * kind.link,
        "inter_node_gb_per_s": NETWORK_SHARE * kind.network,
        "host_us": HOST_US,
        "layer_us": LAYER_US,
        "launch_us": LAUNCH_US,
        "kernel_us": KERNEL_US,
    }


def choose_rates(settings: flags.Args) -> Rates:
    """The rates of a plan, assumed of the kind of GPU that it is for.

    Raises:
        UserError: the kind is not in the table.
    """
    typed = settings.plan_gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
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
