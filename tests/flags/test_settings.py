"""The command line: flags, their defaults, and what does not go together."""

import dataclasses
import datetime
import json
import math
import os
import re
import shlex
import sys
import typing

import pytest
from conftest import ROOT, cold_python, parse, python, words, write_checkpoint
from test_errors import only_line
from test_tracker import FLOPS, TOKENS, clock  # noqa: F401 - the fixture

from harness.base.errors import UserError
from harness.flags import flag_types
from harness.flags.flag_files import ELSEWHERE
from harness.flags.flag_types import path
from harness.flags.parser import EXAMPLES, given_twice, make_parser, record_flags, warn
from harness.flags.removed import REMOVED_FLAGS
from harness.flags.rules import without_effect
from harness.flags.settings import Settings


def test_help_names_every_flag_with_its_default():
    process = cold_python("--help")
    assert (process.returncode, process.stderr) == (0, "")
    described: dict[str, str] = {}
    for line in process.stdout.splitlines():
        if flag := re.match(r"  (-\S+)", line):
            described[flag[1].rstrip(",")] = ""
        if described:
            described[list(described)[-1]] += line.strip() + " "
    args = vars(parse([]))
    for name in args.keys() - {"argv", "given_accumulation", "lacks_disk", "lacks_memory"}:  # no flags
        assert "--" + name.replace("_", "-") in described, name
    without_default = {"-h", "--version", "--demo", "--config", "--sample-prompt", "--peak-tflops"}  # off unless given
    without_default |= {"--defer-grad-sync", "--cpu-offload", "--fp8-emulate", "--export"}
    without_default |= {"--plan", "--measure", "--plan-rates", "--gpu-hour-usd", "--json", "--sample-prompts"}
    for flag, text in described.items():
        assert flag in without_default or re.search(r"\[[^\]]+\]", text.replace("[:5%]", "")), flag
    for flag in ("--batch-size", "--num-steps", "--lr", "--seed", "--zero-stage"):
        default = args[flag[2:].replace("-", "_")]
        assert float(re.search(r"\[([^\]]+)\]", described[flag])[1]) == default


@pytest.mark.parametrize(
    "flags",
    [
        "--batch-size 0",
        "--batch-size -1",
        "--batch-size 1.5",
        "--batch-size many",
        "--sequence-length 0",
        "--gradient-accumulation-steps 0",
        "--num-steps 0",
        "--num-steps 0 --sample-prompt Once",
        "--num-steps 0 --demo",
        "--batch-size auto --num-steps 0 --export there",
        "--measure --plan",
        "--measure --batch-size auto",
        "--num-workers -1",
        "--lr 0",
        "--lr -1",
        "--lr nan",
        "--lr inf",
        "--betas 0.9 1",
        "--betas 0.9",
        "--weight-decay -0.1",
        "--max-grad-norm -1",
        "--warmup-steps -1",
        "--seed -1",
        "--zero-stage 4",
        "--dp-replicate-size 0",
        "--precision fp16",
        "--optimizer none-such",
        "--attention fast",
        "--attention cudnn --precision fp32",
        "--attention flash --precision fp32",
        "--lr-scheduler none",
        "--log-with mlflow",
        "--log-interval 0",
        "--peak-tflops 0",
        "--run-name a/b",
        "--run-name ..",
        "--fp8-recipe rowwise",
        "--fp8-emulate",
        "--dp-replicate-size 2 --zero-stage 0",
        "--warmup-steps 5 --lr-scheduler constant",
        "--batch-siz 3",
        "--no-such-flag",
        "--output-dir",
        "positional",
    ],
)
def test_a_bad_flag_is_named(flags):
    with pytest.raises(UserError) as raised:
        parse(flags.split())
    assert raised.value.exit_code == 2
    assert flags.split()[0] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_flags_beside_demo_win_wherever_they_stand():
    for argv in (["--demo", "--num-steps", "3", "--lr", "1"], ["--num-steps", "3", "--lr", "1", "--demo"]):
        args = parse(argv)
        assert (args.num_steps, args.lr, args.model, args.dataset) == (3, 1, "demo", "demo")


@pytest.mark.parametrize("flags", ["--lr-scheduler constant", "--num-steps 5", "--dataset synthetic", "--zero-stage 0"])
def test_what_demo_sets_is_no_mistake_of_the_user(flags):
    args = parse(["--demo", *flags.split()])
    assert args.warmup_steps < args.num_steps
    assert args.lr_scheduler != "constant" or args.warmup_steps == 0


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_project_name_that_is_no_plain_name_is_refused(mistake, monkeypatch, tracker):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "--project-name" in mistake("--log-with", tracker, "--project-name", "../tales")


