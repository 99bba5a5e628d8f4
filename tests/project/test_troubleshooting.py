"""docs/TROUBLESHOOTING.md: every error and warning that the program can say stands in it word for word, and it quotes
nothing that the program says no more.

Messages are read off the source: what is given to `UserError` and to the other ways to say that something is wrong,
names in it replaced by what the function binds them to, calls by what the called function returns. What stands before
the first `; ` is the problem, behind it is the advice. The words between placeholders have to stand in the first column
of a table `| it says | ... |`, in a line with the flag that the message begins with.
"""

import ast
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator

import pytest
from conftest import ROOT

from harness.flags.settings import Settings

PAGE = ROOT / "docs" / "TROUBLESHOOTING.md"
FILES = [
    ROOT / "train_fsdp.py",
    ROOT / "utils.py",
    *sorted((ROOT / "harness").rglob("*.py")),
    ROOT / "tools" / "wandb_view.py",
]
ERRORS = {
    "UserError",
    "harness.base.errors.UserError",
    "NoSplitError",
    "UnreadableError",
    "BadRecord",
    "kind",
    "argparse.ArgumentTypeError",
}
SAY = {
    "fail",
    "exit_now",
    "terminal.exit_now",
    "terminal.print_error",
    "sys.stderr.write",
    "sys.exit",
    "self.error",
    "parser.error",
    "self.end",
}
TROUBLE = re.compile(r"failed|skipped|slow  |planned +nothing")  # such lines of `say`
ASKED = ERRORS | SAY | {"say", "print", "ValueError"}
FIELDS = {field.name for field in dataclasses.fields(Settings)}
RETURNED = {"judge", "damage"}  # return a part of a message beside something else


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def functions_of(path: pathlib.Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}


def find_function(name: str, path: pathlib.Path) -> tuple[ast.FunctionDef, pathlib.Path] | None:
    """The function of this name in the same file, or in the only file that has one."""
    places = [place for place in FILES if name in functions_of(place)]
    place = path if path in places else places[0] if len(places) == 1 else None
    return (functions_of(place)[name], place) if place else None


def returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return | ast.Yield) and node.value:
            yield node.value


