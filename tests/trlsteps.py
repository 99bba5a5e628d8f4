"""Trains with TRL's SFTTrainer, in a process in which this program has changed nothing of transformers: for the test
that compares the losses. Each step takes all chats."""

import json
import pathlib
import sys

import datasets
import peft
import torch
import transformers
import trl

STEPS, LENGTH, SEQUENCES = 6, 256, 5  # the chats are packed into that many
LR, BETAS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 0.1


def main(model_folder: str, adapters: str, chats: str, folder: str) -> None:
    """Writes what the trainer logs to losses.json in `folder`; `adapters` is empty where all weights are trained."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if adapters:
        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    options = {"packing": True, "max_length": LENGTH, "assistant_only_loss": True, "logging_steps": 1, "use_cpu": True}
    options |= {"max_steps": STEPS, "warmup_steps": 1, "learning_rate": LR, "lr_scheduler_type": "cosine"}
    options |= {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "weight_decay": WEIGHT_DECAY, "max_grad_norm": 1.0}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": SEQUENCES, "bf16": False}
    options |= {"gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(output_dir=folder, **options),
        train_dataset=datasets.Dataset.from_list(
            [json.loads(line) for line in pathlib.Path(chats).read_text().splitlines()]
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(model_folder),
    )
    assert len(trainer.train_dataset) == SEQUENCES, len(trainer.train_dataset)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    pathlib.Path(folder, "losses.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
