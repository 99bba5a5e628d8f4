"""The recipe in train_fsdp.py: what a step may not cost, and what is sharded."""

import contextlib
import functools
from collections import Counter

import numpy as np
import pytest
import torch
import torch._dynamo
import transformers
from conftest import one_source, parse, write_model
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from multirank import resolved
from tiny import END, MODELS, NoReadBack
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import train_fsdp
import utils
from harness import base, data
from harness import model as models
from harness.model.weights import decoder_layers
from harness.state.train_state import TrainState


@pytest.fixture
def trainer(device, tmp_path):
    """`trainer(model, *flags)`: the model, built as the program builds it, and a function that takes one step."""

    def make(name: str, *flags):
        source = name if name == "demo" else write_model(tmp_path / name, name, **MODELS[name])
        sizes = ["--sequence-length", "32", "--batch-size", "2", "--num-workers", "0", "--num-steps", "9"]
        sizes += ["--precision", "bf16"]  # the last one counts
        args, config = resolved(["--model", source, "--dataset", "demo", *sizes, *flags])
        model = train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device))
        optimizer = models.build_optimizer(args, model)
        sequences = data.SyntheticDataset(config.vocab_size, args.sequence_length)
        if args.document_mask:
            tokens = np.concatenate([sequences[index] for index in range(64)])
            sequences = data.PackedDataset(tokens, args.sequence_length, document_mask=True, end_of_text=END)
        train_set = one_source(sequences, args.seed)
        tracker = utils.PerformanceTracker(0, 1, 0)
        batches = data.training_batches(args, train_set, TrainState(model, optimizer, tracker=tracker), device)
        return model, lambda: train_fsdp.train_step(args, model, optimizer, batches, tracker)

    return make


@pytest.mark.parametrize(
    "model, flags",
    [
        ("demo", ""),
        ("smollm3", "--attention eager --activation-checkpointing selective"),
        ("smollm3", "--no-fused-loss --gradient-accumulation-steps 2 --zero-stage 2"),
        ("smollm3", "--precision fp8 --fp8-emulate"),
        ("smollm3", "--precision fp8 --fp8-emulate --fp8-recipe rowwise"),
        ("smollm3", "--precision fp8 --fp8-emulate --fp8-recipe rowwise_with_gw_hp"),
        ("llama", "--document-mask"),
        ("llama", "--optimizer muon --gradient-accumulation-steps 3 --zero-stage 1"),
        ("llama", "--optimizer adamw-bf16 --betas 0.9 0.95"),
        ("qwen3_moe", "--precision fp32"),
    ],
)
def test_a_step_reads_nothing_back_from_the_device(trainer, model, flags):
    if "eager" in flags and transformers.__version__ < "5.18":
        pytest.skip("transformers 5.17 sends a zero to the device for the mask of eager attention")
    _, step = trainer(model, *flags.split())
    step()  # the first also starts the data loader, which draws a seed on the host
    with NoReadBack():
        loss, norm, skipped, *_ = step()
    assert loss.item() > 0 and norm.item() > 0 and skipped.item() == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor[[0, 2]],
        lambda tensor: tensor.__setitem__([0, 2], 1.0),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.tensor([1.0, 2.0], device="cpu"),
        lambda tensor: torch.tensor([1.0, 2.0]).to("cpu"),
        lambda tensor: tensor.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ],
)
def test_what_a_gpu_would_wait_for_is_seen(read):
    with NoReadBack(), pytest.raises(AssertionError):
        read(torch.ones(4))


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op.__name__.partition(".")[0]] += 1
        return op(*args, **kwargs or {})


