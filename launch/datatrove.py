"""Tokenizes a corpus of text with datatrove, on this machine, under Slurm or with Ray, into a folder of .ds files:

    python launch/datatrove.py --dataset corpus/ --output corpus-tokens --plan
    python launch/datatrove.py --dataset corpus/ --output corpus-tokens
    python train_fsdp.py --dataset corpus-tokens

Records are read as train_fsdp.py reads them, and each document ends with the tokenizer's end-of-text token. OUTPUT
appears when all tasks are done. Until then OUTPUT.work has the plan, the finished tasks, and in `logs` datatrove's logs
and completions. The same command again takes up a run that ended: what is done is not done again, and tasks that were
not finished are made anew.
"""

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in the folder of this file, its name would hide the package

from harness.base import console
from harness.base.errors import UserError
from harness.base.text import counted, first_line, one_line
from harness.data.shares import check_unchanged, describe_files, measure, read_texts, share_of
from harness.flags.settings import PRESETS

PACKAGE = "datatrove==0.10.1"
TASK_TOKENS = 50_000_000  # some minutes of one core, which is what a killed task costs
MAX_TASKS = 10_000  # each makes a file
PROGRESS_SECONDS = 30

# ----------------------------------------------------------------------------------------------------------------------
# The steps of a task, which datatrove calls in its own processes


