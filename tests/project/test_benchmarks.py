"""The benchmark drivers: their commands, and the runs that they keep. No result is checked for its size."""

import argparse
import json
import sys
import time

import bench
import contact
import plan_published
import pytest
import running
from conftest import ROOT, parse
from peers import common


@pytest.mark.parametrize("suite", ["cpu", "compare-cpu"])
def test_every_command_of_a_suite_is_accepted(suite):
    parts = bench.find_parts(suite)
    configs = [config for *_, configs in parts.values() for config in configs.values()]
    programs = {config.program.split()[0] for config in configs}
    assert all((ROOT / program).is_file() for program in programs)
    for config in configs:
        if config.program == "train_fsdp.py":
            args = vars(parse(config.words()[1:]))
            assert {key: str(args[key]) for key in config.flags} == {k: str(v) for k, v in config.flags.items()}
            assert args["num_steps"] > args["perf_warmup_steps"] or args["num_steps"] == 1


def test_peers_read_the_tokens_of_a_synthetic_run():
    size = {"num_steps": 2, "batch_size": 1, "sequence_length": 8}
    assert common.RandomTokens(argparse.Namespace(**size), 50)[0]["input_ids"].shape == (8,)


def test_the_flags_of_every_published_run_are_accepted():
    for run in json.loads(plan_published.RESULTS.read_text())["runs"].values():
        assert parse(["--plan", "--json", *run["flags"].split()]).plan_gpus and run["source"]


def test_every_command_of_contact_is_accepted():
    for step in contact.steps(gpus=4, rehearse=False):
        programs = [word for word in step.words if word.endswith(".py") and "/test_" not in word]
        assert all((ROOT / program).is_file() for program in programs)
        if step.run:
            parse(step.words[step.words.index("--model") :])


@pytest.mark.slow
def test_the_programs_of_compare_cpu_have_the_same_loss(tmp_path, monkeypatch):
    """Those with Muon, whose embeddings have AdamW, in six steps on one thread."""
    pytest.importorskip("lightning")
    name = "muon-process-2048"
    part = bench.compare_cpu()[name]
    for config in part[-1].values():
        config.flags["num_steps"] = 6
        config.env = {"OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(bench, "find_parts", lambda suite: {name: part})
    command = ["bench.py", "compare-cpu", "--only", name, "--repeats", "1", "--minutes", "30", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    configs = json.loads((tmp_path / "compare-cpu.json").read_text())["parts"][name]["configs"]
    assert {label: config.get("error") for label, config in configs.items()} == dict.fromkeys(part[-1])


def measure(configs: dict, pairs: dict, seconds: float, store: dict) -> dict:
    """Return the record of a part in `store` after two more rounds within `seconds`."""
    args = argparse.Namespace(only="*", repeats=2, deadline=time.monotonic() + seconds)
    bench.measure("part", ("what", "speed", pairs, configs), args, store, lambda: None)
    return store["part"]


@pytest.mark.slow
def test_what_fails_is_kept_with_its_error_and_stops_nothing(tmp_path, monkeypatch):
    for name, code in {
        "fails": "raise MemoryError('out of memory')",
        "hangs": "import time; time.sleep(600)",
        "works": "import json; print('step 1/2', flush=True); print(json.dumps({'speed': 2.0}))",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setitem(running.PEERS, "absent", "a_package_that_nobody_has")
    monkeypatch.setattr(bench, "MIN_SECONDS_LEFT", 0)
    names = ("absent", "fails", "works", "hangs")
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}) for name in names}
    kept = measure(configs, {"ratio": ("works", "fails", "1")}, 15, {})["configs"]
    assert kept["absent"]["error"] == "not installed: a_package_that_nobody_has"
    assert kept["fails"]["error"] == "MemoryError: out of memory"
    assert kept["hangs"]["error"].startswith("did not end within")
    run = kept["works"]["runs"][0]
    assert run["speed"] == 2.0 and 0 < run["first_step_s"] < run["wall_s"]


def test_runs_whose_losses_differ_are_not_compared_and_a_second_call_adds_rounds(tmp_path):
    for name, loss in {"bare": 5.0, "near": 5.0004, "far": 5.1}.items():
        (tmp_path / f"{name}.py").write_text(f'print(\'{{"speed": 2.0, "loss": {loss}}}\')')
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}, same_loss_as="bare") for name in ("near", "far")}
    configs = {"bare": bench.Config(str(tmp_path / "bare.py"), {})} | configs
    pairs, store = {name: (name, "bare", "1") for name in ("near", "far")}, {}
    part = measure(configs, pairs, 300, store)
    assert part["configs"]["far"]["error"].startswith("not compared: its last loss is 5.100000")
    assert bench.ratios(part, "near", "bare", "1") == [1, 1]
    assert bench.ratios(part, "far", "bare", "1") == []
    assert len(measure(configs, pairs, 300, store)["configs"]["near"]["runs"]) == 4
