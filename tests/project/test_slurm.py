"""launch/slurm.sh under a real Slurm of two nodes: the ranks that it starts, and the job's end for each of theirs.

The ranks are stand-ins that save a checkpoint, record how they ended and leave, which is what Slurm sees of real ones.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import nodes
import pytest
from conftest import ROOT

SCRIPT = ROOT / "launch" / "slurm.sh"
needs_slurm = pytest.mark.skipif(bool(why := nodes.missing(nodes.TOOLS + nodes.SLURM)), reason=why)

TORCHRUN = """#!{python} -S
import json, os, pathlib, signal, sys, time
number, node = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURMD_NODENAME"]
flags = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
after = dict(zip(sys.argv, sys.argv[1:]))
run = pathlib.Path(after["--output-dir"], after["--run-name"])
act = after["--model"].split(",")[int(number)]  # what this start of the job does
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append("USR1"))
variables = {{name: os.environ.get(name) for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS")}}
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps(flags | variables | {{"start": int(number), "node": node, "act": act}}) + "\\n")
while "at-the-signal" in act and not asked:
    time.sleep(0.05)
first = node == "node1"
if first and "save" in act:
    (run / "checkpoints" / f"step-{{int(number):08d}}").mkdir(parents=True)
if first and "exit" in act:
    (run / "config.json").write_text(json.dumps({{"starts": [{{"exit_code": int(act[-1])}}]}}))
if "killed" in act and not first:
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
while "waits" in act:
    time.sleep(0.05)
time.sleep(0 if first or "done" in act else 2)  # rank 0 has recorded how it ended
sys.exit("done" not in act)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with nodes.two_nodes(folder) as two:
        yield nodes.Slurm(folder, two, gpus=4, slurmd_timeout=6)


@pytest.fixture
def project(tmp_path) -> pathlib.Path:
    """A project folder with stand-ins for ranks."""
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text(TORCHRUN.format(python=sys.executable))
    torchrun.chmod(0o755)
    (torchrun.parent / "python").symlink_to(sys.executable)
    return tmp_path


@pytest.fixture
def submit(slurm, project):
    """`submit(*acts)`: submit the script with one act for each start, in --model; the job's number."""

    def submit(*acts: str, gpus: str = "--gpus-per-node=2") -> str:
        script = project / "slurm.sh"
        script.write_text(SCRIPT.read_text().replace("--gpus-per-node=8", gpus))
        flags = ["--parsable", "--cpus-per-task=4", script, "--model", ",".join(acts)]
        return slurm("sbatch", f"--chdir={project}", *flags).strip()

    yield submit
    slurm("scancel", "--user=root")


def wait_for_ranks(project: pathlib.Path) -> None:
    """Wait until the ranks of both nodes listen for signals."""
    until = time.monotonic() + 300
    while not (project / "calls.jsonl").exists() or len(calls_of(project)) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)


def calls_of(project: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (project / "calls.jsonl").read_text().splitlines()]


def starts_of(project: pathlib.Path) -> list[str]:
    """The act of each start of the job."""
    return [call["act"] for call in calls_of(project) if call["node"] == "node1"]


@pytest.mark.slow
@needs_slurm
def test_each_node_starts_as_many_ranks_as_its_step_has_gpus(slurm, submit, project):
    job = slurm.wait(submit("done", gpus="--gpus=5"), "COMPLETED", "FAILED")
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    calls = {call["node"]: call for call in calls_of(project)}
    ranks = sorted(int(call["--nproc_per_node"]) for call in calls.values())
    assert sum(ranks) == 5 and ranks[0] < ranks[1]  # the batch shell has the first node's number
    for call in calls.values():
        assert (call["--nnodes"], call["--rdzv_endpoint"], call["--max-restarts"]) == ("2", "node1:29500", "3")
        assert call["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # without it --max-restarts works on one node only


AT_THE_LIMIT = ["--batch", "--signal=USR1"]  # what Slurm does 120 s before it


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "acts, cancel, state, restarts",
    [
        (["save-at-the-signal", "done"], AT_THE_LIMIT, "COMPLETED", 1),
        (["save-at-the-signal-exit-0"], AT_THE_LIMIT, "COMPLETED", 0),  # torchrun has 1, as it got the signal too
        (["save-waits", "done"], [], "CANCELLED", 0),
        (["save-waits-killed", "save-waits-killed", "waits-killed", "done"], None, "FAILED", 2),  # got no further
    ],
    ids=["the time limit", "done at the limit", "scancel", "a killed launcher"],
)
def test_a_job_ends_as_the_documents_say(slurm, submit, project, acts, cancel, state, restarts):
    number = submit(*acts)
    if cancel is not None:
        wait_for_ranks(project)
        slurm("scancel", *cancel, number)
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")
    assert (job["JobState"], job["Restarts"]) == (state, str(restarts))
    assert starts_of(project) == acts[: restarts + 1]


@pytest.mark.slow
@needs_slurm
def test_a_lost_node_queues_the_job_again(slurm, submit, project):
    number = submit("save-waits", "done")
    wait_for_ranks(project)
    slurm.nodes[1].lose()
    assert slurm.wait(number, "PENDING", "FAILED", "COMPLETED")["Restarts"] == "1"


# ----------------------------------------------------------------------------------------------------------------------
# Without Slurm


STAND_INS = {
    "srun": """while [ "$1" != bash ]; do shift; done; SLURMD_NODENAME=node1 SLURM_GPUS_ON_NODE=3 exec "$@" """,
    "scontrol": """if [ "$1" = show ]; then echo node1; else echo "$@" >> asked; fi""",
}


@pytest.mark.parametrize(
    "act, exit_code, continues",
    [("done", 0, False), ("fails", 1, False), ("save", 1, True), ("save-exit-0", 0, False), ("save-exit-3", 3, False)],
)
def test_the_script_continues_if_it_got_further_and_is_not_done(project, act, exit_code, continues):
    (project / "bin").mkdir()
    for name, script in STAND_INS.items():
        (project / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (project / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "5"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1"}
    job = subprocess.run(["bash", SCRIPT, "--model", act], cwd=project, env=environment)
    assert job.returncode == exit_code
    asked = project / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * continues
    assert [call["--nproc_per_node"] for call in calls_of(project)] == ["3"]
