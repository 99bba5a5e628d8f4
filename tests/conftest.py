"""Fixtures and helpers of all tests: a small corpus, tiny models, and ways to start the program as a user does.

Everything runs on the CPU with one thread a process; only `pytest -m gpu` sees GPUs.
"""

import contextlib
import gc
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

pytest_plugins = ["corpora"]  # fixtures of the tests of data
ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "train_fsdp.py")
DEMO = ROOT / "assets" / "demo"
STORIES = DEMO / "stories"

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
if "gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, whose effect programs would inherit
    signal.signal(signal.SIGHUP, lambda *_: None)
sys.path.insert(0, str(ROOT))
gc.disable()  # until the tests are collected: looking for garbage takes a fifth of the time of imports, which make none

import pytest
from filelock import FileLock

# Modules that load torch are imported in functions: with -n one process has this file and runs no test.
from harness.base import UserError
from harness.flags import Args, parse_args
from harness.job import set_allocator, start_processes
from harness.job.signals import StopRequest

if "gpu" in sys.argv:
    set_allocator()  # as the script does: memory is compared with plans
# Imports of a rank take longer than what most tests do in it: ranks are forked from a process that has them.
multiprocessing.set_forkserver_preload(
    ["torchao", "transformers.optimization", "transformers.models.smollm3.modeling_smollm3", "train_fsdp"]
)


def pytest_configure(config) -> None:
    """Run a test that is named as FILE::TEST whatever its tier; print why tests were skipped."""
    config.option.reportchars += "s"
    if config.option.markexpr == "not slow" and any("::" in argument for argument in config.args):
        config.option.markexpr = ""


def pytest_collection_finish() -> None:
    """Keep the objects of imports and collection out of garbage collections."""
    gc.freeze()
    gc.enable()


