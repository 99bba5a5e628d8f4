"""How near plans by data sheets are to published runs: speed beside speed, memory beside memory.

    python benchmarks/plan_published.py [--only 'torchtitan*'] [--again] [--out benchmarks/results/plan_published.json]

Each run of RUNS is planned as `train_fsdp.py --plan` does, without any measured rate. `chose` names what the run was
used to choose in harness/plan; the other runs are held out: no constant was chosen by them. Each group has a table.
What a run's library did otherwise than this program is planned as it did it (`otherwise`, and `rates` for the rate of
its attention kernel). A run that the file has with the same flags is not planned again, unless with --again.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import fnmatch
import importlib.metadata
import json
import pathlib
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

import train_fsdp
from harness import model as models
from harness import plan as planning
from harness.base import UserError, find_gpu
from harness.flags import parse_args

ALL_RUNS = "MODEL_MATMUL_EFFICIENCY"  # one number for the eleven runs that have a constant here
ON_SEVERAL = "MODEL_MATMUL_EFFICIENCY, CONTENTION"  # of those, the runs on several GPUs


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run, and the flags that come nearest to it."""

    name: str
    published: float  # tokens/s a GPU
    source: str  # publication or repository, and its date where it has one
    flags: str  # of the plan, CONFIG for the folder with `config`
    chose: str = ""  # constants of harness/plan that it was used to choose; "" for a run that is held out
    memory_gib: float | None = None  # what it says of a GPU's memory
    memory_is: str = "reserved"  # by PyTorch's allocator, or "allocated": what tensors take
    config: dict | None = None  # of a model without a preset
    rates: dict | None = None  # those that differ from what a plan assumes of this GPU
    otherwise: tuple[str, ...] = ()  # what its library does otherwise than this program: keys of OTHERWISE
    not_expressed: str = ""  # what the run has and a plan cannot say
    guessed: str = ""  # what is not published
    contradicts_itself: bool = False  # its figures do not agree with each other: not in `published_share`
    other_kind: str = ""  # what it is, where it is none of `text.PUBLISHED_KINDS`: in no range that plans print

    def identity(self) -> dict:
        """What a planned row has to agree with to be kept."""
        planned = {"flags": self.flags, "config": self.config, "rates": self.rates, "otherwise": list(self.otherwise)}
        published = {"published": self.published, "memory_gib": self.memory_gib, "memory_is": self.memory_is}
        return planned | published


def llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int) -> dict:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    return {"model_type": "llama", "max_position_embeddings": positions} | sizes


def mpt(width: int, layers: int, heads: int, positions: int) -> dict:
    """A GPT-NeoX of the sizes of llm-foundry's MPT."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": 50368, "max_position_embeddings": positions}
    return {"model_type": "gpt_neox", "tie_word_embeddings": True} | sizes


def hbm2e_h100() -> dict[str, float]:
    """Rates of torchtitan's H100: 96 GB of HBM2e at 2.4 TB/s and 500 W. Of their peak it says that it lies between the
    SXM card's and the NVL card's; here it is the NVL card's."""
    sxm = planning.assumed_rates(find_gpu("H100 SXM"), flash=True)
    rates = {"memory_gib": 93.1, "memory_gb_per_s": 2400 / 3350 * sxm["memory_gb_per_s"]}
    return rates | {name: 835 / 989 * sxm[name] for name in ("matmul_tflops", "fp8_tflops", "attention_tflops")}


def flash_attention_1(gpu: str, sequence: int) -> dict[str, float]:
    """Attention by FlashAttention 1, causal, heads of 128, forward and backward: FlashAttention-2 (arXiv 2307.08691).
    Figure 4 (d) for the A100 has its Triton kernel, which llm-foundry ran; figure 7 (d) for the H100 has only the CUDA
    kernel, which on the A100 is within 3 % of it."""
    published = {("A100", 2048): 68, ("A100", 8192): 78, ("H100", 2048): 108, ("H100", 8192): 135}
    return {"attention_tflops": published[gpu, sequence]}


