"""Train a causal language model with FSDP2: one `fully_shard` per decoder layer, on one device or a thousand.

    python train_fsdp.py --demo
    torchrun --nproc_per_node=4 train_fsdp.py --model smollm3-3b --zero-stage 2
    accelerate launch --num_processes=4 train_fsdp.py --model smollm3-3b

Where to change what:

    a flag or its default              harness/flags/settings.py
    when a step logs, evaluates, saves harness/job/schedule.py
    a corpus format                    harness/data/readers/
    the order and mixture of the data  harness/data/mixture.py, harness/data/sample_order.py
    an optimizer, groups, clipping     harness/model/optimizers/, harness/model/optimization.py
    what a checkpoint holds            harness/state/train_state.py
    a figure and where it is shown     harness/report/figure_list.py, harness/report/figures.py

run(), near the end, calls prepare(), train() and finish(): the table of contents. utils.py has the data, the FLOP and
MFU math and the clock. The rest is in harness/, one concern a file.
"""

from harness.base import console, versions

if __name__ == "__main__":
    console.never_fail()
versions.refuse_old_python()  # which could not read the next import

from harness import job

if __name__ == "__main__":  # before the heavy imports, which take seconds, warn, and can be interrupted too
    SETTINGS = job.begin()

import contextlib
import dataclasses
import functools
import gc
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import utils
from harness.base import saved, torch_internals
from harness.base.errors import UserError
from harness.base.ranks import on_main_rank
from harness.data.batches import training_batches
from harness.data.corpora import first_words, needs_tokenizer
from harness.data.corpus_files import check_sources_exist
from harness.data.data_record import read_record
from harness.data.loading import as_recorded, evaluates_own_data, load_data, mask_conversations
from harness.data.show_samples import describe_step
from harness.data.training_data import TrainingData
from harness.flags.commands import as_flags
from harness.flags.rules import contradiction
from harness.flags.settings import Settings
from harness.job import (
    STOPPED,
    Due,
    World,
    check_machine,
    check_writable,
    columns,
    command,
    count_steps,
    enter_phase,
    limit_waiting,
    progress,
    say,
    say_story,
    take_folder,
)
from harness.job import due as due_at
from harness.model.attention import choose_attention, skip_packing_detection
from harness.model.averages import WeightAverage
from harness.model.collectives import alias_reduce_scatter_buffers, make_replicas_equal
from harness.model.configs import choose_sequence_length, find_source, load_config
from harness.model.finite import loss_and_norm, loss_without_data
from harness.model.float8 import check_float8, fp8_converter
from harness.model.flops import known_document_flops, known_flops
from harness.model.loss import IGNORE_INDEX, check_labels, choose_loss, full_loss, fuse_loss
from harness.model.optimization import build_optimizer, clip_grad_norm, parameter_bytes
from harness.model.precision import choose_precision
from harness.model.routing import watch_routers
from harness.model.sampling import evaluating, sample
from harness.model.skipping import RecentNorms, decide_skip, step_or_skip
from harness.model.tokenizer import load_tokenizer, read_prompts
from harness.model.verify import verify_sharding
from harness.model.weights import PretrainedWeights, count_parameters, decoder_layers, materialize, on_meta
from harness.plan import own_plan, planning
from harness.plan.fitting import memory_savers
from harness.report import trackers
from harness.report.figures import check_gates, check_that_figures_will_exist, figures_of_all_ranks
from harness.report.header import describe_setup
from harness.report.log import Report, write_page
from harness.report.not_finite import NotFinite, broken_update, find_divergence, first_not_finite, give_up
from harness.report.profiling import Profiler, dump_memory, record_memory
from harness.report.prometheus import Endpoint
from harness.report.run_record import describe_origin, record_start
from harness.report.skipped_steps import StepResult, count_skipped, read_results, read_routing
from harness.report.slow_ranks import SlowRanks
from harness.report.summary import (
    describe_stories,
    finish_metrics,
    next_commands,
    only_json_on_stdout,
    say_evaluation,
    summarize,
)
from harness.report.waiting import Waiting
from harness.state.export import export, step_of_export
from harness.state.find import find_checkpoint, find_recorded_data
from harness.state.identity import (
    check_has_average,
    check_resume_compatible,
    check_same_corpus,
    check_sources,
    describe_identity,
    keep_global_batch,
)
from harness.state.store import Checkpoints, remove_leftovers
from harness.state.train_state import TrainState

# ---- Model -----------------------------------------------------------------------------------------------------------


