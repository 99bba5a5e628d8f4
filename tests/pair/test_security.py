"""Foreign code is never run, whatever a folder asks for, and nothing is written through a link.

An attacker's code leaves a mark if it runs; each such test also shows that it does run with the bare library.
"""

import collections
import dataclasses
import io
import json
import pathlib
import pickle
import shutil
import socket
import sys

import jinja2
import pytest
import torch
import transformers
from checkpoints import change, forge
from conftest import DEMO, chat, free_port, parse, train
from corpora import write_records
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.models.auto import tokenization_auto

from harness.base import saved
from harness.data.files import find_files
from harness.data.formats import read_records
from harness.data.schema import read_documents
from harness.model.configs import load_config
from harness.model.patches import any_class_from_name
from harness.model.weights import on_meta
from harness.report import prometheus


@pytest.fixture
def mark(tmp_path) -> pathlib.Path:
    return tmp_path / "mark"


@dataclasses.dataclass
class Attack:
    """Unpickled it makes the mark."""

    mark: pathlib.Path

    def __reduce__(self):
        return pathlib.Path.touch, (self.mark,)


# ----------------------------------------------------------------------------------------------------------------------
# Code of a model's or tokenizer's folder


def write_code(folder: pathlib.Path, mark: pathlib.Path, *maps: str) -> None:
    """Write a module with a config and a tokenizer into a folder; the auto_map of JSON files points at it."""
    folder.mkdir(exist_ok=True)
    lines = [
        f"import pathlib; pathlib.Path({str(mark)!r}).touch()",
        "import transformers",
        "class Config(transformers.PreTrainedConfig): model_type = 'foreign'",
        "class Tokenizer(transformers.PreTrainedTokenizerFast): pass",
    ]
    (folder / "foreign.py").write_text("\n".join(lines))
    tokenizer = "foreign.Tokenizer"
    for name in maps:
        change(folder / name, auto_map={"AutoConfig": "foreign.Config", "AutoTokenizer": [tokenizer, tokenizer]})


