"""GPUs: what programs reach of a GPU's datasheet, as a plan computes with it. Called by `planning`. It does not know
models. The datasheets' figures stand in `utils.GPUS`, where an MFU needs them too."""

import json

from utils import UserError, find_gpu

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
    """Rates of a plan: TFLOPS and GB/s that programs reach on this GPU, its memory in GiB; `measured` replaces any. A
    UserError where the GPU is not in the table, or a measured rate is none of these."""
    kind = find_gpu(gpu)
    if not kind or not kind.memory_gib:
        known = "H100 SXM, H100 PCIe, H100 NVL, H200, B200, GB200, GH200, H20, A100 40GB, A100 80GB, L40S, RTX 4090"
        raise UserError(f"--plan-gpu {gpu!r}: not one kind of the table; name one of {known}, ...")
    rates = {
        "memory_gib": kind.memory_gib,
        "matmul_tflops": MATMUL_SHARE * kind.peak_tflops,
        "fp8_tflops": MATMUL_SHARE * kind.peak_tflops * kind.fp8,
        "attention_tflops": ATTENTION_SHARE * kind.peak_tflops,
        "memory_gb_per_s": MEMORY_SHARE * kind.memory,
        "intra_node_gb_per_s": LINK_SHARE * kind.link,
        "inter_node_gb_per_s": NETWORK_SHARE * kind.network,
    }
    if not isinstance(measured, dict) or not all(type(rate) in (int, float) and rate > 0 for rate in measured.values()):
        raise UserError(f"--plan-rates: needs a JSON object of positive numbers, such as {json.dumps(rates)}")
    if unknown := set(measured) - set(rates):
        raise UserError(f"--plan-rates: no such rate: {', '.join(sorted(unknown))}; there are {', '.join(rates)}")
    return rates | measured | {"peak_tflops": kind.peak_tflops}
