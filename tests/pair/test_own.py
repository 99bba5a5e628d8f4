"""--import: what a file registers works like the program's own; a wrong file is one line."""

import itertools
import json
import pathlib
import random
import re
import sys

import multirank
import pytest
from checkpoints import write_checkpoint
from conftest import ROOT, UserError, cold_python, forked, losses_of, metrics_of, parse, python, start, words

from harness import flags
from harness.data import registered

OWN = ROOT / "tests" / "own.py"
FLAGS = f"--import {OWN} --model plain --tokenizer {ROOT}/assets/demo --dataset squares --optimizer sgd \
--lr-scheduler triangle --lr 0.01 --weight-decay 0 --sequence-length 32 --num-workers 0 --log-interval 1 --num-steps 6"


def run_flags(folder: pathlib.Path, name: str, more: str = "") -> list[str]:
    return words(f"{FLAGS} --output-dir {folder} --cache-dir {folder}/cache --run-name {name} {more}")


def succeeds(process) -> str:
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


BARE_LOOP = """
import json, sys
root, own_folder, corpus, initial, export = sys.argv[1:]
sys.path[:0] = [root, own_folder]
import own, torch, transformers
import utils
read = transformers.AutoModelForCausalLM.from_pretrained
model = read(initial)
tokenizer = transformers.AutoTokenizer.from_pretrained(f"{root}/assets/demo")
sequences = utils.get_dataset(tokenizer, 32, dataset=corpus)
loader = iter(torch.utils.data.DataLoader(sequences, 2, collate_fn=utils.create_collate_fn()))
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
losses, bare = [], torch.nn.functional.cross_entropy
for step in range(6):
    batch = next(loader)
    logits = model(batch["input_ids"]).logits.flatten(0, 1)
    loss = bare(logits, batch["labels"].flatten())
    (loss + 0.1 * logits.logsumexp(1).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 - abs(2 * step / 6 - 1))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
for name, parameter in read(export).named_parameters():
    torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-4, atol=1e-6)
norm = torch.stack([parameter.norm() for parameter in model.parameters()]).norm()
print(json.dumps([losses, norm.item()]))
"""


def test_the_page_about_it_shows_the_whole_file():
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "OWN.md").read_text(), re.MULTILINE | re.DOTALL)
    shown, file = "".join(blocks).split(), OWN.read_text()
    assert shown == file.partition('"""\n')[2].split()


@pytest.mark.slow
def test_two_ranks_at_stages_2_and_3_equal_a_bare_loop_resume_and_export(tmp_path):
    """All six in one file: a model, a data set, a schedule, an optimizer, a metric, a loss term."""
    forked(2, multirank.program, *run_flags(tmp_path, "two", "--zero-stage 2 --checkpoint-interval 3"))
    checkpoint = tmp_path / "two" / "checkpoints" / "step-00000003"
    export = f"--export {tmp_path}/export"
    forked(2, multirank.program, *run_flags(tmp_path, "three", f"--zero-stage 3 --resume {checkpoint} {export}"))
    succeeds(python(*run_flags(tmp_path, "0", f"--export {tmp_path}/initial"), "--num-steps", "0"))
    corpus = next((tmp_path / "cache").glob("squares-*/squares.jsonl"))
    folders = tmp_path / "initial", tmp_path / "export"
    process = start([sys.executable, "-c", BARE_LOOP, ROOT, OWN.parent, corpus, *folders])
    losses, norm = json.loads(succeeds(process).splitlines()[-1])
    assert losses_of(tmp_path / "two") == pytest.approx(losses, abs=2e-5)
    assert losses_of(tmp_path / "three") == pytest.approx(losses[3:], abs=2e-5)
    last = metrics_of(tmp_path / "three")[-1]
    assert last["weight_norm"] == pytest.approx(norm, rel=1e-4) and last["z_loss"] > 1


@pytest.mark.slow
def test_a_model_of_a_file_compiles_recomputes_and_takes_full_logits_and_adapters(tmp_path):
    """Also without GenerationMixin, whose config an export then lacks."""
    file = tmp_path / "mine.py"
    file.write_text(OWN.read_text().replace("Plain(PreTrainedModel, GenerationMixin)", "Plain(PreTrainedModel)"))
    ways = {
        "eager": f"--export {tmp_path}/export",
        "compiled": "--compile --activation-checkpointing selective",
        "full": "--no-fused-loss",
    }
    for name, way in ways.items():
        succeeds(python(*(word.replace(str(OWN), str(file)) for word in run_flags(tmp_path, name, way))))
        eager, found = (metrics_of(tmp_path / run) for run in ("eager", name))
        for key in ("loss", "z_loss"):
            assert [line[key] for line in found] == pytest.approx([line[key] for line in eager], abs=2e-5)
    adapters = "--init pretrained --lora-rank 4 --optimizer adamw"
    flags = f"--model {tmp_path}/export {adapters} --export {tmp_path}/adapters"
    succeeds(python(*run_flags(tmp_path, "adapted", flags)))
    files = {folder: {path.name for path in (tmp_path / folder).iterdir()} for folder in ("export", "adapters")}
    assert {"config.json", "model.safetensors"} < files["export"] and "adapter_model.safetensors" in files["adapters"]
    assert "generation_config.json" in files["adapters"] - files["export"]


