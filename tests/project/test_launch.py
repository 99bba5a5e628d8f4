"""The files for clusters: Kubernetes accepts the manifests, the program its flags, and they agree with each other.

Tests that need kubectl or the package kubernetes-validate (all schemas of Kubernetes, 108 MB) are skipped without them.
"""

import shutil
import sys

import pytest
import yaml
from conftest import ROOT, parse, start
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "launch"
SERVICE, JOB = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SCRIPT = CONTAINER["args"].index("train_fsdp.py")
TORCHRUN = get_args_parser().parse_args(CONTAINER["args"][: SCRIPT + 1])


@pytest.fixture(scope="module")
def settings():
    """The settings of the run in the manifest."""
    return parse(CONTAINER["args"][SCRIPT + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("manifest", [SERVICE, JOB], ids=["Service", "Job"])
def test_kubernetes_accepts_the_manifest(manifest):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    for version in ("1.31", "1.37"):
        kubernetes.validate(manifest, version, strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_under_volcano_it_is_the_same_job_whose_pods_start_together():
    built = start(["kubectl", "kustomize", LAUNCH])
    assert built.returncode == 0, built.stderr
    parts = {part["kind"]: part for part in yaml.safe_load_all(built.stdout)}
    job, group = parts["Job"], parts["PodGroup"]
    assert group["spec"]["minMember"] == job["spec"]["completions"]
    template = job["spec"]["template"]
    assert template.pop("metadata")["annotations"] == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
    assert template["spec"].pop("schedulerName") == "volcano"
    assert (parts["Service"], job) == (SERVICE, JOB)


def test_each_gpu_has_a_process_in_the_dockerfiles_image(settings):
    nodes, gpus = JOB["spec"]["completions"], CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert (TORCHRUN.nnodes, TORCHRUN.nproc_per_node) == (str(nodes), str(gpus))
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"USER {POD['securityContext']['runAsUser']}\n" in dockerfile
    assert f"PATH={CONTAINER['workingDir']}/.venv/bin:" in dockerfile


def test_the_signal_reaches_torchrun_and_leaves_time_to_save():
    seconds = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert CONTAINER["command"] == ["torchrun"]  # and no shell, which would not pass it on
    assert 30 < int(seconds) < POD["terminationGracePeriodSeconds"]
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds} " in (LAUNCH / "slurm.sh").read_text()


def test_nodes_meet_at_a_name_and_prometheus_reads_a_port_that_are_there(settings):
    name = JOB["metadata"]["name"]
    ports = {port["name"]: port["port"] for port in SERVICE["spec"]["ports"]}
    # torchrun keeps the store where the endpoint is its own hostname, which of pod 0 is the Job's name and -0
    assert TORCHRUN.rdzv_endpoint == f"{name}-0:{ports['rendezvous']}"
    assert SERVICE["metadata"]["name"] == f"{name}-0" and SERVICE["spec"]["publishNotReadyAddresses"]
    labels = {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/job-completion-index": "0"}
    assert SERVICE["spec"]["selector"] == labels
    assert SERVICE["metadata"]["annotations"]["prometheus.io/port"] == str(settings.metrics_port)
    assert (ports["metrics"], settings.metrics_host) == (settings.metrics_port, "0.0.0.0")
    assert f":{settings.metrics_port}" in (LAUNCH / "prometheus.yml").read_text()


@pytest.mark.slow
def test_the_program_runs_from_what_the_image_has(tmp_path):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    flags = "--demo --num-steps 2 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0"
    process = start([sys.executable, "train_fsdp.py", *flags.split(), "--sample-tokens", 2], cwd=tmp_path)
    assert process.returncode == 0, process.stderr