@pytest.fixture
def tokenizer(tmp_path) -> pathlib.Path:
    """A folder with the demo's tokenizer."""
    (tmp_path / "tokenizer").mkdir()
    for file in DEMO.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def says_yes(monkeypatch, tmp_path):
    """Answer yes to questions on stdin; copies that transformers makes of code go into a folder of the test."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def bare(monkeypatch, says_yes):
    """`bare(call)`: the call in an unpatched transformers."""

    def run(call, *arguments, **options):
        with monkeypatch.context() as unprotected:
            unprotected.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 15)
            unprotected.setattr(tokenization_auto, "tokenizer_class_from_name", any_class_from_name)
            return call(*arguments, **options)

    return run


def test_code_of_a_models_folder_is_not_run_though_stdin_says_yes(mistake, mark, tmp_path, bare):
    folder = tmp_path / "foreign"
    write_code(folder, mark, "config.json")
    change(folder / "config.json", model_type="foreign")
    message = mistake("--model", folder)
    assert message.startswith(f"--model {folder}: it asks for code of its own (auto_map), which is never run")
    assert not mark.exists()
    bare(AutoConfig.from_pretrained, folder)
    assert mark.exists()


def test_code_of_a_tokenizers_folder_is_not_run_though_stdin_says_yes(mistake, mark, tokenizer, bare):
    write_code(tokenizer, mark, "tokenizer_config.json")
    change(tokenizer / "tokenizer_config.json", tokenizer_class="Foreign")
    message = mistake("--tokenizer", tokenizer)
    assert message.startswith(f"--tokenizer {tokenizer}: it asks for code of its own (auto_map), which is never run")
    assert not mark.exists()
    bare(AutoTokenizer.from_pretrained, tokenizer)
    assert mark.exists()


def test_a_class_that_is_no_tokenizer_does_not_run_the_code_for_it(mistake, mark, tokenizer, bare):
    """transformers loads whatever class tokenizer_class names, and does not tell it trust_remote_code=False."""
    write_code(tokenizer, mark, "config.json")
    change(tokenizer / "config.json", model_type="foreign")
    change(tokenizer / "tokenizer_config.json", tokenizer_class="AutoConfig")
    assert "tokenizer_class AutoConfig is no tokenizer" in mistake("--tokenizer", tokenizer)
    assert not mark.exists()
    bare(AutoTokenizer.from_pretrained, tokenizer, trust_remote_code=False)
    assert mark.exists()


def test_a_model_that_transformers_knows_is_trained_and_exported_without_its_own_code(
    device, arguments, mark, tokenizer, tmp_path, says_yes
):
    write_code(tmp_path / "model", mark, "config.json")
    write_code(tokenizer, mark, "tokenizer_config.json")
    change(tmp_path / "model" / "config.json", _auto_class="AutoConfig")
    assert train([*arguments, "--tokenizer", tokenizer, "--export", tmp_path / "exported"], device) == 0
    assert not mark.exists()
    exported = (tmp_path / "exported").glob("*.json")
    assert [file.name for file in exported if "foreign" in file.read_text()] == []
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert mark.exists()


def test_a_kernel_that_a_config_names_is_not_fetched_from_the_hub(tmp_path, arguments, monkeypatch):
    change(tmp_path / "model" / "config.json", attn_implementation="foreign/kernel:run")
    config = load_config(str(tmp_path / "model"))
    fetched = []
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lambda n, **_: fetched.append(n))
    for attention in ("sdpa", "eager", None):
        assert on_meta(config, attention).config._attn_implementation in ("sdpa", "eager")
    assert fetched == []
    config._attn_implementation = "foreign/kernel:run"
    AutoModelForCausalLM.from_config(config)
    assert set(fetched) == {"foreign/kernel:run"}


def test_a_chat_template_that_calls_the_operating_system_is_refused_in_the_sandbox(
    device, arguments, mistake, mark, tokenizer, tmp_path
):
    template = "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}".replace("MARK", str(mark))
    (tokenizer / "chat_template.jinja").write_text(template)
    flags = ["--tokenizer", tokenizer, "--sample-prompt", "Once", "--sample-tokens", "2", "--export", tmp_path / "e"]
    assert train([*arguments, *flags], device) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "e")
    assert loaded.chat_template == template
    with pytest.raises(jinja2.exceptions.SecurityError):
        loaded.apply_chat_template([{"role": "user", "content": "x"}])
    assert not mark.exists()
    chats = write_records(tmp_path / "chat.jsonl", [chat("Hello?", "Hello.")])
    flags = ["--tokenizer", tokenizer, "--dataset", chats, "--chat-loss", "all"]
    assert "the chat template fails, " in mistake(*flags, "--run-name", "chat")
    assert not mark.exists()
    jinja2.Template(template).render()
    assert mark.exists()


def test_a_chat_templates_name_does_not_lead_out_of_the_export(mistake, tokenizer, tmp_path):
    templates = [{"name": name, "template": "x"} for name in ("default", f"../../../{tmp_path.name}/mark")]
    change(tokenizer / "tokenizer_config.json", chat_template=templates)
    export = tmp_path / "exported"
    assert f"--export {export}: " in mistake("--tokenizer", tokenizer, "--export", export, exit_code=1)
    assert not export.exists()
    assert list(tmp_path.rglob("*.jinja")) == []


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def test_a_pickle_of_weights_is_not_read(mistake, mark, tmp_path):
    folder, attack = tmp_path / "model", pickle.dumps(Attack(mark))
    for name in ("pytorch_model.bin", "model.safetensors"):
        (folder / name).write_bytes(attack)
        assert mistake("--init", "pretrained").startswith(f"--init pretrained: no weights from {folder}")
    change(folder / "model.safetensors.index.json", weight_map={"x": "pytorch_model.bin"})
    assert mistake("--init", "pretrained").startswith(f"--init pretrained: no weights from {folder}")
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()


def test_weights_are_read_from_the_models_folder_alone(mistake, tmp_path):
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "other.safetensors")
    name = "../other.safetensors"
    change(tmp_path / "model" / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    assert f"its index names {name}, which is not in the folder" in mistake("--init", "pretrained")
    assert list(safe_open(tmp_path / "model" / name, framework="pt").keys()) == ["model.norm.weight"]


# ----------------------------------------------------------------------------------------------------------------------
# Data


def test_a_script_and_a_card_in_a_data_folder_change_nothing(mark, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"text": "Once"}\n')
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (data / "data.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()")
    (data / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../secret.jsonl\n---\n")
    files = find_files(str(data)).files_in_split("train")
    records = (record for file in files for record in read_records(file, ("text",)))
    assert [*read_documents(records, 2**32, True, collections.Counter())] == ["Once"]
    assert not mark.exists()
    exec((data / "data.py").read_text())
    assert mark.exists()


# ----------------------------------------------------------------------------------------------------------------------
# A folder that an attacker has prepared


LINKS = ["", "config.json", ".metrics.jsonl.writing", ".lock", "checkpoints", "profile/rank-0.json"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_out_of_the_runs_folder_is_refused_and_its_target_stays(mistake, tmp_path, name):
    link, target = tmp_path / "out" / "r" / name, tmp_path / "target"
    link.parent.mkdir(parents=True)
    if name in ("", "checkpoints"):
        target.mkdir()
    else:
        target.write_text("precious")
    link.symlink_to(target)
    if name not in ("", ".lock"):
        (tmp_path / "out" / "r" / ".lock").touch()  # as a run has it
    message = mistake()
    assert message.startswith(("--run-name r: ", "--output-dir ")) and "link" in message
    assert not any(target.iterdir()) if target.is_dir() else target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "target"]


def test_a_checkpoint_reads_no_file_from_outside_its_folder(mistake, device, arguments, tmp_path):
    train([*arguments, "--checkpoint-interval", "2"], device)
    checkpoint = tmp_path / "out" / "r" / "checkpoints" / "step-00000002"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    shard = next(name for name in manifest["files"] if name.endswith(".distcp"))
    shutil.copy(checkpoint / shard, checkpoint.parent / "outside")
    resume = ["--resume", checkpoint, "--run-name", "branch"]

    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    for record in index.storage_data.values():
        object.__setattr__(record, "relative_path", "../outside")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    forge(checkpoint)
    message = mistake(*resume, exit_code=1)
    assert f"--resume {checkpoint}: cannot be loaded (the index names ../outside" in message

    forge(checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["../outside"] = manifest["files"][shard]
    change(checkpoint / "manifest.json", **manifest, sha256=saved.manifest_checksum(manifest))
    assert "step-00000002 is damaged (../outside is outside the checkpoint)" in mistake(*resume)


def test_the_metrics_endpoint_answers_on_the_loopback_address_alone(tmp_path):
    port = free_port()
    prometheus.Prometheus(parse(["--metrics-port", port]), tmp_path)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        socket.create_connection(("127.0.0.2", everywhere.getsockname()[1]), timeout=5).close()
