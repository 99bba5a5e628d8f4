"""Every family of causal language models that the installed transformers has: its FLOPs are torch's or are refused."""

import json
import sys

import pytest
import transformers
from conftest import ROOT, forked

sys.path.insert(0, str(ROOT / "benchmarks"))

import families

from harness.base import UserError
from harness.model import loss
from harness.model.configs import load_config

RECORDED = json.loads(families.RESULTS.read_text())


@pytest.mark.slow
def test_flops_of_every_family_are_those_of_real_tensors_or_refused():
    looks, unbuilt = {}, set()
    for name in families.families():
        try:
            config = families.small_config(name)
            families.check_size(config)
            looks[name] = families.look_at_flops(config)
        except Exception:  # what transformers does not build or run small has nothing to compare with
            unbuilt.add(name)
    none = {name: look["flops_why"] for name, look in looks.items() if look["flops"] == "none"}
    for name in looks.keys() - none.keys():
        assert looks[name]["flops_per_token"] == round(looks[name]["flops_on_real_tensors"]), name
    assert all(none.values())
    assert len(looks) - len(none) > 150
    if transformers.__version__ == RECORDED["transformers"]:
        recorded = {name for name, found in RECORDED["families"].items() if found["verdict"] == "not built"}
        assert unbuilt == recorded


@pytest.mark.slow
def test_families_of_each_kind_train_the_same_on_one_rank_and_two(tmp_path):
    kinds = ["mamba2", "qwen3_next", "llama4_text", "gemma3n_text", "xlstm", "bert"]
    found = []
    for ranks in (1, 2):
        forked(ranks, families.walk, kinds, tmp_path / str(ranks))
        lines = map(json.loads, (tmp_path / str(ranks)).read_text().splitlines())
        found.append({line["family"]: line for line in lines})
    verdicts = {name: families.compare_rank_counts(found[0][name], found[1][name]) for name in kinds}
    assert {name: verdict["verdict"] for name, verdict in verdicts.items()} == dict.fromkeys(kinds, "trains"), verdicts


@pytest.mark.parametrize(
    "family, sizes, reason",
    [
        ("bart", {}, "computes a loss of its own"),
        ("bert", {"is_decoder": False}, "attend to later ones"),
        ("opt", {"layerdrop": 0.1}, "set layerdrop to 0"),
    ],
)
def test_a_family_that_would_train_wrong_is_refused_before_anything_is_built(tmp_path, family, sizes, reason):
    config = families.small_config(family)
    config.update(sizes)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    "family, what", [("apertus", "XIELUActivation.alpha_p gets no value"), ("git", "shifts labels")]
)
def test_what_shows_only_later_stops_the_run_before_its_first_update(tmp_path, device, family, what):
    families.small_config(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=what):
        families.train(tmp_path, device)


def test_a_capped_head_is_not_fused_and_one_that_hides_it_is_stopped(tmp_path, device, monkeypatch):
    capped = families.small_config("xlstm")
    assert capped.output_logit_soft_cap
    assert not loss.choose_loss(None, capped)
    capped.save_pretrained(tmp_path)
    monkeypatch.setattr("harness.model.choose_loss", lambda *_: True)
    with pytest.raises(UserError, match="--fused-loss"):
        families.train(tmp_path, device)
