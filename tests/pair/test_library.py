"""`utils` as a library: its sequences and batches train a plain model as transformers' Trainer does."""

import re
import sys

import pytest
import torch
from conftest import ROOT, start
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


def test_the_loop_of_the_docs_trains_as_the_trainer_of_transformers_does(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "CODEWALKTHROUGH.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loop: dict = {}  # the variables of the loop
    exec(code, loop)

    class OnTheSameSequences(Trainer):
        def get_train_dataloader(self):
            return DataLoader(loop["sequences"], 4, collate_fn=whole_sequences)

    def whole_sequences(sequences):
        tokens = torch.stack([torch.from_numpy(sequence.astype("int64")) for sequence in sequences])
        return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("assets/demo"), dtype=torch.float32)
    options = {"max_steps": 8, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "logging_steps": 1}
    options |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = OnTheSameSequences(model, arguments, train_dataset=loop["sequences"], optimizers=(optimizer, None))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(loop["losses"]) == 8
    assert loop["losses"] == pytest.approx(losses, rel=1e-4)
    assert loop["losses"][-1] < loop["losses"][0] - 0.5


FROM_PYTHON = """
import os, sys
from harness import before_torch
args = before_torch.begin(["--model", "demo"])
assert "torch" not in sys.modules
import train_fsdp
print(args.model, os.environ["PYTORCH_ALLOC_CONF"])
"""


@pytest.mark.slow
def test_a_run_from_python_begins_as_the_script_does():
    done = start([sys.executable, "-c", FROM_PYTHON], PYTHONPATH=str(ROOT))
    assert done.stdout.splitlines()[-1] == "demo expandable_segments:True", done.stderr
