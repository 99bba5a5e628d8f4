"""The command line and files of flags: values, defaults, and which wins. Mistakes are in pair/test_mistakes.py."""

import dataclasses
import json
import re
import shlex
from fractions import Fraction

import pytest
from checkpoints import write_checkpoint
from conftest import ROOT, cold_python, parse, words

from harness import flags
from harness.data.formats import COMPRESSIONS, all_formats
from harness.flags import choices
from harness.flags.parser import EXAMPLES
from harness.flags.settings import FLAGS, Args, as_flag
from harness.flags.sources import Source, parse_sources


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> list:
        (tmp_path / "flags.toml").write_text(text)
        return ["--config", tmp_path / "flags.toml"]

    return write


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
    off_unless_given += words("fp8_emulate plan plan_details gpu_hour_usd json")
    for field in FLAGS.values():
        text = described[as_flag(field.name)].replace("[:5%]", "")
        assert field.name in off_unless_given or re.search(r"\[[^\]]+\]", text), field.name
        if type(field.default) in (int, float) and field.default:
            assert float(re.search(r"\[([^\]]+)\]", text)[1]) == field.default


def test_the_version_is_printed_with_those_of_its_libraries():
    first, second = cold_python("--version").stdout.splitlines()
    assert re.fullmatch(r"train_fsdp \d+\.\d+\.\d+, commit ([0-9a-f]{40}(-dirty)?|unknown)", first)
    assert re.match(r"python 3\.\d+\.\d+, torch 2\.", second) and "transformers 5." in second


def test_every_example_of_the_help_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "tales").mkdir(parents=True)
    (tmp_path / "outputs" / "tales" / "config.json").write_text('{"given": {}}')
    (tmp_path / "corpus.txt").touch()
    for line in EXAMPLES.splitlines():
        if "train_fsdp.py" in line:
            parse(shlex.split(line.partition("train_fsdp.py")[2], comments=True))


def test_the_suffixes_of_data_files_are_the_readers():
    readers = all_formats()
    assert set(choices.SUFFIXES) == readers.keys()
    assert set(choices.FIELD_SUFFIXES) < readers.keys()
    assert set(choices.TOKEN_SUFFIXES) == {s for s, reader in readers.items() if hasattr(reader, "open_tokens")}
    assert set(choices.COMPRESSIONS) == COMPRESSIONS.keys()


# ----------------------------------------------------------------------------------------------------------------------
# A typed flag wins


def test_flags_beside_demo_win_wherever_they_stand():
    for argv in (["--demo", "--num-steps", "3", "--lr", "1"], ["--num-steps", "3", "--lr", "1", "--demo"]):
        settings = parse(argv)
        assert (settings.num_steps, settings.lr, settings.model, settings.dataset) == (3, 1, "demo", "demo")
        assert settings.explicit == {"demo": True, "num_steps": 3, "lr": 1}


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


def test_the_demo_does_not_compile_unless_a_flag_says_so():
    compiles = {"--demo": False, "--demo --compile": True, "--demo --model llama3.2-1b": None, "--model demo": None}
    assert {flags: parse(words(flags)).compile for flags in compiles} == compiles  # None: on with CUDA


def test_tokens_are_counted_in_millions_billions_and_trillions():
    counts = {"10B": 10**10, "10b": 10**10, "1.5T": 15 * 10**11, "0.3M": 300_000, "20e9": 2 * 10**10, "7": 7}
    assert {text: parse(["--num-tokens", text]).num_tokens for text in counts} == counts


def test_typed_flags_become_a_command_line_again():
    every_kind = "--dataset a=x.jsonl:0.7 b=y.jsonl:0.3 --mixture-stage 0.5:a=1 --mixture-stage 0.8:b=1 --no-compile"
    every_kind += " --document-mask --betas 0.8 0.9 --lr 1e-3 --num-tokens 20e9 --sample-prompt=-a --sample-prompt b"
    settings = parse(words(every_kind + " --plan-gpus 8,64 --plan --run-name=-r"))
    assert parse(flags.as_words(settings.explicit)) == settings
    again = flags.shell_command("python x.py", settings.explicit, lr=1, compile=True)
    assert again.startswith("python x.py --dataset a=x.jsonl") and "--compile" in again.split()


