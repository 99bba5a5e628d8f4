"""Train a causal language model with FSDP2: one `fully_shard` per decoder layer, on one device or a thousand.

    python train_fsdp.py --demo
    torchrun --nproc_per_node=4 train_fsdp.py --model smollm3-3b --zero-stage 2
    accelerate launch --num_processes=4 train_fsdp.py --model smollm3-3b

Read it from the top: the model and how it is sharded, a step, an evaluation, a run. `args` are the flags as typed
(flags.Args), `settings` the same with every default resolved (flags.Settings); flags.Flags is either. utils.py has the
FLOP and MFU math and the clock. Everything else is in harness/:

    base     errors, text, GPUs                        models   weights, loss, optimizers (harness/model)
    flags    every flag, and the rules between them    state    checkpoints, resume, export
    job      processes, signals, the run's folder      report   log lines, trackers, the HTML page, acceptance gates
    data     from files to batches                     plan     memory, speed and cost of a configuration, predicted
    loop     around the steps: opening a run, evaluating, logging, saving, stopping

--import FILE.py adds data sets, schedules, optimizers, metrics and loss terms (harness/register.py), and architectures.
--plan runs `build_mesh`, `build_model` and `train_step` too: on fake tensors, and with fewer layers if there are many.
"""

from harness import before_torch

if __name__ == "__main__":
    ARGS = before_torch.begin()  # parses the flags and listens to signals: the imports below take seconds

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import utils
from harness import base, data, flags, job, loop, plan, report, state
from harness import model as models

# ---- Model -----------------------------------------------------------------------------------------------------------
#
# ZeRO stage   gradients are reduced    parameters are gathered       shard group
# 0            once a step              never                         one rank: every rank is a replica
# 1            once a step              once a step                   all ranks, or those of one replica (HSDP)
# 2            in each microbatch       once a step                   as 1
# 3            in each microbatch       in each forward and backward  as 1
# Replicas reduce among each other once a step. With --defer-grad-sync all stages reduce once a step.


def build_mesh(args: flags.Flags, device: torch.device) -> DeviceMesh:
    """(shard,) or, for HSDP and stage 0, (replicate, shard). Context parallelism adds no dimension: the ranks that
    share a sequence are consecutive, and to FSDP they are ranks like any others."""
    world = dist.get_world_size()
    job.check_world(args, world)
    shards = args.shards(world)
    if shards == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    # torch ends a collective after 30 minutes, also if the rank that it waits for works. The group of all ranks, which
    # the mesh of one dimension uses, waits a day already: heartbeats find a stalled rank.
    job.lift_group_timeouts(*mesh.get_all_groups())
    return mesh


def reshards_layers(settings: flags.Settings) -> bool:
    """True if a layer is resharded after each forward and each backward: at stage 3. A shard group of one rank has
    nothing to gather: resharding would free its bf16 copy, which the backward would have to cast again. With
    --cpu-offload it frees the layer on the GPU."""
    is_sharded = settings.shards(dist.get_world_size()) > 1
    return settings.zero_stage == 3 and (is_sharded or settings.cpu_offload)


