"""A model is built one decoder layer at a time: a rank never holds the full model, and in the end only its shards."""

import pathlib
import re
import threading

import pytest
import torch
from conftest import forked
from multirank import resolved
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
from harness import job

SIZES = {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
LAYER = 4 * (1024 * (2 * 1024 + 2 * 512) + 3 * 1024 * 2816) / 1e6  # MB in fp32


def resident_megabytes() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1e3


def build(folder: pathlib.Path, init: str) -> None:
    device = job.start_processes()
    flags = f"--model {folder} --init {init} --dataset synthetic --num-steps 1 --precision fp32 --no-compile"
    settings, config = resolved(flags.split())
    before, seen, is_built = resident_megabytes(), [], threading.Event()

    def watch() -> None:
        while not is_built.wait(0.002):
            seen.append(resident_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)
    is_built.set()
    watcher.join()
    print(f"most {max(seen) - before:.0f} MB, held {resident_megabytes() - before:.0f} MB of", len(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_rank_holds_its_shards_and_one_full_layer_on_the_way(tmp_path, init):
    """A rank's shards are half of eight layers. glibc would keep 30 to 80 MB more."""
    config = AutoConfig.for_model("llama", **SIZES)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    names.pop("lm_head.weight")
    weights = {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in names.items()}
    save_file(weights, tmp_path / "model.safetensors")
    found = re.findall(r"most (\d+) MB, held (\d+) MB", forked(2, build, tmp_path, init))
    assert len(found) == 2
    for most, held in found:
        assert int(most) < 7 * LAYER and int(held) < 5 * LAYER, found
