"""Loop: the parts of a run around its training steps: open files, resolve settings, evaluate, sample, log, save, stop
and finish. Every rank calls each function."""

import dataclasses
import functools
import math
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from harness import base, data, flags, job, plan, report, resolving, state
from harness import model as models

# The script's `evaluate`: (settings, model, eval data, device) -> (losses by key, tokens).
Evaluate = Callable[[flags.Settings, Any, dict[str, Any], torch.device], tuple[dict[str, float], int]]

# ---- Opening ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Opened:
    """The inputs of a run, found and resolved before anything is built."""

    settings: flags.Settings
    corpora: list[data.Corpus]
    opening: data.Opening | None  # the sources, opened early if --num-epochs had to count their sequences
    config: transformers.PretrainedConfig
    tokenizer: Any
    prompts: list[str | data.Conversation]  # to generate samples from
    resumed_checkpoint: state.Checkpoint | None  # of --resume; without training the one that is read
    replaced_run: str = ""  # id of the run whose earlier export in --export DIR may be replaced
    dataset: Any = None  # a data.TrainingData, with the eval data; None if no data are read, or before they are

    @property
    def manifest(self) -> dict | None:
        """The checkpoint's."""
        return self.resumed_checkpoint.manifest if self.resumed_checkpoint else None

    @property
    def record(self) -> data.DataRecord | None:
        """The record of this run's data; without training, of the checkpoint's run, or None without a checkpoint."""
        if self.dataset is not None and self.settings.num_steps:
            return self.dataset.record
        return data.read_data_record(self.manifest) if self.manifest else None

    def is_chat_model(self) -> bool:
        """True if this run trains on conversations; without training, if the weights were trained on some, or if that
        is not known, if conversations are read. Every rank calls this."""
        trained_on = [] if self.settings.num_steps else state.trained_on(self.settings, self.record)
        if trained_on:
            return any(source.get("chat") for source in trained_on)
        return data.are_chats(self.corpora)


def open_run(args: flags.Args, folder: pathlib.Path | None = None) -> Opened:
    """Find the data, the model's files and the checkpoint, and resolve the flags.

    Args:
        folder: the run's folder; None if nothing is trained.

    Raises:
        UserError: something is missing, damaged, or does not go together.
    """
    print_imports()
    corpora = data.find(args) if args.num_steps or args.eval_interval or args.show_samples else []
    config, tokenizer = models.load_files(args, data.needs_tokenizer(args, corpora))
    prompts = base.broadcast_from_rank_0(lambda: data.read_prompts(args.sample_prompt or ()))
    checkpoint = state.find_checkpoint(args.resume, folder)
    trained_length = checkpoint.manifest["flags"]["sequence_length"] if checkpoint else args.sequence_length
    models.scale_rope(args, config, trained_length)  # --rope-scaling: to the length of the training, also to evaluate
    draws_weights = args.trains() and args.init == "random" and not checkpoint
    warning = base.broadcast_from_rank_0(lambda: models.describe_ignored_weights(args.model)) if draws_weights else ""
    if warning:
        job.warn(warning)
    replaced_run = state.check_export(args, checkpoint, folder) if args.export else ""
    # only a run that trains keeps what its checkpoint resolved: precision, learning rate, global batch, warmup
    resumed_manifest = checkpoint.manifest if checkpoint and args.trains() else None
    settings = resolving.resolve(args, config, corpora, resumed_manifest)
    if settings.compile:
        base.count_compiling_as_work()  # in the heartbeats: a rank that compiles has not stalled
    if args.batch_size == "auto":
        size = base.broadcast_from_rank_0(lambda: plan.choose_batch_size(settings))
        settings = dataclasses.replace(settings, batch_size=size)
    if resumed_manifest:
        settings = state.keep_global_batch(settings, resumed_manifest)
    opening, samples_per_epoch = None, 0
    if settings.num_epochs:
        trained_on = state.trained_on(settings, None)  # the weights of --init pretrained, if we exported them
        opening = data.open_sources(settings, corpora, tokenizer, config, resumed_manifest, trained_on)
        samples_per_epoch = sum(len(source.train) for source in opening.opened.values())
    settings = resolving.resolve_steps(settings, resumed_manifest, samples_per_epoch)
    resolving.refuse_contradictions(settings, args)  # once more, as defaults are decided now
    opened = Opened(
        settings=settings,
        corpora=corpora,
        opening=opening,
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        resumed_checkpoint=checkpoint,
        replaced_run=replaced_run,
    )
    check_prompts(opened)
    return opened


