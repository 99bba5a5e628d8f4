"""What would go wrong later is said before a run trains, by rank, with what to do.

No GPU has run these. What ranks say of themselves is made up, but for the CPU's; NVML is NVIDIA's own Python package on
a library in the place of the driver's, compiled here.
"""

import errno
import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, parse, start, train, write_checkpoint

from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.data import create_collate_fn
from harness.job import driver, host, preflight
from harness.model.configs import load_config
from harness.model.optimization import parameter_bytes
from harness.model.weights import count_parameters

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "memory": 80 * GIB, "taken": 0, "holders": []}
CPU = {"threads": 1, "cores": 64, "affinity": "0-63/64", "shared": 10**10, "files": 65536}


def ranks(count: int, per_node: int, of: dict = H100, **others: dict) -> list[dict]:
    """What ranks say that are all alike, but for `others`: r3={...} is what rank 3 says otherwise."""
    found = []
    for rank in range(count):
        own = {"node": (f"node-{rank // per_node}", "boot"), "pid": 100 + rank, "versions": {"torch": "2.13.0"}}
        found.append(own | CPU | of | {"index": rank % per_node} | others.get(f"r{rank}", {}))
    return found


def test_ranks_that_are_alike_and_have_enough_are_warned_of_nothing(tmp_path):
    settings, described = parse(["--demo", "--num-workers", 1]), ranks(8, 8)
    for lines in (
        preflight.check_versions(described),
        preflight.check_gpus(described),
        preflight.check_taken(described),
        preflight.check_nodes(settings, 1000, parameter_bytes(settings), described),
        preflight.check_links(described, 8),
        preflight.check_threads(settings, described, computes=False),
        preflight.check_shared_memory(settings, described),
        preflight.check_files(described),
        preflight.check_disk(settings, 1000, parameter_bytes(settings), tmp_path),
    ):
        assert [*lines] == []


def test_what_a_rank_says_of_itself_is_less_than_a_kilobyte(device):
    own = preflight.describe(device)
    of_gpu = ranks(1, 1)[0] | {"links": [*range(8)], "index": 0}
    of_gpu["versions"] = own["versions"] | {"nccl": "2.28.9", "cuda": "13.0", "driver": "580.95.05"}
    assert {"node", "pid", "versions", "threads", "cores", "affinity", "shared"} <= own.keys()
    assert {"python", "torch", "transformers", "program"} <= own["versions"].keys()
    assert len(pickle.dumps(own | of_gpu | {"node": ("n" * 64, "12345678")})) < 1024


# ----------------------------------------------------------------------------------------------------------------------
# Versions, GPUs, memory, threads


def test_a_rank_with_other_versions_is_named_with_what_the_others_have():
    other = {"versions": {"torch": "2.11.0", "program": "1"}}
    lines = [*preflight.check_versions(ranks(4, 2, {"versions": {"torch": "2.13.0", "program": "0"}}, r2=other))]
    assert lines[0] == (
        "rank 2 (node-1, pid 102): torch 2.11.0, but 2.13.0 on rank 0 (node-0, pid 100) and 2 more; "
        "install the same on every node"
    )
    assert lines[1].startswith("rank 2 (node-1, pid 102): program 1, but 0 on ")
    assert len(lines) == 2
    (line,) = preflight.check_versions(ranks(3, 3, r0={"versions": {"torch": "2.13.0", "torchao": "0.18"}}))
    assert line.startswith(
        "rank 0 (node-0, pid 100): torchao 0.18, but missing on rank 1 (node-0, pid 101) and 1 more; "
    )


