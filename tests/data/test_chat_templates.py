"""What is trained on of a conversation: what its template marks, or without {% generation %} the same as by hand-made
marks. The templates are small ones by what their models' cards say of the format."""

import itertools
import re
import types
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import transformers
from corpora import CHAT_TEMPLATE, demo_tokenizer, says, write_records

from harness.base.errors import UserError
from harness.data.chat import TODAY, ChatEncoder
from harness.data.header import describe_examples
from harness.data.schema import Conversation

MARKS = re.compile(r"{%-? (end)?generation -?%}")


SYSTEM, HI, HELLO = says("system", "Be kind."), says("user", "Hi."), says("assistant", "Hello! ")
CONVERSATIONS = {
    "one turn": [HI, HELLO],
    "two turns": [HI, HELLO, says("user", "A ball?"), says("assistant", " red\n\nand blue")],
    "system": [SYSTEM, HI, HELLO, says("user", "More"), says("assistant", "No.")],
    "user last": [HI, HELLO, says("user", "And?")],
    "nothing said": [HI, says("assistant", ""), says("user", "?"), says("assistant", "!")],
    "the same said by both": [says("user", "Hello! "), HELLO, says("user", "Hello! "), HELLO],
    "twice": [HI, HELLO, HELLO],
    "with a tool": [HI, says("assistant", "3?"), says("tool", "4"), says("tool", "5"), says("assistant", "9")],
}

