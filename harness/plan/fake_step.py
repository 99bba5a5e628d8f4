"""Fake step: record the program's model, sharding, optimizer and step on fake tensors, as rank 0 of any world size."""

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
from torch.distributed.fsdp._fully_shard import (  # private: no option for how FSDP2 chunks and copies
    _fsdp_collectives,
    _fsdp_param,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # private: it runs further operators
from torch.utils import _python_dispatch  # private: no public name gives the active modes, or a context without them
from transformers import PretrainedConfig
from transformers.integrations import moe

from harness import flags
from harness import model as models
from harness.plan.fusion import RegionMemory, fused_memory
from harness.plan.rates import Rates
from harness.plan.recipe import Recipe
from harness.plan.recorder import StepRecorder

UNLIMITED = 10**6  # compilations of one function in a process that plans many configurations
MAX_MICROBATCHES = 3  # recorded: the first, one for all in the middle, the last


def record_step(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, depth: int, rates: Rates
) -> StepRecorder:
    """Record one optimizer step of the model's first `depth` layers.

    Raises:
        RuntimeError: no layer was compiled although they should be.
    """
    microbatches = settings.gradient_accumulation_steps
    settings = dataclasses.replace(settings, gradient_accumulation_steps=min(microbatches, MAX_MICROBATCHES))
    with built(settings, recipe, at_depth(config, depth), world, rates) as (recorder, model, optimizer):
        for index, layer in enumerate(models.decoder_layers(model)):
            watch(recorder, layer, index if index < depth / 2 else index - depth)
            if settings.compile:
                layer.register_forward_pre_hook(lambda *_: recorder.count_layer())
        models.decoder_layers(model)[-1].register_forward_hook(lambda *_: recorder.mark("head", "head"))
        if settings.fp8_recipe == "tensorwise":  # as in every step but the first
            models.compute_float8_scales(model)
        batches = token_batches(settings, recorder, microbatches)
        recipe.train_step(settings, model, optimizer, batches)
    if settings.compile and not recorder.compiled_regions:
        raise RuntimeError("the plan's step ran eagerly although the layers are compiled")
    return recorder


def record_update(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, rates: Rates
) -> StepRecorder:
    """Record `optimizer.step` of the full model. For an optimizer that distributes full matrices, one rank's work is
    not linear in the number of layers."""
    settings = dataclasses.replace(settings, activation_checkpointing="none")
    with built(settings, recipe, config, world, rates) as (recorder, model, optimizer):
        recorder.start_microbatch(0, 1, 1)
        recorder.kind = "gradients"
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        recorder.kind = "activations"
        norm = models.clip_grad_norm(optimizer, settings.max_grad_norm)
        models.step_or_skip(optimizer, models.is_non_finite(norm))
    return recorder


@contextlib.contextmanager
def built(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, rates: Rates
) -> Iterator[tuple[StepRecorder, nn.Module, torch.optim.Optimizer]]:
    """Build (recorder, model, optimizer) as on rank 0 of `world`, and record everything inside. Rank 0 has the largest
    shards, as `fully_shard` divides dimension 0 like torch.chunk."""
    # Document masks are left out: a plan assumes that nothing is masked.
    settings = dataclasses.replace(settings, init="random", document_mask=False)
    recorder = StepRecorder(settings.gpus_per_node, rates, settings.cpu_offload)
    kind = models.find_optimizer(settings.optimizer)
    if kind.before_plan and kind.is_installed():
        kind.before_plan()
    # private: public backends wait for the other ranks
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    device = torch.device("cpu")
    try:
        with mock.patch.object(torch.distributed.device_mesh, "new_group", new_rank_0_group):
            mesh = recipe.build_mesh(settings, device)  # before the tensors are fake
        groups = {dist.group.WORLD, *mesh.get_all_groups()}  # a mesh of one dimension has the world's group
        recorder.counts["communicators", "run"] = sum(group.size() > 1 for group in groups)
        recorder.counts["communicators", "run"] += settings.context_parallel > 1
        with on_fake_tensors(recorder):
            recorder.kind = "parameters"
            model = recipe.build_model(settings, config, mesh, device)
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
    """Return the config of the model's first `depth` layers."""
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
    """Yield the recorded microbatches of a step that has `microbatches`."""
    for index in range(settings.gradient_accumulation_steps):
        recorder.start_microbatch(index, settings.gradient_accumulation_steps, microbatches)
        shape = (settings.batch_size, settings.sequence_length)
        yield {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}


def watch(recorder: StepRecorder, layer: nn.Module, key: int) -> None:
    """Mark the passes of a layer with `key`, its index from the nearer end."""

    def after(module: nn.Module, inputs: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        hidden.register_hook(lambda grad: recorder.mark("backward", key))

    layer.register_forward_pre_hook(lambda *_: recorder.mark("forward", key))
    layer.register_forward_hook(after)


# ---- Differences from real ranks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_fake_tensors(recorder: StepRecorder) -> Iterator[None]:
    """Run on fake tensors under `recorder`, with replacements for code that is no operator, fails on fake tensors or
    differs on a GPU."""
    resize = torch.UntypedStorage.resize_

    # FSDP allocates and frees gathered parameters with this, without an operator
    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        recorder.kinds[recorder.register_storage(storage)] = "communication"

    def three_chunks(starts: range) -> Iterator[int]:  # the second represents all between first and last
        weight = recorder.weight
        for index in sorted({0, min(1, len(starts) - 1), len(starts) - 1}):
            recorder.weight = weight * max(len(starts) - 2, 1) if index == 1 else weight
            yield starts[index]
        recorder.weight = weight

    def can_use_grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and models.has_aligned_rows(weight)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        dtensor_shapes_unrecorded(),
        copies_of_offloaded_states(recorder) if recorder.cpu_offload else contextlib.nullcontext(),
        models.without_data(three_chunks, recorder.on_host),
        # private: a GPU has grouped matmuls in fp32 too, fake tensors only in bf16
        mock.patch.object(moe, "_can_use_grouped_mm", can_use_grouped_mm),
        # private: no option for it
        mock.patch.object(_fsdp_param, "_chunk_with_empty", first_chunk),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=recording_backend())),
        # private: attention on fake tensors counts as random even without dropout
        mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", lambda graph: False),
        # private: `dynamic=False` would have to be in every call, and does not raise the limit of recompiles
        torch._dynamo.config.patch(
            automatic_dynamic_shapes=False, recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED
        ),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        yield


