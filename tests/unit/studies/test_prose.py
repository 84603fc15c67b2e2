"""studies/prose.py: each count finds a planted text, the project is within the limits, and commits have a subject."""

from __future__ import annotations

import prose
import pytest

FLAGS = '''"""Return flags."""


class RunFlags:
    beta: float = 0.0
    """{help}"""
'''
PLANTED = {
    "openings": ("utils.py", 'def f():\n    """Whether it holds."""\n'),
    "help texts": ("grpo.py", FLAGS.format(help="Where the KL enters.")),
    "private words": ("docs/run.md", "A run is refused when its folder exists.\n"),
    "long sentences": ("docs/run.md", "A run " + "and its words " * 15 + "end.\n"),
}


def project(folder, file: str = "", text: str = ""):
    """Write a project with plain texts, one of them replaced."""
    files = {name: FLAGS.format(help="Set the coefficient.") for name in ("grpo.py", "ppo.py", "utils.py")}
    files |= {"runtime/arguments/flags.py": FLAGS.format(help="Set it."), "CONTRIBUTING.md": "Read it.\n"}
    files |= {"docs/run.md": "Start a run. `refused` and\n\n```\npython refused.py\n```\n\nare code.\n"}
    for name, plain in (files | ({file: text} if file else {})).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(plain)
    return folder


@pytest.mark.parametrize("count", PLANTED)
def test_a_planted_text_is_found(count, tmp_path):
    assert all(places == [] for places in prose.find(project(tmp_path / "plain")).values())
    found = prose.find(project(tmp_path / "planted", *PLANTED[count]))
    assert {name: len(places) for name, places in found.items()} == {name: int(name == count) for name in prose.LIMITS}
    assert found[count][0][0] == PLANTED[count][0]


def test_a_list_of_code_names_is_not_a_long_sentence(tmp_path):
    folder = project(tmp_path, "docs/run.md", f"* Not here: {', '.join(['`name`'] * 50)}\n")
    assert prose.find(folder)["long sentences"] == []


@pytest.mark.slow
def test_the_project_is_within_its_limits():
    assert {n: len(places) for n, places in prose.find().items() if len(places) > prose.LIMITS[n]} == {}


@pytest.mark.parametrize(
    "subject, right",
    [
        ("grpo: clip the ratio from above", True),
        ("tests, docs: name two files after their modules", True),
        ("Last read", False),
        ("grpo:clip", False),
        ("grpo: " + "x" * 70, False),
        ("", False),
    ],
)
def test_subjects_of_commits(subject, right):
    assert (prose.subject_error(subject) == "") == right
