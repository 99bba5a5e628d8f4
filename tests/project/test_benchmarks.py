"""The benchmark drivers: what they run, keep, refuse and draw. No figure of theirs is checked for its size."""

import argparse
import itertools
import json
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, parse, start
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench
import contact
import covering
import psutil


def rehearse(out, *arguments) -> dict:
    process = start([sys.executable, ROOT / "benchmarks/bench.py", *arguments, "--rehearse", "--out", out])
    assert process.returncode == 0, process.stderr
    return json.loads((out / f"{arguments[0]}.json").read_text())


@pytest.mark.parametrize("suite", ["cpu", "gpu", "compare", "compare-cpu"])
def test_every_command_of_a_suite_is_one_that_the_program_takes(suite):
    parts = bench.parts_of(suite, available=4)
    configs = [config for *_, configs in parts.values() for config in configs.values()]
    programs = {config.program.split()[0] for config in configs}
    assert all((ROOT / program).is_file() for program in programs)
    for config in configs:
        if config.program == "train_fsdp.py":
            bench.set_steps(config.flags)
            args = vars(parse(config.words()[1:]))
            assert {key: str(args[key]) for key in config.flags} == {k: str(v) for k, v in config.flags.items()}
            assert args["num_steps"] > args["perf_warmup_steps"] or args["eval_interval"] or args["num_steps"] == 1


@pytest.mark.slow
def test_a_rehearsed_ladder_keeps_commands_and_runs_and_adds_rounds(tmp_path):
    ladder = ["gpu", "--only", "ladder/*published*", "--repeats", "1"]
    rehearse(tmp_path, *ladder)
    results = rehearse(tmp_path, *ladder)
    assert results["rehearsal"]
    rung = results["parts"]["ladder"]["configs"]["published settings"]
    assert "--precision bf16-pure --no-compile --no-fused-loss --attention flash" in rung["command"]
    assert "--model demo" in rung["command"]
    assert rung["predicted"] == {}  # what was said of a GPU does not stand beside a CPU's figures
    assert len(rung["runs"]) == 2
    for run in rung["runs"]:
        assert run["tokens_per_sec_per_gpu"] > 0
        assert 0 < run["first_step_s"] < run["wall_s"]


def figures_of(*command) -> dict:
    process = start([sys.executable, *command])
    assert process.returncode == 0, process.stderr
    return json.loads(next(line for line in process.stdout.splitlines() if line.startswith('{"')))


@pytest.fixture(scope="module")
def same_work(tmp_path_factory):
    """Flags of first weights and a token file, and the loss of the bare loop after three steps on them."""
    folder = tmp_path_factory.mktemp("peers")
    config = AutoConfig.from_pretrained(ROOT / "assets/demo")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "start")
    np.random.default_rng(0).integers(1536, size=4000, dtype=np.uint16).tofile(folder / "tokens.bin")
    flags = ["--model", folder / "start", "--tokens", folder / "tokens.bin", "--sequence-length", "32"]
    flags += ["--batch-size", "2", "--num-steps", "3"]
    bare = figures_of(ROOT / "benchmarks/bare_loop.py", *flags, "--warmup-steps", "1")
    return flags, bare["loss"]


def test_missing_runs_only_what_is_not_there_yet(tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(bench, "now", lambda: str(next(seconds)))
    (tmp_path / "works.py").write_text("print('{\"speed\": 2.0}')")
    store: dict = {}
    for repeats in (1, 2, 2):
        args = argparse.Namespace(only="*", repeats=repeats, missing=True, gpus=1, rehearse=True)
        args.deadline = time.monotonic() + 900
        configs = {"works": bench.Config(str(tmp_path / "works.py"), {}, env={"A": "1"})}
        bench.measure("part", ("what", "speed", {}, configs), args, store, lambda: None)
        kept = store["part"]["configs"]["works"]
        assert len(kept["runs"]) == repeats and kept["command"].startswith("A=1 ")
    assert all(run["peak_process_gib"] > 0 for run in kept["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_programs_of_compare_cpu_have_the_same_loss(tmp_path, optimizer):
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    only = f"{optimizer}-process-2048"
    command = [sys.executable, ROOT / "benchmarks/bench.py", "compare", "--cpu", "--rehearse", "--repeats", "1"]
    process = start([*command, "--only", only, "--out", out, "--minutes", "30"])
    assert process.returncode == 0, process.stderr
    configs = json.loads((out / "compare-cpu.json").read_text())["parts"][only]["configs"]
    assert {label: config.get("error") for label, config in configs.items()} == dict.fromkeys(configs)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["hf_trainer", "accelerate_fsdp2", "lightning_fabric", "fully_shard_loop"])
def test_a_peer_has_the_bare_loops_loss_and_prints_our_figures(peer, same_work):
    pytest.importorskip(bench.PEERS.get(peer, "torch"))
    flags, loss = same_work
    flags = [*flags, "--perf-warmup-steps", "1", "--precision", "fp32", "--no-compile"]
    figures = figures_of(ROOT / f"benchmarks/peers/{peer}.py", *flags)
    assert figures["tokens_per_sec_per_gpu"] == pytest.approx(64 / (figures["step_time_ms"] / 1000))
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_what_fails_is_kept_with_its_error_and_stops_nothing(tmp_path, monkeypatch):
    for name, code in {
        "fails": "raise MemoryError('out of memory')",
        "hangs": "import time; time.sleep(600)",
        "works": "import json; print('step 1/2', flush=True); print(json.dumps({'speed': 2.0}))",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setitem(bench.PEERS, "absent", "a_package_that_nobody_has")
    monkeypatch.setattr(bench, "ENOUGH", 0)
    names = ("absent", "fails", "works", "hangs")
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}) for name in names}
    args = argparse.Namespace(only="*", repeats=2, missing=False, gpus=1, rehearse=True, deadline=time.monotonic() + 30)
    store: dict = {}
    bench.measure("part", ("what", "speed", {"ratio": ("works", "fails", "1")}, configs), args, store, lambda: None)
    kept = store["part"]["configs"]
    assert kept["absent"]["error"] == "not installed: a_package_that_nobody_has"
    assert kept["fails"]["error"] == "MemoryError: out of memory"
    assert kept["hangs"]["error"].startswith("did not end within")
    assert kept["works"]["runs"][0]["speed"] == 2.0
    assert "MemoryError: out of memory" in bench.table(store["part"])


