"""--ema: the average of the weights is exact, sharded as they are, and the model has it only while it is evaluated."""

import json

import averageranks
import pytest
import torch
from conftest import forked, slow_case, write_model
from multirank import MODELS, resolved
from torch.distributed.tensor import DTensor, Replicate

import train_fsdp
from harness import model as models
from harness.model.averages import WeightAverage
from harness.model.optimization import parameter_bytes
from harness.model.verify import verify_sharding

QUICK = {2: ("stage 3", "stage 1 in 2 microbatches", "fp8")}
PREDICATES = (
    "begins as a copy",
    "a skipped step changes no bit",
    "inside no float8 scale is that of the weights",
    "inside the weights are the average",
    "afterwards all is as it was",
    "afterwards each float8 weight has its scale",
    "an update on the device",
    "finite",
)
TOLERANCES = {"bf16": 5e-4, "bf16-pure": 5e-4, "fp8": 5e-3}  # of a loss, relative; otherwise that of fp32


def case(ranks: int, name: str):
    make = pytest.param if name in QUICK.get(ranks, ()) else slow_case
    return make(ranks, name, id=f"{ranks}-{name}")


CASES = [case(ranks, name) for ranks, layouts in averageranks.LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    for name, (model_type, sizes) in {"uneven": MODELS["uneven"], "even": MODELS["smollm3"]}.items():
        write_model(folder / name, model_type, **sizes)
    return folder


@pytest.fixture(scope="module")
def followed(folders, request):
    """`followed(ranks)`: what tests/averageranks.py found in the layouts of this tier, each world started once."""
    found, quick = {}, request.config.option.markexpr == "not slow"

    def follow(ranks: int) -> dict:
        if ranks not in found:
            layouts = averageranks.LAYOUTS[ranks]
            if quick:
                layouts = {name: layouts[name] for name in QUICK[ranks]}
            forked(ranks, averageranks.main, folders, f"of-{ranks}", layouts)
            found[ranks] = json.loads((folders / f"of-{ranks}.json").read_text())
        return found[ranks]

    return follow


@pytest.mark.parametrize("ranks, name", CASES)
def test_the_average_is_to_the_bit_that_of_whole_tensors_in_one_process(followed, ranks, name):
    found = followed(ranks)[name]
    assert found["equal after each step"] == [True] * averageranks.STEPS
    assert {key: found[key] for key in PREDICATES} == dict.fromkeys(PREDICATES, True)
    assert not found["finite with a NaN in the average"]


@pytest.mark.parametrize("ranks, name", CASES)
def test_weights_and_average_are_evaluated_as_a_plain_model_has_them(followed, ranks, name):
    found = followed(ranks)[name]
    tolerance = next((limit for precision, limit in TOLERANCES.items() if precision in name), 1e-6)
    assert found["raw"] == pytest.approx(found["plain raw"], rel=tolerance)
    assert found["average"] == pytest.approx(found["plain average"], rel=tolerance)
    assert found["raw afterwards"] == found["raw"]
    difference = abs(found["plain raw"] - found["plain average"])
    assert difference > 2 * 1e-6 * found["raw"]  # one cannot be taken for the other


@pytest.mark.parametrize("ranks, name", CASES)
def test_each_rank_holds_its_share_of_the_average(followed, ranks, name):
    shards = {"stage 0": 1, "2 replicas": 2, "2 replicas at stage 1": 2}.get(name, ranks)
    assert followed(ranks)[name]["share"] == pytest.approx(1 / shards, rel=0.05)


@pytest.fixture
def built(device, folders):
    """`built(*flags)`: (settings, model, optimizer, mesh) as the program makes them."""

    def build(*flags: str):
        settings, config = resolved(["--model", folders / "even", "--dataset", "synthetic", "--no-compile", *flags])
        mesh = train_fsdp.build_mesh(settings, device)
        model = train_fsdp.build_model(settings, config, mesh)
        return settings, model, models.build_optimizer(settings, model), mesh

    return build


def test_an_average_that_is_not_sharded_or_not_in_fp32_is_found(built):
    settings, model, optimizer, mesh = built("--precision", "bf16-pure")
    average = WeightAverage(model, 0.9)
    verified = verify_sharding(settings, model, optimizer, mesh, averages=average.tensors)
    assert f"as are {len(average.tensors)} averages" in verified and "averages in float32" in verified
    name, tensor = next(iter(average.tensors.items()))
    whole = DTensor.from_local(tensor.to_local(), mesh, [Replicate()])
    in_bf16 = (tensor.bfloat16(), "held in torch.bfloat16, not in torch.float32")
    for wrong, problem in ((whole, "is not sharded"), in_bf16):
        with pytest.raises(RuntimeError, match=f"the average of {name}.* {problem}"):
            verify_sharding(settings, model, optimizer, mesh, averages=average.tensors | {name: wrong})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_the_bytes_that_an_average_takes_are_those_that_are_told(built, precision):
    settings, model, _, _ = built("--precision", precision, "--ema", "0.99")
    average = WeightAverage(model, settings.ema)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    without = parameter_bytes(resolved(["--precision", precision])[0])
    told = parameter_bytes(settings)
    held = sum(tensor.to_local().nbytes for tensor in average.tensors.values())
    assert held == parameters * (told.at_rest - without.at_rest)
    assert held == parameters * (told.in_checkpoint - without.in_checkpoint)
    assert average.describe() == f"ema 0.99, fp32, {held / 2**30:.3g} GiB a rank"


def test_an_update_writes_in_place_and_replaces_no_storage(built):
    _, model, _, _ = built("--precision", "fp32")
    average = WeightAverage(model, 0.9)
    places = [tensor.to_local().data_ptr() for tensor in (*average.tensors.values(), *model.parameters())]
    average.update()
    average.update(skip=torch.tensor(1))
    with average.as_weights():
        inside = [tensor.to_local().data_ptr() for tensor in (*average.tensors.values(), *model.parameters())]
    assert inside == places