def test_an_evaluation_has_the_flags_of_its_checkpoint_that_shape_the_loss(tmp_path):
    """Also those of the data, unless other data are named."""
    data_flags = {"dataset_split": "train[:90%]", "text_field": "body", "skip_bad_records": True, "seed": 7}
    model_flags = {"sequence_length": 96, "document_mask": True, "precision": "fp32", "tokenizer": str(tmp_path)}
    recorded = flags.record_flags(Args())["flags"] | {"dataset": str(tmp_path), "eval_split": "test"}
    checkpoint = write_checkpoint(tmp_path / "run", 2, flags=recorded | data_flags | model_flags)
    run = ["--num-steps", "0", "--eval-interval", "1", "--resume", checkpoint]
    same, other = (vars(parse([*run, *text.split()])) for text in ("", f"--dataset {ROOT}/README.md"))
    assert same.items() >= (data_flags | model_flags | {"eval_split": "test"}).items()
    assert other.items() >= model_flags.items()
    write_checkpoint(tmp_path / "run", 3, flags=recorded | {"precision": "fp8", "fp8_recipe": "rowwise"})
    assert parse([*run[:-1], tmp_path / "run", "--precision", "bf16"]).fp8_recipe is None  # it has no effect
    assert (other["text_field"], other["eval_split"], other["seed"]) == (Args().text_field, None, Args().seed)


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
    assert parse([*toml("num-steps = 3"), "--num-tokens", "32"]).explicit.keys() == {"num_tokens"}  # instead of it
    mixture = parse(toml('dataset = ["web=x:0.7", "y:0.3"]\nmixture-stage = ["0.5:y=1", "0.8:web=1"]'))
    assert (mixture.dataset, mixture.mixture_stage) == (("web=x:0.7", "y:0.3"), ("0.5:y=1", "0.8:web=1"))


def test_a_switch_that_is_off_by_default_can_be_turned_off_over_a_file_and_a_checkpoint(toml, tmp_path):
    switches = [name for name, field in FLAGS.items() if field.default is False]
    for name in switches:
        for argv in ([*toml(f"{name} = true"), f"--no-{name.replace('_', '-')}"], toml(f"{name} = false")):
            assert getattr(parse(argv), name) is False
    write_checkpoint(tmp_path / "r", 1, given={"streaming": True, "streams": 4, "weight_decay": 0.5})
    args = parse(["--resume", tmp_path / "r", "--no-streaming"])
    assert (args.streaming, args.streams, args.weight_decay) == (False, None, 0.5)


def test_a_runs_config_gives_its_typed_flags_without_its_name(tmp_path):
    argv = "--demo --lr 1e-3 --gradient-accumulation-steps 2 --run-name r --resume auto --export e --seed 1"
    (tmp_path / "config.json").write_text(json.dumps(flags.record_flags(parse(argv.split()))))
    read = parse(["--config", tmp_path / "config.json", "--num-steps", 400])
    same = parse(words("--demo --lr 1e-3 --gradient-accumulation-steps 2 --seed 1 --num-steps 400"))
    assert dataclasses.replace(read, config=None) == same and read.warmup_steps == 20


# ----------------------------------------------------------------------------------------------------------------------
# Sources: the words of --dataset

SOURCES = {
    "roneneldan/TinyStories": Source("TinyStories", "roneneldan/TinyStories", None),
    "web=a.jsonl:0.7": Source("web", "a.jsonl", Fraction(7, 10)),
    "s3://bucket/corpus/:3": Source("corpus", "s3://bucket/corpus/", Fraction(3)),
    "s3://bucket/x.jsonl.gz:1e-3": Source("x", "s3://bucket/x.jsonl.gz", Fraction(1, 1000)),
    "data/*.parquet:.5": Source("data", "data/*.parquet", Fraction(1, 2)),
    "my corpus (v2).txt:1": Source("my-corpus-v2", "my corpus (v2).txt", Fraction(1)),
    "date=2024:0.5": Source("date-2024-0", "date=2024:0.5", None),  # a file that exists
}


def test_a_word_is_a_name_a_path_and_a_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "date=2024:0.5").write_text("text")
    assert {word: parse_sources((word,))[0] for word in SOURCES} == SOURCES


def test_several_words_are_a_tuple_and_sources_of_one_name_get_the_numbers_of_their_words():
    assert parse(["--dataset", "someone/text"]).dataset == "someone/text"
    several = parse(["--dataset", "x/a.jsonl", "y/a.bin", "a=z.bin"])
    assert several.dataset == ("x/a.jsonl", "y/a.bin", "a=z.bin")
    assert [source.name for source in several.sources()] == ["a-1", "a-2", "a"]
    unused_at_first = parse(words("--dataset x:1 y:0 --mixture-stage 0.5:y=1 --mixture-stage 0.8:x=1"))
    assert [source.weight for source in unused_at_first.sources()] == [1, 0]
