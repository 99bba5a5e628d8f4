"""GPUs: what programs reach of a GPU's datasheet, as a plan computes with it.

Called by `planning`. It does not know models.
"""

import re
from typing import NamedTuple

from utils import UserError, get_gpu_peak_tflops


class Gpu(NamedTuple):
    """What a plan assumes of one GPU kind. Bandwidths are in GB/s, per GPU and direction, by the vendor's datasheet."""

    name: str  # a pattern, as in GPU_PEAK_TFLOPS
    memory_gib: float  # torch.cuda.get_device_properties().total_memory, less than the name says
    memory: float
    link: float  # to the GPUs of its node: NVLink, or PCIe where there is none
    network: float  # its share of the node's network cards, in the vendor's reference system
    fp8: int = 2  # float8 matmul rate over that of bf16; 0 without float8


GPUS = (
    Gpu(r"GB200", 184.0, 8000, 900, 50),  # HGX/NVL datasheets
    Gpu(r"B200", 178.3, 7700, 900, 50),  # DGX B200 datasheet; memory as its driver reports it (pytorch/ao#4002)
    Gpu(r"GH200", 94.5, 4000, 450, 50),
    Gpu(r"H200 NVL", 139.7, 4800, 450, 50),
    Gpu(r"H200", 139.7, 4800, 450, 50),  # DGX H200 datasheet
    Gpu(r"H100 NVL", 93.1, 3938, 300, 50),
    Gpu(r"H100 PCIE", 79.1, 2039, 64, 25),
    Gpu(r"H100.*(SXM|HBM3)", 79.1, 3350, 450, 50),  # DGX H100 datasheet
    Gpu(r"H20\b", 95.0, 4000, 450, 50),
    Gpu(r"A100.*40GB", 39.4, 1555, 300, 25, fp8=0),  # DGX A100 datasheet
    Gpu(r"A100.*80GB", 79.1, 2039, 300, 25, fp8=0),  # DGX A100 datasheet
    Gpu(r"RTX A6000", 47.4, 768, 32, 12.5, fp8=0),
    Gpu(r"L40S", 44.4, 864, 32, 12.5),
    Gpu(r"RTX 5090(?! D)", 31.3, 1792, 64, 12.5),
    Gpu(r"RTX 4090(?! D)", 23.5, 1008, 32, 12.5),
    Gpu(r"RTX 3090(?! TI)", 23.6, 936, 32, 12.5, fp8=0),
)
# Shares of a datasheet's figure that programs reach; one set for every GPU kind.
MATMUL_SHARE = 0.80  # 790 of 989 TFLOPS: a bf16 product of two 8192 x 8192 matrices, random data, measured on an H200
ATTENTION_SHARE = 0.475  # 470 of 989 TFLOPS, causal, forward and backward on Hopper: assumed, not measured
MEMORY_SHARE = 0.90  # 4.3 of 4.8 TB/s: a device copy, measured on an H200
LINK_SHARE = 0.80  # 360 of 450 GB/s: all_gather_perf on 8 H100 as NCCL's maintainers expect it (NVIDIA/nccl-tests#326)
NETWORK_SHARE = 0.94  # 47 of 50 GB/s for each 400 Gb/s card, by the same (NVIDIA/nccl-tests#290)
LINK_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds for each step of a ring: NCCL's tuning model (tuning.cc, LL128)
HOST_LINK, HOST_MEMORY = 25.0, 100.0  # GB/s, for --cpu-offload: pinned copies over PCIe, Adam in host memory; assumed
# What a process holds of the card beyond what its tensors need, in GiB; assumed, not measured.
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and cuDNN with their workspaces
NCCL_GIB = 0.5  # buffers of each communicator that spans more than one rank
FRAGMENTATION = 0.04  # of the tensors' peak, with expandable segments


def find_rates(gpu: str, measured: dict[str, float]) -> dict[str, float]:
    """Rates that a plan computes with: TFLOPS and GB/s that programs reach on this GPU, its memory in GiB.

    Args:
        measured: replaces any of them.

    Raises:
        UserError: the GPU is not in the table.
    """
    kind = next((kind for kind in GPUS if re.search(rf"\b{kind.name}", gpu, re.IGNORECASE)), None)
    peak = get_gpu_peak_tflops(gpu)
    if not kind or not peak:
        known = "H100 SXM, H100 PCIe, H100 NVL, H200, B200, GB200, GH200, H20, A100 40GB, A100 80GB, L40S, RTX 4090"
        raise UserError(f"--plan-gpu {gpu!r}: not one kind of the table; name one of {known}, ...")
    rates = {
        "memory_gib": kind.memory_gib,
        "matmul_tflops": MATMUL_SHARE * peak,
        "fp8_tflops": MATMUL_SHARE * peak * kind.fp8,
        "attention_tflops": ATTENTION_SHARE * peak,
        "memory_gb_per_s": MEMORY_SHARE * kind.memory,
        "intra_node_gb_per_s": LINK_SHARE * kind.link,
        "inter_node_gb_per_s": NETWORK_SHARE * kind.network,
    }
    if unknown := set(measured) - set(rates):
        raise UserError(f"--plan-rates: no such rate: {', '.join(sorted(unknown))}; there are {', '.join(rates)}")
    return rates | measured | {"peak_tflops": peak}
