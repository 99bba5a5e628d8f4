"""The pictures of the documents, all by one command, a few minutes on two cores:

    python -m tools.gallery                         # all, into docs/images
    python -m tools.gallery --only house terminal   # some
    python -m tools.gallery --out /tmp/pictures     # elsewhere

`report`, `tensorboard` and `profile` share one demo run, `terminal` has a run of its own that Ctrl-C ends, `plan` plans
and `house` reads the imports. Pages are drawn by a Chromium without a window; where there is none, a line says which
pictures are left. The view of a wandb project is drawn by wandb's server: that picture is left to a person.
Independent of what the pictures show.
"""

import argparse
import collections
import fcntl
import functools
import html
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

from harness.base import console
from tools import house

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = "--demo --run-name demo --eval-interval 68 --checkpoint-interval 170 --log-interval 5"
DEMO += " --log-with tensorboard --profile"
INTERRUPTED = "--demo --sequence-length 128 --batch-size 2 --checkpoint-interval 100 --run-name first"
INTERRUPTED += " --cache-dir outputs/cache"
PLAN = '--plan --plan-gpus 4,8,64 --plan-gpu "H100 SXM" --gpu-hour-usd 3 --model llama3.2-1b --plan-seconds 12'
COLUMNS, ROWS = 100, 50
CHARACTER, LINE = 8.43, 18  # pixels of the picture of a terminal
PAPER, INK, QUIET, BAR = "#16181d", "#e3e6eb", "#8b93a1", "#7fd1b9"
PROFILE_WIDTH, PROFILE_ROWS = 1120, 6  # pixels, levels of nested operators
PORT = 16006  # of tensorboard, on this machine alone
BY_HAND = (
    "wandb: by hand, as wandb's server draws it: python -m tools.wandb_view ENTITY/PROJECT, after a run with wandb"
)


class MissingError(Exception):
    """A picture cannot be made here."""


def find_chromium() -> str:
    """The program that draws pages.

    Raises:
        MissingError: there is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    raise MissingError("needs Chromium (apt-get install chromium), which draws pages")


def draw_page(address: str, picture: pathlib.Path, size: str, *flags: str) -> None:
    """A picture of a page as a browser shows it; `size` is width,height in pixels."""
    with tempfile.TemporaryDirectory() as profile:
        command = [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={size}", f"--user-data-dir={profile}", "--virtual-time-budget=10000", *flags]
        subprocess.run([*command, f"--screenshot={picture}", address], check=True, capture_output=True, timeout=600)


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def start_in(folder: pathlib.Path, flags: str, **options) -> subprocess.Popen:
    """The program in a folder that looks like the repository's, so that no path of this machine is shown."""
    for name in ("train_fsdp.py", "utils.py", "harness", "assets"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    environment = os.environ | {"PYTHONUTF8": "1"} | options.pop("env", {})
    command = f".venv/bin/python train_fsdp.py {flags}"
    return subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=environment, **options)


@functools.cache
def demo_run(folder: pathlib.Path) -> pathlib.Path:
    """The folder of a demo run that is done.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process = start_in(folder, DEMO, stdout=subprocess.DEVNULL)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, "the demo")
    return folder / "outputs" / "demo"


def interrupted_run(folder: pathlib.Path) -> tuple[str, str]:
    """What a terminal was sent by a run until Ctrl-C, soon after its second checkpoint, and after it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start_in(folder, INTERRUPTED, env={"TERM": "xterm"}, start_new_session=True, **streams)
    os.close(theirs)
    sent, before = b"", b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the last one has closed it
            break
        sent += part
        seen_bar = sent.count(b"saved      step-") >= 2 and re.search(rb"\r2\d\d/[^\r\n]*eta[^\r\n]*$", sent)
        if not before and seen_bar:
            before = sent
            os.killpg(process.pid, signal.SIGINT)
    process.wait()
    os.close(ours)
    return before.decode(), sent[len(before) :].decode()


# ----------------------------------------------------------------------------------------------------------------------
# A terminal as a picture


