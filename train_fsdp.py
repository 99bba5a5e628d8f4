"""Train a causal language model with FSDP2: one `fully_shard` per decoder layer, on one device or a thousand.

    python train_fsdp.py --demo
    torchrun --nproc_per_node=4 train_fsdp.py --model smollm3-3b --zero-stage 2
    accelerate launch --num_processes=4 train_fsdp.py --model smollm3-3b

Read it from the top: the model and how it is sharded, a step, an evaluation, a run. `args` are the flags as typed
(flags.Args), `settings` the same with every default resolved (flags.Settings). utils.py has the FLOP and MFU math and
the clock. Everything else is in harness/:

    base     errors, text, GPUs                        models   weights, loss, optimizers (harness/model)
    flags    every flag, and the rules between them    state    checkpoints, resume, export
    job      processes, signals, the run's folder      report   log lines, trackers, the HTML page, acceptance gates
    data     from files to batches                     plan     what a configuration will need and give
    loop     around the steps: opening a run, evaluating, logging, saving, stopping

A file of --import registers more in harness/register.py: model classes, data sets, optimizers, loss terms, metrics.
A plan (--plan) calls `build_mesh`, `build_model` and `train_step` too, with settings of its own, on fake tensors.
"""

from harness import before_torch

if __name__ == "__main__":
    ARGS = before_torch.begin()  # flags and signals come before the imports below, which take seconds

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


def build_mesh(args: flags.Args | flags.Settings, device: torch.device) -> DeviceMesh:
    """(shard,) or, for HSDP and stage 0, (replicate, shard). Context parallelism adds no dimension: the ranks that
    share a sequence are consecutive, and to FSDP they are ranks like any others."""
    world = dist.get_world_size()
    job.check_world(args, world)
    replicas = world if args.zero_stage == 0 else args.dp_replicate_size
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    # These groups wait for 30 minutes. The default group, which a mesh of one dimension uses, waits for a day, as
    # heartbeats find a stalled rank.
    job.lift_group_timeouts(*mesh.get_all_groups())
    return mesh


def reshards_in_each_pass(settings: flags.Settings) -> bool:
    """True if parameters are resharded after each forward and backward pass: at stage 3. In a shard group of one rank
    that would save nothing and cost a cast and a copy, unless the shard is on the host."""
    shards = dist.get_world_size() // settings.dp_replicate_size
    return settings.zero_stage == 3 and (shards > 1 or settings.cpu_offload)


def build_model(
    settings: flags.Settings,
    config: transformers.PretrainedConfig,
    mesh: DeviceMesh,
    device: torch.device,
    read_weights: bool = True,
) -> transformers.PreTrainedModel:
    """Build the sharded model: on the meta device first, then each decoder layer in turn is materialized and sharded.

    No rank ever holds more than its shards, one full layer, and embedding and head, which are sharded last. Every rank
    draws the same random numbers in the same order, so the weights do not depend on world size or sharding (of one kind
    of GPU).

    Args:
        read_weights: False if a checkpoint is loaded next; frozen weights are read anyway, as no checkpoint has them.
    """
    dtype = models.base_weights_dtype(settings)  # of all weights but LoRA's adapters
    model = models.on_meta(config, settings.attention, dtype)
    models.adapt_forward(model, settings)  # the loss, document masks, the part of a sequence (--context-parallel)
    layers = models.decoder_layers(model)
    adapters = models.Adapters(settings, model) if settings.lora_rank else None  # freezes all that the model has so far
    models.check_trained_dtypes(model, settings.precision)
    if not settings.cpu_offload:
        models.check_gpu_memory(model, device, mesh["shard"].size())
    weights = None
    if settings.init == "pretrained" and (read_weights or models.has_frozen(model)):
        weights = models.open_weights(model, layers, settings.model, dtype)
    convert_to_fp8 = models.fp8_converter(settings, layers) if settings.precision == "fp8" else None
    offload = models.LayerInputOffload() if settings.activation_checkpointing == "offload" else None
    shard = functools.partial(fully_shard, mesh=mesh, **sharding_policies(settings, device))
    torch.manual_seed(settings.seed)
    model.train()
    in_layers = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in in_layers]
    models.materialize(model, outside, device, weights)
    title = "" if settings.plan else "building layers"  # of the progress bar; a plan has one of its own
    for index, layer in job.progress(enumerate(layers), len(layers), title):
        models.materialize(model, list(layer.modules()), device, weights, index)
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
    models.gather_frozen_in_own_dtype(model)  # they are stored as they compute, bf16 or fp32; FSDP2 would cast all
    # A shard group of one rank (one GPU, or stage 0) needs no second buffer for a gather or a reduction.
    models.avoid_copies_on_one_rank(model, mesh, accumulates=settings.gradient_accumulation_steps > 1)
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
       compiled function selective checkpointing would recompute the whole forward.
    3. compile comes before fully_shard: the all-gathers are issued around the compiled region and do not break it.
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
    shard(layer, reshard_after_forward=reshards_in_each_pass(settings))


