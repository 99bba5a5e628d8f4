"""Two nodes that are two: a torchrun in each of two network namespaces, one of which loses a rank, and then all."""

import os
import subprocess
import sys

import nodes
import psutil
import pytest
from conftest import PROGRAM, lines_logged, losses_of, metrics_of, train, wait_until

WHY = nodes.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]

STEPS = 200
LAUNCHER = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_id=r", "--rdzv_backend=c10d"]
LAUNCHER += ["--rdzv_endpoint=node1:29500"]


def launch(node: nodes.Node, flags: list, output) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", *LAUNCHER, PROGRAM, *flags]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return node.start(*command, env=environment, stdout=output, stderr=output)


def torchrun_of(launched: subprocess.Popen) -> psutil.Process:
    return psutil.Process(launched.pid).children()[0]


def test_a_run_on_two_nodes_survives_a_killed_rank_and_a_killed_launcher(device, arguments, tmp_path):
    common = [*arguments, "--num-steps", STEPS, "--log-interval", 1, "--lr", "1e-3"]
    flags = [*common, "--checkpoint-interval", 20, "--resume", "auto", "--dp-replicate-size", 2]
    folder, log = tmp_path / "out" / "r", tmp_path / "log"

    def starts() -> int:
        return log.read_text().count("\nresumed ")

    with nodes.two_nodes(tmp_path) as two, log.open("a") as output:
        launched = [launch(node, flags, output) for node in two]
        wait_until(lambda: any(folder.glob("checkpoints/step-*")), launched)
        torchrun_of(launched[1]).children()[0].kill()
        wait_until(lambda: starts() >= 1 and lines_logged(folder) > 30, launched)
        before = lines_logged(folder)
        torchrun_of(launched[1]).kill()
        launched[1].wait()
        launched[1] = launch(two[1], flags, output)
        assert [process.wait(timeout=600) for process in launched] == [0, 0]
    assert before < STEPS and starts() >= 2
    assert [line["step"] for line in metrics_of(folder)] == [*range(1, STEPS + 1), STEPS]
    assert train([*common, "--batch-size", 4, "--run-name", "undisturbed"], device) == 0
    assert losses_of(folder) == pytest.approx(losses_of(tmp_path / "out" / "undisturbed"), rel=1e-4)