@contextlib.contextmanager
def copies_of_offloaded_states(recorder: StepRecorder) -> Iterator[None]:
    """Record --cpu-offload's copies: each gathered parameter to the GPU, each reduced gradient to the host. Here both
    are on one device, and FSDP2 copies nothing."""
    gather_inputs = vars(_fsdp_param.FSDPParam)["all_gather_inputs"].fget
    cast = _fsdp_collectives._to_dtype_if_needed

    def copied_gather_inputs(parameter: _fsdp_param.FSDPParam) -> list[torch.Tensor]:
        on_gpu = recorder.copy_from_host(parameter._sharded_local_tensor)
        inputs = gather_inputs(parameter)
        del on_gpu  # after its cast
        return inputs

    def copied_gradients(gradients: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return recorder.copy_to_host(cast(gradients, dtype))

    with (
        mock.patch.object(_fsdp_param.FSDPParam, "all_gather_inputs", property(copied_gather_inputs)),
        mock.patch.object(_fsdp_collectives, "_to_dtype_if_needed", copied_gradients),
    ):
        yield


def new_rank_0_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Create a group if rank 0 is in it. A mesh of two dimensions creates the groups of all ranks; a plan needs only
    rank 0's."""
    return dist.new_group(ranks, **options) if 0 in ranks else None


def first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Return [rank 0's shard] of a tensor that FSDP2 divides. A list of all shards takes minutes from 4,096 ranks
    on."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // count))]


@contextlib.contextmanager
def dtensor_shapes_unrecorded() -> Iterator[None]:
    """Hide from recorders the fake tensors with which DTensor finds the shape of a full result."""
    name = "_propagate_tensor_meta_non_cached"  # private: no option for it
    propagate = getattr(ShardingPropagator, name)

    def propagate_unrecorded(*args: Any) -> Any:
        # private: no public context leaves all modes
        with _python_dispatch._disable_current_modes():
            return propagate(*args)

    with mock.patch.object(ShardingPropagator, name, propagate_unrecorded):
        yield


@functools.cache
def recording_backend() -> Callable[..., Any]:
    """Return a backend for torch.compile that makes forward and backward graphs like inductor's, and runs them under a
    StepRecorder. A public backend only gets the forward, before autograd and decompositions."""
    from torch._dynamo.backends.common import aot_autograd  # private: builds such a backend
    from torch._inductor.decomposition import select_decomp_table  # private: inductor's decompositions

    def run(graph: torch.fx.GraphModule, memory: RegionMemory, *args: Any) -> Any:
        # private: no public name returns the active modes
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        recorder = next(mode for mode in modes if isinstance(mode, StepRecorder))
        return recorder.run_compiled(graph, memory, *args)

    return aot_autograd(
        fw_compiler=lambda graph, inputs: functools.partial(run, graph, fused_memory(graph)),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # the kernel writes to an updated argument, without a copy
    )
