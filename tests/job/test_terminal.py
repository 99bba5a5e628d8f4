"""What is on a terminal: the first line, the bar below the log lines, wrapped words, what Ctrl-C leaves behind; what a
run asks of its machine."""

import ast
import contextlib
import dataclasses
import fcntl
import io
import json
import multiprocessing
import os
import pathlib
import pty
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import psutil
import pytest
from conftest import PROGRAM, ROOT, metrics_of, parse, words, write_model
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from multirank import SIZES, resolved

from harness.base import console, saved
from harness.base.errors import UserError
from harness.flags.parser import record_flags
from harness.job import host, terminal
from harness.job.printing import say_story
from harness.job.signals import StopRequest
from harness.model.optimization import parameter_bytes
from harness.model.weights import PretrainedWeights, decoder_layers, on_meta
from harness.report.header import significant
from harness.report.summary import next_commands

# ----------------------------------------------------------------------------------------------------------------------
# The screen


@pytest.mark.parametrize("columns", [200, 120, 80, 60, 38])
def test_the_bar_fits_and_never_loses_step_loss_and_mfu(columns):
    for step, total in ((3, 340), (12_000, 100_000)):
        bar = terminal.step_bar(total, step, shown=True)
        bar.set_postfix_str("loss 0.5226, MFU 38.1 %", refresh=False)
        line = bar.format_meter(**bar.format_dict | {"ncols": columns, "rate": 1.0})
        bar.close()
        assert len(line) <= columns
        assert line.startswith(f"{step}/{total}, loss 0.5226, MFU 38.1 %")
        assert ", eta " in line or columns < 60


def test_words_are_wrapped_to_the_width_and_addresses_stay_whole():
    address = "http://127.0.0.1:9000/" + "x" * 60
    text = f"Once upon a time there was a well-known frog.\n\nShe read {address} every day."
    wrapped = terminal.wrap(text, columns=30)
    assert wrapped.split() == text.split()
    assert all(len(line) <= 30 or line == address for line in wrapped.splitlines())
    assert "\n\nShe read" in wrapped  # paragraphs stay
    assert terminal.wrap("name       one two three four", 11, 20).splitlines()[1].startswith(" " * 6)
    assert terminal.wrap(text) == text  # no terminal


