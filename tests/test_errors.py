"""A mistake is one line that names the flag or file; nothing is trained and nothing is lost."""

import json
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import PROGRAM, ROOT, STORIES, parse, python, start, torchrun, train, words, write_model
from multirank import SIZES, resolved
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
import utils

PREFIX = "train_fsdp.py: error: "
SMALL = words("--num-steps 2 --sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32")


@pytest.fixture
def arguments(tmp_path):
    """The smallest run that works; what a test gives beside it wins."""
    folders = ["--output-dir", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache"), "--run-name", "r"]
    model = write_model(tmp_path / "model", "llama", **SIZES)
    return ["--dataset", "demo", "--model", model, "--tokenizer", str(ROOT / "assets" / "demo"), *SMALL, *folders]


@pytest.fixture
def mistake(device, arguments):
    """Runs the program in this process, up to the error that it ends with."""

    def run(*flags, exit_code: int = 2) -> str:
        with pytest.raises(utils.UserError) as raised:
            train([*arguments, *flags], device)
        assert raised.value.exit_code == exit_code
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return run


def test_the_run_that_the_mistakes_are_made_in_works(device, arguments, tmp_path):
    train(arguments, device)
    assert (tmp_path / "out" / "r" / "metrics.jsonl").exists()


# ----------------------------------------------------------------------------------------------------------------------
# The command line


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
        "--optimizer sgd",
        "--attention flash",
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
    with pytest.raises(utils.UserError) as raised:
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


# ----------------------------------------------------------------------------------------------------------------------
# Models and tokenizers


def test_a_folder_without_a_config_is_named(mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    assert mistake("--model", tmp_path / "empty") == f"--model {tmp_path / 'empty'}: the folder has no config.json"


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"model_type": "nothing"}'])
def test_a_config_that_cannot_be_used_is_named(mistake, tmp_path, config):
    (tmp_path / "model" / "config.json").write_text(config)
    assert mistake().startswith(f"--model {tmp_path / 'model'}: its config.json cannot be used")


def test_a_config_of_no_causal_language_model_is_named(mistake, tmp_path):
    write_model(tmp_path / "model", "t5")
    assert str(tmp_path / "model") in mistake()


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "~/none", "a/b/c", PROGRAM])
def test_a_model_folder_that_is_not_there_is_named(mistake, model):
    assert mistake("--model", model).startswith(f"--model {model}: ")


