"""Unknown flags: other trainers' are answered by what to write here, mistyped ones by the nearest flag, others by no
guess."""

import re

import pytest
from conftest import parse

from harness.base import UserError
from harness.flags.names import read_answers
from harness.flags.parser import make_parser

OWN = make_parser().flags()


def answer(flag: str) -> str:
    """The error about a flag, without its name."""
    with pytest.raises(UserError) as refused:
        parse([flag])
    return str(refused.value).removeprefix(f"{flag}: ")


THEIRS = {  # a flag: what it is answered by
    "--ep": "no tensor, pipeline or expert parallelism here, see docs/PLAN.md",
    "--deepspeed": "use --zero-stage; no DeepSpeed configuration is read, see docs/MIGRATION.md (From DeepSpeed)",
    "--overwrite_output_dir": "no run is overwritten: another --run-name starts a new one",
    "--n_layer": "use --model FOLDER with a config.json, which has the sizes",
    "--learning-rate": "use --lr; 5e-5 in Trainer",
    "--per_device_train_batch_size": "use --batch-size; 8 in Trainer, 1 here",
    "--training.local_batch_size": "use --batch-size",
    "--compile.enable": "use --compile",
    "--lora-r": "use --lora-rank R",
    "--max_train_steps": "use --num-steps",
    "--adam_epsilon": "always 1e-8",
    "--max-seq-lenght": "for max_seq_length use --sequence-length",
}


@pytest.mark.parametrize("flag, printed", THEIRS.items())
def test_a_flag_of_another_trainer_is_answered_by_what_to_write_here(flag, printed):
    assert answer(flag).startswith(f"no such flag; {printed}")


@pytest.mark.parametrize("name", read_answers())
def test_a_row_of_the_page_names_real_flags_and_answers_unknown_names(name):
    theirs, text = read_answers()[name]
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    assert {flag for flag in named if flag != "--nproc_per_node"} <= OWN.keys()
    if f"--{name}" in OWN:
        assert "; " in text or "--packing" in text  # what differs
        return
    for typed in (f"--{theirs}", f"--{name}".upper()):
        assert answer(typed) == f"no such flag; {text}" and "did you mean" not in text and "`" not in text


def test_a_doubled_letter_or_two_exchanged_are_answered_by_the_flag():
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
