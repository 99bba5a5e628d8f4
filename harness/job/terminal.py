"""Terminal: rank 0's lines on stdout, warnings and errors on stderr, the progress bar, and the last lines of a stopped
run with the command that resumes it. Imports nothing heavy."""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from harness import base, flags

if TYPE_CHECKING:
    from torch import nn

BAR_FORMAT = "{n_fmt}/{total_fmt}{postfix}, eta {remaining} {bar}"  # a narrow terminal cuts off its end
CLEAR = "\r\x1b[K"  # erases the bar


# ---- Lines -----------------------------------------------------------------------------------------------------------


def is_first_rank() -> bool:
    """Return True on rank 0, from the environment: known before the ranks have met."""
    return os.environ.get("RANK", "0") == "0"


def print0(*message: object) -> None:
    """Print on rank 0, above a progress bar if there is one."""
    if is_first_rank():
        tqdm.write(" ".join(map(str, message)))
        sys.stdout.flush()


def print_error(text: str) -> None:
    """Write lines to stderr, from any rank and thread, and erase a bar on the last line."""
    before = CLEAR if is_terminal(sys.stderr) else ""
    line = f"{before}{text}\n"
    base.send(2, line.encode(sys.stderr.encoding or "utf-8", "replace"))


def warn(text: str) -> None:
    """Print a warning on rank 0."""
    if is_first_rank():
        print_error(f"train_fsdp.py: warning: {text}")


def columns(lines: dict[str, str]) -> str:
    """Format a line for each name, with its text in a second column."""
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def is_terminal(stream: TextIO) -> bool:
    """Return True if a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


# ---- Bars ------------------------------------------------------------------------------------------------------------


def layer_progress(layers: "nn.ModuleList", shown: bool) -> Iterable[tuple[int, Any]]:
    """Return (index, layer) of each layer, with a bar on rank 0's terminal if building them takes longer than a second
    and `shown`."""
    shown = shown and is_first_rank() and is_terminal(sys.stderr)
    bar: dict[str, Any] = {"leave": False, "delay": 1, "unit": "layer", "dynamic_ncols": True, "disable": not shown}
    return tqdm(enumerate(layers), "building layers", len(layers), **bar)


def step_bar(num_steps: int, step: int, shown: bool) -> tqdm:
    """Return a bar below the log lines, as wide as the terminal: the steps, the text of `set_postfix_str`, the time
    left and, if there is room, a meter."""
    return tqdm(
        total=num_steps, initial=step, leave=False, dynamic_ncols=True, disable=not shown, bar_format=BAR_FORMAT
    )


# ---- Commands and the last lines of stopped runs ---------------------------------------------------------------------


def launcher() -> str:
    """Return the command before the flags, quoted for the shell: the interpreter, or torchrun with the ranks of this
    node, and this script. Paths in the current folder are relative."""
    words = [sys.executable]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', 1)}"]
    folder = ""
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed
        folder = os.getcwd() + os.sep
    return shlex.join(word.removeprefix(folder) for word in [*words, sys.argv[0]])


def command(settings: flags.Flags, folder: pathlib.Path) -> str:
    """Return the shell command that resumes this run from its newest checkpoint."""
    explicit = flags.run_flags(settings)
    if folder.parent == pathlib.Path(settings.output_dir).expanduser():
        return flags.shell_command(launcher(), explicit, resume="auto", run_name=folder.name)
    return flags.shell_command(launcher(), explicit, resume=folder)


def last_lines(lines: dict[str, str]) -> str:
    """Format the last lines of a run that a signal ended. Under torchrun, blank lines separate them from its log of the
    signal and its traceback of 25 lines."""
    text = columns(lines)
    return f"\n{text}\n" if "TORCHELASTIC_RUN_ID" in os.environ else text


def describe_interrupt(settings: flags.Args, step: int, phase: str, folder: pathlib.Path | None) -> str:
    """Return the last lines after Ctrl-C: the phase, the step, the newest checkpoint, and the command that resumes."""
    if not settings.trains():
        return "stopped    by Ctrl-C"
    where = f"in {phase} of step {step:,}" if step else "before the first step"
    lines = {"stopped": f"by Ctrl-C {where}"}
    newest = base.newest_checkpoint(folder)
    if folder and newest:
        lines["stopped"] += f"; {newest.name} is saved"
        lines["resume"] = command(settings, folder)
    return last_lines(lines)


def describe_stop(name: str, folder: pathlib.Path | None) -> str:
    """Return the line of a run that cannot save when `name`, a signal or the loss of its launcher, ends it."""
    newest = base.newest_checkpoint(folder)
    kept = f"; --resume auto continues from {newest.name}" if newest else ""
    return f"train_fsdp.py: {name} outside training, nothing to save{kept}"
