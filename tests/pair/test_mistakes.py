"""A user's mistakes: each is one line that names the flag or the file, what is wrong and what to do, with exit code 2;
nothing is trained or left behind. Mistakes in models, data and checkpoints are among the tests of those."""

import json
import math
import os
import re
import sys

import pytest
from checkpoints import write_checkpoint
from conftest import (
    PROGRAM,
    ROOT,
    cold_python,
    copy_program,
    parse,
    python,
    slow_case,
    start,
    torchrun_command,
    train,
    words,
)

from harness.base import UserError
from harness.flags.parser import drop_accelerate_settings, make_parser
from harness.flags.settings import as_flag
from harness.model import choose_precision

PREFIX = "train_fsdp.py: error: "
NO_NETWORK = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": None, "https_proxy": None}


def refused(*arguments) -> str:
    """The one line of a command line that is refused."""
    with pytest.raises(UserError) as raised:
        parse(list(arguments))
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
    return str(raised.value)


# ----------------------------------------------------------------------------------------------------------------------
# In the flags themselves

FLAGS = {  # a command line: the beginning of its error, or "" for its first flag
    # values that no flag takes
    "--batch-size 0": "--batch-size: 0 is not a whole number of at least 1 and below 1000001, or auto",
    "--lr nan": "--lr: nan is not a finite number above 0",
    "--lr -1e-4": "--lr: expected one argument; write one that begins with - as --lr=VALUE",
    "--min-mfu 0.40": "--min-mfu: 0.40 is not a number of at least 1 and below 100; it is in percent, as in 40",
    "--betas 0.9": "--betas: expected 2 arguments",
    "--zero-stage 4": "--zero-stage: invalid choice: '4' (choose from 0, 1, 2, 3)",
    "--num-tokens 1.5": "--num-tokens: 1.5 is not a whole number of tokens above 0",
    "--peak-tflops 989e12": "--peak-tflops: 989e12 is not a number above 0 and below 100000",
    "--plan --plan-gpus 4,": "--plan-gpus: 4, is not a whole number",
    "--run-name a/b": "--run-name: 'a/b' is not a plain folder name",
    "--run-name=a\x1b[2Jb": "--run-name: 'a\\x1b[2Jb' is not a plain folder name",
    f"--run-name {'é' * 101}": "",
    "--compile=true": "--compile: takes no value; leave out 'true'",
    "--compile false": "--compile: takes no value; give --no-compile",
    "--streaming=False": "--streaming: takes no value; give --no-streaming",
    "--sample-prompt Once upon a": "--sample-prompt: upon is one value too many; put a value with spaces in quotes",
    # names near a flag's; those of other trainers are in tests/flags/test_names.py
    "--batch-siz 3": "--batch-siz: no such flag; did you mean --batch-size?",
    "\u2013batch-size 3": "\u2013batch-size: no such flag; did you mean --batch-size?",
    "--model smolm3-3b": "--model smolm3-3b: no preset, folder or hub id; did you mean smollm3-3b?",
    "positional": "positional: unexpected argument; --help lists the flags",
    # files and URLs
    "--output-dir s3://b/run": "--output-dir: s3://b/run is a URL, and a local path is needed; copy or sync",
    "--model hf://x/y": "--model: hf://x/y is a URL; give a hub id such as OWNER/NAME, or a local folder",
    "--dataset ./tales": "--dataset ./tales: no such file or folder",
    "--dataset a:70% b:30%": "--dataset a:70%: no such file or folder",
    "--resume none-such": "--resume none-such: no such folder",
    "--config none-such.toml": "--config none-such.toml: No such file or directory",
    f"--config {ROOT}/assets/demo/config.json": f"--config {ROOT}/assets/demo/config.json: it is not the config.json",
    "--model ./none-such": "--model ./none-such: no such folder",
    # sources of a mixture and its stages
    "--dataset a=x:1 a=y:1": "--dataset: two sources are named a; give other names",
    "--dataset x:1 synthetic:1": "--dataset: synthetic cannot be mixed with others",
    "--dataset x:1 y": "--dataset: y has no weight, others have one",
    "--dataset corpus.txt:0.7": "--dataset corpus.txt:0.7: a single source has no weight; leave it out; for a part",
    "--dataset x:1e999999999 y:1": "--dataset: x:1e999999999 has no weight, others have one",
    "--dataset x:0 y:0": "--dataset: all weights are 0",
    "--dataset x:1 y:0": "--dataset: y has weight 0 in the whole run",
    "--dataset x:1 y:1 --mixture-stage 0.5:z=1": "--mixture-stage: no source is named z; sources: x, y",
    "--dataset x:1 y:1 --mixture-stage 0.5:x=1 --mixture-stage 0.50:y=1": "--mixture-stage: two stages begin at 0.5",
    "--mixture-stage 1:x=1 --dataset x:1 y:1": "",
    "--mixture-stage 0.8:x=1,x=2 --dataset x:1 y:1": "",
    "--mixture-stage 0.5:x=0 --dataset x:1 y:1": "",
    # what does not go together
    "--num-steps 3 --num-tokens 20e9": "--num-tokens: --num-steps is given too; leave one out",
    "--num-epochs 3 --num-steps 0": "--num-epochs: --num-steps is given too; leave one out",
    "--num-epochs 3 --streaming": "--num-epochs: the size of a stream is unknown; give --num-steps or --num-tokens",
    "--num-epochs 3 --dataset synthetic": "--num-epochs: synthetic tokens have no epochs; give --num-steps",
    "--num-epochs 3 --dataset x:1 y:2": "--num-epochs: weighted sources have different epochs; give",
    "--eval-interval epoch --streaming": "--eval-interval epoch: the size of a stream is unknown; give a number",
    "--eval-split ./held --eval-interval 5": "--eval-split ./held: no such file or folder",
    "--attention flash --precision fp32": "--attention flash: does not support fp32; use sdpa",
    "--document-mask --dataset synthetic": "",
    "--document-mask --attention flash_attention_2": "--attention flash_attention_2: does not support --document-mask",
    "--streaming --dataset synthetic": "",
    "--streaming --packing best-fit": "--packing best-fit: needs the lengths",
    "--packing none --num-tokens 1B": "--num-tokens: with --packing none the number of tokens in a step is unknown",
    "--streaming --max-epochs 3": "--max-epochs: ",
    "--dp-replicate-size 2 --zero-stage 0": "",
    "--show-samples 3 --plan": "--plan: not with --show-samples; leave one out",
    "--show-samples 3 --num-steps 0 --resume r --average-checkpoints 2": "--average-checkpoints, --num-steps: not with",
    "--plan --num-steps 0 --export e": "--num-steps: 0 trains nothing, and --plan plans training",
    "--plan --json --plan-details": "--plan-details: --json prints all of it; leave one out",
    "--optimizer adamw-bf16 --betas 0.9 0.99": "--betas: at most 0.98 with --optimizer adamw-bf16",
    "--warmup-steps 5 --lr-scheduler constant": "--warmup-steps: --lr-scheduler constant has no warmup",
    "--warmup-steps 20 --num-steps 10": "--warmup-steps 20: the run has 10 steps; give at most that many",
    "--min-mfu 40 --num-steps 10": "--min-mfu: no step is left to measure; give --num-steps at least 11",
    "--num-steps 0": "--num-steps: 0 trains nothing; add --eval-interval 1",
    "--num-steps 0 --sample-prompt Once": "--num-steps: 0 trains nothing, and the weights are random",
    "--resume auto --num-steps 0 --export e": "--resume: --num-steps 0 needs one checkpoint",
    "--num-steps 0 --export e --plan-gpus 4": "--plan-gpus: only with --plan; give that too",
    "--plan-gpu Voodoo": "--plan-gpu 'Voodoo': unknown GPU; give one of",
    "--json": "--json: only with --plan, or with --num-steps 0 and --eval-interval",
}


