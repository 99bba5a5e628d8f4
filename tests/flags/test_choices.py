"""The values of flags that are files of other packages are named as those files are."""

import ast
import re

import pytest
from conftest import ROOT

from harness.data.formats import COMPRESSIONS, all_formats
from harness.flags import choices


@pytest.mark.parametrize(
    "folder, helps",
    [
        ("harness/model/optimizers", {name: one.help for name, one in choices.OPTIMIZERS.items()}),
        ("harness/report/trackers", choices.TRACKERS),
    ],
    ids=str,
)
def test_each_file_of_a_folder_is_a_value_with_its_first_sentence_as_help(folder, helps):
    sentences = {}
    for file in (ROOT / folder).glob("[!_]*.py"):
        docstring = " ".join(ast.get_docstring(ast.parse(file.read_text())).split())
        sentences[file.stem.replace("_", "-")] = re.split(r"\.(?:\s|$)", docstring)[0]
    assert sentences == helps


def test_the_suffixes_of_data_files_are_the_readers():
    readers = all_formats()
    assert set(choices.SUFFIXES) == readers.keys()
    assert set(choices.FIELD_SUFFIXES) < readers.keys()
    assert set(choices.TOKEN_SUFFIXES) == {s for s, reader in readers.items() if hasattr(reader, "open_tokens")}
    assert set(choices.COMPRESSIONS) == COMPRESSIONS.keys()
