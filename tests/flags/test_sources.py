"""The words of --dataset and --mixture-stage: names, places, weights."""

from fractions import Fraction

import pytest

from harness.flags.parser import parse_args
from harness.flags.sources import Source, parse_stage, sources_of, wrong_mixture


@pytest.mark.parametrize(
    "word, source",
    [
        ("roneneldan/TinyStories", Source("TinyStories", "roneneldan/TinyStories", None)),
        ("a.jsonl:0.7", Source("a", "a.jsonl", Fraction(7, 10))),
        ("web=a.jsonl:0.7", Source("web", "a.jsonl", Fraction(7, 10))),
        ("web=a.jsonl", Source("web", "a.jsonl", None)),
        ("s3://bucket/corpus/:3", Source("corpus", "s3://bucket/corpus/", Fraction(3))),
        ("s3://bucket/x.jsonl.gz:1e-3", Source("x", "s3://bucket/x.jsonl.gz", Fraction(1, 1000))),
        ("data/*.parquet:.5", Source("data", "data/*.parquet", Fraction(1, 2))),
        ("/data/my corpus (v2).txt:1", Source("my-corpus-v2", "/data/my corpus (v2).txt", Fraction(1))),
    ],
)
def test_a_word_is_a_name_a_place_and_a_weight(word, source):
    assert sources_of((word,)) == [source]


def test_a_file_whose_name_looks_like_a_weighted_source_is_that_file(tmp_path):
    path = tmp_path / "date=2024:0.5"
    path.write_text("text")
    assert sources_of(str(path)) == [Source("date-2024-0", str(path), None)]


def test_sources_of_one_name_get_the_numbers_of_their_words():
    assert [source.name for source in sources_of(("x/a.jsonl", "y/a.bin", "a=z.bin"))] == ["a-1", "a-2", "a"]


def test_one_plain_word_stays_a_text_and_all_else_is_a_tuple():
    assert parse_args(["--dataset", "someone/text"]).dataset == "someone/text"
    assert parse_args(["--dataset", "someone/text:1"]).dataset == ("someone/text:1",)
    assert parse_args(["--dataset", "someone/text", "other/text"]).dataset == ("someone/text", "other/text")


@pytest.mark.parametrize(
    "dataset, stages, problem",
    [
        (("a=x:1", "a=y:1"), None, "two sources are called a; give them other names"),
        (("x:1", "synthetic:1"), None, "cannot be mixed"),
        (("x:1", "y"), None, "y has no weight"),
        (("x:0", "y:0"), None, "all weights are 0"),
        (("x:1", "y:0"), None, "y has the weight 0"),
        (("x:1", "y:0"), ("0.5:y=1",), ""),
        (("x:1", "y:1"), ("0.5:z=1",), "no source is called z; there is x, y"),
        (("x:1", "y:1"), ("0.5:x=1", "0.50:y=1"), "two stages begin at 0.5"),
        (("x:1", "y:1"), ("0.5:x=1", "0.8:y=1"), ""),
        ("x", None, ""),
    ],
)
def test_what_is_wrong_with_a_mixture_is_named(dataset, stages, problem):
    found = wrong_mixture(dataset, stages)
    assert problem in found if problem else not found


@pytest.mark.parametrize(
    "text", ["", "0.8", "0.8:", "0:x=1", "1:x=1", "x=1", "0.8:x", "0.8:x=a", "0.8:x=1,x=2", "0.5:x=0"]
)
def test_a_stage_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"share|WEIGHT|twice|are 0"):
        parse_stage(text)


def test_a_list_of_a_toml_file_is_several_sources(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('dataset = ["web=x:0.7", "y:0.3"]\nmixture-stage = ["0.5:y=1", "0.8:web=1"]')
    settings = parse_args(["--config", str(file)])
    assert (settings.dataset, settings.mixture_stage) == (("web=x:0.7", "y:0.3"), ("0.5:y=1", "0.8:web=1"))
    file.write_text('dataset = "someone/web"')
    assert parse_args(["--config", str(file)]).dataset == "someone/web"
