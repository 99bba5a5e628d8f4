"""--average-checkpoints: the mean of a run's checkpoints is that of their exports, on any number of ranks."""

import json
import shutil

import multirank
import numpy as np
import pytest
from conftest import forked, train, words
from safetensors import safe_open
from safetensors.numpy import load_file

from harness.base import UserError


@pytest.fixture
def run(device, arguments, tmp_path):
    """The flags of a run with three checkpoints, and its folder."""
    flags = [
        *arguments,
        *words("--num-steps 6 --lr 1e-2 --checkpoint-interval 2 --keep-checkpoints 3 --no-async-checkpoint"),
    ]
    assert train([*flags, "--output-dir", tmp_path, "--run-name", "run"], device) == 0
    return arguments, tmp_path / "run"


def exported(device, arguments, folder, source, *flags) -> dict[str, np.ndarray]:
    assert train([*arguments, "--num-steps", 0, "--resume", source, "--export", folder, *flags], device) == 0
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("count", [2, 3])
def test_an_export_of_the_mean_is_numpys_mean_of_the_exports(device, run, tmp_path, count, capfd):
    arguments, folder = run
    checkpoints = sorted((folder / "checkpoints").iterdir())[-count:]
    each = [exported(device, arguments, tmp_path / path.name, path) for path in checkpoints]
    mean = exported(device, arguments, tmp_path / "mean", folder, "--average-checkpoints", count)
    steps = f"mean of steps {', '.join(str(int(path.name[5:])) for path in checkpoints)}"
    assert f"exported   {tmp_path / 'mean'}, {steps}\n" in capfd.readouterr().out
    with safe_open(tmp_path / "mean" / "model.safetensors", "np") as file:
        assert file.metadata()["step"] == steps
    assert mean.keys() == each[0].keys()
    for name, tensor in mean.items():
        np.testing.assert_allclose(tensor, np.mean([one[name] for one in each], axis=0), rtol=1e-6, atol=1e-7)
    assert any(not np.array_equal(mean[name], each[-1][name]) for name in mean)


@pytest.mark.slow
def test_the_mean_is_evaluated_on_two_ranks_as_on_one(device, run, tmp_path, capfd):
    arguments, folder = run
    flags = [*arguments, *words("--num-steps 0 --eval-interval 1 --average-checkpoints 3 --json"), "--resume", folder]
    assert train(flags, device) == 0
    one = json.loads(capfd.readouterr().out.splitlines()[-1])
    printed = forked(2, multirank.program, *map(str, flags))
    two = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert [two["step"], two["averaged_steps"]] == [one["step"], one["averaged_steps"]] == [None, [2, 4, 6]]
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_what_is_damaged_foreign_or_missing_is_one_line(device, run, tmp_path):
    arguments, folder = run

    def refusal(*flags) -> str:
        with pytest.raises(UserError) as error:
            exported(device, arguments, tmp_path / "out", folder, *flags)
        return str(error.value)

    assert "has 3 complete checkpoints up to step-00000006" in refusal("--average-checkpoints", 4)
    second = folder / "checkpoints" / "step-00000004"
    kept = shutil.copytree(second, tmp_path / "kept")
    flags = [*arguments, *words("--num-steps 4 --final-checkpoint"), "--output-dir", tmp_path]
    assert train([*flags, "--run-name", "other"], device) == 0
    shutil.rmtree(second)
    shutil.copytree(tmp_path / "other" / "checkpoints" / second.name, second)
    assert "are of 2 runs, not of one" in refusal("--average-checkpoints", 3)
    shutil.rmtree(second)
    shutil.copytree(kept, second)
    shard = next(file for file in second.iterdir() if file.suffix == ".distcp")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert f"{second} is damaged" in refusal("--average-checkpoints", 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", ["", "--num-steps 0 --sample-prompt a --init pretrained", "--resume auto"])
def test_it_goes_with_a_run_that_trains_nothing(mistake, flags):
    message = mistake("--average-checkpoints", "2", *words(flags))
    assert message.startswith(("--average-checkpoints: only with --num-steps 0 and --resume RUN", "--num-steps: "))
