"""The benchmark drivers: their commands, and the runs that they keep. No result is checked for its size."""

import argparse
import json
import sys
import time

import bench
import contact
import plan_published
import pytest
from conftest import ROOT, parse, start
from peers import common


@pytest.mark.parametrize("suite", ["cpu", "gpu", "compare", "compare-cpu"])
def test_every_command_of_a_suite_is_accepted(suite):
    parts = bench.find_parts(suite, available=4)
    configs = [config for *_, configs in parts.values() for config in configs.values()]
    programs = {config.program.split()[0] for config in configs}
    assert all((ROOT / program).is_file() for program in programs)
    for config in configs:
        if config.program == "train_fsdp.py":
            bench.set_steps(config.flags)
            args = vars(parse(config.words()[1:]))
            assert {key: str(args[key]) for key in config.flags} == {k: str(v) for k, v in config.flags.items()}
            assert args["num_steps"] > args["perf_warmup_steps"] or args["eval_interval"] or args["num_steps"] == 1


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
def test_a_rehearsal_keeps_commands_and_runs_and_adds_rounds(tmp_path):
    one = ["gpu", "--only", "loss/bf16-pure*", "--repeats", "1", "--rehearse", "--out", tmp_path]
    for _ in range(2):
        process = start([sys.executable, ROOT / "benchmarks/bench.py", *one])
        assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    config = results["parts"]["loss"]["configs"]["bf16-pure, eager, full logits"]
    assert results["rehearsal"] and "--model demo" in config["command"]
    assert len(config["runs"]) == 2
    for run in config["runs"]:
        assert run["eval_loss"] > 0
        assert 0 < run["first_step_s"] < run["wall_s"]


@pytest.mark.slow
def test_the_programs_of_compare_cpu_have_the_same_loss(tmp_path):
    """Those with Muon, whose embeddings have AdamW."""
    pytest.importorskip("lightning")
    part = "muon-process-2048"
    command = [sys.executable, ROOT / "benchmarks/bench.py", "compare", "--cpu", "--rehearse", "--repeats", "1"]
    process = start([*command, "--only", part, "--out", tmp_path, "--minutes", "30"])
    assert process.returncode == 0, process.stderr
    configs = json.loads((tmp_path / "compare-cpu.json").read_text())["parts"][part]["configs"]
    assert {label: config.get("error") for label, config in configs.items()} == dict.fromkeys(configs)


def measured(configs: dict, pairs: dict, seconds: float) -> dict:
    """Return the record of a part after two rounds within `seconds`."""
    given = {"only": "*", "repeats": 2, "missing": False, "gpus": 1, "rehearse": True}
    args, store = argparse.Namespace(**given, deadline=time.monotonic() + seconds), {}
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
    monkeypatch.setitem(bench.PEERS, "absent", "a_package_that_nobody_has")
    monkeypatch.setattr(bench, "MIN_SECONDS_LEFT", 0)
    names = ("absent", "fails", "works", "hangs")
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}) for name in names}
    kept = measured(configs, {"ratio": ("works", "fails", "1")}, seconds=15)["configs"]
    assert kept["absent"]["error"] == "not installed: a_package_that_nobody_has"
    assert kept["fails"]["error"] == "MemoryError: out of memory"
    assert kept["hangs"]["error"].startswith("did not end within")
    assert kept["works"]["runs"][0]["speed"] == 2.0


def test_runs_whose_losses_differ_are_not_compared(tmp_path):
    for name, loss in {"bare": 5.0, "near": 5.0004, "far": 5.1}.items():
        (tmp_path / f"{name}.py").write_text(f'print(\'{{"speed": 2.0, "loss": {loss}}}\')')
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}, same_loss_as="bare") for name in ("near", "far")}
    configs = {"bare": bench.Config(str(tmp_path / "bare.py"), {})} | configs
    part = measured(configs, {name: (name, "bare", "1") for name in ("near", "far")}, seconds=300)
    assert part["configs"]["far"]["error"].startswith("not compared: its last loss is 5.100000")
    assert bench.ratios(part, "near", "bare", "1") == [1, 1]
    assert bench.ratios(part, "far", "bare", "1") == []
