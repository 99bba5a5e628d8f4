"""Train a causal language model with FSDP2: one `fully_shard` per decoder layer, on one device or a thousand.

    python train_fsdp.py --demo
    torchrun --nproc_per_node=4 train_fsdp.py --model smollm3-3b --zero-stage 2
    accelerate launch --num_processes=4 train_fsdp.py --model smollm3-3b

Read it from the top: the model and how it is sharded, a step, an evaluation, what a run prepares, its loop, its end;
run() and main() put them in order. utils.py has the FLOP and MFU math and the clock. Everything else is behind the
doors of harness/, whose `__init__.py` files list what there is:

    base     errors, text, GPUs                        models   weights, loss, optimizers (harness/model)
    flags    every flag, and the rules between them    state    checkpoints, resume, export
    job      processes, signals, the run's folder      report   log lines, trackers, the HTML page, gates
    data     from files to batches                     plan     what a configuration will need and give
"""

from harness import base

if __name__ == "__main__":
    base.never_fail()  # a closed stdout ends no run
base.refuse_old_python()  # an older one cannot read the next import

from harness import flags

if __name__ == "__main__":
    SETTINGS = flags.parse_args()  # a mistake in them is answered at once, with no package installed too
    base.refuse_missing_packages()

from harness import job

if __name__ == "__main__":
    job.begin(SETTINGS)  # before the heavy imports, which take seconds, warn, and can be interrupted too

import contextlib
import dataclasses
import functools
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
from harness import data, plan, report, resolving, state
from harness import model as models

# ---- Model -----------------------------------------------------------------------------------------------------------
#
# ZeRO stage   gradients are reduced    parameters are gathered       shard group
# 0            once a step              never                         one rank: every rank is a replica
# 1            once a step              once a step                   all ranks, or those of one replica (HSDP)
# 2            in each microbatch       once a step                   as 1
# 3            in each microbatch       in each forward and backward  as 1
# Replicas reduce among each other once a step.


def build_mesh(settings: flags.Settings, device: torch.device) -> DeviceMesh:
    """(shard,) or, for HSDP and stage 0, (replicate, shard)."""
    world = dist.get_world_size()
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    if world % replicas:
        raise base.UserError(f"--dp-replicate-size {replicas}: does not divide the world of {world} ranks")
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    job.limit_waiting(*mesh.get_all_groups())
    return mesh


def reshards_early(settings: flags.Resolved) -> bool:
    """Whether parameters are resharded after each forward and backward pass: at stage 3. In a shard group of one rank
    that would save nothing and cost a cast and a copy, unless the shard is on the host."""
    alone = dist.get_world_size() == settings.dp_replicate_size
    return settings.zero_stage == 3 and (settings.cpu_offload or not alone)


def build_model(settings: flags.Resolved, config, mesh: DeviceMesh, read_weights: bool = True) -> nn.Module:
    """Builds the model sharded: on the meta device first, then one decoder layer after the other is materialized and
    sharded. The optimizer is made after it: made before, it would hold whole parameters, and states of their size.

    No rank ever holds more than one whole layer beside its shards (and, for a moment, embedding and head). Every rank
    draws the same random numbers in the same order, so the weights do not depend on world size or sharding.
    """
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    dtype = torch.bfloat16 if settings.precision == "bf16-pure" else torch.float32
    model = models.on_meta(config, settings.attention, dtype)
    models.adapt_forward(model, settings)
    layers, weights, convert_to_fp8 = models.decoder_layers(model), None, None
    if settings.init == "pretrained" and read_weights:
        weights = models.PretrainedWeights(model, layers, models.find_source(settings.model)[1], dtype)
    if settings.precision == "fp8":
        convert_to_fp8 = models.fp8_converter(layers, settings.fp8_recipe, settings.fp8_emulate, settings.compile)

    shard = functools.partial(fully_shard, mesh=mesh, **sharding_policies(settings, device))
    torch.manual_seed(settings.seed)
    model.train()
    in_layers = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in in_layers]
    models.materialize(model, outside, device, weights)
    doing = "reading weights" if weights else "making weights"
    for index, layer in job.progress(enumerate(layers), len(layers), "" if settings.plan else doing):
        models.materialize(model, list(layer.modules()), device, weights, index)
        transform_layer(settings, layer, convert_to_fp8, shard)
    if settings.compile:
        for module in outside:
            if type(module).__name__.endswith("Norm"):  # the one before the head
                module.forward = torch.compile(module.forward)
    # The root's group (embedding, norm, head) is needed again as soon as the backward begins: it is never resharded
    # in between.
    shard(model, reshard_after_forward=False)
    models.finish_sharding(model, mesh, accumulates=settings.gradient_accumulation_steps > 1)
    base.give_back_freed_memory()  # whole layers
    torch.manual_seed(settings.seed + dist.get_rank())  # every rank its own dropout
    return model


