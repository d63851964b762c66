"""Documents say what is there: files, headings, keys, rooms, versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import VERBS
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.private_api import TESTED
from tests.helpers.repository import FLOORS, PACKAGE, ROOT

FOLDERS = (
    "benchmarks",
    "configs",
    "launch",
    "sdp_deepspeed",
    "tests",
)  # what is shipped, besides the root's files
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
README = ROOT / "README.md"
MAX_LINES = 199
MAX_CELL = 160
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SOURCE_FILE = re.compile(r"[\w./-]+\.(?:py|sh|svg)\b|(?:configs|benchmarks)/[\w./-]+\.json\b")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """Of its headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", read(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(text: str, *, below: str) -> list[list[str]]:
    """Cells of the table whose first line is `below`, without that line and the rule."""
    lines = text[text.index(below) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(read(document)):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(document: Path) -> None:
    for name in SOURCE_FILE.findall(re.sub(r"\[[^]]*]\([^)]*\)", "", read(document))):  # links are followed above
        assert any((folder / name).exists() for folder in (document.parent, PACKAGE, ROOT)), name


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if "<!-- matrix -->" not in read(path)], ids=name_of)
def test_no_cell_is_longer_than_a_sentence(document: Path) -> None:
    cells = [cell for line in read(document).splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert max(map(len, cells), default=0) <= MAX_CELL, max(cells, key=len)


def test_the_readme_is_short() -> None:
    assert len(read(README).splitlines()) <= MAX_LINES


def test_the_readme_lists_the_keys_of_the_block() -> None:
    listed = [key for row in rows(read(README), below="| key | values |") for key in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(SubnetworkConfig.model_fields)


def test_the_readme_names_the_tested_versions() -> None:
    names = {"deepspeed": "DeepSpeed", "torch": "PyTorch", "transformers": "Transformers"}
    for host, versions in TESTED.items():
        assert f"{names[host]} {versions[-1]}" in " ".join(read(README).split())


def test_verbs_that_are_named_exist() -> None:
    named = {verb for path in DOCUMENTS for verb in re.findall(r"(?:^|`)sdp ([a-z-]+)", read(path), re.MULTILINE)}
    assert named
    assert named <= VERBS.keys()


def test_the_map_shows_all_rooms_from_the_roof_to_the_floor() -> None:
    shown = [re.findall(r"`(\w+)/`", row[0])[0] for row in rows(read(PACKAGE / "README.md"), below="| room |")]
    assert shown == [room for room in FLOORS if (PACKAGE / room / "__init__.py").is_file()]


@pytest.mark.parametrize("document", sorted(PACKAGE.glob("**/README.md")), ids=name_of)
def test_a_room_names_its_modules(document: Path) -> None:
    words = set(re.findall(r"\w+", read(document)))
    assert {path.stem for path in document.parent.glob("[a-z]*.py")} <= words


def test_nothing_refers_to_papers_that_are_not_shipped() -> None:
    names = re.compile(r"\b(DESIGN|STYLE|HOUSE|REVIEW)\.md")
    suffixes = {".py", ".sh", ".md", ".toml", ".cfg", ".yaml", ".json", ".svg"}
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in suffixes]
    files += [path for path in ROOT.glob("*") if path.suffix in suffixes]
    found = [name_of(path) for path in files if path != Path(__file__) and names.search(read(path))]
    assert not found
