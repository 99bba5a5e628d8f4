"""The command line: flags, their defaults, what a mistake of the user is told, files of flags."""

import dataclasses
import json
import math
import re
import shlex

import pytest
from checkpoints import write_checkpoint
from conftest import ROOT, cold_python, parse, python, words

from harness import flags
from harness.base import UserError
from harness.flags.parser import EXAMPLES, make_parser
from harness.flags.rules import OPTIMIZER_RULES
from harness.flags.settings import FLAGS, Settings

FIELDS = FLAGS.values()
ACTIONS = {action.dest: action for action in make_parser().flags().values()}


def refused(*arguments, code: int = 2) -> str:
    """The line with which a command line ends."""
    with pytest.raises(UserError) as raised:
        parse(list(arguments))
    assert raised.value.exit_code == code and "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> list:
        (tmp_path / "flags.toml").write_text(text)
        return ["--config", tmp_path / "flags.toml"]

    return write


# ----------------------------------------------------------------------------------------------------------------------
# --help, --version


@pytest.mark.smoke
def test_help_comes_at_once_without_torch_and_names_every_flag_with_its_default():
    process = cold_python("--help", PYTHONPROFILEIMPORTTIME="1")
    assert process.returncode == 0
    assert not re.search(r"\| +(torch|numpy|transformers)$", process.stderr, re.MULTILINE)
    described: dict[str, str] = {}
    for line in process.stdout.splitlines():
        if flag := re.match(r"  (-\S+)", line):
            described[flag[1].rstrip(",")] = ""
        if described:
            described[list(described)[-1]] += line.strip() + " "
    off_unless_given = words("demo config sample_prompt peak_tflops defer_grad_sync cpu_offload export")
    off_unless_given += words("fp8_emulate plan plan_details measure plan_rates gpu_hour_usd json")
    for field in FIELDS:
        text = described["--" + field.name.replace("_", "-")].replace("[:5%]", "")
        assert field.name in off_unless_given or re.search(r"\[[^\]]+\]", text), field.name
        if type(field.default) in (int, float) and field.default:
            assert float(re.search(r"\[([^\]]+)\]", text)[1]) == field.default


def test_the_version_is_told_with_those_of_what_it_stands_on():
    first, second = cold_python("--version").stdout.splitlines()
    assert re.fullmatch(r"train_fsdp \d+\.\d+\.\d+, commit ([0-9a-f]{40}(-dirty)?|unknown)", first)
    assert re.match(r"python 3\.\d+\.\d+, torch 2\.", second) and "transformers 5." in second


def test_every_example_of_the_help_is_a_command_that_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "tales").mkdir(parents=True)
    (tmp_path / "outputs" / "tales" / "config.json").write_text('{"given": {}}')
    (tmp_path / "corpus.txt").touch()
    for line in EXAMPLES.splitlines():
        if "train_fsdp.py" in line:
            parse(shlex.split(line.partition("train_fsdp.py")[2], comments=True))


# ----------------------------------------------------------------------------------------------------------------------
# A mistake is one line that names the flag

