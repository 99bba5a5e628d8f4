"""Loop: the parts of a run around its training steps: open files, resolve settings, evaluate, sample, log, save, stop
and finish. Every rank calls each function."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import subprocess
from collections.abc import Callable, Iterator
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
    corpora: data.Corpora
    opened_sources: data.OpenedSources | None  # opened early if --num-epochs had to count their sequences
    config: transformers.PretrainedConfig
    tokenizer: Any
    prompts: list[str | data.Conversation]  # to generate samples from
    checkpoint: state.Checkpoint | None  # of --resume: to continue or, without training, to evaluate, sample or export
    replaced_run: str = ""  # --export DIR holds an export of the run with this id, which is replaced; "" if it does not
    dataset: Any = None  # a data.TrainingData, with the eval data; None if no data are read, or before they are

    @property
    def manifest(self) -> dict | None:
        """The checkpoint's."""
        return self.checkpoint.manifest if self.checkpoint else None

    @property
    def record(self) -> data.DataRecord | None:
        """The data record of the run that trains, or trained, the weights: this run's, else the checkpoint's; None if
        there is neither."""
        if self.dataset is not None and self.settings.num_steps:
            return self.dataset.record
        return data.read_data_record(self.manifest) if self.manifest else None

    def is_chat_model(self) -> bool:
        """True for weights of conversations: by the data of a run that trains. Without training the sources that the
        weights were trained on decide, or, if these are not known, the data that is read. Every rank calls this."""
        trained_on = [] if self.settings.num_steps else state.trained_on(self.settings, self.record)
        if trained_on:
            return any(source.get("chat") for source in trained_on)
        return any(corpus.is_chat for corpus in self.corpora.sources_or_eval)


