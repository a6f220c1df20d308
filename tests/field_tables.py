"""Tables in docs/ that say for every field of a package's class how Bough reads it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_table(page: Path, header: list[str]) -> list[dict[str, str]]:
    """The rows of the page's table with this header, as dictionaries."""
    rows: list[dict[str, str]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells == header:
            inside = True
        elif inside and not cells:
            return rows
        elif inside and not set(line) <= set("|-"):
            assert len(cells) == len(header), line
            rows.append(dict(zip(header, cells, strict=True)))
    raise AssertionError(f"{page}: no table with the columns {header}")


def assert_tests_exist(text: str) -> None:
    """Every `file::test` in the text exists; there is at least one."""
    named = re.findall(r"`([\w.]+)::(\w+)`", text)
    assert named, f"names no test: {text}"
    for file, test in named:
        paths = [*ROOT.glob(f"tests/*/{file}"), *ROOT.glob(f"src/*/{file}")]
        assert paths, f"no file {file}"
        form = rf"def {test}\(" if file.endswith(".py") else rf"TEST(_F|_P)?\(\w+, {test}\)"
        assert any(re.search(form, path.read_text(encoding="utf-8")) for path in paths), (file, test)