MISTAKES = {  # flags: how the line begins; where it is empty, with the first flag
    # values that no flag takes
    "--batch-size 0": "--batch-size: 0 is not at least 1",
    "--batch-size 1.5": "",
    "--sequence-length 0": "",
    "--lr nan": "--lr: nan is not a positive number",
    "--lr inf": "",
    "--lr": "--lr: expected one argument",
    "--betas 0.9": "--betas: expected 2 arguments",
    "--betas 0.9 1": "",
    "--seed 18446744073709551616": "",
    "--zero-stage 4": "--zero-stage: invalid choice: 4",
    "--optimizer none-such": "",
    "--log-with mlflow": "",
    "--num-tokens 1.5": "--num-tokens: 1.5 is not a whole number",
    "--run-name a/b": "--run-name: 'a/b' is not a plain folder name",
    "--run-name ..": "",
    "--project-name ../tales --log-with tensorboard": "",
    # names that are near a flag's
    "--batch-siz 3": "--batch-siz: no such flag; did you mean --batch-size?",
    "--batch_size=3": "--batch_size: no such flag; did you mean --batch-size?",
    "--learning-rate 1e-3": "--learning-rate: no such flag; did you mean --lr?",
    "--per_device_train_batch_size 4": "--per_device_train_batch_size: no such flag; did you mean --batch-size?",
    "--checkpoint 3": "--checkpoint: no such flag; did you mean --checkpoint-interval?",
    "--zyx": "--zyx: no such flag",
    "--model smolm3-3b": "--model smolm3-3b: no preset, folder or hub id; did you mean smollm3-3b?",
    "positional": "positional: it stands behind no flag; --help lists them",
    # files that are not there
    "--dataset ./tales": "--dataset ./tales: no such file or folder",
    "--dataset tales/": "",
    "--resume none-such": "--resume none-such: no such folder",
    "--config none-such.toml": "--config none-such.toml: No such file or directory",
    "--model ./none-such": "--model ./none-such: no such folder",
    # what does not go together
    "--num-steps 3 --num-tokens 20e9": "--num-tokens: --num-steps is given too; leave out one of them",
    "--attention flash --precision fp32": "--attention flash: takes no fp32; use sdpa",
    "--document-mask --dataset synthetic": "",
    "--document-mask --attention flash_attention_2": "",
    "--streaming --dataset synthetic": "",
    "--streaming --packing best-fit": "--packing best-fit: it needs the lengths",
    "--streaming --max-epochs 3": "--max-epochs: ",
    "--precision fp8 --sequence-length 20": "--sequence-length 20: --precision fp8 (tensorwise) takes batch x sequence",
    "--dp-replicate-size 2 --zero-stage 0": "",
    "--activation-memory-budget 0.5 --no-compile": "",
    "--optimizer adamw-bf16 --betas 0.9 0.99": "--betas: with adamw-bf16 at most 0.98",
    "--warmup-steps 5 --lr-scheduler constant": "--warmup-steps: the constant scheduler has no warmup",
    "--warmup-steps 20 --num-steps 10": "--warmup-steps 20: the run ends after 10 steps; give at most so many",
    "--export e --export-weights ema": "--export-weights ema: there is no average of the weights",
    "--profile --num-steps 13": "--profile: no step is left to measure; give --num-steps at least 14",
    "--min-mfu 40 --num-steps 10": "--min-mfu: no step is left to measure; give --num-steps at least 11",
    "--num-steps 0": "--num-steps: 0 trains nothing; it goes with",
    "--num-steps 0 --sample-prompt Once": "--num-steps: 0 trains nothing, and random weights have nothing to show",
    "--resume auto --num-steps 0 --export e": "--resume: --num-steps 0 takes one checkpoint",
    "--measure --plan": "",
    "--plan-gpu Voodoo": "--plan-gpu 'Voodoo': not a kind that plans know",
    # what can have no effect
    "--json": "--json: only with --plan, or with --num-steps 0 and --eval-interval",
    "--fp8-recipe rowwise": "--fp8-recipe/--fp8-emulate: only with --precision fp8",
    "--decay-steps 3": "--decay-steps: only with --lr-scheduler warmup_stable_decay; give that too, or leave it out",
}


@pytest.mark.parametrize("argv, said", MISTAKES.items())
def test_a_mistake_is_one_line_that_names_the_flag_and_what_to_do(argv, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*argv.split()).startswith(said or argv.split()[0])


WITHOUT_EFFECT = {  # flags, of which the first has no effect: what gives it one
    "--eval-split test": "--eval-interval 5",
    "--keep-checkpoints 3 --no-final-checkpoint": "--checkpoint-interval 5",
    "--keep-checkpoints 3 --dataset synthetic": "--final-checkpoint",
    "--no-async-checkpoint": "--checkpoint-interval 5",
    "--metrics-host 0.0.0.0": "--metrics-port 4000",
    "--project-name p": "--log-with tensorboard",
    "--export-weights raw": "--export e",
    "--sample-tokens 9": "--sample-prompt Once",
    "--sample-prompt Once --dataset synthetic": "--init pretrained",
    "--skip-bad-records --dataset synthetic": "--dataset demo",
    "--dataset-split train --dataset synthetic": "--dataset demo",
    "--text-field story --dataset tales.txt": "--dataset tales.jsonl",
    "--dataset-config wikitext-2 --dataset demo": "--dataset wikitext",
    "--mixture-stage 0.5:demo=1 --dataset demo": "--dataset demo:1 other=stories:1",
    "--streams 4": "--streaming",
    "--defer-grad-sync": "--gradient-accumulation-steps 2",
    "--defer-grad-sync --gradient-accumulation-steps 2 --zero-stage 1": "--zero-stage 2",
    "--gpus-per-node 4 --no-own-plan": "--own-plan",
    "--plan-gpu B200 --no-own-plan": "--batch-size auto",
    "--plan-gpus 8": "--plan",
    "--plan-seconds 4": "--plan",
    "--gpu-hour-usd 3": "--plan",
    "--decay-shape linear": "--lr-scheduler warmup_stable_decay",
}


