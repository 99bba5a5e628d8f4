"""The checklist of a release, a line for each check. Called by hand, before a version gets its tag:

    python -m tools.release_check                           # a clean clone of HEAD, about half an hour on two cores
    python -m tools.release_check --venv .venv              # the same without installing: minutes
    python -m tools.release_check --with-floor --with-newest    # and the tests with the oldest and newest versions

`ok`, `failed` with the reason, `not run` with what would run it, or `by hand` with what only a person can fill in; the
exit code is 1 after a failure. All but the first check look at the clone, which is removed at the end. Independent of
what a release is published to.
"""

import argparse
import dataclasses
import datetime
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

from harness.base import console
from harness.base.text import first_line

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = "train_fsdp.py --demo --num-steps 4 --sequence-length 64 --batch-size 2 --num-workers 0 --eval-interval 2"
DOCS_TESTS = [
    "tests/project/test_docs.py",
    "tests/project/test_troubleshooting.py",
    "tests/project/test_prose_figures.py",
]
GENERATED = (
    "python -m tools.flag_table > docs/FLAGS.md",
    "python -m tools.figure_table docs/TRACKING.md",
    "python -m tools.house > docs/images/house.svg",
)
BLOCK = re.compile(r"(?:<!-- (not run): .+? -->\n)?```bash\n(.*?)```", re.DOTALL)
UNFINISHED = r"\b(TO" + r"DO|FIX" + r"ME)\b"
PLACES = r"(^|[^.A-Za-z0-9_$}])/(home|Users|root|work|mnt)/[a-z]"
BLANK = "to be filled " + "in"
NOT_SOURCES = [":!docs/images", ":!benchmarks/results", ":!tests"]


class CheckError(Exception):
    """What a check found."""


class NotRunError(Exception):
    """Which flag would run a check, or what it lacks."""


class ByHandError(Exception):
    """What a person has to do before a release."""


@dataclasses.dataclass
class Release:
    """What is checked, and how."""

    root: pathlib.Path  # the repository
    clone: pathlib.Path  # of its HEAD
    venv: pathlib.Path | None  # an environment to take instead of making one
    with_floor: bool
    with_newest: bool
    days: int  # how old a measurement may be

    def run(self, command: str | list[str], **variables: str) -> str:
        """What a command of the clone prints, with the clone's Python first on the path.

        Raises:
            CheckError: it ended with another code than 0, or there is no such program.
        """
        path = f"{self.clone / '.venv' / 'bin'}:{os.environ['PATH']}"
        words = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command
        try:
            done = subprocess.run(
                words, cwd=self.clone, env=os.environ | {"PATH": path} | variables, capture_output=True, text=True
            )
        except OSError as error:
            raise CheckError(str(error)) from error
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise CheckError(
                f"exit code {done.returncode} of {first_line(str(command))}: {said[-1] if said else 'silent'}"
            )
        return done.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Checks. Each raises CheckError or NotRunError, or returns.


def tree_is_clean(release: Release) -> None:
    command = ["git", "-C", str(release.root), "status", "--porcelain"]
    changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if changed:
        raise CheckError(f"{len(changed)} files are not committed, the first is {changed[0][3:]}")


