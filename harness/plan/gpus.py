"""GPUs: what programs reach of a GPU's datasheet, where it was not measured. Called by `planning`. Independent of
models. The datasheets' figures stand in `base.gpus`, where an MFU needs them too."""

import contextlib
import pathlib
import platform
import re

import torch

from harness.base import UserError, choose_kind, find_gpu, unlisted, wrong_rates
from harness.flags import Settings
from harness.plan.rates import Rates, find_file, read_file

# Matmuls, of the dense peak, of a kind without a share in assets/gpus.csv: assumed. The shares there are the best shape
# of a search, published in stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS comparison
# table".
MATMUL_SHARE = 0.75
FP8_MATMUL_SHARE = 0.70
# Of that what a model's own shapes reach in training: one number for the runs in the first table of published runs
# in docs/PLAN.md.
MODEL_MATMUL_EFFICIENCY = 0.80
# Attention, causal, forward and backward, of the dense peak. Its kernels are older than Hopper.
ATTENTION_SHARE = 0.6  # the middle of 50 to 73 % on an A100 (FlashAttention-2, arXiv 2307.08691)
HOPPER_ATTENTION_SHARE = 0.475  # 470 of 989 TFLOPS by cuDNN: assumed, not measured
HOPPER_FLASH_SHARE = 0.35  # what FlashAttention-2 reaches on an H100 (FlashAttention-3, arXiv 2407.08608)
MEMORY_SHARE = 0.90  # 4.3 of 4.8 TB/s: a device copy, measured by others on one H200
LINK_SHARE = 0.80  # 360 of 450 GB/s: all_gather_perf on 8 H100 as NCCL's maintainers expect it (NVIDIA/nccl-tests#326)
NETWORK_SHARE = 0.94  # 47 of 50 GB/s for each 400 Gb/s card, by the same (NVIDIA/nccl-tests#290)
HOST_US = 10.0  # the host's time for each operator of eager code, autograd and modules included: assumed
KERNEL_US = 3.0  # the least that a kernel takes on the GPU: assumed
# Tokens/s and memory of published runs as shares of their plans by these rates, the least, the median and the most:
# `published_share` and `published_memory_share` of benchmarks/results/plan_published.json. The run that is left out
# contradicts itself. They say something of plans of their kinds, and nothing of others.
PUBLISHED_KINDS, PUBLISHED_GPUS = "dense models on A100, H100 and H200", ("A100", "H100", "H200")
PUBLISHED_RUNS, PUBLISHED_SHARE = "25 of 26 published runs", (0.83, 1.05, 1.21)
PUBLISHED_MEMORY_RUNS, PUBLISHED_MEMORY_SHARE = "13 published runs", (1.00, 1.06, 1.19)
FRAGMENTATION = 0.04  # of the tensors' peak, with expandable segments
TIGHT = 0.92  # of what the card gives a process: a plan above it leaves too little for what it does not see


def verdict_of(reserved: float, capacity: float) -> str:
    """One of three verdicts: whether a plan that reserves so many GiB fits into what the card gives a process."""
    if reserved > capacity:
        return "does not fit"
    return "tight" if reserved > TIGHT * capacity else "fits"


