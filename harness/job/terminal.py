"""Terminal: what a job prints: lines of rank 0 on stdout, warnings and errors on stderr, the bar below the log lines,
and the last lines of a run that was stopped, with the command that goes on. Imports nothing heavy."""

import os
import pathlib
import shlex
import sys
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm

from harness import base
from harness import flags as flag_rules

BAR_FORMAT = "{n_fmt}/{total_fmt}{postfix}, eta {remaining} {bar}"  # a narrow terminal loses the end of it
IN_A_STEP = ("data", "forward", "backward", "optimizer")  # phases in which a step is not done
CLEAR = "\r\x1b[K"  # erases the bar on this line


# ---- Lines -----------------------------------------------------------------------------------------------------------


def is_first_rank() -> bool:
    """Whether this process is rank 0, by its environment: known before the ranks have met."""
    return os.environ.get("RANK", "0") == "0"


def print0(*message: object) -> None:
    """Prints on rank 0, above a progress bar if there is one."""
    if is_first_rank():
        tqdm.write(" ".join(map(str, message)))
        sys.stdout.flush()


def print_error(text: str) -> None:
    """Writes lines to stderr, from any rank and any thread; a bar on the last line is erased."""
    before = CLEAR if is_terminal(sys.stderr) else ""
    line = f"{before}{text}\n"
    base.send(2, line.encode(sys.stderr.encoding or "utf-8", "replace"))


def warn(text: str) -> None:
    """Prints a warning on rank 0."""
    if is_first_rank():
        print_error(f"train_fsdp.py: warning: {text}")


def columns(lines: dict[str, str]) -> str:
    """A line for each name, with its text in a second column."""
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream goes to a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


# ---- Bars ------------------------------------------------------------------------------------------------------------


def progress(items: Iterable, total: int, what: str) -> Iterable:
    """The items; where they take longer than a second, a bar on rank 0's terminal shows how many are done. `what` names
    them; without it there is no bar."""
    shown = what and is_first_rank() and is_terminal(sys.stderr)
    return tqdm(items, what, total, leave=False, delay=1, unit="layer", dynamic_ncols=True, disable=not shown)


def step_bar(num_steps: int, step: int, shown: bool) -> tqdm:
    """One line below the log lines, as wide as the terminal is at that moment: the steps, of the last log line what
    `set_postfix_str` was given, the time left, and a meter where there is room."""
    return tqdm(
        total=num_steps, initial=step, leave=False, dynamic_ncols=True, disable=not shown, bar_format=BAR_FORMAT
    )


# ---- Commands, and the ends of stopped runs --------------------------------------------------------------------------


def launcher() -> str:
    """The words before the flags, quoted for the shell: the interpreter, or torchrun with the ranks of this node, and
    this script. Files of the current folder are named as from there."""
    words = [sys.executable]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', 1)}"]
    folder = os.getcwd() + os.sep
    return shlex.join(word.removeprefix(folder) for word in [*words, sys.argv[0]])


def command(settings: flag_rules.Flags, folder: pathlib.Path) -> str:
    """The command, for the shell, that goes on with this run from its newest checkpoint."""
    flags = flag_rules.run_flags(settings)
    if folder.parent == pathlib.Path(settings.output_dir).expanduser():
        return flag_rules.shell_command(launcher(), flags, resume="auto", run_name=folder.name)
    return flag_rules.shell_command(launcher(), flags, resume=folder)


def last_lines(lines: dict[str, str]) -> str:
    """The columns of a run that a signal ended. Under torchrun they stand clear of its own lines: it logs the signal
    before them, and raises a traceback of 25 lines when the ranks have left."""
    text = columns(lines)
    return f"\n{text}\n" if "TORCHELASTIC_RUN_ID" in os.environ else text


def describe_interrupt(
    settings: flag_rules.Args, step: int, phase: str, folder: pathlib.Path | None, resumed_step: int
) -> str:
    """The last lines after Ctrl-C: where the run was, what is lost, and the command that goes on. `resumed_step` is
    the one that this start went on from."""
    if not settings.trains():
        return "stopped    by Ctrl-C"
    length = f"{settings.num_steps:,}"
    if settings.num_tokens:
        length = f"{settings.num_tokens:,} tokens"
    elif settings.num_epochs:
        length = settings.describe_epochs()
    where = f"in {phase} of step {step:,} of {length}" if step else "before the first step"
    lines = {"stopped": f"by Ctrl-C {where}"}
    newest = base.newest_checkpoint(folder)
    saved_step = max(resumed_step, base.step_in_name(newest) or 0 if newest else 0)
    done = step - 1 if phase in IN_A_STEP else step
    if done > saved_step:
        lines["lost"] = f"{base.counted(done - saved_step, 'step')}, since step {saved_step:,}"
        if not saved_step:
            lines["lost"] = f"{base.counted(done, 'step')}; --checkpoint-interval N saves every N steps"
    elif step and saved_step:
        lines["lost"] = f"nothing, step {saved_step:,} is saved"
    if folder and newest:
        lines["go on"] = command(settings, folder)
    return last_lines(lines)


def describe_stop(name: str, folder: pathlib.Path | None) -> str:
    """The line of a run that `name`, a signal or the loss of its launcher, ends where it cannot save."""
    newest = base.newest_checkpoint(folder)
    kept = f"; {newest.name} is there, --resume auto goes on from it" if newest else ""
    return f"train_fsdp.py: {name} outside training, nothing to save{kept}"
