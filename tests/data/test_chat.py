"""Conversations: rendered by a chat template, trained on where the assistant speaks, and packed whole."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import types

import datasets
import multirank
import numpy as np
import pytest
import transformers
from conftest import ROOT, metrics_of, one_source, parse, start, train, write_model
from transformers import AutoConfig, AutoTokenizer

import utils
from harness.base import UserError
from harness.data import corpora, loading
from harness.data.batches import RankBatches
from harness.data.best_fit import BinnedDataset
from harness.data.chat import TODAY, ChatFormat, describe_example, has_conversations
from harness.data.hub_rows import find_features
from harness.data.records import DEFAULT_FIELD, BadRecord, Conversation, check_value
from harness.data.windows import IGNORE_INDEX, create_collate_fn
from harness.flags import Settings

TEMPLATE = """{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{{- 'A: ' }}
{%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{- message['role'] + ': ' + message['content'] + '\n' }}{% endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}"""
WITHOUT_MASK = TEMPLATE.replace("{%- generation %}", "").replace("{% endgeneration %}", "")


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
    return utils.get_dataset(tokenizer, seq_len, dataset=source, cache_dir=tmp_path / "cache", **options)


def trained_texts(data, tokenizer) -> list[str]:
    """The stretches of each conversation that are trained on, as text."""
    mask, ends = np.asarray(data.trained[0 : len(data.tokens)]), data.document_ends
    found = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        tokens, of_document = data.tokens[first:last], mask[first:last].astype(bool)
        cuts = np.flatnonzero(np.diff(of_document)) + 1
        for stretch, kept in zip(np.split(tokens, cuts), np.split(of_document, cuts), strict=True):
            if kept[0]:
                found.append(tokenizer.decode(stretch))
    return found


def test_conversations_are_found_by_their_first_record_and_the_assistant_is_trained_on(tokenizer, corpus, tmp_path):
    data = load(tokenizer, tmp_path, corpus)
    assert isinstance(data, BinnedDataset) and data.is_chat and data.document_mask
    expected = ["In the big red box.", "Hello!", "two", "four and five"]
    assert [text.strip() for text in trained_texts(data, tokenizer)] == [f"{text}<|endoftext|>" for text in expected]
    tokens = tokenizer.apply_chat_template(CONVERSATIONS, return_dict=True)["input_ids"]
    assert data.tokens[0 : len(data.tokens)].tolist() == list(itertools.chain(*tokens))
    assert data.document_ends.tolist() == np.cumsum([len(ids) for ids in tokens]).tolist()


def test_the_mask_is_that_of_transformers(tokenizer, corpus, tmp_path):
    encoded = tokenizer.apply_chat_template(CONVERSATIONS, return_dict=True, return_assistant_tokens_mask=True)
    data = load(tokenizer, tmp_path, corpus, packing="concatenate")
    assert np.asarray(data.trained).tolist() == list(itertools.chain(*encoded["assistant_masks"]))


def test_all_tokens_but_the_first_of_each_conversation_are_trained_on_if_asked(tokenizer, corpus, tmp_path):
    data = load(tokenizer, tmp_path, corpus, chat_loss="all")
    assert int(np.asarray(data.trained).sum()) == len(data.tokens) - len(CONVERSATIONS)
    assert len(list((tmp_path / "cache").glob("*.mask"))) == 1
    load(tokenizer, tmp_path, corpus)
    assert len(list((tmp_path / "cache").glob("*.mask"))) == 2


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_conversation_that_is_cut_keeps_its_mask(tokenizer, corpus, tmp_path, packing):
    whole = load(tokenizer, tmp_path, corpus, 200)
    mask, tokens = np.asarray(whole.trained), whole.tokens[0 : len(whole.tokens)]
    cut = load(tokenizer, tmp_path, corpus, 7, packing=packing)
    labels = [cut[index].tokens[1:][cut[index].trained] for index in range(len(cut))]
    seen = sorted(np.concatenate(labels).tolist())
    reached = len(cut) * 7 + 1 if packing == "concatenate" else len(tokens)
    assert seen == sorted(tokens[:reached][mask[:reached].astype(bool)].tolist())
    if packing == "concatenate":
        assert [len(one) for one in labels] == [cut.trained_tokens(index) for index in range(len(cut))]


def test_windows_say_where_conversations_begin_unless_the_mask_is_off(tokenizer, corpus, tmp_path):
    for packing in ("concatenate", "best-fit"):
        data = load(tokenizer, tmp_path, corpus, 60, packing=packing)
        assert data[0].starts is not None
        assert load(tokenizer, tmp_path, corpus, 60, packing=packing, document_mask=False)[0].starts is None


def test_text_stays_text_and_its_cache_keeps_its_name(tokenizer, tmp_path):
    records = [{"text": "Once upon a time there was a fox. " * 9, "messages": CONVERSATIONS[0]}]
    data = load(tokenizer, tmp_path, write(tmp_path / "text.jsonl", records))
    assert not data.is_chat and type(data) is utils.PackedDataset and isinstance(data[0], np.ndarray)
    assert [path.suffix for path in (tmp_path / "cache").glob("tokens-*")].count(".mask") == 0
    fields = list(json.loads(next((tmp_path / "cache").glob("*.json")).read_text()))
    assert sorted(fields) == ["bytes", "counts", "sha256"]


def test_token_ids_come_before_messages(tokenizer, tmp_path):
    records = [{"input_ids": list(range(1, 60)), "messages": CONVERSATIONS[0]}]
    assert not load(tokenizer, tmp_path, write(tmp_path / "ids.jsonl", records)).is_chat


@pytest.mark.parametrize("first", ["", "{broken", '{"messages": []}'])
def test_a_bad_first_record_does_not_hide_that_it_is_chat(tokenizer, tmp_path, first):
    file = tmp_path / "chat.jsonl"
    file.write_text(first + "\n" + json.dumps({"messages": CONVERSATIONS[0]}) + "\n")
    data = load(tokenizer, tmp_path, str(file), skip_bad_records=True)
    assert data.is_chat and len(data.document_ends) == 1


BAD = [
    ("hello", "instead of a list of messages"),
    ([], "instead of a list of messages"),
    (["hello"], r'messages\[0\] is "hello" instead of an object'),
    ([{"content": "hello"}], r"messages\[0\] has no role"),
    ([says("user", "a"), {"role": "assistant"}], r"messages\[1\] has no content"),
    ([{"role": "user", "content": 5}], r"messages\[0\] has 5 instead of text"),
    ([says("user", "\ud800")], "half a surrogate pair"),
]


@pytest.mark.parametrize("value, fault", BAD)
def test_a_bad_conversation_is_named(tokenizer, tmp_path, value, fault):
    if not isinstance(value, str):
        assert re.search(fault, check_value(value, "messages", 1).fault)
    file = write(tmp_path / "chat.jsonl", [{"messages": CONVERSATIONS[0]}, {"messages": value}])
    corpus = {"tokenizer": tokenizer, "seq_len": 8, "dataset": file}
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: ") as raised:
        corpora.read_cached(utils.get_dataset, corpus, "train", tmp_path / "cache")
    assert re.search(fault, str(raised.value))
    if not isinstance(value, str):
        assert "1 of 2 lines are bad" in str(raised.value)


def test_a_call_of_a_tool_needs_no_content_and_a_check_gives_the_conversation():
    calls = [says("user", "x"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    good = check_value(calls, "messages", 3)
    assert isinstance(good, Conversation) and good.number == 3 and len(good) > 0
    assert isinstance(check_value(["x"], "messages", 1), BadRecord)


def test_what_the_template_refuses_is_a_bad_record_and_the_others_go_on(tokenizer, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{%- if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    )
    source = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    with pytest.raises(UserError, match=r"line 2.*the chat template fails, user first"):
        load(tokenizer, tmp_path, source, chat_template=str(strict))
    data = load(tokenizer, tmp_path, source, chat_template=str(strict), skip_bad_records=True)
    assert (len(data.document_ends), data.counts["bad records"]) == (2, 1)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_record_reach_the_template(tokenizer, tmp_path, as_text):
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    given = json.dumps(tools) if as_text else tools
    records = [{"messages": CONVERSATIONS[0], "tools": given}, {"messages": CONVERSATIONS[1]}]
    data = load(tokenizer, tmp_path, write(tmp_path / "chat.jsonl", records))
    texts = [tokenizer.decode(part) for part in np.split(data.tokens[0 : len(data.tokens)], data.document_ends[:-1])]
    assert "look" in texts[0] and "look" not in texts[1]


def test_a_parquet_file_gives_what_a_jsonl_file_does(tokenizer, corpus, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"messages": CONVERSATIONS}), tmp_path / "chat.parquet")
    one, other = (load(tokenizer, tmp_path, str(tmp_path / name)) for name in ("chat.jsonl", "chat.parquet"))
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("template, says", [(None, "no chat template"), (WITHOUT_MASK, "has no {% generation %}")])
def test_where_no_mask_comes_the_run_is_refused_with_what_to_do(corpus, tmp_path, template, says):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=re.escape(says)) as raised:
        load(tokenizer, tmp_path, corpus)
    assert "--chat-template" in str(raised.value)
    if template:
        assert load(tokenizer, tmp_path, corpus, chat_loss="all").is_chat


def test_a_template_that_marks_nothing_is_refused_and_one_conversation_without_a_mark_is_left_out(
    tokenizer, corpus, tmp_path
):
    nobody = [{"messages": [says("user", "Is anybody there?")]}]
    with pytest.raises(UserError, match=r"marks no token of any of the 1 conversations.*--chat-loss all"):
        load(tokenizer, tmp_path, write(tmp_path / "nobody.jsonl", nobody))
    both = write(tmp_path / "both.jsonl", [*nobody, {"messages": CONVERSATIONS[0]}])
    data = load(tokenizer, tmp_path, both)
    assert len(data.document_ends) == 1
    assert "conversations without a trained token 1" in corpora.describe_cache(data)


def test_another_template_makes_another_cache_and_the_same_one_is_read_again(tokenizer, corpus, tmp_path):
    assert "seconds" in load(tokenizer, tmp_path, corpus).counts
    assert "seconds" not in load(tokenizer, tmp_path, corpus).counts
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace("A: ", "B: "))
    assert "seconds" in load(tokenizer, tmp_path, corpus, chat_template=str(tmp_path / "other.jinja")).counts


@pytest.mark.parametrize("suffix", ["bin", "mask", "ends"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_of_the_cache_is_made_again(tokenizer, corpus, tmp_path, suffix, damage):
    fingerprint = load(tokenizer, tmp_path, corpus).fingerprint()
    (file,) = (tmp_path / "cache").glob(f"tokens-*.{suffix}")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    again = load(tokenizer, tmp_path, corpus, check_whole=True)
    assert again.fingerprint() == fingerprint and "seconds" in again.counts


def open_data(tokenizer, tmp_path, source: str, *flags: str, manifest: dict | None = None):
    """(settings, data) as the program has them."""
    settings = parse(["--dataset", source, "--cache-dir", tmp_path / "cache", "--sequence-length", 40, *flags])
    settings = loading.mask_conversations(settings, manifest)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer))
    return settings, loading.load_data(settings, tokenizer, config, utils.get_dataset, manifest)[0]


@pytest.mark.parametrize(
    "flags, rules, is_chat",
    [
        ([], None, False),
        (["--text-field", "text"], None, True),
        ([], {"ids_first": False}, True),  # of a run that was told
        (["--text-field", "text"], {}, False),  # of a version in which the flag was ignored
    ],
)
def test_a_resumed_run_reads_conversations_where_its_checkpoint_did(device, tokenizer, tmp_path, flags, rules, is_chat):
    records = [{"input_ids": [5, 6, 7] * 9, "messages": messages} for messages in CONVERSATIONS * 9]
    source, manifest = write(tmp_path / "data.jsonl", records), None
    if rules is not None:
        flags_before = {"dataset": source, "batch_size": 1, "gradient_accumulation_steps": 1}
        manifest = {"flags": flags_before, "world_size": 1, "step": 0, "samples": 0, "held_out": None} | rules
    settings, data = open_data(tokenizer, tmp_path, source, *flags, manifest=manifest)
    (train,) = data.sources.values()
    assert train.is_chat == bool(settings.document_mask) == is_chat


def test_a_run_that_reads_no_data_does_not_ask_whether_it_is_chat(tmp_path):
    """An export or a story needs no data set, and no network to look into it."""
    settings = dataclasses.replace(Settings(), dataset=str(tmp_path / "gone.jsonl"), num_steps=0, eval_interval=0)
    assert loading.mask_conversations(settings) == settings


@pytest.fixture(scope="module")
def without_end():
    """A tokenizer without an end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE.replace("eos_token", "'!'"), None
    assert tokenizer.eos_token_id is None
    return tokenizer


def test_conversations_need_no_end_of_text_token(device, without_end, corpus, tmp_path):
    settings, data = open_data(without_end, tmp_path, corpus, "--batch-size", "1")
    assert settings.document_mask
    assert data.end_of_text is None
    window, (source, index) = data[0], data.locate(0)
    begins = [start for start, _, _ in source.documents(index)]
    assert window.starts.tolist() == [*begins, source.real_tokens(index)]  # and the padding
    positions = create_collate_fn(data.end_of_text)([window])["position_ids"][0]
    assert (positions == 0).nonzero().ravel().tolist() == window.starts.tolist()


IDS = [{"input_ids": [5, 6, 7] * 9}] * 20


@pytest.mark.parametrize(
    "records, flags, says",
    [
        ([{"text": "A fox. " * 20}] * 20, [], "--tokenizer .*: it has no end-of-text token"),
        (IDS, ["--document-mask"], "--document-mask: .* has no end-of-text token .*, and data does not say"),
        (IDS, ["--packing", "best-fit"], "--packing best-fit: .* has no end-of-text token .*data.jsonl does not say"),
    ],
)
def test_where_nothing_tells_the_ends_of_documents_the_run_is_refused(
    device, without_end, tmp_path, records, flags, says
):
    source = write(tmp_path / "data.jsonl", records)
    with pytest.raises(UserError, match=says):
        open_data(without_end, tmp_path, source, *flags)


def test_a_template_that_is_not_there_is_named(tokenizer, corpus, tmp_path):
    with pytest.raises(UserError, match=r"--chat-template .*none.jinja: cannot be read"):
        load(tokenizer, tmp_path, corpus, chat_template=str(tmp_path / "none.jinja"))


def test_an_example_shows_masked_text_dim_and_without_colours_marks_what_is_trained_on(tokenizer, corpus, tmp_path):
    data = load(tokenizer, tmp_path, corpus, 60)
    index = next(i for i in range(len(data)) if "box" in tokenizer.decode(data[i].tokens))
    plain = describe_example(data[index], tokenizer, colours=False, real_tokens=data.real_tokens(index))
    assert re.search(r"user: Where is the fox\?\s+A:\s*\[\[\s*In the big red box\.<\|endoftext\|>\]\]", plain)
    dim = describe_example(data[index], tokenizer, colours=True, real_tokens=data.real_tokens(index))
    assert re.search("\033\\[2m[^\033]*Where is the fox[^\033]*\033\\[0m\\s*In the big red box", dim)


def test_a_run_says_how_much_it_trains_on_and_only_training_shows_an_example(tokenizer, corpus, tmp_path):
    data = load(tokenizer, tmp_path, corpus)
    share = 100 * np.asarray(data.trained).mean()
    lines = corpora.describe_packing(data, tokenizer, None, with_example=True)
    assert list(lines) == ["packing", "chat", "example"]
    assert lines["chat"] == f"3 conversations, trained on {share:.1f} % of their tokens"
    assert "example" not in corpora.describe_packing(data, tokenizer, None, with_example=False)


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_slice_counts_its_own_conversations(tokenizer, corpus, tmp_path, packing):
    data = load(tokenizer, tmp_path, corpus, 7, split="train[:2]", packing=packing)
    lines = corpora.describe_packing(data, tokenizer, None, with_example=False)
    assert lines["chat"].startswith("2 conversations, trained on ")
    trained = sum(data[index].trained.sum() for index in range(len(data)))
    assert data.total_trained() == trained
    assert lines["chat"].endswith(f" {100 * trained / len(data.tokens):.1f} % of their tokens")


def test_of_several_sources_the_lines_name_theirs(tokenizer, corpus, tmp_path, device, capfd):
    other = write(tmp_path / "other.jsonl", [{"messages": messages} for messages in CONVERSATIONS[:2]])
    flags = ["--dataset", f"a={corpus}:1", f"b={other}:1", "--cache-dir", tmp_path / "cache", "--batch-size", "1"]
    settings = loading.mask_conversations(parse([*flags, "--sequence-length", 40]))
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer))
    loading.load_data(settings, tokenizer, config, utils.get_dataset)
    lines = capfd.readouterr().out.splitlines()
    assert [line[11:13] for line in lines if line.startswith(("data", "packing", "chat"))] == ["a:"] * 3 + ["b:"] * 3


