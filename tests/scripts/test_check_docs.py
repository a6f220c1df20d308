"""scripts/check_docs on a made-up repository: each kind of fault is found, and right text passes."""

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
    """Checks a README of the given text; returns the faults, without the file's name."""
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
Written: `runs/a/report.html`, `build/bin/bough`, `/usr/include/x.h`, `metrics.jsonl`, `src/<room>/x`.

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