@pytest.mark.parametrize("argv, printed", FLAGS.items())
def test_a_mistake_in_the_flags(argv, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*argv.split()).startswith(printed or argv.split()[0])


FILES = {  # a file of flags: its error after the file's name
    "batch_siz = 3": "batch_siz: no such flag; did you mean --batch-size?",
    "config = 'more.toml'": "config: no such flag",
    "num_steps = 5.0": "--num-steps: 5.0 is not a whole number of at least 0",
    "no_compile = true": "no_compile: unknown key; write compile = false",
    "no_fused_loss = false": "no_fused_loss: unknown key; write fused_loss = true",
    "[training]\nlocal_batch_size = 2": "local_batch_size: no such flag; use --batch-size",
    "output_dir = 's3://b/run'": "--output-dir: s3://b/run is a URL",
    "dataset = ''": "--dataset: ",
    "sample-prompt = [{role = 'user'}]": 'sample-prompt: {"role": "user"} is not a value',
    "# Andr\udce9": "byte 6 is not UTF-8; save the file as UTF-8",
    "sample-prompt = []": "sample-prompt: its value is empty; give one, or leave it out",
    "lr = true": "lr: true is not a value",
    "lr = [1e-4, 2e-4]": "lr: [0.0001, 0.0002] is not a value",
    "cpu_offload = 1": "cpu_offload: 1 is not true or false",
    "lr = 1\n[more]\nlr = 2": "lr is given twice",
    "lr: 3": "invalid TOML (Expected '=' after a key",
}


