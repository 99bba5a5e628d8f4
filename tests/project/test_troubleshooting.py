"""docs/TROUBLESHOOTING.md has one entry for each identifier of an error or a warning in the code, and no other.

An exception carries the identifier as the keyword `entry="..."`. A line that is only printed, or a text that becomes
one, has it in a comment `# entry: ...`. On the page it is the anchor `<a id="...">` of the entry.
"""

import ast
import pathlib
import pickle
import re

import pytest
from conftest import ROOT

from harness.base.errors import UserError
from harness.model import configs

PAGE = ROOT / "docs" / "TROUBLESHOOTING.md"
FILES = [
    ROOT / "train_fsdp.py",
    ROOT / "utils.py",
    *sorted((ROOT / "harness").rglob("*.py")),
    ROOT / "tools" / "wandb_view.py",
    ROOT / "launch" / "datatrove.py",
]
EXCEPTIONS = {"UserError", "NoSplitError", "UnreadableError"}
OF_ARGPARSE = {"ArgumentTypeError", "error"}  # with a text of their own: a variable has its entry where it is written
TROUBLE = re.compile(r"^f?[\"'](failed|skipped|slow|planned +nothing)\b")  # such lines of `say`
COMMENT = re.compile(r"# entry: ([a-z0-9-]+)$", re.MULTILINE)


def entries_in(source: str) -> set[str]:
    """The identifiers that a file of code names."""
    return {*re.findall(r'\bentry="([a-z0-9-]+)"', source), *COMMENT.findall(source)}


def entries_on(page: str) -> list[str]:
    """The identifiers of a page, in its order."""
    return re.findall(r'<a id="([a-z0-9-]+)"></a>', page)


def calls_without_entry(source: str) -> list[str]:
    """The line and text of each call that raises or prints an error without an identifier."""
    lines, nameless = source.splitlines(), []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).split(".")[-1]
        text = ast.unparse(call.args[0]) if call.args else ""
        if name in EXCEPTIONS:
            has_entry = any(keyword.arg == "entry" for keyword in call.keywords)
        elif (name in OF_ARGPARSE and re.search(r"[\"']", text)) or (name == "say" and TROUBLE.match(text)):
            has_entry = COMMENT.search("\n".join(lines[call.lineno - 2 : call.end_lineno]))
        else:
            continue
        if not has_entry:
            nameless.append(f"{call.lineno}: {name}({text})")
    return nameless


def test_the_page_has_one_entry_for_each_identifier_of_the_code_and_no_other():
    on_page = entries_on(PAGE.read_text())
    in_code = set().union(*(entries_in(path.read_text()) for path in FILES))
    assert sorted(on_page) == sorted(in_code)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_error_names_its_entry(path: pathlib.Path):
    assert calls_without_entry(path.read_text()) == []


def test_a_rule_about_flags_names_its_entry():
    """A rule is a text that begins with its flag, in harness/flags/rules.py."""
    lines = (ROOT / "harness" / "flags" / "rules.py").read_text().splitlines()
    rules = [number for number, line in enumerate(lines) if re.search(r"\"--[a-z-]+[^\"]*: ", line)]
    assert len(rules) > 20
    assert [lines[number] for number in rules if not COMMENT.search("\n".join(lines[number - 1 : number + 1]))] == []


def test_an_error_has_the_entry_that_its_message_stands_under():
    with pytest.raises(UserError, match="no such folder") as error:
        configs.load_config("/no/such/folder")
    assert error.value.entry == "no-such-model"


def test_an_error_of_a_data_worker_keeps_its_entry():
    error = pickle.loads(pickle.dumps(UserError("--dataset x: it is empty", 1, entry="no-data-files")))
    assert (str(error), error.exit_code, error.entry) == ("--dataset x: it is empty", 1, "no-data-files")


def test_a_call_without_an_entry_is_found():
    source = 'raise UserError("--lr: too large")\nsay("failed     a.txt")\n# entry: a-b\nparser.error("--lr")\n'
    assert calls_without_entry(source) == ["1: UserError('--lr: too large')", "2: say('failed     a.txt')"]
    assert entries_in(source + 'UserError("x", entry="c-d")') == {"a-b", "c-d"}