def end_with_parent() -> None:
    """Lets a child process be killed when its parent ends, however that ends. Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with_program() -> None:
    """Ends this process of the pool when the program ends, however that does; it would finish its task."""
    import multiprocess

    multiprocess.parent_process().join()
    os._exit(1)


def read(_, task: int, tasks: int, work: str, in_pool: bool) -> Iterator:
    """The first step: the documents of a task, as datatrove has them."""
    from datatrove.data import Document

    if in_pool:
        threading.Thread(target=end_with_program, daemon=True).start()
        pathlib.Path(work, "pids", f"{task:05d}").write_text(str(os.getpid()))
    plan, counts = json.loads(pathlib.Path(work, "plan.json").read_text()), Counter()
    files = {path: (size, changed) for path, size, changed in plan["files"]}
    for file, first, end in share_of(plan["files"], task, tasks):
        check_unchanged(file, *files[str(file)])
        for text in read_texts(file, first, end, plan, counts):
            counts["documents"] += 1
            yield Document(text=text, id=str(counts["documents"]))
    folder = pathlib.Path(work, "counts")
    folder.mkdir(exist_ok=True)
    (folder / f"{task:05d}.json").write_text(json.dumps(counts))


def publish(_, task: int, tasks: int, work: str, attempt: str) -> None:
    """The last step: the files of a task, now whole, go from the folder of this start to those that are done."""
    done = pathlib.Path(work, ".tokens")
    done.mkdir(exist_ok=True)
    for file in sorted(pathlib.Path(attempt).glob(f"{task:05d}_*.ds")):
        if not file.stat().st_size:  # no document began in the task's share
            continue
        for ending in (".index", ".metadata", ""):
            os.replace(f"{file}{ending}", done / f"{file.name}{ending}")


def finish(_, task: int, tasks: int, work: str, output: str) -> None:
    """Checks the files of all tasks against what was read, and gives them their final name. The step of a job of its
    own, which follows that of the tasks."""
    work, output = pathlib.Path(work), pathlib.Path(output)
    plan = json.loads((work / "plan.json").read_text())
    if output.exists():  # by another start
        return
    counts, tokens = Counter(), 0
    for number in range(plan["tasks"]):
        if not (work / "logs" / "completions" / f"{number:05d}").exists():
            raise failed(work, f"task {number} is not done")
        of_task = json.loads((work / "counts" / f"{number:05d}.json").read_text())
        counts.update(of_task)
        documents = 0
        for file in work.glob(f".tokens/{number:05d}_*.ds"):
            ends = index_of(file)
            if ends[-1] * plan["token_bytes"] != file.stat().st_size:
                raise failed(work, f"{file} does not have the {ends[-1]:,} tokens of its index")
            documents += len(ends)
            tokens += int(ends[-1])
        if documents != of_task.get("documents", 0):
            raise failed(work, f"task {number} read {of_task['documents']:,} documents and wrote {documents:,}")
    if not tokens:
        raise UserError(f"--dataset {plan['dataset']}: it holds no text")
    (work / "done.json").write_text(json.dumps({**counts, "tokens": tokens}))
    os.rename(work / ".tokens", output)
    shutil.rmtree(work / ".attempts", ignore_errors=True)


def index_of(file: pathlib.Path):
    """The end of each document in a .ds file, in tokens."""
    import numpy as np

    return np.fromfile(f"{file}.index", np.uint64)


def failed(work: pathlib.Path, problem: str) -> UserError:
    return UserError(
        f"--output {str(work).removesuffix('.work')}: {problem}; see {work / 'logs'}, then repeat the command",
        exit_code=1,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def load_tokenizer(name: str):
    """(transformers' tokenizer of a preset, a folder or a hub id, the name by which others find it)."""
    import transformers
    from transformers.models.auto import tokenization_auto

    from harness.base.hub import answer_from_cache_without_network
    from harness.model.configs import find_source, refuse_foreign_code
    from harness.model.tokenizer import tokenizer_class_from_name

    source = find_source(name)[1] if name in PRESETS else os.path.expanduser(name)
    if os.path.isdir(source):
        source = os.path.abspath(source)
    answer_from_cache_without_network(source)
    tokenization_auto.tokenizer_class_from_name = tokenizer_class_from_name  # private: AutoTokenizer takes no rule
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        refuse_foreign_code(f"--tokenizer {source}", error)
        problem = "no preset, no folder with a tokenizer, and not to be had from the hub"
        raise UserError(
            f"--tokenizer {source}: {problem} ({first_line(error)}); `hf auth login` where it is gated, or a network"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer {source}: it has no end-of-text token (eos_token)")
    if not tokenizer.is_fast:
        raise UserError(f"--tokenizer {source}: datatrove needs one with a tokenizer.json")
    return tokenizer, source


def choose_tasks(settings: argparse.Namespace, tokens: int) -> int:
    if settings.tasks:
        return settings.tasks
    least = 4 * settings.workers  # so that the last one is not waited for long
    return min(max(least, math.ceil(tokens / TASK_TOKENS)), MAX_TASKS)


def take_up(work: pathlib.Path, identity: dict, tasks: int | None) -> dict | None:
    """The plan of an earlier start; None where there is none. A UserError where it would give other tokens."""
    try:
        plan = json.loads((work / "plan.json").read_text())
    except FileNotFoundError:
        return None
    wanted = identity | {"tasks": tasks or plan["tasks"]}
    changed = [name.replace("_", " ") for name, value in wanted.items() if plan[name] != value]
    if changed:
        raise UserError(
            f"--output {plan['output']}: it was begun with other {', '.join(changed)}; repeat the command of its first "
            "start, or give another --output"
        )
    return plan


# ----------------------------------------------------------------------------------------------------------------------
# Running


def executors(settings: argparse.Namespace, plan: dict, work: pathlib.Path, tokenizer_file: pathlib.Path) -> tuple:
    """datatrove's executor of the tasks, and that of the job that finishes them (None: this process does)."""
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    from datatrove.pipeline.tokens import DocumentTokenizer

    attempt = work / ".attempts" / f"{time.time_ns()}"
    writer = DocumentTokenizer(
        str(attempt),
        str(tokenizer_file),
        eos_token=plan["end_of_text"],
        batch_size=plan["batch"],
        shuffle_documents=plan["shuffle_seed"] is not None,
        seed=plan["shuffle_seed"],
    )
    plan["token_bytes"] = writer.token_size  # loads the tokenizer, which goes with the step to all tasks
    writer.tokenizer_name_or_path = plan["tokenizer"]  # for the metadata; it has been loaded
    in_pool = settings.executor == "local" and settings.workers > 1
    pipeline = [
        functools.partial(read, work=str(work), in_pool=in_pool),
        writer,
        functools.partial(publish, work=str(work), attempt=str(attempt)),
    ]
    common = {"tasks": plan["tasks"], "workers": settings.workers, "logging_dir": str(work / "logs")}
    if settings.executor == "local":
        return LocalPipelineExecutor(pipeline, **common), None
    variables = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    common["tasks_per_job"] = math.ceil(plan["tasks"] / settings.workers)
    if settings.executor == "ray":
        environment = {"runtime_env": {"env_vars": variables}}
        return RayPipelineExecutor(pipeline, ray_remote_kwargs=environment, **common), None
    options = dict(option.partition("=")[::2] for option in settings.slurm_option)
    exports = " ".join(f"{name}={value}" for name, value in variables.items())
    slurm = {
        "time": options.pop("time", "12:00:00"),
        "partition": options.pop("partition"),
        "qos": options.pop("qos", None),
        "env_command": f'export PATH="{os.path.dirname(sys.executable)}:$PATH" {exports}',
        "sbatch_args": {"kill-on-invalid-dep": "yes"} | options,
    }
    tokenize = SlurmPipelineExecutor(pipeline, job_name="tokenize", **slurm, **common)
    last = [functools.partial(finish, work=str(work), output=os.path.abspath(plan["output"]))]
    logs = str(work / "logs-finish")
    return tokenize, SlurmPipelineExecutor(last, 1, job_name="finish", logging_dir=logs, depends=tokenize, **slurm)


@contextlib.contextmanager
def stderr_in(file: pathlib.Path) -> Iterator[None]:
    """Sends what this process and its children write to stderr into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


class Watch(threading.Thread):
    """Prints each half minute how far the tasks are, and sends the main thread SIGUSR1 when the process of a task on
    this machine was killed: datatrove would wait for it for ever."""

    def __init__(self, work: pathlib.Path, plan: dict):
        super().__init__(daemon=True)
        self.work, self.plan = work, plan
        self.ended = threading.Event()
        self.killed = ""  # the task whose process was
        self.start_time, self.start_tokens = time.monotonic(), self.tokens()

    def run(self) -> None:
        last = self.start_time
        while not self.ended.wait(1):
            self.killed = self.find_killed()
            if self.killed:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                return
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                self.report()

    def tokens(self) -> int:
        """How many are written, by the sizes of the files."""
        size = 0
        for file in [*self.work.glob(".tokens/*.ds"), *self.work.glob(".attempts/*/*_unshuffled.ds")]:
            with contextlib.suppress(FileNotFoundError):  # moved since it was listed
                size += file.stat().st_size
        return size // self.plan["token_bytes"]

    def report(self) -> None:
        tokens = self.tokens()
        rate = (tokens - self.start_tokens) / (time.monotonic() - self.start_time)
        left = ""
        if rate > 0:
            left = f", {duration(max(0, self.plan['tokens'] - tokens) / rate)} left"
        say("tokenizing", f"{tokens:,} tokens, {rate:,.0f} tokens/s{left}")

    def find_killed(self) -> str:
        for file in self.work.glob("pids/*"):
            try:
                os.kill(int(file.read_text() or os.getpid()), 0)
            except ProcessLookupError:
                if not (self.work / "logs" / "completions" / file.name).exists():
                    return str(int(file.name))
        return ""


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return f"{seconds // 3600:.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60:02.0f}"


def run_here(executor, plan: dict, work: pathlib.Path) -> None:
    """Runs the tasks and waits for them: on this machine, or on those of Ray."""
    from filelock import FileLock, Timeout

    lock = FileLock(work / "lock", timeout=10)  # children of a killed start may hold it for a moment
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"--output {plan['output']}: another run is making it") from error
    for folder in (".attempts", "pids"):  # of starts that were killed
        shutil.rmtree(work / folder, ignore_errors=True)
    (work / "pids").mkdir()
    os.register_at_fork(after_in_child=end_with_parent)  # datatrove's process of queues would stay after a kill -9
    watch = Watch(work, plan)

    def stop(*_) -> None:
        raise failed(work, f"the process of task {watch.killed} was killed (too little memory?)")

    signal.signal(signal.SIGUSR1, stop)
    watch.start()
    try:
        with stderr_in(work / "logs" / "console.log"):
            executor.run()
    except UserError:
        raise
    except Exception as error:  # of a task
        raise failed(work, f"a task failed, {first_line(error)}") from error
    finally:
        watch.ended.set()
        watch.join()
        lock.release()
    if left := executor.get_incomplete_ranks():
        raise failed(work, f"{counted(len(left), 'task')} of {plan['tasks']:,} failed")


def train_command(settings: argparse.Namespace, plan: dict) -> str:
    tokenizer = f"--tokenizer {plan['tokenizer']}"
    if settings.tokenizer in PRESETS:
        tokenizer = f"--model {settings.tokenizer}"
    script = "train_fsdp.py"
    return f"python {script} --dataset {settings.output} {tokenizer}"


def run(settings: argparse.Namespace) -> None:
    output = pathlib.Path(os.path.abspath(os.path.expanduser(settings.output)))
    work = output.with_name(f"{output.name}.work")
    files = describe_files(settings.dataset, settings.dataset_split)
    tokenizer, source = load_tokenizer(settings.tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    vocabulary = backend.to_str()
    identity = {
        "files": files,
        "text_field": settings.text_field,
        "skip_bad_records": settings.skip_bad_records,
        "tokenizer": source,
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "end_of_text": tokenizer.eos_token,
        "shuffle_seed": settings.shuffle_seed,
    }
    plan = take_up(work, identity, settings.tasks)
    if output.exists() and (plan is None or not (work / "done.json").exists()):
        raise UserError(f"--output {settings.output}: it is there already; give another")
    say("corpus", f"{counted(len(files), 'file')}, {sum(size for _, size, _ in files):,} bytes")
    say("tokenizer", f"{source}, end of text {tokenizer.eos_token}")
    first_start = plan is None
    if first_start:
        plan = identity | measure(identity, tokenizer)
        plan["tasks"] = choose_tasks(settings, plan["tokens"])
    plan |= {"dataset": settings.dataset, "output": settings.output}
    done = len(list((work / "logs" / "completions").glob("*")))
    rate = plan["tokens"] / plan["seconds"]
    seconds = plan["seconds"] * (1 - done / plan["tasks"]) / settings.workers
    say("estimate", f"{plan['tokens']:,} tokens, from a sample of {plan['sample_bytes']:,} bytes")
    say("rate", f"{rate:,.0f} tokens/s on one core, measured")
    if done:
        say("done", f"{done:,} of {counted(plan['tasks'], 'task')} by earlier starts")
    say("time", f"{duration(seconds)} on {counted(settings.workers, 'worker')}, {counted(plan['tasks'], 'task')}")
    if settings.plan:
        return
    if not output.exists():
        (work / "logs").mkdir(parents=True, exist_ok=True)
        (work / "tokenizer.json").write_text(vocabulary)
        tokenize, finishing = executors(settings, plan, work, work / "tokenizer.json")
        if first_start:
            write_whole(work / "plan.json", json.dumps(plan))
        if finishing:
            with stderr_in(work / "logs" / "console.log"):
                finishing.run()
            say("submitted", f"job {tokenize.job_id}; {output} appears when it is done, logs in {work / 'logs'}")
            say("train", train_command(settings, plan))
            return
        run_here(tokenize, plan, work)
        finish(None, 0, 1, str(work), str(output))
    counts = json.loads((work / "done.json").read_text())
    line = f"{counts['tokens']:,} tokens of {counted(counts['documents'], 'document')}"
    left_out = [f"{kind} {counts[kind]:,}" for kind in ("empty documents", "bad records") if counts.get(kind)]
    if left_out:
        line += f", left out: {', '.join(left_out)}"
    say("tokens", f"{line}, in {settings.output}")
    say("train", train_command(settings, plan))


def write_whole(file: pathlib.Path, text: str) -> None:
    """Writes a file that is never there in part."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    os.replace(part, file)


def say(name: str, line: str) -> None:
    print(f"{name:10} {line}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        prog="launch/datatrove.py",
        usage="%(prog)s --dataset FOLDER --output FOLDER [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--dataset", required=True, help="local file, folder or pattern of text, as of train_fsdp.py; may be packed")
    add("--output", required=True, help="the folder of .ds files to make")
    add("--tokenizer", default="smollm3-3b", help="preset, hub id or folder [smollm3-3b]")
    add("--dataset-split", default="train", help="the files of this split [train]")
    add("--text-field", default="text", help="column of the text [text]")
    add("--skip-bad-records", action="store_true", help="count and leave out records that have no text [off]")
    add("--shuffle-seed", type=int, help="write the documents of each task in the order of this seed [as they come]")
    add("--plan", action="store_true", help="say how many tokens and how long, by a sample, and do nothing [off]")
    add("--tasks", type=int, help="parts of the corpus, a file each [of 50 million tokens, at least 4 a worker]")
    add("--workers", type=int, default=cores, help=f"tasks at a time, each on one core [{cores}, the cores here]")
    add("--executor", choices=("local", "slurm", "ray"), default="local", help="where tasks run [local]")
    help_of_slurm = "of sbatch, such as partition=cpu, time=24:00:00 or mem-per-cpu=4G; may be repeated"
    add("--slurm-option", action="append", default=[], metavar="NAME=VALUE", help=help_of_slurm)
    return parser


def check(settings: argparse.Namespace) -> None:
    """Raises a UserError where flags contradict each other or a package is missing."""
    if settings.workers < 1 or (settings.tasks is not None and settings.tasks < 1):
        raise UserError("--workers and --tasks: at least 1")
    if settings.slurm_option and settings.executor != "slurm":
        raise UserError("--slurm-option: needs --executor slurm")
    if settings.executor == "slurm":
        names = [option.partition("=")[0] for option in settings.slurm_option if "=" in option]
        if len(names) < len(settings.slurm_option) or "partition" not in names:
            raise UserError("--executor slurm: needs --slurm-option partition=NAME, and others as NAME=VALUE too")
    if find_spec("datatrove") is None:
        raise UserError(f"needs the package datatrove (pip install {PACKAGE})")
    if settings.executor == "ray" and find_spec("ray") is None:
        raise UserError("--executor ray: needs the package ray (pip install ray)")
    if settings.executor == "slurm" and not shutil.which("sbatch"):
        raise UserError("--executor slurm: there is no sbatch on this machine")


def main() -> None:
    settings = make_parser().parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    try:
        check(settings)
        run(settings)
    except UserError as error:
        print(f"launch/datatrove.py: error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    # The steps must have a module that other processes can import, which __main__ is not.
    from launch import datatrove

    console.never_fail()
    datatrove.main()
