"""scripts/check_modules on a made-up tree. Each violation of the order of modules is named with its remedy,
and nothing else is reported."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = "| module | what |\n|---|---|\n| `base` | a |\n| `plan` | b |\n| `kernels` | c |\n| `cost` | d |\n"
FILES = {
    "src/base/error.h": "#pragma once\n#include <vector>\n",
    "src/plan/plan.h": '#include "base/error.h"\n#include "plan_builder.h"\n',
    "src/kernels/op.h": '#include <ATen/core/Tensor.h>\n#include "base/error.h"\n',
    "src/cost/cost_model.cpp": '#include "plan/plan.h"\n#include "kernels/op.h"\n',
    "docs/tour.md": TOUR,
    ".clang-format": "BasedOnStyle: Google\nColumnLimit: 40\n",
}


@pytest.fixture
def check(tmp_path: Path):
    """Checks the tree after the given files are added. Returns the faults."""

    def run(changes: dict[str, str], *options: str) -> list[str]:
        for name, text in {**FILES, **changes}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        # A tree of four files is too small for the limits, so only tests of the limits check them.
        limits = [] if "--limits" in options else ["--no-limits"]
        command = [ROOT / "scripts" / "check_modules", "--root", tmp_path, *limits, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr
        *faults, last = done.stdout.splitlines()
        if "--figures" not in options:
            assert last.endswith(f" files, {len(faults)} faults") and done.returncode == (1 if faults else 0)
        return faults

    return run


def test_a_tree_in_order_passes(check):
    assert check({}) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "src/plan/costs.h",
            '\n#include "cost/cost_model.h"\n',
            "src/plan/costs.h:2: plan includes cost/cost_model.h, but cost comes after plan: move the code "
            "that plan needs to plan or above, or this file to cost or below",
        ),
        (  # a test file too, and other white space
            "src/base/a/b_test.cpp",
            '#  include  "plan/plan.h"\n',
            "src/base/a/b_test.cpp:1: base includes plan/plan.h, but plan comes after base: move the code "
            "that base needs to base or above, or this file to plan or below",
        ),
        (
            "src/plan/tensors.cpp",
            "// why\n#include <c10/util/BFloat16.h>\n",
            "src/plan/tensors.cpp:2: plan includes c10/util/BFloat16.h, and modules above kernels include no "
            "torch: move the code to kernels or below",
        ),
        (
            "src/kernels/loss_settings.h",
            '#include "kernels/op.h"\n',
            "src/kernels/loss_settings.h:1: a settings header includes torch, by kernels/op.h > "
            "ATen/core/Tensor.h: split the header",
        ),
        (
            "src/attic/old.h",
            "",
            "src/attic/old.h:1: attic is not a module: add it to MODULES of scripts/check_modules",
        ),
        (
            "src/plan/long.cpp",
            "int value;\n" * 501,
            "src/plan/long.cpp:1: 501 lines, expected at most 500: split the file, or say in LONG_FILES of "
            "scripts/check_modules which one idea it has",
        ),
        (
            "docs/tour.md",
            TOUR.replace("| `plan` | b |\n", ""),
            "docs/tour.md:4: lists kernels, expected plan: "
            "list the modules of src/ in the order of scripts/check_modules",
        ),
        (
            "docs/tour.md",
            TOUR + "| `disk` | e |\n",
            "docs/tour.md:7: lists disk, which is not a folder of src/",
        ),
    ],
)
def test_each_violation_is_named(check, name: str, text: str, fault: str):
    assert check({name: text}) == [fault]


def test_a_file_that_became_short_leaves_the_list_of_long_files(check):
    name = "src/control/controller.cpp"
    (fault,) = check(
        {name: "int value;\n", "docs/tour.md": TOUR.replace("| `kern", "| `control` | d |\n| `kern")}
    )
    assert fault == f"scripts/check_modules: {name} has 1 lines: remove it from LONG_FILES"


def lines(count: int, start: int = 0) -> str:
    return "".join(f"int value_{i} = {i};\n" for i in range(start, start + count))


def test_limits_fail_only_where_they_are_asked_for(check):
    long_files = {name: lines(90, 1000 * i) for i, name in enumerate(FILES) if name.startswith("src/")}
    assert check(long_files, "--limits") == []
    assert check({"src/base/long.h": "// " + "x" * 40 + "\n" + lines(90, 9000)}, "--no-limits") == []
    assert check(
        {**long_files, "src/base/long.h": "// " + "x" * 40 + "\n" + lines(90, 9000)}, "--limits"
    ) == [
        "src/base/long.h:1: 1 lines have more than 40 columns (.clang-format), this is the first: break them"
    ]


def test_a_copy_is_found_whatever_stands_between_its_lines_and_a_test_may_have_it(check):
    files = {name: lines(90, 1000 * i) for i, name in enumerate(FILES) if name.startswith("src/")}
    copy = (
        "// another comment\n"
        + lines(4, 1010).replace(" ", "\t")
        + "\n}\n"
        + lines(4, 1014)
        + lines(82, 5000)
    )
    assert check({**files, "src/plan/copy.cpp": copy}, "--limits") == [
        "src/plan/plan.h:11: 8 lines equal those at src/plan/copy.cpp:2: use one function for both"
    ]
    almost = copy.replace("value_1013\t=\t1013", "value_1013\t=\t0")
    assert check({**files, "src/plan/copy.cpp": almost}, "--limits") == []
    as_test = {**files, "src/plan/copy.cpp": lines(90, 7000), "src/plan/copy_test.cpp": copy}
    assert check(as_test, "--limits") == []


def test_short_files_are_counted_and_named(check):
    found = check({}, "--figures", "--limits")
    assert any(line.startswith("src: 100.0% of the files have fewer than 40 lines") for line in found)
    assert "under 40 lines                 4 (100.0%)   at most 15%" in found
