"""What a rank does at a start, in a step and in a save does not grow with ranks or tokens but by what a gathering of
one short record from each rank takes."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import scale

pytestmark = pytest.mark.slow

FEW, MANY = 8, 4096
RECORD_BYTES = 512  # of one rank, in a gathering


@pytest.fixture(scope="module")
def rows():
    found = {}
    for row in scale.measure_all((FEW, MANY), (10**7, 10**8), repeats=1):
        found[row["cost"], row.get("ranks") or row["tokens"]] = row
    return found


def costs(rows, size: int) -> list[str]:
    return [cost for cost, of in rows if of == size]


def test_no_rank_but_the_first_of_a_node_holds_what_grows_with_tokens_and_that_one_a_byte_each_at_most(rows):
    assert rows["best-fit packing, any other rank", 10**8]["mib"] < 0.1
    assert rows["best-fit packing, the first start of a node", 10**8]["mib"] < 10**8 / 2**20


def test_of_thousands_of_ranks_each_enters_as_many_collectives_as_of_eight(rows):
    for cost in costs(rows, MANY):
        assert rows[cost, MANY]["collectives"] <= rows[cost, FEW]["collectives"], cost


def test_what_a_rank_receives_and_holds_grows_by_a_record_of_each_rank_at_most(rows):
    for cost in costs(rows, MANY):
        few, many = rows[cost, FEW], rows[cost, MANY]
        most = (MANY - FEW) * RECORD_BYTES / 2**20
        assert many["received_mib"] - few["received_mib"] <= most, cost
        assert many["mib"] - few["mib"] <= 8 * most, cost  # as Python objects
