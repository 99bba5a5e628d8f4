"""Conversations: rendered by a chat template, trained on where the assistant speaks, and packed whole."""

import itertools
import json
import pathlib
import types
from collections import Counter

import multirank
import numpy as np
import pytest
import transformers
from conftest import ROOT, metrics_of, train, write_model
from transformers import AutoTokenizer

import utils
from harness.base.errors import UserError
from harness.data.chat import TODAY, ChatEncoder
from harness.data.packing import WholeDocumentDataset
from harness.data.schema import Conversation

TEMPLATE = """{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{{- 'A: ' }}
{%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{- message['role'] + ': ' + message['content'] + '\n' }}{% endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}"""


def says(role: str, content: str) -> dict:
    return {"role": role, "content": content}


CONVERSATIONS = [
    [says("user", "Where is the fox?"), says("assistant", "In the big red box.")],
    [says("system", "Be kind."), says("user", "Hi."), says("assistant", "Hello!"), says("user", "A ball?")],
    [says("user", "One"), says("assistant", "two"), says("user", "three"), says("assistant", "four and five")],
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: pathlib.Path, records: list) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def corpus(tmp_path) -> str:
    return write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS])


def load(tokenizer, tmp_path, source: str, seq_len: int = 40, **options):
    options = {"cache_dir": tmp_path / "cache", "shuffle": False} | options
    return utils.get_dataset(tokenizer, seq_len, dataset=source, **options)


def test_conversations_are_found_by_their_first_record_rendered_and_marked_as_transformers_does(
    tokenizer, corpus, tmp_path
):
    (tmp_path / "and.jsonl").touch()  # an empty file says nothing
    data = load(tokenizer, tmp_path, str(tmp_path / "*.jsonl"))
    assert isinstance(data, WholeDocumentDataset) and data.has_loss_mask and data.document_mask
    expected = tokenizer.apply_chat_template(CONVERSATIONS, return_dict=True, return_assistant_tokens_mask=True)
    assert data.tokens[:].tolist() == list(itertools.chain(*expected["input_ids"]))
    assert data.tokens.doc_ends.tolist() == np.cumsum([len(ids) for ids in expected["input_ids"]]).tolist()
    assert data.tokens.trained(0, len(data.tokens)).tolist() == list(itertools.chain(*expected["assistant_masks"]))


BAD = [
    ([], "instead of a list of messages"),
    ([says("user", "a"), {"role": "assistant"}], r"messages\[1\] is .* instead of an object with role and content"),
    ([says("user", "\ud800")], "half a surrogate pair"),
]


@pytest.mark.parametrize("value, fault", BAD)
def test_a_bad_conversation_is_named(tokenizer, tmp_path, value, fault):
    file = write(tmp_path / "chat.jsonl", [{"messages": CONVERSATIONS[0]}, {"messages": value}])
    with pytest.raises(UserError, match=f"chat.jsonl, line 2: .*{fault}"):
        load(tokenizer, tmp_path, file)