def transform_layer(settings: flags.Resolved, layer: nn.Module, convert_to_fp8, shard) -> None:
    """Does to one decoder layer what the flags ask for. The order matters:

    1. float8 swaps the linears, so it comes before whatever wraps them.
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


def sharding_policies(settings: flags.Resolved, device: torch.device) -> dict[str, Any]:
    """The mixed precision and the offloading of each `fully_shard`."""
    if settings.precision in ("bf16", "fp8"):
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        precision = MixedPrecisionPolicy()  # everything in the parameters' own dtype
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": offload}


def selective_contexts():
    """Keep what is expensive to compute again, the results of matmuls and attention; recompute everything else. Grouped
    matmuls of experts are recomputed too: they have a row for each expert that a token is sent to, so for their FLOPs
    they take several times the memory of the other matmuls."""

    def policy(context, op, *args, **kwargs):
        # str(op) is a name like aten.addmm.default or ..._flash_attention.default
        expensive = re.search(r"(?<!grouped_)mm\.|attention|attn", str(op))
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build_scheduler(settings: flags.Resolved, optimizer: torch.optim.Optimizer):
    """The learning rate's schedule, one of transformers'."""
    schedule = flags.SCHEDULES[settings.lr_scheduler]
    return transformers.get_scheduler(
        schedule.transformers_name,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.num_steps,
        scheduler_specific_kwargs=schedule.options(settings),
    )


# ---- Step ------------------------------------------------------------------------------------------------------------


def train_step(settings, model, optimizer, batches, tracker) -> report.StepResult:
    """One optimizer step. Returns this rank's loss, whose mean over ranks is that of the global batch, the global
    gradient norm, and 1 where the step was skipped, else 0: all still on the device. Skipped is a step whose norm is
    not finite.

    The loss counts every trained token of the global batch alike. The router loss of a mixture of experts is that of
    each microbatch by itself, and every microbatch of every rank counts alike: it is the same on any number of ranks
    where the microbatches are the same. It is added, times its coefficient, to what is differentiated, not to the loss.
    """
    reduces_every_microbatch = settings.zero_stage != 1 and not settings.defer_grad_sync
    routing = getattr(model, "routing", None)
    total: torch.Tensor | None = None
    router_total: torch.Tensor | None = None
    expert_load: torch.Tensor | None = None
    for microbatch in range(settings.gradient_accumulation_steps):
        last = microbatch == settings.gradient_accumulation_steps - 1
        model.set_requires_gradient_sync(last or reduces_every_microbatch)
        # Replicas are reduced once a step. This comes after set_requires_gradient_sync, which sets it too.
        model.set_requires_all_reduce(last)
        # Below stage 3 the parameters stay gathered from the first microbatch to the last: one all-gather a step. After
        # the last they are always resharded: the optimizer updates the shards, and a gathered copy would be stale.
        model.set_reshard_after_backward(last or reshards_early(settings))
        job.enter_phase("data")
        with tracker.data_wait():
            batch = next(batches)
        job.enter_phase("forward")
        # where masks leave out tokens, "loss_divisor" weighs this microbatch by those that it trains on
        divisor = batch.pop("loss_divisor", settings.gradient_accumulation_steps)
        loss = model(**batch, use_cache=False).loss / divisor
        total = loss.detach() if total is None else total + loss.detach()
        if routing:
            router_loss, assignments = routing.read()
            router_loss = router_loss / settings.gradient_accumulation_steps
            loss = loss + routing.coefficient * router_loss
            router_total = router_loss.detach() if router_total is None else router_total + router_loss.detach()
            expert_load = assignments if expert_load is None else expert_load + assignments
        job.enter_phase("backward")
        loss.backward()
    job.enter_phase("optimizer")
    norm = models.clip_grad_norm(optimizer, settings.max_grad_norm)
    skip = models.decide_skip(norm)
    models.step_or_skip(optimizer, skip)
    optimizer.zero_grad()
    if settings.fp8_recipe == "tensorwise":  # set with --precision fp8 only
        models.compute_float8_scales(model)  # one all-reduce for the scales of all layers
    return report.StepResult(total, norm, skip, router_total, expert_load)


@contextlib.contextmanager
def discarded_if_stopped(model, optimizer) -> Iterator[None]:
    """A step that a stop cuts off between two microbatches leaves no trace: what is saved then is the step before, with
    its random state, and a resumed run begins the unfinished one anew."""
    on_gpu = torch.cuda.is_available()
    random_state, of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    try:
        yield
    except job.Stopped:
        torch.set_rng_state(random_state)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
        models.reshard(model)  # below stage 3 parameters stay gathered between microbatches
        optimizer.zero_grad()
        raise


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    settings: flags.Resolved, model, held_out: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], int]:
    """Returns the mean loss over every token of the held-out windows as `eval_loss`, of several sources also that of
    each as `eval_loss/NAME`; and how many tokens these are."""
    totals = torch.zeros(len(held_out), 2, dtype=torch.float64, device=device)  # of each source: summed loss, tokens
    job.enter_phase("evaluation")
    with models.evaluating(model):
        for of_source, windows in zip(totals, held_out.values(), strict=True):
            for batch in data.held_out_batches(settings, windows, device):
                job.enter_phase("evaluation")  # anew, as the ranks wait for each other in each batch
                tokens = (batch["labels"] != base.IGNORE_INDEX).sum()
                loss = model(**batch, use_cache=False).loss
                of_source += torch.stack([loss.double() * tokens, tokens.double()])
    dist.all_reduce(totals)
    of_each = {}
    for name, (summed_loss, tokens) in zip(held_out, totals.tolist(), strict=True):
        if not tokens:
            problem = f"the held-out windows of {name} have no trained token"
            raise base.UserError(f"--eval-interval: {problem}; use a longer --sequence-length or other data", 1)
        of_each[f"eval_loss/{name}"] = summed_loss / tokens
    summed_loss, tokens = totals.sum(0).tolist()
    losses = {"eval_loss": summed_loss / tokens}
    return (losses | of_each if len(of_each) > 1 else losses), int(tokens)


# ---- Before the first step -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A run that is ready for its first step, or for what is done without one."""

    settings: flags.Resolved
    device: torch.device
    checkpoint: state.Checkpoint | None  # that it goes on from
    state: state.TrainState  # everything that must survive a restart
    tokenizer: Any
    prompts: list[str]
    data: Any  # a data.TrainingData; None where nothing is trained or evaluated
    # from here on these are the defaults where num_steps is 0
    folder: pathlib.Path | None = None
    trackers: list = dataclasses.field(default_factory=list)  # open, on rank 0
    identity: dict = dataclasses.field(default_factory=dict)  # what a resumed run must have in common with it
    flops_per_token: int = 0
    batches: Any = None  # that it trains on, a report.Remembered
    changed: str = ""  # which flags are not those of the checkpoint, in words
    has_room: bool = True  # on the disk, for a checkpoint

    def stories(self) -> list[dict[str, str]]:
        """A continuation of each prompt, in a run on conversations an answer to it."""
        job.enter_phase("sampling")
        record = data.read_record(self.checkpoint.manifest) if self.checkpoint else None
        if self.data is not None:
            record = self.data.record
        texts = [data.story_beginning(self.settings, record, self.tokenizer, prompt) for prompt in self.prompts]
        return [models.sample(self.settings, t, self.state.model, self.tokenizer, self.device) for t in texts]


