"""torchrun on the nodes of a Ray cluster: Ray gives each node's bundle of GPUs, torchrun starts a rank for each GPU.

    python launch/ray_torchrun.py --nodes 2 --gpus-per-node 8 -- --model llama3.1-8b

Arguments after `--` are train_fsdp.py's, which must be in this folder on every node. SIGTERM and Ctrl-C reach every
torchrun, whose ranks then save; the exit code is that of the first torchrun that failed. Without GPUs it starts one CPU
rank per node.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ROOT = pathlib.Path(__file__).resolve().parent.parent


@ray.remote(max_concurrency=2)  # `stop` can run while `run` waits
class Node:
    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def run(self, command: list[str]) -> int:
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment)
        return self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s [options] -- FLAGS")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--port", type=int, default=29500, help="on the first node, where the torchruns meet")
    parser.add_argument("flags", nargs="*", help="flags of train_fsdp.py")
    options = parser.parse_args()

    ray.init(log_to_driver=True)
    group = placement_group([{"CPU": 1, "GPU": options.gpus_per_node}] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    nodes = []
    for index in range(options.nodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        nodes.append(Node.options(scheduling_strategy=strategy, num_cpus=1, num_gpus=options.gpus_per_node).remote())

    ranks, meeting = options.gpus_per_node or 1, f"{ray.get(nodes[0].address.remote())}:{options.port}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={options.nodes}", f"--nproc_per_node={ranks}"]
    torchrun += ["--max-restarts=3", "--rdzv_id=ray", "--rdzv_backend=c10d", f"--rdzv_endpoint={meeting}"]
    waiting = []
    for node in nodes:
        has_store = f"--rdzv_conf=is_host={str(node is nodes[0]).lower()}"
        waiting.append(node.run.remote([*torchrun, has_store, "train_fsdp.py", *options.flags]))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: [node.stop.remote() for node in nodes])
    while waiting:
        done, waiting = ray.wait(waiting, timeout=1)
        for code in ray.get(done):
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
