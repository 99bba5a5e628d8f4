"""--packing: a conversation in a sequence of its own trains as packed ones that do not see each other, and FLOPs are
those of each token in its own document."""

import itertools
import time
import types
from concurrent.futures import ThreadPoolExecutor

import multirank
import numpy as np
import pytest
import torch
from conftest import chat, forked, metrics_of, slow_case, train, words, write_model
from corpora import CHAT_TEMPLATE, demo_tokenizer, write_records
from transformers import AutoConfig, AutoModelForCausalLM

import utils
from harness.base import UserError
from harness.data import packing
from harness.data.reader import CorpusReader
from harness.data.tokens import MappedTokens, Tokens

LENGTH = 64
QUESTIONS, ANSWERS = (3, 9, 1, 20, 5, 12, 2, 40), (8, 2, 15, 4, 20, 1, 6, 50)  # words
SIZES = multirank.SIZES | {"tie_word_embeddings": True}


@pytest.fixture
def conversations(tmp_path) -> list[dict]:
    """The token ids of each conversation and their marks, as transformers has them; both splits hold all."""
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = [chat("a " * asked, "the " * answered) for asked, answered in zip(QUESTIONS, ANSWERS, strict=True)]
    write_records(tmp_path / "train.jsonl", chats)
    write_records(tmp_path / "validation.jsonl", chats[::-1])  # a copy would not be evaluated
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    return [tokenizer.apply_chat_template(record["messages"], **options) for record in chats]


@pytest.fixture
def flags(tmp_path, conversations) -> list:
    sizes = f"--sequence-length {LENGTH} --precision fp32 --num-workers 0 --log-interval 1 --no-final-checkpoint"
    folders = ["--output-dir", tmp_path, "--cache-dir", tmp_path / "cache", "--tokenizer", tmp_path / "tokenizer"]
    return [*words(sizes), *folders, "--run-name", "r", "--dataset", tmp_path / "*.jsonl"]


