"""`utils` as a library: what it makes trains a plain model of transformers as transformers itself does."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, start
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

sys.path.insert(0, str(ROOT / "benchmarks"))

import families

from utils import create_collate_fn


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict:
    """The names that the loop of docs/CODEWALKTHROUGH.md leaves, run as it is printed."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "CODEWALKTHROUGH.md").read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        exec(code, names)
    return names


def fresh_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "assets" / "demo"), dtype=torch.float32)


def test_the_printed_loop_trains_as_the_trainer_of_transformers_does(printed, tmp_path):
    class OnTheSameSequences(Trainer):
        def get_train_dataloader(self):
            return DataLoader(printed["sequences"], 4, collate_fn=whole_sequences)

    def whole_sequences(sequences):
        tokens = torch.stack([torch.from_numpy(sequence.astype("int64")) for sequence in sequences])
        return {"input_ids": tokens, "labels": tokens}

    model = fresh_model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = OnTheSameSequences(model, arguments, train_dataset=printed["sequences"], optimizers=(optimizer, None))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(printed["losses"]) == 8
    assert printed["losses"] == pytest.approx(losses, rel=1e-4)
    assert printed["losses"][-1] < printed["losses"][0] - 0.5


@pytest.mark.slow
def test_the_loss_of_every_family_is_that_of_the_tokens_that_follow_or_the_docstring_names_it():
    named = set(re.search(r"that ignore them:\s+([\w, ]+)\.", create_collate_fn.__doc__)[1].split(", "))
    sequences = torch.randint(1, 500, (2, 33), generator=torch.Generator().manual_seed(1)).numpy()
    batch, exact, others = create_collate_fn()(list(sequences)), set(), set()
    for name in families.families():
        try:
            config = families.small_config(name)
            families.check_size(config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits
            expected = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        except Exception:  # what transformers does not build or run small has nothing to compare with
            continue
        try:
            with torch.no_grad():
                loss = model(**batch).loss
        except Exception:  # no wrong loss in silence
            continue
        (exact if torch.allclose(loss, expected, rtol=1e-5) else others).add(name)
    assert others == named
    assert len(exact) > 100


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
