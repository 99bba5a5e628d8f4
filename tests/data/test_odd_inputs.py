"""What other tools leave behind is read as transformers, tokenizers and their trainers read it, or refused in one line:
tokenizers that remember a call, conversations with nulls, spans of characters, ids with labels and masks."""

import itertools
import json
import pathlib
import re

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import tokenizers
from conftest import ROOT, metrics_of, train, words
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.stream import Stream
from harness.data.tokenize import TextEncoder, own_tokens_around

DEMO = ROOT / "assets" / "demo"
TEXTS = ["A fox saw a red ball and ran.", "Two", "The end? <|endoftext|>", "Zażółć 日本語 \n\n in lines, " * 9]


def write_jsonl(path: pathlib.Path, records: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_table(records: list[dict] | pyarrow.Table) -> pyarrow.Table:
    return records if isinstance(records, pyarrow.Table) else pyarrow.Table.from_pylist(records)


def write_parquet(path: pathlib.Path, records: list[dict] | pyarrow.Table) -> pathlib.Path:
    pyarrow.parquet.write_table(as_table(records), path)
    return path


def write_arrow(path: pathlib.Path, records: list[dict] | pyarrow.Table) -> pathlib.Path:
    table = as_table(records)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet, "arrow": write_arrow}

# ----------------------------------------------------------------------------------------------------------------------
# What tokenizers remember


def remembers(**call):
    def change(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer(["one two three", "four"], **call)
        return tokenizer

    return change


def adds_begin(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    rule = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = rule
    return tokenizer


def takes_special_tokens_as_text(tokenizer):
    tokenizer.split_special_tokens = True
    tokenizer.backend_tokenizer.encode_special_tokens = True
    return tokenizer


TOKENIZERS = {  # how one becomes what somebody saved
    "as it was": lambda tokenizer: tokenizer,
    "truncates": remembers(truncation=True, max_length=8),
    "truncates on the left": lambda t: remembers(truncation=True, max_length=8)(t_left(t)),
    "pads": remembers(padding=True),
    "pads to a length": remembers(padding="max_length", truncation=True, max_length=40),
    "adds <s>": adds_begin,
    "adds <s> and truncates": lambda t: remembers(truncation=True, max_length=8)(adds_begin(t)),
    "takes special tokens as text": takes_special_tokens_as_text,
}


def t_left(tokenizer):
    tokenizer.truncation_side = "left"
    return tokenizer


@pytest.fixture(params=TOKENIZERS)
def saved(request, tmp_path):
    tokenizer = TOKENIZERS[request.param](AutoTokenizer.from_pretrained(DEMO))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    of_file = {"split_special_tokens": tokenizer.split_special_tokens}  # which is not saved with the others
    config.write_text(json.dumps(json.loads(config.read_text()) | of_file))
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def test_cached_and_streamed_tokens_are_those_of_the_tokenizers_own_call(saved, tmp_path, load):
    texts = TEXTS[:2] + TEXTS[3:]  # the mark in the third divides documents
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    once = load(file, with_tokenizer=saved, vocab_size=len(saved)).tokens[:].tolist()
    again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    files, encoder = find_files(str(file)).files_in_split("train"), TextEncoder(again, len(again))
    stream = Stream(files=files, encoder=encoder, text_field="text", seq_len=4, seed=0)
    streamed = stream.first_documents(stream.chunks, 10**6).tokens.tolist()
    expected = [[*saved(text, add_special_tokens=False)["input_ids"], saved.eos_token_id] for text in texts]
    assert once == streamed == list(itertools.chain(*expected))


def test_a_tokenizer_that_takes_special_tokens_as_text_has_a_cache_of_its_own(tmp_path, load):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "A fox <s> ran."}])
    found = []
    for change in (adds_begin, lambda tokenizer: takes_special_tokens_as_text(adds_begin(tokenizer))):
        tokenizer = change(AutoTokenizer.from_pretrained(DEMO))
        tokenizer("a", split_special_tokens=not tokenizer.split_special_tokens)  # what this call leaves behind
        found.append(load(file, with_tokenizer=tokenizer, vocab_size=len(tokenizer)).tokens[:].tolist())
        assert found[-1][:-1] == tokenizer("A fox <s> ran.", add_special_tokens=False)["input_ids"]
    assert found[0] != found[1]


