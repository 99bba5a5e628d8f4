"""Adapters are trained as in a plain loop of peft, on any ranks and by every technique, and nothing else is."""

import functools
import itertools
import json

import loraranks
import peft
import pytest
import torch
from conftest import forked, slow_case
from loraranks import LENGTH, STEPS, start_value, tokens_of
from torch.func import functional_call
from transformers import AutoModelForCausalLM

NAMES = {"llama": "checkpoints/llama", "smollm3": "checkpoints/smollm3", "qwen3_moe": "checkpoints/qwen3_moe"}
FP32 = "--precision fp32 "
QUICK = {
    "one rank, masked labels, full logits": (1, "llama", FP32 + "masked --no-fused-loss"),
    "one rank in bf16": (1, "llama", "--precision bf16 --no-fused-loss"),
    "stage 3 in 2 microbatches": (2, "smollm3", FP32 + "--gradient-accumulation-steps 2"),
    "documents": (2, "llama", FP32 + "--document-mask --activation-checkpointing full"),
    "experts": (2, "qwen3_moe", FP32),
}
SLOW = {
    "one rank": (1, "smollm3", FP32),
    "offload": (2, "smollm3", FP32 + "--cpu-offload --zero-stage 2 --activation-checkpointing selective"),
    "compiled": (1, "llama", FP32 + "--compile --activation-checkpointing selective"),
    "stage 3": (4, "smollm3", FP32),
    "stage 2 in 2 microbatches": (4, "smollm3", FP32 + "--zero-stage 2 --gradient-accumulation-steps 2"),
    "stage 1 in 2 microbatches": (4, "smollm3", FP32 + "--zero-stage 1 --gradient-accumulation-steps 2"),
    "stage 0": (4, "smollm3", FP32 + "--zero-stage 0"),
    "2 replicas": (4, "smollm3", FP32 + "--dp-replicate-size 2 --gradient-accumulation-steps 2"),
    "2 replicas, offloaded": (4, "llama", FP32 + "--dp-replicate-size 2 --cpu-offload"),
    "masked labels and documents": (4, "llama", FP32 + "masked --document-mask"),
    "fewer rows than ranks": (4, "llama", FP32 + "--lora-rank 2 --lora-targets q_proj down_proj"),
    "a pattern": (4, "llama", FP32 + "--lora-targets .*layers\\.1\\..*proj"),
    "bf16 on four ranks": (4, "llama", "--precision bf16"),
    "bf16, stage 2, 2 replicas": (4, "llama", "--precision bf16 --zero-stage 2 --dp-replicate-size 2"),
}
CASES = QUICK | SLOW


@pytest.fixture(scope="module")
def observed(request, workspace, device, tmp_path_factory):
    """Results of this tier's cases, by the names of the cases; one rank in this process."""
    folder, seen = tmp_path_factory.mktemp("observed"), {}
    chosen = QUICK if request.config.option.markexpr == "not slow" else CASES
    for ranks in sorted({ranks for ranks, *_ in chosen.values()}):
        cases = {name: (NAMES[model], words) for name, (on, model, words) in chosen.items() if on == ranks}
        if ranks == 1:
            seen |= {name: loraranks.take_steps(workspace / model, words) for name, (model, words) in cases.items()}
            continue
        forked(ranks, loraranks.main, workspace, cases, folder / f"{ranks}.json")
        seen |= json.loads((folder / f"{ranks}.json").read_text())
    return seen


@functools.cache
def by_peft(folder, words: str) -> dict:
    """The steps of a case by peft and torch alone, in one process: `words` are its flags, which set the dtypes."""
    given = words.split()
    dtype = torch.bfloat16 if "bf16" in given else torch.float32
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if base.config.model_type != "qwen3_moe":  # whose experts are stacked in one weight
        targets += ["gate_proj", "up_proj", "down_proj"]
    rank = int(given[given.index("--lora-rank") + 1]) if "--lora-rank" in given else 3
    if "--lora-targets" in given:
        named = [word for word in given[given.index("--lora-targets") + 1 :] if not word.startswith("--")]
        targets = named if len(named) > 1 else named[0]
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.data = start_value(name.removeprefix("base_model.model."), parameter.shape)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        batch = tokens_of(step, "masked" in given)
        computing = {name: parameter.to(dtype) for name, parameter in adapters.items()}
        cuts = [0, LENGTH // 4, LENGTH] if "--document-mask" in given else [0, LENGTH]
        logits = [
            functional_call(model, computing, kwargs={"input_ids": batch["input_ids"][:, start:end]}).logits
            for start, end in itertools.pairwise(cuts)
        ]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits, 1).float().flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name.removeprefix("base_model.model."): p.detach() for name, p in adapters.items()}
    return {"losses": losses, "norms": norms, "adapters": weights}


@pytest.mark.parametrize("name", [*QUICK, *map(slow_case, SLOW)])
def test_adapters_are_trained_as_by_a_plain_loop_of_peft(workspace, observed, name):
    """To 1e-5 in fp32. In bf16 one rank rounds as the loop does, and several ranks round their parts of a batch."""
    _, model, words = CASES[name]
    seen, reference = observed[name], by_peft(workspace / NAMES[model], words.strip())
    near = 1e-5 if FP32 in words else 2e-3
    assert seen["losses"] == pytest.approx(reference["losses"], rel=near)
    assert seen["norms"] == pytest.approx(reference["norms"], rel=10 * near)
    assert seen["adapters"].keys() == reference["adapters"].keys()
    for adapter, value in reference["adapters"].items():
        assert torch.tensor(seen["adapters"][adapter]).sub(value).abs().max() < 10 * near, adapter
    assert len(seen["losses"]) == STEPS and min(seen["norms"]) > 0 and seen["gradients of frozen"] == 0
    assert seen["states"] == len(reference["adapters"])  # of the optimizer
    assert seen["frozen dtypes"] == ["torch.float32" if FP32 in words else "torch.bfloat16"]
