"""Train a causal language model with FSDP2: one `fully_shard` per decoder layer, on one device or a thousand.

    python train_fsdp.py --demo
    torchrun --nproc_per_node=4 train_fsdp.py --model smollm3-3b --zero-stage 2
    accelerate launch --num_processes=4 train_fsdp.py --model smollm3-3b

run(), near the end, is the table of contents.
"""

import logging
import os
import signal
import sys
import warnings

if __name__ == "__main__":  # before the heavy imports, which warn and can be interrupted too
    # The default action of Ctrl-C ends every rank at once and silently, even inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not sys.warnoptions:  # `python -W default train_fsdp.py` shows them all
        warnings.filterwarnings("ignore")
        os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
        for noisy in ("torchao", "torch.utils._pytree", "torch._higher_order_ops", "transformers", "accelerate"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name before torch 2.9, which the new one would override
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("WANDB_SILENT", "true")

import argparse
import contextlib
import functools
import gc
import math
import pathlib
import re
import traceback
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import utils
from harness.checkpoints import Checkpoints, TrainState, compare, describe_identity, find_checkpoint, keep_global_batch
from harness.export import export
from harness.folders import check_writable, choose_folder
from harness.loss import full_loss, fuse_loss
from harness.models import (
    PretrainedWeights,
    choose_attention,
    decoder_layers,
    find_source,
    fp8_converter,
    know_documents,
    load_config,
    load_tokenizer,
    make_real,
)
from harness.own_plan import read_plan, resolve_batch_size, start_plan
from harness.planning import plan
from harness.processes import StopRequest, fail, say, start_processes, stop_processes
from harness.recorder import Recipe
from harness.report import (
    Report,
    check_gates,
    check_that_figures_will_exist,
    choose_trackers,
    columns,
    count_flops,
    describe_setup,
    figures_of_all_ranks,
    finish_metrics,
    profiling,
    record_memory,
    serve_metrics,
    summarize,
)
from harness.settings import ASSETS, PROFILED_STEPS, parse_args
from harness.streaming import StreamedBatches, stream_dataset
from utils import UserError

# ----------------------------------------------------------------------------------------------------------------------
# Model


def build_mesh(args: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """(shard,) or, for HSDP and stage 0, (replicate, shard)."""
    world = dist.get_world_size()
    replicas = world if args.zero_stage == 0 else args.dp_replicate_size
    if world % replicas:
        raise UserError(f"--dp-replicate-size {replicas}: does not divide the world of {world} ranks")
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def build_model(args: argparse.Namespace, config, mesh: DeviceMesh, read_weights: bool = True) -> nn.Module:
    """Builds the model sharded: on the meta device first, then one decoder layer after the other made real and cut.

    No rank ever holds more than one whole layer beside its shards (and, for a moment, embedding and head). Every rank
    draws the same random numbers in the same order, so the weights do not depend on world size or sharding.
    """
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    dtype = torch.bfloat16 if args.precision == "bf16-pure" else torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=choose_attention(args, config), dtype=dtype
            )
    except (ValueError, ImportError) as error:
        raise UserError(f"--attention {args.attention}: {utils.first_line(error)}") from error
    know_documents(args, model)
    if args.activation_memory_budget is not None:
        torch._functorch.config.activation_memory_budget = args.activation_memory_budget
    layers = decoder_layers(model)
    convert_to_fp8 = fp8_converter(args) if args.precision == "fp8" else None
    weights = None
    if args.init == "pretrained" and read_weights:
        path = next(path for path, module in model.named_modules() if module is layers)
        weights = PretrainedWeights(model, path, find_source(args.model)[1], dtype)
    if args.fused_loss is not False:
        args.fused_loss = fuse_loss(model, args.fused_loss, args.compile)
    if not args.fused_loss:
        model.loss_function = full_loss

    low = torch.bfloat16 if args.precision in ("bf16", "fp8") else None
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if args.cpu_offload else OffloadPolicy(),
    )
    recompute = {"context_fn": selective_contexts} if args.activation_checkpointing == "selective" else {}
    torch.manual_seed(args.seed)
    model.train()
    in_layers = {module for layer in layers for module in layer.modules()}
    make_real(model, [module for module in model.modules() if module not in in_layers], device, weights)
    for index, layer in enumerate(layers):
        make_real(model, list(layer.modules()), device, weights, index)
        # The order matters. float8 swaps the linears, so it comes before whatever remembers them. Checkpointing comes
        # before compile, so that the compiler sees what is recomputed and can fuse it. compile comes before
        # fully_shard, so that the all-gathers are issued around the compiled region instead of breaking it.
        if convert_to_fp8:
            convert_to_fp8(layer)
        if args.activation_checkpointing != "none":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **recompute)
        if args.compile:
            layer.forward = torch.compile(layer.forward)
        shard(layer, reshard_after_forward=args.zero_stage == 3)
    # The root's group (embedding, norm, head) is needed again as soon as the backward begins: it is never resharded
    # in between.
    shard(model, reshard_after_forward=False)
    # The optimizer comes after this: made before, it would hold the whole parameters, and states of their size.
    torch.manual_seed(args.seed + dist.get_rank())  # every rank its own dropout
    return model