def count_compiled(calls: Calls):
    """A backend of torch.compile that counts the operators of the graphs that run."""

    def compiler(graph, inputs):
        names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]

        def run(*args):
            calls.counts.update(name.partition(".")[0] for name in names)
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing, matmuls, sigmoids", [("none", 6, 1), ("selective", 6, 2), ("full", 7, 2)])
def test_checkpointing_computes_again_what_it_does_not_keep(
    device, monkeypatch, checkpointing, matmuls, sigmoids, compiled
):
    """Of two linears with a sigmoid between: two products forward and four backward. The last is not needed again. If
    the compiled function were inside the checkpoint, all of the forward would run again."""
    torch._dynamo.reset()  # other tests compile forwards of the same class
    calls = Calls()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count_compiled(calls)))
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8))
    compiling = "--compile" if compiled else "--no-compile"
    settings = parse(["--demo", compiling, "--activation-checkpointing", checkpointing])
    train_fsdp.transform_layer(settings, layer, None, None, lambda module, **_: None)
    with contextlib.nullcontext() if compiled else calls:  # torch.compile compiles nothing inside a dispatch mode
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert calls.counts["mm"] + calls.counts["addmm"] == matmuls
    assert calls.counts["sigmoid"] == sigmoids


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
    layer = decoder_layers(model)[0]
    layer.unshard()
    gathered = layer.self_attn.q_proj.weight
    torch.testing.assert_close(gathered._scale, weights["model.layers.0.self_attn.q_proj.weight"]._precomputed_scale)


def test_weights_are_cast_before_the_all_gather_to_the_bits_that_torchao_gives(trainer):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    model, step = trainer("smollm3", "--precision", "fp8", "--fp8-emulate")
    step()
    weight = model.model.layers[0].mlp.up_proj.weight
    shard, mesh = weight._local_tensor, weight.device_mesh
    cast = lambda shard: shard.fsdp_pre_all_gather(mesh, weight.shape, weight.stride(), None, None)  # noqa: E731
    for exact in (1.0, 1e-3, 1e3):  # with it what is beyond the largest float8, and what is too small for one
        shard._precomputed_scale = scale = exact * torch.finfo(shard._dtype).max / shard._tensor.abs().max()
        (bits,), (kept,) = cast(shard)
        expected = hp_tensor_and_scale_to_float8(shard._tensor, scale, shard._dtype)
        assert torch.equal(bits.view(torch.uint8), expected._data.view(torch.uint8)) and kept is scale
    moved = shard.to("cpu", copy=True)  # as --cpu-offload moves it to a device
    assert moved._tensor is not shard._tensor and torch.equal(moved._precomputed_scale, scale)
    assert torch.equal(cast(moved)[0][0].view(torch.uint8), bits.view(torch.uint8))
    shard._precomputed_scale = None  # before the first step
    (bits,), (scale,) = cast(shard)
    expected = hp_tensor_to_float8_dynamic(shard._tensor, shard._dtype, None, reduce_amax=True, device_mesh=mesh)
    assert torch.equal(bits.view(torch.uint8), expected._data.view(torch.uint8)) and torch.equal(scale, expected._scale)


def test_the_first_weights_in_bf16_are_those_of_fp32_rounded(device, arguments):
    """torch 2.11 draws other numbers in bf16 on a CPU, out of uniform ones of 8 bits."""
    fp32, bf16 = (built(device, [*arguments, "--precision", precision])[2] for precision in ("fp32", "bf16-pure"))
    for (name, exact), rounded in zip(fp32.named_parameters(), bf16.parameters(), strict=True):
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded.full_tensor(), exact.full_tensor().bfloat16()), name


# ----------------------------------------------------------------------------------------------------------------------
# verify_sharding


def built(device, arguments, *flags):
    settings, config = resolved([*arguments, *flags])
    mesh = train_fsdp.build_mesh(settings, device)
    return settings, mesh, train_fsdp.build_model(settings, config, mesh)


def test_sharding_is_verified_parameter_by_parameter(device, arguments):
    args, mesh, model = built(device, arguments)
    optimizer = models.build_optimizer(args, model)
    assert models.verify_sharding(args, model, optimizer, mesh)
    name, parameter = next(iter(model.named_parameters()))
    sharded = optimizer.state[parameter]["exp_avg"]
    optimizer.state[parameter]["exp_avg"] = sharded.full_tensor()
    with pytest.raises(RuntimeError, match=f"{name}.exp_avg is not sharded"):
        models.verify_sharding(args, model, optimizer, mesh)
    optimizer.state[parameter]["exp_avg"] = sharded
    plain = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("stray", plain)
    optimizer.add_param_group({"params": [plain]})
    plain.grad = torch.zeros(3)
    with pytest.raises(base.UserError, match="it made no state for stray"):
        models.verify_sharding(args, model, optimizer, mesh)