def test_a_conversation_is_rendered_and_tokenized_whatever_the_tokenizer_remembers(saved, tmp_path, load):
    saved.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    records = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    expected = [saved(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    saved.backend_tokenizer.enable_truncation(5)
    for loss in ("assistant", "all"):
        tokens = load(file, with_tokenizer=saved, vocab_size=len(saved), chat_loss=loss).tokens
        assert tokens[:].tolist() == list(itertools.chain(*expected)), loss


def test_a_tokenizers_own_tokens_around_a_text_are_named_in_the_header(tmp_path, arguments, device, capfd):
    plain = AutoTokenizer.from_pretrained(DEMO)
    assert own_tokens_around(plain) == ([], [])
    adds_begin(plain).save_pretrained(tmp_path / "tokenizer")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.vocab_size += 1
    config.save_pretrained(tmp_path / "model")
    arguments += ["--dataset", write_jsonl(tmp_path / "stories.jsonl", [{"text": text} for text in TEXTS])]
    assert train([*arguments, "--run-name", "plain"], device) == 0
    assert "\ndocuments  <|endoftext|> after each text\n" in capfd.readouterr().out
    assert train([*arguments, "--tokenizer", tmp_path / "tokenizer"], device) == 0
    assert "\ndocuments  <|endoftext|> after each text; not <s>, which this " in capfd.readouterr().out


def test_the_way_to_have_a_tokenizers_own_tokens_that_the_page_shows_gives_them(tmp_path, load, monkeypatch):
    tokenizer = adds_begin(AutoTokenizer.from_pretrained(DEMO))
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("tokenizer")
    write_jsonl(tmp_path / "stories.jsonl", [{"text": text} for text in TEXTS])
    page = (ROOT / "docs" / "DATA.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(script.replace("HuggingFaceTB/SmolLM3-3B", "tokenizer"), {})
    tokens = load("ids.jsonl", with_tokenizer=tokenizer, vocab_size=len(tokenizer)).tokens
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    assert tokens[:].tolist() == list(itertools.chain(*expected))


# ----------------------------------------------------------------------------------------------------------------------
# Conversations with nulls

EVERYTHING = """{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}"""


def call(name: str, **arguments) -> dict:
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


def tool(name: str, **properties) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


SAID = {"role": "user", "content": "And in Oslo?"}
NULLS = {  # pairs of records whose objects have other fields
    "arguments": [{"messages": [SAID, call("weather", city="Oslo")]}, {"messages": [SAID, call("add", a=1, b=2)]}],
    "tools": [
        {"messages": [SAID, call("f", x=1)], "tools": [tool("f", x={"type": "number", "minimum": 0})]},
        {"messages": [SAID, call("g", y="z")], "tools": [tool("g", y={"type": "string", "enum": ["z"]})]},
        {"messages": [SAID, {"role": "assistant", "content": "no tools"}]},
    ],
    "unknown fields": [
        {"messages": [SAID, {"role": "assistant", "content": "x", "reasoning": "y", "weight": 1}]},
        {"messages": [SAID | {"name": "Ann"}, {"role": "assistant", "content": "x"}]},
    ],
    "parts": [
        {"messages": [SAID | {"notes": [{"type": "text", "text": "a"}]}]},
        {"messages": [SAID | {"notes": [{"type": "link", "url": "b.html"}]}]},
    ],
    "nulls that are written": [
        {"messages": [SAID, call("g", y=None)], "tools": [tool("g", y={"type": "string", "default": None})]},
        {"messages": [SAID | {"tool_calls": None}, call("f", a=None, b=[1, 2])]},
        {"messages": [SAID | {"name": None}, call("f", a={"c": None, "d": "e"}, b=[])]},
    ],
}


def as_arguments(record: dict) -> dict:
    """A record for `apply_chat_template`: transformers 5.17 renders a content of None, which 5.23 takes for none."""
    messages = [{key: part for key, part in message.items() if part is not None} for message in record["messages"]]
    return {"conversation": messages, "tools": record.get("tools")}


@pytest.mark.parametrize("name", NULLS)
def test_a_null_of_json_lines_is_rendered_as_by_transformers_and_one_of_parquet_is_a_field_that_is_not_there(
    tmp_path, load, name
):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = EVERYTHING
    found = {}
    for suffix, write in WRITERS.items():
        tokens = load(write(tmp_path / f"a.{suffix}", NULLS[name]), with_tokenizer=tokenizer).tokens
        found[suffix] = tokenizer.decode(tokens[:].tolist())
        assert tokens.trained(0, len(tokens)).any()
    assert "null" not in found["parquet"]
    if name != "nulls that are written":
        assert found["jsonl"] == found["parquet"]
        return
    written = [tokenizer.apply_chat_template(**as_arguments(record), tokenize=False) for record in NULLS[name]]
    assert found["jsonl"] == "".join(written) and found["jsonl"].count("null") == 4


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", ["arguments", "tools", "unknown fields", "parts"])
def test_conversations_are_rendered_as_transformers_renders_them(tmp_path, load, name, suffix):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = EVERYTHING
    file = WRITERS[suffix](tmp_path / f"a.{suffix}", NULLS[name])
    rendered = [tokenizer.apply_chat_template(**as_arguments(record), tokenize=False) for record in NULLS[name]]
    tokens = load(file, with_tokenizer=tokenizer).tokens
    assert tokenizer.decode(tokens[:].tolist()) == "".join(rendered)


OBJECT = pyarrow.map_(pyarrow.string(), pyarrow.string())
MESSAGE = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "arguments": OBJECT})
MESSAGES = {  # types of a column of messages
    "arguments as a map": pyarrow.list_(MESSAGE),
    "a view": pyarrow.list_view(MESSAGE),
    "a large view": pyarrow.large_list_view(MESSAGE),
    "two in each row": pyarrow.list_(MESSAGE, 2),
    "maps": pyarrow.list_(OBJECT),
    "the JSON of datasets": pyarrow.list_(pyarrow.json_()),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_and_their_tools_are_read_whatever_the_type_of_their_column(tmp_path, load, name, suffix):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = EVERYTHING
    messages, kind = [dict(SAID), {"role": "assistant", "content": "no tools"}], MESSAGES[name]
    if name == "the JSON of datasets":
        messages[1] |= call("weather", city=["Oslo"], day=None)
        column = pyarrow.array([[json.dumps(message) for message in messages]]).cast(kind)
    else:
        messages[0] |= {} if name == "maps" else {"arguments": {"city": "Oslo"}}
        column = pyarrow.array([messages], kind)
    tools = [tool("f", y={"type": "string"})]
    WRITERS[suffix](tmp_path / f"a.{suffix}", pyarrow.table({"messages": column, "tools": [tools]}))
    files = (tmp_path / f"a.{suffix}", write_jsonl(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}]))
    of_table, of_lines = (load(file, with_tokenizer=tokenizer).tokens[:].tolist() for file in files)
    assert of_table == of_lines