def prepare(given: flags.Settings, device: torch.device) -> Run:
    """Everything before the first step, in its order, up to the lines that say what will run. What is cheap and may
    fail comes first."""
    folder = job.take_folder(given)
    peak = given.peak_tflops or utils.get_gpu_peak_tflops()
    report.check_measurable(given, device, peak)
    trackers = report.open_trackers(given, folder)
    if given.memory_snapshot:
        report.record_memory(folder)
    corpora = data.find(given)
    config, tokenizer, prompts = models.load_files(given, data.needs_tokenizer(given, corpora))
    mesh = build_mesh(given, device)
    checkpoint = state.find_checkpoint(given.resume, folder)
    manifest = checkpoint.manifest if checkpoint else None
    goes_on = state.goes_on(checkpoint, folder)
    if given.export:
        base.on_main_rank(lambda: state.check_export(given, manifest["run_id"] if goes_on else None))
    settings = resolving.resolve(given, config, plan.choose_batch_size, corpora, manifest)
    job.check_machine(settings, mesh, device)
    dataset = data.load(settings, corpora, tokenizer, config, manifest)
    if settings.demo and settings.dataset != "demo" and not prompts and dataset.beginning:
        prompts = [dataset.beginning]  # the demo's prompt is for the demo's stories
    identity = state.describe_identity(config, tokenizer, dataset)
    changed = state.check_resume(settings, config, tokenizer, dataset, manifest) if manifest else ""

    model = build_model(settings, config, mesh, read_weights=not checkpoint)
    optimizer = models.build_optimizer(settings, model)
    scheduler = build_scheduler(settings, optimizer)
    verified = models.verify_sharding(settings, model, optimizer, mesh)
    flops_per_token, flops_in_words = models.known_flops(
        model, settings.sequence_length, utils.get_model_flops_per_token
    )
    if settings.min_mfu and not flops_per_token:
        raise base.UserError(f"--min-mfu: {flops_in_words}")
    tracker = utils.PerformanceTracker(settings.perf_warmup_steps, dist.get_world_size(), peak or 0)
    train_state = state.TrainState(model, optimizer, scheduler, tracker=tracker)
    if checkpoint:
        train_state.load(checkpoint, of_another_run=not goes_on)
        changed = ", ".join(filter(None, [changed, train_state.describe_jump()]))
    state.refuse_broken(settings, train_state, checkpoint)
    has_room = train_state.step == settings.num_steps or job.check_disk(settings, *train_state.saved_bytes(), folder)
    job.say(
        report.describe_setup(
            settings,
            train_state,
            mesh,
            dataset,
            flops_in_words,
            peak,
            verified,
            checkpoint=checkpoint.path if checkpoint else None,
            changed=changed,
        )
    )
    return Run(
        settings=settings,
        device=device,
        state=train_state,
        tokenizer=tokenizer,
        prompts=prompts,
        data=dataset,
        checkpoint=checkpoint,
        folder=folder,
        trackers=trackers,
        identity=identity,
        flops_per_token=flops_per_token,
        changed=changed,
        has_room=has_room,
    )