def every_second_matmul():
    """In the place of `train_fsdp.selective_contexts`: torchtitan's policy, which keeps what attention gives, float8's
    scales, and of the matmuls of a layer the first, third, ..."""
    matmuls: collections.Counter = collections.Counter()

    def policy(context, op, *args, **kwargs):
        keeps = op is torch.ops.aten.max.default or re.search("attention", str(op))
        if op is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keeps = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def reduces_in_fp32() -> MixedPrecisionPolicy:
    """In the place of the policy of bf16-pure: gradients are accumulated and reduced in fp32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_in_bf16(logits: torch.Tensor, labels: torch.Tensor, *_, **__) -> torch.Tensor:
    """In the place of the model wing's `full_loss`: no copy of the logits in fp32."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled_loss(*logits_and_labels, **options) -> torch.Tensor:
    """In the place of the model wing's `full_loss`: compiled, it reads the logits in bf16 and holds no copy in fp32."""
    return torch.compile(FULL_LOSS)(*logits_and_labels, **options)


EVERY_SECOND, COMPILED_LOSS = "recomputes every second matmul", "compiles the loss"
LOSS_IN_BF16, REDUCES_IN_FP32 = "loss in bf16", "accumulates and reduces gradients in fp32"
FULL_LOSS = models.full_loss
OTHERWISE = {  # what is replaced, and by what
    EVERY_SECOND: ("train_fsdp.selective_contexts", every_second_matmul),
    COMPILED_LOSS: ("harness.model.loss.full_loss", compiled_loss),
    LOSS_IN_BF16: ("harness.model.loss.full_loss", loss_in_bf16),
    REDUCES_IN_FP32: ("train_fsdp.MixedPrecisionPolicy", reduces_in_fp32),
}

# The report's memory is torch.cuda.max_memory_allocated by 2**30. Its batches are those of mfu_bench.sh, which made it.
KEMPNER = "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md and mfu_bench.sh, April 2026"
KEMPNER_FLAGS = "--precision bf16-pure --activation-checkpointing full --no-fused-loss --sequence-length 4096 \
--plan-gpu H200 --gpus-per-node 4"
KEMPNER_8B = f"--model llama3.1-8b {KEMPNER_FLAGS}"
TWO_AT_ONCE = "--batch-size 2 --gradient-accumulation-steps 4"
KEMPNER_SHARDED = (LOSS_IN_BF16, REDUCES_IN_FP32)
WHOLE_GRAPH = "the model compiled as one graph (here by layers)"
ROOT_GROUP = "embedding and head gathered together for the whole step"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
TRITON = "its Triton kernel as fast as FlashAttention 1's own"
FOUNDRY_FLAGS = "--model CONFIG --attention flash --no-compile --no-fused-loss --plan-gpus 8"
FSDP1 = "FSDP1's flat parameters"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, December 2024"
TITAN_FLAGS = "--model llama3.1-8b --attention flash --no-fused-loss"
TITAN_AC = f"{TITAN_FLAGS} --batch-size 2 --activation-checkpointing selective"
TITAN_H200 = "pytorch/torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md, June 2025"
POWER = "the peak at 500 W"
NEMO_LIKE = "--model llama3.1-8b --plan-gpus 8 --sequence-length 8192 --batch-size 1 --gradient-accumulation-steps 16"

THUNDER = "Lightning-AI/lightning-thunder, issue"
THUNDER_FLAGS = "--precision bf16-pure --zero-stage 2 --no-fused-loss --compile --plan-gpus 8"
LITGPT = "litgpt's defaults: 1 sequence at once, no checkpointing, AdamW's states in bf16"
LLAMA_2_7B = llama(4096, 11008, 32, 32, 32, 32000, 4096)