def test_the_programs_own_checksum_follows_its_files(tmp_path, monkeypatch):
    for name in ("train_fsdp.py", "utils.py", "harness/job/host.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    before = preflight.checksum()
    assert before == preflight.checksum()
    (tmp_path / "harness" / "job" / "host.py").write_text("x = 1\n")
    assert before != preflight.checksum()


def test_a_rank_with_another_gpu_or_less_memory_is_named():
    pcie = {"gpu": "NVIDIA H100 PCIe"}
    (line,) = preflight.check_gpus(ranks(4, 4, r1=pcie))
    assert line.startswith("rank 1 (node-0, pid 101): NVIDIA H100 PCIe with 80.0 GiB, the others have NVIDIA H100 80GB")
    (line,) = preflight.check_gpus(ranks(4, 4, r3={"memory": 40 * GIB}))
    assert line.startswith("rank 3 (node-0, pid 103): NVIDIA H100 80GB HBM3 with 40.0 GiB, the others have")
    assert [*preflight.check_gpus(ranks(4, 4, r3={"memory": 79.9 * GIB}))] == []  # a driver's share, not another card


def test_memory_that_others_hold_of_a_gpu_is_named_with_their_pids():
    two, one = {"taken": 20 * GIB, "holders": [7, 8]}, {"taken": 3 * GIB, "holders": [9]}
    lines = [*preflight.check_taken(ranks(4, 4, r1=two, r2=one))]
    assert lines[0].startswith("rank 1 (node-0, pid 101): 20.0 of 80.0 GiB of its GPU are held by others (pid 7, 8); ")
    assert lines[1].startswith("rank 2 (node-0, pid 102): 3.0 of 80.0 GiB of its GPU are held by others (pid 9); ")
    assert len(lines) == 2
    lines = [*preflight.check_taken(ranks(64, 8, H100 | {"taken": 3 * GIB, "holders": [7]}))]
    assert len(lines) == 4 and lines[-1].endswith("; 60 more GPUs are like that")


@pytest.mark.parametrize(
    "computes, count, given, flags, said",
    [
        (True, 4, {"threads": 8, "cores": 16}, "", "4 ranks with 32 threads on 16 cores, which wait for each other; "),
        (True, 4, {"threads": 4, "cores": 16}, "", None),
        (True, 4, {"threads": 1, "cores": 2}, "", None),  # a rehearsal of four ranks on a laptop
        (True, 1, {"threads": 4, "cores": 2}, "", "1 rank with 4 threads on 2 cores"),
        (False, 8, {"threads": 64, "cores": 64}, "--num-workers 1", None),  # of a GPU's rank they wait
        (False, 8, {"threads": 1, "cores": 8}, "--num-workers 1", "8 ranks and 8 data workers on 8 cores"),
        (False, 8, {"threads": 1, "cores": 8}, "--num-workers 0", None),
    ],
)
def test_more_threads_than_cores_are_named(computes, count, given, flags, said):
    lines = [*preflight.check_threads(parse(["--demo", *flags.split()]), ranks(count, 8, CPU | given), computes)]
    assert [said in line for line in lines] == ([True] if said else [])


def test_ranks_that_are_bound_to_cores_of_their_own_do_not_share_them():
    settings, bound = parse(["--demo"]), {f"r{n}": {"affinity": f"{4 * n}-{4 * n + 3}/4"} for n in range(4)}
    assert [*preflight.check_threads(settings, ranks(4, 4, CPU | {"threads": 4, "cores": 4}, **bound), True)] == []
    (line,) = preflight.check_threads(settings, ranks(64, 4, CPU | {"threads": 4, "cores": 4}), True)
    assert " and 12 more: 4 ranks with 16 threads on 4 cores" in line


# ----------------------------------------------------------------------------------------------------------------------
# Shared memory


class Windows(torch.utils.data.Dataset):
    length = 250_001

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.zeros(self.length, np.uint16)


def shared_memory_of(pids):
    """Bytes of the segments that these processes hold open or mapped. Not the use of /dev/shm, which others share."""
    segments = {}
    for pid in pids:
        for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(descriptor).startswith(f"{preflight.SHARED_MEMORY}/torch_"):
                    segments[os.stat(descriptor).st_ino] = os.stat(descriptor).st_size
            except OSError:  # closed since it was listed
                continue
        for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{preflight.SHARED_MEMORY}/torch_"):
                first, end = (int(address, 16) for address in addresses.split("-"))
                segments[int(inode)] = end - first
    return sum(segments.values())


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc/self/maps")
def test_what_data_workers_read_ahead_is_what_they_take_of_shared_memory():
    settings = parse(["--demo", "--batch-size", 4, "--sequence-length", Windows.length - 1])
    collate = create_collate_fn(shift_labels=False)  # as the program does
    loader = torch.utils.data.DataLoader(Windows(), 4, num_workers=1, collate_fn=collate)
    batches = iter(loader)
    in_use = next(batches)
    expected = (preflight.PREFETCHED_BATCHES + 1) * preflight.batch_bytes(settings)
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
    deadline, found = time.monotonic() + 300, 0
    while found < 0.99 * expected and time.monotonic() < deadline:  # the worker is still reading ahead
        time.sleep(0.05)
        found = shared_memory_of(pids)
    assert in_use["labels"].shape == (4, Windows.length - 1)
    assert found == pytest.approx(expected, rel=0.01)


def test_too_little_shared_memory_is_an_error_for_data_workers_and_a_warning_for_nccl():
    docker = {"shared": 64 * 2**20}  # what docker gives
    few = parse(["--demo", "--num-workers", 1])
    many = parse(["--demo", "--batch-size", 64, "--sequence-length", 8192, "--num-workers", 4])
    assert [*preflight.check_shared_memory(few, ranks(1, 1, H100 | docker))] == []
    assert [*preflight.check_shared_memory(few, ranks(8, 8, CPU | docker))] == []  # gloo takes none
    (line,) = preflight.check_shared_memory(few, ranks(8, 8, H100 | docker))
    assert line.startswith(
        "/dev/shm of node-0: 67.1 MB free, 8 ranks may need 0.524 MB for data workers and 154 MB for NCCL"
    )
    assert "--shm-size" in line
    with pytest.raises(UserError, match=r"^--num-workers 4: /dev/shm of node-0: 67\.1 MB free, .* takes 671 MB; "):
        next(preflight.check_shared_memory(many, ranks(8, 8, docker)))
    (line,) = preflight.check_shared_memory(few, ranks(32, 8, H100 | docker))
    assert line.startswith("/dev/shm of node-0 and 3 more nodes: ")
    assert [*preflight.check_shared_memory(parse(["--demo", "--num-workers", 0]), ranks(8, 8, CPU | docker))] == []


# ----------------------------------------------------------------------------------------------------------------------
# Open files, and sockets of data workers

LOAD = """
import resource, sys, tempfile
from harness.job import host
if sys.argv[1:] == ["shorten"]:
    host.shorten_sockets()
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(3)
for batch in torch.utils.data.DataLoader(Rows(), 2, num_workers=1, timeout=300):
    print(batch.sum().item(), tempfile.gettempdir())
"""


def test_data_workers_reach_their_rank_where_tmpdir_is_too_long_for_a_socket(tmp_path):
    long = tmp_path / ("t" * 120)
    long.mkdir()
    process = start([sys.executable, "-W", "ignore", "-c", LOAD, "shorten"], TMPDIR=str(long))
    assert process.stdout == 2 * f"6.0 {long}\n", process.stderr


def test_a_tmpdir_too_long_for_sockets_is_refused_where_tmp_cannot_take_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 120)

    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(host.multiprocessing.util, "get_temp_dir", refuse)
    with pytest.raises(UserError, match=r"^TMPDIR: its path of 121 bytes is too long .* \(Permission denied\); give a"):
        host.shorten_sockets()
    assert tempfile.gettempdir() == "/" + "t" * 120
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    host.shorten_sockets()  # asks nobody