# ----------------------------------------------------------------------------------------------------------------------
# What the assistant said, by characters

SPANS = {  # what others and the assistant say in turn
    "words": ["Where? ", "In the red box.", " And"],
    "a span that ends in a space": ["Say: ", "a fox ", "next"],
    "a span that ends in spaces and lines": ["Say: ", "a fox  \n\n ", "next"],
    "a span that begins with a space": ["Say:", " a fox", ", next"],
    "a span of spaces": ["Say:", "   ", "next"],
    "an empty span": ["Say: ", "", "next", "fox"],
    "an empty span at the end": ["Say: ", "fox", " next ", ""],
    "characters of several tokens": ["🧑 ", "日本 🧑\u200d🚀", "🧑 next"],
    "a character beside another": ["é", "é", "é", "é"],
    "a token across the border": ["Once up", "on a time", " there"],
    "a special token": ["Say", "a<|endoftext|>", "<|endoftext|>", "b"],
    "from the first character on": ["", "A fox", "next"],
}


def bytes_of(tokenizer, ids: list[int]) -> list[int]:
    """How many bytes of UTF-8 each token is, of a tokenizer of bytes."""
    special = {*tokenizer.all_special_ids}
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [len(token.encode() if number in special else token) for number, token in zip(ids, tokens, strict=True)]


def trim_offsets(tokenizer) -> None:
    """As GPT-2's and Llama 3's tokenizers do."""
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)


def drop_post_processor(tokenizer) -> None:
    tokenizer.backend_tokenizer.post_processor = None


