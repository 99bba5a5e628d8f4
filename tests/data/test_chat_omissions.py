"""What a conversation has and its rendered text lacks: an error, a warning, or nothing; templates that have a name."""

import copy
import json
import re
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, metrics_of, train
from transformers import AutoTokenizer

import utils
from harness import base
from harness.base.errors import UserError
from harness.data.chat import ChatEncoder
from harness.data.header import describe_examples
from harness.data.prompts import read_prompt
from harness.data.schema import Conversation

TEMPLATES = {
    "chatml": """{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "three roles": """{%- for m in messages %}{%- if m.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "cuts thoughts": """{%- for m in messages %}{{- m.role ~ ': ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endgeneration %}
{%- else %}{{- m.content ~ '\\n' }}{%- endif %}{%- endfor %}""",
    # as Qwen3's: thoughts are taken off the content or their own field, and written after the last question alone
    "qwen3": """{%- set ns = namespace(last=0) %}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' %}{%- set content = m.content or '' %}{%- set thoughts = m.reasoning_content or '' %}
{%- if '</think>' in content %}{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{% generation %}{%- if loop.index0 > ns.last %}
{{- '<think>\\n' ~ thoughts ~ '\\n</think>\\n\\n' }}{%- endif %}{{- content }}
{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' ~ (c.function or c) | tojson ~ '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{- m.content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}""",
    # as Llama 3.1's: a call or a content, one call, and results as JSON
    "llama 3.1": """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{%- if m.tool_calls %}
{%- set c = m.tool_calls[0].function %}{{- '{"name": "' ~ c.name ~ '", "parameters": ' ~ c.arguments | tojson ~ '}' }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{- m.content | tojson ~ '<|eot_id|>' }}
{%- else %}{{- m.content | trim ~ '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}""",
    # as Mistral's first: the system prompt stands in the last question
    "moves the system prompt": """{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' }}
{%- set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}
{%- if not later and messages[0].role == 'system' %}
{{- messages[0].content ~ '\\n\\n' }}{%- endif %}{{- m.content ~ '[/INST]' }}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' ~ m.content ~ eos_token }}{% endgeneration %}{%- endif %}
{%- endfor %}""",
}


def says(role: str, content: str | list | None, **more) -> dict:
    return {"role": role, "content": content, **more}


def calling(content: str, *arguments, **more) -> dict:
    calls = [{"type": "function", "function": {"name": "find", "arguments": given}} for given in arguments]
    return says("assistant", content, tool_calls=calls, **more)


HI, HELLO, SYSTEM = says("user", "Hi"), says("assistant", "Hello!\n"), says("system", " Be kind. ")
THOUGHT = says("assistant", "<think>\nA greeting.</think>\n\nHello!")
MORE = [says("user", "And?"), says("assistant", "Bye.")]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
    }
]
RECORDS = {  # messages, tools
    "plain": ([HI, HELLO, *MORE], None),
    "system": ([SYSTEM, HI, HELLO, *MORE], None),
    "developer": ([says("developer", "Be kind."), HI, HELLO], None),
    "tool": ([HI, HELLO, says("tool", 'Hi "you"\n{}'), says("assistant", "Bye.")], None),
    "function": ([HI, HELLO, says("function", "Hi"), says("assistant", "Bye.")], None),
    "reasoning_content": ([HI, says("assistant", "Hello!", reasoning_content="A greeting.")], None),
    "reasoning_content, earlier": ([HI, says("assistant", "Hello!", reasoning_content="A greeting."), *MORE], None),
    "thinking": ([HI, says("assistant", "Hello!", thinking="A greeting.")], None),
    "another field": ([says("user", "Hi", mood="glad", name="Ann", id="1"), HELLO], None),
    "thoughts": ([HI, THOUGHT], None),
    "thoughts, earlier": ([HI, THOUGHT, *MORE], None),
    "tools": ([HI, HELLO], TOOLS),
    "call": ([HI, calling("", {"what": "kite"})], TOOLS),
    "call beside a content": ([HI, calling("I look.", {"what": "kite"})], TOOLS),
    "two calls": ([HI, calling("", {"what": "kite"}, {"what": "hat"})], TOOLS),
}
EXPECTED = {  # (record, template): what is said, as an error after "error"; nothing of all others
    ("developer", "three roles"): "error: leaves out the content of the developer",
    ("tool", "three roles"): "error: leaves out the content of the tool",
    ("function", "three roles"): "error: leaves out the content of the function",
    ("developer", "moves the system prompt"): "error: leaves out the content of the developer",
    ("tool", "moves the system prompt"): "error: leaves out the content of the tool",
    ("function", "moves the system prompt"): "error: leaves out the content of the function",
    ("thoughts", "cuts thoughts"): "error: cuts <think> out of the answer of the assistant",
    ("thoughts, earlier", "cuts thoughts"): "cuts <think> out of earlier turns of the assistant",
    ("thoughts, earlier", "qwen3"): "cuts <think> out of earlier turns of the assistant",
    ("reasoning_content, earlier", "qwen3"): "leaves out reasoning_content of earlier turns of the assistant",
    ("two calls", "llama 3.1"): "error: leaves out its call of find",
    ("call beside a content", "llama 3.1"): "error: leaves out the content of the assistant beside a call",
    **{("another field", name): "leaves out mood of the user" for name in TEMPLATES},
}
for name in TEMPLATES:
    if name not in ("qwen3", "llama 3.1"):
        EXPECTED["tools", name] = "does not write tools, so it is trained on as if there were none"
        for record in ("call", "two calls"):
            EXPECTED[record, name] = "error: leaves out its call of find"
        EXPECTED["call beside a content", name] = "error: leaves out its call of find"
    if name != "qwen3":
        EXPECTED["thinking", name] = "leaves out thinking of the assistant"
        EXPECTED["reasoning_content", name] = "leaves out reasoning_content of the assistant"
        EXPECTED["reasoning_content, earlier", name] = "leaves out reasoning_content of earlier turns of the assistant"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")


