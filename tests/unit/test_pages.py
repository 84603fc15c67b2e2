"""README and docs: short pages, links that lead somewhere, and command lines that the programs take."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import shape
from helpers import ROOT
from submitted_jobs import submit

import grpo
import ppo
from runtime.arguments import flags

USER = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELF = ROOT / "docs" / "maintainers"
PAGES = [*USER, ROOT / "CONTRIBUTING.md", ROOT / "program.md", *sorted(SHELF.glob("*.md"))]
TABLES = {"flags.md", "metrics.md"}  # references: a row per flag, a row per metric
COPIES = ("grpo.py", "ppo.py", "mine.py", "VARIANT.py")
STARTS = ("python ", "make ", "accelerate ", "scripts/", "studies/")
# A command of a commit, whose program may have left since.
EARLIER = re.compile(r"\b[Aa]t ([0-9a-f]{7,40}):\s+`([^`]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_are_short():
    lengths = {page.name: len(page.read_text().splitlines()) for page in USER}
    assert lengths.pop("README.md") <= 90
    assert len(lengths) <= 10, "pages for users: one for each question"
    assert {name: count for name, count in lengths.items() if count > 200 and name != "flags.md"} == {}


def test_the_small_files_are_as_short_as_the_first_page_says():
    """And no denser than the scripts: a line is not short because two stand in it."""
    text = " ".join((ROOT / "README.md").read_text().split())
    small = r"grpo_min\.py\) \(GRPO on one device, (\d+) lines.*?ppo_min\.py\) \(PPO with a critic, (\d+) lines"
    said = re.search(small, text)
    for name, count in zip(("grpo_min.py", "ppo_min.py"), said.groups(), strict=True):
        found = shape.shape(ROOT / "variants" / name)
        assert found["lines"] == int(count) <= 330
        assert found["tokens"] < 10.5


def test_the_code_and_the_console_of_the_first_page_are_real():
    """Up to what it leaves out (...) of the lines of the script and of the recorded run."""
    _, _, console, _, code, *_ = re.split(r"^```(?:python)?\n", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[
        1:
    ]
    for text, source in ((code, "grpo.py"), (console, "docs/quickstart.log")):
        lines = [line.strip() for line in (ROOT / source).read_text().splitlines()]
        for shown in text.splitlines():
            pattern = ".*".join(map(re.escape, shown.strip().split("...")))
            assert any(re.match(pattern, line) for line in lines), shown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """To a file, and to a heading where one is named. The same of a link's own page and of pictures."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def test_pages_that_are_named_are_there():
    """In the sources, in messages and in the pages themselves."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    missing = {}
    for name in listed:
        # The changelog names earlier pages.
        if name == "CHANGELOG.md" or not name.endswith((".py", ".sh", ".md", ".patch", ".html", "Makefile")):
            continue
        for found in re.findall(r"(?<![\w/.])docs/[\w/]+\.(?:md|png|log)", (ROOT / name).read_text()):
            if not (ROOT / found).exists():
                missing.setdefault(found, []).append(name)
    assert missing == {}


def test_the_index_of_the_maintainers_pages_leads_to_each():
    links = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", (SHELF / "README.md").read_text()))
    assert {page.name for page in SHELF.glob("*.md")} - links - {"README.md"} == set()


def test_every_promise_names_one_test_that_exists():
    lines = (SHELF / "promises.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    missing = []
    for row in rows:
        ((path, name),) = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        file = ROOT / path
        if not file.exists() or f"\ndef {name}(" not in file.read_text():
            missing.append(f"{path}::{name}")
    assert 0 < len(rows) <= 60 and missing == []


def test_the_first_page_leads_to_every_user_page():
    """In one click."""
    links = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / "README.md").read_text()))
    assert {name_of(page) for page in USER[1:]} - links == set()


def commands(page: Path) -> list[str]:
    """The command lines of a page: in its blocks, and those that stand in a sentence, but for those of a commit."""
    text = EARLIER.sub("", page.read_text())
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language not in ("", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            several = r" && |; |\bdo\b" if line.startswith(("for ", "cp ")) else r" && (?=python )"
            parts = re.split(several, line)
            found += [part.strip() for part in parts]
    found += [" ".join(inline.split()) for inline in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return [line for line in found if line.startswith(STARTS) and "[flags]" not in line]


def words_of(line: str) -> list[str]:
    """The words of a command line, without its comment, its redirections and its ellipses."""
    words = shlex.split(line.split("   ")[0], comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    return [word for word in words if word not in ("...", "FLAGS")]


def takes(words: list[str]) -> bool:
    """Return True if the program takes these words: a script parses them; other programs have them in the source."""
    if words[0] == "make":
        return re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if "scripts/submit.py" in words and "--" in words:
        at = words.index("--")
        submit.parse([*words[words.index("scripts/submit.py") + 1 : at], *words[at:]])
        words = words[at + 1 :]
        if "&&" in words:  # set-up before the command
            words = words[words.index("&&") + 1 :]
    if "studies/paired_comparison.py" in words and "--" in words:
        at = words.index("--")
        flags.parse(grpo.Args, words=words[at + 1 :])
        words = words[:at]
    files = [i for i, word in enumerate(words) if re.search(r"\.(py|sh)$", word)]
    file = files[0] if files else None
    if file is not None and words[file] in (
        "scripts/launch.py",
        "studies/rehearse_gpu_run.py",
    ):  # they take a script's line
        file = next((i for i in files if words[i] in COPIES), file)
    if file is None:
        return words[1:2] == ["-m"] or words[0] == "accelerate" or (ROOT / words[0]).is_file()
    name = words[file]
    rest = [re.sub("^[A-Z]+$", "1", word) for word in words[file + 1 :]]  # what a reader fills in
    options = [word.split("=")[0].removeprefix("--") for word in rest if word.startswith("--") and word != "--"]
    if name in COPIES:
        script = ppo if name == "ppo.py" else grpo
        if "$" in " ".join(rest):  # a loop gives the values
            return {option.removeprefix("no-") for option in options} <= set(script.Args.__dataclass_fields__)
        flags.parse(script.Args, words=rest)
        return True
    source = (ROOT / name).read_text()
    return all(option.replace("-", "_") in source.replace("-", "_") for option in options)


# The page on launching has tests of its own, which render its jobs: test_launching_page.py and test_submit.py.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "launching.md"], ids=name_of)
def test_command_lines_are_taken(page):
    refused = []
    for line in commands(page):
        try:
            if not takes(words_of(line)):
                refused.append(line)
        except SystemExit as end:
            if end.code not in (0, None):  # 0: --help
                refused.append(line)
        except (OSError, ValueError) as problem:
            refused.append(f"{line}: {problem!r}")
    assert refused == []


def of_commit(*words: str) -> str | None:
    """Return the output of git, or None if it ends with an error, as where a shallow clone lacks the commit."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_an_earlier_commit_are_in_it(page):
    """Show that git has, at the commit, the program, or the target of its Makefile."""
    missing = []
    for commit, line in EARLIER.findall(page.read_text()):
        if of_commit("cat-file", "-e", f"{commit}^{{commit}}") is None:
            continue
        first, *rest = words_of(line)
        if first == "make":
            there = re.search(rf"^{rest[0]}:", of_commit("show", f"{commit}:Makefile"), re.MULTILINE)
        else:
            there = of_commit("cat-file", "-e", f"{commit}:{rest[0] if first == 'python' else first}") is not None
        if not there:
            missing.append(f"{commit}: {line}")
    assert missing == []