def selective_contexts():
    """Keep what is expensive to compute again, the results of matmuls and attention; recompute everything else."""

    def policy(context, op, *args, **kwargs):
        expensive = re.search(r"mm\.|attention|attn", str(op))  # aten.addmm.default, ..._flash_attention.default
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters, weight decay on matrices only, its states made already."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=tuple(args.betas), fused=True)
    else:
        if not find_spec("torchao"):
            raise UserError("--optimizer adamw8bit: needs the package torchao (pip install torchao)")
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(groups, lr=args.lr, betas=tuple(args.betas))
    # One step with zero gradients and zero learning rate makes the states, so that they can be checked, counted in
    # memory and loaded into before training; it changes no parameter.
    for group in optimizer.param_groups:
        set_learning_rate(group, 0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        set_learning_rate(group, args.lr)
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def set_learning_rate(group: dict, rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def build_scheduler(args: argparse.Namespace, optimizer: torch.optim.Optimizer):
    """The schedule of transformers by that name; the decay of warmup_stable_decay takes the last fifth."""
    decay = max(1, args.num_steps // 5)
    specific = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": decay}}
    steps = (args.warmup_steps, args.num_steps)
    return transformers.get_scheduler(
        args.lr_scheduler, optimizer, *steps, scheduler_specific_kwargs=specific.get(args.lr_scheduler)
    )


def verify_sharding(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> str:
    """One line about what is sharded and how.

    Raises:
        RuntimeError: a parameter or an optimizer state is not the DTensor that the stage asks for.
    """
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    parameters = dict(model.named_parameters())
    states = {
        f"{name}.{key}": state
        for name, parameter in parameters.items()
        for key, state in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(state) and state.dim() > 0
    }
    for name, tensor in (parameters | states).items():
        if not isinstance(tensor, DTensor) or tuple(tensor.placements) != placements or tensor.device_mesh != mesh:
            raise RuntimeError(f"{name} is not sharded as {placements} over {mesh}: {type(tensor).__name__}")
    for name, parameter in parameters.items():
        if parameter.requires_grad and not any(state.startswith(f"{name}.") for state in states):
            raise RuntimeError(f"{name} has no optimizer state")
    here = sum(parameter.to_local().numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in parameters.values())
    return (
        f"{len(parameters)} parameters and {len(states)} optimizer states are DTensors, "
        f"{' x '.join(map(repr, placements))}; rank {dist.get_rank()} holds {100 * here / total:.1f} % of the elements"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Data


def load_data(args: argparse.Namespace, tokenizer, config, accelerator: Accelerator):
    """The training windows and, where evaluation is asked for, the held-out ones."""
    vocab_size = config.get_text_config().vocab_size
    if args.dataset == "synthetic":
        train = utils.SyntheticDataset(vocab_size, args.sequence_length, args.seed)
        held_out = utils.SyntheticDataset(vocab_size, args.sequence_length, args.seed + 1, windows=1024)
        return train, held_out if args.eval_interval else None
    source = str(ASSETS / "demo" / "stories") if args.dataset == "demo" else args.dataset
    corpus = (tokenizer, args.sequence_length, accelerator, source)
    per_microbatch, held_out = args.batch_size * dist.get_world_size(), None
    if args.streaming:
        load = functools.partial(stream_dataset, *corpus, vocab_size=vocab_size, seed=args.seed)
        train = load(split=args.dataset_split)
        if args.eval_interval:
            stream, windows = load(split=args.eval_split), args.eval_steps * per_microbatch
            held_out = utils.from_main_process(lambda: stream.head(windows), dist.get_rank() == 0)
    else:
        load = functools.partial(utils.get_dataset, *corpus, vocab_size=vocab_size, cache_dir=args.cache_dir)
        train = load(split=args.dataset_split, log=functools.partial(say, "data      "))
        needed = per_microbatch * args.gradient_accumulation_steps
        if len(train) < needed:
            raise UserError(
                f"--dataset {args.dataset}, split {args.dataset_split!r}: {len(train):,} windows of "
                f"{args.sequence_length} tokens do not fill one global batch of {needed}; use a smaller batch, a "
                "shorter sequence or more text"
            )
        held_out = load(split=args.eval_split) if args.eval_interval else None
    if args.document_mask:
        if tokenizer.eos_token_id is None:
            raise UserError(f"--document-mask: {tokenizer.name_or_path} has no end-of-text token (eos_token)")
        for packed in filter(None, (train, held_out)):
            packed.end_of_text = tokenizer.eos_token_id
    return train, held_out


def ignore_signals(worker: int) -> None:
    """A scheduler signals every process of a job; the data workers serve until their rank leaves."""
    for number in (*StopRequest.SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def training_batches(
    args: argparse.Namespace, dataset, state: "TrainState", device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of this rank on its device from sample `state.samples` on, read ahead by workers.

    Those of a stream move `state.position` with them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.streaming:
        source = {
            "dataset": StreamedBatches(dataset, args.batch_size, rank, world, state.samples, state.position),
            "batch_size": None,
            "prefetch_factor": 16 if args.num_workers else None,  # enough for while the shuffle buffer is filled again
        }
    else:
        source = {
            "dataset": dataset,
            "batch_sampler": utils.GlobalOrderSampler(
                len(dataset), args.batch_size, rank, world, args.seed, state.samples
            ),
            "collate_fn": utils.create_collate_fn(dataset.end_of_text),
        }
    cuda, ahead = device.type == "cuda", None
    loader = DataLoader(**source, num_workers=args.num_workers, pin_memory=cuda, worker_init_fn=ignore_signals)
    side = torch.cuda.Stream() if cuda else None  # the next batch is copied while the current one computes
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        # rank 0's is saved: at the end of a step, and on CUDA, one batch ahead, it is not beyond the next step's samples
        state.position = batch.pop("position", None)
        if not cuda:
            yield batch
            continue
        ready = ahead
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.stream(side):
            ahead = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if ready is not None:
            for tensor in ready.values():
                tensor.record_stream(torch.cuda.current_stream())
            yield ready


def held_out_batches(args: argparse.Namespace, dataset, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of the held-out windows, each of them once over all ranks, the same number of batches on all.

    Where the last round has fewer windows than places, the labels of the places left over count for nothing.
    """
    rank, per_round = dist.get_rank(), args.batch_size * dist.get_world_size()
    windows = min(len(dataset), args.eval_steps * per_round or len(dataset))
    collate = utils.create_collate_fn(dataset.end_of_text)
    for first in range(rank * args.batch_size, math.ceil(windows / per_round) * per_round, per_round):
        indices = range(first, first + args.batch_size)
        batch = collate([dataset[index % windows] for index in indices])
        batch["labels"][[index >= windows for index in indices]] = utils.IGNORE_INDEX
        yield {name: tensor.to(device) for name, tensor in batch.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


@contextlib.contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode without gradients; afterwards no parameter stays gathered and no random state is touched."""
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=cuda):
        yield
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def evaluate(args: argparse.Namespace, model: nn.Module, dataset, device: torch.device) -> float:
    """Mean loss over every token of the held-out windows."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    with evaluating(model):
        for batch in held_out_batches(args, dataset, device):
            tokens = (batch["labels"] != utils.IGNORE_INDEX).sum()
            loss = model(**batch, use_cache=False).loss
            total += torch.stack([loss.double() * tokens, tokens.double()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def sample(args: argparse.Namespace, model: nn.Module, tokenizer, device: torch.device) -> str:
    """The prompt and its continuation; every rank takes part with the same random numbers."""
    prompt = tokenizer(args.sample_prompt, return_tensors="pt", add_special_tokens=False).to(device)
    # the length changes with every token: eager code, or the compiler would start again each time
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(args.seed)
        tokens = model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=args.sample_tokens,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            use_cache=True,
            synced_gpus=dist.get_world_size() > 1,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


# ----------------------------------------------------------------------------------------------------------------------
# The run


def tokens_per_step(args: argparse.Namespace) -> int:
    """Tokens of one optimizer step: every rank, every microbatch."""
    return dist.get_world_size() * args.gradient_accumulation_steps * args.batch_size * args.sequence_length


def train_step(args, model, optimizer, batches, tracker) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step. Returns this rank's mean loss and the global gradient norm, both still on the device."""
    total = 0.0
    for microbatch in range(args.gradient_accumulation_steps):
        last = microbatch == args.gradient_accumulation_steps - 1
        model.set_requires_gradient_sync(last or not (args.defer_grad_sync or args.zero_stage == 1))
        if not last:  # replicas meet once a step; until then each shard group sums its own reduce-scatters
            model.set_requires_all_reduce(False)
        # Below stage 3 the parameters stay whole from the first microbatch to the last: one all-gather a step.
        model.set_reshard_after_backward(last or args.zero_stage == 3)
        with tracker.data_wait():
            batch = next(batches)
        loss = model(**batch, use_cache=False).loss / args.gradient_accumulation_steps
        loss.backward()
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    if args.fp8_recipe == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for the scales of all layers
    return total, norm


def read_losses(losses: list[torch.Tensor], step: int) -> float:
    """The global loss of `step`; `losses` are this rank's of the steps up to it that were not read yet.

    Raises:
        UserError: one of them is NaN or infinite; the first such step is named.
    """
    values = torch.stack(losses)
    dist.all_reduce(values)
    values = (values / dist.get_world_size()).tolist()
    for at, value in enumerate(values, step - len(values) + 1):
        if not math.isfinite(value):
            advice = "a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"
            raise UserError(f"the loss became {value} at step {at}; {advice}", exit_code=1)
    return values[-1]


def export_only(args: argparse.Namespace, device: torch.device, is_main: bool) -> int:
    """--num-steps 0: from a checkpoint, or from --init pretrained, to --export; no data, no optimizer."""
    utils.from_main_process(lambda: check_writable("--export", pathlib.Path(args.export).expanduser()), is_main)
    config = utils.from_main_process(lambda: load_config(args), is_main)
    tokenizer = utils.from_main_process(lambda: load_tokenizer(args, config), is_main)
    mesh, checkpoint = build_mesh(args, device), find_checkpoint(args, pathlib.Path())
    if checkpoint:
        compare(args, describe_identity(args, config), checkpoint[1])
    model = build_model(args, config, mesh, read_weights=not checkpoint)
    if checkpoint:
        TrainState(model).load(*checkpoint)
        say(f"loaded     {checkpoint[0]}, step {checkpoint[1]['step']:,}")
    export(args, model, tokenizer)
    return 0


def run(args: argparse.Namespace, device: torch.device, stop: StopRequest) -> int:
    """Trains one model, from its flags to its last line; returns the exit code."""
    is_main = dist.get_rank() == 0
    if args.num_steps == 0:
        return export_only(args, device, is_main)
    folder, trackers = utils.from_main_process(lambda: (choose_folder(args), choose_trackers(args)), is_main)
    accelerator = Accelerator(cpu=device.type == "cpu", log_with=trackers or None, project_dir=folder)
    check_that_figures_will_exist(args, device)
    utils.from_main_process(lambda: serve_metrics(args), is_main)
    dump_memory = record_memory(folder) if args.memory_snapshot else None
    config = utils.from_main_process(lambda: load_config(args), is_main)
    tokenizer = utils.from_main_process(lambda: load_tokenizer(args, config), is_main)
    if args.batch_size == "auto":
        args.batch_size = utils.from_main_process(lambda: resolve_batch_size(args), is_main)
        say(f"planned    --batch-size {args.batch_size}, the largest that fits by --plan")
    mesh = build_mesh(args, device)
    checkpoint = find_checkpoint(args, folder)
    if checkpoint:
        keep_global_batch(args, checkpoint[1])
    train_set, eval_set = load_data(args, tokenizer, config, accelerator)
    identity = describe_identity(args, config, tokenizer, train_set)
    changed = compare(args, identity, checkpoint[1]) if checkpoint else ""

    model = build_model(args, config, mesh, read_weights=not checkpoint)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    verified = verify_sharding(model, optimizer, mesh)

    flops, counted = count_flops(args, model)
    peak = args.peak_tflops or utils.get_gpu_peak_tflops()
    if args.min_mfu and not flops:
        raise UserError(f"--min-mfu: {counted}")
    tracker = utils.PerformanceTracker(args.perf_warmup_steps, dist.get_world_size(), peak or 0)
    state = TrainState(model, optimizer, scheduler, tracker)
    if checkpoint:
        state.load(*checkpoint)
    say(describe_setup(args, model, mesh, train_set, tokens_per_step(args), counted, peak, verified))
    if checkpoint:
        say(columns({"resumed": f"{checkpoint[0]} at step {state.step:,}"} | ({"changed": changed} if changed else {})))
    if state.step >= args.num_steps:
        say(f"done       nothing to train: step {state.step:,} of {args.num_steps:,}")
        if is_main:
            finish_metrics(folder / "metrics.jsonl", tracker)
        if args.export:
            export(args, model, tokenizer)
        return 0
    report = Report(args, accelerator, folder, state)
    checkpoints = Checkpoints(args, folder, identity, device)

    # Cycles are collected at log lines: a collection in the middle of a step stops one rank, and all wait for it.
    gc.collect()
    gc.freeze()  # what is here now stays
    gc.disable()
    planning = start_plan(args) if is_main and (args.plan_gpu or device.type == "cuda") else None
    batches = training_batches(args, train_set, state, device)
    unread_losses: list[torch.Tensor] = []
    first = state.step + max(args.perf_warmup_steps, 1) + 1
    profiled, trace = range(first, first + PROFILED_STEPS) if args.profile else (), contextlib.ExitStack()
    stopped = False
    while state.step < args.num_steps and not stopped:
        if state.step + 1 in profiled[:1]:
            trace.enter_context(profiling(folder, tracker))
        learning_rate = float(scheduler.get_last_lr()[0])
        loss, grad_norm = train_step(args, model, optimizer, batches, tracker)
        scheduler.step()
        state.count(tokens_per_step(args) // args.sequence_length, tokens_per_step(args))
        step = state.step
        unread_losses.append(loss)
        if step in profiled[-1:]:
            trace.close()
        report.bar.update()

        last = step == args.num_steps
        evaluates = eval_set is not None and (last or step % args.eval_interval == 0)
        logs = evaluates or last or step == 1 or step % args.log_interval == 0
        speed = {} if step in profiled else tracker.step(tokens_per_step(args), flops, synchronize=logs)
        stop.can_save = True
        stopped = stop.agreed() and not last
        saves = stopped or (args.checkpoint_interval and (last or step % args.checkpoint_interval == 0))
        if saves or logs:
            latest = read_losses(unread_losses, step)  # what is saved or said is finite
            unread_losses.clear()
        if logs:
            gc.collect()
            metrics = {
                "step": step,
                "loss": latest,
                "grad_norm": grad_norm.full_tensor().item(),
                "learning_rate": learning_rate,
                "tokens_seen": state.tokens,
            } | figures_of_all_ranks(speed, state, device)
            story = None
            if evaluates:
                with tracker.excluded():
                    metrics["eval_loss"] = evaluate(args, model, eval_set, device)
                    story = sample(args, model, tokenizer, device) if args.sample_prompt and not last else None
            report.log(metrics, tracker.get_print_message(metrics))
            if story:
                say(story)
        if saves:
            with tracker.excluded():
                checkpoints.save(state, wait=stopped or last)

    stop.can_save = False
    checkpoints.finish()
    if stopped:
        report.close(None)
        saved = f"saved in {checkpoints.folder}; --resume auto --run-name {folder.name} goes on"
        say(
            f"stopped    by {stop.name or 'a signal to another rank'} after step {step}"
            + f", {saved}" * (not checkpoints.failures)
        )
        return StopRequest.EXIT_CODE if not checkpoints.failures else 1
    metrics |= figures_of_all_ranks(tracker.summary(), state, device)
    if planning:
        predicted, problem = read_plan(planning, patience=300)
        if predicted:
            metrics |= {
                "predicted_peak_memory_alloc": predicted["memory_gib"]["total"],
                "predicted_peak_memory_reserved": predicted["memory_gib"]["reserved"],
                "predicted_step_time_ms": predicted["step_time_ms"],
            }
        else:
            say(f"planned    nothing: {problem}")
    report.close(metrics)
    say(summarize(metrics, folder, state.started))
    if args.sample_prompt:
        say("\n" + sample(args, model, tokenizer, device))
    if dump_memory:
        dump_memory()
    if args.export:
        export(args, model, tokenizer)
    if checkpoints.failures:
        raise UserError(f"--checkpoint-interval: {checkpoints.failures} checkpoints could not be saved, see above", 1)
    if report.failed:
        raise UserError(f"--output-dir: {folder / 'metrics.jsonl'} could not be written, see above", 1)
    utils.from_main_process(lambda: check_gates(args, metrics), is_main)
    return 0


def memory_savers(args: argparse.Namespace) -> str:
    """The flags that would lower memory, the cheapest in speed first, less those already given."""
    ways = {
        "--zero-stage 3": args.zero_stage == 3,
        "--activation-checkpointing selective": args.activation_checkpointing != "none",
        "--activation-checkpointing full": args.activation_checkpointing == "full",
        "a smaller --batch-size": args.batch_size == 1,
        "--optimizer adamw8bit": args.optimizer == "adamw8bit",
        "--cpu-offload": args.cpu_offload,
        "a shorter --sequence-length": False,
    }
    return ", ".join([way for way, taken in ways.items() if not taken][:3])


RECIPE = Recipe(build_mesh, build_model, build_optimizer, train_step)


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse_args(argv)
        if args.plan:
            return plan(args, RECIPE)
        stop = StopRequest()
        exit_code = run(args, start_processes(), stop)
        stop_processes(stop)
        sys.exit(exit_code)
    except UserError as error:
        fail(f"train_fsdp.py: error: {error}", error.exit_code)
    except torch.cuda.OutOfMemoryError as error:
        fail(f"train_fsdp.py: error: {utils.first_line(error)} Try {memory_savers(args)}.", 1)
    except Exception:  # a bug: it keeps its traceback
        fail(traceback.format_exc(), 1)


if __name__ == "__main__":
    main()
