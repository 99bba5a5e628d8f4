"""What a step may not cost: reads from the device, recompilations, graph breaks, scales of float8 found one by one."""

import functools

import pytest
import torch
import torch._dynamo
from conftest import write_model
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import train_fsdp
import utils

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "smollm3": SIZES | {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, "pad_token_id": None},
    "llama": SIZES,
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture
def trainer(device, tmp_path):
    """`trainer(model, *flags)`: the model, built as the program builds it, and a function that takes one step."""

    def make(name: str, *flags):
        source = name if name == "demo" else write_model(tmp_path / name, name, **MODELS[name])
        sizes = ["--sequence-length", "32", "--batch-size", "2", "--num-workers", "0", "--num-steps", "9"]
        args = train_fsdp.parse_args(["--model", source, "--dataset", "synthetic", *sizes, *flags])
        config = train_fsdp.load_config(args)
        model = train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device))
        optimizer = train_fsdp.build_optimizer(args, model)
        data = utils.SyntheticDataset(config.vocab_size, args.sequence_length)
        batches = train_fsdp.training_batches(args, data, device)
        tracker = utils.PerformanceTracker(0, 1, 0)
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
    layer = train_fsdp.decoder_layers(model)[0]
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
    compiled = torch.compile(utils.loss_and_gradient, backend="aot_eager")
    results = []
    for function in (utils.loss_and_gradient, compiled):
        loss = utils.LinearCrossEntropy.apply(hidden, weight, None, labels, function)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 has it first")
def test_the_loss_is_that_of_torchs_own_chunks():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1500, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, 40, (1500,), generator=generator)
    ours = utils.LinearCrossEntropy.apply(hidden, weight, None, labels)
    gradients = torch.autograd.grad(ours, (hidden, weight))
    options = torch.nn.LinearCrossEntropyOptions()
    torchs = torch.nn.functional.linear_cross_entropy(hidden, weight, labels, options=options)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(gradients, torch.autograd.grad(torchs, (hidden, weight)))
