"""Text: names, numbers and errors in messages, and files of chat templates."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import contextlib
import json
import pathlib
import re
from collections.abc import Iterable

from harness.base.errors import UserError
from harness.base.versions import ROOT


def shortened(names: list[str], count: int = 5) -> str:
    """The first names of a list, and the number of the others."""
    shown = ", ".join(names[:count])
    if len(names) <= count:
        return shown
    return f"{shown} and {len(names) - count:,} more"


def is_url(name: str) -> bool:
    """True for a URL such as `s3://bucket/folder`, false for a path or hub id."""
    return re.match(r"[a-zA-Z][\w+.-]*(://|::)", name) is not None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with the next lines while it ends with a colon, at most 300 characters;
    the exception's type if it is empty. Advice for callers of transformers is removed."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError):
        message = f"no {message}"  # its message is only the key
    line, *others = [line.strip() for line in message.splitlines() if line.strip()]
    while line.endswith(":") and others:
        line = f"{line} {others.pop(0)}"
    return re.sub(r" To enable [^.]*, pass '\w+=\w+' as input\.", "", line)[:300]


def one_line(message: str) -> str:
    """A message with its line breaks escaped."""
    return message.replace("\r", "\\r").replace("\n", "\\n")


def counted(count: int, name: str) -> str:
    """`1 rank`, `1,024 ranks`, `2 batches`."""
    ending = "es" if name.endswith("ch") else "s"
    return f"{count:,} {name}{'' if count == 1 else ending}"


def one_or_more(words: str | Iterable[str]) -> str:
    """A word, or several joined by blanks."""
    return words if isinstance(words, str) else " ".join(map(str, words))


def chat_templates() -> dict[str, pathlib.Path]:
    """{name: file} of the included chat templates."""
    return {path.stem: path for path in sorted((ROOT / "assets" / "chat_templates").glob("*.jinja"))}


def read_template(name: str | None) -> str | None:
    """Read the template of --chat-template, one of `chat_templates` or a file; None without one.

    Raises:
        UserError: it cannot be read.
    """
    if name is None:
        return None
    try:
        template = chat_templates().get(name, pathlib.Path(name).expanduser()).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({first_line(error)}); name a jinja file, or one of {', '.join(chat_templates())}"
        raise UserError(f"--chat-template {name}: {problem}") from error
    with contextlib.suppress(ValueError):
        json.loads(template)  # of tokenizer_config.json or chat_template.json; no template is JSON
        raise UserError(f"--chat-template {name}: it is JSON; copy its chat_template into a jinja file")
    return template