def test_what_the_template_refuses_is_a_bad_record_and_the_others_are_kept(tokenizer, line_of, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{%- if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    )
    source = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    with pytest.raises(UserError, match=r"line 2.*the chat template fails, user first"):
        load(tokenizer, tmp_path, source, chat_template=str(strict))
    options = {"chat_template": str(strict), "skip_bad_records": True}
    assert len(load(tokenizer, tmp_path, source, **options).tokens.doc_ends) == 2
    assert line_of(source, **options).endswith(", left out: bad records 1")


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_record_reach_the_template(tokenizer, tmp_path, as_text):
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    given = json.dumps(tools) if as_text else tools
    records = [{"messages": CONVERSATIONS[0], "tools": given}, {"messages": CONVERSATIONS[1]}]
    data = load(tokenizer, tmp_path, write(tmp_path / "chat.jsonl", records))
    texts = [tokenizer.decode(part) for part in np.split(data.tokens[:], data.tokens.doc_ends[:-1])]
    assert "look" in texts[0] and "look" not in texts[1]


def test_without_a_template_the_run_is_refused_with_what_to_do(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    with pytest.raises(UserError, match=r"no chat template.*--chat-template FILE"):
        load(tokenizer, tmp_path, corpus)


def test_a_template_that_marks_nothing_is_refused_and_one_conversation_without_a_mark_is_left_out(
    tokenizer, line_of, corpus, tmp_path
):
    nobody = [{"messages": [says("user", "Is anybody there?")]}]
    with pytest.raises(
        UserError, match=r"none of its 1 conversation has a turn .* that the template marks.*--chat-loss all"
    ):
        load(tokenizer, tmp_path, write(tmp_path / "nobody.jsonl", nobody))
    both = write(tmp_path / "both.jsonl", [*nobody, {"messages": CONVERSATIONS[0]}])
    assert len(load(tokenizer, tmp_path, both).tokens.doc_ends) == 1
    assert line_of(both).endswith(", left out: conversations without a trained token 1")


@pytest.mark.parametrize(
    "begin",
    [
        "{{- 'Today is ' + strftime_now('%d %b %Y') }}",
        "\n{% macro now() %}{{ strftime_now('%F') ~ ' ' }}{% endmacro %}  {{ now() }}\n",
    ],
)
def test_a_template_that_prints_the_date_gives_the_same_tokens_each_day(tokenizer, monkeypatch, begin):
    """Those that it gives on that day, white space included."""
    messages, template = CONVERSATIONS[0], begin + TEMPLATE
    chat = ChatEncoder(tokenizer, len(tokenizer), template, "assistant")
    tokens = chat.encode([Conversation(messages)], Counter()).tokens
    clock = types.SimpleNamespace(now=lambda: TODAY)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)
    that_day = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
    assert tokens.tolist() == that_day["input_ids"]


def test_the_share_of_microbatches_in_the_loss_is_that_of_their_trained_tokens(tokenizer, tmp_path, device, capfd):
    """One microbatch of 4 conversations, or 4 of one: the same losses, in training and in evaluation."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    records = [
        {"messages": [says("user", "word " * (60 - 9 * number)), says("assistant", "ball " * (3 + 9 * number))]}
        for number in range(4)
    ]
    for name in ("train", "validation"):
        write(tmp_path / f"{name}.jsonl", records)
    model = write_model(tmp_path / "model", "llama", **(multirank.SIZES | {"max_position_embeddings": 512}))
    flags = ["--dataset", tmp_path / "*.jsonl", "--model", model, "--tokenizer", tmp_path / "tokenizer"]
    flags += ["--sequence-length", "96", "--num-steps", "3", "--log-interval", "1", "--eval-interval", "1"]
    flags += ["--precision", "fp32", "--num-workers", "0", "--cache-dir", tmp_path / "cache", "--output-dir", tmp_path]
    lengths = [len(ids) for ids in tokenizer.apply_chat_template([r["messages"] for r in records])["input_ids"]]
    assert max(lengths) < 97 and 2 * min(lengths) > 97  # so that each has a window of its own
    seen = []
    for batch_size, microbatches in ((4, 1), (1, 4)):
        sizes = ["--batch-size", batch_size, "--gradient-accumulation-steps", microbatches]
        assert train([*flags, *sizes, "--run-name", str(microbatches), "--no-final-checkpoint"], device) == 0
        lines = [line for line in metrics_of(tmp_path / str(microbatches)) if not line.get("final")]
        seen.append([(line["loss"], line["eval_loss"]) for line in lines])
        assert lines[-1]["tokens_seen"] == 3 * sum(min(length, 96) for length in lengths)  # without the padding
    np.testing.assert_allclose(seen[0], seen[1], atol=2e-6)
    assert seen[0][2][0] == pytest.approx(seen[0][1][1], abs=2e-6)  # the corpora are alike: a step's loss is the last's
    assert "[[ball ball" in capfd.readouterr().out.replace("[[ ball", "[[ball")  # a conversation, and its marks
