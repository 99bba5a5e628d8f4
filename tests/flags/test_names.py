"""Flags that this program does not have: other trainers' are answered by what to write here, mistyped ones by the
nearest flag, and others by no guess."""

import re

import pytest
from conftest import parse

from harness.base import UserError
from harness.flags.names import read_answers
from harness.flags.parser import make_parser

OWN = make_parser().flags()


def answer(flag: str) -> str:
    """What is said of a flag, behind its name."""
    with pytest.raises(UserError) as refused:
        parse([flag])
    return str(refused.value).removeprefix(f"{flag}: ")


THEIRS = {  # a flag: what it is answered by
    "--ep": "no tensor, pipeline or expert parallelism here, see docs/PLAN.md",
    "--tensor-parallel-size": "no tensor, pipeline or expert parallelism here",
    "--deepspeed": "use --zero-stage; no DeepSpeed configuration is read, see docs/MIGRATION.md (From DeepSpeed)",
    "--overwrite_output_dir": "no run is overwritten: another --run-name starts a new one",
    "--n_layer": "use --model FOLDER with a config.json, which has the sizes",
    "--hidden-size": "use --model FOLDER with a config.json",
    "--device": "a GPU is used if there is one; CUDA_VISIBLE_DEVICES in the environment",
    "--prompt": "use --sample-prompt TEXT",
    "--learning-rate": "use --lr; 5e-5 in Trainer",
    "--per_device_train_batch_size": "use --batch-size; 8 in Trainer, 1 here",
    "--training.local_batch_size": "use --batch-size",
    "--compile.enable": "use --compile",
    "--assistant_only_loss": "the loss is on the assistant's turns and on completions; --chat-loss all",
    "--eval_dataset": "use --eval-split FILE",
    "--push_to_hub": "use --export DIR, then hf upload REPO DIR",
    "--lora-r": "use --lora-rank R",
    "--load_in_4bit": "no quantized base (QLoRA) is trained here, TRL and axolotl do that",
    "--report-to": "use --log-with",
    "--train_batch_size": "use --gradient-accumulation-steps: the global batch over ranks and --batch-size",
    "--total_batch_size": "use --gradient-accumulation-steps: its tokens over ranks, --batch-size",
    "--matrix_lr": "use --lr, of --optimizer muon; on AdamW's scale here",
    "--embedding_lr": "use --adamw-lr, of --optimizer muon; two values there, one here",
    "--max_train_steps": "use --num-steps",
    "--num_training_steps": "use --num-steps",
    "--train_samples": "use --num-tokens: samples times --sequence-length",
    "--adam_epsilon": "always 1e-8",
    "--eps": "always 1e-8",
    "--dropout": "use --model FOLDER with a config.json, which has the dropout",
    "--backend": "NCCL on GPUs, gloo on CPUs",
    "--rampup_batch_size": "the batch has one size for the whole run",
    "--max-seq-lenght": "for max_seq_length use --sequence-length",
    "--no-demo": "leave --demo out",
}


@pytest.mark.parametrize("flag, printed", THEIRS.items())
def test_a_flag_of_another_trainer_is_answered_by_what_to_write_here(flag, printed):
    assert answer(flag).startswith(f"no such flag; {printed}")


@pytest.mark.parametrize("name", read_answers())
def test_a_row_of_the_page_names_flags_that_there_are_and_answers_names_that_there_are_not(name):
    theirs, text = read_answers()[name]
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    assert {flag for flag in named if flag != "--nproc_per_node"} <= OWN.keys()
    if f"--{name}" in OWN:
        assert "; " in text or "--packing" in text  # what differs
        return
    for typed in (f"--{theirs}", f"--{name}".upper()):
        assert answer(typed) == f"no such flag; {text}" and "did you mean" not in text and "`" not in text


def test_a_letter_too_few_or_two_exchanged_are_answered_by_the_flag():
    for flag in filter(lambda flag: len(flag) >= 8, OWN):
        name = flag.removeprefix("--")
        middle = len(name) // 2
        for typo in (name[:-1] + name[-1] * 2, name[:middle] + name[middle + 1] + name[middle] + name[middle + 2 :]):
            if f"--{typo}" not in OWN:
                assert flag in answer(f"--{typo}"), (flag, typo)


FAR = "--zyx --foo --eq --help-me --verbose --sharing --reuse --q --eqs --layers --train-sample-size --type"


@pytest.mark.parametrize("flag", FAR.split())
def test_a_flag_that_is_near_none_is_answered_by_no_guess(flag):
    assert answer(flag) == "no such flag"
