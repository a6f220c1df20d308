"""Results of runs, read from their folders, for scripts that compare runs."""

import hashlib
import json
import statistics
import subprocess


def read_metrics(folder):
    """The records of metrics.jsonl, one per step; none if the run has not begun."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_rollouts(file):
    """The samples that a step was trained on. file: rollouts/step_N.jsonl.zst of a run."""
    lines = subprocess.run(["zstd", "-dc", file], check=True, capture_output=True).stdout.splitlines()
    return [json.loads(line) for line in lines]  # bytes, because text may hold other line ends


def mean_and_range(values, digits=3):
    """A table's cell: the mean, and in brackets the smallest and the largest value if there are several."""
    if not values:
        return "–"
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def once_begun(folder, tell):
    """A function to call while a run works: after the run's first step it calls tell(last record), once."""
    is_told = False

    def look():
        nonlocal is_told
        records = [] if is_told else [record for record in read_metrics(folder) if record["step"] > 0]
        if records:
            is_told = True
            tell(records[-1])

    return look


def keep_settings(path, settings):
    """Writes the settings of data and warm model once. Ends the program if the file has others."""
    if not path.exists():
        write_aside(path, json.dumps(settings, indent=1))
    elif json.loads(path.read_text()) != settings:
        raise SystemExit(f"{path} has other settings of data or warm model; use the same, or another --out")


def folder_of_results(name, model):
    """NAME-HASH: the folder of the results of runs from one warm model, which is in the folder `model`."""
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    return f"{name}-{digest[:8]}"


def write_record(path, record):
    """Writes a JSON object with one line per field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    write_aside(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_aside(path, text):
    """Writes a file that is complete or absent."""
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.replace(path)
