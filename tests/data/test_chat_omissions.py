"""What a conversation has and its rendered text lacks: an error, a warning, or nothing; templates that have a name."""

import copy
import json
import re
from collections import Counter

import pytest
from corpora import calling, demo_tokenizer, says, write_records

from harness import base
from harness.base.errors import UserError
from harness.data.chat import ChatEncoder
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


HI, HELLO, SYSTEM = says("user", "Hi"), says("assistant", "Hello!\n"), says("system", " Be kind. ")
THOUGHT = says("assistant", "<think>\nA greeting.</think>\n\nHello!")
MORE = [says("user", "And?"), says("assistant", "Bye.")]
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
RECORDS = {  # messages, tools
    "plain": ([HI, HELLO, *MORE], None),
    "system": ([SYSTEM, HI, HELLO, *MORE], None),
    "developer": ([says("developer", "Be kind."), HI, HELLO], None),
    "tool": ([HI, HELLO, says("tool", 'Hi "you"\n{}'), says("assistant", "Bye.")], None),
    "function": ([HI, HELLO, says("function", "Hi"), says("assistant", "Bye.")], None),
    "reasoning_content": ([HI, says("assistant", "Hello!", reasoning_content="A greeting.")], None),
    "reasoning_content, earlier": ([HI, says("assistant", "Hello!", reasoning_content="A greeting."), *MORE], None),
    "thinking": ([HI, says("assistant", "Hello!", thinking="A greeting.")], None),
    "another field": ([says("user", "Hi", mood="glad", name="Ann", id="1"), HELLO] * 2, None),
    "thoughts": ([HI, THOUGHT], None),
    "thoughts, earlier": ([HI, THOUGHT, *MORE], None),
    "tools": ([HI, HELLO], TOOLS),
    "call": ([HI, calling("find", {"what": "kite"})], TOOLS),
    "call beside a content": ([HI, calling("find", {"what": "kite"}, content="I look.")], TOOLS),
    "two calls": ([HI, calling("find", {"what": "kite"}, {"what": "hat"})], TOOLS),
    "call as JSON text": ([HI, calling("find", '{"what": "kite"}')], TOOLS),
    "another name of a role": ([says("human", "Hi"), HELLO], None),
    "older call": ([HI, says("assistant", "", function_call={"name": "find", "arguments": "{}"})], None),
    "parts": ([says("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]), HELLO], None),
}
EXPECTED = {  # (record, template): the error or the warning; nothing of all others
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
    **{("call as JSON text", name): "writes arguments of its calls, .*, as a quoted text" for name in TEMPLATES},
    **{("another name of a role", name): "does not know its role human; name it user" for name in TEMPLATES},
    ("another name of a role", "three roles"): "error: leaves out the content of the human",
    ("another name of a role", "moves the system prompt"): "error: leaves out the content of the human",
    ("two calls", "llama 3.1"): "error: leaves out its call of find",
    ("call beside a content", "llama 3.1"): "error: leaves out the content of the assistant beside a call",
    **{("another field", name): "leaves out mood of the user" for name in TEMPLATES},
    **{("older call", name): "error: leaves out its call of find" for name in TEMPLATES},
    **{("parts", name): "error: of its user is a list of parts, which .* writes as it is" for name in TEMPLATES},
}
for name in TEMPLATES:
    if name not in ("qwen3", "llama 3.1"):
        EXPECTED["tools", name] = "does not write tools, so it is trained on as if there were none"
        for record in ("call", "two calls", "call as JSON text"):
            EXPECTED[record, name] = "error: leaves out its call of find"
        EXPECTED["call beside a content", name] = "error: leaves out its call of find"
    if name != "qwen3":
        EXPECTED["thinking", name] = "leaves out thinking of the assistant"
        EXPECTED["reasoning_content", name] = "leaves out reasoning_content of the assistant"
        EXPECTED["reasoning_content, earlier", name] = "leaves out reasoning_content of earlier turns of the assistant"


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def report_of(chat: ChatEncoder, conversation: Conversation) -> str:
    """The error or the warnings about a conversation that a run trains on ten times, which are counted as ten."""
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
    printed = report_of(chat, Conversation(messages, tools, position="chat.jsonl, line 3"))
    expected = EXPECTED.get((record, template), "")
    assert printed.startswith("error: ") == expected.startswith("error: ")
    assert printed.count("chat.jsonl, line 3: ") == bool(expected)
    assert re.search(expected.removeprefix("error: "), printed) if expected else printed == ""


STRICT = "{%- if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"


def test_what_a_template_refuses_or_leaves_out_is_a_bad_record_and_the_others_are_kept(load, line_of, tmp_path):
    (tmp_path / "strict.jinja").write_text(STRICT + TEMPLATES["three roles"])
    bad = [RECORDS["system"][0], RECORDS["tool"][0]]
    file = write_records(tmp_path / "chat.jsonl", [{"messages": messages} for messages in (*bad, [HI, HELLO])])
    options = {"chat_template": str(tmp_path / "strict.jinja")}
    with pytest.raises(UserError, match=r"line 1: the chat template fails, user first; fix it"):
        load(file, **options)
    options["skip_bad_records"] = True
    assert len(load(file, **options).tokens.doc_ends) == 1
    assert line_of(file, **options).endswith(", left out: bad records 2")


# ----------------------------------------------------------------------------------------------------------------------
# Special tokens in texts

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA2 = """{%- for m in messages %}{%- if m.role == 'user' %}{{- '<s>[INST] ' ~ m.content ~ ' [/INST]' }}
{%- else %}{{- ' ' ~ m.content ~ ' </s>' }}{%- endif %}{%- endfor %}"""
CHATML = TEMPLATES["chatml"]
CHANGES = "{% for m in messages %}{{ m.content | replace('Hi', 'Ho') }}{% endfor %}"
SPECIAL = {  # template, question, answer: the error or the warning
    "asked about": (CHATML, "What does <|im_end|> do?", "It ends a turn.", "becomes the special token"),
    "HTML": (LLAMA2, "<s>old</s> new", "It is struck.", "becomes the special token"),
    "HTML at the end": (LLAMA2, "only <s>5</s>", "Yes.", "becomes the special token"),
    "not of the template": (CHATML, "What is <s>?", "It begins.", "becomes the special token"),
    "a rendered answer": (CHATML, "Hi", "Hello!<|im_end|>\n", "error: so it is rendered already"),
    "a rendered answer of Llama 2": (LLAMA2, "Hi", "Hello! </s>", "error: so it is rendered already"),
    "a rendered question": (CHATML, "<|im_start|>user\nHi<|im_end|>", "Hello!", "error: so it is rendered already"),
    "rendered turns": (CHATML, "x\n<|im_start|>assistant\nHi", "Hello!", "error: so it is rendered already"),
    "rendered, and a template that adds nothing": (PLAIN, "<s>[INST] Hi [/INST]", "Hello!</s>", ""),
    "none": (CHATML, "What does a turn end with?", "<b>im_end</b>", ""),
    "a changed question": (CHANGES, "Hi", "Hello!", "changes the content of the user"),
    "a changed answer": (CHANGES, "Hello", "Hi!", "error: changes the answer of the assistant that is trained on"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_token_in_a_text_is_encoded_as_transformers_does_with_a_warning_and_rendered_text_is_refused(
    tokenizer, name
):
    template, question, answer, expected = SPECIAL[name]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]})
    messages = [says("user", question), says("assistant", answer)] * 2  # a warning counts conversations
    chat = ChatEncoder(tokenizer, len(tokenizer), template, "all")
    printed = report_of(chat, Conversation(messages, position="chat.jsonl, line 3"))
    assert expected.removeprefix("error: ") in printed and bool(printed) == bool(expected)
    assert printed.startswith("error: ") == expected.startswith("error: ")
    if not printed.startswith("error: "):
        wanted = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
        assert chat.encode([Conversation(messages)], Counter()).tokens.tolist() == wanted


def test_the_warning_is_reported_again_if_the_tokens_are_in_the_cache(load, tmp_path, capfd):
    file = write_records(tmp_path / "a.jsonl", [{"messages": RECORDS["another field"][0]}])
    for _ in range(2):
        load(file, chat_template="chatml")
        printed = r"warning: .*a.jsonl, line 1: the chat .* mood of the user; .* \(1 conversation\)"
        assert re.search(printed, capfd.readouterr().err)


MARKED = "{% generation %}{{ m.content }}{% endgeneration %}"
OPENED, CLOSED = (
    f"{{% if m.role == 'assistant' %}}{{% {tag} %}}{{% endif %}}" for tag in ("generation", "endgeneration")
)
UNMARKED = {  # what a template does: the template of each message m, an answer, the error
    "trims marks": ("{% set turn %}" + MARKED + " {% endset %}{{ turn|trim }}", " Hi ", "changes what it has marked"),
    "has marks already": (MARKED, "a \ufdd0] b", "its text has U+FDD0"),
    "crosses tags": (f"{OPENED}{{{{ m.content }}}}{CLOSED}", "Hi", "syntax error in line 1"),
    "crosses tags, with a date": (f"{{{{ strftime_now('%Y') }}}}{OPENED}{CLOSED}", "Hi", "syntax error in line 1, "),
    "cuts a mark": ("{% set turn %}" + MARKED + "{% endset %}{{ turn[2:] }}", "Hi", "is not after {% generation %}"),
    "leaves a mark": ("{% generation %}{{ m.content }}{% continue %}{% endgeneration %}", "Hi", "left before its end"),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_spans_that_a_template_does_not_mark_well_are_one_line(tokenizer, name):
    template, answer, printed = UNMARKED[name]
    chat = ChatEncoder(tokenizer, len(tokenizer), f"{{% for m in messages %}}{template}{{% endfor %}}", "assistant")
    messages = [says("user", "Hi"), says("assistant", answer)]
    assert printed in report_of(chat, Conversation(messages, position="chat.jsonl, line 3"))


# ----------------------------------------------------------------------------------------------------------------------
# Templates that have a name

NAMED = {  # (template, record): the error or the warning; nothing of all others
    **{
        ("llama3", record): f"leaves out {record.removesuffix(', earlier')}"
        for record in RECORDS
        if "reasoning" in record
    },
    ("mistral", "function"): "error: the role function is none of",
    ("mistral", "another name of a role"): "error: the role human is none of",
    **{(name, "another name of a role"): "does not know its role human" for name in ("chatml", "llama3")},
    **{(name, "another field"): "leaves out mood" for name in base.chat_templates()},
}
ENDS = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "mistral": "EOS"}  # of an answer; EOS is the tokenizer's


@pytest.mark.parametrize("record", [record for record in RECORDS if record not in ("thinking", "older call")])
@pytest.mark.parametrize("name", base.chat_templates())
def test_a_template_with_a_name_writes_all_of_a_conversation_and_marks_what_the_assistant_writes(
    tokenizer, name, record
):
    template = base.read_template(name)
    messages, tools = copy.deepcopy(RECORDS[record])
    chat = ChatEncoder(tokenizer, len(tokenizer), template, "assistant")
    expected = NAMED.get((name, record), "")
    printed = report_of(chat, Conversation(messages, tools, position="chat.jsonl, line 3"))
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
    for (first, last), answer in zip(spans, answers, strict=True):
        assert answer["content"].strip() in text[first:last]
        assert text[first:last].endswith(ENDS[name].replace("EOS", tokenizer.eos_token))


def test_chatml_is_the_usual_one(tokenizer):
    messages, template = [says("system", " Be kind.\n"), HI, HELLO, *MORE], base.read_template("chatml")
    text, prompt = (
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=asks)
        for asks in (False, True)
    )
    assert text == "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    assert prompt == text + "<|im_start|>assistant\n"


def test_a_file_with_a_byte_order_mark_is_read_and_json_or_another_name_is_refused(tmp_path):
    (tmp_path / "a.jinja").write_text(CHATML, encoding="utf-8-sig")
    assert base.read_template(str(tmp_path / "a.jinja")) == CHATML
    (tmp_path / "a.json").write_text(json.dumps({"chat_template": CHATML}))
    with pytest.raises(UserError, match=r"a.json: it is JSON; copy its chat_template into a jinja file"):
        base.read_template(str(tmp_path / "a.json"))
    with pytest.raises(UserError, match=r"--chat-template chatm: cannot be read .* or one of .*chatml"):
        base.read_template("chatm")


# ----------------------------------------------------------------------------------------------------------------------
# Prompts in a file


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
    assert prompts_in(tmp_path, "g.json", json.dumps([{"from": "human", "value": HI["content"]}]))[0].messages == [HI]
    assert len(prompts_in(tmp_path, "e.jsonl", f"{json.dumps(record)}\n" * 3)) == 3
    assert len(prompts_in(tmp_path, "f.jsonl", f"{json.dumps([HI])}\n" * 2)) == 2  # lists of messages


BAD_PROMPTS = {  # file, content: the error
    ("a.json", "{"): "cannot be read",
    ("a.json", "[1]"): "record 1: no conversation, which is messages, ",
    ("a.json", '{"text": "a"}'): "record 1: no conversation, which is messages, ",
    ("a.json", '{"messages": []}'): "record 1: ..? instead",
    ("a.jsonl", "\n"): "it is empty",
}


@pytest.mark.parametrize("name, content", BAD_PROMPTS)
def test_a_file_of_prompts_that_cannot_be_read_is_one_line(tmp_path, name, content):
    with pytest.raises(UserError, match=f"--sample-prompt .*{name}.*{BAD_PROMPTS[name, content]}"):
        prompts_in(tmp_path, name, content)
    with pytest.raises(UserError, match=r"--sample-prompt nothing.jsonl: cannot be read \(.*No such file"):
        read_prompt("nothing.jsonl")