@pytest.mark.parametrize(
    "begin",
    [
        "{{- 'Today is ' + strftime_now('%d %b %Y') }}",
        "  {% if strftime_now is defined %}{% set form = '%A, %-d/%-m/%y' %}{{ strftime_now(form) }}{% endif %}\n",
        "\n{% macro now() %}{{ strftime_now('%F') ~ ' ' }}{% endmacro %}  {{ now() }}\n",
    ],
)
def test_a_template_that_prints_the_date_gives_the_same_tokens_each_day(tokenizer, monkeypatch, begin):
    """Those that it gives on that day, white space included."""
    messages, template = CONVERSATIONS[0], begin + TEMPLATE
    (example,) = ChatFormat(tokenizer, template).encode([Conversation(messages, 1)])
    clock = types.SimpleNamespace(now=lambda: TODAY)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)
    that_day = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
    assert example.tokens.tolist() == that_day["input_ids"]
    assert ChatFormat(tokenizer, template).identity() != [template, *ChatFormat(tokenizer).identity()[1:]]


def test_a_run_says_that_the_date_of_its_template_is_always_the_same(tokenizer, corpus, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text("{{- strftime_now('%F') }}" + TEMPLATE)
    data = load(tokenizer, tmp_path, corpus, chat_template=str(template))
    lines = corpora.describe_packing(data, tokenizer, str(template), with_example=False)
    assert lines["chat"].endswith("; their template prints today's date, which is 2024-07-26 every day")


def feature_sets():
    messages = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
    text, ids = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    return [
        ({"messages": messages, "source": text}, True),
        ({"messages": text}, False),
        ({"messages": messages, "text": text}, False),
        ({"messages": messages, "input_ids": ids}, False),
        ({"text": text}, False),
    ]


@pytest.mark.parametrize("features, is_chat", feature_sets())
def test_whether_a_hub_data_set_is_chat_is_told_by_its_columns_without_its_rows(monkeypatch, features, is_chat):
    builder = types.SimpleNamespace(info=types.SimpleNamespace(features=datasets.Features(features)))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *of: builder)
    monkeypatch.setattr(corpora, "load_documents", None)  # which would download it
    settings = dataclasses.replace(Settings(), dataset="someone/chat")
    assert bool(loading.mask_conversations(settings).document_mask) == is_chat