def clone_is_set_up(release: Release) -> None:
    command = ["git", "clone", "--quiet", str(release.root), str(release.clone)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    if release.venv:
        (release.clone / ".venv").symlink_to(release.venv.resolve())
    else:
        release.run("./setup.sh")


def readme_commands_run(release: Release) -> None:
    for not_run, commands in BLOCK.findall((release.clone / "README.md").read_text()):
        if not not_run:
            release.run(commands)


def demo_trains(release: Release) -> None:
    said = release.run(f"python {DEMO} --run-name release")
    folder = release.clone / "outputs" / "release"
    if not (folder / "metrics.jsonl").exists():
        raise CheckError(f"no metrics.jsonl of the demo; it printed {first_line(said)}")


def docs_hold(release: Release) -> None:
    release.run(["python", "-m", "pytest", *DOCS_TESTS])


def generated_files_are_current(release: Release) -> None:
    for command in GENERATED:
        release.run(command)
    changed = release.run("git diff --name-only").split()
    if changed:
        raise CheckError(f"{', '.join(changed)}: write again with the tools and commit")


def pinned_versions_agree(release: Release) -> None:
    release.run(["python", "-m", "pytest", "tests/project/test_setup.py"])


def tests_pass_on_the_floor(release: Release) -> None:
    if not release.with_floor:
        raise NotRunError("--with-floor")
    release.run("./setup.sh", VENV=".venv-floor", REQUIREMENTS="requirements-floor.txt")
    release.run([".venv-floor/bin/python", "-m", "pytest", "-n", "2"])


def tests_pass_on_the_newest(release: Release) -> None:
    if not release.with_newest:
        raise NotRunError("--with-newest")
    pins = (release.clone / "requirements.txt").read_text()
    (release.clone / "requirements-newest.txt").write_text(re.sub(r"==\S+", "", pins))
    release.run("./setup.sh", VENV=".venv-newest", REQUIREMENTS="requirements-newest.txt")
    release.run([".venv-newest/bin/python", "-m", "pytest", "-n", "2"])


def results_are_recent(release: Release) -> None:
    today, wrong = datetime.date.today(), []
    for path in sorted((release.clone / "benchmarks" / "results").glob("*.json")):
        dates = re.findall(r'"date": "(\d{4}-\d\d-\d\d)', path.read_text())
        if not dates:
            wrong.append(f"{path.name} has no date")
            continue
        age = (today - datetime.date.fromisoformat(max(dates))).days
        if age > release.days:
            wrong.append(f"{path.name} is {age} days old")
    if wrong:
        raise CheckError(", ".join(wrong))


def figures_have_sources(release: Release) -> None:
    release.run("python -m tools.prose_figures --without")


def changelog_has_the_version(release: Release) -> None:
    version = tomllib.loads((release.clone / "pyproject.toml").read_text())["project"]["version"]
    changelog = release.clone / "CHANGELOG.md"
    text = changelog.read_text() if changelog.exists() else ""
    if not re.search(rf"^## {re.escape(version)}\b", text, re.MULTILINE):
        raise CheckError(f"CHANGELOG.md has no heading '## {version}', the version of pyproject.toml")


def nothing_is_unfinished(release: Release) -> None:
    refuse_lines(release, UNFINISHED, NOT_SOURCES)


def blanks_are_filled(release: Release) -> None:
    lines = lines_with(release, BLANK, [":!tests"])
    if lines:
        places = [":".join(line.split(":")[:2]) for line in lines]
        raise ByHandError(f"{len(places)} blanks: {', '.join(places)}")


def no_machine_is_named(release: Release) -> None:
    refuse_lines(release, PLACES, NOT_SOURCES)


def refuse_lines(release: Release, pattern: str, paths: list[str]) -> None:
    lines = lines_with(release, pattern, paths)
    if lines:
        raise CheckError(f"{len(lines)} lines, the first is {lines[0][:120]}")


def lines_with(release: Release, pattern: str, paths: list[str]) -> list[str]:
    """FILE:LINE:TEXT of each line of the clone's files that matches."""
    command = ["git", "-C", str(release.clone), "grep", "-nIE", pattern, "--", ".", *paths]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


CHECKS = (
    ("git tree is clean", tree_is_clean),
    ("a clean clone is set up", clone_is_set_up),
    ("README's commands run", readme_commands_run),
    ("the demo trains", demo_trains),
    ("docs: links, commands, flags, figures", docs_hold),
    ("generated files are current", generated_files_are_current),
    ("lists of versions agree", pinned_versions_agree),
    ("tests, oldest versions", tests_pass_on_the_floor),
    ("tests, newest versions", tests_pass_on_the_newest),
    ("results are recent", results_are_recent),
    ("every figure has a source", figures_have_sources),
    ("CHANGELOG has this version", changelog_has_the_version),
    ("nothing is unfinished", nothing_is_unfinished),
    ("blanks for persons", blanks_are_filled),
    ("no machine's path is named", no_machine_is_named),
)


def check(release: Release, checks=CHECKS) -> bool:
    """Prints a line for each check; whether none failed. Without a clone the checks after it are not run."""
    failed = 0
    for title, one in checks:
        outcome, reason = "ok", ""
        try:
            if one not in (tree_is_clean, clone_is_set_up) and not release.clone.exists():
                raise NotRunError("there is no clone")
            one(release)
        except NotRunError as error:
            outcome, reason = "not run", str(error)
        except ByHandError as error:
            outcome, reason = "by hand", str(error)
        except CheckError as error:
            outcome, reason = "failed", str(error)
        except subprocess.CalledProcessError as error:
            outcome, reason = "failed", f"{' '.join(error.cmd[:2])}: {first_line(error.stderr)}"
        failed += outcome == "failed"
        print(f"{outcome:8} {title}" + (f": {reason}" if reason else ""), flush=True)
    return not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release_check", description="The checklist of a release.")
    parser.add_argument("--venv", type=pathlib.Path, metavar="DIR", help="take this environment instead of making one")
    parser.add_argument("--with-floor", action="store_true", help="run the tests with requirements-floor.txt")
    parser.add_argument("--with-newest", action="store_true", help="run the tests with the newest of all packages")
    parser.add_argument("--days", type=int, default=90, help="how old a measurement may be [90]")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        clone = pathlib.Path(folder) / "clone"
        release = Release(ROOT, clone, given.venv, given.with_floor, given.with_newest, given.days)
        return 0 if check(release) else 1


if __name__ == "__main__":
    console.never_fail()
    sys.exit(main())