@pytest.mark.slow
def test_a_changed_file_is_reported_at_a_resume_and_recorded(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.read_text())
    flags_of_run = [word.replace(str(OWN), str(file)) for word in run_flags(tmp_path, "r", "--resume auto")]
    succeeds(python(*flags_of_run, "--num-steps", "3"))
    file.write_text(OWN.read_text() + "# changed\n")
    line = next(line for line in succeeds(python(*flags_of_run)).splitlines() if line.startswith("changed"))
    record = json.loads((tmp_path / "r" / "config.json").read_text())
    assert f", imports {file.name} (" in line and f" -> {file.name} ({record['imports'][str(file)][:12]})" in line
    export = f"--num-steps 0 --resume {tmp_path}/r --export {tmp_path}/e --import {OWN}"
    assert " warning: --import: mine.py (" in (process := python(*words(export))).stderr
    assert "loading it needs the classes of plain, registered by own.py (" in succeeds(process)


@pytest.mark.slow
def test_a_plan_and_help_run_the_file(tmp_path):
    planned = json.loads(succeeds(python(*run_flags(tmp_path, "p", "--plan --plan-gpus 2 --plan-seconds 0 --json"))))
    assert planned["parameters"] == 296_576 and planned["imports"].startswith("own.py (") and planned["flops_per_token"]
    shown = " ".join(succeeds(cold_python("--import", OWN, "--help")).split())
    added = "data set squares, schedule triangle, optimizer sgd, metric weight_norm, loss term z_loss, model plain"
    assert f"added by --import: {added.replace('data set', 'dataset')} examples" in shown
    assert "{adamw,adamw-bf16,adamw8bit,muon,sgd}" in shown


# ----------------------------------------------------------------------------------------------------------------------
# Wrong files


REGISTER = "from harness import register\n"
FAULTS = {  # a file's content: its error, without the file's name
    "def f(:\n": ", line 1: SyntaxError: invalid syntax",
    "import os\nimport no_such_module\n": ", line 2: ModuleNotFoundError: No module named 'no_such_module'",
    "def f():\n    return 1 / 0\n\nf()\n": ", line 2: ZeroDivisionError: division by zero",
    "raise SystemExit(3)\n": ", line 1: SystemExit: 3",
    "a = 1\0": ": ",
    REGISTER + "register.optimizer('mine', None)\n": ", line 2: optimizer mine: NoneType instead of an OptimizerKind",
    REGISTER + "register.schedule('cosine', None)\n": ", line 2: schedule cosine: the name exists already",
    REGISTER + "register.dataset('mine', list, limit=-1)\n": ", line 2: dataset mine: limit is -1; give a positive",
    REGISTER + "register.dataset('demo', list)\n": ", line 2: dataset demo: the name exists already",
    **{
        f"{REGISTER}register.metric({name!r}, None)\n": f", line 2: metric {name}: the name exists already"
        for name in ("loss", "final", "samples", "state", "share", "best_step")
    },
    REGISTER + "register.loss_term('skipped', None)\n": ", line 2: loss term skipped: the name exists already",
    **{
        f"{REGISTER}register.dataset({name!r}, list)\n": f", line 2: dataset {name}: the name is that of a split"
        for name in ("train", "none", "a.txt", "a.jsonl.gz", "A.JSON")
    },
    REGISTER + "register.schedule('a b', None)\n": ", line 2: schedule 'a b': give a name of letters",
    REGISTER + "register.metric('a.b', None)\n": ", line 2: metric a.b: give a name of letters",
    REGISTER + "register.metric('a', None, 'median')\n": ", line 2: metric a: no reduction 'median'; give one of mean",
}