def test_a_story_is_wrapped_where_there_is_no_terminal_too(device, capsys):
    say_story("word " * 60)
    assert [len(line) for line in capsys.readouterr().out.rstrip().splitlines()] == [119, 119, 59]


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_what_takes_longer_than_a_second_has_a_bar_on_a_terminal_and_none_elsewhere(monkeypatch):
    for stream, shown in ((Screen(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        done = []
        for layer in terminal.progress(range(3), 3, "reading weights"):
            time.sleep(1.2 * (layer == 0 and shown))
            done.append(layer)
        assert done == [0, 1, 2]
        assert bool(re.search(r"reading weights: .*1/3", stream.getvalue())) == shown
        assert shown or stream.getvalue() == ""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """(what a terminal of 60 columns was sent by a run that Ctrl-C ended, exit code, the run's folder)"""
    folder = tmp_path_factory.mktemp("terminal")
    flags = (
        "--demo --num-steps 4000 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --log-interval 2"
    )
    flags += f" --perf-warmup-steps 1 --checkpoint-interval 6 --output-dir {folder} --run-name it"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    environment = os.environ | {"TERM": "xterm", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *flags.split()], cwd=ROOT, env=environment, start_new_session=True, **streams
    )
    os.close(theirs)
    sent, deadline = b"", time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            sent += os.read(ours, 65536)
        except OSError:  # the last one has closed it
            break
        if sent.count(b"saved      step-") >= 2 and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    process.kill()
    os.close(ours)
    return sent.decode(), process.wait(), folder / "it"


def test_a_terminal_has_the_log_lines_and_below_them_one_bar_that_fits(interrupted):
    sent, _, folder = interrupted
    bars = re.findall(r"\r(\d+/4000[^\r\n]*)", sent)
    assert bars and all(len(bar) <= 60 for bar in bars)
    assert all("loss" in bar and "eta" in bar for bar in bars if int(bar.split("/")[0]) > 2)
    permanent = "\n".join(line.strip("\r").split("\r")[-1] for line in sent.split("\n"))
    logged = re.findall(r"^step +(\d+)/4000  loss (\S+)", permanent, re.MULTILINE)
    expected = [(str(line["step"]), f"{line['loss']:.4f}") for line in metrics_of(folder)]
    assert logged == expected[: len(logged)]
    assert len(logged) >= len(expected) - 1


def test_the_first_line_comes_before_torch(interrupted):
    assert interrupted[0].startswith("train_fsdp demo on demo, 4,000 steps; loading torch")


def test_ctrl_c_says_where_what_is_saved_and_the_command_that_goes_on(interrupted):
    sent, exit_code, folder = interrupted
    assert exit_code == 130
    where, saved, go_on, *_ = sent[sent.rindex("stopped    by Ctrl-C") :].splitlines()
    assert re.fullmatch(r"stopped    by Ctrl-C in \w+ of step \d+ of 4,000", where)
    assert saved == f"saved      {max((folder / 'checkpoints').glob('step-*'))}"
    script, *flags = shlex.split(go_on.removeprefix("go on      "))[1:]
    settings = parse(flags)
    assert (ROOT / script).samefile(PROGRAM)
    assert (settings.resume, settings.run_name, settings.output_dir) == ("auto", "it", str(folder.parent))
    assert (settings.num_steps, settings.checkpoint_interval) == (4000, 6)
    assert "Traceback" not in sent


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C and errors without a terminal


def wait_for_ever(settings, listens) -> None:
    StopRequest(settings)
    listens.set()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@contextlib.contextmanager
def many_open_files(count: int):
    """`count` more descriptors are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 500)), hard))
    with contextlib.ExitStack() as files:
        for _ in range(count):
            files.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("open_files", [0, 1100])
def test_ctrl_c_ends_a_rank_that_waits_for_ever(open_files):
    with many_open_files(open_files):
        check_ctrl_c()


def check_ctrl_c() -> None:
    context = multiprocessing.get_context("fork")
    listens = context.Event()
    child = context.Process(target=wait_for_ever, args=(None, listens))
    child.start()
    assert listens.wait(300)
    os.kill(child.pid, signal.SIGINT)
    child.join(300)
    assert child.exitcode == 130


@pytest.mark.parametrize(
    "flags, step, said",
    [
        ("--demo", 0, "stopped    by Ctrl-C before the first step"),
        (
            "--model demo --num-steps 340",
            7,
            "in backward of step 7 of 340\nsaved      nothing: --checkpoint-interval N saves every N steps",
        ),
        ("--demo --checkpoint-interval 50", 7, "saved      nothing yet, the first after step 50"),
        ("--plan", 0, "stopped    by Ctrl-C"),
    ],
)
def test_without_a_checkpoint_ctrl_c_says_how_to_have_one(tmp_path, flags, step, said):
    assert terminal.describe_interrupt(parse(flags.split()), step, "backward", tmp_path).endswith(said)


def test_the_command_that_goes_on_has_the_launcher_and_each_flag_once(monkeypatch, tmp_path):
    launched = [f"{tmp_path}/bin/python3", f"{tmp_path}/bin/torchrun", "--nproc_per_node=2", "train_fsdp.py", "--demo"]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: launched)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "it")
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py"])
    monkeypatch.chdir(tmp_path)
    settings = parse(["--demo", "--resume=auto", "--run_name".replace("_", "-"), "x", "--output-dir", "a b"])
    command = terminal.command(settings, tmp_path / "a b" / "x")
    assert command.startswith("bin/torchrun --nproc_per_node=2 train_fsdp.py --demo --output-dir 'a b' --resume ")
    assert command.count("--resume") == 1


def test_under_torchrun_the_error_is_the_last_line_but_its_rule(monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    message = "train_fsdp.py: error: --dataset nope.txt: no such file or folder"
    console.record_error(message, happened=1e9)
    cause = ProcessFailure(local_rank=1, pid=2, exitcode=2, error_file=str(tmp_path / "error.json"))
    ended = ProcessFailure(local_rank=0, pid=1, exitcode=143, error_file="none")
    said = str(ChildFailedError("train_fsdp.py", {0: ended, 1: cause})).splitlines()
    assert said[-2].strip() == message
    assert set(said[-1]) == {"="}


def test_weights_are_read_in_silence_but_downloads_are_shown(tmp_path):
    _, config = resolved(["--sequence-length", "32", "--model", write_model(tmp_path / "model", "llama", **SIZES)])
    model = on_meta(config)
    enable_progress_bars()
    with pytest.raises(UserError, match="no weights from"):
        PretrainedWeights(model, decoder_layers(model), str(tmp_path / "model"), None)
    assert not are_progress_bars_disabled()


# ----------------------------------------------------------------------------------------------------------------------
# The machine


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """A container of 1,000 bytes and one and a half cores, in which a group allows more."""
    (tmp_path / "box" / "job").mkdir(parents=True)
    for name, memory, cpu in (("box", "1000", "150000 100000"), ("box/job", "max", "400000 100000")):
        (tmp_path / name / "memory.max").write_text(memory + "\n")
        (tmp_path / name / "cpu.max").write_text(cpu + "\n")
    monkeypatch.setattr(host, "CGROUPS", str(tmp_path))
    limits = host.limits
    monkeypatch.setattr(host, "limits", lambda name: limits(name, "/box/job"))


def test_a_container_bounds_memory_and_cores(cgroup):
    assert host.memory() == 1000
    assert host.cores() == 1


@pytest.fixture
def threads(monkeypatch):
    """`threads(flags, busy, **environment)`: (threads, how they wait) of a rank on a machine with eight cores and no
    GPU, `busy` of which others use."""
    monkeypatch.setattr(host, "cores", lambda: 8)
    monkeypatch.setattr(os.path, "exists", lambda path: False)

    def choose(flags=(), busy=0.0, **environment):
        monkeypatch.setattr(host, "busy_cores", lambda: busy)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            host.set_threads(parse([*flags]))
            policy, spins = os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")
            chosen = os.environ["OMP_NUM_THREADS"], policy or f"spin {spins}"
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            os.environ.pop(name, None)
        os.environ["OMP_NUM_THREADS"] = "1"
        return chosen

    return choose


SPIN = f"spin {host.SPIN_COUNT}"


def test_ranks_share_the_cores_and_wait_on_them_where_they_are_free(threads):
    assert threads() == ("8", SPIN)
    assert threads(busy=0.3) == ("8", SPIN)
    assert threads(LOCAL_WORLD_SIZE="3") == ("2", SPIN)
    assert threads(busy=2.0, LOCAL_WORLD_SIZE="3") == ("2", SPIN)  # the other two ranks, which are starting
    assert threads(OMP_NUM_THREADS="5", busy=3.0) == ("5", SPIN)
    assert threads(["--streaming"], OMP_NUM_THREADS="7") == ("7", SPIN)


def test_threads_that_would_take_a_core_from_somebody_sleep_while_they_wait(threads):
    assert threads(busy=1.0) == ("8", "passive")
    assert threads(["--streaming"]) == ("8", "passive")  # its reader needs a core
    assert threads(OMP_NUM_THREADS="9") == ("9", "passive")  # more than the affinity mask or a quota leaves
    assert threads(OMP_NUM_THREADS="5", busy=4.0) == ("5", "passive")
    assert threads(LOCAL_WORLD_SIZE="16") == ("1", "passive")


def test_what_the_environment_says_of_threads_stays(threads):
    assert threads(OMP_NUM_THREADS="5", OMP_WAIT_POLICY="active") == ("5", "active")
    assert threads(GOMP_SPINCOUNT="7") == ("8", "spin 7")


def test_a_process_that_computes_beside_this_one_counts_as_a_busy_core():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            busy = host.busy_cores(0.5)
        finally:
            spinning.kill()
    assert 0.3 < busy <= os.cpu_count()


@pytest.mark.parametrize("given, expected", [({}, "4"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_what_torchrun_sets_by_itself_is_not_the_users(threads, monkeypatch, given, expected):
    with subprocess.Popen(["sleep", "60"], env=given) as torchrun:
        monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
        chosen = threads(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="it", LOCAL_WORLD_SIZE="2")
        torchrun.kill()
    assert chosen[0] == expected


def test_a_model_that_the_host_cannot_hold_is_refused_before_its_data_are_read(mistake, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "memory", lambda: 1000)
    said = mistake()
    assert re.search(
        r"^--model \S+model: training on the host takes 0\.0 GiB and more \([\d,]+ parameters x 16 bytes", said
    )
    assert "--demo" in said and "--plan" in said
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "flags, each",
    [("", 16), ("--precision bf16-pure", 8), ("--optimizer adamw-bf16", 12), ("--optimizer adamw8bit", 10)],
)
def test_nothing_that_fits_is_refused(monkeypatch, flags, each):
    monkeypatch.setattr(host, "memory", lambda: 1000 * each)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    settings = parse(flags.split())
    of_parameter = parameter_bytes(settings)
    host.check_memory(settings, 1000, of_parameter, shards=4)
    host.check_memory(settings, 2000, of_parameter, shards=8)  # two hosts
    with pytest.raises(UserError):
        host.check_memory(settings, 1001, of_parameter, shards=4)
    with pytest.raises(UserError):
        host.check_memory(settings, 500, of_parameter, shards=1)  # stage 0: each rank has all


def test_a_small_figure_keeps_its_digits():
    assert [significant(x) for x in (0.0841, 0.1, 2.5, 989.5, 15824.0)] == ["0.0841", "0.1", "2.5", "990", "15,824"]


def test_one_of_a_kind_is_singular():
    assert (
        parse(words("--batch-size 2 --sequence-length 64"))
        .describe_batch(1)
        .startswith("1 rank x 1 microbatch x 2 sequences x ")
    )
    both = parse(words("--gradient-accumulation-steps 3 --sequence-length 64")).describe_batch(4)
    assert both.startswith("4 ranks x 3 microbatches x 1 sequence x ")


# ----------------------------------------------------------------------------------------------------------------------
# Commands that are printed


ODD_NAMES = ["-x", "--lr", "it's", 'a "b"', "two\nlines", "~", "$HOME", "a b", "émile", "back\\slash"]


def flags_of(command: str) -> list[str]:
    """What a shell makes of a printed command, behind the program's name."""
    words = shlex.split(command)
    return words[next(index for index, word in enumerate(words) if word.endswith("train_fsdp.py")) + 1 :]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("flags", ["--export={name} --lr=1", "--checkpoint-interval=2 --lr=1 --eval-interval=5"])
def test_what_is_printed_to_be_pasted_means_what_it_says(monkeypatch, tmp_path, name, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my program/train_fsdp.py"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    argv = [f"--output-dir={name}", "--run-name=-r", *(word.format(name=name) for word in flags.split())]
    settings = parse(argv)
    folder = pathlib.Path(settings.output_dir, settings.run_name).expanduser()
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    manifest = {"step": 2, "files": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"sha256": saved.manifest_checksum(manifest)}))

    again = parse(flags_of(terminal.command(settings, folder)))
    assert (again.resume, again.run_name, again.output_dir, again.lr) == ("auto", "-r", name, 1)
    assert again.export == settings.export
    said = next_commands(settings, folder, "- 'Well', she said", None).strip()
    lines = dict(
        re.findall(
            r"^(sample|evaluate|load|export|go on) +(.*?)(?=\n(?:sample|evaluate|load|export|go on|kept) |\Z)",
            said,
            re.M | re.S,
        )
    )
    assert ("evaluate" in lines) == bool(settings.eval_interval)
    assert parse(flags_of(lines["sample"])).sample_prompt == ("- 'Well', she said",)
    for key in lines.keys() - {"load"}:
        assert pathlib.Path(parse(flags_of(lines[key])).resume) == folder
    assert (parse(flags_of(lines["go on"])).num_steps, parse(flags_of(lines["go on"])).lr) == (2000, 1)
    if settings.export:
        call = ast.parse(lines["load"]).body[0].value
        assert ast.literal_eval(call.args[0]) == os.path.expanduser(name)
    else:
        assert parse(flags_of(lines["export"])).export == f"{folder}-export"


def test_a_run_of_many_flags_goes_on_by_its_own_config_and_keeps_its_export(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py"])
    flags = "--demo --lr 1e-3 --seed 7 --eval-interval 50 --log-interval 5 --weight-decay 0.2 --warmup-steps 3"
    flags += " --max-grad-norm 2 --optimizer adamw-bf16 --sample-prompt a --sample-prompt b --export e --output-dir o"
    settings = parse(flags.split())
    folder = tmp_path / "o" / "r"
    folder.mkdir(parents=True)
    assert terminal.command(settings, pathlib.Path("o/r")).count("--") > 10  # no config.json
    (folder / "config.json").write_text(json.dumps(record_flags(settings)))
    command = terminal.command(settings, pathlib.Path("o/r"))
    assert command.endswith("--config o/r/config.json --export e --resume auto --run-name r")
    again = dataclasses.asdict(parse(flags_of(command)))
    differ = {name for name, value in again.items() if value != dataclasses.asdict(settings)[name]}
    assert differ == {"argv", "config", "resume", "run_name"}
