"""The figures of all ranks: what a log line makes of the figures of each, and that a figure is one entry."""

import random
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, metrics_of, parse, start, words
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_page import charts_on, text_of
from test_program import read_events

from harness.report.figure_list import FIGURES, SOURCE, sources_in, tracker_name
from harness.report.figures import RankFigures, gather, worst_of_ranks
from harness.report.prometheus import Endpoint
from tools import figure_table

# ----------------------------------------------------------------------------------------------------------------------
# Of a list of ranks


def timed(step_time_ms: float, waited_ms: float, **more) -> RankFigures:
    return RankFigures(step_time_ms=step_time_ms, data_wait_percent=1.0, waited_ms=waited_ms, **more)


def test_every_figure_is_that_of_the_rank_where_it_is_worst():
    ranks = [
        RankFigures(30.0, 31.0, 40.0, step_time_ms=100.0, data_wait_percent=3.0, waited_ms=10.0),
        RankFigures(32.0, 33.0, 39.0, step_time_ms=101.0, data_wait_percent=2.0, waited_ms=90.0),
        RankFigures(10.0, 11.0, 12.0, step_time_ms=99.0, data_wait_percent=4.0, waited_ms=20.0),
    ]
    assert worst_of_ranks(ranks) == {
        "peak_memory_active": 32.0,
        "peak_memory_alloc": 33.0,
        "peak_memory_reserved": 40.0,
        "slowest_rank_ms": 101.0,
        "data_wait_percent": 4.0,
        "slowest_rank": 0,
    }


def test_of_equal_ranks_the_first_is_named():
    ranks = [timed(100.0, 50.0), timed(100.0, 20.0), timed(100.0, 20.0)]
    assert worst_of_ranks(ranks)["slowest_rank"] == 1


def test_a_rank_that_is_in_collectives_for_longer_than_a_step_is_compared_all_the_same():
    assert worst_of_ranks([timed(100.0, 130.0), timed(100.0, 110.0)])["slowest_rank"] == 1


def test_one_rank_alone_is_no_slowest():
    worst = worst_of_ranks([timed(100.0, 10.0)])
    assert worst == {"slowest_rank_ms": 100.0, "data_wait_percent": 1.0}


def test_a_rank_without_figures_of_memory_leaves_those_of_the_others():
    worst = worst_of_ranks([timed(100.0, 10.0), timed(90.0, 20.0, peak_memory_alloc=3.0)])
    assert worst["peak_memory_alloc"] == 3.0
    assert not {"peak_memory_active", "peak_memory_reserved"} & worst.keys()
    assert worst_of_ranks([RankFigures()] * 2) == {}


def test_in_warmup_there_is_memory_alone():
    assert worst_of_ranks([RankFigures(1.0, 2.0, 3.0), RankFigures(3.0, 2.0, 1.0)]) == {
        "peak_memory_active": 3.0,
        "peak_memory_alloc": 2.0,
        "peak_memory_reserved": 3.0,
    }


def test_without_a_time_in_collectives_no_rank_is_named():
    ranks = [RankFigures(step_time_ms=100.0, data_wait_percent=0.0)] * 2
    assert worst_of_ranks(ranks) == {"slowest_rank_ms": 100.0, "data_wait_percent": 0.0}


def test_a_thousand_ranks_give_the_figures_of_the_worst():
    numbers = random.Random(0)
    ranks = [timed(100.0, numbers.uniform(50, 60)) for _ in range(1000)]
    ranks[700] = timed(103.0, 0.0)
    worst = worst_of_ranks(ranks)
    assert (worst["slowest_rank_ms"], worst["slowest_rank"]) == (103.0, 700)


def test_what_is_gathered_is_what_was_given(device):
    """With more ranks: tests/multirank.py, `worst_figures`."""
    own = RankFigures(peak_memory_alloc=0.1 + 0.2, step_time_ms=1e5 / 3, waited_ms=-1e-7)
    assert gather(own, device) == [own]


# ----------------------------------------------------------------------------------------------------------------------
# The list


def test_an_entry_is_told_from_every_other_and_its_words_fit_a_table_and_a_help_text():
    assert len({figure.key for figure in FIGURES}) == len(FIGURES)
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        assert figure.words and not set(figure.words + figure.unit) & set("|\n")
        assert figure.name is None or figure.name.removesuffix(f"/{SOURCE}").count("/") == 1
        assert figure.name is None or figure.name.endswith(f"/{SOURCE}") == figure.by_source


@pytest.mark.parametrize(
    "key, name",
    [
        ("eval_loss", "eval/loss"),
        ("eval_loss/web", "eval/loss/web"),
        ("epochs/the-stack_v2.py", "data/epochs/the-stack_v2.py"),
        ("share/SOURCE", "data/share/SOURCE"),  # a source may be called so
        ("step", None),
        ("new", "other/new"),
        ("new/web", "other/new/web"),
    ],
)
def test_a_figure_of_a_source_has_the_name_of_its_entry_and_of_the_source(key, name):
    assert tracker_name(key) == name


