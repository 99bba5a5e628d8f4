"""A fake step: the program's own model, sharding, optimizer and step, on tensors without data, as rank 0 of any number
of ranks, recorded."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.partitioners import (
    min_cut_rematerialization_partition,
)  # private: inductor's partitioner has no other name
from torch._subclasses.fake_tensor import FakeTensorMode  # private: DTensor and the compiler do not run on `meta`
from torch.distributed.fsdp._fully_shard import _fsdp_param  # private: FSDP2 has no option for how it chunks
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # private: it runs operators of its own
from torch.utils import _python_dispatch  # private: no public name gives the active modes, or a context without them
from transformers import PretrainedConfig
from transformers.integrations import moe

from harness import flags
from harness import model as models
from harness.plan.fusion import RegionMemory, fused_memory
from harness.plan.rates import Rates
from harness.plan.recipe import Recipe
from harness.plan.recorder import StepRecorder

MAX_MICROBATCHES = 3  # that are recorded: the first, one for all in the middle, the last


def record_step(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, depth: int, rates: Rates
) -> StepRecorder:
    """One optimizer step of the model's first `depth` layers.

    Raises:
        RuntimeError: layers are to be compiled and none was.
    """
    microbatches = settings.gradient_accumulation_steps
    settings = dataclasses.replace(settings, gradient_accumulation_steps=min(microbatches, MAX_MICROBATCHES))
    with built(settings, recipe, at_depth(config, depth), world, rates) as (recorder, model, optimizer):
        for index, layer in enumerate(models.decoder_layers(model)):
            watch(recorder, layer, index if index < depth / 2 else index - depth)
            if settings.compile:
                layer.register_forward_pre_hook(lambda *_: recorder.count_layer())
        models.decoder_layers(model)[-1].register_forward_hook(lambda *_: recorder.mark("head", "head"))
        if settings.fp8_recipe == "tensorwise":  # as every step but the first finds it
            models.compute_float8_scales(model)
        batches = token_batches(settings, recorder, microbatches)
        recipe.train_step(settings, model, optimizer, batches, recipe.make_tracker(0, world, 0))
    if settings.compile and not recorder.compiled_regions:
        raise RuntimeError("the plan's step ran eagerly although the layers are compiled")
    return recorder


def record_update(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, rates: Rates
) -> StepRecorder:
    """The optimizer's own step of the whole model. What one that divides whole matrices among ranks does on one of them
    is not linear in the number of layers."""
    settings = dataclasses.replace(settings, compile=False, activation_checkpointing="none")
    with built(settings, recipe, config, world, rates) as (recorder, model, optimizer):
        recorder.start_microbatch(0, 1, 1)
        recorder.kind = "gradients"
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        recorder.kind = "activations"
        norm = models.clip_grad_norm(optimizer, settings.max_grad_norm)
        models.step_or_skip(optimizer, models.decide_skip(norm))
    return recorder


@contextlib.contextmanager
def built(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, rates: Rates
) -> Iterator[tuple[StepRecorder, nn.Module, torch.optim.Optimizer]]:
    """(recorder, model, optimizer) as rank 0 of `world` has them, which is the fullest one: `fully_shard` divides
    dimension 0 as torch.chunk does. Inside, all that runs is recorded."""
    # Other attention kernels do not run here; they save and allocate the same. A document mask is left out: a GPU's
    # flex attention skips what is masked, and the plan takes nothing as masked.
    attention: flags.Attention = "eager" if settings.attention == "eager" else "sdpa"
    settings = dataclasses.replace(settings, init="random", attention=attention, document_mask=False)
    recorder = StepRecorder(settings.gpus_per_node, rates)
    kind = models.find_optimizer(settings.optimizer)
    if kind.before_plan and kind.is_installed():
        kind.before_plan()
    # private: any number of ranks in one process; public backends wait for the others
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with mock.patch.object(torch.distributed.device_mesh, "new_group", new_rank_0_group):
            mesh = recipe.build_mesh(settings, torch.device("cpu"))  # before the tensors are fake
        groups = {dist.group.WORLD, *mesh.get_all_groups()}  # a mesh of one dimension has the world's own group
        recorder.counts["communicators", "run"] = sum(group.size() > 1 for group in groups)
        with on_fake_tensors(recorder):
            recorder.kind = "parameters"
            model = recipe.build_model(settings, config, mesh)
            recorder.kind = "optimizer"
            optimizer = models.build_optimizer(settings, model)
            optimizer.register_step_pre_hook(lambda *_: recorder.start_update(model.parameters()))
            optimizer.register_step_post_hook(lambda *_: recorder.end_update())
            recorder.kind = "activations"
            yield recorder, model, optimizer
            recorder.count_exposed_collectives()
    finally:
        dist.destroy_process_group()


def at_depth(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The config of the model's first `depth` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return config


def token_batches(
    settings: flags.Settings, recorder: StepRecorder, microbatches: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of a step of so many microbatches, of which a few are taken."""
    for index in range(settings.gradient_accumulation_steps):
        recorder.start_microbatch(index, settings.gradient_accumulation_steps, microbatches)
        shape = (settings.batch_size, settings.sequence_length)
        yield {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}