def sharding_policies(settings: flags.Settings, device: torch.device) -> dict[str, Any]:
    """The mixed precision and the offloading of each `fully_shard`."""
    if settings.precision in ("bf16", "fp8"):
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        precision = MixedPrecisionPolicy()  # fp32 and bf16-pure: everything in the parameters' own dtype
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": offload}


# ---- Step ------------------------------------------------------------------------------------------------------------


def train_step(
    settings: flags.Settings, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[dict[str, Any]]
) -> report.StepResult:
    """Take one optimizer step and return its result: tensors on the device. The host does not wait for them, except
    with optimizers such as adamw8bit. A step with a non-finite gradient norm is skipped. Each `job.enter_phase` is
    recorded, to say in which phase a rank hangs.

    The training objective is the cross entropy, plus the router loss of a mixture of experts times its coefficient,
    plus registered loss terms such as a z-loss. The result's `loss` is the cross entropy alone; its mean over ranks is
    that of the global batch. Cross entropy and terms weight every trained token of the global batch equally. The router
    loss is computed per microbatch and averaged over all microbatches of all ranks, so the same microbatches give the
    same router loss on any number of ranks.
    """
    assert isinstance(model, FSDPModule)  # `build_model` has sharded it
    # At stage 0 a reduce-scatter over the one rank of its shard group sends nothing; FSDP2 then adds up gradients in
    # place, without an unreduced copy. Replicas are reduced once a step, below.
    reduce_scatters_each_microbatch = settings.zero_stage != 1 and not settings.defer_grad_sync
    step_loss = models.StepLoss(model, settings.gradient_accumulation_steps)  # sums over the microbatches, for the log
    for microbatch in range(settings.gradient_accumulation_steps):
        last = microbatch == settings.gradient_accumulation_steps - 1
        model.set_requires_gradient_sync(last or reduce_scatters_each_microbatch)
        # All-reduce among replicas. This comes after set_requires_gradient_sync, which sets it too.
        model.set_requires_all_reduce(last)
        # Below stage 3 the parameters stay gathered from the first microbatch to the last: one all-gather a step. After
        # the last they are always resharded: the optimizer updates the shards, and a gathered copy would be stale.
        model.set_reshard_after_backward(last or reshards_in_each_pass(settings))
        batch = next(batches)
        job.enter_phase("forward")
        # Microbatches with few trained tokens count less: their mean losses, divided, sum up to the mean of all tokens.
        divisor = batch.pop("loss_divisor", settings.gradient_accumulation_steps)
        # Its value is the cross entropy; its backward adds the gradients of registered terms (harness/model/loss.py).
        cross_entropy = model(**batch, use_cache=False).loss
        objective = step_loss.add_microbatch(cross_entropy, divisor)  # divided, plus the router loss
        job.enter_phase("backward")
        objective.backward()
    job.enter_phase("optimizer")
    # The gradients are means over the ranks by now: FSDP2 divides where it reduces. Our optimizers clip as they update,
    # by a factor that is set here; the gradients of others are clipped here. The host waits for the norm only if the
    # optimizer cannot skip by a tensor, such as adamw8bit.
    norm = models.clip_grad_norm(optimizer, settings.max_grad_norm)
    skip = models.decide_skip(norm)
    models.step_or_skip(optimizer, skip)
    optimizer.zero_grad()
    if settings.fp8_recipe == "tensorwise":  # set with --precision fp8 only
        models.compute_float8_scales(model)  # one all-reduce for the scales of all layers
    return report.StepResult(
        loss=step_loss.loss,
        grad_norm=norm,
        skipped=skip,
        terms=step_loss.terms,
        router_loss=step_loss.router_loss,
        expert_load=step_loss.expert_load,
    )


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    settings: flags.Settings, model: nn.Module, eval_data: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], int]:
    """Return (losses, number of trained eval tokens). `eval_data` has the sequences of each source. `eval_loss` is the
    mean over all these tokens; with several sources each also has its own mean, `eval_loss/NAME`."""
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
    # with context parallelism the N ranks that share a sequence count its tokens and its loss N times
    return data.mean_losses(eval_data, totals / settings.context_parallel)


