"""Names: what a mistyped flag, or a mistyped name of anything else, may have meant."""

import difflib
from collections.abc import Iterable

from harness.flags.settings import FLAGS, as_flag

# Flags that are no more, and what takes their place.
INSTEAD = {
    "--ema": "--average-checkpoints K, with --num-steps 0 --resume RUN, averages the weights of saved checkpoints",
    "--skip-spikes": "steps that are not finite are skipped by themselves; a lower --max-grad-norm tames spikes",
    "--muon-iteration": "muon has one iteration, Newton-Schulz; leave it out",
    "--muon-scale": "muon scales as match_rms_adamw; leave it out",
    "--momentum-dtype": "muon's momentum is in fp32; leave it out",
    "--measure": "plans go by assumed rates; docs/PLAN.md has them beside runs on GPUs",
    "--plan-rates": "plans go by assumed rates; --plan-gpu names a GPU of the table",
    "--activation-memory-budget": "--activation-checkpointing selective or full keeps fewer activations",
}

# Flags of other trainers, and what there is here; `also` of a flag has those that are the same by another name.
ON_ASSISTANT = "the loss is on the assistant's turns and on completions; --chat-loss all takes every token"
LAYOUTS = "the layout of records is found by their fields; docs/DATA.md (Conversations) has the layouts"
KEEP_BEST = "--keep-best keeps the checkpoint with the lowest held-out loss, and the last lines of the run export it"
HUB = "--export DIR writes a folder, which `hf upload REPO DIR` puts on the hub"
MERGED = "--export DIR --export-weights merged writes a whole model"
HELD_OUT = "--eval-split takes a file or folder of its own too; without it one of 20 documents is held out"
ADAPTERS = "--lora-rank R trains adapters of that rank, by peft"
QUANTIZED = "a quantized base (QLoRA) is not trained here, TRL and axolotl do that; --lora-rank R has its base in bf16"
ELSEWHERE = {
    "--assistant-only-loss": ON_ASSISTANT,
    "--completion-only-loss": ON_ASSISTANT,
    "--train-on-inputs": ON_ASSISTANT,
    "--train-on-prompt": ON_ASSISTANT,
    "--train-on-responses-only": ON_ASSISTANT,
    "--mask-prompt": ON_ASSISTANT,
    "--roles-to-train": ON_ASSISTANT,
    "--train-on-eos": "the token that ends a turn of the assistant's is in the loss",
    "--conversation-column": "--text-field names a column of messages; messages and conversations are found",
    "--messages-field": "--text-field names a column of messages; messages and conversations are found",
    "--dataset-format": LAYOUTS,
    "--dataset-type": LAYOUTS,
    "--conversation-template": "--chat-template FILE has a jinja template; without it the tokenizer's is taken",
    "--eval-dataset": HELD_OUT,
    "--validation-file": HELD_OUT,
    "--per-device-eval-batch-size": "evaluations have the --batch-size of the training",
    "--eval-strategy": "--eval-interval takes a number of steps, or epoch",
    "--evaluation-strategy": "--eval-interval takes a number of steps, or epoch",
    "--save-strategy": "--checkpoint-interval takes a number of steps; --keep-best saves at each evaluation",
    "--warmup-ratio": "--warmup-steps takes a number of steps; left out they are 5 % of the run's",
    "--load-best-model-at-end": KEEP_BEST,
    "--metric-for-best-model": KEEP_BEST,
    "--early-stopping": f"no run ends before its steps; {KEEP_BEST}",
    "--early-stopping-patience": f"no run ends before its steps; {KEEP_BEST}",
    "--early-stopping-threshold": f"no run ends before its steps; {KEEP_BEST}",
    "--push-to-hub": HUB,
    "--hub-model-id": HUB,
    "--hub-token": HUB,
    "--hub-strategy": HUB,
    "--hub-private-repo": HUB,
    "--use-peft": ADAPTERS,
    "--peft": ADAPTERS,
    "--lora-r": ADAPTERS,
    "--lora-target-modules": "--lora-targets names the linears that have adapters",
    "--lora-dropout": "adapters have no dropout here; leave it out",
    "--use-dora": "adapters are plain LoRA here; peft and TRL train others",
    "--use-rslora": "--lora-alpha sets the scale of adapters, alpha / rank; sqrt(rank) x alpha gives rsLoRA's",
    "--modules-to-save": "adapters alone are trained with --lora-rank; without it all weights",
    "--adapter": ADAPTERS,
    "--merge": MERGED,
    "--merge-lora": MERGED,
    "--merge-and-unload": MERGED,
    "--val-set-size": HELD_OUT,
    "--eval-file": HELD_OUT,
    "--evals-per-epoch": "--eval-interval takes a number of steps, or epoch",
    "--gradient-checkpointing": "--activation-checkpointing full (or selective) recomputes activations",
    "--dpo": "losses of preferences are not here; TRL has them",
    "--eos-token": "texts end with the tokenizer's eos_token, or what the chat template puts behind an answer",
    "--load-in-4bit": QUANTIZED,
    "--load-in-8bit": QUANTIZED,
    "--qlora": QUANTIZED,
}


def no_such_flag(name: str, known: Iterable[str]) -> str:
    """What is wrong with a flag that is none, and what takes its place or may have been meant."""
    if name in INSTEAD:
        return f"no such flag any more; {INSTEAD[name]}"
    if answer := ELSEWHERE.get(name.lower().replace("_", "-")):
        return f"no such flag; {answer}"
    return f"no such flag{suggest(name, known)}"


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty where no name in `known` is near."""
    name, known = name.lower().replace("_", "-"), sorted(known)
    meanings = {own: own for own in known}
    for field, about in FLAGS.items():
        if as_flag(field) in known:
            meanings |= {f"--{other}": as_flag(field) for other in about.metadata["also"].split()}
    near = [meanings[name]] if name in meanings and name not in known else []
    if not near and len(name) > 4:
        near = [own for own in known if own.startswith(name)]
    if not near:
        near = [meanings[other] for other in difflib.get_close_matches(name, meanings, 1, 0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
