"""What --show-samples prints of conversations, of documents that are packed whole, and of token files."""

import json
import re
import struct

import numpy as np
import pytest
from conftest import ROOT
from transformers import AutoTokenizer

import utils
from harness.data.batches import describe_step, mix

SEQ_LEN = 40
COUNT = 50  # documents
TEMPLATE = (
    "{% for message in messages %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endfor %}"
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text_of(number: int) -> str:
    """A document that says its number, from 1 on."""
    digits = " ".join(NUMBERS[int(digit)] for digit in f"{number:03}")
    return f"Number {digits} was a dog." + " It ran." * (number % 4)


def shown(packed, tokenizer) -> list[tuple[str, str]]:
    """(place, text) of each document that the steps of one epoch print."""
    data = mix({"it": packed}, {"it": None}, packed.seq_len, seed=1)
    passages = []
    for step in range(1, len(packed) + 1):
        head, sample, *lines = describe_step(data, tokenizer, step).splitlines()
        assert head.startswith(f"step {step}: 1 samples, from sample {step - 1} on")
        assert re.fullmatch(rf"sample {step - 1}: it, window \d+ of {len(packed)}", sample)
        for line in lines:
            place, _, text = line.strip().partition(": ")
            passages.append((place, text))
    return passages


def check_documents(passages: list[tuple[str, str]], prefix: str = "", numbers=range(1, COUNT + 1)) -> None:
    """Each of these documents is there with its own text."""
    seen = set()
    for place, text in passages:
        found = re.fullmatch(re.escape(prefix) + r"document (\d+)(, from token \d+)?", place)
        assert found, place
        number = int(found[1])
        whole = text_of(number) + "<|endoftext|>"
        if found[2]:
            assert text and text.replace(" ", "") in whole.replace(" ", "")
        else:
            assert text and whole.replace(" ", "").startswith(text.replace(" ", ""))
            seen.add(number)
    assert seen == set(numbers)


def load(tmp_path, tokenizer, source, **options):
    return utils.get_dataset(tokenizer, SEQ_LEN, dataset=str(source), cache_dir=tmp_path / "cache", **options)


def write_chat(tmp_path):
    file = tmp_path / "chat.jsonl"
    records = [{"messages": [{"role": "assistant", "content": text_of(number)}]} for number in range(1, COUNT + 1)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def write_text(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(1, COUNT + 1)))
    return file


def write_megatron(tmp_path, tokenizer, ends_with: list[int]):
    """Two files of COUNT documents each."""
    documents = [tokenizer(text_of(number))["input_ids"] + ends_with for number in range(1, COUNT + 1)]
    lengths = [len(document) for document in documents]
    for name in ("a", "b"):
        np.concatenate(documents).astype("<u2").tofile(tmp_path / f"{name}.bin")
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, COUNT, COUNT + 1)
        places = 2 * np.cumsum([0, *lengths[:-1]])
        arrays = np.array(lengths, "<i4"), np.array(places, "<i8"), np.arange(COUNT + 1, dtype="<i8")
        (tmp_path / f"{name}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return tmp_path / "*.bin"


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_documents_are_named_with_their_own_text_and_without_padding(tokenizer, tmp_path, kind, packing):
    source = write_chat(tmp_path) if kind == "chat" else write_text(tmp_path)
    packed = load(tmp_path, tokenizer, source, packing=packing)
    passages = shown(packed, tokenizer)
    if packing == "best-fit":
        check_documents(passages)
        assert packed.padding_share > 0
    else:  # the last window is not full: what is left over is not trained on
        check_documents(passages, numbers=range(1, 1 + max(int(place.split()[1].strip(",")) for place, _ in passages)))


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@pytest.mark.parametrize("ends_with", [[], [0]])
def test_documents_of_token_files_are_named_with_their_file(tokenizer, tmp_path, packing, ends_with):
    source = write_megatron(tmp_path, tokenizer, ends_with)
    packed = load(tmp_path, tokenizer, source, packing=packing)
    passages = shown(packed, tokenizer)
    for name in ("a", "b"):
        prefix = f"{tmp_path / name}.bin, "
        of_file = [(place, text) for place, text in passages if place.startswith(prefix)]
        numbers = range(1, COUNT + 1)
        if packing == "concatenate" and name == "b":
            numbers = range(1, 1 + max(int(place.rpartition("document ")[2].split(",")[0]) for place, _ in of_file))
        check_documents(of_file, prefix, numbers)
