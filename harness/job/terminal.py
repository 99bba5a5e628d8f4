"""Terminal: the first line of a run, before torch is loaded, words wrapped to the width of the screen, the bar below
the log lines, and the last lines after Ctrl-C. Called by the script and by whatever prints. Imports nothing heavy;
independent of what is trained."""

import contextlib
import os
import pathlib
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterable

import psutil
from tqdm import tqdm

from harness import base
from harness.base import saved
from harness.flags import flags_of_run, to_paste
from harness.job import endings

PIPED = 120  # columns of a story where there is no terminal
BAR_FORMAT = "{n_fmt}/{total_fmt}{postfix}, eta {remaining} {bar}"  # a narrow terminal loses the end of it
CLEAR = "\r\x1b[K"  # erases the bar on this line
INTERRUPTED = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 143
LAUNCHER = os.getppid()  # pid of torchrun or accelerate; another process becomes the parent when it dies
LAUNCHED: list[str] = []  # the command line of that process, for when it is gone


def is_first_rank() -> bool:
    """Whether this process is rank 0, by its environment: known before the ranks have met."""
    return os.environ.get("RANK", "0") == "0"


def is_terminal(stream) -> bool:
    """Whether a stream goes to a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Columns of the terminal that stdout goes to; None where it goes elsewhere."""
    try:
        if is_terminal(sys.stdout):
            return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # it is closed
        pass
    return None


def begin(settings) -> None:
    """Prints the first line, before torch is loaded, and lets signals end the process with one line until `StopRequest`
    reads them."""
    trains = not (settings.plan or settings.measure) and settings.num_steps

    def interrupt(number: int, frame) -> None:
        exit_now(describe_interrupt(settings, 0, "", None) if is_first_rank() else "")

    def stop(number: int, frame) -> None:
        speaks = is_first_rank() and trains
        exit_now(describe_stop(signal.Signals(number).name, None) if speaks else "", STOPPED)

    signal.signal(signal.SIGINT, interrupt)
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    what = f"{settings.model} on {settings.describe_dataset()}, {settings.describe_length()}"
    if settings.plan or settings.measure:
        what = f"{'plan of' if settings.plan else 'measuring with'} {settings.model}"
    elif settings.show_samples:
        what = f"samples of step {settings.show_samples:,} on {settings.describe_dataset()}"
    elif settings.num_steps == 0:
        what = f"{settings.model}, without training"
    if is_first_rank() and not settings.json:  # a plan as JSON is all that stdout has
        print(f"train_fsdp {what}; loading torch", flush=True)
    with contextlib.suppress(psutil.Error):
        LAUNCHED[:] = psutil.Process(LAUNCHER).cmdline()


def exit_now(text: str, exit_code: int = INTERRUPTED) -> None:
    """Ends this process at once, from any thread, after a text if there is one."""
    if text:
        print_error(text)
    endings.announce(exit_code, patience=3)
    os._exit(exit_code)


def print_error(text: str) -> None:
    """Writes lines to stderr, from any thread; a bar on the last line is erased."""
    before = CLEAR if is_terminal(sys.stderr) else ""
    line = f"{before}{text}\n"
    base.send(2, line.encode(sys.stderr.encoding or "utf-8", "replace"))


def wrap(text: str, indent: int = 0, columns: int | None = None) -> str:
    """The text with its lines broken at spaces to `columns`, by default the width of the terminal; unchanged without a
    terminal. `indent` is that of the lines after a break. A word longer than a line, such as a URL, stays whole."""
    columns = columns or width()
    if not columns:
        return text
    options = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    fill = textwrap.TextWrapper(columns, subsequent_indent=" " * min(indent, columns // 3), **options).fill
    return "\n".join(map(fill, text.split("\n")))


def progress(items: Iterable, total: int, what: str) -> Iterable:
    """The items; where they take longer than a second, a bar on rank 0's terminal shows how many are done. `what` names
    them; without it there is no bar."""
    if not (what and is_first_rank() and is_terminal(sys.stderr)):
        return items
    return tqdm(items, what, total, leave=False, delay=1, unit="layer", dynamic_ncols=True)


def step_bar(num_steps: int, step: int, shown: bool) -> tqdm:
    """One line below the log lines, as wide as the terminal is at that moment: the steps, of the last log line what
    `set_postfix_str` was given, the time left, and a meter where there is room."""
    return tqdm(
        total=num_steps, initial=step, leave=False, dynamic_ncols=True, disable=not shown, bar_format=BAR_FORMAT
    )


def describe_interrupt(settings, step: int, phase: str, folder: pathlib.Path | None) -> str:
    """The last lines after Ctrl-C: where the run was, what is saved, and the command that goes on."""
    if settings.plan or settings.measure or not settings.num_steps:
        return "stopped    by Ctrl-C"
    length = f"{settings.num_tokens:,} tokens" if settings.num_tokens else f"{settings.num_steps:,}"
    where = f"in {phase} of step {step:,} of {length}" if step else "before the first step"
    lines = [f"stopped    by Ctrl-C {where}"]
    newest, interval = saved.newest(folder), settings.checkpoint_interval
    if newest:
        lines += [f"saved      {newest}", f"go on      {command(settings, folder)}"]
    elif step and not interval:
        lines.append("saved      nothing: --checkpoint-interval N saves every N steps")
    elif step and interval >= step:
        lines.append(f"saved      nothing yet, the first after step {interval:,}")
    elif step:
        lines.append("saved      nothing")
    return "\n".join(lines)


def describe_stop(name: str, folder: pathlib.Path | None) -> str:
    """The line of a run that `name`, a signal or the loss of its launcher, ends where it cannot save."""
    newest = saved.newest(folder)
    kept = f"; {newest.name} is there, --resume auto goes on from it" if newest else ""
    return f"train_fsdp.py: {name} outside training, nothing to save{kept}"


def command(settings, folder: pathlib.Path) -> str:
    """The command, for the shell, that goes on with this run from its newest checkpoint."""
    flags = flags_of_run(settings, folder)
    if folder.parent == pathlib.Path(settings.output_dir).expanduser():
        return to_paste(launcher(), flags, resume="auto", run_name=folder.name)
    return to_paste(launcher(), flags, resume=folder)


def lost_launcher() -> bool:
    """Whether the torchrun or accelerate that started this rank is gone."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER


def launcher() -> str:
    """The words before the flags, quoted for the shell: the interpreter or launcher, its own flags, this script. Files
    of the current folder are named as from there."""
    words, script = [sys.executable], sys.argv[0]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', 1)}"]
        with contextlib.suppress(psutil.Error, ValueError):  # it is gone, or was started by another name
            launched = LAUNCHED or psutil.Process(os.getppid()).cmdline()
            names = [os.path.basename(word) for word in launched]
            words = launched[: names.index(os.path.basename(script))]
            if len(words) > 1 and os.path.basename(words[1]) in ("torchrun", "accelerate"):
                del words[0]  # they are scripts, and find their interpreter
    folder = os.getcwd() + os.sep
    return shlex.join(word.removeprefix(folder) for word in [*words, script])