def print_imports() -> None:
    """Print the files of --import and what they registered.

    Raises:
        UserError: a file differs between ranks.
    """
    if len({*base.all_gather_objects(tuple(flags.IMPORTED.values()))}) > 1:
        raise base.UserError("--import: a file differs between ranks; copy the same one to all nodes")
    if flags.IMPORTED:
        registered = ", ".join(flags.REGISTERED) or "nothing registered"
        job.print0(f"imports    {flags.describe_imports()}: {registered}")


def check_prompts(opened: Opened) -> None:
    """Raise a UserError if the model cannot generate, or if a rendered prompt and --sample-tokens together exceed its
    positions."""
    if opened.prompts or opened.settings.demo:  # --demo generates a sample without a prompt too
        models.check_generates(opened.config)
    settings, positions = opened.settings, models.max_positions(opened.config)
    for text in render_prompts(opened, opened.prompts):
        tokens = len(opened.tokenizer(text, add_special_tokens=False)["input_ids"])
        if positions and tokens + settings.sample_tokens > positions:
            size = base.counted(tokens, "token")
            problem = f"more than {settings.model}'s {positions} positions with the prompt's {size}"
            advice = "use fewer, or a shorter --sample-prompt"
            raise base.UserError(f"--sample-tokens {settings.sample_tokens}: {problem}; {advice}")


def render_prompts(opened: Opened, prompts: list[str | data.Conversation]) -> list[str]:
    """The texts that samples continue, rendered by rank 0."""
    settings, tokenizer, is_chat = opened.settings, opened.tokenizer, opened.is_chat_model()
    return base.broadcast_from_rank_0(
        lambda: [data.render_prompt(settings, is_chat, tokenizer, prompt) for prompt in prompts]
    )


def load_eval_data(opened: Opened) -> None:
    """Set `opened.dataset` for an evaluation without training: the eval split of the data that the weights were trained
    on; for other data their eval split, or all documents if they have none.

    Raises:
        UserError: the run trained on the data to evaluate, or its own data have changed since.
    """
    settings, manifest = opened.settings, opened.manifest
    load = functools.partial(data.load, settings, opened.corpora, opened.tokenizer, opened.config)
    reads_own = manifest is not None and base.broadcast_from_rank_0(
        lambda: data.evaluates_own_data(settings, opened.corpora, manifest)
    )
    if reads_own:  # the checkpoint says which of their documents are eval documents
        opened.dataset = load(manifest=manifest)
    else:
        opened.dataset = load(trained_on=state.trained_on(settings, opened.record))


# ---- A run that trains -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class OpenedTraining(Opened):
    """The inputs of a run that trains, before its model is built."""

    device: torch.device
    mesh: DeviceMesh
    folder: pathlib.Path
    trackers: list
    peak_tflops: float | None  # of one device; None if it is not known
    identity: dict  # of config, tokenizer, frozen weights and data: a resume must have the same; in the manifest
    changed: str  # changes since the checkpoint that it resumes from, in words


@dataclasses.dataclass(kw_only=True)
class Run(OpenedTraining):
    """A run that is ready for its first step."""

    batches: data.Batches
    log: report.Log
    checkpoints: state.Checkpoints
    state: state.TrainState  # everything that must survive a restart