def prepare_without_steps(given: flags.Settings, device: torch.device) -> Run:
    """--num-steps 0: a checkpoint or pretrained weights, and the data that an evaluation of them reads."""
    corpora = data.find(given) if given.eval_interval else []
    config, tokenizer, prompts = models.load_files(given, data.needs_tokenizer(given, corpora))
    mesh = build_mesh(given, device)
    checkpoint = state.find_checkpoint(given.resume, None)
    manifest = checkpoint.manifest if checkpoint else None
    if given.export:
        base.on_main_rank(lambda: state.check_export(given, (manifest or {}).get("run_id")))
    settings = resolving.resolve(given, config, plan.choose_batch_size, corpora)
    dataset = None
    if settings.eval_interval:
        own_data = manifest is not None and base.on_main_rank(lambda: data.evaluates_own_data(settings, manifest))
        of_run, whole = (manifest, False) if own_data else (None, manifest is not None)
        dataset = data.load(settings, corpora, tokenizer, config, of_run, whole)
        if own_data and settings.dataset != "synthetic":
            state.check_same_corpus(settings, dataset.record, manifest)
    if checkpoint:
        state.check_same_model(config, checkpoint.manifest)
    train_state = state.TrainState(build_model(settings, config, mesh, read_weights=not checkpoint))
    if checkpoint:
        checkpoint = state.load_to_read(settings.resume, train_state, checkpoint)
        job.say(f"loaded     {checkpoint.path}, step {checkpoint.manifest['step']:,}")
    if settings.average_checkpoints:
        job.say(f"averaged   {state.load_mean(settings, train_state, config, checkpoint.path)}")
    state.refuse_broken(settings, train_state, checkpoint)
    return Run(settings, device, checkpoint, train_state, tokenizer, prompts, dataset)