@pytest.mark.parametrize("card", [True, False])
def test_the_columns_of_a_data_set_are_those_of_its_card_and_else_not_known(tmp_path, card):
    write(tmp_path / "train.jsonl", [{"messages": CONVERSATIONS[0]}])
    if card:
        parts = "list:\n    - {name: role, dtype: string}\n    - {name: content, dtype: string}"
        info = f"dataset_info:\n  features:\n  - name: messages\n    {parts}"
        (tmp_path / "README.md").write_text(f"---\n{info}\n---\n")
    features = find_features(str(tmp_path))
    assert (features is not None) == card
    if card:
        assert has_conversations(features, DEFAULT_FIELD)


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
    np.testing.assert_allclose(seen[0], seen[1], atol=2e-6)
    assert seen[0][2][0] == pytest.approx(seen[0][1][1], abs=2e-6)  # the corpora are alike: a step's loss is the last's
    header = capfd.readouterr().out
    assert "[[ball ball" in header.replace("[[ ball", "[[ball")
    trained = sum(len(tokenizer(f" {r['messages'][1]['content']}<|endoftext|>")["input_ids"]) for r in records)
    found = re.search(r"held out +validation: ([\d,]+) tokens, ([\d,]+) of them in the loss", header)
    assert int(found[1]) == sum(min(length, 96) for length in lengths) and abs(int(found[2]) - trained) <= len(records)
    assert "4 sequences x 96 = 384 tokens a step with padding, 3 steps" in re.sub(r"\s+", " ", header)


