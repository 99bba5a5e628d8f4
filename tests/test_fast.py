"""The fast path: what a step may not cost, the loss without logits, attention inside documents."""

import functools

import numpy as np
import pytest
import torch
import torch._dynamo
from conftest import parse, write_model
from multirank import resolved
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
import utils
from harness import checkpoints, models
from harness.loss import LinearCrossEntropy, loss_and_gradient
from utils import UserError

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "smollm3": SIZES | {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, "pad_token_id": None},
    "llama": SIZES,
    "qwen3_sliding": SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}

END = 0  # token that ends a document


@pytest.fixture
def trainer(device, tmp_path):
    """`trainer(model, *flags)`: the model, built as the program builds it, and a function that takes one step."""

    def make(name: str, *flags):
        source = name if name == "demo" else write_model(tmp_path / name, name, **MODELS[name])
        sizes = ["--sequence-length", "32", "--batch-size", "2", "--num-workers", "0", "--num-steps", "9"]
        args, config = resolved(["--model", source, "--dataset", "demo", *sizes, *flags])
        model = train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device))
        optimizer = train_fsdp.build_optimizer(args, model)
        data = utils.SyntheticDataset(config.vocab_size, args.sequence_length)
        data.end_of_text = END if args.document_mask else None
        tracker = utils.PerformanceTracker(0, 1, 0)
        batches = train_fsdp.training_batches(
            args, data, checkpoints.TrainState(model, optimizer, None, tracker), device
        )
        return model, lambda: train_fsdp.train_step(args, model, optimizer, batches, tracker)

    return make


class NoReadBack(TorchDispatchMode):
    """Raises where a GPU would have to finish all that it was given before the host can go on."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select"), name
        return op(*args, **kwargs or {})


@pytest.mark.parametrize(
    "model, flags",
    [
        ("demo", ""),
        ("smollm3", "--attention eager --activation-checkpointing selective"),
        ("smollm3", "--no-fused-loss --gradient-accumulation-steps 2 --zero-stage 2"),
        ("smollm3", "--precision fp8 --fp8-emulate"),
        ("llama", "--activation-checkpointing full"),
        ("llama", "--document-mask"),
        ("qwen3_moe", "--precision fp32"),
    ],
)
def test_a_step_reads_nothing_back_from_the_device(trainer, model, flags):
    _, step = trainer(model, *flags.split())
    step()  # the first also starts the data loader, which draws a seed on the host
    with NoReadBack():
        loss, norm = step()
    assert loss.item() > 0 and norm.full_tensor().item() > 0


def test_the_guard_of_the_test_above_sees_a_read(trainer):
    with NoReadBack(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_each_kind_of_layer_is_compiled_once_and_whole(trainer, monkeypatch, checkpointing):
    """SmolLM3 has two kinds, with rotary positions and without; the code generator is left out, it is slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    _, step = trainer("smollm3", "--compile", "--activation-checkpointing", checkpointing)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        step()
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2 + 1, {})  # one is the loss
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            step()
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2 + 1, {})


def test_a_smaller_memory_budget_keeps_fewer_activations_and_gives_the_same_loss(trainer, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 1.0)  # to be restored
    kept, losses = [], []
    for budget in ("", "--activation-memory-budget 0.5", "--activation-memory-budget 0"):
        torch._dynamo.reset()
        _, step = trainer("llama", "--compile", "--precision", "fp32", *budget.split())
        sizes: list[int] = []

        def count(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            losses.append(step()[0].item())
        kept.append(sum(sizes))
    assert kept[0] > kept[1] > kept[2]
    assert losses == pytest.approx([losses[0]] * 3)


@pytest.mark.parametrize("flags", ["--no-compile", "--compile --activation-checkpointing full"])
def test_a_memory_budget_that_could_not_apply_is_refused(flags):
    with pytest.raises(UserError, match="--activation-memory-budget: needs --compile"):
        parse(["--activation-memory-budget", "0.5", *flags.split()])


def test_float8_scales_of_all_layers_are_found_at_once_and_used_by_the_next_all_gather(trainer):
    model, step = trainer("smollm3", "--precision", "fp8", "--fp8-emulate")
    step()
    shards = {name: parameter._local_tensor for name, parameter in model.named_parameters()}
    weights = {name: shard for name, shard in shards.items() if hasattr(shard, "_precomputed_scale")}
    assert len(weights) == 4 * 7  # of each layer, the projections of attention and MLP
    for name, weight in weights.items():
        scale = torch.finfo(torch.float8_e4m3fn).max / weight._tensor.abs().max()
        torch.testing.assert_close(weight._precomputed_scale, scale, msg=name)
        weight._precomputed_scale = scale / 4  # a mark, to be found again in what is gathered
    layer = models.decoder_layers(model)[0]
    layer.unshard()
    gathered = layer.self_attn.q_proj.weight
    torch.testing.assert_close(gathered._scale, weights["model.layers.0.self_attn.q_proj.weight"]._precomputed_scale)


# ----------------------------------------------------------------------------------------------------------------------
# The loss


def test_the_compiled_loss_is_the_eager_one():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1500, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (1500,), generator=generator)
    labels[::7] = utils.IGNORE_INDEX
    compiled = torch.compile(loss_and_gradient, backend="aot_eager")
    results = []
    for function in (loss_and_gradient, compiled):
        loss = LinearCrossEntropy.apply(hidden, weight, None, labels, function)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 has it first")