@pytest.mark.parametrize("text, printed", FILES.items())
def test_a_mistake_in_a_file_of_flags(text, printed, tmp_path):
    (tmp_path / "flags.toml").write_text(text, errors="surrogateescape")
    assert refused("--config", tmp_path / "flags.toml").startswith(f"--config {tmp_path}/flags.toml: {printed}")


@pytest.mark.parametrize("text", ["batch_siz = 3", "batch-size = 0", "plan = true\nwarmup-steps = 2000"])
def test_with_json_in_a_file_a_mistake_is_a_json_object_too(text, tmp_path, capsys):
    (tmp_path / "flags.toml").write_text(f"{text}\njson = true")
    message = refused("--config", tmp_path / "flags.toml")
    assert json.loads(capsys.readouterr().out) == {"error": message}


WITHOUT_EFFECT = {  # flags, of which the first has no effect: a flag that gives it one
    "--eval-split test": "--eval-interval 5",
    "--no-async-checkpoint": "--checkpoint-interval 5",
    "--keep-best": "--eval-interval epoch",
    "--decay-steps 3": "--lr-scheduler warmup_stable_decay",
    "--decay-shape linear --lr-scheduler warmup_stable_decay --decay-steps 0": "--decay-steps 3",
    "--keep-checkpoints 3 --no-final-checkpoint": "--checkpoint-interval 5",
    "--skip-bad-records --dataset synthetic": "--dataset demo",
    "--skip-bad-records --dataset tokens.bin": "--dataset tales.txt",
    "--text-field story --dataset tales.txt": "--dataset tales.jsonl",
    "--dataset-config wikitext-2 --dataset demo": "--dataset wikitext",
    "--mixture-stage 0.5:demo=1 --dataset demo": "--dataset demo:1 other=stories:1",
    "--defer-grad-sync": "--gradient-accumulation-steps 2",
    "--defer-grad-sync --gradient-accumulation-steps 2 --zero-stage 1": "--zero-stage 2",
    "--adamw-lr 1e-3": "--optimizer muon",
    "--plan-gpu B200 --no-own-plan": "--batch-size auto",
    "--fp8-recipe rowwise": "--precision fp8",
    "--fp8-emulate --precision bf16": "--precision fp8",
}


@pytest.mark.parametrize("argv, with_effect", WITHOUT_EFFECT.items())
def test_a_flag_without_effect_is_a_mistake_and_none_if_it_has_one(argv, with_effect):
    assert re.match(rf"{argv.split()[0].replace('no-async', 'async')}: .*leave it out", refused(*argv.split()))
    parse([*argv.split(), *with_effect.split()])
    parse([*argv.split(), "--num-steps", "0", "--init", "pretrained", "--export", "e"])  # it takes a run's flags


UNTRAINED = "--profile --min-mfu 40 --batch-size auto --decay-steps 20 --lr-scheduler warmup_stable_decay"
UNTRAINED += " --keep-best --checkpoint-interval 5 --metrics-port 28500 --log-with all"


@pytest.mark.parametrize("action", ["--num-steps 0 --export e", "--num-steps 0 --eval-interval 1", "--plan"])
def test_an_export_an_evaluation_and_a_plan_take_the_flags_of_a_run(action):
    args = parse([*UNTRAINED.split(), *action.split(), "--init", "pretrained"])
    assert args.plan or args.batch_size == 1