@pytest.mark.parametrize("change", [trim_offsets, drop_post_processor])
@pytest.mark.parametrize("name", SPANS)
def test_a_token_is_trained_on_where_one_of_its_characters_is_the_assistants(tmp_path, load, name, change):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    change(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": part} for role, part in zip(roles, SPANS[name], strict=False)]
    more = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " yes"}]  # to train on something
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages + more}])
    tokens = load(file, with_tokenizer=tokenizer).tokens
    ids = tokens[:].tolist()
    parts = [*SPANS[name], *(["", "x", " yes"] if len(SPANS[name]) % 2 else ["x", " yes"])]
    assistants = np.concatenate([np.full(len(part.encode()), index % 2) for index, part in enumerate(parts)])
    ends = np.cumsum(bytes_of(tokenizer, ids))
    assert ends[-1] == len(assistants)
    expected = [int(assistants[start:end].any()) for start, end in itertools.pairwise([0, *ends])]
    assert tokens.trained(0, len(tokens)).tolist() == [0, *expected[1:]]  # nothing precedes the first


def test_a_tokenizer_without_offsets_is_refused_before_a_conversation_is_read(tmp_path, load):
    python = ByT5Tokenizer()
    python.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": [SAID]}])
    with pytest.raises(UserError, match=r"ByT5Tokenizer does not say which characters.*--chat-loss all") as raised:
        load(file, with_tokenizer=python)
    assert "skip-bad-records" not in str(raised.value)
    tokens = load(file, with_tokenizer=python, chat_loss="all").tokens
    assert tokens[:].tolist() == python(SAID["content"], add_special_tokens=False)["input_ids"]


# ----------------------------------------------------------------------------------------------------------------------
# Ids with labels and masks

IDS = [5, 6, 7, 8]
ROWS = {  # fields beside or over IDS: (ids, which of them are trained on; None for a corpus without a mask)
    "nothing": ({}, (IDS, None)),
    "labels of all": ({"labels": IDS}, (IDS, [0, 1, 1, 1])),
    "labels of some": ({"labels": [-100, -100, 7, 8]}, (IDS, [0, 0, 1, 1])),
    "labels of the middle": ({"labels": [-100, 6, -100, 8]}, (IDS, [0, 1, 0, 1])),
    "padding on the right": ({"attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], None)),
    "padding on the left": ({"attention_mask": [0, 1, 1, 1]}, ([6, 7, 8], None)),
    "no padding": ({"attention_mask": [1, 1, 1, 1]}, (IDS, None)),
    "labels and padding": ({"labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], [0, 1, 1])),
    "labels at the padding": ({"labels": [-100, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], [0, 1, 1])),
    "a mask of the completion": ({"completion_mask": [0, 0, 1, 1]}, (IDS, [0, 0, 1, 1])),
    "one mask of the assistant": ({"assistant_mask": [0, 0, 1, 1]}, (IDS, [0, 0, 1, 1])),
    "lengths of one": ({"seq_lengths": [4]}, (IDS, None)),
    "two masks": ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}, (IDS, [0, 1, 0, 1])),
    "positions": ({"position_ids": [0, 1, 2, 3]}, (IDS, None)),
    "another field": ({"token_type_ids": [0, 0, 0, 0], "label": 3, "length": 4}, (IDS, None)),
}
REFUSED = {
    "labels that are shifted": ({"labels": [6, 7, 8, -100]}, r"labels\[0\] is 6 instead of -100 or its token id, 5"),
    "too few labels": ({"labels": [5, 6]}, r"labels is \[5, 6\] instead of 4 integers, one per token"),
    "a label of the whole": ({"labels": 1}, r"labels is 1 instead of 4 integers, one per token"),
    "labels that are no numbers": ({"labels": ["a", "b", "c", "d"]}, "labels is .* instead of 4 integers"),
    "labels that are fractions": ({"labels": [5.5, 6.0, 7.0, 8.0]}, "labels is .* instead of 4 integers"),
    "a label that is missing": ({"labels": [5, None, 7, 8]}, "labels is .* instead of 4 integers"),
    "several documents": ({"attention_mask": [1, 1, 2, 2]}, "attention_mask is .* instead of 0 and 1; give each"),
    "hidden tokens": ({"attention_mask": [1, 0, 1, 1]}, "attention_mask is 0 between tokens"),
    "lengths of several": ({"seq_lengths": [2, 2]}, "seq_lengths has several documents; give each document a record"),
    "positions anew": ({"position_ids": [0, 1, 0, 1]}, "position_ids do not count up from 0; give each document"),
}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", ROWS)
def test_labels_and_masks_beside_ids_are_those_of_the_row(tmp_path, load, name, suffix):
    beside, (ids, trained) = ROWS[name]
    file = WRITERS[suffix](tmp_path / f"a.{suffix}", [{"input_ids": IDS} | beside] * 3)
    data = load(file, vocab_size=16)
    assert data.tokens[:].tolist() == ids * 3
    assert data.tokens.has_loss_mask == (trained is not None)
    if trained:
        assert data.tokens.trained(0, len(data.tokens)).tolist() == trained * 3
        assert data.document_mask and data.tokens.doc_ends.tolist() == [len(ids), 2 * len(ids), 3 * len(ids)]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", REFUSED)
def test_labels_and_masks_that_no_sequence_can_have_are_named(tmp_path, load, line_of, name, suffix):
    beside, fault = REFUSED[name]
    good = {"input_ids": IDS, "labels": IDS}
    file = WRITERS[suffix](tmp_path / f"a.{suffix}", [{"input_ids": IDS} | beside])
    with pytest.raises(UserError, match=rf"a\.{suffix}, (line|row) 1: {fault}"):
        load(file, vocab_size=16)
    both = write_jsonl(tmp_path / "both.jsonl", [good, {"input_ids": IDS} | beside, good])
    options = {"vocab_size": 16, "skip_bad_records": True}
    assert len(load(both, **options).tokens.doc_ends) == 2
    assert line_of(both, **options).endswith(", left out: bad records 1")


def test_a_row_with_labels_is_padded_and_trained_on_as_its_labels_say(tmp_path, load):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [9, 10], "labels": [9, 10]}]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), 6, vocab_size=16)
    (sequence,) = [data[index] for index in range(len(data))]
    assert sequence.tokens.tolist()[:6] == [5, 6, 7, 8, 9, 10]
    assert sequence.trained.tolist() == [False, True, True, False, True, False]
    assert sequence.starts.tolist() == [0, 4]