def test_files_may_be_opened_up_to_the_hard_limit_and_a_low_one_is_named():
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 900)); from harness.job import host; "
    assert start([sys.executable, "-c", code + "print(host.raise_file_limit())"]).stdout == "900\n"
    (line,) = preflight.check_files(ranks(8, 4, r5={"files": 900}, r6={"files": 1000}))
    assert line.startswith("rank 5 (node-1, pid 105): 900 open files are allowed, ") and "ulimit" in line


# ----------------------------------------------------------------------------------------------------------------------
# Nodes and links


def nodes(flags: str, described: list[dict]) -> list[str]:
    settings = parse(["--model", "llama3.1-8b", "--dataset", "demo", "--sequence-length", 8192, *flags.split()])
    return [*preflight.check_nodes(settings, 8_030_261_248, parameter_bytes(settings), described)]


def test_shards_across_nodes_are_named_with_the_plan_that_compares_hsdp():
    (line,) = nodes("", ranks(16, 8))
    assert line.startswith("--dp-replicate-size 1: a shard group spans 2 nodes, and one node would hold a replica")
    assert "(15 GiB a rank)" in line  # 16 bytes of each of 8.03 billion parameters on 8 GPUs
    assert "; --plan --plan-gpus 16 --gpus-per-node 8 --dp-replicate-size 2 " in line