FILE = """
dataset = ["a=x.jsonl:1", "b=y.jsonl:1"]\nmixture-stage = ["0.5:a=1"]\ntext-field = "body"\nmax-epochs = 3
precision = "fp8"\nfp8-recipe = "rowwise"\nfp8-emulate = true\noptimizer = "muon"\nadamw-lr = 1e-3
lr-scheduler = "warmup_stable_decay"\ndecay-steps = 3\ndecay-shape = "linear"\nnum-steps = 7\ndp-replicate-size = 2
eval-interval = 5\neval-split = "test"\nkeep-best = true\nasync-checkpoint = false
gradient-accumulation-steps = 2\ndefer-grad-sync = true\nlog-with = "wandb"\nproject-name = "p"
"""
REPLACED = {  # typed flags: flags of FILE that lose their effect
    "--precision bf16": "fp8_recipe fp8_emulate",
    "--optimizer adamw": "adamw_lr",
    "--lr-scheduler cosine": "decay_steps decay_shape",
    "--eval-interval 0": "eval_split keep_best async_checkpoint",
    "--gradient-accumulation-steps 1": "defer_grad_sync",
    "--zero-stage 0": "dp_replicate_size defer_grad_sync",
    "--dataset z.jsonl": "mixture_stage",
    "--dataset a=x.jsonl:1 b=z.jsonl:3 c=y.jsonl:1": "",
    "--dataset z.txt": "mixture_stage text_field",
    "--streaming": "max_epochs",
    "--num-tokens 1B": "num_steps",
}


@pytest.mark.parametrize("typed, left_out", REPLACED.items())
def test_flags_of_a_file_that_a_typed_flag_makes_void_are_left_out(typed, left_out, tmp_path):
    (tmp_path / "flags.toml").write_text(FILE)
    file = ["--config", tmp_path / "flags.toml"]
    assert parse(file).explicit.keys() - parse([*file, *typed.split()]).explicit.keys() == {*left_out.split()}
    (tmp_path / "flags.toml").write_text('optimizer = "adamw"\nadamw-lr = 1e-3\nlr-scheduler = "constant"')
    wrong_itself = refused(*file, *typed.split())
    assert wrong_itself.startswith("--adamw-lr: only with --optimizer muon; ") and str(file[1]) in wrong_itself


ODD_TEXTS = ["\udcff", "s3://b/x", "two\nlines", "x" * 10_000, "/x" * 5_000, "~no_such_user_here/x", "-dash", "\x1b[2J"]
ODD_NUMBERS = ["0", "-1", "1e300", "nan", "inf", "-inf", str(2**64), str(2**63), str(2**31), "1e-300", "1e400"]
ODD = dict.fromkeys(("text", "path", "path_or_url", "path_or_hub_id"), ODD_TEXTS)
ODD |= dict.fromkeys(("int", "float", "gpu_counts", "batch_size", "evaluation_interval"), ODD_NUMBERS)
ACTIONS = {action.dest: action for action in make_parser().flags().values()}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_odd_value_is_in_the_flags_range_or_is_one_line_that_names_the_flag(name):
    flag, action = as_flag(name), ACTIONS[name]
    if action.nargs in (None, "+", 2):
        for empty in ([flag, ""], [f"{flag}="], [flag, "  "]):
            assert refused(*empty).startswith(f"{flag}: ")
    kind = getattr(action.type, "__name__", "")
    for value in [] if action.choices else ODD.get(kind, []):
        argv = [flag, value, value] if action.nargs == 2 else [f"{flag}={value}"]
        try:
            taken = getattr(parse([*argv, "--plan"]), name)
        except UserError as error:  # it need not be raised
            assert error.exit_code == 2 and "\n" not in str(error) and flag in str(error)  # noqa: PT017
            continue
        if ODD[kind] is ODD_TEXTS:
            assert "\udcff" not in value and (kind in ("text", "path_or_url") or "s3:" not in value)
            continue
        for number in taken if isinstance(taken, tuple) else [taken]:
            assert math.isfinite(number) and number >= 0
            assert isinstance(number, float) or number < (2**63 if name == "seed" else 2**31)


# ----------------------------------------------------------------------------------------------------------------------
# In the input of a run

