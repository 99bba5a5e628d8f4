"""Nothing foreign is run, whatever a folder asks for, and nothing is written through a link.

Each attack leaves a mark where it succeeds; each test also shows that it does succeed against the bare library.
"""

import collections
import dataclasses
import io
import json
import os
import pathlib
import pickle
import shutil
import socket
import sys

import jinja2
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import transformers
from checkpoints import forge
from conftest import ROOT, parse, train
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.models.auto import tokenization_auto

from harness.base import UserError, saved
from harness.data.files import find_files
from harness.data.records import read_documents, read_records
from harness.model import tokenizer as tokenizer_module
from harness.model.configs import load_config
from harness.model.tokenizer import any_class_from_name
from harness.model.weights import PretrainedWeights, decoder_layers, on_meta
from harness.report import prometheus

STORY = json.dumps({"text": "Once upon a time there was a fox. " * 40}) + "\n"


@pytest.fixture
def mark(tmp_path) -> pathlib.Path:
    return tmp_path / "mark"


@dataclasses.dataclass
class Attack:
    """Unpickled it makes the mark."""

    mark: pathlib.Path

    def __reduce__(self):
        return pathlib.Path.touch, (self.mark,)


def change(file: pathlib.Path, **keys) -> None:
    """Sets keys of a JSON object in a file."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | keys))


# ----------------------------------------------------------------------------------------------------------------------
# Code of a model's or tokenizer's folder


def write_code(folder: pathlib.Path, mark: pathlib.Path, *maps: str) -> None:
    """Puts a module with a config and a tokenizer into a folder, and points the auto_map of JSON files at it."""
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
    for file in (ROOT / "assets" / "demo").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def says_yes(monkeypatch, tmp_path):
    """Whoever asks on stdin is told yes; what transformers copies before it runs it goes into a folder of the test."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def bare(monkeypatch, says_yes):
    """`bare(call)`: what a call does where transformers is as it comes."""

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


@pytest.mark.parametrize("guard", ["class", "question"])
def test_a_class_that_is_no_tokenizer_does_not_run_the_code_for_it(
    mistake, mark, tokenizer, bare, monkeypatch, guard, arguments, device
):
    """transformers loads whatever class tokenizer_class names, and does not tell it trust_remote_code=False."""
    write_code(tokenizer, mark, "config.json")
    change(tokenizer / "config.json", model_type="foreign")
    change(tokenizer / "tokenizer_config.json", tokenizer_class="AutoConfig")
    if guard == "class":
        assert "tokenizer_class AutoConfig is no tokenizer" in mistake("--tokenizer", tokenizer)
    else:  # each of the two is enough by itself
        monkeypatch.setattr(tokenizer_module, "tokenizer_class_from_name", any_class_from_name)
        assert "never run" in mistake("--tokenizer", tokenizer)
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


TEMPLATE = "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}"


def test_a_chat_template_that_calls_the_operating_system_is_refused_in_the_sandbox(
    device, arguments, mistake, mark, tokenizer, tmp_path
):
    template = TEMPLATE.replace("MARK", str(mark))
    (tokenizer / "chat_template.jinja").write_text(template)
    flags = ["--tokenizer", tokenizer, "--sample-prompt", "Once", "--sample-tokens", "2", "--export", tmp_path / "e"]
    assert train([*arguments, *flags], device) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "e")
    assert loaded.chat_template == template
    with pytest.raises(jinja2.exceptions.SecurityError):
        loaded.apply_chat_template([{"role": "user", "content": "x"}])
    assert not mark.exists()
    said = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    flags = ["--tokenizer", tokenizer, "--dataset", tmp_path / "chat.jsonl", "--chat-loss", "all"]
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
# Files that are not what they should be


@pytest.mark.parametrize(
    "keys",
    [{"model_type": ["llama"]}, {"model_type": "../../llama"}, {"auto_map": "AutoConfig"}]
    + [{name: "x"} for name in ("__class__", "to_dict", "get_text_config", "hidden_size")],
    ids=str,
)
def test_a_config_with_odd_values_is_one_line(mistake, tmp_path, keys):
    change(tmp_path / "model" / "config.json", **keys)
    assert mistake().startswith(f"--model {tmp_path / 'model'}: its config.json cannot be used (")


