"""Fixtures of the tests of data."""

import json
import pathlib

import pytest
from conftest import words, write_model

from harness.flags import parse_sources

DEMO = pathlib.Path(__file__).parent.parent / "assets" / "demo"
END = 0  # end-of-text of the demo tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.eos_token_id == END
    return tokenizer


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The flags of a small run, with a token cache that all of them share."""
    import multirank

    folder = tmp_path_factory.mktemp("small")
    flags = words("--sequence-length 32 --batch-size 4 --num-workers 0 --precision fp32 --no-compile --log-interval 1")
    flags += words("--lr 1e-3 --lr-scheduler constant --perf-warmup-steps 0 --no-own-plan --run-name r --num-steps 4")
    model = write_model(folder / "model", "llama", **multirank.SIZES)
    return [*flags, "--model", model, "--tokenizer", DEMO, "--cache-dir", folder / "cache"]


@pytest.fixture
def load(tokenizer, tmp_path):
    """`load(source, ...)`: its windows, as a library opens them."""
    import utils

    def load(source, seq_len: int = 4, with_tokenizer=tokenizer, **options):
        options = {"cache_dir": tmp_path / "cache", "vocab_size": 1536, "shuffle": False} | options
        return utils.get_dataset(with_tokenizer, seq_len, dataset=str(source), **options)

    return load


@pytest.fixture
def line_of(tokenizer, tmp_path):
    """`line_of(source, ...)`: what a run says of where the tokens of a source come from."""
    from harness.data import corpora
    from harness.data.reader import CorpusReader

    def line_of(source, with_tokenizer=tokenizer, **options) -> str:
        reading = CorpusReader(
            tokenizer=with_tokenizer, seq_len=4, **{"vocab_size": 1536, "cache_dir": tmp_path / "cache"} | options
        )
        corpus = corpora.inspect_source(parse_sources(str(source))[0], ["train"], ("input_ids", "text"), False)
        return reading.open_tokens(corpus, "train")[1]

    return line_of


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
