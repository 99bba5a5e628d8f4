"""launch/ray_torchrun.py on two nodes of Ray, which are processes of this machine: ranks meet, train and save."""

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, lines_logged, wait_until

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="needs the package ray: ./setup.sh --dev")


@pytest.mark.slow
def test_two_nodes_of_ray_train_together_and_save_at_sigterm(tmp_path):
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    launch = ["--nodes", 2, "--gpus-per-node", 0, "--port", 29617, "--"]
    flags = (
        f"--demo --sequence-length 64 --num-steps 5000 --run-name r --output-dir {tmp_path} --log-interval 1".split()
    )
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "launch" / "ray_torchrun.py", *map(str, [*launch, *flags])]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: lines_logged(tmp_path / "r"), [process])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 1  # of torchrun, for any signal
    finally:
        process.kill()
        cluster.shutdown()
    assert json.loads((tmp_path / "r" / "config.json").read_text())["world_size"] == 2
    assert list((tmp_path / "r" / "checkpoints").glob("step-*"))