def resolve(settings: Settings, config, manifest: dict | None = None) -> Settings:
    """What the flags left open, decided once: from here on the settings are what the run does and what it records.

    `manifest` is that of the checkpoint that the run goes on from, if there is one.
    """
    asked, settings = settings, choose_precision(settings, manifest)
    if settings.compile is None:
        settings = dataclasses.replace(settings, compile=torch.cuda.is_available() or settings.plan)
    if settings.activation_memory_budget is not None and not settings.compile:
        raise UserError("--activation-memory-budget: needs --compile")
    settings = dataclasses.replace(settings, sequence_length=choose_sequence_length(settings, config))
    settings = dataclasses.replace(settings, document_mask=bool(settings.document_mask))
    attention, fused_loss = choose_attention(settings, config), choose_loss(settings.fused_loss, config)
    settings = dataclasses.replace(settings, attention=attention, fused_loss=fused_loss)
    check_float8(settings)
    if settings.num_workers is None:  # cached windows take no work, and a process more takes a core that computes
        workers = 1 if torch.cuda.is_available() or settings.streaming else 0
        settings = dataclasses.replace(settings, num_workers=workers)
    if settings.batch_size == "auto" and not settings.plan:  # a plan looks for it itself
        batch_size = on_main_rank(lambda: own_plan.choose_batch_size(settings))
        settings = dataclasses.replace(settings, batch_size=batch_size)
    if manifest:
        settings = keep_global_batch(settings, manifest)
    if not (settings.plan or settings.measure):
        settings = count_steps(settings, manifest)
    decided = {name: getattr(settings, name) for name in ("precision", "fp8_recipe", "fp8_emulate", "num_steps")}
    problem = contradiction(dataclasses.replace(asked, **decided))
    if problem:
        raise UserError(problem)
    return settings


def build_mesh(settings: Settings, device: torch.device) -> DeviceMesh:
    """(shard,) or, for HSDP and stage 0, (replicate, shard)."""
    world = dist.get_world_size()
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    if world % replicas:
        raise UserError(f"--dp-replicate-size {replicas}: does not divide the world of {world} ranks")
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    limit_waiting(*mesh.get_all_groups())
    return mesh


def reshards_early(settings: Settings) -> bool:
    """Whether parameters are resharded after each forward and backward pass: at stage 3. Where one rank alone is the
    shard group they are not, as FSDP2 would cast and copy them all again, unless the shard is on the host."""
    alone = dist.get_world_size() == settings.dp_replicate_size
    return settings.zero_stage == 3 and (settings.cpu_offload or not alone)


def build_model(settings: Settings, config, mesh: DeviceMesh, read_weights: bool = True) -> nn.Module:
    """Builds the model sharded: on the meta device first, then one decoder layer after the other is materialized and
    sharded. The optimizer is made after it: made before, it would hold whole parameters, and states of their size.

    No rank ever holds more than one whole layer beside its shards (and, for a moment, embedding and head). Every rank
    draws the same random numbers in the same order, so the weights do not depend on world size or sharding; replicas
    are made equal even where their GPUs draw others.
    """
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    dtype = torch.bfloat16 if settings.precision == "bf16-pure" else torch.float32
    model = on_meta(config, settings.attention, dtype)
    skip_packing_detection(model, settings.model, settings.document_mask)
    if settings.fused_loss:
        fuse_loss(model, settings.compile)
    else:
        model.loss_function = full_loss
    check_labels(model)
    watch_routers(model, settings.init)
    layers, weights, convert_to_fp8 = decoder_layers(model), None, None
    if settings.init == "pretrained" and read_weights:
        weights = PretrainedWeights(model, layers, find_source(settings.model)[1], dtype)
    if settings.precision == "fp8":
        convert_to_fp8 = fp8_converter(settings.fp8_recipe, settings.fp8_emulate, settings.compile)
    if settings.activation_memory_budget is not None:
        torch_internals.set_activation_memory_budget(settings.activation_memory_budget)

    shard = functools.partial(fully_shard, mesh=mesh, **sharding_policies(settings, device))
    torch.manual_seed(settings.seed)
    model.train()
    in_layers = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in in_layers]
    materialize(model, outside, device, weights)
    doing = "reading weights" if weights else "making weights"
    for index, layer in progress(enumerate(layers), len(layers), "" if settings.plan else doing):
        materialize(model, list(layer.modules()), device, weights, index)
        transform_layer(settings, layer, convert_to_fp8, shard)
    if settings.compile:
        for module in outside:
            if type(module).__name__.endswith("Norm"):  # the one before the head
                module.forward = torch.compile(module.forward)
    # The root's group (embedding, norm, head) is needed again as soon as the backward begins: it is never resharded
    # in between.
    shard(model, reshard_after_forward=False)
    alias_reduce_scatter_buffers(model, mesh, settings.gradient_accumulation_steps > 1)
    make_replicas_equal(model, mesh)
    torch.manual_seed(settings.seed + dist.get_rank())  # every rank its own dropout
    return model


