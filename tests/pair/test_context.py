"""--context-parallel: ranks that share each sequence train as one rank does."""

import itertools

import contextranks
import families
import pytest
import torch
from conftest import DEMO, answer_of, chat, forked, metrics_of, parse, story_texts, write_model
from corpora import write_records
from multirank import MODELS, SIZES
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base import UserError
from harness.model import load_config
from harness.resolving import resolve

SINKS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
SINKS |= {"layer_types": ["sliding_attention", "full_attention"]}
ALL = {name: MODELS[name] for name in ("llama", "mistral", "qwen3_moe")} | {"gpt_oss": ("gpt_oss", SINKS)}
CHAT = "--dataset {folder}/chats.jsonl --chat-template chatml"
TEXT = f"--dataset {DEMO}/stories/train.jsonl --eval-split {DEMO}/stories/validation.jsonl --eval-interval 2"
CASES = {  # {name: (model, flags)}
    "documents of a stream": ("llama", f"{TEXT} --eval-steps 2 --streaming --streams 3 --document-mask"),
    "chats in 2 microbatches": ("llama", f"{CHAT} --batch-size 1 --gradient-accumulation-steps 2"),
    "padding": ("llama", f"{TEXT} --packing best-fit --attention eager --activation-checkpointing full"),
    "windows and documents": ("mistral", f"{TEXT} --document-mask --zero-stage 0"),
    "sinks and experts": ("gpt_oss", f"{TEXT} --document-mask"),
    "experts": ("qwen3_moe", f"{TEXT} --activation-checkpointing selective"),
    "adapters": ("llama", f"{TEXT} --init pretrained --lora-rank 4"),
    "muon": ("llama", f"{TEXT} --optimizer muon"),
    "compiled and checkpointed": ("mistral", f"{TEXT} --compile --activation-checkpointing full --document-mask"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    for name, (kind, sizes) in ALL.items():
        write_model(folder / name, kind, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "llama")).save_pretrained(folder / "llama")
    pairs = itertools.pairwise(story_texts(0, 300))
    write_records(folder / "chats.jsonl", [chat(text[:40], answer[:40]) for text, answer in pairs])
    return folder


def runs(folder, names: list[str], ranks: int, size: int) -> list[tuple]:
    result = []
    for name in names:
        model, flags = CASES[name]
        flags = f"--model {folder / model} --tokenizer {DEMO} {flags.format(folder=folder)}"
        result.append((f"{name} {ranks} {size}".replace(" ", "-").replace(",", ""), flags, size))
    return result


def check_equal(folder, name: str, ranks: int, size: int) -> None:
    (one, *_), (shared, *_) = runs(folder, [name], 1, 1)[0], runs(folder, [name], ranks, size)[0]
    lines = zip(metrics_of(folder / one), metrics_of(folder / shared), strict=True)
    for expected, line in lines:
        assert line["tokens_seen"] == expected["tokens_seen"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        for key in ("eval_loss", "router_loss"):
            assert line.get(key) == (pytest.approx(expected[key], rel=1e-6) if key in expected else None)
    near = 1e-3 if name == "muon" else 2e-5  # it makes all singular values alike, the smallest too
    found, weights = (load_file(next((folder / f"{run}-export").glob("*.safetensors"))) for run in (shared, one))
    assert found.keys() == weights.keys()
    for key, expected in weights.items():
        assert (found[key] - expected).norm() <= near * expected.norm(), key


# {(ranks, ranks a sequence): cases}; a router loss is a product of means over a microbatch, which two groups divide
NAMES = {(2, 2): [*CASES], (4, 2): ["documents of a stream", "padding", "adapters", "muon"]}
NAMES[4, 4] = [*NAMES[4, 2], "sinks and experts"]


@pytest.fixture(scope="module")
def all_runs(folder):
    for (ranks, size), names in ({(1, 1): [*CASES]} | NAMES).items():
        forked(ranks, contextranks.main, folder, runs(folder, names, ranks, size))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, size", NAMES)
def test_any_number_of_ranks_a_sequence_trains_as_one(all_runs, folder, ranks, size):
    for name in NAMES[ranks, size]:
        check_equal(folder, name, ranks, size)


@pytest.mark.slow
def test_a_run_resumes_with_other_numbers_of_ranks_a_sequence(folder):
    flags = f"--model {folder / 'llama'} --tokenizer {DEMO} {TEXT} --document-mask --streaming --streams 3"
    flags += " --num-steps 6 --checkpoint-interval 2 --resume auto"
    forked(1, contextranks.main, folder, [("whole", flags, 1)])
    for ranks, steps in ((2, 2), (4, 4)):
        part = f"{flags} --num-steps {steps} --export {folder}/part-{steps}"
        forked(ranks, contextranks.main, folder, [("several", part, ranks)])
    forked(2, contextranks.main, folder, [("several", flags, 1)])
    expected, lines = (metrics_of(folder / name) for name in ("whole", "several"))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for key, near in (("loss", 1e-6), ("grad_norm", 2e-5), ("eval_loss", 1e-6), ("tokens_seen", 0)):
        values, others = ([line.get(key) or 0 for line in run] for run in (lines, expected))
        assert values == pytest.approx(others, rel=near)


@pytest.mark.slow
def test_ranks_that_share_a_sequence_need_half_the_memory(tmp_path):
    sizes = SIZES | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 768, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama", **sizes | {"max_position_embeddings": 2**17})
    peaks = []
    for size in (1, 2):
        forked(2, contextranks.measure_peak, config, 8192, size, tmp_path / f"peak-{size}")
        peaks.append(int((tmp_path / f"peak-{size}").read_text()))
    assert peaks[0] > 2e8
    assert peaks[1] < 0.6 * peaks[0]


# ---- Families --------------------------------------------------------------------------------------------------------


def write_families(folder, names: list[str]) -> dict[str, str]:
    """Save the small configs of the families that can be trained here; {name: folder}."""
    configs = {}
    for name in names:
        try:
            config = families.small_config(name)
            families.check_size(config)
            config.save_pretrained(folder / name)
            load_config(str(folder / name))
        except Exception:  # it trains on no number of ranks
            continue
        configs[name] = str(folder / name)
    return configs


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--document-mask",)], ids=" ".join)
def test_every_family_has_the_gradients_of_one_rank_or_is_refused(tmp_path, flags):
    configs = write_families(tmp_path, families.families())
    found = answer_of(2, contextranks.compare_families, configs, *flags)
    found = {name: seen for name, seen in found.items() if seen is not None}
    equal = {name for name, seen in found.items() if isinstance(seen, float)}
    assert {name: found[name] for name in equal if not found[name] < 1e-5} == {}
    assert len(equal) > 90


THREE_HEADS = {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1}
NOT_SHARED = [  # family, fields of its config, length, the problem
    ("llama", {}, 63, "does not divide the sequence of 63 tokens; give --sequence-length 62"),
    ("llama", THREE_HEADS, 64, "does not divide the 3 heads of .*; give one of 3"),
    ("mamba2", {}, 64, "more than attention over positions"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 64, "RoPE of type dynamic"),
]


@pytest.mark.parametrize("family, fields, length, problem", NOT_SHARED)
def test_what_ranks_cannot_share_is_refused_in_one_line(tmp_path, family, fields, length, problem):
    config = families.small_config(family)
    config.update(fields)
    config.save_pretrained(tmp_path)
    flags = [*contextranks.FLAGS.split(), "--model", tmp_path, "--sequence-length", length]
    args = parse([*flags, "--context-parallel", 2])
    with pytest.raises(UserError, match=f"^--context-parallel 2: .*{problem}"):
        resolve(args, load_config(str(tmp_path)))