def test_shards_across_nodes_are_not_named_where_one_node_does_not_hold_a_replica():
    assert nodes("", ranks(8, 8)) == []
    assert nodes("--dp-replicate-size 2", ranks(16, 8)) == []
    assert nodes("--zero-stage 0", ranks(16, 8)) == []
    assert nodes("", ranks(16, 8, {"gpu": "L4", "memory": 22 * GIB})) == []  # 15 GiB a GPU, before activations


def test_a_shard_group_that_leaves_nvlink_is_named():
    switch = {f"r{n}": {"links": [m for m in range(8) if m != n]} for n in range(8)}
    assert [*preflight.check_links(ranks(8, 8, **switch), 8)] == []
    none = {f"r{n}": {"links": []} for n in range(8)}
    assert [*preflight.check_links(ranks(8, 8, **none), 8)] == []  # PCIe alone: nothing to leave
    pairs = {f"r{n}": {"links": [n ^ 1]} for n in range(4)}
    assert [*preflight.check_links(ranks(4, 4, **pairs), 2)] == []
    (line,) = preflight.check_links(ranks(4, 4, **pairs), 4)
    assert line == (
        "the shard group of rank 0 (node-0, pid 100) leaves NVLink, which connects ranks 0+1 | 2+3; "
        "with --dp-replicate-size 2 a group stays on it"
    )
    crossed = {f"r{n}": {"links": [n ^ 2]} for n in range(4)}
    (line,) = preflight.check_links(ranks(4, 4, **crossed), 2)
    assert line.endswith(
        "ranks 0+2 | 1+3; with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,2,1,3 a group stays on it"
    )
    (line,) = preflight.check_links(ranks(4, 4, **crossed), 4)
    assert "--dp-replicate-size 2 and CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,2,1,3 " in line
    cube = {f"r{n}": {"links": [n ^ 1, n ^ 2, n ^ 4]} for n in range(8)}
    assert [*preflight.check_links(ranks(8, 8, **cube), 8)] == []  # not all pairs, but a way for a ring


