"""An export serves: what was written loads everywhere with the weights, the tokenizer and the habits of its source."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, metrics_of, train, words
from multirank import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
SMALL = words("--num-steps 2 --sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32 --dataset demo")


def read(folder, name: str = "generation_config") -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def change(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def habits_of(folder) -> dict:
    """What its generation config says; a version is no habit."""
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
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.model_max_length, tokenizer.chat_template = 256, CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    change(folder / "config.json", use_cache=False)
    (folder / "generation_config.json").write_text(json.dumps(HABITS | {"use_cache": False}))
    return folder


@pytest.fixture(scope="module")
def tuned(device, source, tmp_path_factory):
    """A run that began with the source's weights, wrote stories, saved, and was exported."""
    folder = tmp_path_factory.mktemp("tuned")
    flags = f"--init pretrained --model {source} --output-dir {folder} --cache-dir {folder / 'cache'} --run-name r"
    more = "--checkpoint-interval 2 --sample-prompt Once --sample-tokens 6"
    assert train([*SMALL, *words(flags), *words(more), "--export", folder / "export"], device) == 0
    return folder


def test_an_export_of_a_tuned_model_generates_as_its_source_does_and_with_a_cache(tuned):
    end = AutoTokenizer.from_pretrained(tuned / "export").eos_token_id  # after each document of the training
    assert habits_of(tuned / "export") == HABITS | {"eos_token_id": [7, 8, end]}
    assert read(tuned / "export", "config")["use_cache"] is True
    assert len(metrics_of(tuned / "r")[-1]["samples"]) == 1  # what writes stories has habits of its own


def test_a_checkpoint_of_a_tuned_model_is_exported_with_the_habits_of_its_source(device, tuned):
    flags = ["--num-steps", 0, "--resume", tuned / "r", "--export", tuned / "later"]
    assert train(flags, device) == 0
    assert habits_of(tuned / "later") == habits_of(tuned / "export")


def test_each_token_is_generated_by_a_call_of_one_token(tuned):
    model = AutoModelForCausalLM.from_pretrained(tuned / "export")
    lengths = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    model.generate(torch.arange(20, 29).view(1, -1), do_sample=False, max_new_tokens=6, eos_token_id=[])
    assert lengths == [9, 1, 1, 1, 1, 1]


def test_the_tokenizer_of_an_export_is_that_of_its_source(source, tuned):
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, tuned / "export"))
    text = "<|im_start|>The fox<|im_end|> sleeps"
    assert before.encode(text) == after.encode(text) and len(before.encode(text)) < len(text)
    assert (after.chat_template, after.model_max_length) == (CHAT, 256)
    assert after.special_tokens_map == before.special_tokens_map
    assert after.all_special_ids == before.all_special_ids and len(after.all_special_ids) == 3


def test_an_export_is_written_in_words_that_transformers_4_reads_too(source, tuned):
    """Version 4 knows no class TokenizersBackend, no list of extra tokens and, without a word, no rope_parameters."""
    tokenizer, config = read(tuned / "export", "tokenizer_config"), read(tuned / "export", "config")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert not {"extra_special_tokens", "is_local", "local_files_only"} & tokenizer.keys()
    assert config["rope_theta"] == 500_000 and config["rope_scaling"].items() >= LLAMA3.items()
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, tuned / "export"))
    differing = {key for key in before | after if before.get(key) != after.get(key)}
    assert differing == {"_name_or_path", "use_cache"}  # version 5 sees what it saw


def test_habits_in_a_config_as_old_models_have_them_become_a_generation_config(device, source, tmp_path):
    """transformers reads them there, and would refuse to write the config again."""
    shutil.copytree(source, tmp_path / "old")
    (tmp_path / "old" / "generation_config.json").unlink()
    change(tmp_path / "old" / "config.json", max_new_tokens=7, eos_token_id=5)
    without_training = ["--num-steps", 0, "--init", "pretrained", "--model", tmp_path / "old"]
    assert train([*without_training, "--export", tmp_path / "export"], device) == 0
    assert habits_of(tmp_path / "export").items() >= {"max_new_tokens": 7, "eos_token_id": [5, 0]}.items()
    AutoConfig.from_pretrained(tmp_path / "export").save_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    "content, why",
    [
        ("{", "Expecting"),
        ("[1]", "no JSON object"),
        ("[" * 200_000, "recursion"),
        ('{"max_new_tokens": 0}', "greater than 0"),
        ('{"eos_token_id": "2"}', "no token id"),
    ],
)
def test_habits_that_cannot_be_read_are_said_and_cost_no_export(device, source, tmp_path, capsys, content, why):
    shutil.copytree(source, tmp_path / "broken")
    (tmp_path / "broken" / "generation_config.json").write_text(content)
    flags = ["--num-steps", 0, "--init", "pretrained", "--model", tmp_path / "broken", "--export", tmp_path / "e"]
    assert train(flags, device) == 0
    said = capsys.readouterr().out
    assert f"without the generation config of {tmp_path / 'broken'}, which cannot be read (" in said and why in said
    assert "use_cache" not in read(tmp_path / "e") and AutoModelForCausalLM.from_pretrained(tmp_path / "e")


def test_a_model_that_began_at_random_ends_where_its_tokenizer_does(device, source, tmp_path):
    """Its config may have been another tokenizer's, of which it never saw a token."""
    (tmp_path / "model").mkdir()
    shutil.copy(source / "config.json", tmp_path / "model")
    change(tmp_path / "model" / "config.json", eos_token_id=77, bos_token_id=76)
    flags = (
        f"--model {tmp_path / 'model'} --tokenizer {source} --output-dir {tmp_path} --cache-dir {tmp_path / 'cache'}"
    )
    assert train([*SMALL, *words(flags), "--export", tmp_path / "export"], device) == 0
    wanted = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert read(tmp_path / "export").items() >= wanted.items()
    assert read(tmp_path / "export", "config").items() >= (wanted | {"pad_token_id": None}).items()


@pytest.mark.parametrize("asked", [[], ["--sequence-length", 8192], ["--dataset", "synthetic"]])
def test_what_trains_nothing_asks_for_no_sequence_length(device, source, tmp_path, asked):
    flags = ["--num-steps", 0, "--init", "pretrained", "--model", source, "--export", tmp_path / "e", *asked]
    assert train(flags, device) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "e", dtype="auto").dtype == torch.float32