@pytest.mark.parametrize("argv, with_effect", WITHOUT_EFFECT.items())
def test_a_flag_without_effect_is_an_error_and_none_where_it_has_one(argv, with_effect):
    assert re.match(rf"{argv.split()[0].replace('no-async', 'async')}: .*leave it out", refused(*argv.split()))
    parse([*argv.split(), *with_effect.split()])
    if "--plan" not in argv:
        parse([*argv.split(), "--num-steps", "0", "--init", "pretrained", "--export", "e"])  # it takes a run's flags


@pytest.mark.parametrize("optimizer", OPTIMIZER_RULES)
def test_a_flag_of_some_optimizers_is_an_error_with_the_others(optimizer):
    own = OPTIMIZER_RULES[optimizer].get("OWN_FLAGS", ())
    values = {"adamw_lr": 1e-3, "momentum_dtype": "bf16", "muon_iteration": "polar-express", "muon_scale": "original"}
    for name, value in values.items():
        argv = ["--optimizer", optimizer, f"--{name.replace('_', '-')}", str(value)]
        if name in own:
            assert getattr(parse(argv), name) == value
        else:
            assert f"--optimizer {optimizer} takes no such number or choice" in refused(*argv)


@pytest.mark.parametrize("argv", ["", "--demo", "--demo --plan --json", "--dataset synthetic", "--demo --num-steps 5"])
def test_what_nobody_gave_is_no_mistake(argv):
    parse(argv.split())


def test_what_the_fields_and_rules_name_are_flags_and_other_trainers_names_are_none():
    others = [name for field in FIELDS for name in field.metadata["also"].split()]
    assert len(others) == len(set(others)) and not {f"--{name}" for name in others} & make_parser().flags().keys()
    needed = {condition.partition("=")[0] for field in FIELDS for condition in field.metadata["only_with"].split()}
    assert needed | {name for rules in OPTIMIZER_RULES.values() for name in rules.get("OWN_FLAGS", ())} <= FLAGS.keys()


@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action.nargs in (None, "+", 2)])
def test_an_empty_value_is_an_error_that_names_the_flag(toml, name):
    flag = f"--{name.replace('_', '-')}"
    ways = [[flag, ""], [f"{flag}="], [flag, "  "]]
    if name not in ("config", "betas"):
        ways.append(toml(f'{flag[2:]} = ""'))
    for argv in ways:
        assert re.search(rf"(^|flags\.toml: ){flag}: ", refused(*argv))


ODD = ["\udcff", "a\udcff/b", "two\nlines", "x" * 10_000, "/x" * 5_000, "~no_such_user_here/x", "-dash", "\x1b[2J"]
TEXTS = [name for name, action in ACTIONS.items() if getattr(action.type, "__name__", "") in ("text", "path")]


@pytest.mark.parametrize("name", TEXTS)
def test_an_odd_text_is_taken_or_is_one_line_that_names_the_flag(name):
    flag = f"--{name.replace('_', '-')}"
    for value in ODD:
        try:
            parse([f"{flag}={value}", "--plan"])
        except UserError as error:  # it need not be raised
            assert error.exit_code == 2 and "\n" not in str(error) and flag in str(error)  # noqa: PT017
        else:
            assert "\udcff" not in value


EXTREMES = ["0", "-1", "1e300", "-1e300", "nan", "inf", "-inf", str(2**64), str(2**63), str(2**31), "1e-300", "1e400"]
NUMBERS = [
    name
    for name, action in ACTIONS.items()
    if getattr(action.type, "__name__", "") in ("int", "float", "gpu_counts", "batch_size") and not action.choices
]


