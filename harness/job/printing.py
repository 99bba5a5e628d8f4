"""Printing: the lines of rank 0."""

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
    """A text that the model wrote, broken at words to the width of the terminal."""
    story = re.sub(r"\n(\s*\n)+", "\n\n", story)  # an early one can be mostly blank lines
    say(terminal.wrap(story, columns=terminal.width() or terminal.PIPED))


def columns(lines: dict[str, str], wrap: bool = False) -> str:
    """A line for each name; with `wrap` broken at words to the width of a terminal."""
    texts = [f"{name:10} {text}" for name, text in lines.items()]
    return "\n".join(terminal.wrap(text, 11) if wrap else text for text in texts)
