"""Running: execute one program with its flags in fresh processes; describe the code and the machine."""

import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = {  # program in benchmarks/peers: the package that it needs
    "hf_trainer": "transformers",
    "accelerate_fsdp2": "accelerate",
    "lightning_fabric": "lightning",
}
sys.path.insert(0, str(ROOT))

from harness import base


@dataclass
class Config:
    """One program and its flags. In a flag, WORK is the part's folder and FRESH a new folder for each run."""

    program: str
    flags: dict
    ranks: int = 1
    same_loss_as: str = ""  # name of a configuration; the last losses must agree
    env: dict = field(default_factory=dict)  # environment variables to set

    def command(self) -> str:
        """Return the command as the results record it: variables, program, flags."""
        return " ".join([*(f"{name}={value}" for name, value in self.env.items()), *self.words()])

    def words(self) -> list[str]:
        words = self.program.split()
        for key, value in self.flags.items():
            words.append(f"--{'no-' * (value is False)}{key.replace('_', '-')}")
            words += [] if isinstance(value, bool) else [str(value)]
        return words


class RunError(Exception):
    """A configuration's error in one line."""


def execute(config: Config, work: pathlib.Path, seconds: float) -> dict:
    """Run a configuration on the CPU in fresh processes. Returns its last metrics, the seconds to the first step and to
    the end, the CPU seconds of all its processes, and the peak resident memory in GiB of the largest (at least the 0.3
    GiB that this process has when it forks).

    Raises:
        RunError: the package is not installed, or the run failed or did not end within `seconds`.
    """
    package = PEERS.get(pathlib.Path(config.program).stem)
    if package and not find_spec(package):
        raise RunError(f"not installed: {package}")
    first_step, lines = None, []
    with tempfile.TemporaryDirectory(dir=work) as fresh, tempfile.TemporaryFile("w+") as errors:
        words = [word.replace("FRESH", f"{fresh}/fresh").replace("WORK", str(work)) for word in config.words()]
        if config.program == "train_fsdp.py":
            words += ["--output-dir", fresh, "--run-name", "run", "--no-final-checkpoint"]
        launch = []
        if config.ranks > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={config.ranks}"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | config.env
        pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *launch, *words], cwd=ROOT, env=env, start_new_session=True, **pipes
        )
        timers = [  # not SIGTERM, on which train_fsdp.py saves a checkpoint; torchrun ends its workers within 30 s
            threading.Timer(seconds + grace, os.killpg, (process.pid, sign))
            for grace, sign in ((0, signal.SIGINT), (40, signal.SIGKILL))
        ]
        try:
            for timer in timers:
                timer.start()
            for line in process.stdout:
                lines.append(line)
                if first_step is None and re.match(r"step +1/", line):
                    first_step = time.perf_counter() - began
            _, status, usage = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(status)
            took = time.perf_counter() - began
        finally:
            for timer in timers:
                timer.cancel()
            if process.poll() is None:  # Ctrl-C does not reach it
                os.killpg(process.pid, signal.SIGINT)
        if code:
            errors.seek(0)
            text = errors.read().strip()
            found = re.search(r"^\S*( error|Error): .*", text, re.MULTILINE)  # torchrun's own output comes after it
            error = found[0] if found else (text.splitlines() or [f"exit code {code}"])[-1]
            raise RunError(f"did not end within {seconds:.0f} s" if took >= seconds else error[:300])
        metrics = pathlib.Path(fresh, "run", "metrics.jsonl")
        printed = [line for line in lines if line.startswith('{"')]
        records = list(map(json.loads, metrics.read_text().splitlines() if metrics.exists() else printed[-1:]))
    if not records:
        raise RunError("printed no figures")
    figures = {key: value for key, value in records[-1].items() if key not in ("final", "grad_norm", "learning_rate")}
    figures |= {"first_step_s": first_step} if first_step else {}
    figures |= {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_process_gib": usage.ru_maxrss / 2**20}
    return figures | {"wall_s": took, "load": os.getloadavg()[0]}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def code_hash() -> str:
    """Hash the measured files: runs of different code are never combined."""
    files = [ROOT / "train_fsdp.py", ROOT / "utils.py", *sorted((ROOT / "harness").rglob("*.py"))]
    files += sorted((ROOT / "benchmarks" / "peers").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def processor_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"


def describe_machine() -> dict:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    code = ("train_fsdp.py", "utils.py", "harness")
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], capture_output=True)
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "versions": base.package_versions() | {"cuda": torch.version.cuda, "lightning": base.installed("lightning")},
        "commit": (commit + "-changed" * changed.returncode) or None,
    }
