"""Results of bench/tau2_training.py: scores of conversations, intervals, tables."""

import json
import random
import statistics

DRAWS = 10_000
SETS = {"test": "test split", "held_out": "held-out tasks"}
TITLES = {
    "ticket": "best script that reads only the ticket",
    "expert": "expert",
    "expert with mistakes": "expert with the mistakes of the demonstrations",
}


def score_conversations(ids, records):
    """Scores of a rollout file. success: one number per task, in the order of `ids`. calls: mean over
    conversations. malformed, unfinished: shares of the conversations."""
    won, count = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
    turns, reasons = [], []
    for record in records:
        conversation = record.get("conversation")
        if conversation is None:  # an earlier row of the conversation
            continue
        if not record.get("valid", True):
            raise SystemExit(f"a conversation of {record['group']} failed: {conversation['reason']}")
        won[record["group"]] += record["reward"] > 0
        count[record["group"]] += 1
        turns.append(conversation["turns"])
        reasons.append((conversation["reason"], conversation["invalid_calls"]))
    if len(set(count.values())) != 1 or 0 in count.values():
        raise SystemExit(f"conversations per task: expected equal numbers, got {sorted(set(count.values()))}")
    return {
        "success": [round(won[name] / count[name], 4) for name in ids],
        "calls": round(statistics.mean(turns), 2),
        "malformed": round(sum(invalid > 0 for _, invalid in reasons) / len(reasons), 4),
        "unfinished": round(sum(r != "done" and invalid == 0 for r, invalid in reasons) / len(reasons), 4),
    }


def mean_success(score):
    return statistics.mean(score["success"])


def values_of(records, name):
    return [record[name] for record in records if name in record]


def costs(records):
    """Time and memory of steps; seconds are medians."""
    return {
        "step_seconds": round(statistics.median(values_of(records, "time/step")), 2),
        "train_seconds": round(statistics.median(values_of(records, "time/train")), 2),
        "memory_mib": round(max(values_of(records, "memory/peak"), default=0) / 2**20),
    }


def summary(records):
    """The parts of a run's metrics that a result has."""

    def values(name):
        return values_of(records, name)

    def mean(name, digits=4):
        return round(statistics.mean(values(name)), digits) if values(name) else None

    curves = ("reward/mean", "conversation/calls_mean", "rollout/zero_std_groups", "staleness/mean")
    return costs(records) | {
        "staleness": [mean("staleness/mean"), max(values("staleness/max"), default=None)],
        "idle_seconds": [mean("idle/trainer_seconds", 2), mean("idle/engine_seconds", 2)],
        "compression": mean("tree/compression", 2),
        "curves": {name: [float(f"{value:.4g}") for value in values(name)] for name in curves},
    }


def pass_summary(records):
    """Costs of a few steps, and their rewards."""
    return costs(records) | {"rewards": [round(value, 4) for value in values_of(records, "reward/mean")]}


def seconds_of(record):
    return sum(record["seconds"].values())


def read_all(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


def used_seconds(folder):
    """Machine time of all results."""
    return sum(map(seconds_of, read_all(folder)))


def interval(differences, seed=1):
    """The 95% interval of the mean, by a bootstrap over tasks."""
    draw = random.Random(seed)
    count = len(differences)
    means = sorted(sum(draw.choices(differences, k=count)) / count for _ in range(DRAWS))
    return means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))]


def judge(differences, names):
    """The mean with its interval, and names[0] if it is above 0, names[1] if below, or undecided."""
    low, high = interval(differences)
    verdict = names[0] if low > 0 else names[1] if high < 0 else "undecided"
    return f"{statistics.mean(differences):+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"


def mean_over(scores):
    """The success of each task, mean over seeds."""
    return [statistics.mean(values) for values in zip(*(score["success"] for score in scores), strict=True)]


def differences(scores, baseline):
    return [a - b for a, b in zip(scores, baseline, strict=True)]


def row(name, scores, warm, script, seeds=""):
    """A row of the table of one set. scores: of one or several seeds; warm: the model before, or None."""
    success = mean_over(scores)
    spread = sorted(map(mean_success, scores))
    shown = f"{statistics.mean(success):.3f}"
    if len(scores) > 1:
        shown += f" ({spread[0]:.3f} to {spread[-1]:.3f})"
    gain = judge(differences(success, warm["success"]), ("improved", "worse")) if warm else ""
    above = judge(differences(success, script["success"]), ("above", "below")) if script else ""
    calls = statistics.mean(score["calls"] for score in scores)
    malformed = statistics.mean(score.get("malformed", 0) for score in scores)
    return f"| {name} | {seeds} | {shown} | {calls:.1f} | {malformed:.1%} | {gain} | {above} |"


def score_table(name, scripts, warm, runs):
    script = scripts["scores"]["ticket"][name] if scripts else None
    lines = [
        f"| {SETS[name]} | seeds | success | calls | malformed | after - before | success above the script |",
        "|---" * 7 + "|",
    ]
    if scripts:
        for agent, scores in scripts["scores"].items():
            lines.append(row(TITLES[agent], [scores[name]], None, None if agent == "ticket" else script))
    lines.append(row("warm model", [warm["scores"][name]], None, script))
    if runs:
        scores = [run["scores"][name] for run in runs]
        lines.append(row("after GRPO", scores, warm["scores"][name], script, len(runs)))
    return [*lines, ""]


def run_table(runs):
    lines = [
        "| seed | first and last 10 steps: reward | calls | groups without a signal | "
        "staleness, mean (max) | s a step | s training | trainer idle, s | engine idle, s | C | memory |",
        "|---" * 11 + "|",
    ]
    for run in runs:
        ends = {name: (values[:10], values[-10:]) for name, values in run["curves"].items()}

        def both(name, digits, ends=ends):
            return " → ".join(f"{statistics.mean(part):.{digits}f}" for part in ends[name] if part) or "–"

        idle = ["–" if value is None else f"{value:.1f}" for value in run["idle_seconds"]]
        lines.append(
            f"| {run['seed']} | {both('reward/mean', 3)} | {both('conversation/calls_mean', 1)} | "
            f"{both('rollout/zero_std_groups', 1)} | {run['staleness'][0]} ({run['staleness'][1]}) | "
            f"{run['step_seconds']} | {run['train_seconds']} | {idle[0]} | {idle[1]} | "
            f"{run['compression']} | {run['memory_mib']} MiB |"
        )
    return [*lines, ""]


def pass_table(passes):
    lines = ["| passes | s a step | s training | memory |", "|---" * 4 + "|"]
    for mode, title in (("dense", "dense"), ("auto", "trees")):
        found = passes[mode]
        lines.append(
            f"| {title} | {found['step_seconds']} | {found['train_seconds']} | {found['memory_mib']} MiB |"
        )
    return [*lines, ""]


def tables(folder):
    """The tables of all results, by warm model."""
    scripts = folder / "scripts.json"
    scripts = json.loads(scripts.read_text()) if scripts.exists() else None
    lines = []
    for path in sorted(folder.glob("warm-*/warm.json")):
        warm = json.loads(path.read_text())
        runs = [json.loads(found.read_text()) for found in sorted(path.parent.glob("seed*.json"))]
        lines += [f"{path.parent.name}: {warm['parameters']:,} parameters", ""]
        for name in SETS:
            lines += score_table(name, scripts, warm, runs)
        if runs:
            lines += run_table(runs)
        passes = path.parent / "passes.json"
        if passes.exists():
            lines += pass_table(json.loads(passes.read_text()))
    return "\n".join(lines)