def header(tensors: dict) -> bytes:
    """A safetensors file of 64 zero bytes of data."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def f32(shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [b"", (2**62).to_bytes(8, "little") + b"{}", header({"a": f32([800], 0, 3200)})],
    ids=["empty", "huge header", "past the end"],
)
def test_a_broken_safetensors_file_is_one_line(arguments, tmp_path, content):
    folder = str(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    model = on_meta(load_config(folder))
    with pytest.raises(UserError, match=f"^--init pretrained: no weights from {folder} .*header"):
        PretrainedWeights(model, decoder_layers(model), folder, torch.float32)


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


@pytest.mark.parametrize("absolute", [True, False])
def test_weights_are_read_from_the_models_folder_alone(mistake, tmp_path, absolute):
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "other.safetensors")
    name = str(tmp_path / "other.safetensors") if absolute else "../other.safetensors"
    change(tmp_path / "model" / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    assert f"its index names {name}, which is not in the folder" in mistake("--init", "pretrained")
    assert list(safe_open(os.path.join(tmp_path / "model", name), framework="pt").keys()) == ["model.norm.weight"]


# ----------------------------------------------------------------------------------------------------------------------
# Data


@pytest.fixture
def data(tmp_path) -> pathlib.Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def read(folder: pathlib.Path) -> list[str]:
    """Every text of a data set, as the program reads it, cached or streamed."""
    records = (record for file in find_files(str(folder)).of_split("train") for record in read_records(file, "text"))
    return list(read_documents(records, 2**32, True, collections.Counter()))


def test_a_script_and_a_card_in_a_data_folder_change_nothing(data, mark, tmp_path):
    (data / "train.jsonl").write_text(STORY)
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (data / "data.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()")
    (data / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../secret.jsonl\n---\n")
    assert read(data) == [json.loads(STORY)["text"]]
    assert not mark.exists()
    exec((data / "data.py").read_text())
    assert mark.exists()


def test_a_parquet_file_unpickles_nothing_and_fetches_nothing(data, mark):
    attack = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Attack(mark))}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        fields = [pa.field("text", pa.string(), metadata=attack)]
        fields.append(pa.field("image", pa.struct({"bytes": pa.binary(), "path": pa.string()})))
        features = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
        described = {"huggingface": json.dumps({"info": {"features": features}})}
        columns = [pa.array(["Once"]), pa.array([{"bytes": None, "path": address}])]
        table = pa.table(columns, schema=pa.schema(fields, metadata=described))
        pyarrow.parquet.write_table(table, data / "train.parquet")
        assert read(data) == ["Once"]
        with pytest.raises(TimeoutError):
            server.accept()
    assert not mark.exists()
    pickle.loads(attack["ARROW:extension:metadata"])
    assert mark.exists()


# ----------------------------------------------------------------------------------------------------------------------
# A folder that somebody else has prepared


NAMES = "config.json metrics.jsonl .config.json.writing .metrics.jsonl.writing .lock checkpoints profile/rank-0.json"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_link_that_leads_out_of_the_runs_folder_is_refused_and_its_target_stays(mistake, tmp_path, name):
    link, target = tmp_path / "out" / "r" / name, tmp_path / "target"
    link.parent.mkdir(parents=True)
    target.write_text("precious")
    link.symlink_to(target)
    if name != ".lock":
        (tmp_path / "out" / "r" / ".lock").touch()  # as a run has it
    flags = [] if name != "metrics.jsonl" else ["--resume", "auto"]  # it is a run already, otherwise
    message = mistake(*flags)
    assert message.startswith(("--run-name r: ", "--output-dir ")) and "link" in message
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "target"]
    with link.open("a") as file:
        file.write(" no more")
    assert target.read_text() == "precious no more"


def test_the_files_of_a_run_and_an_export_have_the_permissions_of_the_umask(device, arguments, tmp_path):
    umask = 0o002
    before = os.umask(umask)
    try:
        train([*arguments, "--checkpoint-interval", "2", "--export", tmp_path / "exported"], device)
    finally:
        os.umask(before)
    written = [path for folder in ("out", "cache", "exported") for path in (tmp_path / folder).rglob("*")]
    assert {"model.safetensors", ".lock", "config.json", "manifest.json", ".metadata"} <= {p.name for p in written}
    wrong = {
        p.name: oct(p.stat().st_mode)
        for p in written
        if p.stat().st_mode & 0o777 != (0o777 if p.is_dir() else 0o666) & ~umask
    }
    assert wrong == {}


@pytest.fixture
def checkpoint(device, arguments, tmp_path) -> pathlib.Path:
    train([*arguments, "--checkpoint-interval", "2"], device)
    return tmp_path / "out" / "r" / "checkpoints" / "step-00000002"


def test_a_checkpoint_reads_no_file_from_outside_its_folder(mistake, checkpoint):
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prometheus.Prometheus(parse(["--metrics-port", port]), tmp_path)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        socket.create_connection(("127.0.0.2", everywhere.getsockname()[1]), timeout=5).close()