def test_a_bad_flag_is_one_line_and_exit_2():
    assert "--batch-size" in only_line(cold_python("--batch-size", "0"))


@pytest.mark.parametrize("flags", ["--no-compile", "--compile --activation-checkpointing full"])
def test_a_memory_budget_that_could_not_apply_is_refused(flags):
    with pytest.raises(UserError, match="--activation-memory-budget: needs --compile"):
        parse(["--activation-memory-budget", "0.5", *flags.split()])


@pytest.mark.parametrize("flags", ["--dataset synthetic", "--attention flash_attention_2", "--attention flash"])
def test_a_document_mask_that_could_not_work_is_refused(flags):
    with pytest.raises(UserError, match="--document-mask"):
        parse(["--document-mask", *flags.split()])


@pytest.mark.parametrize("flags, enough", [("--min-mfu 40 --peak-tflops 1", 11), ("--profile", 14)])
def test_no_step_left_to_measure_is_refused(flags, enough):
    with pytest.raises(UserError, match=f"give --num-steps at least {enough}"):
        parse([*flags.split(), "--num-steps", "10"])
    with pytest.raises(UserError, match="no step is left to measure"):
        parse([*flags.split(), "--num-steps", str(enough - 1)])
    parse([*flags.split(), "--num-steps", str(enough)])


@pytest.mark.parametrize(
    "flags, meant",
    [
        ("--batch-siz 3", "--batch-size"),
        ("--batch_siz=3", "--batch-size"),
        ("--checkpoint 3", "--checkpoint-interval"),
        ("--demmo", "--demo"),
        ("--learning-rate 1e-3", "--lr"),
        ("--max_steps 100", "--num-steps"),
        ("--per_device_train_batch_size 4", "--batch-size"),
        ("--bf16", "--precision"),
        ("--gradient_checkpointing", "--activation-checkpointing"),
        ("--model smolm3-3b", "smollm3-3b"),
        ("--model Llama3.1-8B", "llama3.1-8b"),
        ("--model llama3.2", "llama3.2-1b"),
    ],
)
def test_a_typo_is_told_with_what_it_may_have_meant(flags, meant):
    with pytest.raises(UserError, match=f"; did you mean {re.escape(meant)}\\?$"):
        parse(flags.split())


def test_a_name_that_is_near_nothing_is_met_with_no_guess():
    with pytest.raises(UserError, match=r"^--zyx: no such flag$"):
        parse(["--zyx"])
    assert parse(["--model", "gpt2"]).model == "gpt2"  # the hub has models without a company


def test_what_other_trainers_call_a_flag_is_none_of_ours():
    flags, others = make_parser().flags(), " ".join(ELSEWHERE.values()).split()
    assert len(others) == len(set(others))
    assert not {f"--{name}" for name in others} & flags.keys()


def test_flags_may_be_written_with_underscores():
    given = parse(words("--batch_size 2 --num_steps=7 --no-async_checkpoint --checkpoint_interval 1 --run-name a_b"))
    assert (given.batch_size, given.num_steps, given.async_checkpoint, given.run_name) == (2, 7, False, "a_b")


def test_every_example_of_the_help_is_a_command_that_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "tales").mkdir(parents=True)
    (tmp_path / "outputs" / "tales" / "config.json").write_text('{"given": {}}')
    examples = [line for line in EXAMPLES.splitlines() if "train_fsdp.py" in line]
    assert all("  #" in line for line in examples)
    assert len(examples) >= 5 and all(len(line) <= 118 for line in examples)
    assert EXAMPLES in python("--help").stdout
    for line in examples:
        parse(shlex.split(line.partition("train_fsdp.py")[2], comments=True))


def test_the_version_is_told_with_those_of_what_it_stands_on_and_nothing_heavy_is_imported():
    process = cold_python("--version", PYTHONPROFILEIMPORTTIME="1")
    first, second = process.stdout.splitlines()
    assert re.fullmatch(r"train_fsdp \d+\.\d+\.\d+, commit ([0-9a-f]{40}(-dirty)?|unknown)", first)
    assert re.match(r"python 3\.\d+\.\d+, torch 2\.", second) and "transformers 5." in second
    assert not re.search(r"\| +(torch|numpy|transformers)$", process.stderr, re.MULTILINE)