def transform_layer(settings: Settings, layer: nn.Module, convert_to_fp8, shard) -> None:
    """Does to one decoder layer what the flags ask for. The order matters:

    1. float8 swaps the linears, so it comes before whatever remembers them.
    2. Activation checkpointing comes before compile: the compiler sees what is recomputed and can fuse it.
    3. compile comes before fully_shard: the all-gathers are issued around the compiled region and do not break it.
    4. fully_shard comes last. It replaces the parameters by shards, which the optimizer gets.
    """
    if convert_to_fp8:
        convert_to_fp8(layer)
    if settings.activation_checkpointing == "full":
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    elif settings.activation_checkpointing == "selective":
        selective = functools.partial(checkpoint, use_reentrant=False, context_fn=selective_contexts)
        layer.forward = functools.partial(selective, layer.forward)
    if settings.compile:
        layer.forward = torch.compile(layer.forward)
    shard(layer, reshard_after_forward=reshards_early(settings))


def sharding_policies(settings: Settings, device: torch.device) -> dict[str, Any]:
    """The mixed precision and the offloading of each `fully_shard`."""
    if settings.precision in ("bf16", "fp8"):
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        precision = MixedPrecisionPolicy()  # everything in the parameters' own dtype
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": offload}


def selective_contexts():
    """Keep what is expensive to compute again, the results of matmuls and attention; recompute everything else. The
    experts' grouped products too: they have a row for each expert that a token is sent to, so for their FLOPs they take
    several times the memory of the other matmuls."""

    def policy(context, op, *args, **kwargs):
        expensive = re.search(
            r"(?<!grouped_)mm\.|attention|attn", str(op)
        )  # aten.addmm.default, ..._flash_attention.default
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ---- Optimizer -------------------------------------------------------------------------------------------------------