# Each with marks by hand around the assistant's turns and their end tokens; without these they are what is published.
CHATML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN = "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}" + CHATML
ALTERNATES = """{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"""
GEMMA = (
    "{{- bos_token }}"
    + ALTERNATES
    + """{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<start_of_turn>model\\n' }}
{%- generation %}{{- message.content | trim + '<end_of_turn>\\n' }}{%- endgeneration %}
{%- else %}{{- '<start_of_turn>user\\n' + message.content | trim + '<end_of_turn>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
)
MISTRAL = (  # no generation prompt: an answer follows [/INST]
    "{{- bos_token }}"
    + ALTERNATES
    + """{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{%- generation %}{{- ' ' + message.content | trim + eos_token }}{%- endgeneration %}{%- endif %}
{%- endfor %}"""
)
SMOLLM3 = """{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '\\n' }}
{%- set start = namespace(at=0) %}{%- if messages[0].role == 'system' %}{{- messages[0].content }}
{%- set start.at = 1 %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages[start.at:] %}
{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- generation %}{{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MACRO = """{%- macro say(message) %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endmacro %}
{%- for message in messages %}{%- set turn %}{{- say(message) }}{%- endset %}{{- turn }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {"macro": MACRO, "chatml": CHATML, "qwen": QWEN, "gemma": GEMMA, "mistral": MISTRAL, "smollm3": SMOLLM3}
REFUSED = {  # by the templates themselves
    (name, conversation) for name in ("gemma", "mistral") for conversation in ("system", "twice", "with a tool")
}


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def chat_encoder(tokenizer, template: str, loss: str = "assistant") -> ChatEncoder:
    return ChatEncoder(tokenizer, len(tokenizer), template, loss)


def test_conversations_are_marked_as_by_transformers(load, tmp_path):
    tokenizer, conversations = demo_tokenizer(CHAT_TEMPLATE), [*CONVERSATIONS.values()]
    (tmp_path / "a.jsonl").touch()  # an empty file does not decide what a corpus is
    write_records(tmp_path / "b.jsonl", [{"messages": messages} for messages in conversations])
    data = load(tmp_path / "*.jsonl", with_tokenizer=tokenizer)
    expected = tokenizer.apply_chat_template(conversations, return_dict=True, return_assistant_tokens_mask=True)
    assert data.has_loss_mask and data.document_mask
    assert data.tokens[:].tolist() == list(itertools.chain(*expected["input_ids"]))
    assert data.tokens.doc_ends.tolist() == np.cumsum([len(ids) for ids in expected["input_ids"]]).tolist()
    assert data.tokens.loss_mask(0, len(data.tokens)).tolist() == list(itertools.chain(*expected["assistant_masks"]))


def test_a_conversation_without_a_mark_is_left_out_and_a_corpus_of_them_is_refused(load, line_of, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    unmarked, options = {"messages": [HI]}, {"chat_template": str(tmp_path / "chat.jinja")}
    problem = r"none of its 1 conversation has a turn .* that the template marks.*--chat-loss all"
    with pytest.raises(UserError, match=problem):
        load(write_records(tmp_path / "a.jsonl", [unmarked]), **options)
    both = write_records(tmp_path / "both.jsonl", [unmarked, {"messages": [HI, HELLO]}])
    assert len(load(both, **options).tokens.doc_ends) == 1
    assert line_of(both, **options).endswith(", left out: conversations without a trained token 1")
    gpt = write_records(tmp_path / "gpt.jsonl", [{"messages": [HI, HELLO, HI, says("gpt", "Bye.")]}])
    with pytest.raises(UserError, match=r"line 1: its role gpt is not trained on; name it assistant"):
        load(gpt, **options)


@pytest.mark.parametrize(
    "begin",
    [
        "{{- 'Today is ' + strftime_now('%d %b %Y') }}",
        "\n{% macro now() %}{{ strftime_now('%F') ~ ' ' }}{% endmacro %}  {{ now() }}\n",
    ],
)
def test_a_template_that_prints_the_date_gives_the_same_tokens_each_day(tokenizer, monkeypatch, begin):
    """Those that it gives on that day, white space included."""
    messages, template = CONVERSATIONS["system"], begin + CHAT_TEMPLATE
    tokens = chat_encoder(tokenizer, template).encode([Conversation(messages)], Counter()).tokens
    clock = types.SimpleNamespace(now=lambda: TODAY)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)
    that_day = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
    assert tokens.tolist() == that_day["input_ids"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_without_marks_the_same_characters_and_tokens_are_trained_on_as_with_them(tokenizer, name, conversation):
    marked, plain = TEMPLATES[name], MARKS.sub("", TEMPLATES[name])
    assert "generation %}" in marked and "generation %}" not in plain
    documents = [Conversation(CONVERSATIONS[conversation], position="chat.jsonl, line 1")]
    if (name, conversation) in REFUSED:
        with pytest.raises(UserError, match=r"chat.jsonl, line 1: the chat template fails, roles must alternate"):
            chat_encoder(tokenizer, plain).encode(documents, Counter())
        return
    by_hand, found = (chat_encoder(tokenizer, template) for template in (marked, plain))
    text, spans = found.render(documents[0])
    assert (text, spans) == by_hand.render(documents[0])
    expected, encoded = (chat.encode(documents, Counter()) for chat in (by_hand, found))
    assert np.array_equal(encoded.tokens, expected.tokens)
    assert np.array_equal(encoded.loss_mask, expected.loss_mask) and encoded.loss_mask.any()


class Changing(NamedTuple):
    """A template that renders a turn otherwise once others follow it."""

    template: str
    conversation: list[dict]
    becomes: str  # in the message


THOUGHT = says("assistant", "<think>\nHm.\n</think>\n\nHello!")
CHANGING = {
    "thoughts of earlier turns removed": Changing(
        CHATML.replace(
            "{{- message.content + '<|im_end|>\\n' }}{%- endg",
            "{%- set content = message.content if loop.last else message.content.split('</think>')[-1].strip() %}"
            "{{- content + '<|im_end|>\\n' }}{%- endg",
        ),
        [HI, THOUGHT, says("user", "More"), says("assistant", "No.")],
        "<think>",
    ),
    "system prompt in the last question": Changing(
        """{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST] ' }}
{%- if loop.index0 == messages | map(attribute='role') | list | length - 2 and messages[0].role == 'system' %}
{{- messages[0].content + ' ' }}{%- endif %}{{- message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}{%- endif %}{%- endfor %}""",
        CONVERSATIONS["system"],
        "Be kind.",
    ),
    "another end of the last turn": Changing(
        "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- else %}{{- eos_token }}{%- endif %}",
        CONVERSATIONS["two turns"],
        "<|endoftext|>",
    ),
    "a generation prompt that no turn has": Changing(
        CHATML.replace("'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif"),
        CONVERSATIONS["one turn"],
        "<think>",
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_template_that_changes_what_came_before_is_refused_and_all_tokens_can_be_trained_on(tokenizer, name):
    template = MARKS.sub("", CHANGING[name].template)
    documents = [Conversation(CHANGING[name].conversation, position="chat.jsonl, line 7")]
    with pytest.raises(UserError) as raised:
        chat_encoder(tokenizer, template).encode(documents, Counter())
    message = str(raised.value)
    assert message.startswith("--dataset chat.jsonl, line 7: its chat template changes earlier messages")
    assert CHANGING[name].becomes in message and "\n" not in message
    assert "{% generation %}" in message and message.endswith("train on all tokens with --chat-loss all")
    assert describe_examples(iter(documents), chat_encoder(tokenizer, template)) == ""  # of the header
    assert chat_encoder(tokenizer, template, "all").encode(documents, Counter()).loss_mask[1:].all()


def test_what_a_template_drops_is_found_where_nothing_came_before_it(tokenizer):
    """One question and its answer are trained on, thoughts included, whatever the template does to earlier turns."""
    template = MARKS.sub("", CHANGING["thoughts of earlier turns removed"].template)
    text, spans = chat_encoder(tokenizer, template).render(Conversation([HI, THOUGHT]))
    assert [text[first:last] for first, last in spans] == [THOUGHT["content"] + "<|im_end|>\n"]


def test_a_conversation_that_the_assistant_begins_is_trained_on_where_the_template_has_a_prompt_for_it(tokenizer):
    begun = Conversation([HELLO, HI, HELLO], position="chat.jsonl, line 2")
    text, spans = chat_encoder(tokenizer, MARKS.sub("", CHATML)).render(begun)
    assert [text[first:last] for first, last in spans] == ["Hello! <|im_end|>\n"] * 2
    with pytest.raises(UserError, match=r"line 2: it begins with the assistant.*--skip-bad-records"):
        chat_encoder(tokenizer, MARKS.sub("", QWEN)).encode([begun], Counter())


def test_the_header_says_how_turns_are_found(tokenizer):
    lines = [chat_encoder(tokenizer, template).describe()["trained on"] for template in (CHATML, MARKS.sub("", CHATML))]
    found = "the assistant's turns, found by rendering prefixes"
    assert lines == ["the assistant's turns, marked by the chat template", found]


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
WITH_CALL = [says("user", "Call get_weather."), says("assistant", "", tool_calls=[CALL])]
PARTS = [HI, says("assistant", [{"type": "text", "text": "Hi."}, {"type": "text", "text": "Bye."}])]
TEXT_OR = "message.content if message.content is string else"
MISREAD = {  # in the place of the content in CHATML, messages: the error; RECORDS in test_chat_omissions.py has more
    "no call": ("message.content", WITH_CALL, "leaves out its call of get_weather"),
    "the names of calls": (
        "message.content ~ ((message.tool_calls or []) | map(attribute='function.name') | join)",
        WITH_CALL,
        "leaves out arguments of its call of get_weather",
    ),
    "joined parts": ("(message.content | join)", PARTS, "the content of its assistant is a list of .* writes as it is"),
    "no parts": (f"({TEXT_OR} '')", PARTS, "a list of parts, which the chat template leaves out"),
    "the first part": (f"({TEXT_OR} message.content[0].text)", PARTS, "a list of parts, which .* leaves out"),
}


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("name", MISREAD)
def test_what_the_template_does_not_read_is_refused_and_named(tokenizer, name, marks, loss):
    """Also if a list of tools, which it reads, or the user names the function."""
    content, messages, problem = MISREAD[name]
    misread = Conversation(messages, tools=[CALL], position="chat.jsonl, line 3")
    template = "{{- tools | tojson }}" + CHATML.replace("message.content", content)
    template = template if marks else MARKS.sub("", template)
    with pytest.raises(UserError, match=f"line 3: .*{problem}"):
        chat_encoder(tokenizer, template, loss).encode([misread], Counter())


@pytest.mark.parametrize("marks", [True, False])
def test_of_a_prompt_of_messages_nothing_is_trained_on(tokenizer, marks):
    """Its earlier answers are part of the prompt."""
    template = CHATML if marks else MARKS.sub("", CHATML)
    conversation = Conversation(CONVERSATIONS["two turns"], layout="prompt+completion", first_trained=3)
    text, spans = chat_encoder(tokenizer, template).render(conversation)
    assert [text[first:last] for first, last in spans] == [" red\n\nand blue<|im_end|>\n"]