@pytest.mark.parametrize("world, batch_size, accumulation", [(1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_each_trained_token_of_a_global_batch_weighs_the_same_on_any_ranks(
    tokenizer, tmp_path, world, batch_size, accumulation
):
    """The loss of a step is the mean over ranks of the sum of each microbatch's mean loss by its divisor."""
    records = [{"messages": messages} for messages in CONVERSATIONS * 5]
    data = one_source(load(tokenizer, tmp_path, write(tmp_path / "chat.jsonl", records), 12), seed=0)
    ranks = [iter(RankBatches(data, batch_size, accumulation, rank, world)) for rank in range(world)]
    counts = set()
    for _ in range(3):
        batches = [next(rank) for rank in ranks for _ in range(accumulation)]
        trained = [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches]
        counts.update(trained)
        for batch, of_batch in zip(batches, trained, strict=True):
            if of_batch:
                assert 1 / (of_batch * batch["loss_divisor"] * world) == pytest.approx(1 / sum(trained))
    assert len(counts) > 1


def test_conversations_are_not_streamed(corpus, mistake):
    said = mistake("--dataset", corpus, "--streaming", "--sequence-length", "16")
    assert said.endswith("holds conversations, whose masks are in the token cache; leave out --streaming")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the package trl")
def test_masks_and_losses_are_those_of_trl(tmp_path):
    process = start([sys.executable, ROOT / "benchmarks" / "chat_proof.py", "--out", tmp_path / "chat.json"])
    assert process.returncode == 0, process.stderr
    found = json.loads((tmp_path / "chat.json").read_text())
    assert found["same tokens and masks"]
    assert len(set(found["trained tokens"])) > 1
    for layout in found["layouts"].values():
        assert layout["largest difference"] < 1e-6
