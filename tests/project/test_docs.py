"""The documents: links lead somewhere, snippets print the output beside them, and every command is accepted.

Python and bash blocks are run. One that needs a GPU, the hub or much time has `<!-- not run: reason -->` right before
it; with the reason `needs the package NAME` it is run if that is installed. Bash blocks run in a copy of the project's
folder that has the run `outputs/demo`.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import transformers
from accelerate.commands.launch import launch_command_parser
from checkpoints import write_checkpoint
from conftest import ROOT, STORIES, parse, start
from torch.distributed.run import get_args_parser

from harness.flags import rules
from harness.flags.settings import FLAGS
from tools import flag_table, metric_table

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def unfenced(document: pathlib.Path) -> str:
    return FENCED.sub("", document.read_text())


# ----------------------------------------------------------------------------------------------------------------------
# Links


def anchors_of(document: pathlib.Path) -> set[str]:
    """GitHub's anchors of headings: lower case without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#{1,6} +(.+?)[ #]*$", unfenced(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading():
    broken = []
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", INLINE.sub("", unfenced(document)))
        for link in filter(lambda link: not re.match(r"\w+:", link), map("".join, links)):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{document.name}: {link}")
    assert broken == []


# ----------------------------------------------------------------------------------------------------------------------
# Snippets


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A Python or bash block, in the order of its document."""

    document: pathlib.Path
    line: int
    code: str
    shown: str  # its output: the block right behind it, or the comments behind its calls of print
    not_run: str  # the reason


def snippets_of(document: pathlib.Path, language: str = "python") -> Iterator[Snippet]:
    text = document.read_text()
    blocks = list(FENCED.finditer(text))
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block[1] != language:
            continue
        above, code = text[: block.start()].rstrip(), textwrap.dedent(block[2])
        shown = "\n".join(re.findall(r"^print\(.*\)  # (.+)$", code, re.MULTILINE))
        if following and not following[1] and not text[block.end() : following.start()].strip():
            shown = textwrap.dedent(following[2]).strip()
        reason = re.search(r"<!-- not run: (.+) -->$", above)
        line = text.count("\n", 0, block.start()) + 1
        yield Snippet(document, line, code, shown, reason[1] if reason else "")


def reason_to_skip(snippet: Snippet) -> str:
    """The reason in the document, unless that is a package that is installed."""
    package = re.fullmatch(r"needs the package (\w+)", snippet.not_run)
    return "" if package and find_spec(package[1]) else snippet.not_run


# test_recipes.py carries out those of CONTRIBUTING.md
SNIPPETS = [one for document in DOCUMENTS if document.name != "CONTRIBUTING.md" for one in snippets_of(document)]
SHELL = [snippet for document in DOCUMENTS for snippet in snippets_of(document, "bash")]
MARK = "----- the next snippet -----"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """A copy of the repository's root to write in."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("assets", "benchmarks", "harness", "launch", "train_fsdp.py", "utils.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(command: list, folder: pathlib.Path) -> str:
    process = start(command, cwd=folder, HF_HUB_OFFLINE="1")
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def outputs_of(snippets: list[Snippet], folder: pathlib.Path) -> dict[Snippet, str]:
    """The output of each of a document's snippets, which run in one process."""
    runnable = [snippet for snippet in snippets if not reason_to_skip(snippet)]
    if not runnable:
        return {}
    (folder / "snippets.py").write_text(f"\nprint({MARK!r})\n".join(snippet.code for snippet in runnable))
    return dict(zip(runnable, run([sys.executable, "snippets.py"], folder).split(f"{MARK}\n"), strict=True))


@pytest.fixture(scope="module")
def printed(root):
    """`printed(document)`: the outputs of its snippets, which run once."""
    return functools.cache(lambda document: outputs_of([*snippets_of(document)], root))


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: f"{snippet.document.name}:{snippet.line}")
def test_a_snippet_runs_and_prints_the_output_beside_it(printed, snippet):
    if reason := reason_to_skip(snippet):
        pytest.skip(reason)
    if "FlopCounterMode" in snippet.code and transformers.__version__ < "5.18":
        pytest.skip("transformers 5.17 has a product for rotary angles, which torch's counter counts")
    output = printed(snippet.document)[snippet].strip()
    assert output == (snippet.shown or output)