# ----------------------------------------------------------------------------------------------------------------------
# --config


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> list:
        (tmp_path / "flags.toml").write_text(text)
        return ["--config", tmp_path / "flags.toml"]

    return write


def test_a_file_sets_flags_of_every_kind_and_the_command_line_wins(toml):
    file = toml("""
        dataset = "synthetic"
        compile = false
        document-mask = false
        [whatever]
        batch-size = 4
        lr = 1e-3
        betas = [0.8, 0.9]
        run_name = "r"
        [whatever.deeper]
        cpu_offload = true
        num_steps = 7
    """)
    read = parse([*file, "--num-steps", "9"])
    wanted = {"dataset": "synthetic", "compile": False, "document_mask": False, "batch_size": 4, "lr": 1e-3}
    wanted |= {"betas": (0.8, 0.9), "run_name": "r", "cpu_offload": True, "num_steps": 9, "warmup_steps": 0}
    assert {name: getattr(read, name) for name in wanted} == wanted
    again = parse([*read.argv])  # what a plan of the run in another process is given
    assert {name: getattr(again, name) for name in wanted} == wanted
    assert parse(["--num-steps", "9", *file]).num_steps == 9
    assert parse([*toml("plan-gpus = [8, 64]"), "--plan"]).plan_gpus == (8, 64)


def test_demo_in_a_file_is_demo(toml):
    read, same = parse(toml("demo = true\nlr = 1")), parse(["--demo", "--lr", "1"])
    assert {name: value for name, value in vars(read).items() if value != getattr(same, name)}.keys() == {
        "config",
        "argv",
    }


@pytest.mark.parametrize(
    "text, said",
    [
        ("batch_siz = 3", "batch_siz: no such flag; did you mean --batch-size?"),
        ("[training]\nlearning_rate = 3", "learning_rate: no such flag; did you mean --lr?"),
        ("given_accumulation = 3", "given_accumulation: no such flag"),
        ("config = 'more.toml'", "config: no such flag"),
        ("no-compile = true", "no-compile: no such flag"),
        ("lr = 'much'", "--lr: invalid float value: 'much'"),
        ("lr = -1", "--lr: -1 is not a positive number"),
        ("num_steps = 5.0", "--num-steps: invalid int value: '5.0'"),
        ("zero_stage = 7", "--zero-stage: invalid choice: 7"),
        ("betas = 0.9", "--betas: expected 2 arguments"),
        ("lr = true", "lr: true where a value belongs"),
        ("cpu_offload = 1", "cpu_offload: 1 where true or false belongs"),
        ("model = ['demo']", "model: a list where one value belongs"),
        ("lr = 1\n[more]\nlr = 2", "lr stands there twice"),
        ("batch-size = 1\nbatch_size = 2", "batch_size stands there twice"),
        (".".join("a" * 3000) + " = 1", "a: no such flag"),
        ("lr = " + "[" * 3000, "it is no TOML (maximum recursion"),
        ("model = 'a\\u0000b'".replace("'", '"'), "--model: its value holds a NUL byte"),
        ("lr: 3", "it is no TOML (Expected '=' after a key"),
    ],
)
def test_a_mistake_in_a_file_is_told_as_on_the_command_line_and_names_the_file(toml, text, said):
    file = toml(text)
    with pytest.raises(UserError) as raised:
        parse(file)
    assert str(raised.value).startswith(f"--config {file[1]}: {said}") and "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_file_of_windows_is_read_and_a_key_that_json_has_twice_is_named(tmp_path):
    (tmp_path / "f.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\nlr = 1.0\r\n")
    assert (parse(["--config", tmp_path / "f.toml"]).seed, parse(["--config", tmp_path / "f.toml"]).lr) == (3, 1.0)
    (tmp_path / "config.json").write_text('{"given": {"lr": 1, "seed": 2, "lr": 3}}')
    with pytest.raises(UserError, match=r"config.json: it is no JSON .lr stands there twice"):
        parse(["--config", tmp_path / "config.json"])


def test_flags_of_a_file_that_contradict_the_command_lines_are_found(toml):
    with pytest.raises(UserError, match=r"--document-mask: .* \(with the flags of .*flags.toml\)"):
        parse([*toml("document_mask = true"), "--dataset", "synthetic"])


