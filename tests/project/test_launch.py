"""What starts the program on clusters: the clusters' own schemas take the files, the program takes the flags, and what
must agree, in a file and from file to file, does.

Skipped where they are missing: `pip install kubernetes-validate` (all schemas of Kubernetes, 108 MB) and the CRDs of
Volcano, which are read from the folder CRDS of the environment (`*.yaml`, from config/crd/volcano/bases of
volcano-sh/volcano).
"""

import copy
import os
import pathlib
import re
import shutil
import sys

import pytest
import yaml
from conftest import ROOT, parse, start
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "launch"
MANIFESTS = ("kubernetes.yaml", "volcano.yaml")


def documents(file: str) -> list[dict]:
    return [*yaml.safe_load_all((LAUNCH / file).read_text())]


def document(file: str, kind: str) -> dict:
    (found,) = (part for part in documents(file) if part["kind"] == kind)
    return found


def pod_of(file: str) -> dict:
    """The pod's spec."""
    if file == "kubernetes.yaml":
        return document(file, "Job")["spec"]["template"]["spec"]
    return document(file, "Job")["spec"]["tasks"][0]["template"]["spec"]


def words_of(file: str) -> list[str]:
    """The command that runs on each node."""
    (container,) = pod_of(file)["containers"]
    return [*container["command"], *container["args"]]


def launcher_of(file: str):
    words = words_of(file)
    arguments = [re.sub(r"\$\(.*\)", "1", word) for word in words[1 : words.index("train_fsdp.py") + 1]]
    return get_args_parser().parse_args(arguments)


def settings_of(file: str):
    words = words_of(file)
    return parse(words[words.index("train_fsdp.py") + 1 :])


def size_of(file: str) -> tuple[int, int]:
    """(nodes, GPUs of a node), as the scheduler is asked for them."""
    gpus = pod_of(file)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    spec = document(file, "Job")["spec"]
    return spec["tasks"][0]["replicas"] if "tasks" in spec else spec["completions"], gpus


# ----------------------------------------------------------------------------------------------------------------------
# Schemas