def test_runs_whose_losses_differ_are_not_compared(tmp_path):
    for name, loss in {"bare": 5.0, "near": 5.0004, "far": 5.1}.items():
        (tmp_path / f"{name}.py").write_text(f'print(\'{{"speed": 2.0, "loss": {loss}}}\')')
    configs = {name: bench.Config(str(tmp_path / f"{name}.py"), {}, same_loss_as="bare") for name in ("near", "far")}
    configs = {"bare": bench.Config(str(tmp_path / "bare.py"), {})} | configs
    args = argparse.Namespace(
        only="*", repeats=2, missing=False, gpus=1, rehearse=True, deadline=time.monotonic() + 300
    )
    pairs = {name: (name, "bare", "1") for name in ("near", "far")}
    store: dict = {}
    bench.measure("part", ("what", "speed", pairs, configs), args, store, lambda: None)
    far = store["part"]["configs"]["far"]
    assert far["error"].startswith("not compared: its last loss is 5.100000, that of bare 5.000000")
    assert bench.ratios(store["part"], "near", "bare", "1") == [1, 1]
    assert bench.ratios(store["part"], "far", "bare", "1") == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["gpu", "--rehearse", "--out", str(bench.RESULTS)], "do not belong"),
        (["compare"], "no GPU"),
        (["cpu", "--only", "nothing"], "harness, start"),
    ],
)
def test_a_wrong_use_is_refused_in_a_line(arguments, said, monkeypatch, capsys, tmp_path):
    out = [] if "--out" in arguments else ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments, *out])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert said in capsys.readouterr().err + str(ended.value)


# ----------------------------------------------------------------------------------------------------------------------
# contact.py


def go_on(monkeypatch, capsys, out, steps: dict[str, str], *flags) -> str:
    """What a call of contact.py prints, with these steps, each a piece of Python."""
    found = [contact.Step(name, 0, ["-c", code], ("nowhere",) * ("missing" in name)) for name, code in steps.items()]
    monkeypatch.setattr(contact, "steps", lambda gpus, rehearse: found)
    monkeypatch.setattr(contact.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["contact.py", "--rehearse", "--out", str(out), *flags])
    contact.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_contact_goes_on_where_a_call_ended_and_ends_what_that_left(tmp_path, monkeypatch, capsys):
    out, twice = tmp_path / "out", tmp_path / "twice"
    once = f"open({str(tmp_path / 'once')!r}, 'x'); print('first')"
    left = "import subprocess, time; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    steps = {"a": once, "b": "exit(3)", "missing": "", "late": f"{left}; time.sleep(600)"}
    said = go_on(monkeypatch, capsys, out, steps, "--minutes", "0.5")
    assert "a: done, first" in said and "b: failed, exit code 3" in said and "not installed: nowhere" in said
    assert "late: cut off, not done within" in said and "1 done, 1 failed, 1 left out, 1 cut off" in said
    sleeper = int((out / contact.LOG).read_text().split()[-1])
    for _ in range(3000):  # a process that is killed may still be seen for a moment
        if not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"{sleeper} goes on")

    twice.mkdir()
    said = go_on(monkeypatch, capsys, twice, steps | {"late": "print('in time')"}, "--resume", str(out))
    assert "late: done, in time" in said and "a ..." not in said and "2 done, 1 failed, 1 left out" in said
    state = json.loads((twice / contact.STATE).read_text())
    assert (state["late"]["tries"], state["a"]["tries"]) == (2, 1)


@pytest.mark.slow
def test_a_pair_of_techniques_is_trained_or_refused_by_name(tmp_path):
    base = covering.prepare(tmp_path)
    chosen = covering.covering(covering.FACTORS, lambda one: covering.is_accepted(base, one))
    quick = [one["compile"] is False and one["optimizer"] == "adamw-bf16" for one in chosen]
    first, *_, last = (number for number, is_quick in enumerate(quick) if is_quick)
    command = [sys.executable, ROOT / "benchmarks/covering.py", "--ranks", "1", "--out", tmp_path / "out.json"]
    process = start([*command, "--only", str(first), str(last)])
    assert process.returncode == 0, process.stdout + process.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["outcome"] for run in runs] == ["trained", "refused"]
    assert len(runs[0]["losses"]) == 2 and runs[1]["says"].startswith("--optimizer: with bf16-pure")