# ---- A run -----------------------------------------------------------------------------------------------------------


def prepare(args: flags.Args, device: torch.device) -> loop.Run:
    """Build all that a run trains with, load the checkpoint, and print the header that describes the run."""
    mesh = build_mesh(args, device)
    peak_tflops = args.peak_tflops or utils.get_gpu_peak_tflops()
    opened = loop.open_training(args, mesh, device, peak_tflops)  # the run's folder, data and checkpoint
    settings = opened.settings
    model = build_model(settings, opened.config, mesh, device, read_weights=not opened.resumed_checkpoint)
    optimizer = models.build_optimizer(settings, model)  # its states are those of the shards
    scheduler = models.build_scheduler(settings, optimizer)
    tracker = utils.PerformanceTracker(settings.perf_warmup_steps, dist.get_world_size(), peak_tflops)
    train_state = state.TrainState(model, optimizer, scheduler, tracker=tracker)
    # load the checkpoint, print the header, open the log
    return loop.ready_run(opened, train_state, utils.get_flops_by_length)


def train(run: loop.Run, stop: job.StopRequest) -> None:
    """Run the training loop. `stop` is set by a signal to any rank, which asks to save and exit. All ranks check it
    before the same forward pass, which then raises job.Stopped; the last complete step is what is saved."""
    settings, model = run.settings, run.state.model
    loop.finish_interrupted_evaluation(run, stop, evaluate)
    run.state.tracker.start_interval()  # restart the clock: setting up is no part of a step
    while run.state.step < settings.num_steps:
        with run.log.timed_step() as due:  # a log line, an evaluation, a checkpoint
            with stop.before_each_forward(model), run.state.step_undone_if_stopped():
                result = train_step(settings, model, run.state.optimizer, run.batches)
            tokens, document_lengths = run.batches.complete_step()  # tokens of all ranks, documents of this one
            run.log.keep(result, document_lengths)
            run.state.advance(run.dataset.record, tokens)  # steps, samples (by the record), tokens, the schedule
        stop.can_save = True  # from here on a SIGTERM is answered by a checkpoint
        if due.log or due.save:  # before a save the state is checked; an evaluation always has a log line
            loop.log_and_evaluate(run, due, stop, evaluate)
        if due.save:
            run.checkpoints.save(run.state, wait=due.last)
            if not due.last:
                stop.raise_if_stopping()  # a signal during the save: one more step would have to be saved too
    run.checkpoints.wait()


def train_or_evaluate(args: flags.Args, device: torch.device, stop: job.StopRequest) -> int:
    """Train, or with --show-samples or --num-steps 0 do what needs no training. Returns the exit code."""
    if args.show_samples:
        return loop.show_samples(args)
    if args.num_steps == 0:
        return loop.evaluate_only(args, device, RECIPE)
    run = prepare(args, device)
    stop.resumed_step = run.state.step  # the message after Ctrl-C counts lost steps since this one
    # For a GPU another process plans this run meanwhile, and the run's last line has what it predicted.
    planning = plan.planning_in_background(run.settings, device, run.settings.num_steps - run.state.step)
    with run.log, run.checkpoints, planning as plan_process:
        try:
            train(run, stop)
            return loop.finish(run, stop, plan_process)
        except job.Stopped:
            return loop.save_and_stop(run, stop)


# The functions that plans and harness/loop.py call; harness/ imports neither this file nor utils.py.
RECIPE = plan.Recipe(
    build_mesh=build_mesh,
    build_model=build_model,
    train_step=train_step,
    evaluate=evaluate,
    estimate_mfu=utils.estimate_mfu,
    get_flops_by_length=utils.get_flops_by_length,
)


def main(args: flags.Args) -> None:
    """Do what the flags request. `World` ends the process with `exit_code`, or prints a user's error as one line."""
    with job.World(args, memory_advice=lambda: plan.memory_advice(args)) as world:
        if args.plan:
            plan.print_plan(args, RECIPE)
        elif args.compare:
            report.write_comparison(args)
        else:
            device = world.meet()  # rendezvous: all ranks have started
            world.exit_code = train_or_evaluate(args, device, world.stop)


if __name__ == "__main__":
    main(ARGS)