def test_the_sources_of_a_run_are_those_of_its_lines_in_their_order():
    lines = [{"step": 1, "share/web": 0.7, "share/code": 0.3}, {"step": 2, "epochs/books": 0.1, "epochs/web": 0.2}]
    assert sources_in(lines) == ["web", "code", "books"]
    assert sources_in([{"step": 1, "loss": 2.0}]) == []


def test_prometheus_tells_what_a_figure_is_and_shows_one_without_an_entry(tmp_path):
    served = Endpoint(parse([]), tmp_path / "r")
    served.show({"mfu_percent": 40.0, "num_steps": 10, "new": 3.0})
    families = {family.name: family for family in served.collect()}
    (mfu,) = [figure for figure in FIGURES if figure.key == "mfu_percent"]
    assert families["training_mfu_percent"].documentation == f"{mfu.words}, %"
    assert "--num-steps" in families["training_num_steps"].documentation
    assert families["training_new"].samples[0].value == 3.0


def test_prometheus_has_the_figure_of_a_source_behind_a_label_in_the_family_of_the_whole(tmp_path):
    served = Endpoint(parse([]), tmp_path / "r")
    served.show({"eval_loss": 2.0, "loss": 1.5, "eval_loss/web": 2.5, "eval_loss/v1.2-b_c": 3.0, "share/web": 0.5})
    odd = 'a"b\\c\nd'  # what no source is called
    served.show({"eval_loss": 1.0, f"eval_loss/{odd}": 4.0})
    registry = CollectorRegistry()
    registry.register(served)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE training_eval_loss gauge\n") == 1
    samples = {}
    for family in text_string_to_metric_families(text):
        samples[family.name] = [(sample.labels, sample.value) for sample in family.samples]
    run = {"run": "r"}
    assert samples["training_eval_loss"] == [
        (run, 1.0),
        (run | {"source": "web"}, 2.5),
        (run | {"source": "v1.2-b_c"}, 3.0),
        (run | {"source": odd}, 4.0),
    ]
    assert samples["training_share"] == [(run | {"source": "web"}, 0.5)]
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        ours = [line for line in checked.stderr.splitlines() if "training_" in line]
        assert checked.returncode in (0, 3) and ours == []


def test_a_page_without_the_markers_is_left_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a page\n")
    with pytest.raises(SystemExit, match="it lacks the line"):
        figure_table.main([str(page)])
    assert page.read_text() == "a page\n"


# ----------------------------------------------------------------------------------------------------------------------
# A new figure

FIRST = "FIGURES = (  # tiles, charts and tables have this order"
ENTRY = """
    Figure(
        "elapsed_hours", "extra/elapsed_hours", "h", "time since the start, in hours",
        label="hours", written="{:.6f} h", chart=Chart("Hours", "h"), compared=True, over_tokens=True,
    ),
"""
LINE = """
    figures["elapsed_hours"] = elapsed / 3600
"""


def insert_behind(path, line: str, text: str) -> None:
    """Puts `text` behind the only line of a file that is `line`."""
    before, found, after = path.read_text().partition(f"{line}\n")
    assert found and line not in after, f"{path} has not one line {line}"
    path.write_text(before + found + text.lstrip("\n") + after)


@pytest.mark.slow
def test_an_entry_and_a_line_that_computes_it_are_all_that_a_new_figure_takes(tmp_path):
    tree, run = tmp_path / "tree", tmp_path / "out" / "r"
    for name in ("harness", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_fsdp.py", "utils.py"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "assets").symlink_to(ROOT / "assets")
    insert_behind(tree / "harness/report/figure_list.py", FIRST, ENTRY)
    insert_behind(tree / "harness/report/figures.py", '    figures["elapsed_seconds"] = elapsed', LINE)

    flags = "--model demo --dataset synthetic --sequence-length 32 --batch-size 2 --num-workers 0 --num-steps 4"
    flags += " --log-interval 1 --perf-warmup-steps 1 --log-with tensorboard --run-name r"
    process = start([sys.executable, "train_fsdp.py", *words(flags), "--output-dir", tmp_path / "out"], cwd=tree)
    assert process.returncode == 0, process.stderr
    *lines, final = metrics_of(run)
    hours = {line["step"]: line["elapsed_hours"] for line in lines if "step_time_ms" in line}
    assert hours.keys() == {2, 3, 4} and final["elapsed_hours"] == final["elapsed_seconds"] / 3600

    folder = run / "train_fsdp"
    events = read_events(folder).Scalars("extra/elapsed_hours")
    assert {event.step: event.value for event in events} == pytest.approx(hours)
    assert len(read_events(folder / "by_tokens").Scalars("by_tokens/elapsed_hours")) == 3
    page = run / "report.html"
    assert charts_on(page)["Hours"]["traces"][0]["y"] == [*hours.values()]
    assert f"{final['elapsed_hours']:.6f} h" in text_of(page)
    table = start([sys.executable, "-m", "tools.figure_table"], cwd=tree).stdout
    assert "| `elapsed_hours` | `extra/elapsed_hours` | h | time since the start, in hours |" in table