@pytest.mark.parametrize("file", ["there-is-none.toml", "assets/demo/config.json"])
def test_a_file_that_is_missing_or_holds_no_flags_is_named(file):
    with pytest.raises(UserError, match=f"^--config {file}: (No such file|it is not the config.json of a run)"):
        parse(["--config", file])


def config_of(folder, *flags) -> list:
    """--config with a file as a run with these flags leaves it."""
    (folder / "config.json").write_text(json.dumps(record_flags(parse(flags))))
    return ["--config", folder / "config.json"]


def test_a_runs_config_gives_its_flags_but_not_its_name_or_what_it_derived(tmp_path):
    flags = "--demo --lr 1e-3 --gradient-accumulation-steps 2 --run-name r --resume auto --export e --seed 1"
    read = parse([*config_of(tmp_path, *words(flags)), "--num-steps", 400])
    same = parse(words("--demo --lr 1e-3 --gradient-accumulation-steps 2 --seed 1 --num-steps 400"))
    differ = {name for name, value in vars(read).items() if value != getattr(same, name)}
    assert differ == {"config", "argv"}
    assert (read.warmup_steps, read.run_name, read.resume, read.export) == (20, None, "none", None)
    assert not [*without_effect(read)]
    old = json.loads((tmp_path / "config.json").read_text())
    old["given"]["batch_sise"] = 3  # as of another version
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"config.json: batch_sise: no such flag; did you mean --batch-size\?"):
        parse(["--config", tmp_path / "config.json"])


def test_an_evaluation_has_the_flags_of_its_checkpoint_that_shape_the_loss(tmp_path):
    """Those of the text too, unless another text is named."""
    of_text = {"dataset_split": "train[:90%]", "text_field": "body", "skip_bad_records": True, "seed": 7}
    of_model = {"sequence_length": 96, "document_mask": True, "precision": "fp32", "tokenizer": str(tmp_path)}
    flags = dataclasses.asdict(Settings()) | {"dataset": str(tmp_path), "eval_split": "test"} | of_text | of_model
    run = ["--num-steps", "0", "--eval-interval", "1", "--resume", write_checkpoint(tmp_path / "run", 2, flags=flags)]
    same, other = (vars(parse([*run, *words(text)])) for text in ("", f"--dataset {ROOT}/README.md"))
    assert same.items() >= (of_text | of_model | {"eval_split": "test"}).items()
    assert other.items() >= of_model.items()
    assert (other["text_field"], other["eval_split"], other["seed"]) == (Settings().text_field, None, Settings().seed)


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
def test_a_removed_flag_is_ignored_at_its_old_default_and_otherwise_names_what_to_do(tmp_path, toml, flag):
    removed, key = REMOVED_FLAGS[flag], flag[2:].replace("-", "_")
    config = json.loads(config_of(tmp_path, "--lr", "1e-3")[1].read_text())
    config["given"][key] = removed.old_default
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse(["--config", tmp_path / "config.json"]).lr == 1e-3
    config["given"][key] = "other"
    (tmp_path / "config.json").write_text(json.dumps(config))
    for argv in ([flag], ["--config", tmp_path / "config.json"], toml(f'{key} = "other"')):
        with pytest.raises(UserError) as raised:
            parse(argv)
        assert str(raised.value).endswith(f"this flag was removed: {removed.instead}")
        assert raised.value.exit_code == 2
    assert flag not in make_parser().flags()


# ----------------------------------------------------------------------------------------------------------------------
# Values that no flag can take


ONE_VALUE = [action for action in make_parser().flags().values() if action.nargs is None]
TEXTS = [action.option_strings[0] for action in ONE_VALUE if action.type in (flag_types.text, path)] + ["--dataset"]


@pytest.mark.parametrize("flag", [action.option_strings[0] for action in ONE_VALUE] + ["--betas", "--dataset"])
def test_an_empty_value_is_an_error_that_names_the_flag(toml, flag):
    ways = [[flag, ""], [f"{flag}="], [flag, "  "]]
    if flag not in ("--config", "--betas"):
        ways.append(toml(f'{flag[2:]} = ""'))
    for argv in ways:
        with pytest.raises(UserError) as raised:
            parse(argv)
        said = str(raised.value)
        assert raised.value.exit_code == 2 and "\n" not in said
        assert re.search(rf"(^|flags\.toml: ){flag}: ", said)


