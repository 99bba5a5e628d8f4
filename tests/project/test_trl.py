"""Losses are those of TRL's SFTTrainer: of the assistant's turns alone, packed, of all weights and of adapters."""

import json
import os
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from conftest import ROOT, chat, metrics_of, train, words
from trlsteps import BETAS, LENGTH, LR, SEQUENCES, STEPS, WEIGHT_DECAY

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
FLAGS = "--init pretrained --precision fp32 --no-compile --num-workers 0 --log-interval 1 --batch-size 1"
FLAGS += f" --num-steps {STEPS} --sequence-length {LENGTH} --gradient-accumulation-steps {SEQUENCES}"
FLAGS += f" --lr {LR} --warmup-steps 1 --lr-scheduler cosine --betas {BETAS[0]} {BETAS[1]} --max-grad-norm 1"
FLAGS += f" --weight-decay {WEIGHT_DECAY}"


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all weights", "adapters"])
def test_losses_are_those_of_trl(workspace, device, tmp_path, trained):
    """A step takes all chats, so their order does not matter."""
    chats, base_folder, folder = tmp_path / "chats.jsonl", tmp_path / "base", tmp_path / "adapters"
    turns = [[f"The fox had {number} kites. " * (1 + number % 3)] * (2 + 2 * (number % 2)) for number in range(12)]
    chats.write_text("\n".join(json.dumps(chat(*contents)) for contents in turns))
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace / "checkpoints" / "llama", dtype=torch.float32)
    model.save_pretrained(base_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace / "tokenizer", chat_template=TEMPLATE)
    tokenizer.save_pretrained(base_folder)
    if trained == "adapters":
        model = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        peft.get_peft_model(model, config).save_pretrained(folder)
    adapters = folder if trained == "adapters" else ""
    command = [sys.executable, ROOT / "tests" / "trlsteps.py", base_folder, adapters, chats, tmp_path]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=300)
    theirs = json.loads((tmp_path / "losses.json").read_text())
    places = ["--dataset", chats, "--cache-dir", tmp_path / "cache", "--output-dir", tmp_path / "out"]
    assert train(["--model", adapters or base_folder, *words(FLAGS), *places, "--run-name", "r"], device) == 0
    ours = [line for line in metrics_of(tmp_path / "out" / "r") if not line.get("final")]
    assert len(ours) == len(theirs) == STEPS
    for name, near in {"loss": 1e-6, "grad_norm": 1e-5, "learning_rate": 1e-6}.items():
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=near), name
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.01