def open_training(
    args: flags.Args, mesh: DeviceMesh, device: torch.device, peak_tflops: float | None
) -> OpenedTraining:
    """Open the inputs of a run that trains. Cheap checks that may fail come first.

    Raises:
        UserError: the run cannot succeed on this machine, something is missing or damaged, or the checkpoint is another
            run's.
    """
    folder = job.take_folder(args)
    report.check_measurable(args, device, peak_tflops)  # for --min-mfu, --max-memory-gib and --memory-snapshot
    trackers = report.open_trackers(args, folder)
    if args.memory_snapshot:
        report.record_memory(folder)
    opened = open_run(args, folder)
    settings, config, tokenizer = opened.settings, opened.config, opened.tokenizer
    job.check_machine(settings, mesh, device)
    job.check_host_memory(models.offloaded_bytes(settings, config))  # for --activation-checkpointing offload
    opened.dataset = data.load(
        settings,
        opened.corpora,
        tokenizer,
        config,
        manifest=opened.manifest,
        trained_on=state.trained_on(settings, None),  # the weights of --init pretrained, if we exported them
        opening=opened.opening,
    )
    identity = state.describe_identity(settings, config, tokenizer, opened.dataset)
    return OpenedTraining(
        **vars(opened),
        device=device,
        mesh=mesh,
        folder=folder,
        trackers=trackers,
        peak_tflops=peak_tflops,
        identity=identity,
        changed=state.check_resume(settings, config, identity, opened.dataset, opened.resumed_checkpoint),
    )


def ready_run(
    opened: OpenedTraining, train_state: state.TrainState, get_flops_by_length: Callable[[Any, np.ndarray], np.ndarray]
) -> Run:
    """Load the checkpoint into `train_state`, check what can be checked before the first step, print the header and
    open the log.

    Raises:
        UserError: the weights are not finite, --min-mfu needs FLOPs that are unknown, or the disk has too little room.
    """
    settings, checkpoint, folder, device = opened.settings, opened.resumed_checkpoint, opened.folder, opened.device
    possible_lengths = np.arange(settings.sequence_length + 1)  # tokens of a document, whose attention depends on them
    flops_by_length, flops_text = models.flops_or_zeros(train_state.model, possible_lengths, get_flops_by_length)
    if settings.min_mfu and not flops_by_length.any():
        raise base.UserError(f"--min-mfu: {flops_text}")
    sharding_text = models.verify_sharding(settings, train_state.model, train_state.optimizer, opened.mesh)
    changed = opened.changed
    if checkpoint:
        train_state.load(checkpoint, from_other_run=not state.resumes_same_run(checkpoint, folder))
        changed = ", ".join(filter(None, [changed, train_state.describe_lr_change()]))
    state.check_finite(settings, train_state, checkpoint)
    has_room = True  # for the final checkpoint, which is left out otherwise
    if train_state.step < settings.num_steps:
        export_bytes = state.export_bytes(settings, train_state.model)
        has_room = job.check_disk(settings, train_state.saved_bytes(), export_bytes, folder)
    header = report.describe_setup(
        settings=settings,
        state=train_state,
        mesh=opened.mesh,
        train_set=opened.dataset,
        flops=flops_text,
        peak=opened.peak_tflops,
        verified=sharding_text,
        checkpoint=checkpoint,
        changed=changed,
    )
    job.print0(header)
    dataset = opened.dataset
    batches = data.training_batches(settings, dataset, train_state, device)
    timed_batches = data.Batches(batches, train_state.tracker, dataset.has_padding, settings.context_parallel)
    log = report.Log(
        settings=settings,
        state=train_state,
        data=dataset,
        folder=folder,
        device=device,
        trackers=opened.trackers,
        flops_by_length=flops_by_length,
        changed=changed,
        has_room=has_room,
    )
    return Run(
        **vars(opened),
        batches=timed_batches,
        log=log,
        checkpoints=state.Checkpoints(settings, folder, opened.identity, device, sync_log=log.sync),
        state=train_state,
    )


def finish_interrupted_evaluation(run: Run, stop: job.StopRequest, evaluate: Evaluate) -> None:
    """Evaluate the step that the run resumes from, if it was stopped before that evaluation was done."""
    due = run.log.due_at(run.state.step)
    if due.evaluate and base.broadcast_from_rank_0(run.log.needs_evaluation):
        metrics = {"step": run.state.step, "tokens_seen": run.state.tokens}
        evaluate_and_log(run, due, metrics, stop, evaluate)


