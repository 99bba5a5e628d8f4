"""Lines of code that a user writes for what a program of the comparison does.

Counted is the program and what it uses of `common.py` beside it, by these rules:

- a line counts if it has code: not an empty one, a comment or a docstring;
- a statement whose first line ends with `# comparison` does not count: it times, prints figures, or serves another
  comparison. What only such statements use does not count either;
- `train_fsdp.py` counts 0: its user writes a command.
"""

import ast
import io
import pathlib
import tokenize

MARK = "# comparison"
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def user_lines(program: pathlib.Path) -> int:
    """Of a program in benchmarks/, by the rules above."""
    if program.name == "train_fsdp.py":
        return 0
    tree, lines = ast.parse(program.read_text()), counted_lines(program.read_text())
    shared = program.with_name("common.py")
    if not shared.exists():
        return len(lines)
    text = shared.read_text()
    of_shared, used = counted_lines(text), names_on(tree, lines)
    top = list(ast.parse(text).body)
    found: set[int] = set()
    while True:
        needed = [node for node in top if used & defined_by(node)]
        if not needed:
            return len(lines) + len(found)
        for node in needed:
            top.remove(node)
            own = {line for line in range(first_line(node), node.end_lineno + 1) if line in of_shared}
            found |= own
            used |= names_on(node, own)


def counted_lines(text: str) -> set[int]:
    """Numbers of the lines with code that a user would write."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    source = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or source[node.lineno - 1].endswith(MARK):
            lines -= set(range(first_line(node), node.end_lineno + 1))
    return lines


def first_line(node: ast.stmt) -> int:
    """With its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def defined_by(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def names_on(tree: ast.AST, lines: set[int]) -> set[str]:
    """Names that are used on these lines."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.lineno in lines}
