"""Machines of a cluster on this one, and Slurm on them: each node is a process in namespaces of its own, with its own
network, host name and process numbers, and dies as a whole. Needs root; nothing of it is left when the nodes end."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

TOOLS = ("unshare", "nsenter", "ip", "mount")
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")


def missing(tools: tuple[str, ...] = TOOLS) -> str:
    """Why nodes cannot be made here; empty if they can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    if absent := [tool for tool in tools if not shutil.which(tool)]:
        return f"needs {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return f"needs namespaces: {tried.stderr.decode().strip()}" if tried.returncode else ""


class Node:
    """A node: `enter` are the words before a command that make it run there."""

    def __init__(self, name: str, hosts: pathlib.Path):
        self.name = name
        inner = f"mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up && exec sleep infinity"
        words = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        self.process = subprocess.Popen([*words, inner], stderr=subprocess.DEVNULL)
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while (
            not (pid := children.read_text().strip()) or b"sleep" not in pathlib.Path(f"/proc/{pid}/comm").read_bytes()
        ):
            assert self.process.poll() is None, f"{name} could not be made"
            time.sleep(0.02)
        self.pid = int(pid)
        self.enter = ["nsenter", "--target", pid, "--net", "--uts", "--mount", "--pid"]

    def run(self, *command, timeout: float = 300, **options) -> str:
        """What a command prints there."""
        words = [*self.enter, *map(str, command)]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=timeout, **options).stdout

    def start(self, *command, **options) -> subprocess.Popen:
        return subprocess.Popen([*self.enter, *map(str, command)], **options)

    def lose(self) -> None:
        """The node with everything on it is gone at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def two_nodes(folder: pathlib.Path) -> Iterator[list[Node]]:
    """node1 and node2 with a wire between them."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    nodes = []
    try:
        for name in ("node1", "node2"):
            nodes.append(Node(name, hosts))  # noqa: PERF401 - the first is ended even if the second does not start
        ends = ["type", "veth", "peer", "name", "eth0", "netns"]
        subprocess.run(["ip", "link", "add", "eth0", "netns", f"{nodes[0].pid}", *ends, f"{nodes[1].pid}"], check=True)
        for node, here, there in zip(nodes, ("10.77.0.1", "10.77.0.2"), ("10.77.0.2", "10.77.0.1"), strict=True):
            node.run("ip", "address", "add", here, "dev", "lo")  # it stays when the wire goes with the other node
            node.run("ip", "link", "set", "eth0", "up")
            node.run("ip", "route", "add", there, "dev", "eth0", "src", here)
        yield nodes
    finally:
        for node in nodes:
            node.lose()


CONFIGURATION = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=10
InactiveLimit=0
KillWait=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
MailProg=/bin/true
GresTypes=gpu
NodeName=node[1-2] CPUs=8 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and a slurmd on each of two nodes, with GPUs that are none."""

    def __init__(self, folder: pathlib.Path, nodes: list[Node], gpus: int = 2, slurmd_timeout: int = 10):
        self.folder, self.nodes = folder, nodes
        self.environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, gpus=gpus, slurmd_timeout=slurmd_timeout)
        )
        for gpu in range(gpus):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}"
            for name in ("key-file", "pid-file", "log-file", "seed-file")
        ]
        nodes[0].run("munged", "--force", f"--socket={folder}/munge", *files)
        self.daemon(nodes[0], "slurmctld", "-i")
        for node in nodes:
            self.daemon(node, "slurmd", "-N", node.name)
        while self("sinfo", "-h", "-o", "%T").split() != ["idle"]:
            time.sleep(0.2)

    def daemon(self, node: Node, *command) -> subprocess.Popen:
        log = (self.folder / "daemons.log").open("a")
        return node.start(*command, "-D", env=self.environment, stdout=log, stderr=log)

    def __call__(self, *command) -> str:
        """What a command of Slurm prints on the first node."""
        return self.nodes[0].run(*command, env=self.environment)

    def job(self, number: str) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts, ExitCode, ..."""
        words = self("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, timeout: float = 300) -> dict[str, str]:
        """The job when it is in one of these states; one that is queued again waits for 2 s, not for 2 minutes.

        Raises:
            TimeoutError: it is not there in time.
        """
        until, hurried = time.monotonic() + timeout, {"0"}
        while (job := self.job(number))["JobState"] not in states:
            if time.monotonic() > until:
                raise TimeoutError(str(job))
            if job["JobState"] == "PENDING" and job["Restarts"] not in hurried:
                self("scontrol", "update", f"JobId={number}", "StartTime=now+2")
                hurried.add(job["Restarts"])
            time.sleep(0.2)
        return job