def test_a_conversation_alone_in_its_sequence_has_the_loss_that_transformers_gives_it(
    device, flags, conversations, tmp_path, capfd
):
    """The longest is cut into pieces, as best-fit cuts it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path / "model")
    run = [*flags, "--model", tmp_path / "model", "--init", "pretrained", *words("--num-steps 1 --eval-interval 1")]
    run += words("--lr 1e-12 --batch-size 2")
    losses = {}
    for kind in ("none", "best-fit"):
        assert train([*run, "--packing", kind, "--run-name", kind], device) == 0
        losses[kind] = metrics_of(tmp_path / kind)[0]["eval_loss"]
    assert "none, 8 documents in 9 sequences, 1 longer than a sequence cut, padding " in capfd.readouterr().out

    summed, count = 0.0, 0
    for found in conversations:
        for first in range(0, len(found["input_ids"]) - 1, LENGTH):
            piece = slice(first, first + LENGTH + 1)
            ids = torch.tensor([found["input_ids"][piece]])
            labels = torch.where(torch.tensor([found["assistant_masks"][piece]]).bool(), ids, -100)
            labelled = int((labels[:, 1:] != -100).sum())
            if labelled:
                with torch.no_grad():
                    summed += model(input_ids=ids, labels=labels).loss.item() * labelled
                count += labelled
    assert losses["none"] == pytest.approx(summed / count, abs=1e-6)
    assert losses["none"] == pytest.approx(losses["best-fit"], abs=1e-6)


@pytest.mark.slow
def test_a_family_that_cannot_separate_documents_says_what_to_do_and_does_it(device, flags, tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    run = [*flags, "--model", write_model(tmp_path / "model", "qwen3_next", **SIZES | sizes), "--num-steps", "2"]
    with pytest.raises(UserError, match=r"give --packing none, which pads .*, or --no-document-mask, with which"):
        train(run, device)
    for number, advice in enumerate(("--packing none", "--no-document-mask")):
        assert train([*run, *words(advice), "--run-name", str(number)], device) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Best-fit


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_gives_each_document_the_bin_with_the_least_room_the_longest_first(seed):
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 60))
    lengths = np.minimum(size, 1 + generator.exponential(size / 4, 300).astype(np.int32))
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        enough = [room for room in rooms if room >= length]
        if enough:
            rooms.remove(min(enough))
        rooms.append((min(enough) if enough else size) - length)
    items, begins = packing.best_fit(lengths, size, seed)
    assert sorted(items.tolist()) == [*range(300)]
    filled = np.add.reduceat(lengths[items], begins[:-1])
    assert sorted((size - filled).tolist()) == sorted(rooms)


def test_the_order_of_best_fit_follows_from_the_seed_alone():
    """A resumed run, and one of another version, has these bins."""
    items, begins = packing.best_fit(np.array([5, 3, 3, 2, 8, 1, 1, 4, 3, 7], np.int32), 8, seed=3)
    assert items.tolist() == [4, 9, 5, 7, 1, 6, 8, 3, 0, 2] and begins.tolist() == [0, 1, 3, 6, 8, 10]


def test_documents_are_packed_once_by_starts_that_come_together_and_again_if_one_was_killed(
    load, conversations, tmp_path, monkeypatch
):
    packed, best_fit = [], packing.best_fit

    def pack_slowly(*args):
        packed.append(args)
        time.sleep(0.2)
        return best_fit(*args)

    def read(_=None) -> list:
        options = {"with_tokenizer": demo_tokenizer(CHAT_TEMPLATE), "packing": "best-fit"}
        sequences = load(tmp_path / "train.jsonl", LENGTH, **options)
        return [sequences[index].tokens.tolist() for index in range(len(sequences))]

    monkeypatch.setattr(packing, "best_fit", pack_slowly)
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(read, range(2))
    assert first == second == read() and len(first) > 1 and len(packed) == 1
    (record,) = (tmp_path / "cache").glob("packing-*/record.json")
    record.unlink()  # the last file to be written
    (record.parent / "first_pieces.bin").write_bytes(b"")
    half = tmp_path / "cache" / f"{record.parent.name}-abc"
    half.mkdir()
    assert read() == first and len(packed) == 2
    assert not half.exists()


# ----------------------------------------------------------------------------------------------------------------------
# FLOPs


def pieces(lengths: list[int], tokens: int) -> list[int]:
    """Documents end to end, cut where sequences end and after so many tokens."""
    ends = {*itertools.accumulate(lengths), *range(0, tokens + 1, LENGTH)}
    return np.diff(sorted(end for end in ends if end <= tokens)).tolist()


KINDS = {  # flags: the documents of all sequences, by the lengths of the conversations
    "--packing none": lambda lengths: lengths,
    "--packing best-fit": lambda lengths: lengths,
    "--packing best-fit --no-document-mask": None,  # what each sequence holds
    "--packing concatenate": lambda lengths: pieces(lengths, sum(lengths) // LENGTH * LENGTH),
    "--packing concatenate --no-document-mask": lambda lengths: [LENGTH],
}


@pytest.mark.parametrize(
    "kind, ranks",
    [*((kind, 1) for kind in KINDS), slow_case("--packing none", 2), slow_case("--packing concatenate", 2)],
)
def test_flops_are_those_of_each_token_in_its_own_document(device, load, flags, conversations, tmp_path, kind, ranks):
    """Over an epoch, by hand; the one conversation that is longer than a sequence is left out."""
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    lengths = [len(found["input_ids"]) for found in conversations]
    kept = [number for number, length in enumerate(lengths) if length < LENGTH][:6]
    (tmp_path / "train.jsonl").write_text("".join(lines[number] for number in kept))
    lengths = [lengths[number] for number in kept]
    options = {"with_tokenizer": demo_tokenizer(CHAT_TEMPLATE), "packing": kind.split()[1]}
    packed_sequences = load(tmp_path / "train.jsonl", LENGTH, **options)
    found = [packed_sequences.unpadded_len(index) for index in range(len(packed_sequences))]
    documents = np.array(KINDS[kind](lengths) if KINDS[kind] else found)

    run = [*flags, "--model", write_model(tmp_path / "model", "llama", **SIZES), *words(kind)]
    run += words(f"--num-steps {-(-len(packed_sequences) // ranks)} --perf-warmup-steps 0 --peak-tflops 2")
    if ranks == 1:
        train(run, device)
    else:
        forked(ranks, multirank.program, *map(str, run))
    final = metrics_of(tmp_path / "r")[-1]
    keys = (documents**2).sum() / documents.sum()
    config = AutoConfig.for_model("llama", **SIZES)
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = utils.get_model_flops_per_token(config, LENGTH) - 12 * heads * (LENGTH - keys)
    if len(packed_sequences) % ranks == 0:
        assert final["flops_per_token"] == pytest.approx(flops, rel=1e-9)
        assert metrics_of(tmp_path / "r")[-2]["tokens_seen"] == sum(found)  # without padding
    assert final["actual_tflops_per_sec"] == pytest.approx(final["flops_per_token"] * final["tokens_per_sec"] / 1e12)
    assert final["mfu_percent"] == pytest.approx(100 * final["actual_tflops_per_sec"] / 2 / ranks)


@pytest.mark.parametrize("kind", ["stream", "token file"])
def test_flops_of_documents_that_no_index_knows_are_counted_too(device, flags, tmp_path, kind):
    """Four documents of equal length fill each sequence."""
    tokenizer = demo_tokenizer()
    text = next(
        text for text in ("the" + " a" * count for count in range(20)) if len(tokenizer(text)["input_ids"]) == 15
    )
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    np.save(tmp_path / "ids.npy", np.array(ids * 200, np.uint16))
    write_records(tmp_path / "texts.jsonl", [text] * 200)
    source = ["texts.jsonl", "--streaming"] if kind == "stream" else ["ids.npy"]
    run = [*flags, "--document-mask", "--dataset", tmp_path / source[0], *source[1:]]
    run += ["--model", write_model(tmp_path / "model", "llama", **SIZES), *words("--num-steps 2 --perf-warmup-steps 0")]
    assert train(run, device) == 0
    flops = utils.get_model_flops_per_token(AutoConfig.for_model("llama", **SIZES), 16)
    assert metrics_of(tmp_path / "r")[-1]["flops_per_token"] == flops


PADDING = {  # ids of a tokenizer's padding and end-of-text token, the model's vocabulary: what pads
    "its own": ((7, 3, 10), 7),
    "one that was added": ((10, 3, 10), 3),
    "two that were added": ((11, 10, 10), 0),
    "none": ((None, 3, 10), 3),
    "no token at all": ((None, None, 10), 0),
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_is_an_id_that_the_model_has(tmp_path, name):
    (pad, end_of_text, vocab_size), padding = PADDING[name]
    tokenizer = types.SimpleNamespace(pad_token_id=pad, eos_token_id=end_of_text)
    reader = CorpusReader(tokenizer=tokenizer, seq_len=8, vocab_size=vocab_size, cache_dir=tmp_path, packing="best-fit")
    tokens = Tokens([MappedTokens(np.array([1, 2, 1], np.uint16))], vocab_size, known_doc_ends=np.array([3]))
    assert reader.pack(tokens, "data")[0].tokens.tolist() == [1, 2, 1] + [padding] * 6