def test_every_field_that_holds_a_text_is_a_flag_of_texts():
    hints = typing.get_type_hints(Settings)
    fields = {field.name for field in dataclasses.fields(Settings) if "help" in field.metadata}
    of_texts = {name for name in fields if str in (hints[name], *typing.get_args(hints[name]))}
    of_texts = of_texts - {"mixture_stage"} | {"sample_prompt"}
    assert {name.replace("_", "-") for name in of_texts} == {flag[2:] for flag in TEXTS}


@pytest.mark.parametrize(
    "value",
    [
        "\udcff",
        "a\udcff/b",
        "two\nlines",
        "x" * 10_000,
        "/x" * 5_000,
        "~no_such_user_here/x",
        "-dash",
        "\x1b[2J",
        "%s {}",
    ],
    ids=["bad-byte", "bad-byte-in-path", "newline", "long-name", "long-path", "no-user", "dash", "escape", "format"],
)
@pytest.mark.parametrize("flag", TEXTS)
def test_an_odd_text_is_taken_or_is_one_line_that_names_the_flag(flag, value):
    try:
        parse([f"{flag}={value}", "--plan"])
    except UserError as error:
        assert error.exit_code == 2 and "\n" not in str(error)
        assert flag in str(error)
        if "\udcff" in value:
            assert "bytes that are not" in str(error)
    else:
        assert "\udcff" not in value and (not value.startswith("~no_such") or flag != "--config")


EXTREMES = ["0", "-1", "1e300", "-1e300", "nan", "inf", "-inf", str(2**64), str(2**63), str(2**31), "1e-300", "1e400"]
NUMBERS = [
    action
    for action in make_parser().flags().values()
    if getattr(action.type, "__name__", "") in ("int", "float", "gpu_counts", "batch_size") and not action.choices
]


@pytest.mark.parametrize("action", NUMBERS, ids=lambda action: action.option_strings[0])
def test_an_extreme_number_is_in_the_flags_range_or_is_one_line(action):
    flag, field = action.option_strings[0], action.dest
    for text in EXTREMES:
        try:
            taken = parse([flag, *[text] * (action.nargs or 1), "--plan", "--export", "x", "--init", "pretrained"])
        except UserError as error:
            assert error.exit_code == 2 and "\n" not in str(error)
            assert flag in str(error)
        else:
            given = getattr(taken, field)
            for number in given if isinstance(given, tuple) else [given]:
                assert math.isfinite(number) and number >= 0
                assert isinstance(number, float) or number < (2**63 if field == "seed" else 2**31)
                assert field != "timeout_minutes" or datetime.timedelta(minutes=number)