def test_rows_of_another_kind_than_the_first_are_bad_records(tmp_path, load):
    labelled, plain = {"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}
    for rows, fault in (
        ([labelled, plain], "line 2: token ids instead of token ids with labels"),
        ([plain, labelled], "line 2: token ids with labels instead of token ids"),
    ):
        with pytest.raises(UserError, match=fault):
            load(write_jsonl(tmp_path / "a.jsonl", rows), vocab_size=16)


def test_rows_without_a_trained_token_are_left_out_and_a_corpus_of_such_rows_is_refused(tmp_path, load, line_of):
    untrained = {"input_ids": IDS, "labels": [-100] * 4}
    with pytest.raises(UserError, match=r"none of its 1 rows has a token to train on by its labels and masks"):
        load(write_jsonl(tmp_path / "none.jsonl", [untrained]), vocab_size=16)
    file = write_jsonl(tmp_path / "a.jsonl", [untrained, {"input_ids": IDS, "labels": IDS}])
    assert len(load(file, vocab_size=16).tokens.doc_ends) == 1
    assert line_of(file, vocab_size=16).endswith(", left out: rows without a trained token 1")


def test_a_stream_of_labels_is_refused(tmp_path, mistake):
    file = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": IDS, "labels": IDS}] * 9)
    assert "token ids with labels, whose masks are in the token cache; leave out --streaming" in mistake(
        "--dataset", str(file), "--streaming"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Windows without a trained token

TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content + eos_token }}
{%- endgeneration %}{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}"""


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


LONG_USER = [chat("word " * (90 if number % 4 == 3 else 3), "the ball " * 5) for number in range(40)]


@pytest.fixture
def template(tmp_path) -> list[str]:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return ["--chat-template", str(tmp_path / "chat.jinja")]


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
def test_each_sequence_has_a_token_to_train_on_and_the_header_counts_those_left_out(
    tmp_path, arguments, template, packing, device, capfd
):
    file = write_jsonl(tmp_path / "a.jsonl", LONG_USER)
    flags = ["--dataset", file, *template, "--batch-size", "1", "--eval-interval", "7", "--packing", packing]
    flags += words("--num-steps 60 --log-interval 1 --no-final-checkpoint")
    assert train([*arguments, *flags], device) == 0  # 60 windows: a whole epoch
    out = capfd.readouterr().out
    data, eval_part = re.search(r"^data .*an epoch.*$", out, re.M)[0], re.search(r"^eval data .*$", out, re.M)[0]
    left_out = re.search(r"left out (\d+) sequences? without a trained token$", data)
    assert left_out and int(left_out[1]) > 5
    assert "of them in the loss" in eval_part
    sequences = float(re.search(r"([\d.]+) steps an epoch", data)[1])
    assert sequences < 60
    losses = [line["loss"] for line in metrics_of(tmp_path / "out" / "r") if not line.get("final")]
    assert len(losses) == 60 and all(np.isfinite(losses))


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
def test_sequences_that_are_left_out_are_those_without_a_trained_token(tmp_path, load, template, packing):
    file = write_jsonl(tmp_path / "a.jsonl", LONG_USER)
    data = load(file, 16, chat_template=template[1], packing=packing)
    kept = [data[index] for index in range(len(data))]
    assert data.left_out > 0 and all(sequence.trained.any() for sequence in kept)
    assert data.total_trained() == sum(sequence.trained.sum() for sequence in kept)
    whole = data.tokens.trained(0, len(data.tokens))
    if packing == "best-fit":  # each trained token but a document's first is a label once
        assert sum(sequence.trained.sum() for sequence in kept) == whole.sum()
    else:
        cut = whole[1 : data.total_sequences * 16 + 1].reshape(-1, 16)
        assert [index for index, row in enumerate(cut) if row.any()] == data.kept.tolist()
    with pytest.raises(IndexError):
        data[len(data)]


def test_where_no_sequence_is_left_the_run_is_refused_before_its_first_step(tmp_path, mistake):
    """Here a row of 100 tokens of which the last alone is trained on, in windows of 64: it is in no whole window."""
    row = {"input_ids": [5] * 100, "labels": [-100] * 99 + [5]}
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [row])
    flags = ["--dataset", str(folder), *words("--packing concatenate --sequence-length 64 --batch-size 1")]
    printed = "none of its 1 sequence has a token to train on; use a longer --sequence-length, or other data"
    assert printed in mistake(*flags)
    write_jsonl(folder / "train.jsonl", [{"input_ids": [5] * 100, "labels": [5] * 100}] * 9)
    write_jsonl(folder / "validation.jsonl", [row])
    refused = mistake(*flags, "--eval-interval", "1")
    assert printed in refused and "split 'validation'" in refused


# ----------------------------------------------------------------------------------------------------------------------
# Which field, which flags, and how a run on conversations speaks


@pytest.mark.parametrize("suffix", WRITERS)
def test_messages_win_over_text_unless_somebody_names_the_text(tmp_path, load, template, suffix):
    records = [chat("What?", f"The ball {number}.") | {"text": "Only text."} for number in range(5)]
    file = WRITERS[suffix](tmp_path / f"a.{suffix}", records)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert "user: What?" in tokenizer.decode(load(file, chat_template=template[1]).tokens[:].tolist())
    of_text = load(file, text_field="text").tokens
    assert tokenizer.decode(of_text[:].tolist()) == "Only text.<|endoftext|>" * 5
    ids = WRITERS[suffix](tmp_path / f"b.{suffix}", [record | {"input_ids": IDS} for record in records])
    assert "user: What?" in tokenizer.decode(load(ids, chat_template=template[1]).tokens[:].tolist())
    assert load(ids, text_field="input_ids").tokens[:].tolist() == IDS * 5


TEXT = "No messages."
NAMED_AS_LAYOUTS = {  # a record, a text of which is named as a layout; --text-field; the beginning of what is read
    "beside a conversation": (
        {"messages": TEXT, "conversations": chat("What?", "A ball.")["messages"]},
        None,
        "user: What?",
    ),
    "nulls beside a conversation": (
        {"messages": None, "conversations": chat("What?", "A ball.")["messages"]},
        None,
        "user: What?",
    ),
    "beside a text": ({"messages": TEXT, "conversation": TEXT, "text": "Only text."}, None, "Only text."),
    "as the only field": ({"messages": TEXT}, "messages", TEXT),
    "beside another text": ({"messages": TEXT, "text": "Only text."}, "messages", TEXT),
}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", NAMED_AS_LAYOUTS)
def test_a_text_that_is_named_as_a_layout_is_no_conversation(tmp_path, load, template, name, suffix):
    record, text_field, wanted = NAMED_AS_LAYOUTS[name]
    file = WRITERS[suffix](tmp_path / f"a.{suffix}", [record] * 5)
    options = {"text_field": text_field} if text_field else {}
    if "user" in wanted:
        options["chat_template"] = template[1]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(load(file, **options).tokens[:].tolist()).startswith(wanted)


def test_empty_files_before_the_first_record_do_not_decide_what_a_corpus_is(tmp_path, load, template):
    (tmp_path / "corpus").mkdir()
    for name in "ab":
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("\n")
    write_jsonl(tmp_path / "corpus" / "c.jsonl", [chat("What?", "A ball.")])
    assert load(tmp_path / "corpus", chat_template=template[1]).has_loss_mask


@pytest.mark.parametrize("flags", [["--chat-loss", "all"], ["--chat-template"]])
def test_flags_of_conversations_without_conversations_are_refused(tmp_path, mistake, load, template, flags):
    given = template if flags == ["--chat-template"] else flags
    assert mistake(*given).startswith(f"{flags[0]}: only with conversations")
    assert "synthetic data have none; leave it out" in mistake("--dataset", "synthetic", *given)
    if given == template:
        with pytest.raises(UserError, match=r"--chat-template: only with conversations.* has text; leave it out"):
            load(DEMO / "stories", chat_template=template[1])


@pytest.mark.parametrize("question, is_too_long", [("{{ m.content }}", False), ("{{ m.content * 60 }}", True)])
def test_a_prompt_is_measured_as_the_template_renders_it(tmp_path, mistake, arguments, device, question, is_too_long):
    """The model has 256 positions; the prompt alone is short."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("{{ m.content }}", question))
    file = write_jsonl(tmp_path / "a.jsonl", [chat(f"Who {number}?", "The fox.") for number in range(99)])
    flags = ["--dataset", file, "--chat-template", tmp_path / "chat.jinja", "--sample-prompt", "Who has the red ball?"]
    flags += words("--sample-tokens 9 --sequence-length 64")
    if is_too_long:
        printed = r"--sample-tokens 9: more than .*'s 256 positions with the prompt's \d+ tokens; use fewer, or a"
        assert re.match(printed, mistake(*flags))
    else:
        assert train([*arguments, *flags], device) == 0


def test_a_run_that_cuts_many_conversations_is_warned(tmp_path, arguments, template, device, capfd):
    flags = ["--dataset", write_jsonl(tmp_path / "a.jsonl", LONG_USER), *template, "--batch-size", "1"]
    for length, warns in ((32, True), (128, False)):
        assert train([*arguments, *flags, "--sequence-length", length, "--run-name", length], device) == 0
        printed = (
            f"warning: --sequence-length {length}: 10 of 40 conversations are longer and are cut into pieces; give a"
        )
        assert (printed in capfd.readouterr().err) == warns


def test_a_run_on_conversations_samples_through_its_template(tmp_path, arguments, template, device, capfd):
    file = write_jsonl(tmp_path / "a.jsonl", [chat(f"Who has ball {number}?", "The fox.") for number in range(60)])
    flags = [*arguments, "--dataset", file, *template, "--sample-prompt", "Who runs?", "--sample-tokens", "4"]
    flags += ["--sequence-length", "64"]
    assert train([*flags, "--final-checkpoint"], device) == 0
    (sample,) = [line["samples"] for line in metrics_of(tmp_path / "out" / "r") if "samples" in line][-1]
    assert sample["prompt"] == "user: Who runs?\n" and sample["text"].startswith(sample["prompt"])
    out = capfd.readouterr().out
    assert len(re.findall(r"^--- .*a.jsonl, line 1: one turn$", out, re.M)) == 1  # the header's examples, one a kind
    assert "[[ The fox.<|endoftext|>]]" in out
    asked = [*arguments, "--resume", tmp_path / "out" / "r", "--num-steps", "0", "--sample-prompt", "Who runs?"]
    assert train([*asked, "--sample-tokens", "4"], device) == 0  # template and all else by the checkpoint
    assert f"\n{sample['text']}" in capfd.readouterr().out