def test_a_tokenizer_folder_without_one_is_named(mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    message = mistake("--tokenizer", tmp_path / "empty")
    assert message.startswith(f"--tokenizer {tmp_path / 'empty'}: ")


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(mistake, tmp_path):
    write_model(tmp_path / "model", "llama", **SIZES | {"vocab_size": 1000})
    message = mistake()
    assert message.startswith("--tokenizer ")
    assert "1000" in message


def test_a_sequence_longer_than_the_models_positions_is_refused(mistake):
    message = mistake("--sequence-length", 257)
    assert message.startswith("--sequence-length 257: ")
    assert "256" in message


def test_a_sample_longer_than_the_models_positions_is_refused(mistake):
    assert mistake("--sample-prompt", "Once", "--sample-tokens", 256).startswith("--sample-tokens 256: ")


def test_a_folder_without_weights_cannot_be_pretrained(mistake):
    assert mistake("--init", "pretrained").startswith("--init pretrained: ")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the config and weights of a tiny llama."""
    config = AutoConfig.for_model("llama", **SIZES | {"tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_that_lack_a_parameter_are_refused_by_its_name(mistake, checkpoint):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    message = mistake("--init", "pretrained")
    assert message.startswith("--init pretrained: ")
    assert "layers.1.mlp.up_proj.weight" in message


def test_weights_of_another_shape_are_refused(mistake, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    message = mistake("--init", "pretrained")
    assert message.startswith("--init pretrained: ")
    assert "_proj.weight" in message


def test_weights_with_more_layers_than_the_config_are_refused_or_ignored_alike(device, arguments, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 1
    config.pop("layer_types", None)
    (checkpoint / "config.json").write_text(json.dumps(config))
    train([*arguments, "--init", "pretrained"], device)


def test_weights_cut_short_are_refused(mistake, checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert mistake("--init", "pretrained").startswith("--init pretrained: ")


# ----------------------------------------------------------------------------------------------------------------------
# Data: what get_dataset refuses is in test_data.py


def test_too_little_text_for_one_global_batch_is_refused(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 20)
    message = mistake("--dataset", tmp_path / "data.txt", "--batch-size", 100)
    assert message.startswith(f"--dataset {tmp_path / 'data.txt'}")
    assert "200" not in message and "100" in message


def test_too_little_text_for_one_window_is_refused(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox.")
    assert f"--dataset {tmp_path / 'data.txt'}" in mistake("--dataset", tmp_path / "data.txt")


def test_a_missing_held_out_split_is_named_and_how_to_make_one(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 100)
    message = mistake("--dataset", tmp_path / "data.txt", "--eval-interval", 1)
    assert message.startswith(f"--dataset {tmp_path / 'data.txt'}")
    assert "--eval-split" in message


# ----------------------------------------------------------------------------------------------------------------------
# Techniques that this machine lacks


@pytest.mark.parametrize(
    "flags", ["--precision fp8", "--attention cudnn", "--attention flash_attention_2", "--attention flex_attention"]
)
def test_what_needs_a_gpu_is_refused_without_one(mistake, flags):
    assert mistake(*flags.split()).startswith(flags)


def test_fused_loss_is_refused_where_the_logits_are_bent_after_the_head(mistake, tmp_path):
    sizes = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
    write_model(tmp_path / "model", "gemma2", **sizes)
    assert mistake("--fused-loss").startswith("--fused-loss: ")


def test_fp8_is_refused_where_no_linear_fits_it(mistake, tmp_path):
    sizes = SIZES | {"hidden_size": 40, "head_dim": 10, "intermediate_size": 100}
    write_model(tmp_path / "model", "llama", **sizes)
    assert mistake("--precision", "fp8", "--fp8-emulate").startswith("--precision fp8: ")


def test_replicas_that_do_not_divide_the_world_are_refused(mistake):
    assert mistake("--dp-replicate-size", 2).startswith("--dp-replicate-size 2: ")


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_an_output_folder_under_a_file_is_refused(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert mistake("--output-dir", folder).startswith(f"--output-dir {folder}: ")


def test_a_run_name_is_used_once_and_the_first_run_stays_as_it_is(device, arguments, mistake, tmp_path):
    train(arguments, device)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert len(before) >= 2
    assert mistake().startswith("--run-name r: ")
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


def test_a_mistake_leaves_no_run_behind(mistake, tmp_path):
    mistake("--sequence-length", 257)
    mistake("--precision", "fp8")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# While training


@pytest.mark.parametrize("flags", ["", "--log-interval 3 --num-steps 9"])
def test_a_loss_that_is_no_number_ends_the_run_and_names_its_step(mistake, tmp_path, flags):
    divergent = words("--lr 1e30 --max-grad-norm 0 --warmup-steps 0 --num-steps 9")
    message = mistake(*divergent, *flags.split(), exit_code=1)
    step = int(re.search(r"step (\d+)", message)[1])
    logged = [json.loads(line) for line in (tmp_path / "out" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert 1 < step <= 3
    assert all(line["step"] < step and line["loss"] < 1e9 for line in logged)
    assert not any(line.get("final") for line in logged)


# ----------------------------------------------------------------------------------------------------------------------
# verify_sharding


def built(device, arguments, *flags):
    settings, config = resolved([*arguments, *flags])
    mesh = train_fsdp.build_mesh(settings, device)
    return settings, mesh, train_fsdp.build_model(settings, config, mesh)


def test_sharding_is_verified_parameter_by_parameter(device, arguments):
    args, mesh, model = built(device, arguments)
    optimizer = train_fsdp.build_optimizer(args, model)
    assert train_fsdp.verify_sharding(model, optimizer, mesh)
    plain = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("stray", plain)
    optimizer.add_param_group({"params": [plain]})
    plain.grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match="stray"):
        train_fsdp.verify_sharding(model, optimizer, mesh)


def test_an_optimizer_of_other_parameters_is_found(device, arguments):
    args, mesh, model = built(device, arguments)
    _, _, other = built(device, arguments)
    with pytest.raises(RuntimeError, match="optimizer"):
        train_fsdp.verify_sharding(model, train_fsdp.build_optimizer(args, other), mesh)


def test_a_model_on_another_mesh_is_found(device, arguments):
    args, _, model = built(device, arguments)
    other = train_fsdp.build_mesh(parse([*arguments, "--zero-stage", "0"]), device)
    if other.ndim == 1:  # in a world of one
        other = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(RuntimeError, match="not sharded"):
        train_fsdp.verify_sharding(model, train_fsdp.build_optimizer(args, model), other)


# ----------------------------------------------------------------------------------------------------------------------
# From outside


def only_line(process, exit_code: int = 2) -> str:
    """The one line that a failed command left on stderr."""
    assert process.returncode == exit_code, process.stderr
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith(PREFIX)
    return lines[0].removeprefix(PREFIX)


def test_a_bad_flag_is_one_line_and_exit_2():
    assert "--batch-size" in only_line(python("--batch-size", "0"))


NO_NETWORK = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": None, "https_proxy": None}


def test_a_model_that_no_one_has_is_one_line_and_exit_2(arguments):
    """Without a network this has to come at once, not after the hub client's tries."""
    message = only_line(python(*arguments, "--model", "no-such-company/no-such-model", timeout=120, **NO_NETWORK))
    assert message.startswith("--model no-such-company/no-such-model: ")


def test_data_that_no_one_has_is_one_line_and_exit_2(arguments):
    message = only_line(python(*arguments, "--dataset", "no-such-company/no-such-stories", timeout=120, **NO_NETWORK))
    assert message.startswith("--dataset no-such-company/no-such-stories: ")


def test_wandb_without_a_login_is_one_line_and_exit_2(arguments, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    process = python(*arguments, "--log-with", "wandb", HOME=str(home), NETRC=str(home / ".netrc"), timeout=120)
    assert only_line(process).startswith("--log-with wandb: ")
    assert not (tmp_path / "out").exists()


def test_divergence_is_one_line_and_exit_1(arguments):
    process = python(*arguments, "--lr", "1e30", "--max-grad-norm", "0", "--warmup-steps", "0", "--num-steps", "9")
    assert "step" in only_line(process, exit_code=1)


@pytest.mark.parametrize(
    "ranks, flags, names",
    [
        (2, ["--batch-size", "0"], "--batch-size"),
        (3, ["--dp-replicate-size", "2"], "--dp-replicate-size 2"),
        (2, ["--lr", "1e30", "--max-grad-norm", "0", "--warmup-steps", "0", "--num-steps", "9"], "step"),
    ],
)
def test_a_mistake_of_every_rank_is_one_line_of_one_rank(arguments, ranks, flags, names):
    process = torchrun(ranks, *arguments, *flags, timeout=120)
    assert process.returncode != 0
    ours, _, launchers_report = process.stderr.partition("torch/distributed/elastic")
    errors = [line for line in process.stderr.splitlines() if PREFIX in line]
    assert len(errors) == 1, process.stderr
    assert errors[0].startswith(PREFIX)
    assert names in errors[0]
    assert "Traceback" not in ours
    assert launchers_report


def test_a_bug_keeps_its_traceback(arguments, tmp_path):
    broken = tmp_path / "program"
    broken.mkdir()
    for name in ("train_fsdp.py", "utils.py"):
        shutil.copy(ROOT / name, broken)
    for name in ("assets", "harness"):
        shutil.copytree(ROOT / name, broken / name)
    source = (broken / "utils.py").read_text()
    (broken / "utils.py").write_text(source + "\n\ndef get_model_flops_per_token(*_, **__):\n    return 1 // 0\n")
    process = start([sys.executable, broken / "train_fsdp.py", *arguments])
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert "ZeroDivisionError" in process.stderr


def test_the_demos_stories_are_there():
    assert sorted(file.name for file in STORIES.glob("*.jsonl")) == ["train.jsonl", "validation.jsonl"]