@pytest.mark.parametrize("name", NUMBERS)
def test_an_extreme_number_is_in_the_flags_range_or_is_one_line(name):
    flag, action = f"--{name.replace('_', '-')}", ACTIONS[name]
    for text in EXTREMES:
        try:
            taken = getattr(parse([flag, *[text] * (action.nargs or 1), "--plan"]), name)
        except UserError as error:  # it need not be raised
            assert error.exit_code == 2 and "\n" not in str(error) and flag in str(error)  # noqa: PT017
        else:
            for number in taken if isinstance(taken, tuple) else [taken]:
                assert math.isfinite(number) and number >= 0
                assert isinstance(number, float) or number < (2**63 if name == "seed" else 2**31)


# ----------------------------------------------------------------------------------------------------------------------
# What is given wins


def test_flags_beside_demo_win_wherever_they_stand():
    for argv in (["--demo", "--num-steps", "3", "--lr", "1"], ["--num-steps", "3", "--lr", "1", "--demo"]):
        settings = parse(argv)
        assert (settings.num_steps, settings.lr, settings.model, settings.dataset) == (3, 1, "demo", "demo")
        assert settings.given == {"demo": True, "num_steps": 3, "lr": 1}


def test_of_a_flag_given_twice_the_last_counts_and_every_prompt_is_kept(toml):
    settings = parse(words("--lr 1e-3 --seed 3 --lr=1e-4 --compile --no-compile --betas 0.8 0.9 --betas 0.9 0.95"))
    assert (settings.lr, settings.compile, settings.betas) == (1e-4, False, (0.9, 0.95))
    prompts = ["--sample-prompt", "a", "--seed", "1", "--sample-prompt=b", "--sample-prompt", "-- c"]
    assert parse(prompts).sample_prompt == parse(["--demo", *prompts]).sample_prompt == ("a", "b", "-- c")
    assert len(parse(["--demo"]).sample_prompt) == 1
    assert parse(["--demo", "--dataset", "mine.txt"]).sample_prompt is None
    file = toml('sample-prompt = ["x", "y"]\nlr = 1.0')
    assert parse(file).sample_prompt == ("x", "y")
    assert parse([*file, *prompts]).sample_prompt == ("a", "b", "-- c")


EVERY_KIND = (
    "--dataset a=x.jsonl:0.7 b=y.jsonl:0.3 --mixture-stage 0.5:a=1 --mixture-stage 0.8:b=1 --no-compile "
    "--document-mask --betas 0.8 0.9 --lr 1e-3 --num-tokens 20e9 --sample-prompt=-a --sample-prompt b --plan-gpus 8,64 "
    "--plan --run-name=-r"
)


def test_what_was_given_is_a_command_line_again():
    settings = parse(EVERY_KIND.split())
    assert parse(flags.as_words(settings.given)) == settings
    again = flags.to_paste("python x.py", settings.given, lr=1, compile=True)
    assert again.startswith("python x.py --dataset a=x.jsonl") and "--compile" in again.split()


# ----------------------------------------------------------------------------------------------------------------------
# --config


def test_a_file_sets_flags_of_every_kind_and_the_command_line_wins(toml):
    text = 'dataset = "synthetic"\ncompile = false\ndocument-mask = false\n[whatever]\nbetas = [0.8, 0.9]\n'
    text += "[whatever.deeper]\ncpu_offload = true\nnum_steps = 7"
    wanted = "--dataset synthetic --no-compile --no-document-mask --betas 0.8 0.9 --cpu-offload --num-steps 9"
    for argv in ([*toml(text), "--num-steps", "9"], ["--num-steps", "9", *toml(text)]):
        read = parse(argv)
        assert dataclasses.replace(read, config=None) == parse(wanted.split())
    assert parse([*toml("plan-gpus = [8, 64]"), "--plan"]).plan_gpus == (8, 64)
    assert parse([*toml("num-steps = 3"), "--num-tokens", "32"]).given.keys() == {"num_tokens"}  # instead of it


