"""A rank's work at a start, in a step and in a save grows with ranks only by gathering a short record of each, and with
tokens not at all."""

import pytest
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


def test_only_the_first_rank_of_a_node_holds_what_grows_with_tokens_a_byte_each_at_most(rows):
    assert rows["best-fit packing, any other rank", 10**8]["mib"] < 0.1
    assert rows["best-fit packing, the first start of a node", 10**8]["mib"] < 10**8 / 2**20


def test_with_more_ranks_a_rank_has_no_more_collectives_and_a_record_of_each_rank_at_most(rows):
    most = (MANY - FEW) * RECORD_BYTES / 2**20
    for cost in [cost for cost, size in rows if size == MANY]:
        few, many = rows[cost, FEW], rows[cost, MANY]
        assert many["collectives"] <= few["collectives"], cost
        assert many["received_mib"] - few["received_mib"] <= most, cost
        assert many["mib"] - few["mib"] <= 8 * most, cost  # as Python objects