# ---- Loop and end ----------------------------------------------------------------------------------------------------


def train(run: Run, log: report.Log, checkpoints: state.Checkpoints, stop) -> None:
    """The loop. A job.Stopped leaves it where all ranks agreed to stop, after the last complete step."""
    settings, tracker = run.settings, run.state.tracker
    model, optimizer = run.state.model, run.state.optimizer
    run.batches = report.Remembered(data.training_batches(settings, run.data, run.state, run.device))
    first_step, stop.resumed_step = run.state.step + 1, run.state.step
    due = job.due(settings, run.state.step, first_step)
    if due.evaluate and base.on_main_rank(log.lacks_evaluation):  # a stop came before it
        evaluation = {"step": run.state.step, "tokens_seen": run.state.tokens}
        if problem := evaluate_and_log(run, log, due, evaluation, "", stop):
            raise report.diverged(run.folder, problem, run.checkpoint.path if run.checkpoint else None)
    tracker.open_window()  # until here a run is set up, which is no part of a step
    while run.state.step < settings.num_steps:
        due = job.due(settings, run.state.step + 1, first_step, run.has_room)
        job.enter_phase("data", due.step)
        with log.step(due):
            with stop.before_each_forward(model), discarded_if_stopped(model, optimizer):
                result = train_step(settings, model, optimizer, run.batches, tracker)
            log.count(result)
            run.state.advance(run.data)  # steps, samples, the schedule
        stop.can_save = True  # from here on a signal is answered by a checkpoint
        if due.log or due.save:
            metrics, problem = log.metrics()
            if (due.save or due.last) and not problem:
                # the loss in `metrics` is of before the update; what is saved or called done has given one since
                problem = report.check_updated_weights(run, run.batches.last_good(metrics), first_step)
            if due.log or problem:
                problem = evaluate_and_log(run, log, due, metrics, problem, stop)
            if problem:
                checkpoints.finish()
                raise report.diverged(run.folder, problem, run.checkpoint.path if run.checkpoint else None)
        if due.save:
            checkpoints.save(run.state, wait=due.last)
            if not due.last:
                stop.raise_if_asked()  # while what is saved is the last complete step
    checkpoints.finish()


def evaluate_and_log(run: Run, log: report.Log, due: job.Due, metrics: dict, problem, stop):
    """An evaluation where one is due, which adds `eval_loss` to `metrics`, and then a log line. Returns what is NaN or
    infinite: `problem`, or the evaluation's loss."""
    stories = []
    if due.evaluate and not problem:
        try:
            with run.state.tracker.excluded(), stop.before_each_forward(run.state.model):
                losses, _ = evaluate(run.settings, run.state.model, run.data.held_out, run.device)
                metrics |= losses
                if not due.last:  # after the last step the end of the run writes them
                    stories = run.stories()
        except job.Stopped:
            log.write(metrics)  # without the evaluation, which the next start makes
            raise
        problem = report.first_not_finite(metrics, [])
    log.write(metrics, stories)
    return problem