@pytest.mark.parametrize("page", [page for page in USER if page.name not in TABLES], ids=name_of)
def test_flags_that_are_named_exist(page):
    """Every `--flag` is one of the scripts, or of a program of this project. Tables have the names of others, too."""
    programs = [
        *(ROOT / "scripts").glob("*.*"),
        *(ROOT / "scripts" / "sweeps").glob("*"),
        *(ROOT / "studies").glob("*.py"),
        *(ROOT / "variants").glob("*"),
    ]
    sources = "\n".join(path.read_text() for path in programs)
    known = {field for script in (grpo, ppo) for field in script.Args.__dataclass_fields__} | {"help", "preset"}
    known |= set(re.findall(r"--(\w+)", sources)) | set(re.findall(r"^\+?    (\w+): ", sources, re.MULTILINE))
    named = set(re.findall(r"`--(?:no-)?([a-z_]+)(?![\w.])", page.read_text()))
    assert named - known == set()


READ = TABLES | {"presets.md"}  # names, defaults and bounds that were read in sources, not measured
COMMAND = r"(?:[A-Z_]+=\S+ )*(?:(?:\.cuda/bin/)?python|make|accelerate) "
MAKER = re.compile(rf"(?:^ *|`){COMMAND}|`(?:scripts|studies|tests)/|\]\([^)\s]*\.(?:log|py|sh)\)", re.MULTILINE)
MEASURED = re.compile(r"\b(?:(?<!not )measured|took|pass@1|on average|medians?)\b")


def without_maker(text: str) -> list[str]:
    """Headings of the sections that have measured numbers and name no command, script or log that they are from.

    Measured: a table with three cells that begin with a decimal, or a paragraph with a word of MEASURED and a number
    with a decimal or a unit. A page that one command makes says so above its first section ("Made by", "Written by").
    """
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    if re.search(r"(?:Made|Written) (?:by|at [0-9a-f]+:)\s+`", head):
        return []
    found = []
    for section in (head, *sections):
        rows = [line for line in section.splitlines() if line.startswith("|")]
        cells = [cell.strip() for row in rows for cell in row.split("|")]
        measured = sum(re.match(r"[*+−-]*\d+\.\d", cell) is not None for cell in cells) >= 3
        for paragraph in section.split("\n\n"):
            prose = " ".join(line.strip() for line in paragraph.splitlines() if not line.startswith("|"))
            number = re.search(r"\d\.\d|\d (?:%|s|seconds|minutes|GiB)\b", prose)
            measured = measured or (number is not None and MEASURED.search(prose) is not None)
        if measured and not MAKER.search(section):
            found.append(section.splitlines()[0])
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in READ], ids=name_of)
def test_measured_numbers_have_their_command(page):
    assert without_maker(page.read_text()) == []


def test_a_number_without_a_command_is_noticed():
    text = "# Page\n\n## Prose\n\nA step took 1.5 s.\n\n## Table\n\n| a | 1.0 |\n| b | 2.0 |\n| c | 3.0 |\n"
    assert without_maker(text) == ["## Prose", "## Table"]
    assert without_maker(text.replace("## Table\n", "## Table\n\nBy `python studies/memory_tables.py table`:\n")) == [
        "## Prose"
    ]
    assert without_maker(text.replace("# Page\n", "# Page\n\nMade by `python studies/presets_page.py`.\n")) == []
