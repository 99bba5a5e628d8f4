"""Host memory that stays in use after a model is built layer by layer."""

import ctypes
import pathlib
import re

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


def resident_megabytes() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1e3


def build(folder: pathlib.Path, init: str) -> None:
    device = job.start_processes()
    flags = f"--model {folder} --init {init} --dataset synthetic --num-steps 1 --precision fp32 --no-compile"
    settings, config = resolved(flags.split())
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    built = resident_megabytes()
    ctypes.CDLL(None).malloc_trim(0)
    print(f"kept {built - resident_megabytes():.0f} MB", sum(p.numel() for p in model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_rank_keeps_nothing_of_the_layers_that_it_held_whole(tmp_path, init):
    """Otherwise glibc keeps 30 to 80 MB of these eight layers of 46 MB each."""
    config = AutoConfig.for_model("llama", **SIZES)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    names.pop("lm_head.weight")
    weights = {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in names.items()}
    save_file(weights, tmp_path / "model.safetensors")
    kept = [int(found) for found in re.findall(r"kept (-?\d+) MB", forked(2, build, tmp_path, init))]
    assert len(kept) == 2 and max(kept) < 10, kept
