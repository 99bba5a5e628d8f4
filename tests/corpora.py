"""Corpora, and fixtures that read them, for the tests of data."""

import gzip
import itertools
import json
import pathlib
import re

import pytest
from conftest import DEMO, ROOT, small_run

from harness.flags import parse_sources

END = 0  # end-of-text of the demo tokenizer
(CHAT_TEMPLATE,) = re.findall(r"```jinja\n(.*?)```", (ROOT / "docs" / "DATA.md").read_text(), re.S)  # marks answers


def says(role: str, content, **more) -> dict:
    """A message of a conversation."""
    return {"role": role, "content": content, **more}


def calling(name: str, *arguments: dict, content: str | None = "") -> dict:
    """An answer that calls a function with each of these arguments."""
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for given in arguments]
    return says("assistant", content, tool_calls=calls)


def demo_tokenizer(chat_template: str | None = None, **options):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO, **options)
    tokenizer.chat_template = chat_template
    return tokenizer


def write_records(path: pathlib.Path, records, **options) -> pathlib.Path:
    """Write records in the format that the file's suffix names; a text is a record of its own, bytes are a line. Arrow
    and Parquet take a table of Arrow too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not hasattr(records, "schema"):
        records = [{"text": record} if isinstance(record, str) else record for record in records]
    if path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    elif path.suffix in (".parquet", ".arrow"):
        import pyarrow.ipc
        import pyarrow.parquet

        table = records
        if not hasattr(records, "schema"):
            names = dict.fromkeys(itertools.chain.from_iterable(records))  # from_pylist takes those of the first record
            table = pyarrow.Table.from_pylist([{name: record.get(name) for name in names} for record in records])
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, **options)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
    else:
        lines = (record if isinstance(record, bytes) else json.dumps(record).encode() for record in records)
        content = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def shown_samples(printed: str) -> dict[int, tuple[str, str]]:
    """{sample: (its source, its text without white space)} in the output of --show-samples."""
    samples: dict[int, tuple[str, str]] = {}
    for line in printed.splitlines():
        if line.startswith("sample "):
            number, name = line.removeprefix("sample ").split(", ")[0].split(": ")
            samples[int(number.replace(",", ""))] = (name, "")
        elif line.startswith("  "):
            name, text = samples[max(samples)]
            document = re.sub(r"^  from token [\d,]+: ", "", line)  # of a stream there is no such beginning
            samples[max(samples)] = (name, text + "".join(document.split()))
    return samples


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = demo_tokenizer()
    assert tokenizer.eos_token_id == END
    return tokenizer


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The flags of a small run, with a token cache that all of them share."""
    flags = "--sequence-length 32 --batch-size 4 --lr 1e-3 --lr-scheduler constant --perf-warmup-steps 0 --num-steps 4"
    return small_run(tmp_path_factory.mktemp("small"), flags)


@pytest.fixture
def load(tokenizer, tmp_path):
    """`load(source, ...)`: its sequences, as a library opens them."""
    import utils

    def load(source, seq_len: int = 4, with_tokenizer=tokenizer, **options):
        options = {"cache_dir": tmp_path / "cache", "vocab_size": 1536, "shuffle": False} | options
        return utils.get_dataset(with_tokenizer, seq_len, dataset=str(source), **options)

    return load


@pytest.fixture
def line_of(tokenizer, tmp_path):
    """`line_of(source, ...)`: the header's line about the tokens of a source."""
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
    """`encoded(texts)`: the tokens of each text, and an end-of-text after each."""

    def encode(texts: list[str]) -> list[int]:
        return [token for text in texts for token in [*tokenizer.encode(text, add_special_tokens=False), END]]

    return encode