RUNS = [
    Run(
        "KempnerForge, Llama-3 8B, 1x H200", 10471, KEMPNER, f"{KEMPNER_8B} {TWO_AT_ONCE} --plan-gpus 1", ALL_RUNS,
        80.7, "allocated", otherwise=(LOSS_IN_BF16,), not_expressed=f"{WHOLE_GRAPH}, which gives all gradients at once",
    ),
    Run(
        "KempnerForge, Llama-3 8B, 4x H200", 9746, KEMPNER,
        f"{KEMPNER_8B} --batch-size 4 --gradient-accumulation-steps 2 --defer-grad-sync --plan-gpus 4", ON_SEVERAL,
        61.1, "allocated", otherwise=KEMPNER_SHARDED, not_expressed=f"{WHOLE_GRAPH}, {ROOT_GROUP}",
    ),
    Run(
        "fms-fsdp, Llama-2 7B, 96x H100, HSDP", 9600, "foundation-model-stack/fms-fsdp",
        "--model CONFIG --attention flash --sequence-length 4096 --batch-size 2 --dp-replicate-size 12 \
--precision bf16-pure --plan-gpus 96", ON_SEVERAL,
        config=llama(4096, 11008, 32, 32, 32, 32000, 4096), not_expressed=FSDP1,
        guessed="batch, precision, no checkpointing",
    ),
    Run(
        "llm-foundry, MPT-7B at 2,048, 8x H100", 10643, FOUNDRY,
        f"{FOUNDRY_FLAGS} --sequence-length 2048 --batch-size 6", ON_SEVERAL,
        config=mpt(4096, 32, 32, 2048), rates=flash_attention_1("H100", 2048), not_expressed=FSDP1, guessed=TRITON,
    ),
    Run(
        "llm-foundry, MPT-3B at 8,192, 8x H100", 16578, FOUNDRY,
        f"{FOUNDRY_FLAGS} --sequence-length 8192 --batch-size 3 --gradient-accumulation-steps 6", ON_SEVERAL,
        config=mpt(2560, 32, 20, 8192), rates=flash_attention_1("H100", 8192), not_expressed=FSDP1, guessed=TRITON,
    ),
    Run(
        "llm-foundry, MPT-1B at 8,192, 8x H100", 29157, FOUNDRY,
        f"{FOUNDRY_FLAGS} --sequence-length 8192 --batch-size 3 --gradient-accumulation-steps 4", ON_SEVERAL,
        config=mpt(2048, 24, 16, 8192), rates=flash_attention_1("H100", 8192), not_expressed=FSDP1, guessed=TRITON,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 8x H100, eager", 5762, TITAN, f"{TITAN_AC} --plan-gpus 8 --no-compile", ON_SEVERAL,
        82.4, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 8x H100, compiled", 6667, TITAN, f"{TITAN_AC} --plan-gpus 8 --compile", ON_SEVERAL,
        77.0, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 8x H100, float8", 8532, TITAN, f"{TITAN_AC} --plan-gpus 8 --precision fp8",
        ON_SEVERAL, 76.8, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 32x H200, float8", 10938, TITAN_H200,
        f"{TITAN_AC} --plan-gpus 32 --plan-gpu H200 --precision fp8", ON_SEVERAL, 47.96,
        otherwise=(EVERY_SECOND, COMPILED_LOSS),
    ),
    Run(
        "SmolLM3-3B, 4x H100, eager, ZeRO-2", 8415, "docs/MFU_CALCULATION.md, December 2025",
        "--attention flash --no-compile --no-fused-loss --plan-gpus 4 --zero-stage 2 --precision bf16-pure \
--activation-checkpointing full", ON_SEVERAL, guessed="checkpointing, by the memory that it printed",
        contradicts_itself=True,
    ),
    Run(
        "NeMo 24.09, Llama-3.1 8B, 8x H100, bf16", 10153, "NVIDIA, NeMo Framework 24.09, performance",
        f"{NEMO_LIKE} --zero-stage 1",
        not_expressed="context parallel 2 (here 1), Transformer Engine, reduction of bf16 gradients",
    ),
    Run(
        "BioNeMo, OpenGenome2 7B, 48x H100, FSDP2", 9930,
        "NVIDIA/bionemo-framework, bionemo-recipes/recipes/llama3_native_te, L2_og2_metagenome_7b.yaml",
        "--model CONFIG --sequence-length 8192 --batch-size 2 --gradient-accumulation-steps 4 --plan-gpus 48",
        config=llama(4096, 14336, 32, 32, 32, 256, 8192), not_expressed="Transformer Engine's layers (here compiled)",
        guessed="microbatch 2, of 8 sequences a GPU",
    ),
    Run(
        "Megatron-Bridge, Llama-3 8B, 8x H100, fp8", 14451,
        "NVIDIA-NeMo/Megatron-Bridge, performance summary of 25.11", f"{NEMO_LIKE} --precision fp8",
        not_expressed="Transformer Engine; in today's recipe 5 layers recomputed, reduction of bf16 gradients",
    ),
    Run(
        "KempnerForge, Llama-3 8B, 2x H200", 9364, KEMPNER,
        f"{KEMPNER_8B} {TWO_AT_ONCE} --defer-grad-sync --plan-gpus 2", memory_gib=62.4, memory_is="allocated",
        otherwise=KEMPNER_SHARDED, not_expressed=f"{WHOLE_GRAPH}, {ROOT_GROUP}",
    ),
    Run(
        "KempnerForge, 13B, 2 nodes of 4x H200, eager", 4426, KEMPNER,
        f"--model CONFIG {KEMPNER_FLAGS} --batch-size 4 --gradient-accumulation-steps 4 --defer-grad-sync \
--no-compile --plan-gpus 8", memory_gib=88.5, memory_is="allocated",
        config=llama(5120, 17920, 40, 40, 8, 128256, 4096), otherwise=KEMPNER_SHARDED, not_expressed=ROOT_GROUP,
        guessed="network of 400 Gb/s a GPU",
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 128x H100, eager", 5605, TITAN, f"{TITAN_AC} --plan-gpus 128 --no-compile",
        memory_gib=67.0, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 128x H100, compiled", 6514, TITAN, f"{TITAN_AC} --plan-gpus 128 --compile",
        memory_gib=62.0, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 128x H100, float8", 8380, TITAN, f"{TITAN_AC} --plan-gpus 128 --precision fp8",
        memory_gib=61.8, rates=hbm2e_h100(), otherwise=(EVERY_SECOND,), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B at 32,768, 8x H100, float8", 3890, TITAN,
        f"{TITAN_FLAGS} --sequence-length 32768 --batch-size 1 --activation-checkpointing full --plan-gpus 8 \
--precision fp8", memory_gib=83.9, rates=hbm2e_h100(), guessed=POWER,
    ),
    Run(
        "torchtitan, Llama-3.1 8B, 64x H200, float8", 10753, TITAN_H200,
        f"{TITAN_AC} --plan-gpus 64 --plan-gpu H200 --precision fp8", memory_gib=46.97,
        otherwise=(EVERY_SECOND, COMPILED_LOSS),
    ),
    Run(
        "llm-foundry, MPT-1B at 2,048, 8x H100", 45455, FOUNDRY,
        f"{FOUNDRY_FLAGS} --sequence-length 2048 --batch-size 14",
        config=mpt(2048, 24, 16, 2048), rates=flash_attention_1("H100", 2048), not_expressed=FSDP1, guessed=TRITON,
    ),
    Run(
        "llm-foundry, MPT-7B at 8,192, 8x H100, full checkpointing", 6935, FOUNDRY,
        f"{FOUNDRY_FLAGS} --sequence-length 8192 --batch-size 8 --gradient-accumulation-steps 2 \
--activation-checkpointing full", config=mpt(4096, 32, 32, 8192), rates=flash_attention_1("H100", 8192),
        not_expressed=FSDP1, guessed=TRITON,
    ),
    Run(
        "llm-foundry, MPT-7B at 2,048, 8x A100", 4641, FOUNDRY,
        f"{FOUNDRY_FLAGS} --plan-gpu A100 --sequence-length 2048 --batch-size 6 --gradient-accumulation-steps 2",
        config=mpt(4096, 32, 32, 2048), rates=flash_attention_1("A100", 2048), not_expressed=FSDP1,
    ),
    Run(
        "llm-foundry, MPT-3B at 8,192, 8x A100", 7695, FOUNDRY,
        f"{FOUNDRY_FLAGS} --plan-gpu A100 --sequence-length 8192 --batch-size 3 --gradient-accumulation-steps 6",
        config=mpt(2560, 32, 20, 8192), rates=flash_attention_1("A100", 8192), not_expressed=FSDP1,
    ),
    Run(
        "llm-foundry, MPT-1B at 8,192, 8x A100", 13814, FOUNDRY,
        f"{FOUNDRY_FLAGS} --plan-gpu A100 --sequence-length 8192 --batch-size 3 --gradient-accumulation-steps 4",
        config=mpt(2048, 24, 16, 8192), rates=flash_attention_1("A100", 8192), not_expressed=FSDP1,
    ),
    Run(
        "lightning-thunder, Llama-3 8B, 8x H100, ZeRO-2", 10219, f"{THUNDER} 2144, May 2025",
        f"--model llama3.1-8b --sequence-length 8192 {THUNDER_FLAGS}", otherwise=(COMPILED_LOSS,),
        not_expressed="thunder's own fusion (here inductor's)", guessed=LITGPT,
    ),
    Run(
        "lightning-thunder, Llama-2 7B, 8x H100, inductor", 11856, f"{THUNDER} 940, August 2024",
        f"--model CONFIG --sequence-length 4096 --attention flash {THUNDER_FLAGS}", config=LLAMA_2_7B,
        otherwise=(COMPILED_LOSS,), guessed=LITGPT,
    ),
    Run(
        "lightning-thunder, Llama-2 7B, 8x H100, thunder with cuDNN", 12493, f"{THUNDER} 940, August 2024",
        f"--model CONFIG --sequence-length 4096 {THUNDER_FLAGS}", config=LLAMA_2_7B, otherwise=(COMPILED_LOSS,),
        not_expressed="thunder's own fusion (here inductor's)", guessed=LITGPT,
    ),
    Run(
        "lightning-thunder, Llama-3 8B, 8x H100, torchao float8", 12414, f"{THUNDER} 1528, December 2024",
        f"--model llama3.1-8b --sequence-length 8192 {THUNDER_FLAGS} --precision fp8", memory_gib=51.7,
        memory_is="allocated", otherwise=(COMPILED_LOSS,), not_expressed="parameters and states in bf16 (here fp32)",
        guessed=f"{LITGPT}; memory as PyTorch allocates it, in GiB",
    ),
    Run(
        "NeMo, Llama-2 7B, 8x H100, fp8", 16154, "NVIDIA/NeMo-Framework-Launcher, issue 347",
        "--model CONFIG --sequence-length 4096 --precision fp8 --zero-stage 1 --gradient-accumulation-steps 16 \
--plan-gpus 8", config=LLAMA_2_7B, not_expressed="Transformer Engine, reduction of bf16 gradients",
        guessed="a global batch of 128",
    ),
    Run(
        "Megatron-Bridge, Llama-3 8B, 8x B200, fp8", 30624,
        "NVIDIA-NeMo/Megatron-Bridge, performance summary, August 2026",
        f"{NEMO_LIKE} --plan-gpu B200 --precision fp8",
        not_expressed="Transformer Engine, CUDA graphs, overlap by Megatron",
        guessed="8 GPUs, as its run on H100", other_kind="a dense model on a B200",
    ),
    Run(
        "torchtitan, Qwen3-30B-A3B at 8,192, 8x B200", 19500, "mlc-ai/pith-train, issue 79, July 2026",
        "--model qwen3-30b-a3b --sequence-length 8192 --batch-size 8 --activation-checkpointing selective --compile \
--plan-gpus 8 --plan-gpu B200", memory_gib=141.79, otherwise=(EVERY_SECOND,),
        not_expressed="its permutation and router, experts outside of the compiled blocks",
        guessed="fp32 parameters and states, grouped products recomputed, memory as torchtitan reports it",
        other_kind="a mixture of experts on a B200",
    ),
]  # fmt: skip