def log_and_evaluate(run: Run, due: job.Actions, stop: job.StopRequest, evaluate: Evaluate) -> None:
    """Read the metrics of the steps since the last call, check the state that is to be saved, evaluate and log what is
    due.

    Raises:
        UserError: the run diverged.
        job.Stopped: a stop was requested during the evaluation.
    """
    metrics, problem = run.log.metrics()
    if (due.save or due.last) and not problem:
        problem = find_non_finite(run)
    if problem:
        run.log.write(metrics)
        raise_divergence(run, problem)
    if due.evaluate:
        evaluate_and_log(run, due, metrics, stop, evaluate)
    elif due.log:
        run.log.write(metrics)


def evaluate_and_log(run: Run, due: job.Actions, metrics: dict, stop: job.StopRequest, evaluate: Evaluate) -> None:
    """Evaluate, generate samples, and write the log line with `metrics`. If a stop interrupts the evaluation, its
    losses and samples are discarded, and the next start repeats it.

    Raises:
        UserError: an eval loss is not finite.
    """
    samples = []
    try:
        with run.state.tracker.paused(), stop.before_each_forward(run.state.model):
            losses, _ = evaluate(run.settings, run.state.model, run.dataset.eval_data, run.device)
            if not due.last:  # after the last step `finish` generates them
                samples = generate_samples(run, run.state.model, run.device)
    except job.Stopped:
        run.log.write(metrics)
        raise
    metrics |= losses
    # for the next save, and for a checkpoint of this step that a stop left without it
    run.checkpoints.record_eval_loss(run.state, metrics["eval_loss"])
    run.log.write(metrics, samples)
    if problem := report.first_not_finite(metrics):
        raise_divergence(run, problem)


def raise_divergence(run: Run, problem: str) -> NoReturn:
    """Wait for the save in progress and raise the UserError of a diverged run."""
    run.checkpoints.wait()
    raise report.divergence_error(problem, run.folder, run.resumed_checkpoint)


def find_non_finite(run: Run) -> str:
    """What is NaN or infinite after the last step, in words; "" if nothing is. Checks weights and optimizer states,
    then loss and gradient norm of one more pass: those of the step are from before its update."""
    # the batch of a skipped step may be the cause, so an earlier one is checked
    batch = run.batches.batch_to_check(was_skipped=run.state.skipped_in_a_row > 0)
    with run.state.tracker.paused():
        if problem := run.state.describe_update_fault():
            return problem
        loss, norm = models.loss_and_norm(run.state.model, run.state.optimizer, batch)
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            # the last update that was not skipped; for weights that were broken from the start, the first step
            step = max(run.log.first_step, run.state.step - run.state.skipped_in_a_row)
            return f"the {name} of the weights became {value} at step {step}"
    return ""


def finish(run: Run, stop: job.StopRequest, plan_process: subprocess.Popen | None) -> int:
    """End a run that has no step left: metrics, samples, an export, gates, and what to do next.

    Args:
        plan_process: the process that plans this run, if there is one.

    Returns:
        The exit code, 0.

    Raises:
        UserError: a gate is missed, or a checkpoint or lines of the log could not be written.
        job.Stopped: a stop was requested before the export.
    """
    settings = run.settings
    with stop.before_each_forward(run.state.model):
        samples = generate_samples(run, run.state.model, run.device)
    # An export and the wait for the plan take long; without them the run is done anyway. All ranks must agree, so this
    # does not ask for `plan_process`, which rank 0 alone has.
    may_be_planned = settings.own_plan and (settings.plan_gpu or run.device.type == "cuda")
    if settings.export or may_be_planned:
        stop.raise_if_stopping()
    stop.can_save = False  # nothing is left to save: from here on a signal ends the process at once
    metrics = run.log.finish(samples, plan.predicted_metrics(plan_process) | run.checkpoints.best_metrics())
    if settings.export:
        export(run, run.state)
    job.print0(report.next_commands(settings, run.folder, run.state.step, metrics))
    run.checkpoints.check_saved()
    run.log.check_written()
    base.broadcast_from_rank_0(lambda: report.check_gates(settings, metrics))
    return 0


