"""The recipe in train_fsdp.py: what a backward pass computes again, first weights, casts of float8, sharding."""

from collections import Counter

import pytest
import torch
from conftest import build_step, parse, words, write_model
from multirank import resolved
from tiny import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

import train_fsdp
from harness import model as models


class Counting(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op.__name__.partition(".")[0]] += 1
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("checkpointing, matmuls, sigmoids", [("none", 6, 1), ("selective", 6, 2), ("full", 7, 2)])
def test_checkpointing_computes_again_what_it_does_not_keep(device, checkpointing, matmuls, sigmoids):
    """Two linears with a sigmoid between have two products forward and four backward; the last is not needed again."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8))
    settings = parse(["--demo", "--no-compile", "--activation-checkpointing", checkpointing])
    train_fsdp.transform_layer(settings, layer, None, None, lambda module, **_: None)
    with Counting() as counting:
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
    counts = counting.counts
    assert (counts["mm"] + counts["addmm"], counts["sigmoid"]) == (matmuls, sigmoids)


def test_float8_weights_are_cast_before_the_all_gather_to_the_bits_that_torchao_gives(device, tmp_path):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    source = write_model(tmp_path / "smollm3", "smollm3", **MODELS["smollm3"])
    flags = words("--sequence-length 32 --num-workers 0 --num-steps 9 --precision fp8 --fp8-emulate")
    _, model, _, step = build_step(device, ["--model", source, "--dataset", "demo", *flags])
    step()
    shards = [parameter._local_tensor for parameter in model.parameters()]
    shards = [shard for shard in shards if hasattr(shard, "_precomputed_scale")]
    assert len(shards) == 4 * 7  # of each layer, the projections of attention and MLP
    for shard in shards:
        scale = torch.finfo(shard._dtype).max / shard._tensor.abs().max()
        torch.testing.assert_close(shard._precomputed_scale, scale)
    weight = model.model.layers[0].mlp.up_proj.weight
    shard, mesh = weight._local_tensor, weight.device_mesh
    cast = lambda shard: shard.fsdp_pre_all_gather(mesh, weight.shape, weight.stride(), None, None)  # noqa: E731
    for exact in (1.0, 1e-3, 1e3):  # also values above the largest float8, and below the smallest
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


def built(device, arguments, *flags):
    settings, config = resolved([*arguments, *flags])
    mesh = train_fsdp.build_mesh(settings, device)
    return settings, mesh, train_fsdp.build_model(settings, config, mesh, device)


def test_sharding_is_verified_parameter_by_parameter(device, arguments):
    args, mesh, model = built(device, arguments)
    optimizer = models.build_optimizer(args, model)
    assert models.verify_sharding(args, model, optimizer, mesh)
    name, parameter = next(iter(model.named_parameters()))
    optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].full_tensor()
    with pytest.raises(RuntimeError, match=f"{name}.exp_avg is not sharded"):
        models.verify_sharding(args, model, optimizer, mesh)