def plan(run: Run) -> dict:
    """What `train_fsdp.py --plan --json` says of a run, in this process: loading torch takes longer than a plan.

    Raises:
        UserError: the flags, the config or the rates are refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = "none"
        if run.rates:
            given = str(pathlib.Path(folder, "rates.json"))
            pathlib.Path(given).write_text(json.dumps(run.rates))
        if run.config:
            pathlib.Path(folder, "config.json").write_text(json.dumps(run.config))
        flags = ["--plan", "--json", "--plan-seconds", "0", "--plan-rates", given]
        settings = parse_args([*flags, *run.flags.replace("CONFIG", folder).split()])
        with contextlib.ExitStack() as stack:
            for name in run.otherwise:
                stack.enter_context(mock.patch(*OTHERWISE[name]))
            _, result = planning.make_plan(settings, train_fsdp.RECIPE)
    return result


def row_of(run: Run, planned: dict) -> dict:
    """What the file keeps of a planned run. Memory is in GiB, without what CUDA and NCCL take."""
    speed = planned["tokens_per_sec_per_gpu"]
    if run.memory_is == "allocated":
        memory = planned["memory_gib"]["total"]
    else:
        memory = planned["memory_gib"]["reserved"] - planned["beside_tensors_gib"]["CUDA and NCCL"]
    return dataclasses.asdict(run) | {
        "planned": speed,
        "error": speed / run.published - 1,
        "planned_memory_gib": memory,
        "memory_error": memory / run.memory_gib - 1 if run.memory_gib else None,
        "verdict": planned["verdict"],
        "mfu_percent": planned["mfu_percent"],
        "step_time_ms": planned["step_time_ms"],
        "time_ms": planned["time_ms"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def summary_of(rows: list[dict]) -> dict:
    """Median and worst size of the errors of a group, of speed and of memory."""
    summary = {"runs": len(rows)}
    for name in ("error", "memory_error"):
        sizes = [abs(row[name]) for row in rows if row[name] is not None]
        if sizes:
            summary |= {f"median_{name}": statistics.median(sizes), f"worst_{name}": max(sizes)}
    return summary


def published_share(rows: Iterable[dict]) -> list[float]:
    """`text.PUBLISHED_SHARE`: published speed over the planned, the least, the median and the most."""
    shares = [
        row["published"] / row["planned"] for row in rows if not row["contradicts_itself"] and not row["other_kind"]
    ]
    return [min(shares), statistics.median(shares), max(shares)]


def published_memory_share(rows: Iterable[dict]) -> list[float]:
    """`predict.PUBLISHED_MEMORY_SHARE`: the same of the memory, of the runs that say it."""
    shares = [
        row["memory_gib"] / row["planned_memory_gib"] for row in rows if row["memory_gib"] and not row["other_kind"]
    ]
    return [min(shares), statistics.median(shares), max(shares)]


def groups_of(rows: dict[str, dict]) -> dict[str, list[dict]]:
    """The runs that chose a constant, and those held out, in the order of RUNS."""
    known = [rows[run.name] for run in RUNS if run.name in rows]
    return {"set": [row for row in known if row["chose"]], "held out": [row for row in known if not row["chose"]]}


def save(out: pathlib.Path, rows: dict[str, dict]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "torchao")}
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": versions}
    summary = {name: summary_of(group) for name, group in groups_of(rows).items()}
    contents = {"suite": "plan_published", "about": about, "summary": summary}
    shares = {"published_share": published_share(rows.values())}
    if any(row["memory_gib"] for row in rows.values()):
        shares["published_memory_share"] = published_memory_share(rows.values())
    contents |= shares | {"runs": rows}
    out.write_text(json.dumps(contents, indent=1) + "\n")


def percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.0f} %"


def table(rows: list[dict]) -> str:
    """As docs/PLAN.md has it."""
    lines = ["| run | tokens/s a GPU | planned | error | GiB | planned | error |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["name"], f"{row['published']:,.0f}", f"{row['planned']:,.0f}", percent(row["error"])]
        cells.append(f"{row['memory_gib']:.1f}" if row["memory_gib"] else "")
        cells += [f"{row['planned_memory_gib']:.1f}", percent(row["memory_error"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of runs, with * and ?")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "plan_published.json")
    parser.add_argument("--again", action="store_true", help="plan the runs that the file has, too")
    args = parser.parse_args()
    rows: dict = json.loads(args.out.read_text())["runs"] if args.out.exists() else {}
    for run in RUNS:
        kept = rows.get(run.name)
        is_planned = (
            not args.again and kept is not None and {key: kept[key] for key in run.identity()} == run.identity()
        )
        if is_planned:
            rows[run.name] |= dataclasses.asdict(run)  # its words may have changed
        if is_planned or not fnmatch.fnmatch(run.name, args.only):
            continue
        try:
            rows[run.name] = row_of(run, plan(run))
        except UserError as error:
            print(f"{run.name}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{run.name:60}{rows[run.name]['planned']:10,.0f}{100 * rows[run.name]['error']:+7.1f} %", flush=True)
        save(args.out, rows)
    for name, group in groups_of(rows).items():
        if group:
            summary = summary_of(group)
            error, worst = 100 * summary["median_error"], 100 * summary["worst_error"]
            print(f"\n{name}: median {error:.0f} %, worst {worst:.0f} %\n\n{table(group)}")


if __name__ == "__main__":
    main()
