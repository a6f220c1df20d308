"""The notebook of examples/ runs, cell by cell."""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_cell(source, names):
    """Runs a cell and returns the value of its last expression, as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def test_the_notebook_runs(bough_program, monkeypatch):
    monkeypatch.setenv("BOUGH_BUILD_DIR", str(bough_program.parents[1]))
    notebook = json.loads((ROOT / "examples" / "tree_engine.ipynb").read_text())
    names, values = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            values.append(run_cell("".join(cell["source"]), names))
    report, norm, difference = (value for value in values if value is not None)
    assert "<svg" in report._repr_html_() and "with its prefix tree" in report.headline
    assert norm > 0 and difference < 1e-5