def test_the_tables_of_flags_and_metrics_are_the_programs():
    assert (ROOT / "docs" / "FLAGS.md").read_text() == flag_table.table()
    page = (ROOT / "docs" / "MONITORING.md").read_text()
    assert page == metric_table.with_table(page)


# ----------------------------------------------------------------------------------------------------------------------
# Shell blocks

DEMO = "train_fsdp.py --demo --num-steps 4 --sequence-length 64 --batch-size 2 --num-workers 0 --eval-interval 2"


@pytest.fixture(scope="module")
def workplace(root) -> pathlib.Path:
    """A copy of the repository's root with three runs, a file of prompts and a file of stories."""
    flags = "--checkpoint-interval 2 --sample-tokens 2 --log-interval 1 --perf-warmup-steps 1 --run-name demo"
    run([sys.executable, *DEMO.split(), *flags.split()], root)
    for name in ("first", "second"):
        shutil.copytree(root / "outputs" / "demo", root / "outputs" / name)
    (root / "prompts.txt").write_text("Once there was\nOne day\n")
    stories = [json.loads(line)["text"] for line in (STORIES / "validation.jsonl").read_text().splitlines()]
    (root / "novels.txt").write_text("\n".join(stories))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in SHELL if not block.not_run], ids=lambda block: f"{block.document.name}:{block.line}"
)
def test_a_shell_block_runs(workplace, printed, block):
    printed(block.document)  # may have written what a command reads
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"HF_HUB_OFFLINE": "1", "PATH": path, "HOME": str(workplace)}
    process = start(["bash", "-euo", "pipefail", "-c", block.code], cwd=workplace, **options)
    assert process.returncode == 0, process.stderr[-3000:]


# ----------------------------------------------------------------------------------------------------------------------
# Commands


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that starts the program."""

    file: str
    launcher: str
    launcher_flags: str
    flags: str


LAUNCHERS = {"torchrun": get_args_parser(), "accelerate launch": launch_command_parser()}
COMMAND = re.compile(
    r"(?:^(?=train_fsdp\.py --)|\b(python|torchrun|accelerate launch|sbatch)\b(.*?))"
    r"(?:train_fsdp\.py|launch/slurm\.sh)(?!\S)([^&|;\n]*)",
    re.MULTILINE,
)
VARIABLE = re.compile(r"\$(\w+|\{[^}]*\}|\([^)]*\))")


def commands_of(path: pathlib.Path) -> list[Command]:
    """Every command that starts the program in a file, or in the code of Markdown. Variables have the value 1."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join([*(block[2] for block in FENCED.finditer(text)), *INLINE.findall(unfenced(path))])
    text = VARIABLE.sub("1", re.sub(r"\\\n\s*", " ", text).replace('"$@"', ""))
    found = [Command(path.name, *(part.strip() for part in parts)) for parts in COMMAND.findall(text)]
    return list(dict.fromkeys(found))


LAUNCH = sorted(path for path in (ROOT / "launch").iterdir() if path.is_file())
COMMANDS = [
    command for path in [*DOCUMENTS, *LAUNCH] if path.name != "CONTRIBUTING.md" for command in commands_of(path)
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.file}: {command.launcher} {command.flags}")
def test_launcher_and_program_accept_a_command(command, monkeypatch, tmp_path, tables):
    monkeypatch.chdir(tmp_path)  # its --export folder must not exist
    monkeypatch.setattr(rules, "missing_files", lambda settings: iter(()))  # its data do not exist
    flags = shlex.split(command.flags, comments=True)
    for flag, value in itertools.pairwise(flags):  # files that it reads exist
        if flag == "--resume" and value != "auto":
            manifest = {}
            if "--export-weights" in flags:
                of_run = parse(shlex.split("--init pretrained --lora-rank 16"))
                manifest = {"flags": {name: getattr(of_run, name) for name in FLAGS}}
            write_checkpoint(tmp_path / value, 1, **manifest)
        if flag == "--import":
            (tmp_path / value).parent.mkdir()
            shutil.copy(ROOT / value, tmp_path / value)
        if flag == "--config":
            (tmp_path / value).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / value).write_text('{"given": {}}' if value.endswith(".json") else "")
    parse(flags)
    if launcher := LAUNCHERS.get(command.launcher):
        launcher.parse_args([*shlex.split(command.launcher_flags), "train_fsdp.py"])
