"""The page that a run leaves: what is on it, that nothing in a run's files can break it, how it is drawn."""

import dataclasses
import html
import json
import pathlib
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, parse

from harness.base.errors import UserError
from harness.report import page
from harness.report.page import write_report
from harness.report.page_parts import plotly_js
from harness.report.plan_page import write_plan

EVIL = "<script>document.title='broken'</script><img src=http://127.0.0.1:9/x>{{plotly}}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
drawn_only = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium to draw the page")


def line(step: int, **more) -> dict:
    """A log line of a run on GPUs."""
    figures = {"loss": 8 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_seen": 1000 * step}
    figures |= {"tokens_per_sec": 5e4, "step_time_ms": 20.0, "mfu_percent": 41.5, "data_wait_percent": 0.5}
    figures |= {"peak_memory_active": 30.0, "peak_memory_alloc": 31.0, "peak_memory_reserved": 40.0}
    return {"step": step} | figures | more


def write_run(folder: pathlib.Path, lines: list, **config) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    flags = dataclasses.asdict(parse(["--model", "demo", "--num-steps", "40"]))
    (folder / "config.json").write_text(json.dumps({"flags": flags, "gpu": "H100", "world_size": 4} | config))
    return folder


@pytest.fixture
def full(tmp_path) -> pathlib.Path:
    """A resumed run on GPUs with stories, one of them an attack, and a plan; its last line is cut off."""
    lines = [line(step) for step in range(1, 41)]
    for step, text in ((10, EVIL), (20, "a frog & a fox"), (30, f"a frog came home{EVIL}")):
        lines[step - 1] |= {"eval_loss": 9 / step, "samples": [{"prompt": "a frog", "text": text}]}
    planned = {"predicted_step_time_ms": 16.0, "predicted_peak_memory_reserved": 44.0}
    last = lines[-1] | planned | {"final": True, "samples": [{"prompt": "a frog", "text": "a frog, at last"}]}
    starts = [{"time": f"2026-11-2{n}T10:00:00Z", "step": 20 * n, "lost_steps": 7 * n, "world_size": 4} for n in (0, 1)]
    folder = write_run(tmp_path / f"run {EVIL[:8]}", [*lines, last], starts=starts, versions={"torch": "2.13.0"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    return folder


def data_of(path: pathlib.Path) -> dict:
    """What the script of a page shows."""
    _, _, rest = path.read_text().partition('<script type="application/json" id="data">')
    return json.loads(rest.partition("</script>")[0])


def parts_of(path: pathlib.Path, kind: str) -> list[dict]:
    return [part for section in data_of(path)["sections"] for part in section["parts"] if part["kind"] == kind]


def charts_on(path: pathlib.Path) -> dict[str, dict]:
    """A page's charts by their titles."""
    return {chart["title"]: chart for part in parts_of(path, "charts") for chart in part["charts"]}


def strings_in(value) -> list[str]:
    """The strings in the data of a page that a person reads, in their order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in value if key not in ("kind", "look", "traces")]
    if not isinstance(value, list):
        return []
    strings = []
    for one in value:
        strings += strings_in(one)
    return strings


def text_of(path: pathlib.Path) -> str:
    """The words of a page; a test below has a browser show them."""
    return " ".join(strings_in(data_of(path)))


def test_a_page_has_the_runs_figures_stories_plan_starts_and_flags(full):
    path = write_report([full], full / "report.html")
    charts, text = charts_on(path), text_of(path)
    assert charts.keys() == {chart.title for chart in page.charts_on_page() if chart.expected}
    training, held_out = charts["Loss"]["traces"]
    assert (training["x"], training["y"]) == ([*range(1, 41)], [8 / step for step in range(1, 41)])
    assert training["tokens"] == [1000 * step for step in range(1, 41)]
    assert (held_out["x"], held_out["y"]) == ([10, 20, 30], [0.9, 0.45, 0.3])
    assert [trace["name"] for trace in charts["Memory of the fullest GPU"]["traces"]] == [
        "reserved",
        "allocated",
        "active",
    ]
    assert "time of a step 16.00 ms 20.00 ms +25.0 %" in text
    assert "2 starts, 7 logged steps done again" in text and "1 lines of metrics.jsonl could not be read" in text
    assert "num_steps 40 " in text and "2.13.0" in text and "complete" in text
    places = [text.index(part) for part in (EVIL, " & a fox", f" came home{EVIL}", ", at last")]
    assert places == sorted(places)


def test_the_plotting_library_is_in_the_page_once_whole_and_text_is_only_text(full):
    whole = write_report([full], full / "report.html").read_text()
    library = plotly_js()
    assert len(library) > 1e6 and whole.count(library) == 1
    without = whole.replace(library, "")
    assert without.count("<script") == 3 and without.count("</script>") == 3 and "<img" not in without
    data = data_of(full / "report.html")
    assert data["title"] == "run <script>" and EVIL in strings_in(data)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": None, "grad_norm": None, "tokens_seen": 8}, {"step": 2}],
        [line(1), {"step": 2, "loss": "high", "samples": 3}, {"step": 3, "samples": [1, {"prompt": "a"}]}, line(4)],
        [line(1), {"step": 1e400, "loss": 1.0}, {"step": 2, "loss": float("nan")}, [], 7],
        [{"step": 1, "loss": 2.0, "final": True}],
    ],
)
def test_a_run_with_hardly_any_figures_or_odd_ones_has_a_page(tmp_path, lines):
    folder = write_run(tmp_path / "r", lines, starts="none")
    charts = charts_on(write_report([folder], folder / "report.html"))
    assert all(trace["y"] for chart in charts.values() for trace in chart["traces"])
    (folder / "config.json").write_text("[")
    write_report([folder, folder], tmp_path / "both.html")


def test_a_long_run_is_thinned_out_and_keeps_its_spikes():
    points = [(step, step, 50.0 if step == 77_777 else float(step % 3)) for step in range(100_000)]
    kept = page.thin(points)
    assert len(kept) <= 2 * page.MAX_STRETCHES and (77_777, 77_777, 50.0) in kept and kept == sorted(kept)
    assert page.thin(points[:1500]) == points[:1500]


def test_runs_side_by_side_have_a_line_each_and_what_differs(full, tmp_path):
    flags = dataclasses.asdict(parse(["--model", "demo", "--num-steps", "40", "--lr", "0.1"]))
    other = write_run(tmp_path / "other", [line(1), line(2)], flags=flags)
    path = write_report([full, other], tmp_path / "both.html")
    charts, text = charts_on(path), text_of(path)
    names = [full.name, "other"]
    for title in ("Loss, training", "Throughput", "Memory of the fullest GPU, allocated"):
        assert [trace["name"] for trace in charts[title]["traces"]] == names
    assert [trace["name"] for trace in charts["Loss, held out"]["traces"]] == names[:1]
    assert "lr 0.0003 0.1" in text and "num_steps" not in text
    assert "ended at step 2 of 40" in text


SOURCES = ("web", "code", "v1.2-wiki_en", "books", "papers", "math")


def write_mixture(folder: pathlib.Path, count: int, **config) -> pathlib.Path:
    """A run on so many sources, with evaluations, padding and other shares from step 21 on."""
    lines = []
    for step in range(1, 41):
        more = {"padding_percent": 3.0}
        for number, source in enumerate(SOURCES[:count]):
            more[f"share/{source}"] = (number + 1 if step <= 20 else count - number) / sum(range(1, count + 1))
            more[f"epochs/{source}"] = step * (number + 1) / 20
            if step % 5 == 0:
                more |= {"eval_loss": 9 / step, f"eval_loss/{source}": (9 + number) / step}
        lines.append(line(step, **more))
    return write_run(folder, [*lines, lines[-1] | {"final": True}], **config)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_page_has_a_line_for_each_source_in_its_own_color_and_its_name_where_it_is_alone(tmp_path, count):
    folder = write_mixture(tmp_path / "r", count)
    path = write_report([folder], folder / "report.html")
    charts = charts_on(path)
    titles = ["Held-out loss of the sources", "Shares of the sources", "Epochs of the sources"]
    for title in titles:
        chart = charts[title]
        assert [(trace["name"], trace["color"]) for trace in chart["traces"]] == [
            (source, color) for color, source in enumerate(SOURCES[:count])
        ]
        assert chart["legend"] and chart["stepped"] == title.startswith("Shares")
        assert chart["wide"] == (count == 6)
    losses, shares, epochs = (charts[title]["traces"][0] for title in titles)
    assert losses["points"] and not shares["points"]
    assert (losses["x"], losses["y"]) == ([*range(5, 41, 5)], [9 / step for step in range(5, 41, 5)])
    assert shares["y"][19:21] == [1 / sum(range(1, count + 1)), count / sum(range(1, count + 1))]
    assert epochs["y"][-1] == 2.0 and epochs["tokens"][-1] == 40_000
    assert charts["Padding"]["traces"][0]["y"] == 40 * [3.0] and not charts["Padding"]["legend"]
    assert "3.0 %" in text_of(path)


def test_runs_on_several_sources_are_compared_source_by_source(full, tmp_path):
    both = [write_mixture(tmp_path / f"on {count}", count) for count in (1, 2)]
    charts = charts_on(write_report([full, *both], tmp_path / "all.html"))
    for title in ("Held-out loss of the sources", "Shares of the sources", "Epochs of the sources"):
        assert [trace["name"] for trace in charts[f"{title}, web"]["traces"]] == ["on 1", "on 2"]
        assert [(trace["name"], trace["color"]) for trace in charts[f"{title}, code"]["traces"]] == [("on 2", 2)]
    assert len(charts["MFU"]["traces"]) == 3


def test_a_run_without_sources_has_the_charts_that_it_had_and_misses_none(full, tmp_path):
    page = write_report([full], full / "report.html")
    names = set(charts_on(page))
    assert names == {
        "Loss", "Throughput", "MFU", "Memory of the fullest GPU", "Waiting for data", "Gradient norm", "Learning rate"
    }  # fmt: skip
    assert parts_of(page, "note") == [] and "Mixture" not in text_of(page)
    without = write_run(tmp_path / "cpu", [{"step": 1, "loss": 2.0}])
    (note,) = parts_of(write_report([without], tmp_path / "r.html"), "note")
    assert "MFU" in note["text"] and "ources" not in note["text"] and "Padding" not in note["text"]


def started(**mixture) -> dict:
    return {"time": "2026-11-23T10:00:00Z", "step": 0, "lost_steps": 0, "world_size": 4} | mixture


MIXTURE = [
    {"from_sample": 0, "from_step": 0, "weights": {"web": 0.7, "code": 0.3}},
    {"from_sample": 12_800, "from_step": 100, "weights": {"web": 0.5, "code": 0.3, "<b>math": 0.2}},
    {"from_sample": 99_999, "from_step": None, "weights": {"code": 1 / 3, "<b>math": 2 / 3}},
]


def test_a_page_has_the_shares_of_the_sources_from_which_step_on(tmp_path):
    first, second = started(mixture=MIXTURE[:1]), started(mixture=MIXTURE)
    folder = write_run(tmp_path / "r", [line(1)], starts=[first, second, started()])
    tables = {tuple(part["head"]): part["rows"] for part in parts_of(write_report([folder], tmp_path / "p"), "table")}
    assert tables["from step", "from sample", "web", "code", "<b>math"] == [
        ["0", "0", "70 %", "30 %", ""],
        ["100", "12,800", "50 %", "30 %", "20 %"],
        ["", "99,999", "", "33.33 %", "66.67 %"],
    ]


def test_odd_values_in_a_record_of_the_mixture_are_left_out(tmp_path):
    odd = [{"from_sample": "first", "weights": {"web": "half", "code": 0.5}}, {"from_step": 2, "weights": {}}]
    folder = write_run(tmp_path / "r", [line(1)], starts=[started(mixture=odd)])
    assert "Mixture from step from sample web code    50 % 2" in text_of(write_report([folder], tmp_path / "p"))


def test_several_words_of_a_flag_stand_side_by_side(tmp_path):
    flags = {"model": "demo", "dataset": ["web=a.jsonl:0.7", "b.bin:0.3"]}
    folder = write_run(tmp_path / "r", [line(1)], flags=flags)
    assert "demo on web=a.jsonl:0.7 b.bin:0.3 · 4 x H100" in text_of(write_report([folder], tmp_path / "p"))


def test_many_stories_are_folded_away_but_for_some_from_first_to_last(tmp_path):
    lines = [line(step, samples=[{"prompt": "a", "text": f"a story {step}."}]) for step in range(1, 31)]
    path = write_report([write_run(tmp_path / "r", lines)], tmp_path / "r.html")
    (prompt,) = parts_of(path, "stories")[0]["prompts"]
    assert [prompt["stories"][number]["caption"] for number in prompt["shown"]] == [
        [f"step {step}"] for step in (1, 7, 13, 18, 24, 30)
    ]
    assert [story["text"] for story in prompt["stories"]] == [f" story {step}." for step in range(1, 31)]
    if CHROMIUM:
        shown, _, folded = browse(path, "--dump-dom")[0].partition("all 30</summary>")
        assert " story 13." in shown and " story 14." not in shown and " story 14." in folded


def test_the_command_writes_into_the_runs_folder_and_a_wrong_one_is_one_line(full, tmp_path, capsys, monkeypatch):
    page.main([str(full)])
    assert capsys.readouterr().out == f"{full / 'report.html'}\n"
    monkeypatch.chdir(tmp_path)
    page.main([str(full), str(full)])
    assert (tmp_path / "report.html").exists()
    for arguments, said in (
        ([tmp_path / "gone"], f"{tmp_path / 'gone'}: holds no metrics.jsonl"),
        (
            [full, "--output", tmp_path / "gone" / "r.html"],
            f"{tmp_path / 'gone' / 'r.html'}: cannot be written (No such",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            page.main([*map(str, arguments)])
        assert str(ended.value).startswith(f"harness.report.page: error: {said}") and "\n" not in str(ended.value)


# ----------------------------------------------------------------------------------------------------------------------
# A plan

PLAN = {
    "model": "demo", "gpu": "H100 SXM", "gpus": 8, "capacity_gib": 79.1, "fits": True, "step_time_ms": 100.0,
    "tokens_per_sec": 8e4, "mfu_percent": 50.0, "hours_per_billion_tokens": 3.5,
    "memory_gib": {"reserved": 44.0}, "at_peak_gib": {"parameters": 10.0, "activations": 30.0},
    "time_ms": {"matmul": 80.0, "exposed": 20.0, "communication": 50.0}, "assumptions": {"rates": "<b>assumed</b>"},
}  # fmt: skip


def test_a_plans_page_has_memory_by_kind_against_the_card_time_and_world_sizes(tmp_path):
    row = {"command": "x", "fits": True, "reserved_gib": 60.0, "step_time_ms": 90.0, "tokens_per_sec": 9e4}
    others = {
        "fastest": row | {"flags": "--batch-size 2"},
        "configurations": [row | {"flags": f"--zero-stage 2 {20 * '--more '}"}],
    }
    speed = {"tokens_per_sec": 1.0, "exposed_communication_percent": 2.0, "fits": True}
    others |= {"published_share": (0.62, 0.84, 1.08), "published_runs": "9 of 10 published runs"}
    others["scaling"] = [speed | {"gpus": gpus, "dp_replicate_size": gpus // 8} for gpus in (8, 16)]
    path = write_plan(tmp_path / "plan.html", PLAN | others | {"verdict_text": "it fits & is fast"})
    charts = charts_on(path)
    memory = {trace["name"]: trace["x"] for trace in charts["Memory of the fullest GPU"]["traces"]}
    assert memory["parameters"][0] == 10 and memory["allocator, CUDA, NCCL"][0] == 4
    assert memory["reserved, all kinds"] == [None, 60, 60]
    assert charts["Memory of the fullest GPU"]["limit"] == 79.1
    assert {trace["name"]: trace["x"] for trace in charts["Time of a step"]["traces"]} == {
        "matmul": [80.0], "exposed communication": [20.0]
    }  # fmt: skip
    assert [trace["x"] for trace in charts["Speed over world sizes"]["traces"]] == [[8], [16]]
    names = charts["Memory of the fullest GPU"]["traces"][0]["y"]
    assert max(len(line) for name in names for line in name.split("\n")) <= 56 and "--more\n--more" in names[2]
    assert "9 of 10 published runs reached 62% to 108% of such plans" in text_of(path)
    assert "it fits & is fast" in text_of(path) and "<b>assumed" not in path.read_text()
    assert "rates <b>assumed</b>" in text_of(path)
    assert charts_on(write_plan(tmp_path / "plan.html", PLAN)).keys() == {"Memory of the fullest GPU", "Time of a step"}


def test_a_plans_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"--html .*/gone/plan.html: cannot be written \(No such file") as refused:
        write_plan(tmp_path / "gone" / "plan.html", PLAN)
    assert refused.value.exit_code == 1


# ----------------------------------------------------------------------------------------------------------------------
# In a browser


def browse(path: pathlib.Path, *flags: str) -> tuple[str, str]:
    """(the document as it was drawn, what the browser's console said)."""
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1240,2000",
    ]
    command += ["--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=3000"]
    done = subprocess.run([*command, *flags, path.as_uri()], capture_output=True, text=True, timeout=600)
    return done.stdout, "\n".join(re.findall(r"CONSOLE.*", done.stderr))


@drawn_only
def test_a_page_is_drawn_in_a_browser_without_an_error_or_a_request(full):
    path = write_report([full], full.parent / "page.html")
    drawn, console = browse(path, "--dump-dom")
    assert console == ""
    assert drawn.count("<path") > 7 * 5 and drawn.count('class="chart js-plotly-plot"') == 7
    assert "a frog</em> came home" in drawn and "<title>run &lt;script&gt;</title>" in drawn
    assert "<img" not in drawn and drawn.count("<script") == 3
    asking = path.with_name("asking.html")  # what a page of ours may not do is said
    asking.write_text(path.read_text().replace("<main>", '<main><img src="http://127.0.0.1:9/x">', 1))
    assert "Content Security Policy" in browse(asking, "--dump-dom")[1]


@drawn_only
@pytest.mark.parametrize("kind", ["one run", "several runs", "a plan"])
def test_every_word_of_a_page_is_shown_as_text(full, tmp_path, kind):
    path = tmp_path / "page.html"
    if kind == "a plan":
        write_plan(path, PLAN | {"fastest": {"command": f"x {EVIL}", "flags": f"--flag {EVIL}", "reserved_gib": 60.0}})
    else:
        other = write_run(tmp_path / "other <b>", [line(step) for step in range(1, 9)], commit=EVIL)
        write_report([full] if kind == "one run" else [full, other], path)
    drawn, _ = browse(path, "--dump-dom")
    shown = html.unescape(re.sub(r"<[^>]+>", " ", drawn.partition("<main>")[2].partition("</main>")[0]))
    shown = re.sub(r"\s+", " ", shown)
    missing = [text for text in strings_in(data_of(path)) if re.sub(r"\s+", " ", text.strip()) not in shown]
    assert missing == []


@drawn_only
def test_a_page_is_drawn_dark_where_dark_is_preferred(full):
    path = write_report([full], full.parent / "page.html")
    pictures = []
    for name, flags in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        shot = path.with_name(f"{name}.ppm.png")
        browse(path, *flags, f"--screenshot={shot}")
        pictures.append(corner(shot))
    assert pictures == [(0xFA, 0xF9, 0xF6), (0x13, 0x16, 0x1A)]


def corner(picture: pathlib.Path) -> tuple[int, ...]:
    """The color of the first pixel of a PNG with 8 bits a channel: the first row's filter leaves it as it is."""
    import zlib

    data, position, packed = picture.read_bytes(), 8, b""
    while position < len(data):
        size = int.from_bytes(data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + size]
        position += size + 12
    return tuple(zlib.decompress(packed)[1:4])


def test_the_template_asks_for_nothing_from_the_network():
    template = (ROOT / "assets" / "page.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", template)
