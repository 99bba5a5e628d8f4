"""Fixtures of the tests of data."""

import json
import pathlib

import pytest
from transformers import AutoTokenizer

import utils

END = 0  # end-of-text of the demo tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(pathlib.Path(__file__).parent.parent / "assets" / "demo")
    assert tokenizer.eos_token_id == END
    return tokenizer


@pytest.fixture
def load(tokenizer, tmp_path):
    """`load(source, ...)`: its windows, as a library opens them."""

    def load(source, seq_len: int = 4, with_tokenizer=tokenizer, **options):
        options = {"cache_dir": tmp_path / "cache", "vocab_size": 1536} | options
        return utils.get_dataset(with_tokenizer, seq_len, dataset=str(source), **options)

    return load


@pytest.fixture
def encoded(tokenizer):
    """`encoded(texts)`: what the flat file has to hold: each text's tokens, and an end-of-text after each."""

    def encode(texts: list[str]) -> list[int]:
        return [token for text in texts for token in [*tokenizer.encode(text, add_special_tokens=False), END]]

    return encode


@pytest.fixture
def write_jsonl():
    """`write_jsonl(path, texts)`: a line each; bytes are a line as they are."""

    def write(path: pathlib.Path, texts: list) -> pathlib.Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [text if isinstance(text, bytes) else json.dumps({"text": text}).encode() for text in texts]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