@pytest.mark.parametrize(
    "text, said",
    [
        ("batch_siz = 3", "batch_siz: no such flag; did you mean --batch-size?"),
        ("[training]\nlearning_rate = 3", "learning_rate: no such flag; did you mean --lr?"),
        ("config = 'more.toml'", "config: no such flag"),
        ("no-compile = true", "no-compile: no such flag"),
        ("lr = 'much'", "--lr: invalid float value: 'much'"),
        ("num_steps = 5.0", "--num-steps: invalid int value: '5.0'"),
        ("betas = 0.9", "--betas: expected 2 arguments"),
        ("lr = true", "lr: true where a value belongs"),
        ("cpu_offload = 1", "cpu_offload: 1 where true or false belongs"),
        ("model = ['demo', 'x']", "x: it stands behind no flag"),
        ("lr = 1\n[more]\nlr = 2", "lr stands there twice"),
        ("batch-size = 1\nbatch_size = 2", "batch_size stands there twice"),
        ("lr = " + "[" * 3000, "it is no TOML (maximum recursion"),
        ("lr: 3", "it is no TOML (Expected '=' after a key"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(toml, text, said):
    file = toml(text)
    assert refused(*file).startswith(f"--config {file[1]}: {said}")


def test_flags_of_a_file_that_contradict_the_command_lines_are_found(toml):
    said = refused(*toml("document_mask = true"), "--dataset", "synthetic")
    assert re.match(r"--document-mask: .* \(with the flags of .*flags.toml\)", said)


def test_a_file_of_windows_is_read_and_what_is_no_file_of_flags_is_named(tmp_path):
    (tmp_path / "f.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\nlr = 1.0\r\n")
    assert (parse(["--config", tmp_path / "f.toml"]).seed, parse(["--config", tmp_path / "f.toml"]).lr) == (3, 1.0)
    file = "assets/demo/config.json"
    assert refused("--config", file).startswith(f"--config {file}: it is not the config.json of a run")


def test_a_runs_config_gives_its_flags_but_not_its_name_or_what_it_derived(tmp_path):
    argv = "--demo --lr 1e-3 --gradient-accumulation-steps 2 --run-name r --resume auto --export e --seed 1"
    (tmp_path / "config.json").write_text(json.dumps(flags.record_flags(parse(argv.split()))))
    read = parse(["--config", tmp_path / "config.json", "--num-steps", 400])
    same = parse(words("--demo --lr 1e-3 --gradient-accumulation-steps 2 --seed 1 --num-steps 400"))
    assert dataclasses.replace(read, config=None) == same and read.warmup_steps == 20


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint of which nothing is trained


def test_an_evaluation_has_the_flags_of_its_checkpoint_that_shape_the_loss(tmp_path):
    """Those of the text too, unless another text is named."""
    of_text = {"dataset_split": "train[:90%]", "text_field": "body", "skip_bad_records": True, "seed": 7}
    of_model = {"sequence_length": 96, "document_mask": True, "precision": "fp32", "tokenizer": str(tmp_path)}
    recorded = flags.record_flags(Settings())["flags"] | {"dataset": str(tmp_path), "eval_split": "test"}
    checkpoint = write_checkpoint(tmp_path / "run", 2, flags=recorded | of_text | of_model)
    run = ["--num-steps", "0", "--eval-interval", "1", "--resume", checkpoint]
    same, other = (vars(parse([*run, *text.split()])) for text in ("", f"--dataset {ROOT}/README.md"))
    assert same.items() >= (of_text | of_model | {"eval_split": "test"}).items()
    assert other.items() >= of_model.items()
    assert (other["text_field"], other["eval_split"], other["seed"]) == (Settings().text_field, None, Settings().seed)


def test_what_a_resume_compares_and_reports_is_said_by_the_fields():
    settings = parse(["--demo"])
    assert flags.must_match(settings).keys() == {"optimizer", "streaming", "sequence_length", "seed"}
    assert {"lr", "num_steps", "batch_size", "ema"} <= flags.reported(settings).keys()
    assert not flags.must_match(settings).keys() & flags.reported(settings).keys()


# ----------------------------------------------------------------------------------------------------------------------
# From outside


@pytest.mark.slow
def test_a_mistake_under_a_launcher_is_told_by_one_rank_and_in_json_where_that_was_asked():
    process = python("--json", "--lr", "0")
    assert (process.returncode, process.stderr) == (2, "train_fsdp.py: error: --lr: 0 is not a positive number\n")
    assert json.loads(process.stdout) == {"error": "--lr: 0 is not a positive number"}
    assert cold_python("--lr", "0", RANK="1").stderr == ""


@pytest.mark.slow
def test_what_accelerates_launcher_asks_for_is_told_and_not_followed():
    asked = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    process = cold_python("--demo", "--model", ROOT / "docs", **asked)
    warning, error = process.stderr.splitlines()
    assert warning.startswith("train_fsdp.py: warning: ACCELERATE_USE_FSDP=true ") and "--zero-stage" in warning
    assert error.startswith("train_fsdp.py: error: --model")
