"""Results of bench/sparse_ablation.py: reading, intervals of paired differences, tables and curves.

RESULTS/TASK-HASH/ has the runs from one warm model: warm.json and ARM-seedN.json. Only runs of one folder
and one seed are pairs."""

import dataclasses
import json
import statistics

from run_results import mean_and_range as cell

SHARE = 0.7  # of dense's gain that an equal arm reaches at least
# Student's t, two-sided 95%, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
FIGURE = ["dense", "sparse", "distill", "sparse_to_sparse", "exact_top_k", "distill_16"]
COLOURS = ["#3b6fb6", "#c8553d", "#7a9a3a", "#8a5fb0", "#c79a2b", "#3c9a94"]
CURVES = [
    ("reward", "reward/mean", "Reward of the samples"),
    ("length", "rollout/length_mean", "Response length, tokens"),
    ("acceptance", "sparse/acceptance", "Acceptance: mean of min(1, pi_dense / mu)"),
]
# Title, first and second (arm, value, policy that is scored), place in the paper. The claim is that the first
# is higher. Oversampling has equal numbers of trained samples.
CLAIMS = [
    ("distill ends above sparse", ("distill", "score", "dense"), ("sparse", "score", "dense"), "Fig. 2c, 5"),
    ("the same at 100 tokens", ("distill_100", "score", "dense"), ("sparse_100", "score", "dense"), "Fig. 5"),
    (
        "distill is nearer to dense than sparse",
        ("distill", "acceptance", None),
        ("sparse", "acceptance", None),
        "Fig. 2b",
    ),
    (
        "distill ends above sparse_to_sparse",
        ("distill", "score", "dense"),
        ("sparse_to_sparse", "score", "dense"),
        "Table 1",
    ),
    (
        "distill's sparse policy is better than sparse_to_sparse's",
        ("distill", "score", "sparse"),
        ("sparse_to_sparse", "score", "sparse"),
        "Table 2",
    ),
    (
        "distill's sparse policy is better than dense's weights, sparsely",
        ("distill", "score", "sparse"),
        ("dense", "score", "sparse"),
        "Table 2",
    ),
] + [
    (f"{samples} samples instead of 8: {title}", (f"distill_{samples}", *value), ("distill", *value), place)
    for samples in (12, 16)
    for title, value, place in (
        ("score", ("score", "dense"), "Fig. 5"),
        ("acceptance", ("acceptance", None), "Fig. 4c"),
        ("groups with a signal", ("signal", None), "Section 3.3"),
    )
]


def baseline_of(arm, arms):
    return "dense_long" if arms[arm].task == "long" else "dense"


def partners_of(arm, arms):
    """The arms that the tables compare with `arm`."""
    pairs = [{first[0], second[0]} for _, first, second, _ in CLAIMS]
    pairs += [{name, baseline_of(name, arms)} for name in arms]
    return set().union(*(pair for pair in pairs if arm in pair)) - {arm}


def summary(records, num_groups):
    """The parts of a run's metrics that a result has."""

    def values(name):
        return [record[name] for record in records if name in record]

    def mean(name):
        return round(statistics.mean(values(name)), 5) if values(name) else None

    return {
        "acceptance": mean("sparse/acceptance"),
        "kl": mean("sparse/kl_drawn"),
        "signal": round(num_groups - statistics.mean(values("rollout/zero_std_groups")), 4),
        "step_seconds": round(statistics.median(values("time/step")), 2),
        "rollout_seconds": round(statistics.median(values("time/rollout")), 2),
        "curves": {key: [float(f"{value:.4g}") for value in values(name)] for key, name, _ in CURVES},
    }