@pytest.mark.parametrize("content, error", FAULTS.items())
def test_a_fault_in_a_file_is_one_line_with_its_number(content, error, tmp_path, tables):
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(UserError) as raised:
        parse(["--import", file])
    assert str(raised.value).startswith(f"--import {file}{error}") and "\n" not in str(raised.value)


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    for path, error in ((tmp_path / "none.py", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=rf"^--import {path}: cannot be read \({error}\); give a Python file$"):
            parse(["--import", path])


def test_toml_may_import_and_the_config_of_a_run_may_not(tmp_path, tables):
    file, run, toml = tmp_path / "mine.py", tmp_path / "config.json", tmp_path / "flags.toml"
    file.write_text(f"{REGISTER}register.schedule('flat', lambda step, steps, warmup: 1.0)\n")
    run.write_text(json.dumps({"given": {"import_": [str(file)], "lr_scheduler": "flat"}}))
    with pytest.raises(UserError, match=r"^--lr-scheduler: invalid choice: 'flat' \(.*; --import FILE.py adds"):
        parse(["--config", run])
    toml.write_text(f"import = '{file}'\nlr-scheduler = 'flat'\n")
    assert parse(["--config", toml]).lr_scheduler == "flat"
    assert parse(["--config", run, "--import", file]).lr_scheduler == "flat"  # it has run, and does not run again
    assert f"--import {file}" in flags.shell_command("python train_fsdp.py", {"seed": 1})


def test_a_checkpoint_names_no_file_to_run(tmp_path, tables):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError\n")
    named = {"import_": [str(file)], "tokenizer": "owner/name"}
    recorded = {name: getattr(parse([]), name) for name in flags.FLAGS} | named
    resume = ["--resume", write_checkpoint(tmp_path, 1, flags=recorded, given=named)]
    exports = parse([*words("--num-steps 0 --export e"), *resume])
    assert (exports.tokenizer, exports.import_) == ("owner/name", None)
    for reads in ("--num-steps 3 --dataset synthetic", "--show-samples 1"):
        assert parse([*words(reads), *resume]).import_ is None


# ----------------------------------------------------------------------------------------------------------------------
# Data sets

UNUSABLE = {  # the function of a data set, and its error
    "none": (lambda: [], "its function gives no records"),
    "object": (lambda: ["a text", object()], "record 2 cannot be written as JSON .*; give a text, a list of token ids"),
    "field": (lambda: [{"text": "a", "tags": {1}}], "record 1 cannot be written as JSON .*'set' object has no"),
    "random": (lambda: [str(random.random())], "its function gives other records when it is called again"),
    "endless": (lambda: map(str, itertools.count()), "it has not ended after 1,000 records; register it with limit=N"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_data_set_that_cannot_be_repeated_is_refused(name, tmp_path, tables, monkeypatch):
    monkeypatch.setattr(registered, "MAX_RECORDS", 1000)
    function, error = UNUSABLE[name]
    flags.DATASETS[name] = flags.Dataset(function, "", None)
    with pytest.raises(UserError, match=rf"^--dataset {name}: {error}"):
        registered.write_once(name, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_fault_in_the_function_of_a_data_set_is_one_line(tmp_path, tables):
    file = tmp_path / "mine.py"
    file.write_text(f"{REGISTER}def records():\n    yield 'a'\n    1 / 0\n\nregister.dataset('mine', records)\n")
    assert parse(["--import", file, "--dataset", "mine"]).dataset_split == "train"
    with pytest.raises(UserError, match=rf"^--import {file}, line 4: ZeroDivisionError: division by zero$"):
        registered.write_once("mine", tmp_path)


def test_records_are_written_once_for_each_version_and_up_to_the_limit(tmp_path, tables):
    calls = []

    def numbers():
        calls.append(1)
        yield from ("a text", [1, 2], {"messages": []})
        yield from map(str, itertools.count())

    for version in ("1", "1", "2"):
        flags.DATASETS["numbers"] = flags.Dataset(numbers, version, 4)
        path, _ = registered.write_once("numbers", tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"text": "a text"}, {"input_ids": [1, 2]}, {"messages": []}, {"text": "0"}]
    assert len(calls) == 2 * 2  # each time they are compared with a second call


# ----------------------------------------------------------------------------------------------------------------------
# Models that cannot be trained

CHANGES = {  # a change of the file: the error about its model
    ("nn.ModuleList(Block(", "nn.Sequential(*(Block("): "--model: no list of 2 decoder layers found in Plain",
    ("self.loss_function(logits, labels, self.config.vocab_size)", "logits.sum()"): "Plain computes a loss of its own",
    ("attention_mask=None, **_", "attention_mask=None"): "the forward of Plain cannot be called as model(input_ids=",
    ("num_hidden_layers", "depth"): "its config.json cannot be used (it has no num_hidden_layers)",
    ("register.schedule", "(lambda *_: 0)"): "--lr-scheduler: invalid choice: 'triangle'",
    ("1 - abs(2 * step / steps - 1)", "float('nan')"): "its factor after 0 steps is nan, not a finite number",
    ("1 - abs(2 * step / steps - 1)", "'fast'"): "schedule triangle: it gave no number (",
    ('optimizer.state[parameter]["momentum_buffer"] = ', "_ = "): "--optimizer sgd: it made no state for ",
    ("]).norm()", "])[99]"): ", line 76: IndexError: index 99 is out of bounds",
    ("]).norm()", "])"): "metric weight_norm: it gave no number (",
    ("* logits.logsumexp(1) ** 2", "* logits.mean()"): "loss term z_loss: it gave shape () instead of",
}


@pytest.mark.slow
@pytest.mark.parametrize("change, error", CHANGES.items())
def test_a_part_that_does_not_fit_is_one_line(change, error, tmp_path):
    file = tmp_path / "mine.py"
    assert change[0] in OWN.read_text()
    content = OWN.read_text().replace(*change)
    if "Sequential" in change[1]:
        content = content.replace("in range(config.num_hidden_layers))", "in range(config.num_hidden_layers)))")
    file.write_text(content)
    process = python(*(word.replace(str(OWN), str(file)) for word in run_flags(tmp_path, "r")))
    assert error in process.stderr and process.stderr.startswith("train_fsdp.py: error: ")
    assert process.returncode == 2 and process.stderr.count("\n") == 1
