"""A run's own plan: it ends with the run, and can be left out or waited for."""

import dataclasses
import json
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import PROGRAM, ROOT, parse, python, start, words

from harness.plan import own_plan

KILLED = """
import os, signal
from harness.flags.parser import parse_args
from harness.job import start_processes
from harness.plan import own_plan
start_processes()
plan = own_plan.start_plan(parse_args(["--model", "llama3.1-70b", "--plan-gpu", "B200"]))
print(plan.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_runs_planning_process_ends():
    run = start([sys.executable, "-c", KILLED], PYTHONPATH=str(ROOT))
    assert run.returncode == -9, run.stderr
    plan = psutil.Process(int(run.stdout))
    try:
        assert "--plan" in plan.cmdline()
        deadline = time.monotonic() + 600
        while plan.is_running() and plan.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            assert plan.cpu_times().user < 15, "it plans on"  # its imports take a third of that, the plan much more
            time.sleep(0.2)
    except psutil.NoSuchProcess:
        pass
    finally:
        if plan.is_running():
            plan.kill()


def test_a_run_is_planned_beside_it_unless_the_flag_leaves_it_out(device, monkeypatch):
    started = []
    monkeypatch.setattr(own_plan, "start_plan", lambda settings: started.append(shell("exec sleep 60")) or started[0])
    gpu = torch.device("cuda")
    for flags, where, steps in ((["--no-own-plan"], gpu, 1), ([], gpu, 0), ([], device, 1)):
        with own_plan.planning_in_background(parse(flags), where, steps) as process:
            assert process is None and not started
    with own_plan.planning_in_background(parse([]), gpu, 1) as process:
        assert process.poll() is None
    assert process.wait(300) < 0


@pytest.mark.parametrize("recipe, emulates", [("rowwise", True), (None, False)])
def test_a_plan_is_of_the_run_as_it_was_resolved_and_leaves_the_launchers_files_alone(monkeypatch, recipe, emulates):
    """A resumed run has the checkpoint's precision, which no flag names."""
    started = {}
    monkeypatch.setattr(own_plan.subprocess, "Popen", lambda command, env, **_: started.update(words=command, env=env))
    monkeypatch.setattr(own_plan.dist, "get_world_size", lambda: 4)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/error.json")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    resolved = {"precision": "fp8" if recipe else "bf16", "fp8_recipe": recipe, "fp8_emulate": emulates}
    settings = parse(["--demo", "--plan-gpu", "H200", "--batch-size", "auto"])
    own_plan.start_plan(dataclasses.replace(settings, **resolved, batch_size=16, compile=True))
    words = started["words"][started["words"].index(PROGRAM) + 1 :]
    planned = parse(words)
    assert {name: getattr(planned, name) for name in resolved} == resolved
    assert (planned.batch_size, planned.compile, planned.plan_gpus, planned.plan_gpu) == (16, True, (4,), "H200")
    assert not [name for name in started["env"] if name.startswith("TORCHELASTIC_")]


PRINTING = """
import torch
from harness import register
from harness.model import OptimizerKind


def build(groups, settings):
    print("building")
    return torch.optim.SGD(groups, settings.lr)


register.optimizer("printing", OptimizerKind(build))
"""


@pytest.mark.slow
def test_a_plan_as_json_is_one_object_whatever_imported_code_prints(tmp_path):
    (tmp_path / "mine.py").write_text(PRINTING)
    flags = words("--demo --optimizer printing --plan --json --plan-seconds 0 --plan-gpus 1 --no-compile")
    process = python(*flags, "--import", tmp_path / "mine.py")
    assert process.returncode == 0 and "building" in process.stderr, process.stderr
    assert json.loads(process.stdout)["model"] == "demo"


def shell(script: str) -> subprocess.Popen:
    """In place of a planning process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    return subprocess.Popen(["sh", "-c", script], **pipes)


@pytest.mark.parametrize(
    "script, printed",
    [
        ("echo '{}'; echo bye", "not one JSON object"),
        ("printf '\\377{}'", "not one JSON object"),
        ("echo fault >&2; exit 2", "fault"),
        ("kill -9 $$", "no plan"),
    ],
)
def test_output_that_is_no_plan_leaves_the_run_as_it_is(device, capsys, script, printed):
    assert own_plan.predicted_metrics(shell(script)) == {}
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("planned    nothing: ") and line.endswith(printed)


def test_a_planning_process_that_cannot_start_leaves_the_run_as_it_is(device, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    with own_plan.planning_in_background(parse(["--plan-gpu", "H200"]), device, 1) as process:
        assert process is None
    assert "planned    nothing: " in capsys.readouterr().out


def test_a_run_does_not_wait_for_its_plan_for_ever(device, monkeypatch):
    monkeypatch.setattr(own_plan, "PLAN_TIMEOUT", 0.1)
    process = shell("exec sleep 60")
    assert own_plan.predicted_metrics(process) == {}
    assert process.poll() < 0