class Results:
    def __init__(self, folder, arms):
        self.arms = arms
        self.warms = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/warm.json")}
        self.runs = []
        given = None
        for path in sorted(folder.glob("*/*-seed*.json")):
            run = json.loads(path.read_text()) | {"warm": path.parent.name}
            definition = json.loads(json.dumps(dataclasses.asdict(arms[run["arm"]])))
            given = given or run["given"]
            if run["definition"] != definition or run["given"] != given:
                raise SystemExit(
                    f"{path}: the run had other settings than the arm {run['arm']} or the first run: got "
                    f"{run['definition'] | run['given']}, expected {definition | given}; "
                    "use another --results"
                )
            self.runs.append(run)

    def seconds(self):
        """Machine time of all runs and warm models."""
        records = [*self.runs, *self.warms.values()]
        return sum(sum(record["seconds"].values()) / record.get("share", 1) for record in records)

    def of(self, arm, warm=None):
        """The runs of an arm, from one warm model or from all."""
        return [run for run in self.runs if run["arm"] == arm and warm in (None, run["warm"])]

    def of_seed(self, arm, seed):
        return [run for run in self.of(arm) if run["seed"] == seed]

    def pairs(self, first, second):
        """Pairs of runs of two arms from one warm model with one seed."""
        others = {(run["warm"], run["seed"]): run for run in self.of(second)}
        found = [(run, others.get((run["warm"], run["seed"]))) for run in self.of(first)]
        return [(run, other) for run, other in found if other is not None]

    def gain(self, run):
        return run["dense"]["score"] - self.warms[run["warm"]]["dense"]["score"]

    def is_collapsed(self, run):
        return run["dense"]["score"] < self.warms[run["warm"]]["dense"]["score"] / 2


def interval(values):
    """The 95% interval of the mean; unbounded with fewer than two values."""
    if len(values) < 2:
        return float("-inf"), float("inf")
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def judge(differences, names):
    """names[0] if the interval of the differences is at least 0, names[1] if it is below 0, or undecided."""
    low, high = interval(differences)
    return names[0] if low >= 0 else names[1] if high < 0 else "undecided"


def value_of(run, value, policy):
    return run[value] if policy is None else run[policy][value]


def signed(values):
    low, high = interval(values)
    mean = statistics.mean(values)
    digits = 3 if abs(mean) >= 0.005 else 5
    text = f"{mean:+.{digits}f}"
    return text if len(values) < 2 else f"{text} ({low:+.{digits}f} to {high:+.{digits}f})"


def main_table(results):
    lines = [
        "| arm | seeds | score, dense attention | its sparse policy | right steps until error (lines) | "
        "length | acceptance | groups with a signal | s a step (rollout) | collapsed | "
        "gain - 0.7 gain of dense | against dense |",
        "|---" * 12 + "|",
    ]
    for name, warm in sorted(results.warms.items()):
        sparse = f"{warm['sparse']['score']:.3f}" if "sparse" in warm else ""
        dense = warm["dense"]
        lines.append(
            f"| warm model {name} | | {dense['score']:.3f} | {sparse} | {dense['until_error']:.3f} "
            f"({dense['lines']:.3f}) | {dense['length']:.0f} | | | | | | |"
        )
        lines += arm_rows(results, name)
    return lines


def arm_rows(results, warm):
    """The rows of the arms that started from one warm model."""
    lines = []
    for arm in results.arms:
        runs = results.of(arm, warm)
        if not runs:
            continue
        scores = [run["dense"] for run in runs]
        other = [run.get("sparse", run.get("draft")) for run in runs]
        shares = [
            results.gain(run) - SHARE * results.gain(dense)
            for run, dense in results.pairs(arm, baseline_of(arm, results.arms))
            if run["warm"] == warm
        ]
        is_baseline = arm == baseline_of(arm, results.arms)
        verdict = "" if is_baseline or not shares else judge(shares, ("equal", "worse"))
        difference = "" if is_baseline or not shares else signed(shares)
        steps = " ".join(
            (
                cell([score["until_error"] for score in scores]),
                f"({statistics.mean(score['lines'] for score in scores):.3f})",
            )
        )
        lines.append(
            f"| {arm} | {len(runs)} | {cell([score['score'] for score in scores])} | "
            f"{cell([score['score'] for score in other if score])} | {steps} | "
            f"{cell([score['length'] for score in scores], 0)} | "
            f"{cell([run['acceptance'] for run in runs if run['acceptance'] is not None], 4)} | "
            f"{cell([run['signal'] for run in runs], 1)} | {step_time(runs)} | "
            f"{sum(map(results.is_collapsed, runs))} | {difference} | {verdict} |"
        )
    return lines


def step_time(runs):
    """Seconds of a step and of its rollout, over the runs that had all threads."""
    alone = [run for run in runs if run.get("share", 1) == 1]
    if not alone:
        return "–"
    rollout = statistics.mean(run["rollout_seconds"] for run in alone)
    return f"{cell([run['step_seconds'] for run in alone], 1)} ({rollout:.1f})"


