"""What other tools leave behind is read as transformers, tokenizers and their trainers read it, or refused in one line:
tokenizers that remember a call, conversations with nulls, spans of characters, ids with labels and masks."""

import datetime
import decimal
import itertools
import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from conftest import ROOT, chat, train, words
from corpora import CHAT_TEMPLATE, calling, demo_tokenizer, says, write_records
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.header import describe_examples
from harness.data.schema import LabelledIds
from harness.data.stream import Stream
from harness.data.tokenize import RowEncoder, TextEncoder

TEXTS = ["A fox saw a red ball and ran.", "Two", "The end? <|endoftext|>", "Zażółć 日本語 \n\n in lines, " * 9]
SUFFIXES = ("jsonl", "parquet", "arrow")

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
    "pads to a length": remembers(padding="max_length", truncation=True, max_length=40),
    "adds <s>": adds_begin,
    "takes special tokens as text": takes_special_tokens_as_text,
}


@pytest.fixture(params=TOKENIZERS)
def saved(request, tmp_path):
    tokenizer = TOKENIZERS[request.param](demo_tokenizer())
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    of_file = {"split_special_tokens": tokenizer.split_special_tokens}  # which is not saved with the others
    config.write_text(json.dumps(json.loads(config.read_text()) | of_file))
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def test_cached_and_streamed_tokens_are_those_of_the_tokenizers_own_call(saved, tmp_path, load):
    texts = TEXTS[:2] + TEXTS[3:]  # the mark in the third divides documents
    file = write_records(tmp_path / "a.jsonl", texts)
    once = load(file, with_tokenizer=saved, vocab_size=len(saved)).tokens[:].tolist()
    again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    files, encoder = find_files(str(file)).files_in_split("train"), TextEncoder(again, len(again))
    stream = Stream(files=files, encoder=encoder, fields=("text",), seq_len=4, seed=0)
    streamed = stream.first_documents(stream.chunks, 10**6).tokens.tolist()
    expected = [[*saved(text, add_special_tokens=False)["input_ids"], saved.eos_token_id] for text in texts]
    assert once == streamed == list(itertools.chain(*expected))


def test_a_tokenizer_that_takes_special_tokens_as_text_has_a_cache_of_its_own(tmp_path, load):
    file = write_records(tmp_path / "a.jsonl", ["A fox <s> ran."])
    found = []
    for change in (adds_begin, lambda tokenizer: takes_special_tokens_as_text(adds_begin(tokenizer))):
        tokenizer = change(demo_tokenizer())
        tokenizer("a", split_special_tokens=not tokenizer.split_special_tokens)  # what this call leaves behind
        found.append(load(file, with_tokenizer=tokenizer, vocab_size=len(tokenizer)).tokens[:].tolist())
        assert found[-1][:-1] == tokenizer("A fox <s> ran.", add_special_tokens=False)["input_ids"]
    assert found[0] != found[1]


def test_a_conversation_is_rendered_and_tokenized_whatever_the_tokenizer_remembers(saved, tmp_path, load):
    saved.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    file = write_records(tmp_path / "a.jsonl", [{"messages": [says("user", text)]} for text in TEXTS])
    expected = [saved(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    saved.backend_tokenizer.enable_truncation(5)
    for loss in ("assistant", "all"):
        tokens = load(file, with_tokenizer=saved, vocab_size=len(saved), chat_loss=loss).tokens
        assert tokens[:].tolist() == list(itertools.chain(*expected)), loss


def test_special_tokens_that_a_tokenizer_adds_are_named_in_the_header(tmp_path, arguments, device, capfd):
    adds_begin(demo_tokenizer()).save_pretrained(tmp_path / "tokenizer")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.vocab_size += 1
    config.save_pretrained(tmp_path / "model")
    arguments += ["--dataset", write_records(tmp_path / "stories.jsonl", TEXTS)]
    assert train([*arguments, "--tokenizer", tmp_path / "tokenizer"], device) == 0
    assert "\ndocuments  <|endoftext|> after each text; not <s>, which this " in capfd.readouterr().out


def test_the_script_of_the_page_gives_the_special_tokens_that_a_tokenizer_adds(tmp_path, load, monkeypatch):
    tokenizer = adds_begin(demo_tokenizer())
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("tokenizer")
    write_records(tmp_path / "stories.jsonl", TEXTS)
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


def tool(name: str, **properties) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


ASKS = says("user", "And in Oslo?")


def call(name: str, asks: dict = ASKS, **arguments) -> dict:
    """A record with a question, answered by a call."""
    return {"messages": [asks, calling(name, arguments, content=None)]}


NULLS = {  # records whose objects have different fields
    "arguments": [call("weather", city="Oslo"), call("add", a=1, b=2)],
    "tools": [
        call("f", x=1) | {"tools": [tool("f", x={"type": "number", "minimum": 0})]},
        call("g", y="z") | {"tools": [tool("g", y={"type": "string", "enum": ["z"]})]},
        chat("And in Oslo?", "no tools"),
    ],
    "unknown fields": [
        {"messages": [ASKS, says("assistant", "x", reasoning="y", weight=1)]},
        {"messages": [ASKS | {"name": "Ann"}, says("assistant", "x")]},
    ],
    "parts": [
        {"messages": [ASKS | {"notes": [{"type": "text", "text": "a"}]}]},
        {"messages": [ASKS | {"notes": [{"type": "link", "url": "b.html"}]}]},
    ],
    "nulls that are written": [
        call("g", y=None) | {"tools": [tool("g", y={"type": "string", "default": None})]},
        call("f", ASKS | {"tool_calls": None}, a=None, b=[1, 2]),
        call("f", ASKS | {"name": None}, a={"c": None, "d": "e"}, b=[]),
    ],
}


def without_nulls(value):
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", NULLS)
def test_conversations_are_rendered_as_by_transformers_and_a_null_of_a_column_is_a_missing_field(
    tmp_path, load, name, suffix
):
    tokenizer = demo_tokenizer(EVERYTHING)
    tokens = load(write_records(tmp_path / f"a.{suffix}", NULLS[name]), with_tokenizer=tokenizer).tokens
    rendered = ""
    for record in NULLS[name] if suffix == "jsonl" else without_nulls(NULLS[name]):
        # transformers 5.17 renders a content of None, which 5.23 takes for none
        messages = [{key: part for key, part in message.items() if part is not None} for message in record["messages"]]
        rendered += tokenizer.apply_chat_template(messages, record.get("tools"), tokenize=False)
    assert tokenizer.decode(tokens[:].tolist()) == rendered and tokens.loss_mask(0, len(tokens)).any()
    assert rendered.count("null") == (4 if name == "nulls that are written" and suffix == "jsonl" else 0)


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
    tokenizer, kind = demo_tokenizer(EVERYTHING), MESSAGES[name]
    messages = [dict(ASKS), {"role": "assistant", "content": "no tools"}]
    if name == "the JSON of datasets":
        messages[1] = calling("weather", {"city": ["Oslo"], "day": None}, content="no tools")
        column = pyarrow.array([[json.dumps(message) for message in messages]]).cast(kind)
    else:
        messages[0] |= {} if name == "maps" else {"arguments": {"city": "Oslo"}}
        column = pyarrow.array([messages], kind)
    tools = [tool("f", y={"type": "string"})]
    table = write_records(tmp_path / f"a.{suffix}", pyarrow.table({"messages": column, "tools": [tools]}))
    files = (table, write_records(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}]))
    of_table, of_lines = (load(file, with_tokenizer=tokenizer).tokens[:].tolist() for file in files)
    assert of_table == of_lines


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_message_that_is_a_map_with_a_key_twice_is_refused(tmp_path, load, suffix):
    column = pyarrow.array([[[("role", "user"), ("content", "A"), ("content", "B")]]], MESSAGES["maps"])
    file = write_records(tmp_path / f"a.{suffix}", pyarrow.table({"messages": column}))
    with pytest.raises(UserError, match=r"row 1: .*duplicate key was 'content'"):
        load(file, with_tokenizer=demo_tokenizer(EVERYTHING))


def test_json_of_a_column_that_cannot_be_parsed_is_a_bad_record_and_so_are_keys_that_json_lacks(tmp_path, load):
    texts = ['{"role": "user"', "[" * 100_000, *map(json.dumps, (ASKS, {"role": "assistant", "content": "no"}))]
    for text in texts[:2]:
        column = pyarrow.array([[text], texts[2:]]).cast(MESSAGES["the JSON of datasets"])
        file = write_records(tmp_path / "a.parquet", pyarrow.table({"messages": column}))
        packed = load(file, with_tokenizer=demo_tokenizer(EVERYTHING), skip_bad_records=True)
        assert packed.num_documents() == 1
    kind = pyarrow.struct({"role": pyarrow.string(), "day": pyarrow.map_(pyarrow.date32(), pyarrow.string())})
    days = {"day": [(datetime.date(2024, 7, 26), "Friday")]}
    kind = pyarrow.list_(pyarrow.struct([*kind, pyarrow.field("content", pyarrow.string())]))
    column = pyarrow.array([[{**ASKS, **days}, {"role": "assistant", "content": "no"}]], kind)
    file = write_records(tmp_path / "a.parquet", pyarrow.table({"messages": column}))
    with pytest.raises(UserError, match=r"row 1: keys must be str, .*, not datetime.date; make it"):
        load(file, with_tokenizer=demo_tokenizer(EVERYTHING))


@pytest.mark.parametrize("value", [decimal.Decimal("1.5"), datetime.date(2024, 7, 26)])
def test_an_argument_that_json_does_not_have_is_refused(tmp_path, load, value):
    """transformers renders its type."""
    file = write_records(tmp_path / "a.parquet", [call("add", a=value)])
    with pytest.raises(UserError, match=r"row 1: Object of type .* is not JSON serializable; make"):
        load(file, with_tokenizer=demo_tokenizer(EVERYTHING))


# ----------------------------------------------------------------------------------------------------------------------
# What the assistant writes, by characters

SPANS = {  # contents of the user and of the assistant in turn
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
    tokenizer = demo_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    change(tokenizer)
    messages = [
        says(role, part) for role, part in zip(itertools.cycle(["user", "assistant"]), SPANS[name], strict=False)
    ]
    more = chat("x", " yes")["messages"]  # to train on something
    file = write_records(tmp_path / "a.jsonl", [{"messages": messages + more}])
    tokens = load(file, with_tokenizer=tokenizer).tokens
    ids = tokens[:].tolist()
    parts = [*SPANS[name], *(["", "x", " yes"] if len(SPANS[name]) % 2 else ["x", " yes"])]
    assistants = np.concatenate([np.full(len(part.encode()), index % 2) for index, part in enumerate(parts)])
    ends = np.cumsum(bytes_of(tokenizer, ids))
    assert ends[-1] == len(assistants)
    expected = [int(assistants[start:end].any()) for start, end in itertools.pairwise([0, *ends])]
    assert tokens.loss_mask(0, len(tokens)).tolist() == [0, *expected[1:]]  # nothing precedes the first


def test_a_tokenizer_without_offsets_is_refused_before_a_conversation_is_read(tmp_path, load):
    python = ByT5Tokenizer()
    python.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    file = write_records(tmp_path / "a.jsonl", [{"messages": [ASKS]}])
    with pytest.raises(UserError, match=r"ByT5Tokenizer does not say which characters.*--chat-loss all") as raised:
        load(file, with_tokenizer=python)
    assert "skip-bad-records" not in str(raised.value)
    tokens = load(file, with_tokenizer=python, chat_loss="all").tokens
    assert tokens[:].tolist() == python(ASKS["content"], add_special_tokens=False)["input_ids"]


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
    "other fields": ({"token_type_ids": [0, 0, 0, 0], "label": 3, "length": 4, "losses": [2, 3]}, (IDS, None)),
    "a mask of special tokens": ({"special_tokens_mask": [1, 0, 0, 1], "pad_mask": [1, 1, 1, 1]}, (IDS, None)),
    "the ends of one": ({"seq_start_id": [0], "cu_seqlens": [0, 4]}, (IDS, None)),
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
    "lengths of several, in lists": ({"seq_lengths": [[1], [1, 2]]}, "seq_lengths has several documents; give each"),
    "starts of several": ({"seq_start_id": [0, 2]}, "seq_start_id has several documents; give each document a record"),
    "ends of several": ({"cu_seqlens": [0, 2, 4]}, "cu_seqlens has several documents; give each document a record"),
    "a mask of another name": ({"response_mask": [0, 0, 1, 1]}, "response_mask is .*, which is not read; .* loss_mask"),
    "a mask of another name that hides all": ({"response_mask": [0] * 4}, "response_mask is .*, which is not read"),
    "labels of another name that hide all": ({"answer_labels": [-100] * 4}, "answer_labels is .*, which is not read"),
    "weights": ({"labels": IDS, "loss_scale": [0.0, 1.0, 2.0, 2.0]}, r"loss_scale is \[0.0, .*, which is not read"),
    "positions anew": ({"position_ids": [0, 1, 0, 1]}, "position_ids do not count up from 0; give each document"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ROWS)
def test_labels_and_masks_beside_ids_are_those_of_the_row(tmp_path, load, name, suffix):
    beside, (ids, trained) = ROWS[name]
    file = write_records(tmp_path / f"a.{suffix}", [{"input_ids": IDS} | beside] * 3)
    data = load(file, vocab_size=16)
    assert data.tokens[:].tolist() == ids * 3
    assert data.tokens.has_loss_mask == (trained is not None)
    if trained:
        assert data.tokens.loss_mask(0, len(data.tokens)).tolist() == trained * 3
        assert data.document_mask and data.tokens.doc_ends.tolist() == [len(ids), 2 * len(ids), 3 * len(ids)]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", REFUSED)
def test_labels_and_masks_that_no_sequence_can_have_are_named(tmp_path, load, line_of, name, suffix):
    beside, fault = REFUSED[name]
    good = {"input_ids": IDS, "labels": IDS}
    file = write_records(tmp_path / f"a.{suffix}", [{"input_ids": IDS} | beside])
    with pytest.raises(UserError, match=rf"a\.{suffix}, (line|row) 1: {fault}"):
        load(file, vocab_size=16)
    both = write_records(tmp_path / "both.jsonl", [good, {"input_ids": IDS} | beside, good])
    options = {"vocab_size": 16, "skip_bad_records": True}
    assert len(load(both, **options).tokens.doc_ends) == 2
    assert line_of(both, **options).endswith(", left out: bad records 1")


def test_an_example_of_rows_is_named_by_the_number_of_its_document():
    """Blank lines and empty rows are not counted."""
    row = LabelledIds(np.array(IDS), np.ones(len(IDS), bool))
    assert describe_examples(iter([row]), RowEncoder(demo_tokenizer(), 1536)).startswith("--- document 1\n")


def test_rows_of_another_kind_than_the_first_are_bad_records(tmp_path, load):
    labelled, plain = {"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}
    for rows, fault in (
        ([labelled, plain], "line 2: token ids instead of token ids with labels"),
        ([plain, labelled], "line 2: token ids with labels instead of token ids"),
    ):
        with pytest.raises(UserError, match=fault):
            load(write_records(tmp_path / "a.jsonl", rows), vocab_size=16)


def test_rows_without_a_trained_token_are_left_out_and_a_corpus_of_such_rows_is_refused(tmp_path, load, line_of):
    untrained = {"input_ids": IDS, "labels": [-100] * 4}
    with pytest.raises(UserError, match=r"none of its 1 rows has a token to train on by its labels and masks"):
        load(write_records(tmp_path / "none.jsonl", [untrained]), vocab_size=16)
    file = write_records(tmp_path / "a.jsonl", [untrained, {"input_ids": IDS, "labels": IDS}])
    assert len(load(file, vocab_size=16).tokens.doc_ends) == 1
    assert line_of(file, vocab_size=16).endswith(", left out: rows without a trained token 1")


# ----------------------------------------------------------------------------------------------------------------------
# Sequences without a trained token

LONG_USER = [chat("word " * (90 if number % 4 == 3 else 3), "the ball " * 5) for number in range(40)]


@pytest.fixture
def template(tmp_path) -> list[str]:
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    return ["--chat-template", str(tmp_path / "chat.jinja")]


def test_the_header_counts_the_sequences_that_are_left_out_and_the_conversations_that_are_cut(
    tmp_path, arguments, template, device, capfd
):
    flags = [*arguments, "--dataset", write_records(tmp_path / "a.jsonl", LONG_USER), *template, "--batch-size", "1"]
    assert train([*flags, *words("--num-steps 1 --eval-interval 1 --no-final-checkpoint")], device) == 0
    out, err = capfd.readouterr()
    left_out = re.search(r"^data .*an epoch, left out (\d+) sequences? without a trained token$", out, re.M)
    assert left_out and int(left_out[1]) > 5
    assert "of them in the loss" in re.search(r"^eval data .*$", out, re.M)[0]
    assert re.search(r"^packing .* 38 documents in .*, \d+ longer than a sequence cut, ", out, re.M)
    assert "no special token is trained on" not in err


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
def test_sequences_that_are_left_out_are_those_without_a_trained_token(tmp_path, load, template, packing):
    file = write_records(tmp_path / "a.jsonl", LONG_USER)
    data = load(file, 16, chat_template=template[1], packing=packing)
    kept = [data[index] for index in range(len(data))]
    assert data.left_out > 0 and all(sequence.loss_mask.any() for sequence in kept)
    assert data.total_trained() == sum(sequence.loss_mask.sum() for sequence in kept)
    whole = data.tokens.loss_mask(0, len(data.tokens))
    if packing == "best-fit":  # each trained token but a document's first is a label once
        assert sum(sequence.loss_mask.sum() for sequence in kept) == whole.sum()
    else:
        cut = whole[1 : data.total_sequences * 16 + 1].reshape(-1, 16)
        assert [index for index, row in enumerate(cut) if row.any()] == data.kept.tolist()
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_run_without_a_sequence_to_train_on_is_refused(tmp_path, mistake):
    """Here a row of 100 tokens of which the last alone is trained on, in sequences of 64: none holds it."""
    row = {"input_ids": [5] * 100, "labels": [-100] * 99 + [5]}
    folder = tmp_path / "rows"
    folder.mkdir()
    write_records(folder / "train.jsonl", [row])
    flags = ["--dataset", str(folder), *words("--packing concatenate --sequence-length 64 --batch-size 1")]
    printed = "none of its 1 sequence has a token to train on; use a longer --sequence-length, or other data"
    assert printed in mistake(*flags)
    write_records(folder / "train.jsonl", [{"input_ids": [5] * 100, "labels": [5] * 100}] * 9)
    write_records(folder / "validation.jsonl", [row])
    refused = mistake(*flags, "--eval-interval", "1")
    assert printed in refused and "split 'validation'" in refused


# ----------------------------------------------------------------------------------------------------------------------
# Flags of conversations


@pytest.mark.parametrize("flags", [["--chat-loss", "all"], ["--chat-template"]])
def test_flags_of_conversations_without_conversations_are_refused(tmp_path, mistake, load, template, flags):
    given = template if flags == ["--chat-template"] else flags
    assert mistake(*given).startswith(f"{flags[0]}: only with conversations")
    assert "synthetic data have none; leave it out" in mistake("--dataset", "synthetic", *given)
    if given == template:
        with pytest.raises(UserError, match=r"--chat-template: only with conversations.* has text; leave it out"):
            load("demo", chat_template=template[1])


def test_a_prompt_is_measured_as_the_template_renders_it(tmp_path, mistake):
    """The model has 256 positions; the prompt alone is short."""
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content * 60 }}"))
    file = write_records(tmp_path / "a.jsonl", [chat(f"Who {number}?", "The fox.") for number in range(99)])
    flags = ["--dataset", file, "--chat-template", tmp_path / "chat.jinja", "--sample-prompt", "Who has the red ball?"]
    printed = r"--sample-tokens 9: more than .*'s 256 positions with the prompt's \d+ tokens; use fewer, or a"
    assert re.match(printed, mistake(*flags, *words("--sample-tokens 9 --sequence-length 64")))
