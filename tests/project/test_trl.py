"""Losses are those of TRL's SFTTrainer: of the assistant's turns alone, packed, of all weights and of adapters."""

import json

import peft
import pytest
import torch
import transformers
from conftest import metrics_of, train, words

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
STEPS, LENGTH, SEQUENCES = 6, 256, 5
FLAGS = "--init pretrained --precision fp32 --no-compile --num-workers 0 --log-interval 1 --lr 1e-2 --warmup-steps 1"
FLAGS += f" --num-steps {STEPS} --sequence-length {LENGTH} --gradient-accumulation-steps {SEQUENCES} --batch-size 1"
FLAGS += " --lr-scheduler cosine --betas 0.9 0.95 --weight-decay 0.1 --max-grad-norm 1"


def conversation(number: int) -> dict:
    turns = [
        {
            "role": "user" if turn % 2 == 0 else "assistant",
            "content": f"The fox had {number} kites. " * (1 + number % 3),
        }
        for turn in range(2 + 2 * (number % 2))
    ]
    return {"messages": turns}


@pytest.fixture
def base_model(workspace, tmp_path):
    folder = tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace / "checkpoints" / "llama", dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def losses_of_trl(model, tokenizer, chats, folder) -> list[dict]:
    """What SFTTrainer logs of steps that each take all chats."""
    import datasets
    import trl

    options = {"packing": True, "max_length": LENGTH, "assistant_only_loss": True, "logging_steps": 1, "use_cpu": True}
    options |= {"max_steps": STEPS, "warmup_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}
    options |= {"adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0, "gradient_accumulation_steps": SEQUENCES}
    options |= {"per_device_train_batch_size": 1, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    config = trl.SFTConfig(output_dir=str(folder), save_strategy="no", disable_tqdm=True, **options)
    data = datasets.Dataset.from_list(chats)
    trainer = trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    assert len(trainer.train_dataset) == SEQUENCES
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all weights", "adapters"])
def test_losses_are_those_of_trl(base_model, device, tmp_path, trained):
    """A step takes every chat, so that the order of two programs is one."""
    chats = [conversation(number) for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    model = transformers.AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    source = base_model
    if trained == "adapters":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        source = tmp_path / "adapters"
        peft.get_peft_model(model, config).save_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, source, is_trainable=True)
    places = [
        "--dataset",
        tmp_path / "chats.jsonl",
        "--cache-dir",
        tmp_path / "cache",
        "--output-dir",
        tmp_path / "out",
    ]
    assert train(["--model", source, *words(FLAGS), *places, "--run-name", "r"], device) == 0
    lines = [line for line in metrics_of(tmp_path / "out" / "r") if not line.get("final")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base_model)
    expected = losses_of_trl(model, tokenizer, chats, tmp_path / "trl")
    assert len(lines) == len(expected) == STEPS
    for name, near in {"loss": 1e-6, "grad_norm": 1e-5, "learning_rate": 1e-6}.items():
        ours, theirs = ([line[name] for line in logged] for logged in (lines, expected))
        assert ours == pytest.approx(theirs, rel=near), name
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.01