def find_rates(gpu: str, given: dict[str, float], flash: bool = False) -> Rates:
    """Rates of a plan: TFLOPS and GB/s that programs reach on this GPU, with FlashAttention-2 if `flash`, its memory in
    GiB; `given` replaces any, and describes a GPU that is not in the table.

    Raises:
        UserError: the GPU is not in the table and not described, or a given rate is none of these.
    """
    if problem := wrong_rates(given):
        raise UserError(problem)
    kind = find_gpu(gpu)
    if not kind or not kind.memory_gib:
        if problem := unlisted(gpu, given):
            raise UserError(problem)
        rates = {"fp8_tflops": 0.0, "host_us": HOST_US, "kernel_us": KERNEL_US} | given
        peak_tflops = kind.peak_tflops if kind else None
        return Rates(gpu, rates.pop("memory_gib"), rates.pop("peak_tflops", peak_tflops), rates)
    matmul_share = kind.matmul_share or MATMUL_SHARE
    fp8_share = kind.fp8_share or FP8_MATMUL_SHARE
    attention_share = ATTENTION_SHARE
    if kind.hopper:
        attention_share = HOPPER_FLASH_SHARE if flash else HOPPER_ATTENTION_SHARE
    rates = {
        "memory_gib": kind.memory_gib,
        "matmul_tflops": MODEL_MATMUL_EFFICIENCY * matmul_share * kind.peak_tflops,
        "fp8_tflops": MODEL_MATMUL_EFFICIENCY * fp8_share * kind.peak_tflops * kind.fp8,
        "attention_tflops": attention_share * kind.peak_tflops,
        "memory_gb_per_s": MEMORY_SHARE * kind.memory,
        "intra_node_gb_per_s": LINK_SHARE * kind.link,
        "inter_node_gb_per_s": NETWORK_SHARE * kind.network,
        "host_us": HOST_US,
        "kernel_us": KERNEL_US,
    }
    rates |= given
    return Rates(gpu, rates.pop("memory_gib"), rates.pop("peak_tflops", kind.peak_tflops), rates)


def is_published_kind(gpu: str, config) -> bool:
    """Whether published runs say how near such plans are: those of PUBLISHED_KINDS."""
    text = config.get_text_config()
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    kind = find_gpu(gpu)
    return kind is not None and kind.plan_name.startswith(PUBLISHED_GPUS) and not any(experts)


def name_of(device: torch.device) -> str:
    """The GPU's name by its driver, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError):
        cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        if match:
            return f"CPU {match[1]}"
    return f"CPU {platform.machine()}"


def choose_rates(settings: Settings) -> Rates:
    """The rates of a plan: what --plan-rates names, else what --measure wrote for this kind of GPU, over what is
    assumed of it. Of a CPU, `--plan-gpu cpu`, nothing is assumed.

    Raises:
        UserError: the kind of GPU is not in the table, the file cannot be read, or the CPU was not measured.
    """
    typed = settings.plan_gpu or ""
    if not typed and torch.cuda.is_available():
        typed = torch.cuda.get_device_name()
    kind_of_name, others = choose_kind(typed or "H100 SXM")
    gpu = kind_of_name or typed
    is_cpu = gpu.lower() == "cpu"
    path = None
    if settings.plan_rates is None:
        path = find_file(name_of(torch.device("cpu")) if is_cpu else gpu, settings.cache_dir)
    elif settings.plan_rates != "none":
        path = pathlib.Path(settings.plan_rates).expanduser()
    contents = read_file(path) if path else {}
    sections = contents.get("sections", {}) if isinstance(contents, dict) else {}
    kind = find_gpu(gpu)
    is_assumed = kind is not None and kind.memory_gib > 0
    if sections and (is_cpu or not is_assumed):
        rates = Rates(contents["device"], contents["memory_gib"], None, {}, on_gpu=not is_cpu)
    elif is_cpu:
        advice = "time this one first, with --measure and otherwise the same flags"
        raise UserError(f"--plan-gpu cpu: of a processor nothing is assumed; {advice}")
    else:
        given = contents
        if sections:
            given = {}
        elif isinstance(contents, dict):
            given = contents.get("rates", contents)
        rates = find_rates(gpu, given, settings.attention in ("flash", "flash_attention_2"))
    if not typed:
        rates.taken = f"{gpu}, as there is none here and no --plan-gpu"
    elif others:
        taken = gpu if typed == gpu else f"{typed} is taken for {gpu}"
        rates.taken = f"{taken}; --plan-gpu {' or '.join(map(repr, others))} names another"
    if settings.peak_tflops:
        rates.peak_tflops = settings.peak_tflops
    elif not rates.peak_tflops:
        rates.peak_tflops = kind.peak_tflops if kind else None
    rates.sections = sections
    if sections:
        versions = ", ".join(f"{name} {version}" for name, version in contents["versions"].items() if version)
        rates.source = f"on {contents['device']}, {contents['date'][:10]}, {versions} ({path})"
    elif path and settings.plan_rates:
        rates.source = f"given in {path}"
    return rates