@functools.cache
def bindings(function: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(what is bound, to what) in a function: by assignment, `:=`, or walking through a list of tuples of its own."""
    pairs, lists, nodes = [], {}, list(ast.walk(function))
    for node in nodes:
        if isinstance(node, ast.Assign):
            pairs += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.NamedExpr | ast.AugAssign):
            pairs.append((node.target, node.value))
    for target, value in pairs:
        if isinstance(target, ast.Name) and isinstance(value, ast.List):
            lists[target.id] = [
                getattr(getattr(each, "value", None), "elt", each) for each in value.elts
            ]  # *(x for ..)
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            pairs += [(node.target, each) for each in lists.get(getattr(node.iter, "id", ""), [node.iter])]
    return pairs


def bound_to(name: str, function: ast.AST) -> Iterator[ast.expr]:
    for target, value in bindings(function):
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for part, given in zip(target.elts, value.elts, strict=False) if both else [(target, value)]:
            if isinstance(part, ast.Name) and part.id == name:
                yield given


def constants(node: ast.expr, function: ast.AST, path: pathlib.Path, seen: frozenset) -> Iterator[str]:
    """The constant words of an expression in their order."""
    within = functools.partial(problem, function=function, path=path)
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.Name):
        if (path, function, node.id) not in seen:
            for value in bound_to(node.id, function):
                yield from within(value, seen=seen | {(path, function, node.id)})
    elif isinstance(node, ast.Call):
        name, own = ast.unparse(node.func), []
        found = find_function(name.split(".")[-1], path)
        if found and found not in seen and name not in ERRORS:
            own = [word for value in returned(found[0]) for word in problem(value, *found, seen | {found})]
            yield from own
        if not own and not name.startswith("re.") and not name.endswith(".split"):
            for argument in [*node.args, getattr(node.func, "value", ast.Constant(None))]:
                yield from constants(argument, function, path, seen)
    elif isinstance(node, ast.IfExp):
        for branch in (node.body, node.orelse):
            yield from within(branch, seen=seen)
    elif not isinstance(node, ast.Compare | ast.Subscript | ast.Attribute):
        for child in ast.iter_child_nodes(node):
            yield from constants(child, function, path, seen) if isinstance(child, ast.expr) else ()


def problem(node: ast.expr, function: ast.AST, path: pathlib.Path, seen: frozenset = frozenset()) -> Iterator[str]:
    """The constant words of a message up to its advice."""
    for text in constants(node, function, path, seen):
        before, advice, _ = text.partition("; ")
        yield before
        if advice:
            return


def says(call: ast.Call, words: list[str]) -> bool:
    """Whether a call says that something is wrong."""
    name = ast.unparse(call.func)
    to_stderr = any(ast.unparse(keyword.value) == "sys.stderr" for keyword in call.keywords)
    of_a_line = (name == "say" and TROUBLE.match("".join(words))) or (name == "print" and to_stderr)
    return bool(name in ERRORS | SAY or of_a_line)


@functools.cache
def messages_of(path: pathlib.Path) -> list[tuple[str, list[str]]]:
    """(file and line, words) of each message of a file."""
    found = []
    owner = {node: function for function in functions_of(path).values() for node in ast.walk(function)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ASKED:
            words = list(problem(node.args[0], owner.get(node, tree_of(path)), path))
            if says(node, words) or (path.name == "flag_files.py" and ast.unparse(node.func) == "ValueError"):
                found.append((f"{path.name}:{node.lineno}", words))
        elif isinstance(node, ast.FunctionDef) and node.name in RETURNED:
            found += [(f"{path.name}:{value.lineno}", [*problem(value, node, path)]) for value in returned(node)]
    return found


def fragments(words: list[str]) -> Iterator[str]:
    """What can be looked for of a message: constant words that say something by themselves, no list of flags."""
    for part in itertools.chain(*(re.split(r"\{[^}]*\}", word) for word in words)):
        word = re.sub(r"^train_fsdp\.py: (error|warning)\b|\s+", " ", part).strip(" :,;.()'`")
        if len(word) >= 10 and " " in word and not set(word.split()) <= FIELDS:
            yield word


def entries(text: str) -> list[str]:
    """The first cells of the tables of what the program says."""
    tables = re.findall(r"^\| it says \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [re.sub(r"\s+", " ", row) for table in tables for row in table.splitlines()]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


def missing(path: pathlib.Path, text: str) -> list[str]:
    """The fragments of a file's messages that have no entry."""
    found, cells = [], entries(text)
    for place, words in messages_of(path):
        flag = re.match(r"--[a-z-]+", words[0]) if words else None
        for fragment in fragments(words):
            if not any(fragment in cell and (not flag or flag[0] in cell) for cell in cells):
                found.append(f"{place}: {flag[0] if flag else '...'}: {fragment}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_error_and_warning_has_its_entry(path):
    assert missing(path, PAGE.read_text()) == []


def test_an_entry_quotes_what_the_program_says():
    messages = [words for path in FILES for _, words in messages_of(path)]
    said = "\n".join(re.sub(r"\s+", " ", join.join(words)) for words in messages for join in ("", " "))

    def is_said(part: str) -> bool:  # more than half of it in one piece: the rest may be a value that is put in
        words = part.split()
        spans = itertools.combinations(range(len(words) + 1), 2)
        return any(" ".join(words[i:j]) in said for i, j in spans if 2 * (j - i) > len(words))

    quoted = [part for cell in entries(PAGE.read_text()) for part in re.split("[…`;]", cell)]
    assert [part for part in fragments(quoted) if not is_said(part)] == []


def test_a_message_without_an_entry_would_be_found():
    page = PAGE.read_text().replace("is beyond the", "lies behind the")
    (found,) = missing(ROOT / "harness/data/splits.py", page)
    assert found.endswith(": --dataset-split: is beyond the")


if __name__ == "__main__":
    for file in FILES:
        for place, words in messages_of(file):
            if found := [*fragments(words)]:
                print(place, found)