def check(manifest: dict, version: str) -> None:
    """Raises if a manifest is none of this version of Kubernetes, or has a field that it does not know."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    validator.validate(manifest, version, strict=True)


def is_own(manifest: dict) -> bool:
    return manifest["apiVersion"] in ("v1", "batch/v1")


def checked_by_kubernetes() -> list:
    """Whole manifests, and the pods and Jobs inside those of other makers."""
    parts = {f"{part['kind']} of {file}": part for file in MANIFESTS for part in documents(file) if is_own(part)}
    parts |= {f"pod of {file}": {"apiVersion": "v1", "kind": "Pod", "spec": pod_of(file)} for file in MANIFESTS}
    return [pytest.param(part, id=name) for name, part in parts.items()]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("manifest", checked_by_kubernetes())
def test_kubernetes_takes_what_is_its_own(manifest, version):
    check(manifest, version)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["podReplacementPolice"] = "Failed"
    with pytest.raises(Exception, match="podReplacementPolice"):
        check(wrong, version)


def strict(schema: dict) -> dict:
    """A CRD's schema that takes no field which it does not name."""
    schema = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "format"}
    if "properties" in schema:
        schema["properties"] = {name: loose_or_strict(part) for name, part in schema["properties"].items()}
        schema["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = loose_or_strict(schema[key])
    return schema


def loose_or_strict(schema: dict) -> dict:
    free = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
    return {} if free else strict(schema)


CUSTOM = {f"{file} {part['kind']}": part for file in MANIFESTS for part in documents(file) if not is_own(part)}


@pytest.mark.slow
@pytest.mark.parametrize("manifest", CUSTOM.values(), ids=CUSTOM)
def test_a_custom_resource_is_one_of_its_definition(manifest):
    jsonschema = pytest.importorskip("jsonschema")
    if "CRDS" not in os.environ:
        pytest.skip("CRDS names no folder of CRDs")
    definitions = [yaml.safe_load(path.read_text())["spec"] for path in pathlib.Path(os.environ["CRDS"]).glob("*.yaml")]
    group, version = manifest["apiVersion"].split("/")
    ((definition,),) = [
        [served["schema"]["openAPIV3Schema"] for served in spec["versions"] if served["name"] == version]
        for spec in definitions
        if (spec["group"], spec["names"]["kind"]) == (group, manifest["kind"])
    ]
    definition = strict(definition)
    definition["properties"]["metadata"] = {}
    jsonschema.validate(manifest, definition)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["retries"] = 3
    with pytest.raises(jsonschema.ValidationError, match="retries"):
        jsonschema.validate(wrong, definition)


# ----------------------------------------------------------------------------------------------------------------------
# What must agree


@pytest.mark.parametrize("file", MANIFESTS)
def test_every_file_starts_the_same_run(file):
    here, kubernetes = settings_of(file).__dict__, settings_of("kubernetes.yaml").__dict__
    assert {name for name in here if here[name] != kubernetes[name]} <= {"argv"}


@pytest.mark.parametrize("file", MANIFESTS)
def test_there_is_a_process_for_each_gpu_and_replicas_are_nodes(file):
    (nodes, gpus), launcher = size_of(file), launcher_of(file)
    assert (launcher.nnodes, launcher.nproc_per_node) == (str(nodes), str(gpus))
    assert nodes * gpus % settings_of(file).dp_replicate_size == 0
    assert nodes % settings_of(file).dp_replicate_size == 0  # a shard group stays inside its node


@pytest.mark.parametrize("file", MANIFESTS)
def test_the_signal_reaches_torchrun_and_leaves_time_to_save(file):
    pod = pod_of(file)
    (container,) = pod["containers"]
    seconds = {entry["name"]: entry.get("value") for entry in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert container["command"] == ["torchrun"]  # and no shell, which would not pass it on
    assert 30 < int(seconds) < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("file", MANIFESTS)
def test_the_pod_is_what_the_dockerfile_builds(file):
    pod, dockerfile = pod_of(file), (ROOT / "Dockerfile").read_text()
    (container,) = pod["containers"]
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    assert f"WORKDIR {container['workingDir']}\n" in dockerfile
    assert f"PATH={container['workingDir']}/.venv/bin:" in dockerfile


@pytest.mark.parametrize("file", MANIFESTS)
def test_shared_memory_fits_into_the_pods_memory(file):
    pod = pod_of(file)
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    resources = pod["containers"][0]["resources"]
    gib = [int(size.removesuffix("Gi")) for size in (shm["sizeLimit"], *(resources[k]["memory"] for k in resources))]
    assert shm["medium"] == "Memory" and gib[0] < min(gib[1:])


def test_nodes_meet_at_a_name_and_a_port_that_are_there():
    job, service = document("kubernetes.yaml", "Job"), document("kubernetes.yaml", "Service")
    name = job["metadata"]["name"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    # torchrun keeps the store where the endpoint is its own hostname, which of pod 0 is the Job's name and -0
    assert launcher_of("kubernetes.yaml").rdzv_endpoint == f"{name}-0:{ports['rendezvous']}"
    assert service["metadata"]["name"] == f"{name}-0" and service["spec"]["publishNotReadyAddresses"]
    labels = {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/job-completion-index": "0"}
    assert service["spec"]["selector"] == labels
    job = document("volcano.yaml", "Job")
    assert launcher_of("volcano.yaml").master_addr == f"{job['metadata']['name']}-node-0.{job['metadata']['name']}"
    assert "--publish-not-ready-addresses=true" in job["spec"]["plugins"]["svc"]


def test_prometheus_reads_the_port_that_is_served():
    port = settings_of("kubernetes.yaml").metrics_port
    for file in MANIFESTS:
        service = document(file, "Service")
        assert service["metadata"]["annotations"]["prometheus.io/port"] == str(port)
        assert port in [each["port"] for each in service["spec"]["ports"]]
        assert [value for key, value in service["spec"]["selector"].items() if key.endswith("-index")] == ["0"]
        assert [each["containerPort"] for each in pod_of(file)["containers"][0]["ports"]] == [port]
        assert settings_of(file).metrics_host == "0.0.0.0"
    assert f":{port}" in (LAUNCH / "prometheus.yml").read_text()


def test_an_eviction_is_no_failure_and_no_pod_joins_a_world_that_is_ending():
    job = document("kubernetes.yaml", "Job")["spec"]
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    assert job["podFailurePolicy"]["rules"][0] == {"action": "Ignore", "onPodConditions": evicted}
    assert job["podReplacementPolicy"] == "Failed"
    volcano = document("volcano.yaml", "Job")["spec"]
    assert volcano["policies"] == [{"events": ["PodEvicted", "PodFailed"], "action": "RestartJob"}]
    assert volcano["minAvailable"] == volcano["tasks"][0]["replicas"]


@pytest.mark.slow
def test_the_program_runs_from_what_the_image_has(tmp_path):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    assert start([sys.executable, "train_fsdp.py", "--version"], cwd=tmp_path).stdout.startswith("train_fsdp ")
    flags = "--demo --num-steps 2 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0"
    process = start([sys.executable, "train_fsdp.py", *flags.split(), "--sample-tokens", 2], cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert [*tmp_path.glob("outputs/*/report.html")]
