"""--document-mask: attention and labels stay inside documents."""

import functools

import numpy as np
import pytest
import torch
import torch._dynamo
from conftest import write_model
from multirank import resolved
from tiny import END, MODELS, SIZES
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
from harness.base.errors import UserError
from harness.data.windows import create_collate_fn
from harness.model.attention import skip_packing_detection
from harness.model.weights import decoder_layers


def windows(count: int, length: int) -> list[np.ndarray]:
    """Random tokens, of which about every eighth ends a document."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(1, SIZES["vocab_size"], (count, length + 1))
    tokens[generator.random(tokens.shape) < 0.12] = END
    return list(tokens)


@pytest.mark.parametrize("name, attention", [("smollm3", "sdpa"), ("llama", "eager"), ("qwen3_sliding", "sdpa")])
def test_a_masked_windows_loss_is_that_of_its_documents_one_by_one(device, tmp_path, name, attention):
    flags = ["--model", write_model(tmp_path / name, name.removesuffix("_sliding"), **MODELS[name])]
    flags += ["--attention", attention, "--precision", "fp32", "--sequence-length", "48", "--dataset", "demo"]
    masked, config = resolved([*flags, "--document-mask"])
    model = train_fsdp.build_model(masked, config, train_fsdp.build_mesh(masked, device))
    batch = create_collate_fn(END)(windows(2, 48))
    together = model(**batch, use_cache=False).loss.item()
    batch["position_ids"] = torch.arange(48).expand(2, -1)
    across = model(**batch, use_cache=False).loss.item()

    skip_packing_detection(model, name, document_mask=False)
    total, labels, documents = 0.0, 0, 0
    for window in windows(2, 48):
        for ids in np.split(window.astype(np.int64), np.flatnonzero(window[:-1] == END) + 1):
            if len(ids) > 1:
                alone = create_collate_fn(shift_labels=False)([ids])
                total += (len(ids) - 1) * model(**alone, use_cache=False).loss.item()
                labels += len(ids) - 1
                documents += 1
    assert documents > 8
    assert together == pytest.approx(total / labels, abs=2e-6)
    assert abs(together - across) > 1e-4  # it does matter


@pytest.mark.slow
def test_flex_attention_gives_the_same_and_is_compiled_once_whatever_the_documents(monkeypatch):
    """torch trains with it on a GPU only: the forward pass alone, as the compiler sees it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    variants = {}
    for attention in ("sdpa", "flex_attention"):
        torch.manual_seed(0)
        config = AutoConfig.for_model("smollm3", **MODELS["smollm3"])
        variants[attention] = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    skip_packing_detection(variants["sdpa"], "smollm3", document_mask=True)
    for layer in decoder_layers(variants["flex_attention"]):
        layer.forward = torch.compile(layer.forward)
    collate, all_windows = create_collate_fn(END), windows(6, 128)
    for start in (0, 2, 4):
        batch = collate(all_windows[start : start + 2])
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=start > 0):
            logits = [model(**batch, use_cache=False).logits for model in variants.values()]
        torch.testing.assert_close(*logits)
    assert counters["stats"]["unique_graphs"] <= 3  # two kinds of layer, and what makes the mask
    assert not counters["graph_break"]


def test_a_document_mask_is_refused_for_layers_that_are_no_attention(device, tmp_path):
    source = write_model(tmp_path / "hybrid", "qwen3_next", **MODELS["qwen3_moe"])
    args, config = resolved(["--model", source, "--document-mask", "--sequence-length", "32"])
    with pytest.raises(UserError, match=r"--document-mask .*: .* cannot separate the documents of a sequence"):
        train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device))
