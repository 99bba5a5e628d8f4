"""What --show-samples prints of conversations and of documents that are packed whole."""

import json
import re

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


def text_of(number: int) -> str:
    """A document that says its number, from 1 on."""
    digits = " ".join(NUMBERS[int(digit)] for digit in f"{number:03}")
    return f"Number {digits} was a dog." + " It ran." * (number % 4)


def record_of(kind: str, number: int) -> dict:
    if kind == "chat":
        return {"messages": [{"role": "assistant", "content": text_of(number)}]}
    return {"text": text_of(number)}


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_documents_are_named_with_their_own_text_and_without_padding(tmp_path, kind, packing):
    """Over the steps of one epoch, of one sample each."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = TEMPLATE
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(record_of(kind, number)) + "\n" for number in range(1, COUNT + 1)))
    packed = utils.get_dataset(tokenizer, SEQ_LEN, dataset=str(file), cache_dir=tmp_path / "cache", packing=packing)
    data, seen = mix({"it": packed}, {"it": None}, SEQ_LEN, seed=1), set()
    for step in range(1, len(packed) + 1):
        head, sample, *lines = describe_step(data, tokenizer, step).splitlines()
        assert head.startswith(f"step {step}: 1 samples, from sample {step - 1} on")
        assert re.fullmatch(rf"sample {step - 1}: it, window \d+ of {len(packed)}", sample)
        for line in lines:
            number, goes_on, text = re.fullmatch(r"  document (\d+)(, from token \d+)?: (.+)", line).groups()
            whole = f"{text_of(int(number))}<|endoftext|>".replace(" ", "")
            begins = whole.find(text.replace(" ", ""))
            assert begins == 0 or (goes_on and begins > 0)
            seen.add(int(number))
    assert seen == set(range(1, COUNT + 1 if packing == "best-fit" else max(seen) + 1)) and max(seen) > COUNT - 5
