"""docs/ names every command, every option and every field of a configuration, and README every page."""

import importlib
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tune_model.pipeline.commands import COMMANDS
from tune_model.pipeline.config import json_schema, parse_config

FIELDS = sorted(
    {(name, field) for name, body in json_schema()["$defs"].items() for field in body["properties"]},
)


def command_of(name: str) -> click.Command:
    module: Any = importlib.import_module(f"tune_model.pipeline.commands.{name.replace('-', '_')}")
    return module.command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_described(repository: Path, name: str):
    page = (repository / "docs" / "commands" / f"{name}.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    command = command_of(name)
    params = [p for one in getattr(command, "commands", {"": command}).values() for p in one.params]
    options = {o for p in params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}
    assert set(re.findall(r"(?<!\S)`(--?[a-z][a-z-]*)", rows)) == options
    assert "Exit codes: " in page or not options


def test_there_is_no_page_of_a_command_that_is_gone(repository: Path):
    assert {page.stem for page in (repository / "docs" / "commands").glob("*.md")} == set(COMMANDS)


@pytest.mark.parametrize(("struct", "field"), FIELDS)
def test_every_field_of_a_configuration_is_described(repository: Path, struct: str, field: str):
    page = (repository / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert re.search(rf"`{field}`|`{field}:", page), f"{struct}.{field}"


def test_the_example_in_the_configuration_page_is_one(repository: Path):
    page = (repository / "docs" / "configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"\n\n((?:    .*\n)+)", page[page.index("**`source: torch`**") :])[:1]
    text = "\n".join(line[4:] for line in example.splitlines())
    assert parse_config(text, "configuration.md").name == yaml.safe_load(text)["name"] == "classifier"


def test_commands_shown_in_the_documentation_exist(repository: Path):
    """In code, `tune-model WORD` names a command or a configuration."""
    pages = (repository / "README.md", *repository.rglob("docs/**/*.md"), repository / "benchmarks" / "README.md")
    for page in (*pages, repository / "Makefile"):
        for word in re.findall(r"(?m)(?:^    |`)tune-model +([a-z][\w.-]*)", page.read_text(encoding="utf-8")):
            assert word in COMMANDS or word.endswith(".yaml"), f"{page.name}: tune-model {word}"


def options_of(name: str) -> set[str]:
    command = command_of(name)
    params = [p for one in (command, *getattr(command, "commands", {}).values()) for p in one.params]
    return {option for p in params for option in (*p.opts, *p.secondary_opts)} | {"--help"}


def test_options_shown_in_the_documentation_exist(repository: Path):
    """Of every `tune-model` line: the options are those of its command, or of `tune` for a configuration."""
    seen = 0
    for page in (repository / "README.md", *repository.rglob("docs/**/*.md"), repository / "benchmarks" / "README.md"):
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"(?m)^    tune-model (.*)$|`tune-model ([^`]*)`", text):
            words = "".join(line).partition(" #")[0].split("|")[0].split()
            if not words or words[0].startswith("-"):
                continue
            name = words[0] if words[0] in COMMANDS else "tune"
            options = {word.partition("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
            seen += len(options)
            assert options <= options_of(name), f"{page.name}: tune-model {' '.join(words)}"
    assert seen > 20


SCRIPTS = re.compile(r"(?m)^    (?:PYTHONPATH=src )?python (benchmarks/\w+\.py|examples/\w+\.py)(.*)$")


def test_scripts_shown_in_the_documentation_exist(repository: Path):
    """Their options are named in them, or in what all benchmarks share."""
    shared = (repository / "benchmarks" / "bench" / "command.py").read_text(encoding="utf-8")
    seen = 0
    for page in (repository / "README.md", *repository.rglob("docs/**/*.md"), repository / "benchmarks" / "README.md"):
        for path, rest in SCRIPTS.findall(page.read_text(encoding="utf-8")):
            source = (repository / path).read_text(encoding="utf-8") + shared
            for option in re.findall(r"(?<!\S)--[a-z-]+", rest.partition(" #")[0]):
                seen += 1
                assert f'"{option}"' in source, f"{page.name}: {path} {option}"
    assert seen > 10


def test_readme_leads_to_every_page(repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    for page in sorted(path.name for path in (repository / "docs").iterdir()):
        assert f"docs/{page}" in readme, page