def test_the_loss_is_that_of_torchs_own_chunks():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1500, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, 40, (1500,), generator=generator)
    ours = LinearCrossEntropy.apply(hidden, weight, None, labels)
    gradients = torch.autograd.grad(ours, (hidden, weight))
    options = torch.nn.LinearCrossEntropyOptions()
    torchs = torch.nn.functional.linear_cross_entropy(hidden, weight, labels, options=options)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(gradients, torch.autograd.grad(torchs, (hidden, weight)))


# ----------------------------------------------------------------------------------------------------------------------
# --document-mask


def windows(count: int, length: int) -> list[np.ndarray]:
    """Random tokens, of which about every eighth ends a document."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(1, SIZES["vocab_size"], (count, length + 1))
    tokens[generator.random(tokens.shape) < 0.12] = END
    return list(tokens)


def test_positions_begin_again_after_each_end_of_text():
    batch = utils.create_collate_fn(END)([np.array([5, END, 6, 7, END, END, 8, 9]), np.arange(1, 9)])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch["labels"].tolist()[0] == [END, 6, 7, END, END, 8, 9]
    assert "position_ids" not in utils.create_collate_fn()(windows(1, 8))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["smollm3", "llama", "qwen3_sliding"])
def test_a_masked_windows_loss_is_that_of_its_documents_one_by_one(device, tmp_path, name, attention):
    flags = ["--model", write_model(tmp_path / name, name.removesuffix("_sliding"), **MODELS[name])]
    flags += ["--attention", attention, "--precision", "fp32", "--sequence-length", "48", "--dataset", "demo"]
    masked, config = resolved([*flags, "--document-mask"])
    model = train_fsdp.build_model(masked, config, train_fsdp.build_mesh(masked, device))
    batch = utils.create_collate_fn(END)(windows(2, 48))
    together = model(**batch, use_cache=False).loss.item()
    batch["position_ids"] = torch.arange(48).expand(2, -1)
    across = model(**batch, use_cache=False).loss.item()

    models.know_documents(model, name, document_mask=False)
    total, documents = 0.0, 0
    for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        lengths = np.diff([0, *(np.flatnonzero(row[:-1] == END) + 1), len(row)]).tolist()
        for ids, targets in zip(row.split(lengths), labels.split(lengths), strict=True):
            total += len(ids) * model(input_ids=ids[None], labels=targets[None], use_cache=False).loss.item()
            documents += 1
    assert documents > 8
    assert together == pytest.approx(total / batch["labels"].numel(), abs=2e-6)
    assert abs(together - across) > 1e-4  # it does matter


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
    models.know_documents(variants["sdpa"], "smollm3", document_mask=True)
    for layer in models.decoder_layers(variants["flex_attention"]):
        layer.forward = torch.compile(layer.forward)
    collate, all_windows = utils.create_collate_fn(END), windows(6, 128)
    for start in (0, 2, 4):
        batch = collate(all_windows[start : start + 2])
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=start > 0):
            logits = [model(**batch, use_cache=False).logits for model in variants.values()]
        torch.testing.assert_close(*logits)
    assert counters["stats"]["unique_graphs"] <= 3  # two kinds of layer, and what makes the mask
    assert not counters["graph_break"]


@pytest.mark.parametrize("flags", ["--dataset synthetic", "--attention flash_attention_2"])
def test_a_document_mask_that_could_not_work_is_refused(flags):
    with pytest.raises(UserError, match="--document-mask"):
        parse(["--document-mask", *flags.split()])


def test_a_document_mask_is_refused_for_layers_that_are_no_attention(device, tmp_path):
    source = write_model(tmp_path / "hybrid", "qwen3_next", **MODELS["qwen3_moe"])
    args, config = resolved(["--model", source, "--document-mask", "--sequence-length", "32"])
    with pytest.raises(UserError, match=r"--document-mask: .* is more than attention over positions"):
        train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device))
