"""transformers 4 reads an export as 5 does: the same tokens, chats and logits."""

import json
import sys

import pytest
import reader
import torch
import transformers
from conftest import ROOT, SMALL, start, train, words
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

from harness.state.transformers4 import old_tokenizer_config

PACKAGES = ["transformers==4.57.6", "tokenizers>=0.22,<=0.23.0", "huggingface_hub>=0.34,<1"]
CHAT = "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
SIZES = {"vocab_size": 1600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + i / 4 for i in range(8)]}
LONGROPE |= {"long_factor": [2.0 + i for i in range(8)]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR, DYNAMIC = {"rope_type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0}
# Each family with a base frequency that is no default of it, and among them each kind of scaling.
FAMILIES = {
    "llama": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "qwen2": {"rope_scaling": YARN},
    "qwen3": {"rope_scaling": DYNAMIC, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS | {"rope_scaling": YARN},
    "mistral": {"sliding_window": 16, "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "rope_local_base_freq": 555.0, "rope_scaling": LINEAR},
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "olmo2": {"rope_scaling": LINEAR},
    "glm": {"partial_rotary_factor": 0.25},
    "granite": {},
    "camembert": {"is_decoder": True, "pad_token_id": 1},  # its head comes before its embedding
    "gpt_neox": {"rotary_emb_base": 777.0, "rotary_pct": 0.5, "rope_scaling": LINEAR},
    "granitemoehybrid": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16, "shared_intermediate_size": 32},
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The demo's, with special tokens and another chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    # beside a named one transformers 5.17 forgets the other special tokens of a folder that is written for 4
    named = {"image_token": "<image>"} if transformers.__version__ >= "5.18" else {}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", model_specific_special_tokens=named)
    tokenizer.model_max_length, tokenizer.chat_template = 256, CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exports(device, tokenizer, token_cache, tmp_path_factory) -> list:
    """One of each family, and the demo's after two steps, also of sequences longer than its positions."""
    folder, found = tmp_path_factory.mktemp("exports"), []
    prefixing = AutoTokenizer.from_pretrained(tokenizer)  # by its tokenizer.json alone
    prefixing.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    prefixing.save_pretrained(folder / "prefixing")
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | {"rope_theta": 777.0} | sizes))
        for parameter in model.parameters():  # norms and biases too, which a fresh model has at 1 and 0
            torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
        model.save_pretrained(folder / "source" / family)
        flags = f"--num-steps 0 --init pretrained --model {folder / 'source' / family} --tokenizer "
        flags += str(folder / "prefixing" if family == "llama" else tokenizer)
        found.append(folder / family)
        assert train(words(f"{flags} --export {found[-1]}"), device) == 0
    for name, flags in {"demo": "", "longer": "--sequence-length 2048 --rope-scaling yarn"}.items():
        found.append(folder / name)
        places = words(f"--output-dir {folder} --cache-dir {token_cache} --run-name run-{name} --export {found[-1]}")
        demo = ["--model", ROOT / "assets" / "demo", "--dataset", "demo", *places, *words(flags)]
        assert train([*SMALL, *demo], device) == 0
    return found


@pytest.fixture(scope="module")
def packages4(tmp_path_factory):
    """A folder with transformers 4 and what it needs in other versions; all else is this environment's."""
    folder = tmp_path_factory.mktemp("packages")
    install = start([sys.executable, *words("-m pip install --quiet --no-deps --target"), folder, *PACKAGES])
    if install.returncode:
        pytest.skip(f"pip cannot install {PACKAGES[0]}: {install.stderr.strip().splitlines()[-1]}")
    return folder


def test_a_tokenizer_pads_where_its_own_class_does(tmp_path):
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[])
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(old_tokenizer_config(json.loads(path.read_text()), tokenizer)))
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == tokenizer.padding_side == "left"


@pytest.mark.slow
def test_transformers_4_reads_an_export_as_5_does(exports, packages4, tmp_path):
    command = [sys.executable, ROOT / "tests" / "reader.py", tmp_path, *exports]
    process = start(command, PYTHONPATH=str(packages4), HF_HUB_OFFLINE="1")
    assert process.stdout.strip() == "4.57.6", process.stderr[-3000:]
    for export in exports:
        logits, does = reader.read(export)
        assert does["unread"] == []
        assert json.loads((tmp_path / f"{export.name}.json").read_text()) == does, export.name
        other = torch.load(tmp_path / f"{export.name}.pt")
        # experts are summed in another order there
        assert torch.allclose(other, logits, rtol=0, atol=1e-5 * logits.abs().max().item()), export.name


@pytest.mark.slow
def test_an_export_is_for_5_what_it_was(exports):
    """The fields for 4 change nothing that 5 reads."""
    for export in exports[:-2]:
        before, now = (
            AutoConfig.from_pretrained(f).to_dict() for f in (export.parent / "source" / export.name, export)
        )
        now.get("rope_parameters", {}).pop("type", None)  # the older name of rope_type, where 4 knows no other
        different = {name for name in before if before[name] != now.get(name)}
        assert different <= {"_name_or_path"}, (export.name, different)
        tokenizer = json.loads((export / "tokenizer_config.json").read_text())
        assert not {"is_local", "local_files_only", "model_specific_special_tokens"} & tokenizer.keys()
