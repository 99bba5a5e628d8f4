"""tools.gallery: the pictures that it draws itself, and what it says where it cannot draw."""

import pathlib
import re
import shlex
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT, parse

from tools import gallery


def test_a_terminal_shows_of_each_line_what_was_written_last_in_lines_of_its_width():
    sent = "one\r\n\r 1/9 old\r\x1b[32mdata\x1b[0m  new\r\n" + "x" * (gallery.COLUMNS + 5) + "\r\n217/340 bar"
    lines = ["one", "data  new", "x" * gallery.COLUMNS, "xxxxx", "217/340 bar"]
    assert gallery.lines_of(sent) == lines


def test_the_picture_of_a_terminal_has_every_line_the_bar_and_what_came_after_ctrl_c():
    picture = gallery.terminal_picture(
        "--demo", "data  <new> &\r\n217/340  loss 1.2  eta 00:10", "stopped    by Ctrl-C\r\n"
    )
    texts = [element.text for element in ElementTree.fromstring(picture) if element.tag.endswith("text")]
    ending = ["then, in place of the bar, after Ctrl-C:", "stopped    by Ctrl-C"]
    assert texts == [
        "$ .venv/bin/python train_fsdp.py --demo",
        "data  <new> &",
        "217/340  loss 1.2  eta 00:10",
        *ending,
    ]


def event(name, ts, dur, tid=1, cat="cpu_op"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_the_picture_of_a_profile_nests_operators_of_the_busiest_thread():
    inner = [event("aten::mm", 100, 300), event("aten::add", 500, 100)]
    others = [event("elsewhere", 0, 5000, tid=2), event("step", 0, 9000, cat="user_annotation")]
    trace = {"traceEvents": [*inner, event("aten::linear", 0, 1000), *others, event("aten::norm", 1000, 1000)]}
    picture = ElementTree.fromstring(gallery.profile_picture(trace))
    boxes = [element for element in picture if element.tag.endswith("rect")][1:]
    places = [(float(box.get("x")), int(box.get("y")), float(box.get("width"))) for box in boxes]
    assert places == [(0, 30, 560), (56, 52, 168), (280, 52, 56), (560, 30, 560)]
    texts = [element.text for element in picture if element.tag.endswith("text")]
    assert texts == [
        "2.0 ms of the profiled steps, operators of the busiest thread",
        "aten::linear",
        "aten::mm",
        "aten::norm",
    ]


def test_where_there_is_no_chromium_a_line_says_so_and_other_pictures_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gallery.shutil, "which", lambda name: None)
    assert gallery.main(["--only", "plan", "house", "report", "--out", str(tmp_path / "out")]) == 1
    plan, house, report, wandb = capsys.readouterr().out.splitlines()
    assert plan.startswith("plan: not made: needs Chromium") and report.startswith("report: not made: needs Chromium")
    assert house == "house: made" and wandb.startswith("wandb: by hand")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["house.svg"]


@pytest.mark.parametrize("flags", [gallery.DEMO, gallery.INTERRUPTED, gallery.PLAN])
def test_the_flags_of_its_runs_are_ones_that_the_program_takes(flags, tmp_path, monkeypatch):

    monkeypatch.chdir(tmp_path)
    parse(shlex.split(flags))


def test_every_picture_of_the_documents_is_one_that_it_makes():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+\.\w+)\)", page.read_text())}
    made = set(re.findall(r"\"([\w-]+\.(?:png|svg))\"", pathlib.Path(gallery.__file__).read_text()))
    assert shown and shown <= made