TWICE = {  # contents of the user, both of which are not written as they are, and a template
    "changed contents": (("Hi", "Hi!"), "{{ m.content | replace('Hi', 'Ho') }}"),
    "special tokens": (("a<|endoftext|>b", "c<|endoftext|>d"), "{{ m.content }} {{ eos_token }}"),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_warning_counts_conversations_not_messages(tokenizer, name):
    (first, second), template = TWICE[name]
    chat = ChatEncoder(tokenizer, 1536, "{% for m in messages %}" + template + "{% endfor %}", "all")
    messages = [says("user", first), says("assistant", "Yes."), says("user", second), says("assistant", "No.")]
    chat.encode([Conversation(messages)] * 3, Counter())
    assert [warning.endswith("(3 conversations)") for warning in chat.warnings()] == [True]


def said_of(chat: ChatEncoder, conversation: Conversation) -> str:
    """The error or the warnings about a conversation that a run trains on ten times."""
    counts: Counter = Counter()
    try:
        chat.encode([conversation] * 10, counts)
    except UserError as error:
        return f"error: {error}"
    assert counts["documents"] == 10
    assert all(warning.endswith("(10 conversations)") for warning in chat.warnings())
    return "\n".join(chat.warnings())


PAIRS = {(record, template) for record in RECORDS for template in TEMPLATES}
PAIRS.remove(("thinking", "qwen3"))  # newer versions of transformers give templates thinking as reasoning_content


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize("record, template", sorted(PAIRS))
def test_what_a_template_leaves_out_is_reported(tokenizer, record, template, loss):
    messages, tools = copy.deepcopy(RECORDS[record])
    chat = ChatEncoder(tokenizer, len(tokenizer), TEMPLATES[template], loss)
    printed = said_of(chat, Conversation(messages, tools, position="chat.jsonl, line 3"))
    expected = EXPECTED.get((record, template), "")
    words = expected.removeprefix("error: ")
    assert printed.startswith("error: ") == expected.startswith("error: ")
    assert printed.count("chat.jsonl, line 3: the chat template") == bool(words)
    assert words in printed if words else printed == ""


def test_a_template_is_tried_once_a_shape_and_each_conversation_rendered_once(tokenizer, monkeypatch):
    chat = ChatEncoder(tokenizer, len(tokenizer), TEMPLATES["qwen3"], "assistant")
    rendered, render = [], chat.render_messages
    monkeypatch.setattr(chat, "render_messages", lambda *given, **more: rendered.append(1) or render(*given, **more))
    for turns in range(1, 9):
        chat.encode(
            [Conversation([HI, calling("", {"what": "kite"}), says("tool", "x"), HELLO] * turns, TOOLS)] * 9, Counter()
        )
    assert len(rendered) <= 8 * 9 + 2


def test_left_out_where_bad_records_are(tokenizer):
    chat = ChatEncoder(tokenizer, len(tokenizer), TEMPLATES["three roles"], "assistant", skip_bad=True)
    counts: Counter = Counter()
    chat.encode([Conversation(RECORDS[record][0]) for record in ("plain", "tool", "developer")], counts)
    assert (counts["documents"], counts["bad records"]) == (1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# Special tokens in texts

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA2 = """{%- for m in messages %}{%- if m.role == 'user' %}{{- '<s>[INST] ' ~ m.content ~ ' [/INST]' }}
{%- else %}{{- ' ' ~ m.content ~ ' </s>' }}{%- endif %}{%- endfor %}"""
CHATML = TEMPLATES["chatml"]
SPECIAL = {  # template, question, answer: the token that is an error or a warning
    "asked about": (CHATML, "What does <|im_end|> do?", "It ends a turn.", "becomes the special token"),
    "HTML": (LLAMA2, "<s>old</s> new", "It is struck.", "becomes the special token"),
    "HTML at the end": (LLAMA2, "only <s>5</s>", "Yes.", "becomes the special token"),
    "not of the template": (CHATML, "What is <s>?", "It begins.", "becomes the special token"),
    "a rendered answer": (CHATML, "Hi", "Hello!<|im_end|>\n", "so it is rendered already"),
    "a rendered answer of Llama 2": (LLAMA2, "Hi", "Hello! </s>", "so it is rendered already"),
    "a rendered question": (CHATML, "<|im_start|>user\nHi<|im_end|>", "Hello!", "so it is rendered already"),
    "rendered turns": (CHATML, "x\n<|im_start|>assistant\nHi", "Hello!", "so it is rendered already"),
    "rendered, and a template that adds nothing": (PLAIN, "<s>[INST] Hi [/INST]", "Hello!</s>", ""),
    "none": (CHATML, "What does a turn end with?", "<b>im_end</b>", ""),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_token_in_a_text_is_encoded_as_transformers_does_with_a_warning_and_rendered_text_is_refused(
    tokenizer, name
):
    template, question, answer, expected = SPECIAL[name]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]})
    messages = [says("user", question), says("assistant", answer)]
    chat = ChatEncoder(tokenizer, len(tokenizer), template, "all")
    printed = said_of(chat, Conversation(messages, position="chat.jsonl, line 3"))
    assert expected in printed and bool(printed) == bool(expected)
    assert printed.startswith("error: ") == ("rendered" in expected)
    if "rendered" not in expected:
        wanted = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
        assert chat.encode([Conversation(messages)], Counter()).tokens.tolist() == wanted


