"""Adapters are trained as in a plain loop of peft, on any ranks and by every technique, and nothing else is."""

import itertools

import peft
import pytest
import torch
from conftest import answer_of, slow_case
from tiny import build, rank_share, take_steps
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

SEQUENCES, LENGTH, STEPS = 8, 32, 4
DOCUMENTS = (LENGTH // 4, 3 * LENGTH // 4)  # tokens of the two in each sequence, with --document-mask
FLAGS = "--init pretrained --lora-rank 3 --lr 1e-2 --num-steps 4 --lr-scheduler constant --warmup-steps 0 --no-compile"
MASKED = "every second label is left out, as of a conversation"
# {name: (ranks, model, flags)}, in fp32 unless the flags say otherwise
QUICK = {
    f"one rank, full logits, {MASKED}": (1, "llama", "--no-fused-loss"),
    "one rank in bf16": (1, "llama", "--precision bf16 --no-fused-loss"),
    "stage 3 in 2 microbatches": (2, "smollm3", "--gradient-accumulation-steps 2"),
}
SLOW = {
    "documents": (2, "llama", "--document-mask --activation-checkpointing full"),
    "experts": (2, "qwen3_moe", ""),
    "compiled": (1, "llama", "--compile --activation-checkpointing selective"),
    "offload": (2, "smollm3", "--cpu-offload --zero-stage 2 --activation-checkpointing selective"),
    "stage 2 in 2 microbatches": (4, "smollm3", "--zero-stage 2 --gradient-accumulation-steps 2"),
    "stage 1 in 2 microbatches": (4, "smollm3", "--zero-stage 1 --gradient-accumulation-steps 2"),
    "stage 0": (4, "smollm3", "--zero-stage 0"),
    "2 replicas in 2 microbatches": (4, "smollm3", "--dp-replicate-size 2 --gradient-accumulation-steps 2"),
    "2 replicas, offloaded": (4, "llama", "--dp-replicate-size 2 --cpu-offload"),
    f"documents, {MASKED}": (4, "llama", "--document-mask"),
    "fewer rows than ranks": (4, "llama", "--lora-rank 2 --lora-targets q_proj down_proj"),
    "a pattern": (4, "llama", "--lora-targets .*layers\\.1\\..*proj"),
    "bf16, stage 2, 2 replicas": (4, "llama", "--precision bf16 --zero-stage 2 --dp-replicate-size 2"),
}
CASES = QUICK | SLOW


def start_value(name: str, shape: torch.Size) -> torch.Tensor:
    """An adapter's value before the first step, by its name: B is zero in a run, and would hide A's gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return 0.1 * torch.randn(shape, generator=generator)


def global_batch(step: int, case: str) -> dict[str, torch.Tensor]:
    """Ids, labels that are shifted already and, where documents are masked, positions."""
    ids = torch.randint(0, 1536, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
    if MASKED in case:
        batch["labels"][:, ::2] = -100
    if "documents" in case:
        batch["position_ids"] = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(SEQUENCES, -1)
    return batch


def train(workspace, case: str) -> dict:
    """Losses and gradient norms, the adapters after the steps, and what is held of the frozen weights."""
    _, name, flags = CASES[case]
    argv = ["--model", workspace / "checkpoints" / name, "--sequence-length", LENGTH, "--precision", "fp32"]
    settings, model, optimizer = build([*argv, *FLAGS.split(), *flags.split()])
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, adapter in adapters.items():
            start = start_value(name, adapter.shape).to(adapter.dtype)
            adapter.copy_(distribute_tensor(start, adapter.device_mesh, adapter.placements))
    shares = (rank_share(global_batch(step, case), settings.gradient_accumulation_steps) for step in range(STEPS))
    losses, norms = take_steps(settings, model, optimizer, itertools.chain.from_iterable(shares), STEPS)
    return {
        "losses": losses,
        "norms": norms,
        "adapters": {name: (p.full_tensor() if isinstance(p, DTensor) else p).tolist() for name, p in adapters.items()},
        "dtypes": [sorted({str(p.dtype) for p in parameters}) for parameters in (frozen, adapters.values())],
        "states": len(optimizer.state),
        "gradients of frozen": sum(parameter.grad is not None for parameter in frozen),
    }


def train_all(workspace, cases: list[str]) -> dict[str, dict]:
    return {case: train(workspace, case) for case in cases}


@pytest.fixture(scope="module")
def observed(request, workspace, device):
    """{case: what `train` returned} of this tier's cases; one rank in this process."""
    seen = {}
    chosen = QUICK if request.config.option.markexpr == "not slow" else CASES
    for ranks in (1, 2, 4):
        cases = [case for case in chosen if CASES[case][0] == ranks]
        if ranks == 1:
            seen |= train_all(workspace, cases)
        elif cases:
            seen |= answer_of(ranks, train_all, workspace, cases)
    return seen


def by_peft(workspace, case: str) -> dict:
    """The same steps by peft and torch alone, in one process."""
    _, name, flags = CASES[case]
    words = flags.split()
    dtype = torch.bfloat16 if "bf16" in words else torch.float32
    base = AutoModelForCausalLM.from_pretrained(
        workspace / "checkpoints" / name, dtype=dtype, attn_implementation="sdpa"
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if name != "qwen3_moe":  # whose experts are stacked in one weight
        targets += ["gate_proj", "up_proj", "down_proj"]
    if "--lora-targets" in words:
        named = words[words.index("--lora-targets") + 1 :]
        targets = named if len(named) > 1 else named[0]
    rank = 2 if "--lora-rank" in words else 3
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, adapter in adapters.items():
        adapter.data = start_value(name.removeprefix("base_model.model."), adapter.shape)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step, case)
        computing = {name: adapter.to(dtype) for name, adapter in adapters.items()}
        parts = batch["input_ids"].split(DOCUMENTS if "documents" in case else LENGTH, 1)
        logits = [functional_call(model, computing, kwargs={"input_ids": part}).logits for part in parts]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits, 1).float().flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name.removeprefix("base_model.model."): adapter.detach() for name, adapter in adapters.items()}
    return {"losses": losses, "norms": norms, "adapters": weights}


@pytest.mark.parametrize("case", [*QUICK, *map(slow_case, SLOW)])
def test_adapters_are_trained_as_by_a_plain_loop_of_peft(workspace, observed, case):
    """To 1e-5 in fp32. In bf16 one rank rounds as the loop does, and several ranks round their parts of a batch."""
    seen, reference = observed[case], by_peft(workspace, case)
    in_bf16 = "bf16" in case
    near = 2e-3 if in_bf16 else 1e-5
    assert seen["losses"] == pytest.approx(reference["losses"], rel=near)
    assert seen["norms"] == pytest.approx(reference["norms"], rel=10 * near)
    assert seen["adapters"].keys() == reference["adapters"].keys()
    for name, adapter in reference["adapters"].items():
        assert torch.tensor(seen["adapters"][name]).sub(adapter).abs().max() < 10 * near, name
    assert min(seen["norms"]) > 0 and seen["gradients of frozen"] == 0
    assert seen["states"] == len(reference["adapters"])  # of the optimizer
    assert seen["dtypes"] == [["torch.bfloat16" if in_bf16 else "torch.float32"], ["torch.float32"]]