def save_and_stop(run: Run, stop: job.StopRequest) -> int:
    """Save the last complete step after a stop, unless it is saved already, and print so. Return the exit code."""
    log, checkpoints = run.log, run.checkpoints

    def is_saved() -> bool:
        newest = base.broadcast_from_rank_0(lambda: base.newest_checkpoint(run.folder))
        return newest is not None and base.step_in_name(newest) == run.state.step

    checkpoints.wait()
    saved = is_saved()
    if not saved:
        has_new_steps = bool(log.results)  # since the last log line
        metrics, problem = log.metrics()
        problem = problem or find_non_finite(run)
        if has_new_steps and (problem or log.skipped):
            log.write(metrics)  # says what is wrong or why steps were skipped, which no checkpoint does
        if problem:
            raise_divergence(run, problem)
        checkpoints.save(run.state, wait=True)
        saved = is_saved()
    saved_in = checkpoints.folder if saved else None
    job.print0(report.describe_stop(run.settings, run.folder, run.state.step, stop.name, saved_in))
    return stop.exit_code if saved and not log.has_unwritten_lines() else 1


# ---- Without training ------------------------------------------------------------------------------------------------


def evaluate_only(args: flags.Args, device: torch.device, recipe: plan.Recipe) -> int:
    """--num-steps 0: evaluate a checkpoint or pretrained weights, generate samples, export. Return the exit code."""
    with report.keep_stdout_for_json(args) as stdout:
        mesh = recipe.build_mesh(args, device)
        opened = open_run(args)
        settings, checkpoint = opened.settings, opened.resumed_checkpoint
        if settings.eval_interval:
            load_eval_data(opened)
        state.check_same_weights(settings, opened.config, opened.manifest)
        model = recipe.build_model(settings, opened.config, mesh, device, read_weights=not checkpoint)
        loaded = state.TrainState(model)
        if checkpoint:
            # returns a newer one, if a running run has removed this one meanwhile
            opened.resumed_checkpoint = state.load_for_inference(settings, loaded, opened.config, checkpoint)
        state.check_finite(settings, loaded, opened.resumed_checkpoint)
        if settings.eval_interval:
            losses, tokens = recipe.evaluate(settings, model, opened.dataset.eval_data, device)
            report.print_evaluation(settings, opened.dataset, loaded if checkpoint else None, losses, tokens, stdout)
        report.print_samples(generate_samples(opened, model, device))
        if settings.export:
            export(opened, loaded)
    return 0


def show_samples(args: flags.Args) -> int:
    """--show-samples: print what a step of this run trains on, in the order that the run recorded if it has one. Return
    the exit code."""
    opened = open_run(args)
    recorded = state.find_recorded_data(args, opened.resumed_checkpoint)
    inputs = (opened.corpora, opened.tokenizer, opened.config)
    dataset = data.load(opened.settings, *inputs, manifest=recorded, opening=opened.opening)
    if recorded:
        state.check_data(opened.settings, dataset.record, recorded)
    data.show_samples(opened.settings, dataset, opened.tokenizer, recorded)
    return 0


def generate_samples(opened: Opened, model: transformers.PreTrainedModel, device: torch.device) -> list[dict[str, Any]]:
    """Generate a continuation of each prompt; for conversations, an answer to it."""
    job.enter_phase("sampling")
    settings, prompts, dataset = opened.settings, opened.prompts, opened.dataset
    if settings.demo and settings.dataset != "demo" and not prompts and dataset is not None and dataset.demo_prompt:
        prompts = [dataset.demo_prompt]  # --demo has no prompt for other data: continue their first words
    is_chat = opened.is_chat_model()
    stop_ids = base.broadcast_from_rank_0(lambda: data.end_tokens(settings, is_chat, opened.tokenizer))
    texts = render_prompts(opened, prompts)
    return [models.sample(settings, text, stop_ids, model, opened.tokenizer, device) for text in texts]


def export(opened: Opened, loaded: state.TrainState) -> None:
    """Write the folder of --export."""
    settings, trained_on = opened.settings, state.trained_on(opened.settings, opened.record)
    is_chat = opened.is_chat_model()
    stop_ids = base.broadcast_from_rank_0(lambda: data.end_tokens(settings, is_chat, opened.tokenizer))
    state.export(settings, loaded, opened.tokenizer, stop_ids, trained_on, opened.replaced_run)