def build_model(
    settings: flags.Settings,
    config: transformers.PretrainedConfig,
    mesh: DeviceMesh,
    device: torch.device,
    read_weights: bool = True,
) -> transformers.PreTrainedModel:
    """Build the sharded model: on the meta device first, then each decoder layer in turn is materialized and sharded.

    No rank ever holds more than its shards, one full layer, and embedding and head, which are sharded last. All ranks
    draw the same random numbers in the same order, so on GPUs of one kind the weights depend neither on the world size
    nor on the sharding.

    Args:
        read_weights: False if a checkpoint is loaded next; frozen weights are read anyway, as no checkpoint has them.
    """
    dtype = models.base_weights_dtype(settings)  # but for LoRA's adapters, and what the family keeps in fp32
    model = models.on_meta(config, settings.attention, dtype)
    # the loss, of labels that are shifted already; document masks; the part of a sequence (--context-parallel)
    models.adapt_forward(model, settings)
    layers = models.decoder_layers(model)
    # freezes the model; `add_to`, below, gives each layer trained adapters
    adapters = models.Adapters(settings, model) if settings.lora_rank else None
    models.check_uniform_dtype(model, settings.precision)
    models.check_gpu_memory(settings, model, device, mesh["shard"].size())
    weights = None
    if settings.init == "pretrained" and (read_weights or models.has_frozen(model)):
        weights = models.open_weights(model, layers, settings.model, dtype)
    convert_to_fp8 = models.fp8_converter(settings, layers) if settings.precision == "fp8" else None
    offload = models.LayerInputOffload() if settings.activation_checkpointing == "offload" else None
    shard = functools.partial(fully_shard, mesh=mesh, **sharding_policies(settings, model, device))
    torch.manual_seed(settings.seed)
    model.train()
    in_layers = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in in_layers]
    models.materialize(model, outside, device, weights)
    for index, layer in job.layer_progress(layers, shown=not settings.plan):
        models.materialize(model, list(layer.modules()), device, weights, layer=index)
        if adapters:
            adapters.add_to(layer)
        transform_layer(settings, layer, convert_to_fp8, offload, shard)
    if settings.compile:
        for module in outside:
            if type(module).__name__.endswith("Norm"):  # such as the final one: it is in no compiled layer
                module.forward = torch.compile(module.forward)
    # The root's group (embedding, norm, head) is needed again as soon as the backward begins: it is never resharded
    # in between.
    shard(model, reshard_after_forward=False)
    # LoRA also freezes weights that the family keeps in fp32, such as a router's: FSDP2 would cast them to bf16.
    models.gather_frozen_in_own_dtype(model)
    # A shard group of one rank (one GPU, or stage 0) needs no second buffer for a gather or a reduction.
    models.avoid_copies_on_one_rank(settings, model, mesh)
    models.make_replicas_equal(model, mesh)  # different kinds of GPU draw different numbers from one seed
    base.trim_host_memory()  # host memory of the full layers, which glibc would keep
    torch.manual_seed(settings.seed + dist.get_rank())  # every rank its own dropout
    return model


def transform_layer(
    settings: flags.Settings,
    layer: nn.Module,
    convert_to_fp8: Callable[[nn.Module], object] | None,
    offload: models.LayerInputOffload | None,
    shard: Callable[..., FSDPModule],
) -> None:
    """Apply to one decoder layer what the flags request. The order matters:

    1. float8 swaps the linears, so it comes before whatever wraps them.
    2. Activation checkpointing comes before compile: the compiler sees what is recomputed and can fuse it. Around a
       compiled function selective checkpointing fails, as compiled code writes into the tensors that it keeps.
    3. compile takes the layer's forward, without the hooks of fully_shard: the all-gathers are issued around the
       compiled region and do not break it.
    4. Offloading of the layer's input wraps the compiled forward: its graph then has no copies to the host.
    5. fully_shard comes last. It replaces the parameters by shards, which the optimizer gets.
    """
    if convert_to_fp8:
        convert_to_fp8(layer)
    models.checkpoint_activations(layer, settings.activation_checkpointing)
    if settings.compile:
        layer.forward = torch.compile(layer.forward)
    if offload:
        offload.wrap(layer)
    shard(layer, reshard_after_forward=reshards_layers(settings))