NVML = """
#include <string.h>
#define HANDLE(n) ((void *)(long)(n + 1))
#define NUMBER(d) ((int)(long)d - 1)
typedef unsigned long long large;
typedef struct { unsigned pid; large used; unsigned gi, ci; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.95.05"); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) { *d = HANDLE(1); return strcmp(uuid, "GPU-abc") ? 6 : 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **d) { *d = HANDLE(n); return 0; }
int nvmlDeviceGetIndex(void *d, unsigned *n) { *n = NUMBER(d); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 4; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) {
    *status = what != 2 || (NUMBER(a) ^ NUMBER(b)) != 1;
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *d, large *reasons) { *reasons = 0x44; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, process *found) {
    if (*count < 2) { *count = 2; return 7; }
    *count = 2;
    found[0] = (process){OWN, 1000, -1, -1};
    found[1] = (process){4321, 5000000000, -1, -1};
    return 0;
}
"""
ASK = """
import ctypes, json, os, sys, types
loaded = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **options: loaded(sys.argv[1] if "nvidia-ml" in str(name) else name, *args, **options)
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(uuid="abc")
from harness.job import driver
os.getpid = lambda: 77
print(json.dumps([driver.describe(), driver.slowdown()]))
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_nvidias_package_is_asked_as_it_wants_to_be_with_a_library_in_the_drivers_place(tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    (tmp_path / "nvml.c").write_text(NVML.replace("OWN", "77"))
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "nvml.c"], check=True)
    answer = start([sys.executable, "-W", "ignore", "-c", ASK, library])
    assert answer.returncode == 0, answer.stderr
    described, slowdown = json.loads(answer.stdout)
    assert described == {"driver": "580.95.05", "index": 1, "links": [0], "holders": [[4321, 5000000000]]}
    assert slowdown == 0x40  # not the power cap's bit


class NVMLError(Exception):
    pass


def fails(error: Exception):
    def function(*_):
        raise error

    return function


ANSWERS = {
    "NVMLError": NVMLError,
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": lambda uuid: 1,
    "nvmlSystemGetDriverVersion": lambda: "580.95.05",
    "nvmlDeviceGetIndex": lambda gpu: 0,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x40,
    "nvmlDeviceGetComputeRunningProcesses": fails(NVMLError()),
}


@pytest.mark.parametrize(
    "other, described",
    [
        ({}, {"driver": "580.95.05", "index": 0, "links": []}),
        ({"nvmlSystemGetDriverVersion": fails(OSError("cannot be loaded"))}, {"index": 0, "links": []}),
        ({"nvmlInit": fails(OSError("libnvidia-ml.so.1"))}, {}),
        ({"nvmlInit": fails(AttributeError("nvmlInit_v2"))}, {}),
        ({"nvmlInit": fails(NVMLError("no driver"))}, {}),
    ],
)
def test_a_driver_or_a_package_of_another_version_ends_no_run(monkeypatch, other, described):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**ANSWERS | other))
    driver.find.cache_clear()
    try:
        assert (driver.describe(), driver.slowdown()) == (described, 0x40 if described else 0)
        del sys.modules["pynvml"].nvmlDeviceGetCurrentClocksEventReasons
        assert driver.slowdown() == 0
    finally:
        driver.find.cache_clear()


# ----------------------------------------------------------------------------------------------------------------------
# The disk


@pytest.mark.parametrize("flags, each", [("", 12), ("--optimizer adamw-bf16", 8), ("--precision bf16-pure", 6)])
def test_a_checkpoint_is_as_large_as_is_said(device, tmp_path, arguments, flags, each):
    given = [*arguments, *flags.split(), "--num-steps", 1, "--checkpoint-interval", 1]
    given += ["--precision", "bf16"] * ("precision" not in flags)
    assert train(given, device) == 0
    (saved,) = (tmp_path / "out" / "r" / "checkpoints").iterdir()
    size = sum(path.stat().st_size for path in saved.iterdir())
    settings = parse(given)
    parameters = count_parameters(load_config(settings.model))
    assert parameter_bytes(settings).in_checkpoint == each
    assert size == pytest.approx(each * parameters, rel=0.15)  # a small model: names and offsets count too


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 768 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_run_whose_checkpoint_has_no_room_ends_before_it_trains(small_disk, mistake):
    said = mistake("--output-dir", small_disk, "--checkpoint-interval", 1, exit_code=1)
    assert said.startswith("--output-dir: a checkpoint takes 3.1 MB (")
    assert f"{small_disk / 'r'} has 0.7" in said and said.endswith(" MB free; name another disk, or make room")
    assert not any(small_disk.glob("r/*.jsonl"))
    said = mistake("--export", small_disk / "export", exit_code=1)
    assert said.startswith("--export ") and "free; name another disk" in said


def test_a_last_state_that_has_no_room_is_one_warning_and_no_error(small_disk, device, arguments, mistake, capfd):
    assert train([*arguments, "--output-dir", small_disk], device) == 0
    output, errors = capfd.readouterr()
    assert errors.count("the last state will not be kept; make room") == errors.count("warning") == 1
    assert "no weights: --final-checkpoint or --export DIR keeps them" in output
    assert not (small_disk / "r" / "checkpoints").exists()
    flags = json.loads((small_disk / "r" / "config.json").read_text())["flags"]
    assert flags["lacks_disk"] and flags["final_checkpoint"] is None  # which --config repeats: there may be room then
    said = mistake("--output-dir", small_disk, "--run-name", "asked", "--final-checkpoint", exit_code=1)
    assert said.startswith("--output-dir: a checkpoint takes 3.1 MB (")


def hosts(*memory: float, ranks: int = 4, resident: float = 1e9) -> list[dict]:
    nodes = [(f"node-{number}", "boot") for number in range(len(memory))]
    each = [{"node": n, "host_memory": m, "resident": resident} for n, m in zip(nodes, memory, strict=True)]
    return [about for about in each for _ in range(ranks)]


def test_copies_for_checkpoints_that_a_host_cannot_hold_are_a_warning(monkeypatch):
    often = parse(["--model", "demo", "--dataset", "demo", "--checkpoint-interval", 5])
    for settings, staged, at_rest, described, said in (
        (often, 9e9, 0, hosts(44e9), 0),  # 4 x (9 + 1)
        (often, 9e9, 0, hosts(39e9), "of 4 ranks on node-0 take 36 GB, with 4 GB for all else there are 39 GB"),
        (often, 9e9, 0, hosts(44e9, 39e9), "of 4 ranks on node-1 take 36 GB"),
        (often, 9e9, 5e9, hosts(44e9), "with 24 GB for all else"),  # a CPU, or --cpu-offload: the model is there too
        (parse(["--model", "demo", "--checkpoint-interval", 5, "--no-async-checkpoint"]), 9e9, 0, hosts(1e9), 0),
        (parse(["--model", "demo", "--dataset", "demo"]), 9e9, 0, hosts(1e9), 0),
    ):  # fmt: skip
        found = [*preflight.check_staging(settings, staged, at_rest, described)]
        assert len(found) == bool(said) and (not said or said in found[0])


def test_a_run_without_memory_for_such_copies_waits_for_each_save(device, arguments, monkeypatch, capfd):
    monkeypatch.setattr(preflight.host, "memory", lambda: 10_000_000)
    assert train([*arguments, "--checkpoint-interval", 1, "--num-steps", 3], device) == 0
    output, errors = capfd.readouterr()
    assert errors.count("take 3.1 MB, with ") == 1 and "the run waits for each save" in errors
    assert output.count("saved      step-") == 3 and "training paused" not in output


def test_room_for_fewer_checkpoints_than_are_kept_is_a_warning(tmp_path, monkeypatch):
    parameters = 10**9  # 12 GB
    for free, there, flags, lines in (
        (40e9, 0, "--checkpoint-interval 5", 0),
        (30e9, 0, "--checkpoint-interval 5", 1),
        (30e9, 1, "--checkpoint-interval 5", 0),  # a resumed run: one of them is there already
        (30e9, 0, "--checkpoint-interval 5 --keep-checkpoints 1", 0),
        (26e9, 0, "--checkpoint-interval 5 --keep-checkpoints 1 --export {}/e", 1),
        (11e9, 0, "", 1),  # the last state
        (11e9, 0, "--no-final-checkpoint", 1),  # SIGTERM
        (15e9, 0, "--export {}/e", 1),  # 4 GB of weights come after it
        (17e9, 0, "--export {}/e", 0),
        (13e9, 0, "", 0),
    ):
        monkeypatch.setattr(preflight, "free_bytes", lambda _, free=free: free)
        folder = tmp_path / str(there)
        for number in range(there):
            write_checkpoint(folder, number)
        settings = parse(["--model", "demo", "--dataset", "demo", *flags.format(tmp_path).split()])
        found = [*preflight.check_disk(settings, parameters, parameter_bytes(settings), folder)]
        assert len(found) == lines, (free, there, flags, found)


def test_what_a_killed_run_left_half_written_counts_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 40_000)
    settings = parse(["--model", "demo", "--dataset", "demo", "--checkpoint-interval", 5])
    with pytest.raises(UserError, match=r"^--output-dir: a checkpoint takes 0\.06 MB"):
        next(preflight.check_disk(settings, 5000, parameter_bytes(settings), tmp_path))
    half = tmp_path / "checkpoints" / ".step-00000005.writing"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(bytes(30_000))
    warning = next(preflight.check_disk(settings, 5000, parameter_bytes(settings), tmp_path))
    assert "make room, or give a smaller --keep-checkpoints" in warning
