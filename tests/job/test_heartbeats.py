"""A stalled job ends, and names the rank that timed out, its host, pid and phase."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess

import multirank
import psutil
import pytest
from conftest import PROGRAM, ROOT, forked, forking, lines_logged, torchrun_command, wait_until, words

from harness.job import heartbeats

SIZES = words("--sequence-length 32 --batch-size 2 --precision fp32 --num-workers 0 --log-interval 1 --no-compile")
STALLS = {
    "stop": "no heartbeat for over 14 s, last seen in [a-z]+ of step \\d+",
    "elsewhere": "in log of step 7 for \\d+ s",
    "lock": "in data of step \\d+ for \\d+ s",
    "data": "in data of step \\d+ for \\d+ s",
    "save": "in save of step 2 for \\d+ s",
    "never": "never seen",
}
TIMEOUT_MINUTES = 0.3  # much longer than a start or a step of ranks that share two cores with other drills


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """`stalled(how)`: what two ranks print and leave, and the exit codes of those that can end, for a way to stall."""
    folder = tmp_path_factory.mktemp("stalled")

    def end(how: str) -> dict:
        can_end = {"lock": slice(1, 2), "stop": slice(0, 1), "never": slice(0, 1)}.get(how, slice(0, 2))
        flags = ["--demo", *SIZES, "--output-dir", folder, "--run-name", how, "--cache-dir", folder / "cache"]
        flags += ["--eval-interval", 0, "--num-steps", 1_000_000, "--timeout-minutes", TIMEOUT_MINUTES]
        flags += words("--checkpoint-interval 2 --no-async-checkpoint") if how == "save" else []
        with forking(2, multirank.stalled, how, *map(str, flags)) as (world, output):
            pids = [process.pid for process in world.processes]
            if how in ("stop", "kill"):
                wait_until(lambda: lines_logged(folder / how) > 3, world.processes)
                os.kill(pids[1], signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            for process in world.processes[can_end]:
                process.join(300)
            codes = [process.exitcode for process in world.processes]
            return {"printed": output.read(), "codes": codes, "pids": pids, "folder": folder / how}

    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as threads:  # side by side
        drills = {how: threads.submit(end, how) for how in (*STALLS, "kill")}
        yield lambda how: drills[how].result()


@pytest.mark.slow
@pytest.mark.parametrize("how", STALLS)
def test_the_rank_for_which_the_others_wait_is_named(stalled, how):
    case = stalled(how)
    (line,) = (line for line in case["printed"].splitlines() if "error:" in line)
    place = f" ({socket.gethostname()}, pid {case['pids'][1]})" if how != "never" else ""
    who = f"rank 1{place} timed out after {TIMEOUT_MINUTES} minutes: "
    assert line.startswith(f"train_fsdp.py: error: --timeout-minutes: {who}")
    assert re.fullmatch(STALLS[how], line.partition(who)[2])
    # nobody is killed for silence: one that holds its lock, or is stopped, has no exit code
    assert case["codes"] == [None if how == "lock" else 1, None if how in ("stop", "never") else 1]
    assert "Traceback" not in case["printed"]
    if how != "never":  # each rank that waited leaves where its threads were
        left = [path.read_text() for path in case["folder"].glob("stalled-rank-*.txt")]
        assert left and all("most recent call first" in text for text in left)
        # one that ends later may find the other one or its store gone, and one that is ending meanwhile is elsewhere
        assert any(text.startswith(line) for text in left)
        assert any('train_fsdp.py", line' in text for text in left)


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named_where_a_collective_breaks(stalled):
    case = stalled("kill")
    assert f"error: rank 1 ({socket.gethostname()}, pid {case['pids'][1]}) is gone, last seen in " in case["printed"]
    assert "Traceback" not in case["printed"]
    assert case["codes"] == [1, -signal.SIGKILL]


# ----------------------------------------------------------------------------------------------------------------------
# Ranks that work

SLOW = {  # what takes long, flags, and what is printed about it
    "save": ("", "save for [\\d.]+ minutes: [\\d.]+ GB written"),
    "export": ("--export {folder}/export", "export for [\\d.]+ minutes: [\\d.]+ GB written"),
    "sampling": ("--sample-tokens 18", "sampling for [\\d.]+ minutes: \\d+ tokens"),
    "compile": ("--compile", "forward for [\\d.]+ minutes: compiling"),
    "evaluation": ("--eval-interval 1 --eval-steps 18", "evaluation for [\\d.]+ minutes: \\d+ batches"),
    "tokenization": ("", "preparation for [\\d.]+ minutes"),
}
SLOW_CASES = [*((what, 2) for what in SLOW), ("save", 1), ("tokenization", 1)]
SLOW_TIMEOUT_MINUTES = 0.1


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory):
    """`slow_runs(what, ranks)`: the output of a run in which something takes three times its timeout."""
    folder = tmp_path_factory.mktemp("slow")

    def run(case: tuple[str, int]) -> str:
        what, ranks = case
        place = folder / f"{what}-{ranks}"
        flags = ["--demo", *SIZES, "--num-steps", 1, "--output-dir", place, "--cache-dir", place / "cache"]
        flags += words("--run-name r --sample-tokens 1 --eval-interval 0 --timeout-minutes")
        flags += [SLOW_TIMEOUT_MINUTES, *words(SLOW[what][0].format(folder=place))]
        return forked(ranks, multirank.slow, what, str(180 * SLOW_TIMEOUT_MINUTES), *map(str, flags))

    with concurrent.futures.ThreadPoolExecutor(max_workers=3) as threads:
        drills = {case: threads.submit(run, case) for case in SLOW_CASES}
        yield lambda *case: drills[case].result()


@pytest.mark.slow
@pytest.mark.parametrize("what, ranks", SLOW_CASES)
def test_ranks_that_work_for_longer_than_the_timeout_are_not_ended(slow_runs, what, ranks):
    printed = slow_runs(what, ranks)  # an exit code but 0 is an error
    assert "\ndone       1 step" in printed and "error:" not in printed
    (line,) = (line for line in printed.splitlines() if f" has been in {SLOW[what][1].split()[0]} " in line)
    assert re.fullmatch(rf"train_fsdp.py: rank \d \(.*, pid \d+\) has been in {SLOW[what][1]}", line)


# ----------------------------------------------------------------------------------------------------------------------
# The verdict

BEAT = {"beat": 7, "phase": "backward", "step": 3, "phase_count": 20, "waited": 601}
SILENT, WORKING = {"silent": True}, {"waited": 2}


@pytest.mark.parametrize(
    "ranks, named, words",
    [  # what the drills above, with two ranks, do not come to
        ([{}, {}, {}], [0, 1, 2], "all ranks wait for each other"),
        ([{}, {"phase_count": 19}, {}], [1], "in backward"),
        ([{}, SILENT, {"phase_count": 19}], [1], "no heartbeat for over 450 s"),  # this comes before who is behind
        ([{}, SILENT, {"phase_count": 19, "phase": "data"}], [2], "in data"),  # but not before one that reads for ever
        # while one works, nobody is named
        ([{}, WORKING, {}], [], ""),
        ([{}, WORKING, {"phase_count": 19}], [], ""),
        ([{}, WORKING, SILENT], [], ""),
        ([{}, WORKING | SILENT], [1], "no heartbeat"),  # what a rank wrote before it fell silent counts no more
    ],
)
def test_the_rank_that_is_named_by_what_all_have_written(ranks, named, words):
    before = [BEAT | rank for rank in ranks]
    now = [rank if "silent" in rank else rank | {"beat": 8} for rank in before]
    found, printed = heartbeats.find_stalled_ranks(before, now, seconds=600)
    assert found == named and words in printed


# ----------------------------------------------------------------------------------------------------------------------
# The launcher, and the store of the job


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_save_and_leave(tmp_path):
    flags = ["--demo", *SIZES, "--output-dir", tmp_path, *words("--run-name r --num-steps 1000000 --eval-interval 0")]
    command = [*torchrun_command(2), PROGRAM, *flags]
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    wait_until(lambda: lines_logged(tmp_path / "r") > 3, [process])
    ranks = [child for child in psutil.Process(process.pid).children() if PROGRAM in child.cmdline()]
    process.kill()
    output, errors = process.communicate(timeout=600)  # the ranks hold the pipe until they end
    assert "stopped    by SIGTERM after step" in output
    assert "TCPStore" not in errors
    assert "\nresume     torchrun --nproc_per_node=2 train_fsdp.py " in output
    assert not psutil.wait_procs(ranks, timeout=300)[1]
    checkpoints = [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()]
    assert checkpoints == [f"step-{lines_logged(tmp_path / 'r'):08d}"]


def refused(rank: int, address: str, port: int) -> str:
    """Return the stderr of a rank that looks for its job's store there."""
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with pytest.raises(RuntimeError, match="exit code 1") as ended:
        forked(1, multirank.impatient, names, "--demo", "--timeout-minutes", "0.05")
    return "".join(line for line in str(ended.value).splitlines(True) if line.startswith("train_fsdp.py: "))


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        printed = refused(0, "127.0.0.1", taken)
        assert printed.startswith(
            f"train_fsdp.py: error: MASTER_ADDR 127.0.0.1, MASTER_PORT {taken}: rank 0 cannot listen"
        )
    (line,) = refused(1, "no-such-host.invalid", taken).splitlines()
    assert line.startswith(f"train_fsdp.py: error: MASTER_ADDR no-such-host.invalid, MASTER_PORT {taken}: ")
    waiting, error = refused(1, "127.0.0.1", taken).splitlines()
    assert waiting.startswith("train_fsdp.py: waiting for rank 0 at MASTER_ADDR 127.0.0.1")
    assert "rank 0's store does not answer (Connection refused)" in error