def claim_table(results):
    lines = ["| claim | in the paper | pairs | difference, 95% interval | verdict |", "|---" * 5 + "|"]
    for arm in ("distill", "distill_100", "exact_top_k", "distill_long"):
        if arm not in results.arms:
            continue
        pairs = results.pairs(arm, baseline_of(arm, results.arms))
        shares = [results.gain(run) - SHARE * results.gain(dense) for run, dense in pairs]
        verdict = judge(shares, ("reproduced", "not reproduced")) if pairs else "not tested"
        place = "Fig. 2c" if arm == "exact_top_k" else "Fig. 5, Table 1"
        difference = signed(shares) if pairs else ""
        lines.append(f"| {arm} is equal to dense | {place} | {len(pairs)} | {difference} | {verdict} |")
    for title, first, second, place in CLAIMS:
        if first[0] not in results.arms or second[0] not in results.arms:
            continue
        pairs = results.pairs(first[0], second[0])
        differences = [value_of(a, *first[1:]) - value_of(b, *second[1:]) for a, b in pairs]
        verdict = judge(differences, ("reproduced", "not reproduced")) if pairs else "not tested"
        difference = signed(differences) if pairs else ""
        lines.append(f"| {title} | {place} | {len(pairs)} | {difference} | {verdict} |")
    return lines


def tables(results):
    return "\n".join([*main_table(results), "", *claim_table(results)]) + "\n"


def curves_of(results, key):
    """Per arm: [(step, mean, smallest, largest)] over its runs from the warm model with the most runs."""
    warms = [run["warm"] for run in results.runs]
    warm = max(sorted(set(warms)), key=warms.count, default=None)
    curves = {}
    for arm in FIGURE:
        runs = [run["curves"][key] for run in results.of(arm, warm) if run["curves"][key]]
        if runs:
            steps = enumerate(zip(*runs, strict=True), start=1)
            curves[arm] = [(step, statistics.mean(v), min(v), max(v)) for step, v in steps]
    return curves


def figure(results):
    width, height, left, top, bottom = 900, 260, 70, 34, 30
    parts = []
    names = {}
    panels = [(title, curves_of(results, key)) for key, _, title in CURVES]
    panels = [(title, curves) for title, curves in panels if curves]
    for _, curves in panels:
        for arm in curves:
            names.setdefault(arm, COLOURS[len(names) % len(COLOURS)])
    for number, (title, curves) in enumerate(panels):
        points = [point for curve in curves.values() for point in curve]
        low, high = min(p[2] for p in points), max(p[3] for p in points)
        high = high if high > low else low + 1
        last = max(p[0] for p in points)
        y0 = number * height

        def x(step, last=last):
            return left + (width - left - 20) * (step - 1) / max(1, last - 1)

        def y(value, low=low, high=high, y0=y0):
            return y0 + height - bottom - (height - top - bottom) * (value - low) / (high - low)

        parts.append(f'<text x="{left}" y="{y0 + 20}" font-weight="bold">{title}</text>')
        for value in (low, (low + high) / 2, high):
            parts.append(f'<path d="M{left} {y(value):.1f}H{width - 20}" stroke="#ccc"/>')
            parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for step in sorted({1, last // 2 or 1, last}):
            anchor = "end" if step == last else "middle"
            parts.append(
                f'<text x="{x(step):.1f}" y="{y0 + height - 10}" text-anchor="{anchor}">step {step}</text>'
            )
        for arm, curve in curves.items():
            band = [(x(p[0]), y(p[3])) for p in curve] + [(x(p[0]), y(p[2])) for p in reversed(curve)]
            shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in band)
            line = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in curve)
            parts.append(f'<polygon points="{shape}" fill="{names[arm]}" opacity="0.12"/>')
            parts.append(f'<polyline points="{line}" fill="none" stroke="{names[arm]}" stroke-width="1.6"/>')
    end, at = len(panels) * height, left
    for label, colour in names.items():
        if at + 20 + 7 * len(label) > width:
            end, at = end + 20, left
        parts.append(f'<rect x="{at}" y="{end}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{at + 20}" y="{end + 10}">{label}</text>')
        at += 45 + 7 * len(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end + 24}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{end + 24}" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )
