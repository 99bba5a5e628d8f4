"""Plain lines: no puzzle in the program. Each form is looked for in the syntax trees, and found in examples."""

import ast
import pathlib
from collections.abc import Iterator

import pytest
from conftest import ROOT

FILES = [
    ROOT / "train_fsdp.py",
    ROOT / "utils.py",
    *sorted((ROOT / "harness").rglob("*.py")),
    *sorted((ROOT / "tools").rglob("*.py")),
]


def is_text_or_list(node: ast.AST) -> bool:
    """A literal that is multiplied only to leave it out: words, a list, a tuple. `"-" * width` is a line."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and any(character.isalnum() for character in node.value)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def is_condition(node: ast.AST) -> bool:
    """Something that is surely true or false."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("bool", "isinstance", "any", "all", "callable")


def conditions(tree: ast.Module) -> Iterator[ast.AST]:
    """Every expression that decides a branch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def multiplied_by_a_condition(tree: ast.Module) -> Iterator[ast.AST]:
    """`", more" * flag`, `[1] * (a > b)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for literal, factor in ((node.left, node.right), (node.right, node.left)):
                may_be_a_number = isinstance(literal, ast.Constant | ast.BinOp | ast.Name) and not is_text_or_list(
                    literal
                )
                words = is_text_or_list(literal) and not isinstance(literal, ast.List | ast.Tuple)
                by_a_flag = words and isinstance(factor, ast.Name | ast.Attribute)
                if by_a_flag or (is_condition(factor) and (words or not may_be_a_number)):
                    yield node


def value_as_a_statement(tree: ast.Module) -> Iterator[ast.AST]:
    """`a or b or fail()`, `first(), second()`."""
    values = ast.BoolOp | ast.Tuple | ast.Compare | ast.IfExp | ast.ListComp | ast.Name | ast.Attribute | ast.Subscript
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, values):
            yield node


def is_first_of(node: ast.AST) -> bool:
    """`x[:1]` or `x[-1:]`."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)):
        return False
    return ast.unparse(node.slice) in (":1", "-1:")


def slice_as_a_condition(tree: ast.Module) -> Iterator[ast.AST]:
    """`if x[:1]`, `step in x[:1]`, `for y in x[:1]`, `[*[y][rank:]]`."""
    for node in ast.walk(tree):
        places = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            places = node.comparators
        elif isinstance(node, ast.For | ast.comprehension):
            places = [node.iter]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.List | ast.Tuple):
            yield from [node] if isinstance(node.slice, ast.Slice) else []
        yield from filter(is_first_of, places)
    for test in conditions(tree):
        yield from filter(is_first_of, [test, *getattr(test, "values", [])])


def end_of_a_constant(tree: ast.Module) -> Iterator[ast.AST]:
    """`NUMBERS[-3:]`: a meaning by the place in a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id.isupper():
            bounds = [node.slice]
            if isinstance(node.slice, ast.Slice):
                bounds = [node.slice.lower, node.slice.upper]
            if any(isinstance(bound, ast.UnaryOp) and isinstance(bound.op, ast.USub) for bound in bounds):
                yield node


def crowded_comprehension(tree: ast.Module) -> Iterator[ast.AST]:
    """Two loops, a condition and `:=` in one expression."""
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for node in ast.walk(tree):
        if isinstance(node, comprehensions) and len(node.generators) > 1:
            walrus = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
            if walrus or len(node.generators) > 2:
                yield node


def choice_within_a_choice(tree: ast.Module) -> Iterator[ast.AST]:
    """`a if b else c if d else e`."""
    for node in ast.walk(tree):
        parts = (node.test, node.body, node.orelse) if isinstance(node, ast.IfExp) else ()
        if any(isinstance(part, ast.IfExp) for part in parts):
            yield node


def guarded_value(tree: ast.Module) -> Iterator[ast.AST]:
    """`found and found.name` where a value is wanted."""
    branches = {id(part) for test in conditions(tree) for part in ast.walk(test)}
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and id(node) not in branches:
            first, last = node.values[0], node.values[-1]
            of_the_first = isinstance(last, ast.Attribute | ast.Subscript) and ast.unparse(first) in ast.unparse(last)
            if of_the_first:
                yield node


FORMS = {
    multiplied_by_a_condition: ["x = 'a' + ', more' * flag", "y += [1] * (a > b)", "z = f'{n} left' * self.late"],
    value_as_a_statement: ["a or b or fail()", "first(), second()", "x if y else z"],
    slice_as_a_condition: ["x = step in y[:1]", "for a in b[:1]: pass", "x = [*[a][rank:]]", "if a[:1]: pass"],
    end_of_a_constant: ["x = NUMBERS[-3:]", "x = NUMBERS[-2]"],
    crowded_comprehension: ["[c for a in b for c in a if (d := c)]"],
    choice_within_a_choice: ["x = a if b else c if d else e"],
    guarded_value: ["x = found and found[1]", "f(gpu and gpu.name)"],
}


def puzzles(source: str, forms=tuple(FORMS)) -> list[str]:
    tree = ast.parse(source)
    return [f"line {node.lineno}: {ast.unparse(node)}" for form in forms for node in form(tree)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_no_puzzle(path: pathlib.Path):
    assert puzzles(path.read_text()) == []


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_each_form_is_found(form):
    for example in FORMS[form]:
        assert puzzles(example, [form])


def test_plain_lines_are_no_puzzles():
    plain = ["x = '-' * width", "x = [0] * n", "x = rows[:1]", "if a and a.b: pass", "x = VALUES[0]", "f()"]
    assert [puzzles(line) for line in plain] == [[]] * len(plain)
