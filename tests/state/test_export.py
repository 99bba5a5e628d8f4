"""An export serves: what was written loads everywhere with the weights, the tokenizer and the habits of its source."""

import json
import os
import pathlib
import shutil

import pytest
import torch
from checkpoints import change, files_of_at_most, flip, folder_of, logits_of, reseal
from conftest import DEMO, SMALL, chat, forked, metrics_of, train, words, write_model
from corpora import write_records
from multirank import MODELS, SIZES, program
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import train_fsdp
from harness.base import UserError, saved
from harness.state import exports, find

CHAT = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
HABITS = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [7, 8],
    "max_new_tokens": 5,
    "pad_token_id": 9,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.8,
}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}


@pytest.fixture
def run(device, arguments):
    """Trains a tiny model in this process under tmp_path/out/NAME, or what is given; returns the exit code."""
    return lambda name, *more: train([*arguments, "--run-name", name, *more], device)


def read(folder, name: str = "generation_config") -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def habits_of(folder) -> dict:
    """Return a folder's generation config without its version."""
    return {key: value for key, value in read(folder).items() if key != "transformers_version"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A pretrained model with a generation config, a chat template and tokens of its own, whose configs say use_cache:
    false, as those of a model that was saved by a trainer do."""
    folder = tmp_path_factory.mktemp("source")
    rope = {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}
    sizes = {"max_position_embeddings": 256, "vocab_size": 1600}
    config = AutoConfig.for_model("llama", **SIZES | rope | sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.model_max_length, tokenizer.chat_template = 256, CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    change(folder / "config.json", use_cache=False)
    (folder / "generation_config.json").write_text(json.dumps(HABITS | {"use_cache": False}))
    return folder


@pytest.fixture(scope="module")
def tuned(device, source, token_cache, tmp_path_factory):
    """A run that began with the source's weights, saved at steps 2, 4 and 6, wrote a sample, and was exported; tests
    only read it."""
    folder = tmp_path_factory.mktemp("tuned")
    flags = f"--init pretrained --model {source} --output-dir {folder} --cache-dir {token_cache} --run-name r"
    flags += " --num-steps 6 --checkpoint-interval 2 --keep-checkpoints 3 --no-async-checkpoint --dataset demo"
    more = ["--sample-prompt", "Once", "--sample-tokens", 6, "--export", folder / "export"]
    assert train([*SMALL, *words(flags), *more], device) == 0
    return folder


def exported(device, source, folder, *flags) -> dict[str, torch.Tensor]:
    """Export a run or checkpoint without training; returns the weights."""
    assert train(["--num-steps", 0, "--resume", source, "--export", folder, *flags], device) == 0
    return weights_in(folder)


def weights_in(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ----------------------------------------------------------------------------------------------------------------------
# The weights


@pytest.mark.parametrize("name, size", [("smollm3", 5e9), ("gpt2", 5e9), ("qwen3_moe", 2e5), ("mixtral", 2e5)])
def test_an_export_is_the_trained_model(run, tmp_path, monkeypatch, name, size):
    """transformers loads it with the trained model's logits, and it is the next run's start."""
    trained, build_model = [], train_fsdp.build_model
    keep = lambda *args, **options: trained.append(build_model(*args, **options)) or trained[-1]  # noqa: E731
    monkeypatch.setattr(train_fsdp, "build_model", keep)
    monkeypatch.setattr(exports, "MAX_SINGLE_FILE_BYTES", size)
    model = write_model(tmp_path / "model", MODELS[name][0], **MODELS[name][1])
    assert run("r", "--model", model, "--num-steps", 2, "--export", tmp_path / "export") == 0
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (size > 1e6) == (len(files) == 1)
    if len(files) > 1:
        index = saved.read_json(tmp_path / "export" / "model.safetensors.index.json")
        sizes = [tensor.nbytes for file in files for tensor in load_file(tmp_path / "export" / file).values()]
        assert index["metadata"]["total_size"] == sum(sizes)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "export").encode("The fox") != []
    expected = logits_of(trained[-1])
    assert torch.equal(logits_of(loaded), expected)
    again = words(f"--init pretrained --num-steps 0 --model {tmp_path / 'export'} --export {tmp_path / 'again'}")
    assert run("again", *again) == 0
    assert torch.equal(logits_of(trained[-1]), expected)


@pytest.mark.parametrize("technique", ["--precision bf16-pure", "--precision fp8 --fp8-emulate"])
def test_an_export_keeps_the_precision_of_the_weights(run, tmp_path, technique):
    assert run("r", "--num-steps", 2, "--export", tmp_path / "export", *words(technique)) == 0
    pure = torch.bfloat16 if "pure" in technique else torch.float32
    assert {tensor.dtype for tensor in load_file(tmp_path / "export" / "model.safetensors").values()} == {pure}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == pure


def test_a_checkpoint_is_exported_without_training_and_leaves_the_run_as_it_was(device, tuned, tmp_path):
    before = {path: path.read_bytes() for path in (tuned / "r").rglob("*") if path.is_file()}
    two, four = (exported(device, folder_of(tuned / "r", step), tmp_path / f"{step}") for step in (2, 4))
    assert two.keys() == four.keys() and not torch.equal(two["lm_head.weight"], four["lm_head.weight"])
    assert {path: path.read_bytes() for path in (tuned / "r").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("count", [2, 3])
def test_an_export_of_the_mean_of_checkpoints_has_the_mean_of_their_exports(device, tuned, tmp_path, capfd, count):
    steps = [2, 4, 6][-count:]
    each = [exported(device, folder_of(tuned / "r", step), tmp_path / f"{step}") for step in steps]
    mean = exported(device, tuned / "r", tmp_path / "mean", "--average-checkpoints", count)
    described = f"mean of steps {', '.join(map(str, steps))}"
    assert f"exported   {tmp_path / 'mean'}, {described}\n" in capfd.readouterr().out
    assert exports.read_export_header(tmp_path / "mean")["step"] == described
    assert mean.keys() == each[0].keys()
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in each]).mean(0), rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(mean[name], each[-1][name]) for name in mean)


@pytest.mark.slow
def test_the_mean_of_checkpoints_is_evaluated_on_two_ranks_as_on_one(device, tuned, capfd):
    flags = [*words("--num-steps 0 --eval-interval 1 --average-checkpoints 3 --json --resume"), str(tuned / "r")]
    assert train(flags, device) == 0
    one = json.loads(capfd.readouterr().out.splitlines()[-1])
    printed = forked(2, program, *flags)
    two = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert [two["step"], two["averaged_steps"]] == [one["step"], one["averaged_steps"]] == [None, [2, 4, 6]]
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_what_is_damaged_foreign_or_missing_has_no_mean(device, tuned, tmp_path):
    run = shutil.copytree(tuned / "r", tmp_path / "copy")

    def refusal(count: int) -> str:
        with pytest.raises(UserError) as error:
            exported(device, run, tmp_path / "out", "--average-checkpoints", count)
        return str(error.value)

    assert "has 3 complete checkpoints up to step-00000006" in refusal(4)
    reseal(folder_of(run, 4), run_id="another")
    assert "are of 2 runs, not of one" in refusal(3)
    flip(folder_of(run, 4) / "__0_0.distcp")
    assert f"{folder_of(run, 4)} is damaged" in refusal(3)
    assert not (tmp_path / "out").exists()


def test_the_mean_is_of_the_checkpoints_that_a_running_run_has_by_now(device, tuned, tmp_path, monkeypatch):
    run, load_mean = shutil.copytree(tuned / "r", tmp_path / "copy"), find.load_mean
    folder_of(run, 6).rename(tmp_path / "next")

    def save_another(*arguments):
        if (tmp_path / "next").exists():
            (tmp_path / "next").rename(folder_of(run, 6))
            shutil.rmtree(folder_of(run, 2))
        load_mean(*arguments)

    monkeypatch.setattr(find, "load_mean", save_another)
    exported(device, run, tmp_path / "mean", "--average-checkpoints", 2)
    assert exports.read_export_header(tmp_path / "mean")["step"] == "mean of steps 4, 6"


@pytest.mark.parametrize("flags", ["", "--num-steps 0 --sample-prompt a --init pretrained", "--resume auto"])
def test_a_mean_of_checkpoints_goes_with_a_run_that_trains_nothing(mistake, flags):
    message = mistake("--average-checkpoints", "2", *words(flags))
    assert message.startswith(("--average-checkpoints: only with --num-steps 0 and --resume RUN", "--num-steps: "))


# ----------------------------------------------------------------------------------------------------------------------
# The folder


def test_an_export_is_written_over_by_its_run_and_its_command_alone(
    device, arguments, run, mistake, tmp_path, monkeypatch
):
    monkeypatch.setattr(exports, "MAX_SINGLE_FILE_BYTES", 2e4)
    export, same = tmp_path / "export", ("one", "--resume", "auto", "--export", tmp_path / "export")
    assert run(*same) == 0
    names, weights = {path.name for path in export.iterdir()}, weights_in(export)
    (export / "config.json").unlink()
    assert run(*same) == 0  # again
    assert {path.name for path in export.iterdir()} == names
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_in(export).items())
    assert run(*same, "--num-steps", 3) == 0  # a step more, in the place of the first
    assert {path.name for path in export.iterdir()} == names
    assert not all(torch.equal(tensor, weights[name]) for name, tensor in weights_in(export).items())

    before = {file.name: file.read_bytes() for file in export.iterdir()}
    branch = ("--resume", tmp_path / "out" / "one", "--run-name", "branch", "--num-steps", 4)
    for other in (("--run-name", "two"), branch):
        printed = mistake(*other, "--export", export)
        assert printed.startswith(f"--export: {export} holds the export of another run; choose another")
    assert not (tmp_path / "out" / "two" / "metrics.jsonl").exists()
    assert {file.name: file.read_bytes() for file in export.iterdir()} == before
    shutil.rmtree(tmp_path / "out" / "one")
    assert run(*same, "--num-steps", 3) == 0  # the same command, though a run with another id
    assert hidden_files(tmp_path) == []


def hidden_files(folder) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_what_is_no_export_of_this_program_is_never_written_over(run, mistake, source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("")
    pretrained = shutil.copytree(source, tmp_path / "pretrained")
    for folder in (tmp_path / "there", tmp_path / "there" / "notes.txt", pretrained, ".", "/", "..", "tests/.."):
        printed = mistake("--export", folder)
        assert printed.startswith(f"--export: {folder} exists and is no export; choose another folder")
    below = tmp_path / "there" / "notes.txt" / "below"
    assert mistake("--export", below).startswith(f"--export {below}: cannot be written (Not a directory)")
    assert run("done", "--export", tmp_path / "export") == 0
    own = ("--init", "pretrained", "--model", tmp_path / "export", "--export", tmp_path / "export")
    assert "is the folder of --model" in mistake("--run-name", "again", *own)


def write_export_of(folder, run_id: str, command: str = "") -> None:
    folder.mkdir(exist_ok=True)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", {"run_id": run_id, "command": command})


def test_an_export_never_overlaps_the_folder_of_the_run(run, mistake, tmp_path):
    """Of a run that trains, or whose checkpoint is exported: in it, above it where an export is, or through a link."""
    out = tmp_path / "out"
    assert run("done", *words("--num-steps 1 --checkpoint-interval 1")) == 0
    write_export_of(out, "other")
    starts = {"done": ("--num-steps", 0, "--resume", out / "done"), "new": ("--run-name", "new")}
    for name in starts:
        (link := tmp_path / f"link-to-{name}").symlink_to(out / name / "export")
        for export in (out / name / "export", out / name / "checkpoints" / "e", out, link):
            printed = mistake(*starts[name], "--export", export)
            assert printed.startswith(f"--export: {export} ") and printed.endswith("; choose another folder"), printed
    for export in (out / "done", out / "done" / "checkpoints"):  # these exist
        assert "exists and is no export" in mistake(*starts["done"], "--export", export)
    assert [path.name for path in (out / "done" / "checkpoints").iterdir()] == ["step-00000001"]


def test_an_export_goes_to_an_empty_folder_and_where_a_link_leads(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("created")
    for name in ("empty", "link", "link"):
        assert run("r", "--resume", "auto", "--export", tmp_path / name) == 0
        assert (tmp_path / name / "config.json").exists()
    assert (tmp_path / "link").readlink().name == "created" and hidden_files(tmp_path) == []


def test_an_export_is_synced_to_disk(run, tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino) or fsync(file))
    assert run("r", "--export", tmp_path / "export") == 0
    assert {path.name for path in (tmp_path / "export").iterdir() if path.stat().st_ino not in synced} == set()


def test_an_export_to_a_mount_point_is_refused_before_it_trains(mistake, monkeypatch, tmp_path):
    """As a volume of a container is one: it cannot be renamed."""
    monkeypatch.setattr(pathlib.Path, "is_mount", lambda self: self == tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    message = mistake("--export", tmp_path / "volume")
    assert message.startswith(f"--export: {tmp_path / 'volume'} is a mount point") and "a folder inside it" in message


@pytest.mark.parametrize("suffix", ["", ".writing"])
def test_an_export_that_cannot_be_renamed_to_its_folder_has_another_name(mistake, monkeypatch, tmp_path, suffix):
    """The folder that was there cannot be moved away, or the new one cannot take its name; it stays."""
    rename = pathlib.Path.rename

    def rename_unless_busy(self, target):
        if self.suffix == suffix and tmp_path / "export" in (self, target):
            raise OSError(16, "Device or resource busy", str(self))
        return rename(self, target)

    (tmp_path / "export").mkdir()
    monkeypatch.setattr(pathlib.Path, "rename", rename_unless_busy)
    printed = mistake("--export", tmp_path / "export", exit_code=1)
    problem = f"{tmp_path / 'export'} cannot be replaced (Device or resource busy)"
    assert printed == f"--export: {problem}; this export is in {tmp_path / 'export-2'}"
    assert (tmp_path / "export-2" / "config.json").exists() and (tmp_path / "export").is_dir()


@pytest.mark.parametrize("has_earlier", [False, True])
def test_an_export_that_another_run_wrote_meanwhile_stays_and_this_one_has_another_name(
    run, mistake, monkeypatch, tmp_path, has_earlier
):
    """Even one of the same command: a start replaces what was there when it began."""
    export, write_configs = tmp_path / "export", exports.write_configs

    def write_late(folder, settings, *args):
        write_configs(folder, settings, *args)
        shutil.rmtree(export, ignore_errors=True)
        write_export_of(export, "other", exports.command_checksum(settings))

    if has_earlier:
        assert run("r", "--export", export) == 0
        shutil.rmtree(tmp_path / "out" / "r")
    monkeypatch.setattr(exports, "write_configs", write_late)
    printed = mistake("--export", export, exit_code=1)
    kept = tmp_path / "export-2"
    assert printed == f"--export: {export} was written meanwhile; this export is in {kept}"
    assert exports.read_export_header(export)["run_id"] == "other"
    assert AutoModelForCausalLM.from_pretrained(kept).dtype == torch.float32
    assert hidden_files(tmp_path) == []


@pytest.mark.parametrize("fails", [True, False])
def test_an_export_is_complete_though_another_one_of_the_run_fails_or_is_done_meanwhile(
    device, tuned, monkeypatch, tmp_path, fails
):
    write_configs = exports.write_configs
    flags = ["--num-steps", 0, "--resume", tuned / "r", "--export", tmp_path / "export"]

    def write_late(*arguments):
        monkeypatch.setattr(exports, "write_configs", write_configs)
        if fails:
            with files_of_at_most(50_000), pytest.raises(UserError, match="cannot be written"):
                train(flags, device)
        else:
            assert train(flags, device) == 0
        write_configs(*arguments)

    run_id = saved.read_config(tuned / "r")["run_id"]
    (tmp_path / f".export.{run_id}-0.writing").mkdir()  # by an export that was killed
    monkeypatch.setattr(exports, "write_configs", write_late)
    assert train(flags, device) == 0
    assert {path.name for path in (tmp_path / "export").iterdir()} == {p.name for p in (tuned / "export").iterdir()}
    assert hidden_files(tmp_path) == []


def test_a_tokenizer_without_an_end_token_writes_all_tokens(tuned, device, tmp_path, capfd):
    export = shutil.copytree(tuned / "export", tmp_path / "export")
    names = read(export, "tokenizer_config")
    kept = {key: names[key] for key in names if key not in ("eos_token", "pad_token")}
    (export / "tokenizer_config.json").write_text(json.dumps(kept))
    capfd.readouterr()
    flags = words("--num-steps 0 --init pretrained --sample-tokens 9 --sample-prompt Once --model")
    assert train([*flags, export], device) == 0
    assert capfd.readouterr().out.strip().startswith("Once")


def test_an_export_that_fails_is_one_line_and_leaves_what_was_there(run, mistake, tmp_path):
    assert run("r", "--export", tmp_path / "export", "--checkpoint-interval", 1) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    resume = ("--num-steps", 0, "--resume", tmp_path / "out" / "r", "--export", tmp_path / "export")
    with files_of_at_most(50_000):
        message = mistake(*resume, exit_code=1)
    assert message.startswith(f"--export {tmp_path / 'export'}: cannot be written")
    assert {path: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    assert hidden_files(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------------------
# What is beside them


def test_an_export_of_a_tuned_model_has_the_habits_and_the_tokenizer_of_its_source(device, source, tuned):
    export = tuned / "export"
    end = AutoTokenizer.from_pretrained(export).eos_token_id  # after each document of the training
    assert habits_of(export) == HABITS | {"eos_token_id": [7, 8, end]}
    assert read(export, "config")["use_cache"] is True
    assert len(metrics_of(tuned / "r")[-1]["samples"]) == 1  # samples have generation settings of their own
    assert train(["--num-steps", 0, "--resume", tuned / "r", "--export", tuned / "later"], device) == 0
    assert habits_of(tuned / "later") == habits_of(export)

    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, export))
    text = "<|im_start|>The fox<|im_end|> sleeps"
    assert before.encode(text) == after.encode(text) and len(before.encode(text)) < len(text)
    assert (after.chat_template, after.model_max_length) == (CHAT, 256)
    assert after.special_tokens_map == before.special_tokens_map
    assert after.all_special_ids == before.all_special_ids and len(after.all_special_ids) == 3


def test_a_tokenizer_that_autotokenizer_does_not_read_for_this_model_is_a_warning(device, source, tmp_path, capfd):
    """For qwen2 it makes Qwen's, with other rules for where a token may end."""
    model = write_model(tmp_path / "model", "qwen2", **SIZES | {"vocab_size": 1600})
    flags = f"--model {model} --tokenizer {source} --dataset synthetic --output-dir {tmp_path}"
    assert train([*SMALL, *words(flags), "--export", tmp_path / "export"], device) == 0
    warning = capfd.readouterr().err
    assert "AutoTokenizer reads its tokenizer as Qwen2Tokenizer, which splits text otherwise; read it with" in warning
    text, ids = "A 'tale\n\n", AutoTokenizer.from_pretrained(source)("A 'tale\n\n")["input_ids"]
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")(text)["input_ids"] == ids


def test_habits_in_a_config_as_old_models_have_them_become_a_generation_config(device, source, tmp_path):
    """transformers reads them there, and would refuse to write the config again. What trains nothing takes a run's
    flags as they are, of sequences longer than the model's too."""
    shutil.copytree(source, tmp_path / "old")
    (tmp_path / "old" / "generation_config.json").unlink()
    change(tmp_path / "old" / "config.json", max_new_tokens=7, eos_token_id=5)
    flags = words("--num-steps 0 --init pretrained --sequence-length 8192")
    assert train([*flags, "--model", tmp_path / "old", "--export", tmp_path / "export"], device) == 0
    assert habits_of(tmp_path / "export").items() >= {"max_new_tokens": 7, "eos_token_id": [5, 0]}.items()
    AutoConfig.from_pretrained(tmp_path / "export").save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == torch.float32


def test_a_model_that_began_at_random_ends_where_its_tokenizer_does(device, source, token_cache, tmp_path):
    """Its config may have been another tokenizer's, of which it never saw a token."""
    (tmp_path / "model").mkdir()
    shutil.copy(source / "config.json", tmp_path / "model")
    change(tmp_path / "model" / "config.json", eos_token_id=77, bos_token_id=76)
    flags = f"--model {tmp_path / 'model'} --tokenizer {source} --output-dir {tmp_path} --cache-dir {token_cache}"
    assert train([*SMALL, *words(flags), "--dataset", "demo", "--export", tmp_path / "export"], device) == 0
    wanted = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert read(tmp_path / "export").items() >= wanted.items()
    assert read(tmp_path / "export", "config").items() >= (wanted | {"pad_token_id": None}).items()


def test_an_export_has_the_chat_template_that_was_trained_with_and_answers_end_as_there(device, source, tmp_path):
    """Also of a checkpoint later, where no conversation is read, and though the tokenizer's own end of text is another
    token, as with base models that are trained on chats."""
    trained = CHAT.replace(
        "{{ message.content }}<|im_end|>", "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    )
    (tmp_path / "chat.jinja").write_text(trained)
    messages = chat("A story?", "Once upon a time.")["messages"]
    write_records(tmp_path / "chat.jsonl", [chat("A story?", "Once upon a time.")] * 40)
    flags = f"--model {source} --dataset {tmp_path / 'chat.jsonl'} --chat-template {tmp_path / 'chat.jinja'}"
    places = f"--output-dir {tmp_path} --cache-dir {tmp_path / 'cache'} --run-name r --checkpoint-interval 2"
    exports = [tmp_path / "export", tmp_path / "later"]
    assert train([*SMALL, *words(flags), *words(places), "--export", exports[0]], device) == 0
    assert train(["--num-steps", 0, "--resume", tmp_path / "r", "--export", exports[1]], device) == 0
    before = AutoTokenizer.from_pretrained(source)
    ends = [before.eos_token_id, before.convert_tokens_to_ids("<|im_end|>")]
    for export in exports:
        tokenizer = AutoTokenizer.from_pretrained(export)
        assert tokenizer.chat_template == trained
        wanted = before.apply_chat_template(messages, chat_template=trained, tokenize=False)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == wanted
        assert read(export)["eos_token_id"] == ends
