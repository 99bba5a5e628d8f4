"""Chats as they come: ShareGPT, prompt and completion, Alpaca, in each kind of file; what is read of them, and what is
refused."""

import json
import re

import multirank
import pytest
import tokenizers
from conftest import metrics_of, train, words, write_model
from corpora import calling, demo_tokenizer, says, write_records
from transformers import PreTrainedTokenizerFast

from harness.base.errors import UserError

CHATML = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}{{- message.tool_calls | tojson }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def turn(speaker: str, value: str, **more) -> dict:
    """A message as ShareGPT has them."""
    return {"from": speaker, "value": value, **more}


SYSTEM, TOOLS = says("system", "Be kind."), [{"name": "add", "description": "Adds."}]
TURN = [says("user", "Hi"), says("assistant", "Hello!")]
SHAREGPT = [turn("human", "Hi"), turn("gpt", "Hello!")]
GOOD = {"conversations": SHAREGPT}
CALL = json.dumps({"name": "add", "arguments": {"a": 1}})
SUM = [turn("human", "1 + 1?"), turn("function_call", CALL), turn("observation", "2"), turn("gpt", "It is 2.")]
SUM_TURNS = [says("user", "1 + 1?"), calling("add", {"a": 1}), says("tool", "2"), says("assistant", "It is 2.")]
READ = {  # the records, and each as a conversation of `messages`; of completions alone what is trained on differs
    "conversations": [
        (GOOD | {"tools_used": 1}, TURN),
        ({"conversations": [turn("user", "Hi"), turn("Assistant", "Hello!")]}, TURN),
        ({"conversations": [turn("human", "Hi", weight=0), turn("chatgpt", "Hello!", weight=1)], "id": "x"}, TURN),
        ({"conversations": [turn("human", "Hi", weight=None), turn("gpt", "Hello!", weight=None)]}, TURN),
        ({"conversations": [turn("system", "Be kind."), turn("human", "Hi"), turn("bing", "Hello!")]}, [SYSTEM, *TURN]),
        (GOOD | {"system": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": TURN}, TURN),
        ({"conversations": SUM, "tools": json.dumps(TOOLS)}, SUM_TURNS),
        ({"conversations": [turn("human", "a"), *SHAREGPT]}, [says("user", "a"), *TURN]),
    ],
    "other names of system": [
        ({"conversations": TURN, "system_prompt": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": [SYSTEM, *TURN], "system_message": "Be kind."}, [SYSTEM, *TURN]),
        ({"conversations": TURN, "functions": [], "system_prompt": ""}, TURN),
    ],
    "conversation": [({"conversation": TURN, "model": "m"}, TURN)],
    "messages": [
        ({"messages": TURN, "prompt": "x", "completion": "y"}, TURN),
        ({"messages": TURN, "label": 0, "chosen": TURN, "rejected": TURN}, TURN),  # the number of a class
    ],
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
    return demo_tokenizer(CHATML)


@pytest.fixture
def read(tokenizer, load):
    """`read(source, ...)`: its tokens, which of them are trained on, and the ends of its documents."""

    def read(source, with_tokenizer=tokenizer, **options) -> tuple[list, list, list]:
        tokens = load(source, 40, with_tokenizer=with_tokenizer, **options).tokens
        return tokens[:].tolist(), tokens.loss_mask(0, len(tokens)).tolist(), tokens.doc_ends.tolist()

    return read


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("layout", READ)
def test_a_layout_gives_the_tokens_and_the_mask_of_its_messages_from_each_kind_of_file(
    tokenizer, read, tmp_path, layout, suffix
):
    records, conversations = zip(*READ[layout], strict=True)
    if layout == "conversations" and suffix == ".parquet":  # fields of one type in a column
        records, conversations = records[:6], conversations[:6]
    tools = [{"tools": TOOLS} if "tools" in record else {} for record in records]
    as_messages = [{"messages": messages} | more for messages, more in zip(conversations, tools, strict=True)]
    expected = read(write_records(tmp_path / "messages.jsonl", as_messages))
    found = read(write_records(tmp_path / f"chats{suffix}", records))
    assert found[0] == expected[0] and found[2] == expected[2]
    if layout != "completions of messages":
        assert found[1] == expected[1] and any(found[1])
        return
    begin, end = expected[2]
    trained = [token for token, is_trained in zip(found[0][begin:end], found[1][begin:end], strict=True) if is_trained]
    assert tokenizer.decode(trained) == "Hello!<|im_end|>\n"


def answering(content, **more) -> list[dict]:
    return [{"messages": [TURN[0], says("assistant", content, **more)]}]


REFUSED = {
    "no list": ([{"conversations": {"from": ["human"]}}], "instead of a list of messages"),
    "empty": ([GOOD, {"conversations": []}], "line 2: [] instead of a list of messages"),
    "strings": ([{"conversations": ["Hi", "Hello!"]}], 'conversations[0] is "Hi" instead of an object with role and'),
    "no content of ShareGPT's": ([{"conversations": [turn("human", None)]}], 'is {"from": "human", "value": null}'),
    "no content": ([{"messages": [TURN[0], {"role": "assistant"}]}], "messages[1] is", "an object with role and"),
    "half a character": ([{"messages": [says("user", "\ud800")]}], "half a surrogate pair"),
    "another speaker": ([{"conversations": [turn("he", "Hi")]}], 'from "he" instead of one of human, user,'),
    "a call that is no JSON": ([{"conversations": [turn("function_call", "add(1)")]}], 'JSON such as {"name": "add"'),
    **{
        f"a turn with {field} {value!r}": (
            answering("Hello!", **{field: value}),
            f"messages[1] has {field} {json.dumps(value)}, but all turns of the assistant are trained on",
        )
        for field, value in (
            ("loss", False),
            ("training", 0),
            ("train", "false"),
            ("train_detail", [{"train": False}]),
            ("weight", 0.5),
            ("mask", 1),
        )
    },
    **{
        f"a label {value!r}": ([{"prompt": "Hi", "completion": "No!", "label": value}], f"label is {json.dumps(value)}")
        for value in (0, False, "False")
    },
    "a label of messages": ([{"messages": TURN, "label": False}], "label is false, so its answer is not to be trained"),
    "a label of Alpaca": ([{"instruction": "Hi", "output": "No!", "kto_tag": False}], "kto_tag is false"),
    "a system of another name": ([GOOD | {"system_prompt": ["a"]}], 'system_prompt is ["a"] instead of text'),
    "functions": ([GOOD | {"functions": TOOLS}], "functions is", "name them tools"),
    "tools of another name": ([GOOD | {"tool_defs": json.dumps(TOOLS)}], "tool_defs is", "name them tools"),
    "settings of the template": ([GOOD | {"chat_template_kwargs": {"a": 1}}], "chat_template_kwargs is", "in a templ"),
    "images": ([{"messages": TURN, "images": ["a.png"]}], 'images is ["a.png"], which is not read', "remove it to"),
    "context": ([{"instruction": "Add", "context": "1, 2", "output": "3"}], 'context is "1, 2"', "name it input"),
    "an image": (
        [{"messages": [says("user", [{"type": "image"}, {"type": "text", "text": "a"}]), TURN[1]]}],
        'messages[0] has a part that is not text, {"type": "image"}',
    ),
    "calls that are text": (answering("", tool_calls=["add"]), 'messages[1] calls ["add"] instead of functions'),
    **{
        f"rendered, {name}": ([record], "its text has <|endoftext|>, so it is rendered already")
        for name, record in {
            "an answer": answering("Hello!<|endoftext|>")[0],
            "a turn": {"conversations": [turn("human", "<|endoftext|>user\nHi"), turn("gpt", "Hello!")]},
            "a part": {"messages": [says("user", [{"type": "text", "text": "a<|endoftext|>"}]), TURN[1]]},
            "Alpaca": {"instruction": "Hi", "output": "Hello!<|endoftext|>"},
            "a prompt": {"prompt": "Hi<|endoftext|>", "completion": "Hello!"},
        }.items()
    },
    "two systems": (
        [{"conversations": [turn("system", "a"), *SHAREGPT], "system": "c"}],
        'system is "c", and the first message is another system prompt',
    ),
    "text and messages": ([{"prompt": "Hi", "completion": [says("assistant", "Hello!")]}], "both lists of messages"),
    "no text": ([{"instruction": ["Hi"], "output": "Hello!"}], 'instruction is ["Hi"] instead of text'),
    "history": ([{"instruction": "Hi", "output": "Hello!", "history": ["Hi"]}], "history is"),
    "two layouts": (
        [GOOD, {"instruction": "Hi", "output": "Hello!"}],
        "line 2: no field 'conversations'",
        "a source of their own",
    ),
    "preferences": ([{"prompt": "Hi", "chosen": "Hello!", "rejected": "No!"}], "preference pairs, for DPO"),
    "preferences after a question": (
        [{"conversations": [*SHAREGPT, SHAREGPT[0]], "chosen": SHAREGPT[1], "rejected": turn("gpt", "No!")}],
        "preference pairs, for DPO",
    ),
    "a result that is an object": (
        [{"messages": [*TURN, says("tool", {"sum": 3})]}],
        'messages[2] is {"role": "tool", "content": {"sum": 3}} instead of an object with role and content, which',
    ),
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
def test_what_cannot_be_read_right_is_one_line(tokenizer, read, tmp_path, name):
    records, *phrases = REFUSED[name]
    if name.startswith("rendered"):
        content = "(message.content if message.content is string else message.content[0].text)"
        template = CHATML.replace("<|im_end|>", "<|endoftext|>").replace("+ message.content", f"+ {content}")
        tokenizer = demo_tokenizer(template)
    with pytest.raises(UserError) as raised:
        read(write_records(tmp_path / "a.jsonl", records), with_tokenizer=tokenizer)
    assert "\n" not in str(raised.value) and all(phrase in str(raised.value) for phrase in phrases)


@pytest.mark.parametrize("name", ["two layouts", "preferences", "images"])
def test_parquet_files_of_another_layout_are_one_line(read, tmp_path, name):
    records, *phrases = REFUSED[name]
    for number, record in enumerate(records):
        write_records(tmp_path / f"{number}.parquet", [record])
    with pytest.raises(UserError, match=f"{len(records) - 1}.parquet.*{phrases[-1]}"):
        read(tmp_path)


@pytest.mark.parametrize(
    "record", [{"prompt": "a", "completion": "b", "system": "c"}, {"prompt": TURN[:1], "completion": TURN[1:]}, GOOD]
)
def test_what_needs_a_template_says_so(read, tmp_path, record):
    with pytest.raises(UserError, match=r"has no chat template.*--chat-template FILE"):
        read(write_records(tmp_path / "a.jsonl", [record]), with_tokenizer=demo_tokenizer())


TEXT, IDS = "No messages.", [1006, 1389, 284, 79, 88, 546, 14]
ANSWER, IDS_TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!", "The red fox ran."
FIELDS = {  # a record; --text-field; the beginning of what is read
    "messages before text": ({"messages": TURN, "text": TEXT}, None, ANSWER),
    "messages before ids": ({"messages": TURN, "input_ids": IDS}, None, ANSWER),
    "ShareGPT's before text": (GOOD | {"text": TEXT}, None, ANSWER),
    "the named text": ({"messages": TURN, "text": TEXT}, "text", TEXT),
    "the named ids": ({"messages": TURN, "text": TEXT, "input_ids": IDS}, "input_ids", IDS_TEXT),
    "named messages": ({"dialog": TURN, "messages": TEXT}, "dialog", ANSWER),
    "a text named as a layout": ({"messages": TEXT}, "messages", TEXT),
    "the same beside a text": ({"messages": TEXT, "text": "Another."}, "messages", TEXT),
    "the same beside another layout": ({"messages": TEXT, "conversations": TURN}, "messages", TEXT),
    "the same beside Alpaca's": ({"conversation": TEXT, "instruction": "Hi", "output": "No."}, "conversation", TEXT),
    "the same, not asked for": ({"messages": "Another.", "conversation": "Another.", "text": TEXT}, None, TEXT),
    "the same beside a conversation": ({"messages": TEXT, "conversations": TURN}, None, ANSWER),
    "a null beside a conversation": ({"messages": None, "conversations": TURN}, None, ANSWER),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_conversation_is_read_unless_another_field_is_named(tokenizer, load, tmp_path, name, suffix):
    record, text_field, wanted = FIELDS[name]
    options = {"text_field": text_field} if text_field else {}
    data = load(write_records(tmp_path / f"a{suffix}", [record] * 3), 8, with_tokenizer=tokenizer, **options)
    assert tokenizer.decode(data.tokens[:].tolist()).startswith(wanted)
    assert data.has_loss_mask == (wanted == ANSWER)


@pytest.mark.parametrize("completion", ["Hello!", "Hello!<|endoftext|>"])
def test_without_a_template_a_prompt_and_its_completion_are_text_and_the_completion_is_trained_on(
    read, tmp_path, completion
):
    """One end-of-text token ends it; special tokens that the tokenizer adds before a text come first."""
    tokenizer = demo_tokenizer()
    file = write_records(tmp_path / "a.jsonl", [{"prompt": "Say: ", "completion": completion}] * 9)
    tokens, trained, ends = read(file, with_tokenizer=tokenizer)
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
        tokens, _, ends = read(file, with_tokenizer=tokenizer, chat_loss=loss)
        assert tokens[: ends[0]] == tokenizer("Say: Hello!<|endoftext|>")["input_ids"]


def test_each_layout_template_and_mask_has_tokens_of_its_own(read, tmp_path):
    """The cache is asked for by what is trained on."""
    file = write_records(tmp_path / "a.jsonl", [GOOD | {"prompt": "Hi", "completion": "No."}])
    marked = tmp_path / "marked.jinja"
    with_marks = CHATML.replace("+ message.content }}", "}}{% generation %}{{- message.content }}{% endgeneration %}")
    marked.write_text(with_marks)
    options = ({}, {"chat_loss": "all"}, {"chat_template": marked})
    first = [read(file, **more) for more in options]
    assert len({str(found) for found in first}) == 3
    assert [read(file, **more) for more in options] == first


def test_a_json_file_beside_other_data_is_left_out_and_one_alone_is_read(read, tmp_path):
    corpus = tmp_path / "corpus"
    write_records(corpus / "chats.json", [GOOD] * 3)
    (corpus / "dataset_info.json").write_text("{}")
    assert len(read(corpus)[2]) == 3
    write_records(corpus / "more.jsonl", [GOOD])
    assert len(read(corpus)[2]) == 1
    assert len(read(corpus / "chats.json")[2]) == 3


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def test_a_run_on_conversations_shows_what_it_trains_on_and_answers_prompts_through_its_template(
    arguments, device, capfd, tmp_path
):
    write_model(tmp_path / "model", "llama", **multirank.SIZES | {"max_position_embeddings": 1024})
    records = [{"conversations": [turn("human", "Why? " * 200), SHAREGPT[1], *SHAREGPT]}, {"conversations": SHAREGPT}]
    records += [{"conversations": SUM, "tools": json.dumps(TOOLS)}, {"conversations": SUM}]
    records += [{"conversations": [SHAREGPT[0], turn("gpt", "<think>Hm.</think>Hello!")]}] * 60
    prompt = {"messages": [SYSTEM, *SUM_TURNS[:2]], "tools": TOOLS}
    write_records(tmp_path / "prompt.json", [prompt])
    flags = [*arguments, "--dataset", write_records(tmp_path / "a.jsonl", records), *words("--chat-template chatml")]
    prompts = ["--sample-prompt", "Who runs?", "--sample-prompt", tmp_path / "prompt.json", "--sample-tokens", "4"]
    assert train([*flags, *prompts, *words("--sequence-length 128 --final-checkpoint")], device) == 0
    out, err = capfd.readouterr()
    assert "no special token is trained on" in err  # the demo's tokenizer has no <|im_end|>
    assert "\nformat     conversations, as ShareGPT's\n" in out
    assert "\ntrained on the assistant's turns, marked by the chat template\n" in out
    titles = [f"line {line}" for line in ("1: several turns", "2: one turn", "3: tools", "5: reasoning")]
    assert re.findall("^--- .*a.jsonl, (.*)$", out, re.M) == titles  # one of each kind
    assert " ... " in out and out.count("Why?") < 200 and "[[Hello!<|im_end|>" in out  # of a long one its answer too
    of_text, of_messages = [line["samples"] for line in metrics_of(tmp_path / "out" / "r") if "samples" in line][-1]
    assert of_text["prompt"] == "<|im_start|>user\nWho runs?<|im_end|>\n<|im_start|>assistant\n"
    assert of_text["text"].startswith(of_text["prompt"])
    assert "Be kind." in of_messages["prompt"] and "add" in of_messages["prompt"]
    assert of_messages["prompt"].endswith("1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert (of_messages["tokens"], of_messages["ended"]) == (4, False) and "(cut at 4 tokens)" in out
    again = [*arguments, "--resume", tmp_path / "out" / "r", "--num-steps", "0", "--sample-prompt", "Who runs?"]
    assert train([*again, "--sample-tokens", "4"], device) == 0  # template and all else by the checkpoint
    assert f"\n{of_text['text']}" in capfd.readouterr().out


def test_a_sample_continues_the_prompt_as_it_is_if_completions_were_trained_on_as_text(
    arguments, tmp_path, device, capfd
):
    file = write_records(tmp_path / "a.jsonl", [{"prompt": "The red ", "completion": "fox ran. " * 9}] * 8)
    prompt = write_records(tmp_path / "prompt.json", [{"prompt": "The blue ", "completion": "ball."}])
    flags = [*arguments, "--dataset", file, "--sample-prompt", "The red fox", "--sample-tokens", "4"]
    assert train([*flags, "--sample-prompt", prompt, "--no-final-checkpoint"], device) == 0
    out = capfd.readouterr().out
    assert "\nformat     prompt and completion, end to end, as there is no chat template\n" in out
    assert "\ntrained on the completions\n" in out and "\nThe red fox" in out and "\nThe blue " in out