def watch(recorder: StepRecorder, layer: nn.Module, key: int) -> None:
    """Marks the passes of a layer, which is counted from the nearer end."""

    def after(module: nn.Module, inputs: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        hidden.register_hook(lambda grad: recorder.mark("backward", key))

    layer.register_forward_pre_hook(lambda *_: recorder.mark("forward", key))
    layer.register_forward_hook(after)


# ---- What runs otherwise than on real ranks --------------------------------------------------------------------------


@contextlib.contextmanager
def on_fake_tensors(recorder: StepRecorder) -> Iterator[None]:
    """Fake tensors under `recorder`. Replaces what is no operator, does not run on fake tensors, or runs otherwise on a
    GPU."""
    resize = torch.UntypedStorage.resize_

    # how FSDP allocates and frees gathered parameters, without an operator
    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        recorder.kinds[recorder.register_storage(storage)] = "communication"

    def three_chunks(starts: range) -> Iterator[int]:  # the second stands for all between first and last
        weight = recorder.weight
        for index in sorted({0, min(1, len(starts) - 1), len(starts) - 1}):
            recorder.weight = weight * max(len(starts) - 2, 1) if index == 1 else weight
            yield starts[index]
        recorder.weight = weight

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        dtensor_shapes_unrecorded(),
        models.without_data(three_chunks),
        # private: a GPU multiplies fp32 too, fake tensors bf16 only
        mock.patch.object(moe, "_can_use_grouped_mm", lambda tokens, weight, offs: weight.dtype == torch.bfloat16),
        # private: there is no option for it
        mock.patch.object(_fsdp_param, "_chunk_with_empty", first_chunk),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=recording_backend())),
        # private: a GPU's attention without dropout draws no random numbers, that of fake tensors counts as if it did
        mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", lambda graph: False),
        # private: `dynamic=False` does not raise the limit of recompiles, and would have to be in every call
        torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=1000),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        yield


def new_rank_0_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Makes a group if rank 0 is in it. A mesh of two dimensions makes the groups of all ranks, and a plan of rank 0
    needs its own two."""
    return dist.new_group(ranks, **options) if 0 in ranks else None


def first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """The shard of rank 0 of those that FSDP2 cuts a tensor into, of which a plan needs no other: a list of all ranks'
    takes minutes from 4,096 ranks on."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // count))]


@contextlib.contextmanager
def dtensor_shapes_unrecorded() -> Iterator[None]:
    """Inside, no recorder sees the fake tensors by which DTensor learns the shape of a whole result."""
    name = "_propagate_tensor_meta_non_cached"  # private: there is no option for it
    propagate = getattr(ShardingPropagator, name)

    def propagate_unrecorded(*args: Any) -> Any:
        # private: no public context leaves all modes
        with _python_dispatch._disable_current_modes():
            return propagate(*args)

    with mock.patch.object(ShardingPropagator, name, propagate_unrecorded):
        yield


@functools.cache
def recording_backend() -> Callable[..., Any]:
    """A backend for torch.compile that makes graphs of forward and backward as inductor does, and runs them under a
    StepRecorder. A public backend gets the forward only, before autograd and decompositions."""
    from torch._dynamo.backends.common import aot_autograd  # private: makes such a backend
    from torch._inductor.decomposition import select_decomp_table  # private: the operators that inductor takes apart

    def run(graph: torch.fx.GraphModule, memory: RegionMemory, *args: Any) -> Any:
        # private: no public name gives the modes that are active
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        recorder = next(mode for mode in modes if isinstance(mode, StepRecorder))
        return recorder.run_compiled(graph, memory, *args)

    return aot_autograd(
        fw_compiler=lambda graph, inputs: functools.partial(run, graph, fused_memory(graph)),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # an argument that is updated is written by the kernel, not copied later
    )