def sharding_policies(settings: flags.Settings, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The mixed precision and the offloading of each `fully_shard`."""
    if settings.precision in ("bf16", "fp8"):
        # Layers of transformers take fp32 inputs among bf16 ones: MPT's adds an fp32 alibi to the scores. Others may
        # rely on FSDP2's cast.
        casts = not type(model).__module__.startswith("transformers.")
        precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=casts)
    else:
        precision = MixedPrecisionPolicy()  # fp32 and bf16-pure: everything in the parameters' own dtype
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": offload}


# ---- Step ------------------------------------------------------------------------------------------------------------


def train_step(
    settings: flags.Settings, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[dict[str, Any]]
) -> report.StepResult:
    """Take one optimizer step and return its result: tensors, for which the host does not wait, except with
    --cpu-offload and with optimizers such as adamw8bit. A step with a non-finite gradient norm is skipped. Each
    `job.enter_phase` is recorded, to say in which phase a rank hangs.

    The training objective is the cross entropy, plus the router loss of a mixture of experts times its coefficient,
    plus registered loss terms such as a z-loss. The result's `loss` is the cross entropy alone; its mean over ranks is
    that of the global batch. Cross entropy and terms weight every trained token of the global batch equally. The router
    loss is computed per microbatch and averaged over all microbatches of all ranks, so the same microbatches give the
    same router loss on any number of ranks.
    """
    assert isinstance(model, FSDPModule)  # `build_model` has sharded it
    # Stage 0 too, whose reduce-scatter, over a shard group of one rank, sends nothing: its replicas are reduced once a
    # step, below.
    reduce_scatters_each_microbatch = settings.zero_stage != 1 and not settings.defer_grad_sync
    # makes the objective of each microbatch, and sums what is logged
    step_loss = models.StepLoss(model, settings.gradient_accumulation_steps)
    for microbatch in range(settings.gradient_accumulation_steps):
        last = microbatch == settings.gradient_accumulation_steps - 1
        model.set_requires_gradient_sync(last or reduce_scatters_each_microbatch)
        # All-reduce among replicas. This comes after set_requires_gradient_sync, which sets it too.
        model.set_requires_all_reduce(last)
        # Below stage 3 the parameters stay gathered from the first microbatch to the last: one all-gather a step. After
        # the last they are always resharded: the optimizer updates the shards, and a gathered copy would be stale.
        model.set_reshard_after_backward(last or reshards_layers(settings))
        batch = next(batches)
        job.enter_phase("forward")
        # The model's loss is the mean over the labels of a microbatch. Divided by this, summed over the microbatches of
        # a step and averaged over ranks, it is the mean over the global batch. Absent if all microbatches count alike.
        divisor = batch.pop("loss_divisor", settings.gradient_accumulation_steps)
        cross_entropy = model(**batch, use_cache=False).loss  # its backward adds the gradients of registered loss terms
        objective = step_loss.add_microbatch(cross_entropy, divisor)  # divided, plus the router loss
        job.enter_phase("backward")
        objective.backward()
    job.enter_phase("optimizer")
    # FSDP2 has averaged the gradients over the ranks. AdamW and Muon clip in their update, by a factor set here; for
    # other optimizers the gradients are clipped here.
    norm = models.clip_grad_norm(optimizer, settings.max_grad_norm)
    skip = models.is_non_finite(norm)  # a tensor, 1 or 0
    models.step_or_skip(optimizer, skip)
    optimizer.zero_grad()
    if settings.fp8_recipe == "tensorwise":  # set with --precision fp8 only
        models.compute_float8_scales(model)  # one all-reduce for the scales of all layers
    return report.StepResult(grad_norm=norm, skipped=skip, **step_loss.totals())


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    settings: flags.Settings, model: nn.Module, eval_data: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], int]:
    """Return (losses, number of eval tokens with a label). `eval_data` has the sequences of each source. `eval_loss` is
    the mean over all these tokens; with several sources each also has its own mean, `eval_loss/NAME`."""
    totals = torch.zeros(len(eval_data), 2, dtype=torch.float64, device=device)  # per source: summed loss, tokens
    with models.evaluating(model):
        for source_totals, sequences in zip(totals, eval_data.values(), strict=True):
            for batch in data.eval_batches(settings, sequences, device):
                job.enter_phase("evaluation")
                tokens = (batch["labels"] != base.IGNORE_INDEX).sum()
                loss = model(**batch, use_cache=False).loss
                # a batch without a trained label has loss 0, not NaN
                source_totals += torch.stack([loss.double() * tokens, tokens.double()])
    dist.all_reduce(totals)
    # with --context-parallel N, the N ranks of a sequence together count its labels, and its loss, N times
    return data.mean_losses(eval_data, totals / settings.context_parallel)


# ---- A run -----------------------------------------------------------------------------------------------------------


def prepare(args: flags.Args, device: torch.device, stop: job.StopRequest) -> loop.Run:
    """Build all that a run trains with, load the checkpoint, and print the header that describes the run."""
    mesh = build_mesh(args, device)
    peak_tflops = args.peak_tflops or utils.get_gpu_peak_tflops()
    # takes the run's folder, finds data and checkpoint, resolves the flags
    opened = loop.open_training(args, mesh, device, peak_tflops, stop)
    settings = opened.settings
    model = build_model(settings, opened.config, mesh, device, read_weights=not opened.checkpoint)
    optimizer = models.build_optimizer(settings, model)  # its states are those of the shards
    scheduler = models.build_scheduler(settings, optimizer)
    tracker = utils.PerformanceTracker(settings.perf_warmup_steps, dist.get_world_size(), peak_tflops)
    train_state = state.TrainState(model, optimizer, scheduler, tracker=tracker)
    return loop.finish_setup(opened, train_state, utils.get_flops_by_length)


def train(run: loop.Run) -> None:
    """Run the training loop. If a rank is asked to stop (job.StopRequest), all ranks raise job.Stopped before the same
    forward pass. The last complete step is what is saved then."""
    settings, model = run.settings, run.state.model
    loop.finish_interrupted_evaluation(run, evaluate)
    run.state.tracker.start_interval()  # restart the clock: setting up is no part of a step
    while run.state.step < settings.num_steps:
        with run.log.timed_step() as due:  # what this step is due for: a log line, an evaluation, a checkpoint
            with run.stop.checked_before_each_forward(model), run.state.step_undone_if_stopped():
                result = train_step(settings, model, run.state.optimizer, run.batches)
            run.complete_step(result)  # counts its samples and tokens, steps the schedule
        if due.log or due.save:  # an evaluation always has a log line
            loop.log_and_evaluate(run, due, evaluate)  # before a save it checks that the state is finite
        if due.save:
            loop.save(run, due)
    run.checkpoints.wait()


def train_or_evaluate(args: flags.Args, device: torch.device, stop: job.StopRequest) -> int:
    """Train; or, with --show-samples or --num-steps 0, print samples or evaluate. Return the exit code."""
    if args.show_samples:
        loop.show_samples(args)
    elif args.num_steps == 0:
        loop.evaluate_only(args, device, build_mesh, build_model, evaluate)
    else:
        run = prepare(args, device, stop)
        # Opens log and checkpoints. On a GPU another process plans the run meanwhile; the last log line has the
        # predicted metrics beside the measured ones.
        with loop.started(run):
            try:
                train(run)
                loop.finish(run)
            except job.Stopped:
                return loop.save_and_stop(run)
    return 0


# What a plan runs: harness/ imports neither this file nor utils.py.
RECIPE = plan.Recipe(build_mesh, build_model, train_step, utils.estimate_mfu, utils.get_flops_by_length)


def main(args: flags.Args) -> None:
    """Do what the flags request. `World` ends the process with `exit_code`, or prints a user's error as one line."""
    with job.World(args, out_of_memory_advice=lambda: plan.memory_advice(args)) as world:
        if args.plan:
            plan.print_plan(args, RECIPE)
        elif args.compare:
            report.write_comparison(args)
        else:
            device = world.meet()  # rendezvous: all ranks have started
            world.exit_code = train_or_evaluate(args, device, world.stop)


if __name__ == "__main__":
    main(ARGS)
