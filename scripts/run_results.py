"""Results of runs, read from their folders, for scripts that compare runs."""

import json
import statistics


def read_metrics(folder):
    """The records of metrics.jsonl, one per step; none if the run has not begun."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mean_and_range(values, digits=3):
    """A table's cell: the mean, and in brackets the smallest and the largest value if there are several."""
    if not values:
        return "–"
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def write_aside(path, text):
    """Writes a file that is complete or absent."""
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.replace(path)