def lines_of(sent: str) -> list[str]:
    """The lines that a terminal shows: of each what was written last."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    shown = []
    for line in plain.split("\n"):
        last = line.rstrip("\r").rpartition("\r")[2].rstrip()
        shown += [last[start : start + COLUMNS] for start in range(0, max(1, len(last)), COLUMNS)]
    return shown


def terminal_picture(command: str, before: str, after: str) -> str:
    """An SVG of the command, what was shown until Ctrl-C with the bar below, a rule, and what came then."""
    shown, ended = lines_of(before), lines_of(after)
    words = f"$ .venv/bin/python train_fsdp.py {command}"
    rows = [(line, QUIET) for line in lines_of(words)]
    rows += [(line, INK) for line in shown[:-1]] + [(shown[-1], BAR), ("", "rule")]
    rows.append(("then, in place of the bar, after Ctrl-C:", QUIET))
    rows += [(line, INK) for line in ended if line]
    width, height, parts, y = round(COLUMNS * CHARACTER) + 32, 30 + LINE * len(rows), [], 30
    for line, color in rows:
        if color == "rule":
            parts.append(f'<line x1="16" x2="{width - 16}" y1="{y - 6}" y2="{y - 6}" stroke="#4a5060"/>')
        elif line:
            length = f'textLength="{len(line) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            parts.append(
                f'<text x="16" y="{y}" fill="{color}" xml:space="preserve" {length}>{html.escape(line)}</text>'
            )
        y += LINE
    font = 'font-family="ui-monospace, \'DejaVu Sans Mono\', Menlo, Consolas, monospace" font-size="14"'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    title = f"<title>A run on a terminal of {COLUMNS} columns</title>"
    return "\n".join(
        [head + title, f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>', *parts, "</svg>\n"]
    )


# ----------------------------------------------------------------------------------------------------------------------
# A profile as a picture


def profile_picture(trace: dict) -> str:
    """An SVG of the operators of a trace of torch.profiler on its busiest thread, nested below each other."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    busiest = collections.Counter(event["tid"] for event in events).most_common(1)[0][0]
    events = sorted((event for event in events if event["tid"] == busiest), key=lambda one: (one["ts"], -one["dur"]))
    begin = events[0]["ts"]
    length = max(event["ts"] + event["dur"] for event in events) - begin
    parts, open_until = [], []
    for event in events:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        row, x = len(open_until), (event["ts"] - begin) / length * PROFILE_WIDTH
        open_until.append(event["ts"] + event["dur"])
        width = event["dur"] / length * PROFILE_WIDTH
        if row >= PROFILE_ROWS or width < 0.5:
            continue
        hue = sum(map(ord, event["name"])) % 360
        name, place = html.escape(event["name"]), f'x="{x:.1f}" y="{30 + 22 * row}" width="{width:.1f}" height="20"'
        parts.append(f'<rect {place} fill="hsl({hue},45%,70%)"><title>{name}</title></rect>')
        if width > 7 * len(event["name"]):
            parts.append(f'<text x="{x + 3:.1f}" y="{44 + 22 * row}">{name}</text>')
    height = 36 + 22 * PROFILE_ROWS
    size = f'width="{PROFILE_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    title = f'<text x="4" y="18">{length / 1000:,.1f} ms of the profiled steps, operators of the busiest thread</text>'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', title, *parts, "</svg>\n"])


# ----------------------------------------------------------------------------------------------------------------------
# The pictures


def make_house(out: pathlib.Path, work: pathlib.Path) -> None:
    (out / "house.svg").write_text(house.picture())


def make_plan(out: pathlib.Path, work: pathlib.Path) -> None:
    find_chromium()
    if start_in(work, f"{PLAN} --html plan.html", stdout=subprocess.DEVNULL).wait():
        raise MissingError("the plan failed; its line is above")
    draw_page((work / "plan.html").as_uri(), out / "plan.png", "1120,1000")


def make_terminal(out: pathlib.Path, work: pathlib.Path) -> None:
    (out / "terminal.svg").write_text(terminal_picture(INTERRUPTED, *interrupted_run(work)))


def make_report(out: pathlib.Path, work: pathlib.Path) -> None:
    find_chromium()
    page = (demo_run(work) / "report.html").as_uri()
    draw_page(page, out / "report.png", "1120,1700")
    draw_page(page, out / "report-dark.png", "1120,1700", "--blink-settings=preferredColorScheme=0")


def make_tensorboard(out: pathlib.Path, work: pathlib.Path) -> None:
    find_chromium()
    logs = demo_run(work).parent
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", str(PORT), "--load_fast=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pins = json.dumps([{"plugin": "scalars", "tag": tag} for tag in ("train/loss", "eval/loss")])
    try:
        time.sleep(20)  # it has read the run by then
        address = f"http://127.0.0.1:{PORT}/?smoothing=0&pinnedCards={pins.replace(' ', '')}#timeseries"
        draw_page(address, out / "tensorboard.png", "1400,1180", "--virtual-time-budget=30000")
    finally:
        server.terminate()
        server.wait()


def make_profile(out: pathlib.Path, work: pathlib.Path) -> None:
    trace = json.loads((demo_run(work) / "profile" / "rank-0.json").read_text())
    (out / "profile.svg").write_text(profile_picture(trace))


PICTURES = {
    "house": make_house,
    "plan": make_plan,
    "terminal": make_terminal,
    "report": make_report,
    "tensorboard": make_tensorboard,
    "profile": make_profile,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gallery", description="The pictures of the documents.")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), help="these pictures [all]")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "images", help="the folder [docs/images]")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    out, failed = given.out.resolve(), False
    with tempfile.TemporaryDirectory(prefix="gallery-") as work:
        for name in given.only:
            try:
                PICTURES[name](out, pathlib.Path(work))
            except (MissingError, OSError, subprocess.SubprocessError) as error:
                failed = True
                print(f"{name}: not made: {error}", flush=True)
            else:
                print(f"{name}: made", flush=True)
    print(BY_HAND)
    return 1 if failed else 0


if __name__ == "__main__":
    console.never_fail()
    sys.exit(main())
