"""--ema: the average of the weights is exact, sharded as they are, and the model has it only while it is evaluated."""

import json

import averageranks
import pytest
from conftest import forked

LAYOUTS = {  # {ranks: {name: flags}}
    1: {"bf16": "--precision bf16", "offloaded": "--cpu-offload"},
    2: {
        "stage 3": "",
        "stage 1 in 2 microbatches": "--zero-stage 1 --gradient-accumulation-steps 2",
        "fp8": "--precision fp8 --fp8-emulate",
    },
    4: {
        "stage 2": "--zero-stage 2",
        "stage 0": "--zero-stage 0",
        "2 replicas at stage 1": "--dp-replicate-size 2 --zero-stage 1 --gradient-accumulation-steps 2",
        "bf16-pure": "--precision bf16-pure --zero-stage 2",
        "fp8 in 2 replicas": "--precision fp8 --fp8-emulate --dp-replicate-size 2",
    },
}
TOLERANCES = {"bf16": 5e-4, "fp8": 5e-3}  # of a loss, relative; otherwise that of fp32


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_average_is_to_the_bit_that_of_whole_tensors_in_one_process(workspace, tmp_path, ranks):
    forked(ranks, averageranks.main, workspace, tmp_path / "found.json", LAYOUTS[ranks])
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        figures = found.pop("figures")
        assert found == dict.fromkeys(found, True), name
        tolerance = next((limit for precision, limit in TOLERANCES.items() if precision in name), 1e-6)
        assert figures["average"] == pytest.approx(figures["plain average"], rel=tolerance), name
        difference = abs(figures["raw"] - figures["average"])
        assert difference > 2e-6 * figures["raw"], name  # one cannot be taken for the other
        shards = 1 if name == "stage 0" else ranks // 2 if "replicas" in name else ranks
        assert figures["share"] == pytest.approx(1 / shards, rel=0.05), name
