"""The forms of issues by GitHub's schema, what they ask for, and CITATION.cff by its schema's required keys."""

import re
import tomllib

import pytest
import yaml
from conftest import ROOT

FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]
ATTRIBUTES = {  # required, others
    "markdown": ({"value"}, set()),
    "textarea": ({"label"}, {"description", "placeholder", "value", "render"}),
    "input": ({"label"}, {"description", "placeholder", "value"}),
    "dropdown": ({"label", "options"}, {"description", "multiple", "default"}),
    "checkboxes": ({"label", "options"}, {"description"}),
}


def faults_of(form: dict) -> list[str]:
    """What GitHub would refuse in a form."""
    faults = [f"lacks {key}" for key in ("name", "description", "body") if not form.get(key)]
    unknown = form.keys() - {"name", "description", "body", "labels", "title", "assignees", "projects", "type"}
    faults += [f"unknown key {key}" for key in unknown]
    ids = [part.get("id") for part in form.get("body", ()) if part.get("id")]
    faults += [f"id {name} twice" for name in set(ids) if ids.count(name) > 1]
    for part in form.get("body", ()):
        if part.get("type") not in ATTRIBUTES:
            faults.append(f"unknown type {part.get('type')}")
            continue
        required, others = ATTRIBUTES[part["type"]]
        attributes = part.get("attributes", {})
        faults += [f"{part['type']} lacks {key}" for key in required - attributes.keys()]
        faults += [f"{part['type']} has unknown {key}" for key in attributes.keys() - required - others]
        faults += [f"unknown key {key} of a part" for key in part.keys() - {"type", "id", "attributes", "validations"}]
        faults += [f"unknown validation {key}" for key in part.get("validations", {}).keys() - {"required"}]
    if form.get("body") and all(part.get("type") == "markdown" for part in form["body"]):
        faults.append("asks for nothing")
    return faults


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_is_one_that_github_takes(path):
    assert faults_of(yaml.safe_load(path.read_text())) == []


def test_a_form_that_github_refuses_is_found():
    form = {"name": "x", "body": [{"type": "textarea", "id": "a", "attributes": {"title": "y"}}, {"type": "text"}]}
    found = ["lacks description", "textarea lacks label", "textarea has unknown title", "unknown type text"]
    assert faults_of(form) == found


def test_a_bug_is_reported_with_what_the_version_and_a_runs_folder_hold():
    text = FORMS[0].read_text()
    for what in ("train_fsdp.py --version", "config.json", "metrics.jsonl", "console", "command"):
        assert what in text
    required = [part["id"] for part in yaml.safe_load(text)["body"] if part.get("validations", {}).get("required")]
    assert required == ["what", "version", "command", "console", "again"]


def test_a_security_report_is_led_to_its_page_and_away_from_issues():
    config = (FORMS[0].parent / "config.yml").read_text()
    assert yaml.safe_load(config) == {"blank_issues_enabled": True} and "docs/SECURITY.md" in config
    assert "ADDRESS FOR REPORTS" in (ROOT / "docs" / "SECURITY.md").read_text()


def test_the_citation_has_what_its_schema_requires_and_the_projects_own_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (str(citation["version"]), citation["license"]) == (project["version"], project["license"])
    assert re.search(rf"^## {re.escape(project['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
