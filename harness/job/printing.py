"""Printing: lines on stdout, by rank 0 alone."""

import re
import sys

import torch.distributed as dist
from tqdm import tqdm

from harness.job import terminal


def say(*message) -> None:
    """Prints on rank 0, above a progress bar if there is one."""
    if dist.get_rank() == 0:
        tqdm.write(" ".join(map(str, message)))
        sys.stdout.flush()


def say_story(story: str) -> None:
    """Prints a text that the model wrote, broken at words to the width of the terminal."""
    story = re.sub(r"\n(\s*\n)+", "\n\n", story)  # early in training most lines can be blank
    say(terminal.wrap(story, columns=terminal.width() or terminal.PIPED))


def columns(lines: dict[str, str], wrap: bool = False) -> str:
    """A line for each name, with its text in a second column; with `wrap` broken at words to a terminal's width."""
    texts = [f"{name:10} {text}" for name, text in lines.items()]
    if wrap:
        texts = [terminal.wrap(text, 11) for text in texts]
    return "\n".join(texts)