@pytest.mark.parametrize("column", ["tool_defs", "functions", "available_functions"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_by_another_name_are_refused_in_each_kind_of_file(tokenizer, tmp_path, column, as_text):
    record = {"messages": [HI, HELLO], column: json.dumps(TOOLS) if as_text else TOOLS, "tools_used": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(UserError, match=rf"{name}, .*{column} is .*, which is not read; name them tools"):
            load(tokenizer, tmp_path, tmp_path / name)


def load(tokenizer, tmp_path, file, template="chatml"):
    options = {"cache_dir": tmp_path / "cache", "shuffle": False, "chat_template": template}
    return utils.get_dataset(tokenizer, 40, dataset=str(file), **options)


def test_the_warning_is_reported_again_where_the_tokens_are_in_the_cache(tokenizer, tmp_path, capfd):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": RECORDS["another field"][0]}) + "\n")
    for _ in range(2):
        load(tokenizer, tmp_path, tmp_path / "a.jsonl")
        assert re.search(
            r"warning: .*a.jsonl, line 1: the chat .* mood of the user; .* \(1 conversation\)", capfd.readouterr().err
        )


# ----------------------------------------------------------------------------------------------------------------------
# Templates that have a name

NAMED = {  # (template, record): what is left out; nothing of the others
    **{
        ("llama3", record): f"leaves out {record.removesuffix(', earlier')}"
        for record in RECORDS
        if "reasoning" in record
    },
    ("mistral", "function"): "error: the role function is none of",
    **{(name, "another field"): "leaves out mood" for name in base.chat_templates()},
}
PARTS = [says("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]), HELLO]


@pytest.mark.parametrize("record", [*(record for record in RECORDS if record != "thinking"), "parts"])
@pytest.mark.parametrize("name", base.chat_templates())
def test_a_template_with_a_name_writes_all_of_a_conversation_and_marks_what_the_assistant_writes(
    tokenizer, name, record
):
    template = base.read_template(name)
    messages, tools = copy.deepcopy(RECORDS.get(record, (PARTS, None)))
    chat = ChatEncoder(tokenizer, len(tokenizer), template, "assistant")
    expected = NAMED.get((name, record), "")
    printed = said_of(chat, Conversation(messages, tools, position="chat.jsonl, line 3"))
    assert expected.removeprefix("error: ") in printed and bool(printed) == bool(expected)
    if printed.startswith("error: "):
        return
    text, spans = chat.render(Conversation(messages, tools))
    assert text == tokenizer.apply_chat_template(messages, tools, chat_template=template, tokenize=False)
    plain = ChatEncoder(tokenizer, len(tokenizer), re.sub("{%- (end)?generation %}", "", template), "assistant")
    if name != "mistral":  # its answers follow the question without a prompt
        assert plain.render(Conversation(messages, tools)) == (text, spans)
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(spans) == len(answers)
    ends = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "mistral": tokenizer.eos_token}
    for (first, last), answer in zip(spans, answers, strict=True):
        assert answer["content"].strip() in text[first:last] and text[first:last].endswith(ends[name])


def test_chatml_is_the_usual_one(tokenizer):
    messages = [says("system", " Be kind.\n"), HI, HELLO, *MORE]
    text = tokenizer.apply_chat_template(messages, chat_template=base.read_template("chatml"), tokenize=False)
    assert text == "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    prompt = tokenizer.apply_chat_template(
        [HI], chat_template=base.read_template("chatml"), tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_another_name_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match=r"--chat-template chatm: cannot be read .* or one of chatml, llama3, mistral"):
        base.read_template("chatm")


# ----------------------------------------------------------------------------------------------------------------------
# Examples, and prompts in a file


def test_the_middle_of_a_long_example_is_left_out(tokenizer):
    chat = ChatEncoder(tokenizer, len(tokenizer), base.read_template("chatml"), "assistant")
    records = ["plain", "plain", "call", "thoughts", "tools", "system"]
    documents = [Conversation(*RECORDS[record], position=f"line {number}") for number, record in enumerate(records, 1)]
    text = describe_examples(iter(documents), chat)
    titles = ["line 1: several turns", "line 3: tools", "line 4: reasoning", "line 6: system, several turns"]
    assert re.findall("^--- (.*)$", text, re.M) == titles
    assert "[[Hello!" in text.replace("[[ ", "[[") and "<tool_call>" in text
    long = Conversation([says("user", "Why? " * 200), HELLO])
    text = describe_examples(iter([long]), chat)  # its answer is shown too
    assert " ... " in text and "[[Hello!" in text.replace("[[ ", "[[") and text.count("Why?") < 200


def prompts_in(tmp_path, name: str, content: str) -> list:
    (tmp_path / name).write_text(content)
    return read_prompt(str(tmp_path / name))


def test_a_prompt_is_a_text_or_the_conversations_of_a_file_up_to_their_answers(tmp_path):
    assert read_prompt("Once upon a time") == ["Once upon a time"]
    assert read_prompt("Write into a.json") == ["Write into a.json"]
    record = {"messages": [SYSTEM, *RECORDS["call"][0]], "tools": TOOLS}
    for name, content in {
        "a.jsonl": json.dumps(record) + "\n",
        "a.json": json.dumps(record),
        "b.json": json.dumps([record], indent=1),
        "c.json": json.dumps({"prompt": [SYSTEM, HI], "completion": [HELLO], "tools": json.dumps(TOOLS)}),
        "d.json": json.dumps({"system": SYSTEM["content"], "messages": RECORDS["call"][0], "tools": TOOLS}),
        "e.json": json.dumps({"system": SYSTEM["content"], "prompt": [HI], "completion": [HELLO], "tools": TOOLS}),
    }.items():
        (prompt,) = prompts_in(tmp_path, name, content)
        assert (prompt.messages, prompt.tools) == ([SYSTEM, HI], TOOLS)
    assert prompts_in(tmp_path, "d.json", json.dumps([HI, HELLO, MORE[0]]))[0].messages == [HI, HELLO, MORE[0]]
    assert len(prompts_in(tmp_path, "e.jsonl", f"{json.dumps(record)}\n" * 3)) == 3


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{", "cannot be read"),
        ("[1]", "record 1: no field"),
        ('{"text": "a"}', "record 1: no field"),
        ('{"messages": []}', "record 1: ..? instead"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_one_line(tmp_path, content, problem):
    with pytest.raises(UserError, match=f"--sample-prompt .*a.json.*{problem}"):
        prompts_in(tmp_path, "a.json", content)
    with pytest.raises(UserError, match=r"--sample-prompt .*empty.jsonl: it is empty"):
        prompts_in(tmp_path, "empty.jsonl", "\n")
    with pytest.raises(UserError, match=r"--sample-prompt nothing.jsonl: cannot be read \(.*No such file"):
        read_prompt("nothing.jsonl")


def test_a_run_answers_the_messages_of_a_file_and_says_how_its_samples_ended(tmp_path, device, capfd):
    record = {"messages": [SYSTEM, *RECORDS["call"][0]], "tools": TOOLS}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 40)
    (tmp_path / "prompt.json").write_text(json.dumps(record))
    flags = ["--demo", "--dataset", tmp_path / "a.jsonl", "--chat-template", "chatml", "--sequence-length", "512"]
    flags += ["--num-steps", "1", "--num-workers", "0", "--cache-dir", tmp_path, "--output-dir", tmp_path]
    flags += ["--run-name", "r", "--no-final-checkpoint", "--batch-size", "1"]
    assert train([*flags, "--sample-prompt", tmp_path / "prompt.json", "--sample-tokens", "3"], device) == 0
    (sample,) = [line["samples"] for line in metrics_of(tmp_path / "r") if "samples" in line][-1]
    assert "find" in sample["prompt"] and "Be kind." in sample["prompt"]
    assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert (sample["tokens"], sample["ended"]) == (3, False)
    out = capfd.readouterr().out
    assert "(cut at 3 tokens)" in out and "line 1: system, tools" in out