def slow_case(*values, id: str | None = None):
    """A case of a parametrized test in the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def copy_program(folder: pathlib.Path) -> pathlib.Path:
    """Copy the program into a folder, for a test that changes it; return the folder."""
    for name in ("harness", "tools", "assets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_fsdp.py", "utils.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def copy_with_gpu(folder: pathlib.Path, name: str, memory_gib: float) -> pathlib.Path:
    """The script of a copy of the program whose table of GPUs has one more with 1,000 dense TFLOPS."""
    table = copy_program(folder) / "assets" / "gpus.csv"
    row = f"{name},{name},1000,{memory_gib},4000,450,50,2,0,0.9,0,the vendor's datasheet"
    table.write_text(f"{table.read_text()}{row}\n")
    return folder / "train_fsdp.py"


def start(
    command: list, timeout: float = 900, cwd: pathlib.Path = ROOT, **env: str | None
) -> subprocess.CompletedProcess:
    """Run a command from the repository's root, with text output; a variable that is None is removed."""
    return subprocess.run(
        [*map(str, command)],
        env={key: value for key, value in (os.environ | env).items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )


def words(text: str) -> list[str]:
    return text.split()


def cold_python(*arguments, **options) -> subprocess.CompletedProcess:
    """The program in a new interpreter."""
    return start([sys.executable, PROGRAM, *arguments], **options)


def python(*arguments, timeout: float = 900) -> subprocess.CompletedProcess:
    """The program as a shell runs it, in a process forked from one that has its imports."""
    import multirank

    words = [*map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        process = multiprocessing.get_context("forkserver").Process(
            target=multirank.as_program, args=(stdout.name, stderr.name, dict(os.environ), ROOT, words)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout, stdout.read(), stderr.read())
        return subprocess.CompletedProcess(words, process.exitcode, stdout.read(), stderr.read())


def torchrun_command(ranks: int, *launcher: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *launcher]


def free_port() -> int:
    """A port on which nothing listens at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def forking(ranks: int, function, *arguments):
    """Ranks of a world that call a function: (their processes, the file of their output); ended on exit."""
    import multirank
    import torch.multiprocessing

    with tempfile.NamedTemporaryFile("r+") as output:
        rank_arguments = (ranks, free_port(), output.name, function, arguments)
        world = torch.multiprocessing.start_processes(
            multirank.as_rank, rank_arguments, ranks, join=False, start_method="forkserver"
        )
        try:
            yield world, output
        finally:
            for process in world.processes:
                process.kill()


def forked(ranks: int, function, *arguments, timeout: float = 900) -> str:
    """Call a function in every rank of a world, without a launcher; return their output, torch's lines included.

    Raises:
        RuntimeError: a rank failed, or they did not end in time; all are ended, the message has their output.
    """
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    with forking(ranks, function, *arguments) as (world, output):
        deadline = time.monotonic() + timeout
        try:
            while not world.join(timeout=1, grace_period=0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no end within {timeout} s")
        except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
            raise RuntimeError(f"{output.read()[-6000:]}\n{error}") from None
        return output.read()


def answer_of(ranks: int, function, *arguments):
    """What a function that every rank of a world calls returns on rank 0, as JSON has it."""
    import multirank

    with tempfile.NamedTemporaryFile("r") as file:
        forked(ranks, multirank.answer, file.name, function, *arguments)
        return json.load(file)


def wait_until(condition, processes=(), seconds: float = 600) -> None:
    """Returns when a condition holds; none of the processes may end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            exit_code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            assert exit_code is None, process
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines_logged(folder: pathlib.Path) -> int:
    """The number of lines of a run's metrics.jsonl, which need not be there yet."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def metrics_of(folder: pathlib.Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: pathlib.Path) -> list[float]:
    """Loss of each logged step."""
    return [line["loss"] for line in metrics_of(folder) if not line.get("final")]


def eval_loss_of(folder: pathlib.Path) -> float:
    """The last eval loss of a run."""
    return [line["eval_loss"] for line in metrics_of(folder) if "eval_loss" in line][-1]


def chat(*contents: str) -> dict:
    """A conversation of these turns, of which the first is the user's."""
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def story_texts(first: int, last: int) -> list[str]:
    """The texts of the demo's stories from one up to another."""
    lines = (STORIES / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines[first:last]]


def write_model(folder: pathlib.Path, model_type: str, **sizes) -> str:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **sizes).save_pretrained(folder)
    return str(folder)


def small_run(folder: pathlib.Path, flags: str, **sizes) -> list[str]:
    """The flags of a small run below a folder, of a tiny llama; `flags` are added and win."""
    import multirank

    model = write_model(folder / "model", "llama", **multirank.SIZES | sizes)
    small = "--sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32 --no-compile --no-own-plan"
    places = f"--model {model} --tokenizer {DEMO} --cache-dir {folder}/cache --output-dir {folder} --run-name r"
    return words(f"{small} --log-interval 1 {places} {flags}")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> pathlib.Path:
    """A folder that all processes of this test run have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def token_cache(shared_folder) -> pathlib.Path:
    """A token cache for runs on the demo's data whose tests are not about caches."""
    return shared_folder / "tokens"


@pytest.fixture(scope="session")
def workspace(shared_folder) -> pathlib.Path:
    """The inputs of tests/multirank.py, made once for all processes of this test run: text, a tokenizer, models, and
    checkpoints with their logits."""
    folder = shared_folder / "workspace"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            fill_workspace(folder.with_name("workspace-in-the-making"))
            folder.with_name("workspace-in-the-making").rename(folder)
    return folder


def fill_workspace(folder: pathlib.Path) -> None:
    import multirank
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "tokenizer").mkdir(parents=True)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder / "tokenizer")
    (folder / "corpus.jsonl").write_text("".join((STORIES / "train.jsonl").read_text().splitlines(True)[:400]))
    for name, (model_type, sizes) in multirank.MODELS.items():
        write_model(folder / "models" / name, model_type, **sizes)
    inputs = multirank.round_trip_inputs()
    for name in multirank.ROUND_TRIPS:
        config = AutoConfig.from_pretrained(folder / "models" / name)
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # norms and biases too, which a fresh model has at 1 and 0
            torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
        model.save_pretrained(folder / "checkpoints" / name, max_shard_size="100KB")
        with torch.no_grad():
            torch.save(model(input_ids=inputs).logits, folder / "checkpoints" / name / "logits.pt")


