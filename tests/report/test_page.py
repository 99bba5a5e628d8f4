"""The page that a run leaves: what is on it, that nothing in a run's files can break it, how it is drawn."""

import html
import json
import math
import pathlib
import re

import pytest
from conftest import parse, words

from harness.base import UserError
from harness.report import write_comparison
from harness.report.page import write_report

EVIL = "<script>document.title='broken'</script><img src=http://127.0.0.1:9/x>{{body}}"
CHARTS = ["Loss", "Throughput", "MFU", "Step time", "Memory", "Gradient norm", "Learning rate", "Waiting for data"]


def line(step: int, **more) -> dict:
    """A log line of a run on GPUs."""
    metrics = {"loss": 8 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_seen": 1000 * step}
    metrics |= {"tokens_per_sec": 5e4, "step_time_ms": 20.0, "mfu_percent": 41.5}
    metrics |= {"peak_memory_active": 30.0, "peak_memory_alloc": 31.0, "peak_memory_reserved": 40.0}
    return {"step": step, "data_wait_percent": 0.5} | metrics | more


def write_run(folder: pathlib.Path, lines: list, **flags) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = {
        "flags": {"model": "demo", "dataset": ["a:0.7", "b:0.3"], "num_steps": 40} | flags,
        "gpu": "H100",
        "world_size": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def full(tmp_path) -> pathlib.Path:
    """A run on GPUs with samples, one of them an attack, and a plan; its last line is cut off."""
    lines = [line(step) for step in range(1, 41)]
    for step, text in ((10, EVIL), (20, "a frog & a fox"), (30, f"a frog came home{EVIL}")):
        lines[step - 1] |= {
            "eval_loss": 9 / step,
            "samples": [{"prompt": "a frog", "text": text, "tokens": 9, "ended": False}],
        }
    planned = {"predicted_step_time_ms": 16.0, "predicted_peak_memory_reserved": 44.0}
    last = (
        lines[-1]
        | planned
        | {"final": True, "samples": [{"prompt": "a frog", "text": "a frog, at last", "tokens": 3, "ended": True}]}
    )
    folder = write_run(tmp_path / f"run {EVIL[:8]}", [*lines, last])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    return folder


def page_of(folder: pathlib.Path) -> str:
    return write_report(folder).read_text()


def text_of(page: str) -> str:
    """The words of a page."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page.partition("<main>")[2])))


def charts_of(page: str) -> list[str]:
    return re.findall(r"<h3>(.*?) <span>", page)


def test_a_page_has_the_runs_metrics_words_and_plan(full):
    page = page_of(full)
    text = text_of(page)
    assert charts_of(page) == CHARTS
    assert "demo on a:0.7 b:0.3 · 4 x H100 · complete" in text and "mfu 41.5 %" in text
    assert "step time 16.00 ms 20.00 ms +25.0 %" in text and "memory reserved 44.00 GiB 40.00 GiB -9.1 %" in text
    places = [text.index(part) for part in (EVIL, " & a fox", f" came home{EVIL}", ", at last")]
    assert places == sorted(places)


def test_text_is_only_text_and_the_page_asks_for_nothing(full):
    page = page_of(full)
    assert "<script" not in page and "<img" not in page and page.count("<main>") == 1
    assert "<title>run &lt;script&gt;</title>" in page
    assert not re.search(r"(src|href)=|url\(|@import", page.replace(html.escape(EVIL), ""))
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert "@media screen and (prefers-color-scheme: dark)" in page and "@media print" in page


@pytest.mark.parametrize(
    "lines, state",
    [
        ([], "no step was logged"),
        ([{"step": 1, "loss": None, "grad_norm": None, "tokens_seen": 8}, {"step": 2}], "ended at step 2 of 40"),
        ([line(1), {"step": "1", "loss": 1.0}, {"step": 2, "loss": 3.0}, [], 7, line(4)], "ended at step 4 of 40"),
        ([{"step": step, "loss": 0.0, "grad_norm": -1.0, "learning_rate": 0} for step in (5, 6)], "ended at step 6"),
    ],
)
def test_a_run_with_hardly_any_metrics_or_odd_ones_has_a_page(tmp_path, lines, state):
    folder = write_run(tmp_path / "r", lines)
    assert state in text_of(page_of(folder))
    (folder / "config.json").write_text("[")
    page_of(folder)


def drawing_of(page: str, title: str) -> str:
    """What is drawn in a chart, and the words of its axes."""
    return page.partition(f"<h3>{title} ")[2].partition("</div></div>\n")[0]


@pytest.mark.parametrize(
    "low, high, words",
    [
        (12.118, 12.172, ["12.12", "12.14", "12.16"]),
        (8123.4, 8123.9, ["8,123.4", "8,123.6", "8,123.8"]),
        (1_000_001, 1_000_006, ["1.000002 M", "1.000004 M", "1.000006 M"]),
        (3e-6, 3.1e-6, ["3e-6", "3.05e-6", "3.1e-6"]),
        (-0.01, 0.03, ["-0.01", "0", "0.01", "0.02", "0.03"]),
        (3.828176785, 3.82817679, ["0", "2", "4", "6", "8"]),
    ],
)
def test_the_numbers_of_an_axis_are_distinct_also_where_they_lie_close(tmp_path, low, high, words):
    page = page_of(write_run(tmp_path / "r", [{"step": 1, "loss": low}, {"step": 2, "loss": high}]))
    assert re.findall("class=y [^>]*>([^<]+)<", drawing_of(page, "Loss")) == words


def test_a_run_of_20_000_lines_stays_below_50_kb_with_its_spikes_in_a_band_and_its_end_in_view(tmp_path):
    lines = []
    for step in range(1, 20_001):
        noise = 0.1 * math.sin(step * 12.9898) * 43758.5453 % 0.3
        more = {"loss": 2 + 8 / step**0.5 + noise, "grad_norm": 1 + noise, "learning_rate": 3e-4 * (1 - step / 20_000)}
        more |= {"tokens_per_sec": 5e4 + 1e4 * noise, "step_time_ms": 20 + noise, "mfu_percent": 41 + noise}
        if step % 200 == 0:
            sample = {"prompt": "Once", "text": "Once upon a time. " * 100, "tokens": 400, "ended": True}
            more |= {"eval_loss": 2.2, "samples": [sample]}
        lines.append(line(step, **more))
    lines[12_344]["grad_norm"] = 99_000.0
    folder = write_run(tmp_path / "r", [*lines, lines[-1] | {"final": True}])
    assert write_report(folder).stat().st_size < 50_000
    page = page_of(folder)
    for title, top in (("Gradient norm", "1"), ("Loss", "2.5")):
        assert re.findall("class=y [^>]*>([^<]+)<", drawing_of(page, title))[-1] == top
    heights = re.findall(r",(-?\d+)", re.search('<polygon[^>]*points="([^"]*)"', drawing_of(page, "Gradient norm"))[1])
    assert min(map(int, heights)) < -1_000  # the spike leaves the picture


def test_sources_and_routers_have_charts_where_there_are_some(tmp_path):
    metrics = {"eval_loss/web": 2.0, "eval_loss/v1.2-b": 3.0, "router_loss": 1.0, "share/web": 0.5, "share/v1.2-b": 0.5}
    page = page_of(write_run(tmp_path / "r", [line(step, **metrics) for step in (1, 2, 3)]))
    assert set(charts_of(page)) - {*CHARTS} == {"Eval loss by source", "Router loss", "Shares of the sources"}
    for title in ("Eval loss by source", "Shares of the sources", "Memory"):
        assert drawing_of(page, title).count("<polyline") == 2, title
    assert "v1.2-b 3" in text_of(page) and "web 0.5 v1.2-b 0.5" in text_of(page)


def test_a_page_says_where_the_run_comes_from_and_marks_where_it_was_resumed(tmp_path):
    folder = write_run(tmp_path / "r", [line(step) for step in range(1, 41)])
    config = json.loads((folder / "config.json").read_text())
    starts = [{"time": f"2026-11-2{day}T10:00:00Z", "step": step} for day, step in enumerate((0, 10, 30))]
    starts[2]["changed"] = "lr 0.001 -> 0.0005"
    config |= {"starts": starts, "command": "python train_fsdp.py --demo --lr 5e-4", "commit": "59e27bd"}
    (folder / "config.json").write_text(json.dumps(config | {"parameters": 2_623_744}))
    page = page_of(folder)
    text = text_of(page)
    assert "model 2,623,744 parameters command python train_fsdp.py --demo --lr 5e-4 commit 59e27bd" in text
    assert "started 2026-11-20 10:00:00 UTC resumed 2026-11-21 10:00:00 UTC, from step 10" in text
    assert "from step 30, changed: lr 0.001 -> 0.0005" in text
    marks = re.findall(r'<path class=resumed d="M(\d+) 0v300">', drawing_of(page, "Loss"))
    assert [int(mark) for mark in marks] == [round(1000 * 9 / 39), round(1000 * 29 / 39)]


def test_samples_of_every_prompt_are_on_the_page(tmp_path):
    samples = [{"prompt": name, "text": f"{name} ...", "tokens": 9, "ended": True} for name in ("a frog", "a fox")]
    text = text_of(page_of(write_run(tmp_path / "r", [line(step, samples=samples) for step in range(1, 41)])))
    assert text.count("a frog ...") == text.count("a fox ...") == 3


# ----------------------------------------------------------------------------------------------------------------------
# Several runs


@pytest.fixture
def sweep(tmp_path) -> pathlib.Path:
    """Runs of two learning rates, of which only the first evaluated; a folder without steps, and one of no run."""
    first = [line(step, eval_loss=2.5) for step in range(1, 41)]
    write_run(
        tmp_path / "slow", [*first, first[-1] | {"final": True, "goodput_percent": 91.23}], lr=1e-4, betas=[0.9, 0.95]
    )
    write_run(
        tmp_path / f"fast{EVIL}".replace("/", ""), [line(step) for step in range(1, 21)], lr=3e-4, betas=[0.9, 0.99]
    )
    write_run(tmp_path / "began", [])
    (tmp_path / "export").mkdir()
    return tmp_path


def compare(folder: pathlib.Path, *paths: pathlib.Path) -> str:
    write_comparison(parse(["--output-dir", folder / "out", "--compare", *paths]))
    return (folder / "out" / "compare.html").read_text()


def test_runs_are_compared_on_one_page(sweep, capfd):
    page = compare(sweep, *sorted(sweep.iterdir()))
    evil = f"fast{EVIL}".replace("/", "")
    text = text_of(page)
    assert f"{evil} slow --lr 0.0003 0.0001 --betas 0.9 0.99 0.9 0.95 loss 0.4000 0.2000 eval loss 2.5000" in text
    assert "--num-steps" not in text and "mfu 41.5 % 41.5 %" in text and "goodput 91.2 %" in text
    assert charts_of(page) == ["Loss", "Eval loss", *CHARTS[1:4], "Memory", "Memory alloc", *CHARTS[5:]]
    assert drawing_of(page, "Loss").count("<polyline") == 2 and drawing_of(page, "Eval loss").count("<polyline") == 1
    assert "style=stroke:var(--c1)" in drawing_of(page, "Eval loss") and "var(--c0)" not in drawing_of(
        page, "Eval loss"
    )
    assert "<script" not in page and "<img" not in page
    printed = capfd.readouterr()
    for name in ("began", "export"):
        assert f"--compare {sweep / name}: no run with a logged step is there; left out" in printed.err
    assert f"report     {sweep / 'out' / 'compare.html'}" in printed.out


def test_a_run_that_diverged_says_so_on_its_page_and_beside_others(sweep):
    diverged = write_run(sweep / "diverged", [line(1), line(2, loss=None)])
    page = page_of(diverged)
    assert "ended at step 2 of 40 · loss not finite loss not finite step 2" in text_of(page)
    assert "<polyline class=point" in drawing_of(page, "Loss")
    assert " loss not finite 0.2000 " in text_of(compare(sweep, diverged, sweep / "slow"))
    skipped = {"step": 8, "skipped": [{"step": step, "reason": "gradient norm is nan"} for step in (7, 8)]}
    skipping = text_of(page_of(write_run(sweep / "skipping", [line(6), skipped])))
    assert "ended at step 8 of 40 · step 8 skipped: gradient norm is nan" in skipping


def test_a_run_that_cannot_be_read_is_left_out_with_a_line(sweep, capfd):
    (sweep / "odd" / "metrics.jsonl").mkdir(parents=True)
    assert "1 run compared" in text_of(compare(sweep, sweep / "slow", sweep / "odd"))
    line = f"--compare {sweep / 'odd'}: {sweep / 'odd' / 'metrics.jsonl'} cannot be read (Is a directory); left out"
    assert line in capfd.readouterr().err


def test_one_run_is_compared_too_and_runs_of_one_name_are_distinguished_by_their_paths(sweep):
    assert "1 run compared" in text_of(compare(sweep, sweep / "slow", sweep / "slow" / ".." / "slow"))
    other = write_run(sweep / "others" / "slow", [line(1)], lr=1e-4)
    page = text_of(compare(sweep, sweep / "slow", other))
    assert f"{sweep / 'slow'} {other} " in page


def test_what_cannot_be_compared_is_one_line(sweep):
    with pytest.raises(UserError, match=r"--compare .*/slwo: no such folder; give folders of runs"):
        compare(sweep, sweep / "slow", sweep / "slwo")
    with pytest.raises(UserError, match=r"--compare: none of .*/export is the folder of a run with a logged step"):
        compare(sweep, sweep / "export")
    with pytest.raises(UserError, match=r"--lr: no effect with --compare"):
        parse(words("--compare a --lr 1"))
