"""scripts/check_docs on a made-up repository: each kind of fault is found, and correct text passes."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The help of a program with nested commands, as CLI11 prints it.
PROGRAM = r"""#!/bin/sh
case "$*" in
  --help) printf 'bough\nUsage: bough [OPTIONS] SUBCOMMAND\n\nOptions:\n  -h,--help  help\n  --version\n\n'
          printf 'Subcommands:\n  plan   what is shared\n  bench  measure\n' ;;
  'plan --help') printf 'Usage\n\nOptions:\n  --rollouts FILE REQUIRED  input\n  --json  one line\n' ;;
  'bench --help') printf 'Usage\n\nSubcommands:\n  step  one step\n' ;;
  'bench step --help') printf 'Usage\n\nOptions:\n  --repeat K  times\n' ;;
  *) exit 2 ;;
esac
"""


@pytest.fixture
def check(tmp_path: Path):
    """Checks a README with the given text. Returns the faults, without the file's name."""
    files = {
        "src/tree/prefix_tree.h": "struct PrefixTree {};\nclass Plan;\nvoid build_tree();\n// BOUGH_JOBS\n",
        "docs/tour.md": "# Tour\n",
        "Makefile": "all: build\nbuild:\n\techo\n",
        "build/bin/bough": PROGRAM,
        ".gitignore": "/build/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "build/bin/bough").chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run(text: str) -> list[str]:
        (tmp_path / "README.md").write_text(text)
        done = subprocess.run(
            [ROOT / "scripts" / "check_docs", "--root", tmp_path], capture_output=True, text=True, check=False
        )
        assert not done.stderr, done.stderr
        *faults, last = done.stdout.splitlines()
        assert last == f"2 documents, {len(faults)} faults" and done.returncode == (1 if faults else 0)
        return [fault.removeprefix("README.md:") for fault in faults]

    return run


RIGHT = """
See [the tour](docs/tour.md#top), [the web](https://example.org/x.h) and `src/tree/`, `src/*/prefix_tree.h`.
`PrefixTree`, `bough::Plan`, `build_tree()`, `BOUGH_JOBS=4`, `transformers.AutoModelForCausalLM`,
`my_reward.py:score`.
Written: `runs/a/report.html`, `build/bin/bough`, `/usr/include/x.h`, `metrics.jsonl`, `src/<module>/x`.

```bash
make build ARGS="--x one two"   # make nonsense, bough nonsense
$ FOO=1 bough plan --rollouts runs/a.jsonl \\
    --json | tail -1 > out.txt && bough bench step --repeat 3
bough --version
```

```yaml
model: bough nonsense
```
"""


def test_right_text_passes(check):
    assert check(RIGHT) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a\n[tour](docs/no.md)", "2: the link leads to docs/no.md, which does not exist"),
        ("`src/tree/no.h`", "1: src/tree/no.h does not exist"),
        ("`src/no_*.h`", "1: src/no_*.h does not exist"),
        ("`no_such.cpp`", "1: no file is named no_such.cpp"),
        ("`make nonsense`", "1: make has no target nonsense"),
        ("`bough nonsense --json`", "1: 'bough' has no command nonsense"),
        ("`bough bench nonsense`", "1: 'bough bench' has no command nonsense"),
        ("`bough plan --repeat 2`", "1: 'bough plan' has no option --repeat"),
        ("`bough --json`", "1: 'bough' has no option --json"),
        ("```\nx\n$ A=1 build/bin/bough plan \\\n  --no\n```", "3: 'bough plan' has no option --no"),
        ("x `SuffixTree` y", "1: no type is named SuffixTree"),
        ("`bough::Missing`", "1: no type is named Missing"),
        ("`no_such()`", "1: no function is named no_such"),
        ("`BOUGH_NO`", "1: nothing reads BOUGH_NO"),
    ],
)
def test_each_fault_is_found(check, text: str, fault: str):
    assert check(text) == [fault]


def test_without_the_program_nothing_is_passed_as_right(check, tmp_path: Path):
    (tmp_path / "build/bin/bough").unlink()
    (tmp_path / "README.md").write_text("fine\n")
    done = subprocess.run(
        [ROOT / "scripts" / "check_docs", "--root", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "make build" in done.stdout


# Sources that are checked beside the fixture's README.
CITATIONS = [
    ("src/a.cpp", "// As tour.md says.\n", []),
    ("src/a.cpp", '// (tour.md 1, "Memory"), docs/tour.md 1.2,\n// "Head"; see README.md\n', []),
    ("src/a.cpp", "int a;  // missing.md\n", ["src/a.cpp:1: missing.md does not exist"]),
    ("src/a.cpp", 'auto a = "https://x/missing.md";  // tour.md\n', []),
    ("src/a.cpp", "// one\n// tour.md 7\n", ["src/a.cpp:2: docs/tour.md has no section 7"]),
    ("src/a.cpp", '// tour.md, "Stack"\n', ['src/a.cpp:1: docs/tour.md has no section "Stack"']),
    ("tests/a.py", "# docs/none.md\n", ["tests/a.py:1: docs/none.md does not exist"]),
    (
        "tests/a.py",
        '"""One.\n\ndocs/none.md, and table.md"""\n',
        ["tests/a.py:3: docs/none.md does not exist"],
    ),
    ("scripts/a.py", "# docs/none.md\n", []),
]


@pytest.mark.parametrize("name, source, faults", CITATIONS)
def test_citations_in_comments_lead_to_documents_and_sections(check, tmp_path, name, source, faults):
    (tmp_path / "docs/tour.md").write_text("# Tour\n\n## 1. Memory (`x`)\n\n### 1.2 Head\n")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(source)
    assert check("# Text\n") == faults


def test_long_lines_outside_tables_and_code_are_faults(check):
    long = "word " * 30
    assert check(f"{long}\n\n| {long} |\n\n```text\n{long}\n```\n") == ["1: 150 columns, at most 130"]


def test_sentences_that_begin_badly_are_faults(check, tmp_path):
    (tmp_path / "src/a.cpp").write_text(
        "// One. Of these, two.\n// Null: none.\nint a = 1;  // What is left\n"
    )
    faults = check("Where it is. All of it is what it was.\n")
    assert [fault.split(": ")[0] for fault in faults] == ["1", "src/a.cpp:1", "src/a.cpp:2", "src/a.cpp:3"]
