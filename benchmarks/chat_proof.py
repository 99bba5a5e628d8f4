"""Conversations here and in TRL: the same masks and the same losses, on one rank and on 2 ranks x 2 microbatches.

    python benchmarks/chat_proof.py --out benchmarks/results/chat.json

Needs `trl`. A step's global batch is the whole corpus, so that its order has no part in the loss; its microbatches have
other numbers of trained tokens than each other. TRL's SFTTrainer (assistant_only_loss) takes the same weights, AdamW
and learning rate. The masks are compared token by token, the losses of the steps to 1e-6.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, SEQUENCES, SEQUENCE, LEARNING_RATE = 4, 8, 128, 1e-3  # two conversations do not fit into one window
TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- 'assistant: ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ message['role'] + ': ' + message['content'] + '\n' }}
{%- endif %}
{%- endfor %}"""
SENTENCE = "once upon a time there was little fox red ball liked to play with the big dog and they were happy"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_inputs(folder: pathlib.Path) -> None:
    """A corpus, a tokenizer with a chat template, and a tiny model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(draw.choice(SENTENCE.split()) for _ in range(count))

    lines = []
    for number in range(SEQUENCES):
        answer = 3 + 5 * number  # words: so that counts of trained tokens differ
        messages = [{"role": "system", "content": words(4)}]
        messages += [{"role": "user", "content": words(50 - answer)}, {"role": "assistant", "content": words(answer)}]
        messages += [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(2)}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    config = AutoConfig.for_model("llama", **sizes, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")


def run_trl(folder: pathlib.Path, microbatches: int) -> None:
    """One rank of SFTTrainer. Rank 0 writes the losses of the steps and each conversation's tokens and mask."""
    import datasets
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    losses = []

    class Recorded(SFTTrainer):
        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            losses.append(loss.detach().double())
            return loss

    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=SEQUENCES // ranks // microbatches,
        gradient_accumulation_steps=microbatches,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        assistant_only_loss=True,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    rows = trainer.train_dataset
    rows = [dict(row) for row in rows]
    trainer.train()
    total = torch.stack(losses).view(STEPS, microbatches).sum(1)  # each is its share, times the ranks
    if ranks > 1:
        dist.all_reduce(total)
        total /= ranks
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / "trl.json").write_text(json.dumps({"losses": total.tolist(), "rows": rows}))


def run_ours(folder: pathlib.Path, ranks: int, microbatches: int, python: str) -> list[float]:
    """The losses of train_fsdp.py on the same conversations."""
    name = f"{ranks}x{microbatches}"
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "train_fsdp.py"), "--dataset", str(folder / "chat.jsonl"), "--model", str(folder / "model")]
    command += ["--init", "pretrained", "--precision", "fp32", "--sequence-length", str(SEQUENCE)]
    command += ["--batch-size", str(SEQUENCES // ranks // microbatches), "--num-steps", str(STEPS)]
    command += ["--gradient-accumulation-steps", str(microbatches), "--log-interval", "1", "--no-compile"]
    command += ["--lr", str(LEARNING_RATE), "--lr-scheduler", "constant", "--betas", "0.9", "0.95"]
    command += ["--weight-decay", "0", "--max-grad-norm", "1", "--no-final-checkpoint", "--warmup-steps", "0"]
    command += ["--output-dir", str(folder / "out"), "--run-name", name, "--cache-dir", str(folder / "cache")]
    run(command)
    lines = (folder / "out" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if not record.get("final")]


def run(command: list[str]) -> None:
    process = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stdout[-3000:]}\n{process.stderr[-6000:]}")


def our_rows(folder: pathlib.Path) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask) of each conversation, as the token cache has them."""
    import numpy as np
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT))
    from utils import get_dataset

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    data = get_dataset(tokenizer, SEQUENCE, dataset=str(folder / "chat.jsonl"), cache_dir=folder / "cache")
    starts = [0, *data.document_ends[:-1].tolist()]
    rows = []
    for first, last in zip(starts, data.document_ends.tolist(), strict=True):
        rows.append((data.tokens[first:last].tolist(), np.asarray(data.trained[first:last]).tolist()))
    return rows


def trl_rows(rows: list[dict]) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask) of each conversation, as TRL has them."""
    found = []
    for row in rows:
        mask = row.get("assistant_masks")
        if mask is None:
            mask = [int(label != -100) for label in row["labels"]]
        found.append((row["input_ids"], mask))
    return found


def compare(folder: pathlib.Path, trl_python: str) -> dict:
    """Runs both, on one rank and on 2 ranks x 2 microbatches."""
    write_inputs(folder)
    found: dict = {"steps": STEPS, "conversations": SEQUENCES, "layouts": {}}
    for ranks, microbatches in ((1, 1), (2, 2)):
        launch = [trl_python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        run([*launch, __file__, "--trl-rank", str(folder), "--microbatches", str(microbatches)])
        theirs = json.loads((folder / "trl.json").read_text())
        ours = run_ours(folder, ranks, microbatches, sys.executable)
        gap = max(abs(a - b) for a, b in zip(ours, theirs["losses"], strict=True))
        layout = {"ours": ours, "trl": theirs["losses"], "largest difference": gap}
        found["layouts"][f"{ranks} x {microbatches}"] = layout
        print(f"{ranks} ranks x {microbatches} microbatches: largest difference {gap:.1e}", flush=True)
    ours, theirs = our_rows(folder), trl_rows(theirs["rows"])
    found["same tokens and masks"] = sorted(ours) == sorted(theirs)
    found["trained tokens"] = [sum(mask) for _, mask in ours]
    print(f"same tokens and masks: {found['same tokens and masks']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="file for the results")
    parser.add_argument("--trl-rank", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--microbatches", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_rank:
        return run_trl(options.trl_rank, options.microbatches)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(pathlib.Path(folder), sys.executable)
    from importlib.metadata import version

    found["date"] = time.strftime("%Y-%m-%d")
    found["versions"] = {name: version(name) for name in ("torch", "transformers", "trl")}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