@pytest.mark.parametrize("flags", ["--lr-scheduler polynomial --lr 1e-7", "--seed 18446744073709551616"])
def test_numbers_that_a_library_refuses_are_named_first(flags):
    with pytest.raises(UserError, match=r"^--(lr|seed): "):
        parse(flags.split())


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--dataset /no/such/file.txt", "--dataset /no/such/file.txt: no such file or folder"),
        ("--dataset ./tales", "--dataset ./tales: no such file or folder"),
        ("--dataset tales/", "--dataset tales/: no such file or folder"),
        ("--sample-prompts no-such-file", "--sample-prompts no-such-file: cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_is_not_there_is_named_before_torch_is_loaded(flags, named):
    with pytest.raises(UserError) as raised:
        parse(flags.split())
    assert str(raised.value) == named


# ----------------------------------------------------------------------------------------------------------------------
# A flag that is given twice


@pytest.mark.parametrize(
    "argv, field, value, warning",
    [
        ("--lr 1e-3 --seed 3 --lr=1e-4", "lr", 1e-4, "--lr: it stands there 2 times, 1e-3, 1e-4"),
        (
            "--betas 0.8 0.9 --betas 0.9 0.95",
            "betas",
            (0.9, 0.95),
            "--betas: it stands there 2 times, 0.8 0.9, 0.9 0.95",
        ),
        ("--compile --no-compile", "compile", False, "--compile: it stands there 2 times, --compile, --no-compile"),
        ("--run_name a --run-name b", "run_name", "b", "--run-name: it stands there 2 times, a, b"),
    ],
)
def test_the_last_value_wins_with_one_warning_that_names_both(argv, field, value, warning):
    assert getattr(parse(argv.split()), field) == value
    assert [*given_twice(argv.split())] == [f"{warning}; the last one counts"]


def test_the_same_value_twice_is_no_word_worth():
    assert [*given_twice(["--demo", "--lr", "1", "--lr=1", "--demo"])] == []


def test_every_prompt_is_kept_and_those_of_the_demo_or_a_file_give_way(toml):
    prompts = ["--sample-prompt", "a", "--seed", "1", "--sample-prompt=b", "--sample-prompt", "-- c"]
    assert parse(prompts).sample_prompt == parse(["--demo", *prompts]).sample_prompt == ("a", "b", "-- c")
    assert [*given_twice(prompts)] == []
    assert len(parse(["--demo"]).sample_prompt) == 1
    assert parse(["--demo", "--dataset", "mine.txt"]).sample_prompt is None
    file = toml('sample-prompt = ["x", "y"]\nlr = 1.0')
    assert parse(file).sample_prompt == ("x", "y")
    read = parse([*file, *prompts])
    assert read.sample_prompt == ("a", "b", "-- c") and read.lr == 1.0
    assert parse(read.argv).sample_prompt == read.sample_prompt
    assert parse(toml("sample-prompt = 'x'")).sample_prompt == ("x",)  # as an older run wrote it


def test_a_warning_of_the_command_line_is_printed(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py", "--config", "a.toml", "--config=b.toml"])
    warn(parse([]))
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "train_fsdp.py: warning: --config: it stands there 2 times, a.toml, b.toml; the last one counts"


# ----------------------------------------------------------------------------------------------------------------------
# What has no effect where it stands


@pytest.mark.parametrize("flags", ["--json", "--plan-gpus 8", "--gpu-hour-usd 3"])
def test_a_flag_of_a_plan_does_not_start_a_training(flags):
    with pytest.raises(UserError, match=f"{flags.split()[0]}: only with --plan"):
        parse(flags.split())
    parse([*flags.split(), "--plan"])


@pytest.mark.parametrize(
    "flags, without",
    [
        ("--eval-steps 3", "--eval-interval 5"),
        ("--eval-split test", "--eval-interval 5"),
        ("--keep-checkpoints 3 --no-final-checkpoint", "--checkpoint-interval 5"),
        ("--keep-checkpoints 3 --dataset synthetic", "--final-checkpoint"),
        ("--no-async-checkpoint", "--checkpoint-interval 5"),
        ("--metrics-host 0.0.0.0", "--metrics-port 4000"),
        ("--project-name p", "--log-with tensorboard"),
        ("--sample-tokens 9", "--sample-prompt Once"),
        ("--sample-tokens 9", f"--sample-prompts {__file__}"),
        ("--sample-tokens 9", "--show-samples 1"),
        ("--sample-prompt Once --dataset synthetic", "--init pretrained"),
        ("--skip-bad-records --dataset synthetic", "--plan"),
        ("--text-field story --dataset tales.txt", "--dataset tales.jsonl"),
        ("--dataset-config wikitext-2 --dataset demo", "--dataset wikitext"),
        ("--dataset-split train --dataset synthetic", "--plan"),
        ("--tokenizer t --dataset synthetic", "--sample-prompt Once --init pretrained"),
        ("--defer-grad-sync", "--gradient-accumulation-steps 2"),
        ("--defer-grad-sync --gradient-accumulation-steps 2 --zero-stage 1", "--zero-stage 2"),
        ("--gpus-per-node 4 --no-own-plan", "--own-plan"),
        ("--plan-seconds 4", "--plan"),
        ("--plan-gpu B200 --no-own-plan", "--batch-size auto"),
    ],
)
def test_a_flag_that_has_no_effect_is_told_and_not_where_it_has_one(flags, without):
    (warning,) = without_effect(parse(flags.split()))
    assert warning.startswith(f"{flags.split()[0].replace('no-async', 'async')}: ")
    assert not [*without_effect(parse([*flags.split(), *without.split()]))]


@pytest.mark.parametrize("flags", ["", "--demo", "--demo --plan --json", "--dataset synthetic"])
def test_what_nobody_gave_is_not_told(flags):
    assert not [*without_effect(parse(flags.split()))]


def test_what_accelerates_launcher_asks_for_is_told_and_not_followed(monkeypatch, capfd):
    asked = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    warn(parse([]))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as --precision says
    warn(parse([]))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("train_fsdp.py: warning: ACCELERATE_USE_FSDP=true ") and "--zero-stage" in line
    assert not asked.keys() & os.environ.keys()