def open_run(args: flags.Args, folder: pathlib.Path | None = None) -> Opened:
    """Find the data, the model's files and the checkpoint, and resolve the flags.

    Args:
        folder: the run's folder; None if nothing is trained.

    Raises:
        UserError: something is missing, damaged, or does not go together.
    """
    print_imports()
    reads_data = args.num_steps or args.eval_interval or args.show_samples
    corpora = data.find(args) if reads_data else data.Corpora([])
    config, tokenizer = models.load_files(args, data.needs_tokenizer(args, corpora))
    prompts = base.broadcast_from_rank_0(lambda: data.read_prompts(args.sample_prompt or ()))
    checkpoint = state.find_checkpoint(args.resume, folder)
    length = checkpoint.manifest["flags"]["sequence_length"] if checkpoint else args.sequence_length
    models.scale_rope(args, config, length)  # --rope-scaling: by the length that is trained, also to evaluate
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
    has_record = args.show_samples and state.find_recorded_data(args, checkpoint)  # it has the batch
    if args.batch_size == "auto" and not has_record:  # `resolve` has put in the smallest one
        size = base.broadcast_from_rank_0(lambda: plan.choose_batch_size(settings))
        settings = dataclasses.replace(settings, batch_size=size)
    if resumed_manifest:
        settings = state.keep_global_batch(settings, resumed_manifest)
    opened_sources, samples_per_epoch = None, 0
    if settings.num_epochs:
        trained_on = state.trained_on(settings, None)  # sources in the header of an export, if --init reads one
        opened_sources = data.open_sources(settings, corpora, tokenizer, config, resumed_manifest, trained_on)
        samples_per_epoch = sum(len(source.train) for source in opened_sources.by_name.values())
    settings = resolving.resolve_steps(settings, resumed_manifest, samples_per_epoch)
    resolving.refuse_contradictions(settings, args)  # once more, as defaults are decided now
    opened = Opened(
        settings=settings,
        corpora=corpora,
        opened_sources=opened_sources,
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        checkpoint=checkpoint,
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
    """Set `opened.dataset` for an evaluation without training: of the run's own data the checkpoint's eval split, of
    other data the eval split, or all documents without one.

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
    stop: job.StopRequest
    identity: dict  # facts of config, tokenizer, frozen weights and data that a resume must share, for the manifest
    changed: str  # changes since the checkpoint that it resumes from, in words


@dataclasses.dataclass(kw_only=True)
class Run(OpenedTraining):
    """A run that is ready for its first step."""

    batches: data.Batches
    log: report.Log
    checkpoints: state.Checkpoints
    state: state.TrainState  # everything that must survive a restart
    plan_process: subprocess.Popen | None = None  # of rank 0, which plans the run meanwhile

    def complete_step(self, result: report.StepResult) -> None:
        """Count the samples and tokens of a step, advance the schedule, and keep its `result` for the log."""
        tokens, document_lengths = self.batches.complete_step()  # tokens of all ranks, documents of this one
        self.log.keep(result, document_lengths)
        self.state.advance(self.dataset.record, tokens)
        self.stop.can_save = True


def open_training(
    args: flags.Args, mesh: DeviceMesh, device: torch.device, peak_tflops: float | None, stop: job.StopRequest
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
    opened.dataset = data.load(
        settings,
        opened.corpora,
        tokenizer,
        config,
        manifest=opened.manifest,
        trained_on=state.trained_on(settings, None),  # sources in the header of an export, if --init reads one
        opened=opened.opened_sources,
    )
    identity = state.describe_identity(settings, config, tokenizer, opened.dataset)
    return OpenedTraining(
        **vars(opened),  # all its fields
        device=device,
        mesh=mesh,
        folder=folder,
        trackers=trackers,
        peak_tflops=peak_tflops,
        stop=stop,
        identity=identity,
        changed=state.check_resume(settings, config, identity, opened.dataset, opened.checkpoint),
    )


def finish_setup(
    opened: OpenedTraining, train_state: state.TrainState, get_flops_by_length: Callable[[Any, np.ndarray], np.ndarray]
) -> Run:
    """Load the checkpoint into `train_state`, check what can be checked before the first step, print the header and
    open the log.

    Raises:
        UserError: the weights are not finite, --min-mfu needs FLOPs that are unknown, or the disk has too little room.
    """
    settings, checkpoint, folder, device = opened.settings, opened.checkpoint, opened.folder, opened.device
    lengths = np.arange(settings.sequence_length + 1)  # of documents: what a token costs depends on its document's
    flops_by_length, flops_text = models.flops_or_zeros(train_state.model, lengths, get_flops_by_length)
    if settings.min_mfu and not flops_by_length.any():
        raise base.UserError(f"--min-mfu: {flops_text}")
    sharding_text = models.verify_sharding(settings, train_state.model, train_state.optimizer, opened.mesh)
    changed = opened.changed
    if checkpoint:
        train_state.load(checkpoint, from_other_run=not state.resumes_same_run(checkpoint, folder))
        changed = ", ".join(filter(None, [changed, train_state.describe_lr_change()]))
    state.check_finite(settings, train_state, checkpoint)
    has_room = True  # on the disk; without room no final checkpoint is written
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
        **vars(opened),  # all its fields
        batches=timed_batches,
        log=log,
        checkpoints=state.Checkpoints(settings, folder, opened.identity, device, sync_log=log.sync),
        state=train_state,
    )


@contextlib.contextmanager
def started(run: Run) -> Iterator[None]:
    """A context in which a run trains: its log and its checkpoints are open. On a GPU another process plans the run
    meanwhile, and the run's last line has what it predicted."""
    planning = plan.planning_in_background(run.settings, run.device, run.settings.num_steps - run.state.step)
    with run.log, run.checkpoints, planning as run.plan_process:
        yield


def finish_interrupted_evaluation(run: Run, evaluate: Evaluate) -> None:
    """Evaluate the step that the run resumes from, if it was stopped before that evaluation was done."""
    due = run.log.due_at(run.state.step)
    if due.evaluate and base.broadcast_from_rank_0(run.log.needs_evaluation):
        metrics = {"step": run.state.step, "tokens_seen": run.state.tokens}
        evaluate_and_log(run, due, metrics, evaluate)


def log_and_evaluate(run: Run, due: job.Actions, evaluate: Evaluate) -> None:
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
        evaluate_and_log(run, due, metrics, evaluate)
    elif due.log:
        run.log.write(metrics)


def evaluate_and_log(run: Run, due: job.Actions, metrics: dict, evaluate: Evaluate) -> None:
    """Evaluate, generate samples, and write the log line with `metrics`. If a stop interrupts the evaluation, its
    losses and samples are discarded, and the next start repeats it.

    Raises:
        UserError: an eval loss is not finite.
    """
    samples = []
    try:
        with run.state.tracker.paused(), run.stop.checked_before_each_forward(run.state.model):
            losses, _ = evaluate(run.settings, run.state.model, run.dataset.eval_sets, run.device)
            if not due.last:  # after the last step `finish` generates them
                samples = generate_samples(run, run.state.model, run.device)
    except job.Stopped:
        run.log.write(metrics)
        raise
    metrics |= losses
    # for the next save; added to the checkpoint of this step if a stop saved that before the evaluation
    run.checkpoints.record_eval_loss(run.state, metrics["eval_loss"])
    run.log.write(metrics, samples)
    if problem := report.first_not_finite(metrics):
        raise_divergence(run, problem)


def raise_divergence(run: Run, problem: str) -> NoReturn:
    """Wait for the save in progress and raise the UserError of a diverged run."""
    run.checkpoints.wait()
    raise report.divergence_error(problem, run.folder, run.checkpoint)


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


def save(run: Run, due: job.Actions) -> None:
    """Save the state. A signal during a save before the last step stops the run here, not one step later, which would
    have to be saved too.

    Raises:
        job.Stopped: a stop was requested.
    """
    run.checkpoints.save(run.state, wait=due.last)
    if not due.last:
        run.stop.raise_if_stopping()


def finish(run: Run) -> None:
    """End a run that has no step left: metrics, samples, an export, gates, and what to do next.

    Raises:
        UserError: a gate is missed, or a checkpoint or lines of the log could not be written.
        job.Stopped: a stop was requested before the export.
    """
    settings, stop = run.settings, run.stop
    with stop.checked_before_each_forward(run.state.model):
        samples = generate_samples(run, run.state.model, run.device)
    # An export and the wait for the plan take long; without them the run is done anyway.
    if settings.export or plan.plans_itself(settings, run.device):
        stop.raise_if_stopping()
    stop.can_save = False  # nothing is left to save: from here on a signal ends the process at once
    metrics = run.log.finish(samples, plan.predicted_metrics(run.plan_process) | run.checkpoints.best_metrics())
    if settings.export:
        export(run, run.state)
    job.print0(report.next_commands(settings, run.folder, run.state.step, metrics))
    run.checkpoints.check_saved()
    run.log.check_written()
    base.broadcast_from_rank_0(lambda: report.check_gates(settings, metrics))


def save_and_stop(run: Run) -> int:
    """Save the last complete step after a stop, unless it is saved already, and print so. Return the exit code."""
    log, checkpoints, stop = run.log, run.checkpoints, run.stop

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
            log.write(metrics)  # the problem, or the reasons of skipped steps, are in no checkpoint
        if problem:
            raise_divergence(run, problem)
        checkpoints.save(run.state, wait=True)
        saved = is_saved()
    saved_in = checkpoints.folder if saved else None
    job.print0(report.describe_stop(run.settings, run.folder, run.state.step, stop.name, saved_in))
    return stop.exit_code if saved and not log.has_unwritten_lines() else 1


# ---- Without training ------------------------------------------------------------------------------------------------


def evaluate_only(
    args: flags.Args,
    device: torch.device,
    build_mesh: Callable[[flags.Flags, torch.device], DeviceMesh],
    build_model: Callable[..., transformers.PreTrainedModel],
    evaluate: Evaluate,
) -> None:
    """--num-steps 0: evaluate a checkpoint or pretrained weights, generate samples, export. The functions are the
    script's."""
    with report.keep_stdout_for_json(args) as stdout:
        mesh = build_mesh(args, device)
        opened = open_run(args)
        settings, checkpoint = opened.settings, opened.checkpoint
        if settings.eval_interval:
            load_eval_data(opened)
        state.check_same_weights(settings, opened.config, opened.manifest)
        model = build_model(settings, opened.config, mesh, device, read_weights=not checkpoint)
        loaded = state.TrainState(model)
        if checkpoint:
            # returns a newer one, if a running run has removed this one meanwhile
            opened.checkpoint = state.load_for_inference(settings, loaded, opened.config, checkpoint)
        state.check_finite(settings, loaded, opened.checkpoint)
        if settings.eval_interval:
            losses, tokens = evaluate(settings, model, opened.dataset.eval_sets, device)
            report.print_evaluation(settings, opened.dataset, loaded if checkpoint else None, losses, tokens, stdout)
        report.print_samples(generate_samples(opened, model, device))
        if settings.export:
            export(opened, loaded)


def show_samples(args: flags.Args) -> None:
    """--show-samples: print what a step of this run trains on, in the order that the run recorded if it has one."""
    opened = open_run(args)
    recorded = state.find_recorded_data(args, opened.checkpoint)
    inputs = (opened.corpora, opened.tokenizer, opened.config)
    dataset = data.load(opened.settings, *inputs, manifest=recorded)
    if recorded:
        state.check_data(opened.settings, dataset.record, recorded)
    data.show_samples(opened.settings, dataset, opened.tokenizer, recorded)


def generate_samples(opened: Opened, model: transformers.PreTrainedModel, device: torch.device) -> list[dict[str, Any]]:
    """Generate a continuation of each prompt; for conversations, an answer to it."""
    job.enter_phase("sampling")
    settings, prompts, dataset = opened.settings, opened.prompts, opened.dataset
    if settings.demo and settings.dataset != "demo" and not prompts and dataset is not None and dataset.demo_prompt:
        prompts = [dataset.demo_prompt]  # --demo has no prompt for other data: continue their first words
    stop_ids, texts = find_stop_ids(opened), render_prompts(opened, prompts)
    return [models.sample(settings, text, stop_ids, model, opened.tokenizer, device) for text in texts]


def export(opened: Opened, loaded: state.TrainState) -> None:
    """Write the folder of --export."""
    settings, trained_on = opened.settings, state.trained_on(opened.settings, opened.record)
    state.export(settings, loaded, opened.tokenizer, find_stop_ids(opened), trained_on, opened.replaced_run)


def find_stop_ids(opened: Opened) -> list[int]:
    """The token ids that end a sample."""
    is_chat = opened.is_chat_model()
    return base.broadcast_from_rank_0(lambda: data.end_tokens(opened.settings, is_chat, opened.tokenizer))
