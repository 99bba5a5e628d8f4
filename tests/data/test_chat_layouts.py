"""Chats as they come: ShareGPT, prompt and completion, Alpaca, in each kind of file; what is read of them, and what is
refused."""

import gzip
import itertools
import json
import pathlib

import multirank
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from conftest import ROOT, train, write_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import utils
from harness.base.errors import UserError

CHATML = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}{{- message.tool_calls | tojson }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def says(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def printed(speaker: str, value: str, **more) -> dict:
    return {"from": speaker, "value": value, **more}


def called(name: str, arguments: dict) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return says("assistant", "", tool_calls=[call])


SYSTEM, TOOLS = says("system", "Be kind."), [{"name": "add"}]
TURN = [says("user", "Hi"), says("assistant", "Hello!")]
CALL = json.dumps({"name": "add", "arguments": {"a": 1}})
READ = {  # the records, and each as a conversation of `messages`; what is trained on of it, the completions alone
    "conversations": [
        ({"conversations": [printed("human", "Hi"), printed("gpt", "Hello!")]}, TURN),
        ({"conversations": [printed("user", "Hi"), printed("Assistant", "Hello!")]}, TURN),
        (
            {"conversations": [printed("human", "Hi", weight=0), printed("chatgpt", "Hello!", weight=1)], "id": "x"},
            TURN,
        ),
        (
            {"conversations": [printed("system", "Be kind."), printed("human", "Hi"), printed("bing", "Hello!")]},
            [SYSTEM, *TURN],
        ),
        ({"conversations": [printed("human", "Hi"), printed("gpt", "Hello!")], "system": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": TURN}, TURN),
        (
            {
                "conversations": [
                    printed("human", "1 + 1?"),
                    printed("function_call", CALL),
                    printed("observation", "2"),
                    printed("gpt", "It is 2."),
                ],
                "tools": json.dumps(TOOLS),
            },
            [says("user", "1 + 1?"), called("add", {"a": 1}), says("tool", "2"), says("assistant", "It is 2.")],
        ),
        (
            {"conversations": [printed("human", "a"), printed("human", "b"), printed("gpt", "c")]},
            [says("user", "a"), says("user", "b"), says("assistant", "c")],
        ),
    ],
    "other names of system": [
        ({"conversations": TURN, "system_prompt": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": [SYSTEM, *TURN], "system_message": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": TURN, "functions": [], "system_prompt": ""}, TURN),
    ],
    "conversation": [({"conversation": TURN, "model": "m"}, TURN)],
    "messages": [({"messages": TURN, "prompt": "x", "completion": "y", "text": "z", "input_ids": [1]}, TURN)],
    "completions of text": [
        ({"prompt": "Hi", "completion": "Hello!"}, TURN),
        ({"prompt": "Hi", "completion": "Hello!", "label": True, "text": "Hi Hello!"}, TURN),
    ],
    "completions of messages": [
        ({"prompt": TURN[:1], "completion": TURN[1:]}, TURN),
        ({"prompt": [SYSTEM, *TURN, TURN[0]], "completion": TURN[1:]}, [SYSTEM, *TURN, *TURN]),
    ],
    "alpaca": [
        ({"instruction": "Hi", "input": "", "output": "Hello!", "text": "### Instruction: Hi"}, TURN),
        ({"instruction": "Hi", "output": "Hello!"}, TURN),
        ({"instruction": "Hi", "input": None, "output": "Hello!", "system": "Be kind."}, [SYSTEM, *TURN]),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, [says("user", "Add\n\n1, 2"), says("assistant", "3")]),
        ({"instruction": "Hi", "output": "Hello!", "history": [["Hi", "Hello!"]]}, [*TURN, *TURN]),
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.chat_template = CHATML
    return tokenizer


def load(tokenizer, tmp_path, source, **options):
    """The tokens of a source with their mask, as flat lists."""
    options = {"cache_dir": tmp_path / "cache", "shuffle": False} | options
    tokens = utils.get_dataset(tokenizer, 40, dataset=str(source), **options).tokens
    return tokens[:].tolist(), tokens.trained(0, len(tokens)).tolist(), tokens.doc_ends.tolist()


def write_lines(path: pathlib.Path, records: list) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: pathlib.Path, records: list) -> pathlib.Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(with_all_fields(records)), path)
    return path


def with_all_fields(records: list) -> list:
    """Records of which the first has all names, as `from_pylist` takes its columns from it."""
    names = dict.fromkeys(itertools.chain.from_iterable(records))
    return [{name: record.get(name) for name in names} for record in records]


def write_as(suffix: str, folder: pathlib.Path, records: list) -> pathlib.Path:
    path = folder / f"chats{suffix}"
    if suffix == ".parquet":
        return write_parquet(path, records)
    if suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
        return path
    lines = write_lines(folder / "chats.jsonl", records).read_bytes()
    if suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif suffix == ".jsonl.zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    elif suffix == ".lines.json":
        path.write_bytes(lines)
    if suffix != ".jsonl":
        (folder / "chats.jsonl").unlink()
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".lines.json", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("layout", READ)
def test_a_layout_gives_the_tokens_and_the_mask_of_its_messages_from_each_kind_of_file(
    tokenizer, tmp_path, layout, suffix
):
    records, conversations = zip(*READ[layout], strict=True)
    if layout == "conversations" and suffix == ".parquet":  # fields of one type in a column
        records, conversations = records[:5], conversations[:5]
    tools = [{"tools": TOOLS} if "tools" in record else {} for record in records]
    as_messages = [{"messages": messages} | more for messages, more in zip(conversations, tools, strict=True)]
    expected = load(tokenizer, tmp_path, write_lines(tmp_path / "messages.jsonl", as_messages))
    (tmp_path / "chats").mkdir()
    found = load(tokenizer, tmp_path, write_as(suffix, tmp_path / "chats", list(records)))
    assert found[0] == expected[0] and found[2] == expected[2]
    if layout != "completions of messages":
        assert found[1] == expected[1] and any(found[1])
        return
    begin, end = expected[2]
    trained = [token for token, is_trained in zip(found[0][begin:end], found[1][begin:end], strict=True) if is_trained]
    assert tokenizer.decode(trained) == "Hello!<|im_end|>\n"


def refuse(tokenizer, tmp_path, records: list, *words: str, suffix: str = ".jsonl", **options) -> None:
    with pytest.raises(UserError) as raised:
        load(tokenizer, tmp_path, write_as(suffix, tmp_path, records), **options)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


GOOD = {"conversations": [printed("human", "Hi"), printed("gpt", "Hello!")]}
REFUSED = {
    "no list": ([{"conversations": {"from": ["human"]}}], "instead of a list of messages"),
    "empty": ([GOOD, {"conversations": []}], "line 2: [] instead of a list of messages"),
    "strings": ([{"conversations": ["Hi", "Hello!"]}], 'conversations[0] is "Hi" instead of an object with role and'),
    "no value": ([{"conversations": [{"from": "human"}]}], "conversations[0] is"),
    "another speaker": (
        [{"conversations": [printed("narrator", "Hi")]}],
        'from "narrator" instead of one of human, user,',
    ),
    "a call that is no JSON": (
        [{"conversations": [printed("function_call", "add(1)")]}],
        'JSON such as {"name": "add"',
    ),
    "a turn not to learn": (
        [{"conversations": [printed("human", "Hi"), printed("gpt", "Hello!", weight=0)]}],
        "conversations[1] has weight 0",
    ),
    **{
        f"a turn with {field} {value!r}": (
            [{"messages": [TURN[0], says("assistant", "Hello!", **{field: value})]}],
            f"messages[1] has {field} {json.dumps(value)}, but all turns of the assistant are trained on",
        )
        for field, value in (
            ("loss", False),
            ("training", 0),
            ("train", "false"),
            ("trainable", False),
            ("weight", 0.5),
            ("loss_scale", 0.0),
            ("mask", 1),
            ("mask", 0),
        )
    },
    **{
        f"a label {value!r}": ([{"prompt": "Hi", "completion": "No!", "label": value}], f"label is {json.dumps(value)}")
        for value in (0, "False")
    },
    "a system of another name": ([GOOD | {"system_prompt": ["a"]}], 'system_prompt is ["a"] instead of text'),
    "functions": ([GOOD | {"functions": TOOLS}], "functions is", "name them tools"),
    "settings of the template": (
        [GOOD | {"chat_template_kwargs": {"a": 1}}],
        "chat_template_kwargs is",
        "in a template",
    ),
    "images": ([{"messages": TURN, "images": ["a.png"]}], 'images is ["a.png"], which is not read', "remove it to"),
    "context": ([{"instruction": "Add", "context": "1, 2", "output": "3"}], 'context is "1, 2"', "name it input"),
    "an image": (
        [{"messages": [says("user", [{"type": "image"}, {"type": "text", "text": "a"}]), TURN[1]]}],
        'messages[0] has a part that is not text, {"type": "image"}',
    ),
    "calls that are text": (
        [{"messages": [TURN[0], says("assistant", "", tool_calls=["add"])]}],
        'messages[1] calls ["add"] instead of functions',
    ),
    **{
        f"rendered, {name}": ([record], "its text has <|endoftext|>, so it is rendered already")
        for name, record in {
            "an answer": {"messages": [TURN[0], says("assistant", "Hello!<|endoftext|>")]},
            "a turn": {"conversations": [printed("human", "<|endoftext|>user\nHi"), printed("gpt", "Hello!")]},
            "a part": {"messages": [says("user", [{"type": "text", "text": "a<|endoftext|>"}]), TURN[1]]},
            "Alpaca": {"instruction": "Hi", "output": "Hello!<|endoftext|>"},
        }.items()
    },
    "two systems": (
        [{"conversations": [printed("system", "a"), printed("human", "Hi"), printed("gpt", "b")], "system": "c"}],
        'system is "c", and the first message is another system prompt',
    ),
    "text and messages": ([{"prompt": "Hi", "completion": [says("assistant", "Hello!")]}], "both lists of messages"),
    "a bad completion": ([{"prompt": "Hi", "completion": "No!", "label": False}], "label is false"),
    "rendered": (
        [{"prompt": "Hi<|endoftext|>", "completion": "Hello!"}],
        "its text has <|endoftext|>, so it is rendered already",
    ),
    "no text": ([{"instruction": ["Hi"], "output": "Hello!"}], 'instruction is ["Hi"] instead of text'),
    "history": ([{"instruction": "Hi", "output": "Hello!", "history": ["Hi"]}], "history is"),
    "two layouts": (
        [GOOD, {"instruction": "Hi", "output": "Hello!"}],
        "line 2: no field 'conversations'",
        "a source of their own",
    ),
    "preferences": ([{"prompt": "Hi", "chosen": "Hello!", "rejected": "No!"}], "preference pairs, for DPO"),
    "other names": ([{"question": "Hi", "answer": "Hello!"}], "rename fields: conversations are messages,"),
    "the assistant by another name": (
        [{"messages": [TURN[0], says("Assistant", "Hello!")]}],
        "its role Assistant is not trained on; name it assistant",
    ),
    "nobody of the assistant": (
        [{"messages": [says("human", "Hi"), says("narrator", "Hello!")]}],
        "none of its 1 conversation has a turn with the role assistant",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_right_is_one_line(tokenizer, tmp_path, name):
    records, *words = REFUSED[name]
    if name.startswith("rendered"):
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
        tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>").replace(
            "+ message.content", "+ (message.content if message.content is string else message.content[0].text)"
        )
    refuse(tokenizer, tmp_path, records, *words)


@pytest.mark.parametrize("name", ["two layouts", "preferences", "images"])
def test_parquet_files_of_another_layout_are_one_line(tokenizer, tmp_path, name):
    records, *words = REFUSED[name]
    for number, record in enumerate(records):
        write_parquet(tmp_path / f"{number}.parquet", [record])
    with pytest.raises(UserError) as raised:
        load(tokenizer, tmp_path, tmp_path)
    assert words[-1] in str(raised.value) and f"{number}.parquet" in str(raised.value)


def test_a_named_column_of_messages_is_a_conversation_and_a_named_column_of_text_is_text(tokenizer, tmp_path):
    expected = load(tokenizer, tmp_path, write_lines(tmp_path / "a.jsonl", [{"messages": TURN}]))
    records = [{"dialog": TURN, "messages": "no chat " * 30}]
    for file in (write_lines(tmp_path / "b.jsonl", records), write_parquet(tmp_path / "b.parquet", records)):
        assert load(tokenizer, tmp_path, file, text_field="dialog") == expected
        assert not utils.get_dataset(tokenizer, 4, dataset=str(file), text_field="messages").dataset.has_loss_mask
    both = [{"text": "As text. " * 30, **GOOD}]
    for file in (write_lines(tmp_path / "c.jsonl", both), write_parquet(tmp_path / "c.parquet", both)):
        assert load(tokenizer, tmp_path, file) == expected
        text = utils.get_dataset(tokenizer, 4, dataset=str(file), text_field="text", cache_dir=tmp_path / "cache")
        assert not text.dataset.has_loss_mask


@pytest.mark.parametrize("completion", ["Hello!", "Hello!<|endoftext|>"])
def test_without_a_template_a_prompt_and_its_completion_are_text_and_the_completion_is_trained_on(tmp_path, completion):
    """One end-of-text token ends it; what the tokenizer's own rule puts before a text comes first."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "Say: ", "completion": completion}] * 9)
    tokens, trained, ends = load(tokenizer, tmp_path, file)
    first = tokens[: ends[0]]
    assert tokenizer.decode(first) == "Say: Hello!<|endoftext|>"
    of_completion = [token for token, is_trained in zip(first, trained, strict=False) if is_trained]
    assert tokenizer.decode(of_completion).strip() == "Hello!<|endoftext|>"
    pieces = [("<unk>", 0.0), ("<|endoftext|>", 0.0), *((character, -1.0) for character in "▁Say:Helo!")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")  # a space, not after a token
    backend.add_special_tokens(["<|endoftext|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    for loss in ("assistant", "all"):
        tokens, _, ends = load(tokenizer, tmp_path, file, chat_loss=loss)
        assert tokens[: ends[0]] == tokenizer("Say: Hello!<|endoftext|>")["input_ids"]


@pytest.mark.parametrize(
    "record", [{"prompt": "a", "completion": "b", "system": "c"}, {"prompt": TURN[:1], "completion": TURN[1:]}, GOOD]
)
def test_what_needs_a_template_says_so(tmp_path, record):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    refuse(tokenizer, tmp_path, [record], "has no chat template", "--chat-template FILE")


def test_each_layout_template_and_mask_has_tokens_of_its_own(tokenizer, tmp_path):
    """The cache is asked for by what is trained on."""
    record = GOOD | {"prompt": "Hi", "completion": "No."}
    file = write_lines(tmp_path / "a.jsonl", [record])
    marked = tmp_path / "marked.jinja"
    with_marks = CHATML.replace("+ message.content }}", "}}{% generation %}{{- message.content }}{% endgeneration %}")
    marked.write_text(with_marks)
    load(tokenizer, tmp_path, file)
    load(tokenizer, tmp_path, file, chat_loss="all")
    load(tokenizer, tmp_path, file, chat_template=marked)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3
    load(tokenizer, tmp_path, file)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3


def test_a_json_file_beside_other_data_is_left_out_and_one_alone_is_read(tokenizer, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "chats.json").write_text(json.dumps([GOOD] * 3))
    (corpus / "dataset_info.json").write_text("{}")
    assert len(load(tokenizer, tmp_path, corpus)[2]) == 3
    write_lines(corpus / "more.jsonl", [GOOD])
    assert len(load(tokenizer, tmp_path, corpus)[2]) == 1
    assert len(load(tokenizer, tmp_path, corpus / "chats.json")[2]) == 3


BROKEN = {"cut": '[{"text": "a"}, {"te', "no end": '[{"text": "a"}', "a comma": '{"text": "a"} {"text" "b"}'}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_json_is_named_with_the_records_before_it(tokenizer, tmp_path, name):
    (tmp_path / "a.json").write_text(BROKEN[name])
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(broken JSON after 1 record"):
        load(tokenizer, tmp_path, tmp_path / "a.json")


def test_json_is_read_whatever_its_blocks_cut(tokenizer, tmp_path, monkeypatch):
    texts = ["Zwölf Füchse \U0001f98a", 'a "b" \\ ] , [ c', "d" * 99]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False, indent=2))
    expected = utils.get_dataset(tokenizer, 9, dataset=str(tmp_path / "a.json"), cache_dir=tmp_path / "1").dataset
    monkeypatch.setattr("harness.data.formats.json.READ_BYTES", 1)
    found = utils.get_dataset(tokenizer, 9, dataset=str(tmp_path / "a.json"), cache_dir=tmp_path / "2").dataset
    assert np.array_equal(found.tokens[:], expected.tokens[:])
    text = tokenizer.decode(found.tokens[:].tolist())
    assert all(part in text for part in texts)


def test_a_run_says_what_it_found_and_what_it_trains_on_and_is_refused_before_its_first_step(
    tokenizer, tmp_path, device, capfd
):
    model = write_model(tmp_path / "model", "llama", **(multirank.SIZES | {"max_position_embeddings": 512}))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "chats.json").write_text(json.dumps([GOOD] * 8))
    flags = ["--model", model, "--tokenizer", tmp_path / "tokenizer", "--sequence-length", "96", "--num-steps", "1"]
    flags += ["--num-workers", "0", "--cache-dir", tmp_path / "cache", "--output-dir", tmp_path / "runs"]
    assert train([*flags, "--dataset", tmp_path / "chats.json"], device) == 0
    said_of_it = capfd.readouterr().out
    assert "\nformat     conversations, as ShareGPT's\n" in said_of_it
    assert "\ntrained on the assistant's turns, found by rendering prefixes\n" in said_of_it
    assert "[[Hello!<|im_end|>" in said_of_it.replace("[[ Hello", "[[Hello")
    write_lines(tmp_path / "bad.jsonl", [GOOD, {"conversations": [printed("narrator", "Hi")]}])
    with pytest.raises(UserError, match=r'bad\.jsonl, line 2: conversations\[0\] is from "narrator"'):
        train([*flags, "--dataset", tmp_path / "bad.jsonl"], device)
    assert "step 1" not in capfd.readouterr().out


def test_a_sample_resumes_from_the_prompt_as_it_is_where_completions_were_trained_on_as_text(tmp_path, device, capfd):
    flags = ["--demo", "--sequence-length", "32", "--num-steps", "1", "--num-workers", "0", "--no-final-checkpoint"]
    flags += ["--cache-dir", tmp_path / "cache", "--output-dir", tmp_path / "runs", "--sample-prompt", "The red fox"]
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "The red ", "completion": "fox ran. " * 9}] * 8)
    assert train([*flags, "--dataset", file], device) == 0
    said_of_it = capfd.readouterr().out
    assert "\nformat     prompt and completion, end to end, as there is no chat template\n" in said_of_it
    assert "\ntrained on the completions\n" in said_of_it and "\nThe red fox" in said_of_it
