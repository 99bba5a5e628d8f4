"""Functions that ranks of tests run: the program, one that stalls, and for tests/pair/test_parallel.py `main`, which
trains many configurations in one process group and writes WORKSPACE/observed-RANKS.json."""

import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import time
import warnings
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._inductor import compile_fx
from torch.distributed.tensor import DTensor

import train_fsdp
import utils
from harness import data, job, resolving
from harness import model as models
from harness.base import all_gather_objects, broadcast_from_node_main
from harness.data import tokenize
from harness.flags import parse_args
from harness.job import heartbeats, start_processes, stop_processes, world
from harness.job.signals import StopRequest
from harness.model.configs import load_config
from harness.model.optimization import local
from harness.model.weights import decoder_layers
from harness.state import store

BATCH = 16  # sequences of every optimizer step, however many ranks and microbatches share them
STEPS = 6

SIZES = {
    "vocab_size": 1536,  # the demo tokenizer's
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "smollm3": ("smollm3", SIZES | {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "deep": ("smollm3", SIZES | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    # nothing in it divides by 4, and little by 2
    "uneven": (
        "llama",
        SIZES
        | {"vocab_size": 1537, "hidden_size": 66, "intermediate_size": 89, "tie_word_embeddings": True}
        | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama": ("llama", SIZES | {"tie_word_embeddings": False}),
    "mistral": ("mistral", SIZES | {"sliding_window": 16}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS | {"head_dim": 16}),
    "mixtral": (  # with rows of experts that are no multiples of 16 bytes
        "mixtral",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 90},
    ),
    "gemma2": ("gemma2", SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gpt2": (
        "gpt2",
        {"vocab_size": 1536, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
        | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
}
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gpt2")
QUICK_TRIPS = ("llama", "qwen3_moe", "gpt2")
ROUND_TRIPS = (*QUICK_TRIPS, "smollm3", "mixtral")

# {name: (model, flags)}: each has the losses that its model has on one rank without flags
COMPILED = {
    "compiled with selective checkpointing": ("smollm3", "--compile --activation-checkpointing selective"),
    "compiled with full checkpointing": ("smollm3", "--compile --activation-checkpointing full"),
}
ALONE = {  # on one rank, whose parameters and gradients are not copied
    "one rank in 4 microbatches": ("smollm3", "--gradient-accumulation-steps 4")
}
QUICK = {
    "stage 3 in 4 microbatches": ("smollm3", "--gradient-accumulation-steps 4"),
    "stage 1 in 4 microbatches": ("smollm3", "--zero-stage 1 --gradient-accumulation-steps 4"),
    "everything": (
        "smollm3",
        "--zero-stage 2 --dp-replicate-size 2 --gradient-accumulation-steps 2 --defer-grad-sync --cpu-offload"
        " --activation-checkpointing selective --no-fused-loss --attention eager --num-workers 1",
    ),
    "2 ranks a sequence, 2 replicas": (
        "smollm3",
        "--context-parallel 2 --dp-replicate-size 2 --gradient-accumulation-steps 2"
        " --activation-checkpointing selective",
    ),
}
SLOW = {
    "offload": ("smollm3", "--cpu-offload --gradient-accumulation-steps 2"),
    "stage 0 in 4 microbatches": ("smollm3", "--zero-stage 0 --gradient-accumulation-steps 4"),
    "stage 3 deferred": ("smollm3", "--gradient-accumulation-steps 4 --defer-grad-sync"),
    "2 replicas in 4 microbatches": ("smollm3", "--dp-replicate-size 2 --gradient-accumulation-steps 4"),
    "2 replicas at stage 1": ("smollm3", "--dp-replicate-size 2 --zero-stage 1 --gradient-accumulation-steps 4"),
    "2 ranks a sequence at stage 1": (
        "smollm3",
        "--context-parallel 2 --zero-stage 1 --gradient-accumulation-steps 2 --no-fused-loss",
    ),
    "2 ranks a sequence at stage 2": ("smollm3", "--context-parallel 2 --zero-stage 2 --attention eager"),
    "2 ranks a sequence, checkpointed, offloaded": (
        "smollm3",
        "--context-parallel 2 --activation-checkpointing full --cpu-offload",
    ),
    "4 ranks a sequence of Mixtral": ("mixtral", "--context-parallel 4"),
    "2 ranks a sequence of Gemma 2": ("gemma2", "--context-parallel 2"),
    "uneven": ("uneven", ""),
    "uneven at stage 0": ("uneven", "--zero-stage 0"),
    "uneven at stage 2 in 4 microbatches": ("uneven", "--zero-stage 2 --gradient-accumulation-steps 4"),
} | {name: (name, "") for name in FAMILIES if name not in QUICK}
# {name: flags}: these only come near the fp32 losses
ALONE_NEAR = {
    "one rank, bf16 in 2 microbatches": "--precision bf16 --zero-stage 1 --gradient-accumulation-steps 2",
    "one rank, bf16-pure checkpointed": "--precision bf16-pure --activation-checkpointing full",
    "one rank, fp8": "--precision fp8 --fp8-emulate",
}
QUICK_NEAR = {"bf16 in 4 microbatches": "--precision bf16 --zero-stage 2 --gradient-accumulation-steps 4"}
SLOW_NEAR = {
    "fp8 tensorwise in 2 replicas": "--precision fp8 --fp8-emulate --dp-replicate-size 2",
    "bf16-pure": "--precision bf16-pure",
    "2 ranks a sequence, fp8 tensorwise": "--precision fp8 --fp8-emulate --context-parallel 2",
    "adamw-bf16": "--optimizer adamw-bf16",
    "adamw8bit": "--optimizer adamw8bit",
    "fp8 rowwise": "--precision fp8 --fp8-emulate --fp8-recipe rowwise",
    "fp8 rowwise_with_gw_hp": "--precision fp8 --fp8-emulate --fp8-recipe rowwise_with_gw_hp",
    "fp8 tensorwise checkpointed and offloaded": "--precision fp8 --fp8-emulate --zero-stage 2 --cpu-offload"
    " --activation-checkpointing selective",
}
REPLICATED = {  # every kind of parameter that is replicated
    "stage 0": "--zero-stage 0",
    "2 replicas": "--dp-replicate-size 2",
    "2 replicas, fp8 tensorwise": "--dp-replicate-size 2 --precision fp8 --fp8-emulate",
}


def as_rank(rank: int, world: int, port: int, output: str, function, arguments: tuple) -> None:
    """Call `function` in torchrun's environment of a rank; its output goes into a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    warnings.filterwarnings("ignore")
    multiprocessing.set_start_method("fork", force=True)  # for the data loader's workers, as without a fork server
    function(*arguments)


def answer(file: str, function, *arguments) -> None:
    """Call `function` in every rank of a world; write what it returns on rank 0."""
    start_processes()
    returned = function(*arguments)
    if dist.get_rank() == 0:
        pathlib.Path(file).write_text(json.dumps(returned))
    stop_processes()


def as_program(stdout: str, stderr: str, environment: dict, folder: pathlib.Path, arguments: list[str]) -> None:
    """Run train_fsdp.py as a shell does in this folder and environment; its output goes into two files."""
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    for descriptor, name in ((1, stdout), (2, stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    multiprocessing.set_start_method("fork", force=True)  # as in `as_rank`
    sys.argv = [train_fsdp.__file__, *arguments]
    runpy.run_path(train_fsdp.__file__, run_name="__main__")


def program(*argv: str) -> None:
    train_fsdp.main(parse_args([*argv]))


def impatient(environment: dict, *argv: str) -> None:
    """The program as a rank of another world, which reports at once that it waits for the store of its job."""
    os.environ |= environment
    world.STORE_TIMEOUT = 0.1
    program(*argv)


def stalled(how: str, *argv: str) -> None:
    """The program, of which one rank stalls: it reads or saves for ever, waits in another collective, or is stopped
    before the ranks meet. With `lock` rank 1 reads for ever, and rank 0 holds the interpreter's lock meanwhile."""

    def forever(*_, **__):
        time.sleep(1000)

    def hang_at(wanted: tuple[str, int], hang) -> None:
        enter_phase = heartbeats.enter_phase

        def hang_there(phase: str, step: int | None = None):
            enter_phase(phase, step)
            if (phase, heartbeats.PROGRESS.step) == wanted:
                hang()

        job.enter_phase = hang_there

    if how == "lock" and os.environ["RANK"] == "0":  # as a launch into a full queue does: no thread of it runs
        hang_at(("forward", 8), lambda: ctypes.PyDLL(None).sleep(1000))
    if os.environ["RANK"] == "1":
        if how == "lock":
            hang_at(("data", 8), forever)
        if how == "elsewhere":
            hang_at(("log", 7), lambda: dist.recv(torch.zeros(1), src=0))
        if how == "never":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "data":
            read, calls = data.PackedDataset.__getitem__, itertools.count()
            data.PackedDataset.__getitem__ = lambda *args: forever() if next(calls) > 20 else read(*args)
        if how == "save":
            store.sha256 = forever
    program(*argv)


def slow(what: str, seconds: str, *argv: str) -> None:
    """The program on ranks that work slowly: one thing takes `seconds` in one call, or one after each token or
    batch."""
    delays = itertools.chain([float(seconds)], itertools.repeat(0.0))

    def slowly(function, each: bool = False):
        return lambda *args, **options: (time.sleep(1 if each else next(delays)), function(*args, **options))[1]

    if what == "save":
        dcp.FileSystemWriter.write_data = slowly(dcp.FileSystemWriter.write_data)
    elif what == "export":
        safetensors.torch.save_file = slowly(safetensors.torch.save_file)
    elif what == "compile":
        compile_fx.compile_fx = slowly(lambda graph, *_, **__: graph.forward)
    elif what == "tokenization":
        tokenize.TextEncoder.encode = slowly(tokenize.TextEncoder.encode)
    elif what == "sampling":
        torch.multinomial = slowly(torch.multinomial, each=True)
    elif what == "evaluation":
        eval_batches, wait = data.eval_batches, slowly(lambda batch: batch, each=True)
        data.eval_batches = lambda *args: map(wait, eval_batches(*args))
    program(*argv)


def slowed(phase: str, there: str, *argv: str) -> None:
    """The program, of which one phase takes minutes, in pieces of a second, but for `save` and `end`, which take three
    seconds; `there` is a file that rank 0 makes when it is in that phase, of step 3 or later."""
    enter_phase = heartbeats.enter_phase

    def wait_here(seconds: float) -> None:
        if os.environ.get("RANK", "0") == "0":
            pathlib.Path(there).touch()
        time.sleep(seconds)

    def enter_slowly(name: str, step: int | None = None) -> None:
        enter_phase(name, step)
        if phase == "start" and name == "preparation":
            wait_here(60)
        elif name == phase and heartbeats.PROGRESS.step >= 3:
            wait_here(3 if phase == "end" else 1)

    if phase == "sampling":  # every token of a sample
        multinomial = torch.multinomial
        torch.multinomial = lambda *args, **options: (time.sleep(1), multinomial(*args, **options))[1]
    if phase == "save":
        sha256 = store.sha256
        store.sha256 = lambda path: (wait_here(3), sha256(path))[1]
    else:
        heartbeats.enter_phase = job.enter_phase = enter_slowly
    program(*argv)


def interrupted(*argv: str) -> None:
    """The program, which counts as long from its start, with Ctrl-C in its third step."""
    StopRequest.LONG_RUN = 0.0
    enter_phase = heartbeats.enter_phase

    def interrupt(name: str, step: int | None = None) -> None:
        enter_phase(name, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # until the thread that reads signals has the request

    heartbeats.enter_phase = job.enter_phase = interrupt
    program(*argv)


def asking_on_two_nodes() -> None:
    """Print whose answer each of three ranks has, of which the first two are the main ranks of their nodes."""
    start_processes(timeout_minutes=1)
    rank = dist.get_rank()
    answers = all_gather_objects(broadcast_from_node_main(lambda: rank, is_main=rank < 2))
    if rank == 0:
        print(answers, flush=True)
    stop_processes()


def resolved(argv: list):
    """Return the settings of a command line as a run resolves them, and the model's config."""
    settings = parse_args([*map(str, argv)])
    config = load_config(settings.model)
    return resolving.resolve_steps(resolving.resolve(settings, config)), config


def round_trip_inputs():
    return torch.randint(0, 1536, (2, 48), generator=torch.Generator().manual_seed(3))


def main(workspace: pathlib.Path, tables: dict[str, dict]) -> None:
    """Train the `same` and the `near` of the tables, and inspect the `replicas` and `round trips`."""
    device, stop = start_processes(), StopRequest()
    rank, world = dist.get_rank(), dist.get_world_size()
    built: dict = {}

    def keep(function):  # what a run builds, to inspect
        def wrapper(*args, **options):
            built[function.__name__] = function(*args, **options)
            return built[function.__name__]

        return wrapper

    train_fsdp.build_model = keep(train_fsdp.build_model)
    utils.get_flops_by_length = keep(utils.get_flops_by_length)
    models.build_optimizer = keep(models.build_optimizer)

    def arguments(name: str, flags: str, **options) -> list[str]:
        given = flags.split()
        numbers = dict(itertools.pairwise(given))
        steps, sharing = (int(numbers.get(f"--{n}", 1)) for n in ("gradient-accumulation-steps", "context-parallel"))
        options = {
            "model": workspace / "models" / name,
            "tokenizer": workspace / "tokenizer",
            "dataset": workspace / "corpus.jsonl",
            "sequence-length": 64,
            "batch-size": BATCH * sharing // world // steps,
            "precision": "fp32",
            "num-steps": STEPS,
            "num-workers": 0,
            "log-interval": 1,
            "lr": 1e-3,
            "lr-scheduler": "constant",  # runs of any length are comparable
            "output-dir": workspace / f"runs-{world}",
            "cache-dir": workspace / "cache",
        } | options
        flags = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
        return [*flags, "--no-final-checkpoint", *given]

    def share(tensors: list) -> float:
        """The largest share of the elements that a rank holds."""
        mine = sum(local(tensor).numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)
        return max(all_gather_objects(mine))

    def train(name: str, model: str, flags: str, **options) -> dict:
        built.clear()
        run_name = name.replace(" ", "-")
        train_fsdp.train_or_evaluate(
            parse_args([*arguments(model, flags, **options), "--run-name", run_name]), device, stop
        )
        if "--compile" in flags:
            torch.compiler.reset()
        lines = (workspace / f"runs-{world}" / run_name / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
        logged = [line for line in map(json.loads, lines) if not line.get("final")]
        states = [state for of_one in built["build_optimizer"].state.values() for state in of_one.values()]
        layers = decoder_layers(built["build_model"])
        linears = [module for layer in layers for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        return {
            "losses": [line["loss"] for line in logged],
            "grad_norms": [line["grad_norm"] for line in logged],
            "shares": [share([*built["build_model"].parameters()]), share([s for s in states if s.dim()])],
            "flops_per_token": float(built["get_flops_by_length"][-1]),
            "kinds_of_linears": sorted({type(linear).__name__ for linear in linears}),
        }

    def build(name: str, flags: str, **options):
        settings, config = resolved(arguments(name, flags, **options))
        return train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)

    def replicas_of_ranks_that_draw_others(flags: str) -> list[str]:
        """Digests of each rank's part of a model for which ranks draw different numbers, as on GPUs of two kinds."""
        seed = torch.manual_seed
        with mock.patch.object(torch, "manual_seed", lambda number: seed(number + 1000 * rank)):
            model = build("smollm3", flags)
        digest = hashlib.sha256()
        with torch.no_grad():
            for parameter in model.parameters():
                digest.update(local(parameter).contiguous().view(-1).numpy().tobytes())
        return all_gather_objects(digest.hexdigest())

    def round_trip(name: str) -> float:
        """The largest difference to the logits of transformers with the same weights."""
        folder = workspace / "checkpoints" / name
        model = build(name, "--init pretrained --seed 11", model=folder)
        with torch.no_grad():
            logits = model.eval()(input_ids=round_trip_inputs(), use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return (logits - torch.load(folder / "logits.pt")).abs().max().item()

    observed: dict = {"same": {}, "near": {}}
    for name, (model, flags) in tables["same"].items():
        observed["same"][name] = train(name, model, flags, **({"num-steps": 2} if model in FAMILIES else {}))
    for name, flags in tables["near"].items():
        observed["near"][name] = train(name, "smollm3", flags)
    observed["replicas"] = {n: replicas_of_ranks_that_draw_others(flags) for n, flags in tables["replicas"].items()}
    observed["round trips"] = {name: round_trip(name) for name in tables["round trips"]}
    build("smollm3", "")
    observed["drawn after a build"] = all_gather_objects(torch.rand(1).item())
    if rank == 0:
        (workspace / f"observed-{world}.json").write_text(json.dumps(observed))
    stop_processes(stop)