def build_scheduler(settings: Settings, optimizer: torch.optim.Optimizer):
    """The schedule of transformers by that name; without --decay-steps warmup_stable_decay decays in the last fifth."""
    options = None
    if settings.lr_scheduler == "cosine_with_min_lr":
        options = {"min_lr_rate": 0.1}
    elif settings.lr_scheduler == "warmup_stable_decay":
        decay_steps = max(1, settings.num_steps // 5) if settings.decay_steps is None else settings.decay_steps
        options = {"num_decay_steps": decay_steps, "decay_type": settings.decay_shape}
    return transformers.get_scheduler(
        settings.lr_scheduler,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.num_steps,
        scheduler_specific_kwargs=options,
    )


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def held_out_batches(settings: Settings, dataset, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of the held-out windows. Each window is taken once over all ranks, and every rank gets the same
    number of batches: in the last one, labels that are left over are IGNORE_INDEX."""
    per_round = settings.batch_size * dist.get_world_size()
    windows = len(dataset)
    if settings.eval_steps:
        windows = min(windows, settings.eval_steps * per_round)
    collate = utils.create_collate_fn(dataset.end_of_text, shift_labels=False)
    for number in range(math.ceil(windows / per_round)):
        first = number * per_round + dist.get_rank() * settings.batch_size
        indices = range(first, first + settings.batch_size)
        batch = collate([dataset[index % windows] for index in indices])
        left_over = [index >= windows for index in indices]
        batch["labels"][left_over] = IGNORE_INDEX
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def evaluate(
    settings: Settings, model: nn.Module, held_out: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], int]:
    """(mean loss over every token of the held-out windows as `eval_loss`, of several sources also that of each as
    `eval_loss/NAME`; how many tokens these are)."""
    totals = torch.zeros(len(held_out), 2, dtype=torch.float64, device=device)  # of each source: summed loss, tokens
    enter_phase("evaluation")
    with evaluating(model):
        for total, windows in zip(totals, held_out.values(), strict=True):
            for batch in held_out_batches(settings, windows, device):
                enter_phase("evaluation")
                tokens = (batch["labels"] != IGNORE_INDEX).sum()
                loss = model(**batch, use_cache=False).loss
                total += torch.stack([loss.double() * tokens, tokens.double()])
    dist.all_reduce(totals)
    for name, (_, tokens_of_source) in zip(held_out, totals.tolist(), strict=True):
        if not tokens_of_source:
            problem = f"the held-out windows of {name} have no trained token"
            raise UserError(f"--eval-interval: {problem}; use a longer --sequence-length or other data", exit_code=1)
    summed_loss, tokens = totals.sum(0).tolist()
    losses = {"eval_loss": summed_loss / tokens}
    if len(held_out) > 1:
        for name, (summed_loss, tokens_of_source) in zip(held_out, totals.tolist(), strict=True):
            losses[f"eval_loss/{name}"] = summed_loss / tokens_of_source
    return losses, int(tokens)


def evaluate_with_average(
    settings: Settings, state: TrainState, held_out: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], int]:
    """As `evaluate`; with --ema also the losses of the averaged weights, `eval_loss_ema` and `eval_loss_ema/NAME`."""
    losses, tokens = evaluate(settings, state.model, held_out, device)
    if state.average:
        with state.average.as_weights():
            of_average, _ = evaluate(settings, state.model, held_out, device)
        for name, loss in of_average.items():
            losses[name.replace("eval_loss", "eval_loss_ema", 1)] = loss
    return losses, tokens


# ---- Training --------------------------------------------------------------------------------------------------------


def train_step(settings, model, optimizer, batches, tracker, recent_norms: RecentNorms | None = None) -> StepResult:
    """One optimizer step. Returns this rank's mean loss, the global gradient norm, and 1 where that made the optimizer
    skip the step, else 0: all still on the device. By `recent_norms`, which takes the norm, spikes are skipped too.

    The loss counts every trained token of the global batch alike. The router loss of a mixture of experts is that of
    each microbatch by itself, and every microbatch of every rank counts alike: it is the same on any number of ranks
    where the microbatches are the same. It is added, times its coefficient, to what is differentiated, not to the loss.
    """
    reduces_every_microbatch = settings.zero_stage != 1 and not settings.defer_grad_sync
    total, routing, router_total, expert_load = 0.0, getattr(model, "routing", None), None, None
    if routing:
        router_total, expert_load = 0.0, 0.0
    for microbatch in range(settings.gradient_accumulation_steps):
        last = microbatch == settings.gradient_accumulation_steps - 1
        model.set_requires_gradient_sync(last or reduces_every_microbatch)
        # Replicas are reduced once a step. This comes after set_requires_gradient_sync, which sets it too.
        model.set_requires_all_reduce(last)
        # Below stage 3 the parameters stay gathered from the first microbatch to the last: one all-gather a step. After
        # the last they are always resharded: the optimizer updates the shards, and a gathered copy would be stale.
        model.set_reshard_after_backward(last or reshards_early(settings))
        enter_phase("data")
        with tracker.data_wait():
            batch = next(batches)
        tracker.note_documents(batch.pop("squared_lengths", 0))
        enter_phase("forward")
        divisor = batch.pop("loss_divisor", settings.gradient_accumulation_steps)  # see training_batches
        loss = model(**batch, use_cache=False).loss / divisor
        total = total + loss.detach()
        if routing:
            router_loss, assignments = routing.read()
            router_loss = router_loss / settings.gradient_accumulation_steps
            loss = loss + routing.coefficient * router_loss
            router_total, expert_load = router_total + router_loss.detach(), expert_load + assignments
        enter_phase("backward")
        loss.backward()
    enter_phase("optimizer")
    norm = clip_grad_norm(optimizer, settings.max_grad_norm)
    skip = decide_skip(norm, recent_norms)
    step_or_skip(optimizer, skip)
    optimizer.zero_grad()
    if settings.fp8_recipe == "tensorwise":  # set with --precision fp8 only
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for the scales of all layers
    return StepResult(total, norm, skip, router_total, expert_load)


# ---- Preparation -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Job:
    """A run that is ready for its first step."""

    settings: Settings  # resolved
    device: torch.device
    folder: pathlib.Path
    endpoint: Endpoint
    tokenizer: Any
    prompts: list[str]
    beginning: str  # of a story, for the summary: the first words of the text
    data: TrainingData
    held_out: dict[str, Any] | None  # windows of each source by its name; None without evaluation
    identity: dict  # what a resumed run must have in common with it
    flops_per_token: int
    state: TrainState
    resumed: pathlib.Path | None  # the checkpoint that it goes on from
    first_step: int
    changed: str  # which flags are not those of that checkpoint, in words

    def sample(self) -> list[dict[str, str]]:
        """A continuation of each prompt."""
        return [sample(self.settings, text, self.state.model, self.tokenizer, self.device) for text in self.prompts]

    def first_prompt(self) -> str:
        return self.prompts[0] if self.prompts else self.beginning


def load_model_files(settings: Settings) -> tuple:
    """(the model's config, its tokenizer, the prompts to write stories from); the weights come later."""
    config = on_main_rank(lambda: load_config(settings.model))
    tokenizer = on_main_rank(lambda: load_tokenizer(settings, config, needs_tokenizer(settings)))
    prompts = on_main_rank(lambda: read_prompts(settings, config, tokenizer))
    return config, tokenizer, prompts


def prepare(settings: Settings, device: torch.device) -> Job:
    """Everything before the first step, in its order, up to the header."""
    on_main_rank(lambda: trackers.choose_trackers(settings.log_with))
    folder = take_folder(settings)
    peak = settings.peak_tflops or utils.get_gpu_peak_tflops()
    check_that_figures_will_exist(settings, device, peak)
    endpoint = Endpoint(settings, folder)
    on_main_rank(endpoint.open)
    if settings.memory_snapshot:
        record_memory(folder)
    on_main_rank(lambda: check_sources_exist(settings.sources()))
    config, tokenizer, prompts = load_model_files(settings)
    mesh = build_mesh(settings, device)
    checkpoint, manifest = find_checkpoint(settings.resume, folder)
    settings = resolve(on_main_rank(lambda: mask_conversations(settings, manifest)), config, manifest)
    parameters, sizes = count_parameters(config), parameter_bytes(settings, config)
    resumed_step = manifest["step"] if manifest else 0
    settings = check_machine(settings, parameters, sizes, mesh, device, folder, resumed_step)
    data, held_out = load_data(settings, tokenizer, config, utils.get_dataset, manifest)
    beginning = on_main_rank(lambda: first_words(held_out or data.sources, tokenizer))
    if settings.demo and settings.dataset != "demo" and not prompts and beginning:
        prompts = [beginning]  # the demo's prompt is for the demo's stories
    identity = describe_identity(settings, config, tokenizer, data)
    changed = check_resume_compatible(settings, identity, manifest) if manifest else ""

    model = build_model(settings, config, mesh, read_weights=not checkpoint)
    optimizer = build_optimizer(settings, model)
    scheduler = build_scheduler(settings, optimizer)
    average = WeightAverage(model, settings.ema) if settings.ema else None
    averages = average.tensors if average else None
    verified = verify_sharding(settings, model, optimizer, mesh, sizes.states > 0, averages)
    flops_per_token, flops_in_words = known_flops(model, settings.sequence_length, utils.get_model_flops_per_token)
    if settings.min_mfu and not flops_per_token:
        raise UserError(f"--min-mfu: {flops_in_words}")
    tracker = utils.PerformanceTracker(settings.perf_warmup_steps, dist.get_world_size(), peak or 0)
    if settings.document_mask and flops_per_token:
        tracker.document_flops = known_document_flops(model, settings.sequence_length, utils.get_model_flops_per_token)
    state = TrainState(model, optimizer, scheduler, average=average, tracker=tracker)
    if checkpoint:
        origin = on_main_rank(lambda: saved.find_origin(folder, checkpoint, manifest))
        state.load(checkpoint, manifest, *origin)
    refuse_broken(settings, state, checkpoint)
    say(describe_setup(settings, model, optimizer, mesh, data, flops_in_words, peak, verified, average, manifest))
    if checkpoint:
        say(columns({"resumed": f"{checkpoint} at step {state.step:,}"}))
        if changed:
            say(columns({"changed": changed}))
    if state.branched_from:
        say(columns({"branched": describe_origin(state.branched_from)}))
    return Job(
        settings=settings,
        device=device,
        folder=folder,
        endpoint=endpoint,
        tokenizer=tokenizer,
        prompts=prompts,
        beginning=beginning,
        data=data,
        held_out=held_out,
        identity=identity,
        flops_per_token=flops_per_token,
        state=state,
        resumed=checkpoint,
        first_step=state.step + 1,
        changed=changed,
    )


def refuse_broken(settings: Settings, state: TrainState, checkpoint: pathlib.Path | None) -> None:
    """A UserError where the weights that a run begins with, or what is loaded with them, are good for nothing."""
    problem = state.what_is_broken()
    if problem and checkpoint:
        advice = "remove that folder, and --resume auto goes on from the one before"
        raise UserError(f"--resume {checkpoint}: it {problem}; {advice}", exit_code=1)
    if problem:
        raise UserError(f"--model {settings.model}: it {problem}; try other weights or --precision fp32", exit_code=1)


# ---- Loop ------------------------------------------------------------------------------------------------------------


def freeze_objects() -> None:
    """Lets later garbage collections skip all objects that exist now."""
    gc.collect()
    gc.freeze()


def keep_last(batches: Iterator[dict], kept: list[dict]) -> Iterator[dict]:
    """Hands the batches on; `kept` holds the last one, from which a step takes what the model does not get."""
    for batch in batches:
        kept[:] = [batch]
        yield batch


def train(job: Job, reporter: Report, saver: Checkpoints, stop) -> tuple[dict, bool]:
    """The loop. Returns the figures of the last log line and whether a signal ended it before the last step."""
    settings, state, tracker = job.settings, job.state, job.state.tracker
    last_batch: list[dict] = []
    batches = keep_last(training_batches(settings, job.data, state, job.device), last_batch)
    profiler, waiting, slow_ranks = Profiler(job.folder, state), Waiting(state.model), SlowRanks(job.device.type)
    recent_norms = RecentNorms(settings.skip_spikes, state.recent_norms) if settings.skip_spikes else None
    results, metrics, stopped, good_batch = [], {}, False, None
    while state.step < settings.num_steps and not stopped:
        due = due_at(settings, state.step + 1, job.first_step)
        enter_phase("data", due.step)
        learning_rate = float(state.scheduler.get_last_lr()[0])
        with profiler.step(due), waiting.step(due.log):
            result = train_step(settings, state.model, state.optimizer, batches, tracker, recent_norms)
            results.append(result)
            if state.average:
                state.average.update(result.skipped)
            state.scheduler.step()
            samples = job.data.record.samples_of_step(due.step)
            tokens, _ = job.data.count_tokens(samples)
            state.count(len(samples), tokens)
        reporter.count_step()
        if due.first:
            with tracker.excluded():
                freeze_objects()  # the compiler has made more than there was before
        speed = {} if due.profiled else tracker.step(tokens, job.flops_per_token, synchronize=due.log)
        stop.can_save = True
        stopped = stop.agreed_by_all_ranks() and not due.last
        save = due.save or stopped
        if due.log or save:
            metrics, problem = read_metrics(job, reporter, results, learning_rate)
            if "loss" in metrics or not good_batch:  # that of a skipped step may be a bad one
                good_batch = last_batch[0]
            if (save or due.last) and not problem:
                problem = check_pass(job, good_batch)
            if due.log or problem:
                gc.collect()
                metrics |= figures_of_all_ranks(speed, state, job.device, waiting.take(), slow_ranks)
                metrics |= job.data.figures(state.samples, state.tokens)
                problem = evaluate_and_log(job, reporter, due, metrics, problem)
            if problem:
                saver.finish()
                give_up(job.folder, problem, job.resumed)
        if due.first and not save:
            saver.prepare(state)
        if save:
            enter_phase("save")
            with tracker.excluded():
                saver.save(state, wait=stopped or due.last)
    profiler.finish()
    enter_phase("save")  # the last checkpoint may still be being written
    stop.can_save = False
    saver.finish()
    return metrics, stopped


def read_metrics(
    job: Job, reporter: Report, results: list[StepResult], learning_rate: float
) -> tuple[dict, NotFinite | None]:
    """The figures of the step that was just taken, and what ends the run: what is NaN or infinite in them, or too many
    skipped steps. A skipped step has no loss and no gradient norm.

    `results` are this rank's since the last call, emptied here.
    """
    state, routing, steps = job.state, read_routing(results[-1]), read_results(results)
    skipped, too_many = count_skipped(state, steps, job.settings.max_skipped)
    reporter.note_skipped(skipped)
    metrics = {"step": state.step}
    if not steps[-1].skipped:
        metrics |= {"loss": steps[-1].loss, "grad_norm": steps[-1].grad_norm} | routing  # of this step alone
    metrics |= {"learning_rate": learning_rate, "tokens_seen": state.tokens, "skipped_steps": state.skipped_steps}
    problem = first_not_finite(metrics, [None if step.skipped else step.loss for step in steps])
    if too_many and not problem:
        problem = broken_update(state)
    return metrics, problem or too_many


def check_pass(job: Job, batch: dict) -> NotFinite | None:
    """Why this state must not be saved or called done, None where nothing is wrong: weights and optimizer states are
    finite, and so are the loss and the gradient norm of `batch`, and a loss of the average of the weights."""
    state = job.state
    with state.tracker.excluded():
        problem = broken_update(state)
        if not problem:
            loss, norm = loss_and_norm(state.model, state.optimizer, batch)
            problem = find_divergence(state, job.first_step, loss, norm)
        if state.average and not problem:
            with state.average.as_weights():
                loss = loss_without_data(state.model)
            problem = find_divergence(state, job.first_step, loss, of="the weights' average")
    return problem


def evaluate_and_log(
    job: Job, reporter: Report, due: Due, metrics: dict, problem: NotFinite | None
) -> NotFinite | None:
    """An evaluation where one is due, which adds `eval_loss` to `metrics`, and then a log line. Returns what is NaN or
    infinite: `problem`, or the evaluation's loss."""
    settings, state, stories = job.settings, job.state, []
    if due.evaluate and not problem:
        with state.tracker.excluded():
            losses, _ = evaluate_with_average(settings, state, job.held_out, job.device)
            metrics |= losses
            if not due.last:  # after the last step finish() writes them
                stories = job.sample()
            if due.first_evaluation:
                freeze_objects()  # the compiler has run again, for passes without gradients
        problem = first_not_finite(metrics, [])
    enter_phase("log")
    reporter.log(metrics, state.tracker.get_print_message(metrics), stories)
    if stories:
        say_story(describe_stories(stories))
    return problem


# ---- Endings ---------------------------------------------------------------------------------------------------------


def finish(job: Job, reporter: Report, saver: Checkpoints, planned, metrics: dict) -> int:
    """The last lines, files and gates of a run that took all its steps."""
    settings, state = job.settings, job.state
    metrics |= figures_of_all_ranks(state.tracker.summary(), state, job.device)
    if planned:
        metrics |= own_plan.predicted_figures(planned)
    stories = job.sample()
    reporter.end(metrics, stories)
    say(summarize(metrics, job.folder, state))
    if stories:
        say_story("\n" + describe_stories(stories))
    if settings.memory_snapshot:
        dump_memory(job.folder)
    if settings.export:
        export(settings, state, job.tokenizer)
    say(next_commands(settings, job.folder, job.first_prompt(), reporter.page))
    if saver.failures:
        flag = "--checkpoint-interval" if settings.checkpoint_interval else "--final-checkpoint"
        raise UserError(f"{flag}: {saver.failures} checkpoints could not be saved, see above", 1)
    reporter.check_written()
    on_main_rank(lambda: check_gates(settings, metrics))
    return 0


def leave_early(job: Job, reporter: Report, saver: Checkpoints, stop) -> int:
    """The last lines of a run that a signal ended."""
    reporter.end(None)
    lines = {"stopped": f"by {stop.name or 'a signal to another rank'} after step {job.state.step}"}
    if not saver.failures:
        lines["stopped"] += f", saved in {saver.folder}"
        lines["go on"] = command(job.settings, job.folder)
    if reporter.page:
        lines["report"] = str(reporter.page)
    say(columns(lines))
    return 1 if saver.failures or reporter.failed else STOPPED


def nothing_to_train(job: Job) -> int:
    """A resumed run that had taken all its steps."""
    say(f"done       nothing to train: step {job.state.step:,} of {job.settings.num_steps:,}")
    if dist.get_rank() == 0:
        remove_leftovers(job.folder)
        record_start(job.folder, job.state)
    metrics = on_main_rank(lambda: finish_metrics(job.settings, job.folder, job.state))
    page = write_page(job.folder) if dist.get_rank() == 0 else None
    stories = job.sample()
    if stories:
        say_story(describe_stories(stories))
    if job.settings.export:
        export(job.settings, job.state, job.tokenizer)
    say(next_commands(job.settings, job.folder, job.first_prompt(), page))
    on_main_rank(lambda: check_gates(job.settings, metrics))
    return 0


def show_samples(settings: Settings) -> int:
    """--show-samples: what a step of this run trains on, by the order that the run recorded, if there is one."""
    config, tokenizer, _ = load_model_files(settings)
    recorded = find_recorded_data(settings)
    settings = resolve(on_main_rank(lambda: mask_conversations(settings)), config)
    data, _ = load_data(settings, tokenizer, config, utils.get_dataset, recorded)
    if recorded:
        check_sources(read_record(recorded), data.record)
        data = as_recorded(data, read_record(recorded))
    say(describe_step(data, tokenizer, settings.show_samples))
    return 0


def without_training(settings: Settings, device: torch.device, stdout) -> int:
    """--num-steps 0: loads a checkpoint or pretrained weights, then evaluates, writes stories, and exports."""
    if settings.export:
        on_main_rank(lambda: check_writable("--export", pathlib.Path(settings.export).expanduser()))
    config, tokenizer, prompts = load_model_files(settings)
    mesh = build_mesh(settings, device)
    checkpoint, manifest = find_checkpoint(settings.resume, pathlib.Path())
    settings = resolve(on_main_rank(lambda: mask_conversations(settings)), config)
    if settings.eval_interval:
        own_data = manifest is not None and on_main_rank(lambda: evaluates_own_data(settings, manifest))
        data, held_out = load_data(settings, tokenizer, config, utils.get_dataset, manifest if own_data else None)
        if own_data and settings.dataset != "synthetic":
            check_same_corpus(settings, data.record, manifest)
    if checkpoint:
        check_resume_compatible(settings, describe_identity(settings, config), manifest)
    check_has_average(settings, manifest)
    state = TrainState(build_model(settings, config, mesh, read_weights=not checkpoint))
    if settings.ema:
        state.average = WeightAverage(state.model, settings.ema)
    if checkpoint:
        state.load(checkpoint, manifest)
        say(f"loaded     {checkpoint}, step {manifest['step']:,}")
    refuse_broken(settings, state, checkpoint)
    if settings.eval_interval:
        losses, tokens = evaluate_with_average(settings, state, held_out, device)
        problem = first_not_finite({"step": state.step} | losses, [])
        if problem:
            raise UserError(f"--eval-interval: the {problem.words} by {checkpoint or settings.model}", exit_code=1)
        say_evaluation(settings, held_out, losses, tokens, manifest["step"] if manifest else None, stdout)
    for prompt in prompts:
        say_story("\n" + describe_stories([sample(settings, prompt, state.model, tokenizer, device)]))
    if settings.export:
        export(settings, state, tokenizer)
    return 0


# ---- A run -----------------------------------------------------------------------------------------------------------


def run(settings: Settings, device: torch.device, stop) -> int:
    """One run, from its flags to its last line; returns the exit code."""
    if settings.show_samples:
        return show_samples(settings)
    if settings.num_steps == 0:
        with only_json_on_stdout(settings) as stdout:
            return without_training(settings, device, stdout)
    exported = on_main_rank(lambda: step_of_export(settings))
    if exported:
        say(f"done       nothing to do: {settings.export} holds this run after step {exported:,}")
        return 0
    job = prepare(settings, device)
    if job.state.step >= job.settings.num_steps:
        return nothing_to_train(job)
    with contextlib.ExitStack() as cleanup:
        reporter = Report(job.settings, job.endpoint, job.folder, job.state, job.data.record, job.changed)
        cleanup.callback(reporter.close)
        saver = Checkpoints(job.settings, job.folder, job.identity, device, reporter.sync)
        planned = cleanup.enter_context(own_plan.planning_in_background(job.settings, device))
        freeze_objects()
        gc.disable()  # cycles are collected at log lines: in the middle of a step one rank stops and all wait for it
        cleanup.callback(gc.enable)
        metrics, stopped = train(job, reporter, saver, stop)
        if stopped:
            return leave_early(job, reporter, saver, stop)
        return finish(job, reporter, saver, planned, metrics)


RECIPE = planning.Recipe(
    resolve=resolve,
    build_mesh=build_mesh,
    build_model=build_model,
    build_optimizer=build_optimizer,
    train_step=train_step,
    make_tracker=utils.PerformanceTracker,
    estimate_mfu=utils.estimate_mfu,
    flops_per_token=utils.get_model_flops_per_token,
)


def memory_advice(settings: Settings) -> str:
    """Which flags make room on a device that has no memory left."""
    return f"Try {', '.join(as_flags(changes) for changes in memory_savers(settings)[:3])}."


def main(settings: Settings) -> None:
    with World(settings, lambda: memory_advice(settings)) as world:
        if settings.plan:
            own_plan.end_with_run()
            planning.plan(settings, RECIPE)
        elif settings.measure:
            from harness.plan.measure import measure  # loads what only a plan needs

            measure(settings, RECIPE, world)
        else:
            device = world.meet()
            world.exit_code = run(settings, device, world.stop)


if __name__ == "__main__":
    main(SETTINGS)