@pytest.fixture(scope="session")
def device():
    """A world of one in this process, for tests that call the program's functions."""
    import torch.distributed as dist

    yield start_processes()
    dist.destroy_process_group()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of utils, which only the test moves."""
    import utils

    clock = Clock()
    monkeypatch.setattr(utils.time, "perf_counter", clock)
    return clock


class Stop(StopRequest):
    """A request to stop after `steps` steps, by default never, and `passes` more forward passes."""

    def __init__(self, steps: int = -1, passes: int = 0):
        self.steps, self.passes, self.done = steps, passes, 0
        super().__init__()
        self.name = "SIGTERM"

    @property
    def can_save(self) -> bool:
        return self.done > 0

    @can_save.setter
    def can_save(self, value: bool) -> None:  # the loop sets it after each step
        self.done += value

    def any_rank_wants_to_stop(self) -> bool:
        if self.done == self.steps:
            self.passes -= 1
        return self.passes < 0


def parse(arguments: list) -> Args:
    """The settings of a command line; a mistake is a UserError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse_args([*map(str, arguments)])
    except SystemExit as left:
        raise UserError(
            printed.getvalue().removeprefix("train_fsdp.py: error: ").removesuffix("\n"), left.code
        ) from None


def train(arguments: list, device, stop: Stop | None = None) -> int:
    """Train in this process, a world of one; return the exit code."""
    import train_fsdp

    return train_fsdp.train_or_evaluate(parse(arguments), device, stop or Stop())


def unlock(folder: pathlib.Path) -> pathlib.Path:
    """Let other processes start in the folder of a run of this process, which holds its lock until it ends."""
    (folder / ".lock").unlink()
    return folder


def build_step(device, argv: list) -> tuple:
    """(settings, model, optimizer, a function that takes one step), as a run builds them, on random tokens."""
    import multirank
    import numpy as np

    import train_fsdp
    import utils
    from harness import data
    from harness import model as models
    from harness.state.train_state import TrainState

    settings, config = multirank.resolved(argv)
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)
    optimizer, tracker = models.build_optimizer(settings, model), utils.PerformanceTracker(0, 1, 0)
    sequences = data.SyntheticDataset(config.vocab_size, settings.sequence_length)
    if settings.document_mask:
        tokens = np.concatenate([sequences[index] for index in range(64)])
        sequences = data.PackedDataset(tokens, settings.sequence_length, document_mask=True, end_of_text=0)
    mixture = data.mix({"data": sequences}, {"data": None}, sequences.seq_len, settings.seed)
    state = TrainState(model, optimizer, tracker=tracker)
    batches = data.Batches(data.training_batches(settings, mixture, state, device), tracker, False, 1)
    return settings, model, optimizer, lambda: train_fsdp.train_step(settings, model, optimizer, batches)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes of users

SMALL = words("--num-steps 2 --sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32")


@pytest.fixture
def arguments(tmp_path, token_cache):
    """The flags of the smallest run that works; flags after them win."""
    import multirank

    folders = ["--output-dir", str(tmp_path / "out"), "--cache-dir", str(token_cache), "--run-name", "r"]
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    return ["--dataset", "demo", "--model", model, "--tokenizer", str(DEMO), *SMALL, *folders]


@pytest.fixture
def mistake(device, arguments):
    """`mistake(*flags)`: the one line of a run in this process that is refused."""

    def run(*flags, exit_code: int = 2) -> str:
        with pytest.raises(UserError) as raised:
            train([*arguments, *flags], device)
        assert raised.value.exit_code == exit_code
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return run


@pytest.fixture
def tables():
    """Restore the tables that a file of --import may add to."""
    from harness import flags, report
    from harness import model as models

    registries = (flags.DATASETS, flags.SCHEDULES, flags.OPTIMIZERS, report.METRICS, models.TERMS, flags.IMPORTED)
    before, registered = [dict(table) for table in registries], [*flags.REGISTERED]
    yield
    for table, rows in zip(registries, before, strict=True):
        table.clear()
        table.update(rows)
    flags.REGISTERED[:] = registered
