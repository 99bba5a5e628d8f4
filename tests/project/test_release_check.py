"""tools.release_check: what each check finds, in a small repository with a fault planted in it."""

import datetime
import subprocess

import pytest

from tools import release_check
from tools.release_check import CHECKS, ByHandError, CheckError, NotRunError, Release

TODAY = datetime.date.today()
FILES = {
    "pyproject.toml": '[project]\nname = "x"\nversion = "1.2.0"\n',
    "CHANGELOG.md": "# Changes\n\n## 1.2.0\n\n- new\n",
    "README.md": "# X\n\n```bash\ntouch ran\n```\n\n<!-- not run: no GPU -->\n```bash\ntouch ran-too\n```\n",
    "benchmarks/results/a.json": f'{{"date": "{TODAY}"}}\n',
    "requirements.txt": "# what a run needs\ntorch==2.13.0\n",
    "setup.sh": "#!/bin/sh\nmkdir -p .venv/bin\n",
}


@pytest.fixture
def release(tmp_path):
    """A repository in which all is well, and a clone."""
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "setup.sh").chmod(0o755)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        names = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
        subprocess.run(["git", *names, *command], cwd=root, check=True)
    release = Release(root, tmp_path / "clone", None, False, False, 30)
    release_check.clone_is_set_up(release)
    return release


HERE = (
    release_check.tree_is_clean,
    release_check.readme_commands_run,
    release_check.results_are_recent,
    release_check.changelog_has_the_version,
    release_check.nothing_is_unfinished,
    release_check.blanks_are_filled,
    release_check.no_machine_is_named,
)


def test_a_repository_without_a_fault_passes_and_commands_that_are_not_run_are_left_out(release):
    for one in HERE:
        one(release)
    assert (release.clone / "ran").exists() and not (release.clone / "ran-too").exists()


@pytest.mark.parametrize(
    "one, file, text, reason",
    [
        (release_check.readme_commands_run, "README.md", "```bash\necho oh >&2\nexit 3\n```\n", "exit code 3 .*: oh"),
        (release_check.results_are_recent, "benchmarks/results/b.json", '{"rate": 1}', "b.json has no date"),
        (
            release_check.results_are_recent,
            "benchmarks/results/a.json",
            '{"date": "2020-01-01"}',
            r"a.json is \d+ days",
        ),
        (release_check.changelog_has_the_version, "CHANGELOG.md", "## 1.2.01\n", "no heading '## 1.2.0'"),
        (release_check.nothing_is_unfinished, "README.md", "TO" + "DO: more\n", "README.md:1:"),
        (release_check.no_machine_is_named, "README.md", "cd /ho" + "me/me/x\n", "README.md:1:"),
    ],
)
def test_a_planted_fault_is_found(release, one, file, text, reason):
    (release.clone / file).write_text(text)
    with pytest.raises(CheckError, match=reason):
        one(release)


def test_a_blank_for_a_person_is_named_and_fails_nothing(release, capsys):
    (release.clone / "README.md").write_text("<ADDRESS: to be filled " + "in>\n")
    with pytest.raises(ByHandError, match=r"1 blanks: README\.md:1"):
        release_check.blanks_are_filled(release)
    assert release_check.check(release, [("blanks for persons", release_check.blanks_are_filled)])
    assert capsys.readouterr().out == "by hand  blanks for persons: 1 blanks: README.md:1\n"


def test_a_file_that_is_not_committed_is_found(release):
    (release.root / "new.py").write_text("")
    with pytest.raises(CheckError, match=r"1 files are not committed, the first is new\.py"):
        release_check.tree_is_clean(release)


def test_generated_files_that_are_old_are_found(release, monkeypatch):
    monkeypatch.setattr(release_check, "GENERATED", ["echo new > CHANGELOG.md"])
    with pytest.raises(CheckError, match=r"CHANGELOG.md: write again"):
        release_check.generated_files_are_current(release)
    monkeypatch.setattr(release_check, "GENERATED", ["git checkout --quiet CHANGELOG.md"])
    release_check.generated_files_are_current(release)


def test_an_environment_that_is_there_is_taken(release, tmp_path):
    again = Release(release.root, tmp_path / "again", tmp_path / "venv", False, False, 30)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "hello").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "venv" / "bin" / "hello").chmod(0o755)
    release_check.clone_is_set_up(again)
    assert again.run("hello") == "hello\n"


def test_other_versions_are_tested_only_when_asked_for(release):
    for one, flag in (
        (release_check.tests_pass_on_the_floor, "floor"),
        (release_check.tests_pass_on_the_newest, "newest"),
    ):
        with pytest.raises(NotRunError, match=f"--with-{flag}"):
            one(release)
    setup = '#!/bin/sh\nmkdir -p $VENV/bin\nprintf "#!/bin/sh\\necho $REQUIREMENTS; exit 1" > $VENV/bin/python\n'
    (release.clone / "setup.sh").write_text(setup + "chmod +x $VENV/bin/python\n")
    release.with_newest = True
    with pytest.raises(CheckError, match=r"exit code 1 .*: requirements-newest.txt"):
        release_check.tests_pass_on_the_newest(release)
    assert (release.clone / "requirements-newest.txt").read_text() == "# what a run needs\ntorch\n"


def test_a_line_for_each_check_and_the_code_of_a_failure(release, capsys):
    def good(release):
        pass

    def bad(release):
        raise CheckError("so")

    assert release_check.check(release, [("a", good), ("c", release_check.tests_pass_on_the_floor)])
    assert not release_check.check(release, [("a", good), ("b", bad), ("a", good)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["ok       a", "not run  c: --with-floor", "ok       a", "failed   b: so", "ok       a"]


def test_without_a_clone_the_other_checks_are_not_run(release, tmp_path, capsys):
    nowhere = Release(tmp_path / "nowhere", tmp_path / "no-clone", None, False, False, 30)
    assert not release_check.check(nowhere)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["failed", "failed"] + ["not"] * (len(CHECKS) - 2)


def test_the_files_that_the_checks_name_are_there():
    for name in release_check.DOCS_TESTS:
        assert (release_check.ROOT / name).exists()
    for command in release_check.GENERATED:
        module = command.split()[2].replace(".", "/")
        assert (release_check.ROOT / f"{module}.py").exists()
