"""tools.prose_figures: what it takes for a figure and which sources it accepts; every figure of the docs has one."""

import json

import pytest

from tools import prose_figures


@pytest.fixture
def page(tmp_path, monkeypatch):
    """`page(text)`: the figures of a document, in a project with one file of results and one test."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    contents = {"date": "2026-11-21", "stall": 0.164, "share": 0.123, "rounds": [{"rate": 3.0}, {"rate": 5.0}]}
    (results / "cost.json").write_text(json.dumps(contents))
    (tmp_path / "tests" / "wing").mkdir(parents=True)
    (tmp_path / "tests" / "wing" / "test_it.py").write_text("def test_it_is_fast():\n    pass\n")
    monkeypatch.setattr(prose_figures, "ROOT", tmp_path)
    prose_figures.result.cache_clear()
    prose_figures.names_of_tests.cache_clear()

    def read(text):
        (tmp_path / "page.md").write_text(text)
        return prose_figures.figures([tmp_path / "page.md"])

    yield read
    prose_figures.result.cache_clear()
    prose_figures.names_of_tests.cache_clear()


def test_every_figure_of_the_documents_has_a_source():
    found = prose_figures.figures(prose_figures.documents())
    assert len(found) > 500
    assert [figure for figure in found if not figure.source] == []


def test_versions_dates_names_code_and_sizes_are_no_figures(page):
    text = (
        "# 12 % in a heading\n\nLlama 3.2 1B and torch 2.11 or 2.13.0 on 4 GPUs, 2026-11-21, with `--lr 3e-4`, batch "
        "1 x 8192, see [5 s](https://a.b/7.5) of section 3.4.\n\n```\n9 ms\n```\n\n| 8 GPUs | 2.5 |\n|---|---|\n"
        "| 3.5 | 2 ranks |\n"
    )
    assert [figure.words for figure in page(text)] == ["`, batch 1 x 8192, see [5 s] of section 3.4."]


def test_a_figure_without_a_source_is_found(page):
    (planted,) = page("# Page\n\nIt pauses for 0.3 s.\n\n## Predicted elsewhere\n\nNothing here.\n")
    assert (planted.place, planted.source, planted.reason) == ("page.md:3", "", "")


@pytest.mark.parametrize("number", ["0.16 s", "164 ms", "12 %", "4.0 s"])
def test_a_figure_of_a_file_of_results_is_looked_up_there(page, number):
    (figure,) = page(f"It takes {number} ([results](../benchmarks/results/cost.json)).\n")
    assert (figure.source, figure.age) == ("cost.json", "2026-11-21")


@pytest.mark.parametrize("number", ["0.17 s", "1.64 s", "13 %", "5.1 s"])
def test_a_figure_that_is_not_in_the_file_that_it_names_is_wrong(page, number):
    (figure,) = page(f"It takes {number} ([results](../benchmarks/results/cost.json)).\n")
    assert (figure.source, figure.reason) == ("", "not in cost.json")


@pytest.mark.parametrize(
    "text, source, reason",
    [
        ("Within 5 % (`test_it_is_fast`).", "test_it_is_fast", ""),
        ("Within 5 % (tests/wing/test_it.py).", "tests/wing/test_it.py", ""),
        ("Within 5 % (`test_it_is_gone`).", "", "no test test_it_is_gone"),
        ("Within 5 % (benchmarks/results/gone.json).", "", "no file gone.json"),
        ("19 % slower, by arXiv 2507.03114.", "arXiv 2507.03114", ""),
        ("It is predicted to take 5 ms.", "predicted", ""),
        ("<!-- figures: definition -->\nIt waits 30 s.", "definition", ""),
        ("<!-- figures: anything -->\nIt waits 30 s.", "", "not understood: anything"),
        ("<!-- figures: computed from benchmarks/results/cost.json -->\nIt is 1.7 times as fast.", "cost.json", ""),
    ],
)
def test_sources(page, text, source, reason):
    (figure,) = page(f"# Page\n\nWords.\n\n{text}\n")
    assert (figure.source, figure.reason) == (source, reason)


def test_a_mark_under_a_heading_holds_below_it_and_one_above_lines_up_to_the_next_empty_one(page):
    text = (
        "# Page\n\n## One\n\n<!-- figures: predicted -->\n\n1 ms\n\n### Inner\n\n2 ms\n\n## Two\n\n"
        "<!-- figures: arithmetic -->\n\n3 ms\n\n<!-- figures: definition -->\n- 4 ms\n- 5 ms\n\n6 ms\n\n"
        "## Three\n\n7 ms\n"
    )
    sources = ["predicted", "predicted", "arithmetic", "definition", "definition", "arithmetic", ""]
    assert [figure.source for figure in page(text)] == sources


def test_a_label_or_a_result_of_a_section_holds_for_its_rows(page):
    text = (
        "## A\n\n| what | ms |\n|---|---|\n| one | 164 |\n| two | 165 ms |\n\n([all](benchmarks/results/cost.json))\n"
    )
    assert [figure.reason for figure in page(text)] == ["not in cost.json", "not in cost.json"]
    planned = "## A\n\n```bash\npython train_fsdp.py --plan\n```\n\n| what | ms |\n|---|---|\n| one | 164 |\n"
    assert [bool(figure.source) for figure in page(planned)] == [True]
    other = planned.replace("train_fsdp.py", "launch/datatrove.py")  # whose --plan is no prediction of a run
    assert [bool(figure.source) for figure in page(other)] == [False]


def test_the_program_lists_all_and_fails_where_one_has_no_source(page, tmp_path, capsys, monkeypatch):
    page("It pauses for 0.3 s.\n")
    monkeypatch.setattr(prose_figures, "documents", lambda: [tmp_path / "page.md"])
    assert prose_figures.main([]) == 1
    assert "page.md:1" in (said := capsys.readouterr().out) and said.endswith("1 figures, 1 without a source\n")
    page("It is predicted to pause for 0.3 s.\n")
    assert prose_figures.main(["--without"]) == 0