RUNS = {  # flags beside those of a run that works: the beginning of the error, with {} for the folder of the test
    "--dataset {}/short.txt": "--dataset {}/short.txt",
    "--dataset {}/data.txt --batch-size 1000": "--dataset {}/data.txt",
    "--dataset-split train[5]": "--dataset-split train[5]: cannot be read; give one such as train, 'train[:95%]'",
    "--eval-interval 1 --eval-split validation[5]": "--eval-split validation[5]: cannot be read; give one such as",
    "--dp-replicate-size 2": "--dp-replicate-size 2: ",
    "--output-dir {}/data.txt": "--output-dir {}/data.txt: ",
    "--tokenizer /absent/path": "--tokenizer /absent/path: no such folder; ",
    "--tokenizer {}/empty": "--tokenizer {}/empty: ",
    "--tokenizer data.txt": "--tokenizer data.txt: no such folder; ",
    "--model {}/empty": "--model {}/empty: the folder has no config.json",
    f"--model {PROGRAM}": f"--model {PROGRAM}: ",
    "--init pretrained": "--init pretrained: ",
    "--sample-prompt Once --sample-tokens 256": "--sample-tokens 256: ",  # the model has 256 positions
    "--precision bf16 --attention cudnn": "--attention cudnn",
    "--precision bf16 --attention flash_attention_2": "--attention flash_attention_2",
}


@pytest.mark.parametrize("flags, printed", RUNS.items())
def test_a_mistake_in_the_input_of_a_run(mistake, tmp_path, monkeypatch, flags, printed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("The fox.")
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 100)
    assert mistake(*words(flags.replace("{}", str(tmp_path)))).startswith(printed.replace("{}", str(tmp_path)))
    assert not list(tmp_path.rglob("metrics.jsonl"))


CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
REASONS = {  # files by name, flags: the reason in the message, which a library may give in its second line
    "a config of an odd size": (
        {"config.json": '{"model_type": "llama", "hidden_size": 66, "num_attention_heads": 4}'},
        "--model {}",
        "ValueError: The hidden size (66) is not a multiple of the number of attention heads (4)",
    ),
    "a config of a wrong type": (
        {"config.json": '{"model_type": "llama", "hidden_size": "many"}'},
        "--model {}",
        "Validation error for field 'hidden_size': TypeError: ",
    ),
    "no tokenizer": ({}, "--tokenizer {}", "no tokenizer.json, and nothing that transformers makes one of"),
    "a tokenizer.model alone": (
        {"tokenizer.model": "x", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        "--tokenizer {}",
        "no tokenizer.json, and a tokenizer.model needs the package sentencepiece or tiktoken",
    ),
    "an empty tokenizer": ({"tokenizer.json": "{}"}, "--tokenizer {}", "no 'added_tokens'"),
    "a template": (
        {"c.jsonl": CHAT, "t.jinja": "{% generation %}\n{{ m }"},
        "--dataset {}/c.jsonl --chat-template {}/t.jinja --skip-bad-records",
        "its chat template has a syntax error in line 2, unexpected '}'",
    ),
    "a bad record": (
        {"n.jsonl": '{"text": null}'},
        "--dataset {}/n.jsonl --skip-bad-records",
        "n.jsonl: it holds no text, 1 bad record left out",
    ),
}


@pytest.mark.parametrize("files, flags, printed", REASONS.values(), ids=REASONS)
def test_an_error_has_its_reason_and_no_advice_for_a_librarys_callers(mistake, tmp_path, files, flags, printed):
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    message = mistake(*words(flags.replace("{}", str(folder))))
    assert printed in message
    assert not re.search(r":\)|local_files_only|one of:|\(0 bad\)", message)


def test_the_folder_of_a_run_is_neither_written_over_nor_taken_for_a_model(device, arguments, mistake, tmp_path):
    train(arguments, device)
    run = tmp_path / "out" / "r"
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert len(before) >= 2
    assert mistake().startswith("--run-name r: ")
    for folder in (run, *(run / "checkpoints").glob("step-*")):
        printed = mistake("--model", folder, "--run-name", "other")
        assert printed.startswith(f"--model {folder}: a folder of a run, not of a model; ")
        assert f"--num-steps 0 --resume {folder} --export DIR" in printed
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


# ----------------------------------------------------------------------------------------------------------------------
# From outside


def only_line(process) -> str:
    """The one line that a failed command left on stderr."""
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(PREFIX)
    return line.removeprefix(PREFIX)


STARTS = [
    (cold_python, "--num-stpes 3", "--num-stpes: no such flag; did you mean --num-steps?"),
    (python, "--attention flash", "--attention flash: does not support fp32"),  # the default precision of a CPU
]


@pytest.mark.smoke
@pytest.mark.parametrize("run, flags, printed", STARTS)
def test_the_program_ends_with_2_one_line_and_no_run(run, flags, printed, tmp_path):
    folders = ["--output-dir", tmp_path / "out", "--cache-dir", tmp_path / "cache"]
    assert only_line(run("--demo", *words(flags), *folders)).startswith(printed)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_that_does_not_exist_is_one_line_at_once_without_a_network(arguments):
    process = cold_python(*arguments, "--model", "no-such-company/no-such-model", **NO_NETWORK)
    assert only_line(process).startswith("--model no-such-company/no-such-model: ")


@pytest.mark.slow
def test_wandb_without_a_login_is_one_line(arguments, tmp_path):
    (tmp_path / "home").mkdir()
    home = {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "home" / ".netrc")}
    assert only_line(cold_python(*arguments, "--log-with", "wandb", **home)).startswith("--log-with wandb: ")
    assert not (tmp_path / "out").exists()


