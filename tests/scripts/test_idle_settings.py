"""The table of docs/settings_without_effect.md is that of src/run/idle_settings.cpp."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows_of_source():
    text = (ROOT / "src/run/idle_settings.cpp").read_text()
    table = text[text.index("table() {") : text.index("bool covers(")]
    row = re.compile(r'\{\{((?:"[^"]+",?\s*)+)\},\s*((?:"[^"]*"\s*)+),')
    for keys, needs in row.findall(table):
        yield re.findall(r'"([^"]+)"', keys), "".join(re.findall(r'"([^"]*)"', needs))


def rows_of_document():
    for line in (ROOT / "docs/settings_without_effect.md").read_text().splitlines():
        cells = line.split("|")
        if len(cells) == 4 and "`" in cells[1]:
            yield re.findall("`([^`]+)`", cells[1]), cells[2].strip()


def test_the_document_has_the_table_of_the_source():
    source = list(rows_of_source())
    assert len(source) > 60
    assert list(rows_of_document()) == source