def save_and_leave(run: Run, log: report.Log, checkpoints: state.Checkpoints, stop) -> int:
    """Answers a stop: saves the last complete step, if that is not done, and then says so. Returns the exit code."""
    checkpoints.finish()
    newest = base.on_main_rank(lambda: base.newest_checkpoint(run.folder))
    if not newest or base.step_in_name(newest) != run.state.step:
        metrics, problem = log.metrics() if log.results else (log.last, "")
        if not problem:
            problem = report.check_updated_weights(run, run.batches.last_good(metrics), log.first_step)
        if problem:
            raise report.diverged(run.folder, problem, run.checkpoint.path if run.checkpoint else None)
        checkpoints.save(run.state, wait=True)
    return report.leave_early(run, log, checkpoints, stop)


def finish(run: Run, log, stop, checkpoints: state.Checkpoints | None = None, planned=None) -> int:
    """The end of a run that has no step left, whether it took the last one now, before, or has none at all: figures,
    stories, an export, gates, what to do next. Returns the exit code."""
    settings = run.settings
    if not run.folder and settings.eval_interval:  # in training the last step was evaluated
        log.say_evaluation(run, *evaluate(settings, run.state.model, run.data.held_out, run.device))
    with stop.before_each_forward(run.state.model):
        stories = run.stories()
    if settings.export or settings.plan_gpu or run.device.type == "cuda":  # to export or to wait for a plan takes long
        stop.raise_if_asked()
    stop.can_save = False
    metrics = log.finish(stories, plan.predicted_figures(planned))
    if settings.export:
        state.export(settings, run.state, run.tokenizer)
    if run.folder:
        job.say(report.next_commands(settings, run.folder, run.state.step))
        checkpoints.check_saved()
        log.check_written()
        base.on_main_rank(lambda: report.check_gates(settings, metrics))
    return 0


# ---- A run -----------------------------------------------------------------------------------------------------------


def run(settings: flags.Settings, device: torch.device, stop) -> int:
    """One run, from its flags to its last line; returns the exit code."""
    if settings.show_samples is not None:
        return show_samples(settings)
    if settings.num_steps == 0:
        with report.Answer(settings) as answer:
            return finish(prepare_without_steps(settings, device), answer, stop)
    ready = prepare(settings, device)
    steps_left = ready.settings.num_steps - ready.state.step
    # on a GPU a plan of this very run is made beside it: its last line shows both
    with (
        report.Log(ready) as log,
        plan.planning_in_background(ready.settings, device, steps_left) as planned,
        state.Checkpoints(ready.settings, ready.folder, ready.identity, device, log.sync) as checkpoints,
    ):
        try:
            train(ready, log, checkpoints, stop)
            return finish(ready, log, stop, checkpoints, planned)
        except job.Stopped:
            return save_and_leave(ready, log, checkpoints, stop)


def show_samples(given: flags.Settings) -> int:
    """--show-samples: what a step of this run trains on, by the order that the run recorded, if there is one."""
    corpora = data.find(given)
    config, tokenizer, _ = models.load_files(given, data.needs_tokenizer(given, corpora))
    recorded = state.find_recorded_data(given, state.find_checkpoint(given.resume, None))
    settings = resolving.resolve(given, config, plan.choose_batch_size, corpora)
    dataset = data.load(settings, corpora, tokenizer, config, recorded)
    if recorded:
        state.check_data(settings, dataset.record, recorded)
    data.show_samples(settings, dataset, tokenizer, recorded)
    return 0


# What a plan drives; it cannot import this file.
RECIPE = plan.Recipe(
    build_mesh=build_mesh,
    build_model=build_model,
    train_step=train_step,
    make_tracker=utils.PerformanceTracker,
    estimate_mfu=utils.estimate_mfu,
    flops_per_token=utils.get_model_flops_per_token,
)


def main(settings: flags.Settings) -> None:
    with job.World(settings, lambda: plan.memory_advice(settings)) as world:
        if settings.plan:
            plan.print_plan(settings, RECIPE)
        else:
            world.exit_code = run(settings, world.meet(), world.stop)


if __name__ == "__main__":
    main(SETTINGS)