ACCELERATE = {  # variables that accelerate launch sets: the warning
    "ACCELERATE_USE_FSDP=true": "ACCELERATE_USE_FSDP=true .* is ignored: use --zero-stage",
    "ACCELERATE_USE_DEEPSPEED=true": "ACCELERATE_USE_DEEPSPEED=true .* --zero-stage",
    "ACCELERATE_USE_PARALLELISM_CONFIG=true": "ACCELERATE_USE_PARALLELISM_CONFIG=true .* --dp-replicate-size",
    "ACCELERATE_DYNAMO_BACKEND=INDUCTOR": "ACCELERATE_DYNAMO_BACKEND=inductor .* --compile",
    "ACCELERATE_MIXED_PRECISION=bf16": "ACCELERATE_MIXED_PRECISION=bf16 .*: this run computes in fp32; --precision",
    "ACCELERATE_MIXED_PRECISION=no ACCELERATE_DYNAMO_BACKEND=NO ACCELERATE_USE_FSDP=false": "",
    "ACCELERATE_USE_CPU=True MASTER_ADDR=127.0.0.1 MASTER_PORT=29500": "accelerate launch: it started one rank, altho",
}


@pytest.mark.parametrize("environment, warning", ACCELERATE.items())
def test_a_setting_of_accelerate_launch_that_is_ignored_is_a_warning(environment, warning, monkeypatch, capfd):
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("="))
    drop_accelerate_settings()
    choose_precision(parse(["--demo"]), None)
    printed = capfd.readouterr().err
    assert re.match(f"train_fsdp.py: warning: {warning}", printed) if warning else printed == ""
    assert printed.count("\n") == bool(warning)


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 0"), slow_case(3, "--dp-replicate-size 2")])
def test_a_mistake_of_every_rank_is_one_line_of_one_rank(arguments, ranks, flags):
    process = start([*torchrun_command(ranks), PROGRAM, *arguments, *words(flags)])
    assert process.returncode != 0
    ours, _, launchers_report = process.stderr.partition("torch/distributed/elastic")
    (error,) = [line for line in ours.splitlines() if PREFIX in line]
    assert error.startswith(f"{PREFIX}{flags.split()[0]}") and "Traceback" not in ours
    assert process.stderr.rstrip().splitlines()[-2].strip() == error  # and the last line is a rule
    assert launchers_report


def test_a_run_whose_checkpoints_are_all_damaged_is_named(tmp_path):
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    damaged = f"--resume {tmp_path}: all its checkpoints are damaged (step-00000002: manifest.json: No such file"
    assert refused("--resume", f"{tmp_path}").startswith(damaged)


def test_a_folder_of_a_run_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1)
    stat = os.stat

    def denied(file, *args, **options):
        if isinstance(file, str | os.PathLike) and str(file).startswith(f"{tmp_path}/"):
            raise PermissionError(13, "Permission denied", str(file))
        return stat(file, *args, **options)

    monkeypatch.setattr(os, "stat", denied)
    printed = refused("--resume", f"{tmp_path}")
    assert printed.startswith(f"--resume {tmp_path}: {tmp_path}/") and printed.endswith(
        "cannot be read (Permission denied)"
    )


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(arguments, tmp_path):
    broken = copy_program(tmp_path / "program")
    program = broken / "train_fsdp.py"
    step = "def train_step("
    program.write_text(
        program.read_text().replace(step, f"def train_step(*_):\n    1 // 0\n\n\n{step[:-1]}_before(", 1)
    )
    process = start([sys.executable, program, *arguments])
    assert process.returncode == 1
    assert "Traceback" in process.stderr and "ZeroDivisionError" in process.stderr
