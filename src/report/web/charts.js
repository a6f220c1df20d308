// Curves: line charts on canvases, drawn when they are visible. One run: a colour a series, from the fifth on with a
// dash. Several runs: a colour a run, a dash a series.
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Round numbers (1, 2 or 5 times a power of ten) inside [low, high], which divide it into at most `most` parts.
function ticks(low, high, most) {
  const span = high - low;
  if (!(span > 0) || !isFinite(span)) return [low];
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(each => each >= rough * 0.999999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) out.push(i * step);
  return out;
}

function prepareCanvas(canvas, height) {
  const width = canvas.clientWidth || 300, scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  return { context, width };
}

// Draws canvases when they come into view, and again when what they show, the width or the colours change.
const due = new Map();  // canvas: draw function
const visible = new Set();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) { visible.delete(entry.target); continue; }
    visible.add(entry.target);
    if (entry.target.stale) redraw(entry.target);
  }
}, { rootMargin: "200px" });
function redraw(canvas) { canvas.stale = false; due.get(canvas)(); }
function onView(canvas, draw) {
  due.set(canvas, draw);
  canvas.stale = true;
  observer.observe(canvas);
}
function invalidate(canvas) {
  canvas.stale = true;
  if (visible.has(canvas)) redraw(canvas);
}
function forget(node) {
  for (const canvas of node.querySelectorAll("canvas")) { observer.unobserve(canvas); due.delete(canvas); visible.delete(canvas); }
}
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => due.forEach((draw, canvas) => invalidate(canvas)), 120);
});

// Ticks of an axis in bytes are round in the unit that bytes() writes.
function byteTicks(low, high, most) {
  const unit = 1024 ** (high < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(high) / 10)));
  return ticks(low / unit, high / unit, most).map(tick => tick * unit);
}

const HEIGHT = 196, LEFT = 56, RIGHT = 10, TOP = 10, BOTTOM = 24;

class Chart {
  // plan: title, unit, zero (the axis begins at 0), series [{metric, label, spread or low and high: metrics}].
  constructor(plan) {
    this.plan = plan;
    this.cursor = null;  // a step, or null
    this.canvas = h("canvas", { tabindex: 0, role: "img" });
    this.legend = h("span", { class: "legend" });
    this.figure = h("figure", { class: "chart" }, h("figcaption", {}, plan.title, this.legend), this.canvas);
    const at = event => {
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      return this.low + (x - LEFT) / (this.width - LEFT - RIGHT) * (this.high - this.low);
    };
    this.canvas.addEventListener("pointermove", event => this.point(at(event), event.clientX, event.clientY));
    for (const leaving of ["pointerleave", "blur"]) this.canvas.addEventListener(leaving, () => this.leave());
    this.canvas.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") this.leave();
      if (move === undefined || !this.lines || !this.lines.length) return;
      event.preventDefault();
      const steps = this.lines[0].steps;
      const here = this.cursor === null ? steps.length - 1 : Math.max(0, steps.indexOf(this.cursor));
      const box = this.canvas.getBoundingClientRect();
      this.point(steps[Math.max(0, Math.min(steps.length - 1, here + move))], box.left + box.width / 2, box.top + 40);
    });
    onView(this.canvas, () => this.draw());
  }

  // The curves that exist: [{name, steps, values, low, high, colour, dash}].
  collect() {
    const several = store.runs.length > 1, out = [];
    store.runs.forEach((one, r) => this.plan.series.forEach((series, s) => {
      const points = curve(one, series.metric);
      if (!points || !points.steps.length) return;
      const other = name => name && curve(one, name) && curve(one, name).values.length === points.values.length ?
        curve(one, name).values : null;
      const spread = other(series.spread), low = other(series.low), high = other(series.high);
      out.push({
        name: [several ? one.title : "", this.plan.series.length > 1 || !several ? series.label : ""].filter(Boolean).join(": "),
        steps: points.steps, values: points.values,
        low: spread ? points.values.map((value, i) => value - spread[i]) : low,
        high: spread ? points.values.map((value, i) => value + spread[i]) : high,
        colour: "c" + (several ? r : s) % 4, dash: several ? s % 4 : Math.floor(s / 4),
      });
    }));
    return out;
  }

  draw() {
    const lines = this.lines = this.collect();
    const { context, width } = prepareCanvas(this.canvas, HEIGHT);
    this.width = width;
    this.legend.replaceChildren(...(lines.length > 1 ? lines.map(line =>
      h("span", {}, h("i", { class: `key k${line.colour.slice(1)}${line.dash ? " dashed" : ""}` }), line.name)) : []));
    let low = Infinity, high = -Infinity, bottom = this.plan.zero ? 0 : Infinity, top = this.plan.zero ? 0 : -Infinity;
    for (const line of lines) {
      low = Math.min(low, line.steps[0]);
      high = Math.max(high, line.steps[line.steps.length - 1]);
      for (const values of [line.values, line.low, line.high])
        for (const value of values || []) if (isFinite(value)) { bottom = Math.min(bottom, value); top = Math.max(top, value); }
    }
    this.canvas.setAttribute("aria-label", this.plan.title + ": " + lines.map(line =>
      `${line.name || "value"} ${short(line.values[line.values.length - 1])} at step ${line.steps[line.steps.length - 1]}`).join(", "));
    if (!lines.length || !isFinite(bottom)) return;
    if (high === low) { low -= 0.5; high += 0.5; }
    const margin = top > bottom ? (top - bottom) * 0.05 : Math.abs(top) * 0.1 || 1;
    if (!(this.plan.zero && bottom >= 0)) bottom -= margin;
    top += margin;
    Object.assign(this, { low, high });
    const x = step => LEFT + (step - low) / (high - low) * (width - LEFT - RIGHT);
    const y = value => TOP + (top - value) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of (this.plan.unit === "bytes" ? byteTicks : ticks)(bottom, top, 5)) {
      context.strokeStyle = css("--grid");
      context.beginPath();
      context.moveTo(LEFT, Math.round(y(tick)) + 0.5);
      context.lineTo(width - RIGHT, Math.round(y(tick)) + 0.5);
      context.stroke();
      context.fillStyle = css("--soft");
      context.fillText(this.plan.unit === "bytes" ? bytes(tick) : short(tick), LEFT - 6, y(tick));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    for (const tick of ticks(low, high, Math.max(2, Math.floor(width / 90))))
      if (Number.isInteger(tick)) context.fillText(short(tick), Math.min(width - 16, x(tick)), HEIGHT - 6);
    for (const line of lines) this.drawLine(context, line, x, y);
    if (this.cursor !== null) this.drawCursor(context, x, y);
  }

  // A curve of many points is pale, with its running mean in the full colour.
  drawLine(context, line, x, y) {
    const colour = css("--" + line.colour);
    context.setLineDash(DASHES[line.dash]);
    context.strokeStyle = context.fillStyle = colour;
    if (line.low && line.high) {
      context.globalAlpha = 0.14;
      context.beginPath();
      line.steps.forEach((step, i) => context.lineTo(x(step), y(line.high[i])));
      for (let i = line.steps.length; i-- > 0;) context.lineTo(x(line.steps[i]), y(line.low[i]));
      context.fill();
    }
    const path = values => {
      context.beginPath();
      values.forEach((value, i) => { if (isFinite(value)) context.lineTo(x(line.steps[i]), y(value)); });
      context.stroke();
    };
    const window = Math.floor(line.values.length / 40);
    context.lineJoin = "round";
    if (window >= 2) {
      context.globalAlpha = 0.32;
      context.lineWidth = 1.2;
      path(line.values);
      const sums = [0];
      for (const value of line.values) sums.push(sums[sums.length - 1] + value);
      line.smooth = line.values.map((_, i) => {
        const begin = Math.max(0, i - window), end = Math.min(line.values.length, i + window + 1);
        return (sums[end] - sums[begin]) / (end - begin);
      });
    }
    context.globalAlpha = 1;
    context.lineWidth = 2;
    path(window >= 2 ? line.smooth : line.values);
    context.setLineDash([]);
    if (line.values.length === 1) {
      context.beginPath();
      context.arc(x(line.steps[0]), y(line.values[0]), 3, 0, 7);
      context.fill();
    }
  }

  drawCursor(context, x, y) {
    context.strokeStyle = css("--faint");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(this.cursor), TOP);
    context.lineTo(x(this.cursor), HEIGHT - BOTTOM);
    context.stroke();
    for (const line of this.lines) {
      const i = line.steps.indexOf(this.cursor);
      if (i < 0 || !isFinite(line.values[i])) continue;
      context.fillStyle = css("--" + line.colour);
      context.beginPath();
      context.arc(x(this.cursor), y(line.values[i]), 4, 0, 7);
      context.fill();
    }
  }

  point(step, clientX, clientY) {
    let nearest = null;
    for (const line of this.lines || [])
      for (const each of line.steps) if (nearest === null || Math.abs(each - step) < Math.abs(nearest - step)) nearest = each;
    if (nearest === null) return;
    this.cursor = nearest;
    redraw(this.canvas);
    let text = "step " + grouped(nearest);
    for (const line of this.lines) {
      const i = line.steps.indexOf(nearest);
      if (i < 0) continue;
      text += "\n" + (line.name ? line.name + "  " : "") + valueIn(line.values[i], this.plan.unit);
      if (line.low && line.high) text += `  (${short(line.low[i])} to ${short(line.high[i])})`;
    }
    showTip(clientX, clientY, text);
  }

  leave() {
    hideTip();
    if (this.cursor === null) return;
    this.cursor = null;
    redraw(this.canvas);
  }
}

// ---- The charts of the panel. [title, unit, from zero, [metric, label, spread or [low, high]], ...]. A pattern
// in place of a metric stands for all metrics that match, in the order of their numbers, at most eight.
const CHARTS = [
  ["Reward: mean and standard deviation", "", 0, ["reward/mean", "reward", "reward/std"]],
  ["Accuracy on held-out problems, 95% interval", "", 0, ["eval/avg_at_k", "avg@k", ["eval/avg_at_k_low", "eval/avg_at_k_high"]],
    ["eval/pass_at_k", "pass@k"], ["eval_sparse/avg_at_k", "avg@k, sparse attention"]],
  ["Response length, mean", "tokens", 1, ["rollout/length_mean", "training"], ["eval/length_mean", "evaluation"]],
  ["Truncated responses", "", 1, ["rollout/truncated_fraction", "training"], ["eval/truncated_fraction", "evaluation"]],
  ["Entropy", "", 1, ["loss/entropy", "entropy"], ["policy/entropy", "policy"]],
  ["KL", "", 0, ["loss/kl", "to the reference"], ["policy/approx_kl", "pi_old to pi"], ["mismatch/kl_k3", "engine to trainer"],
    ["staleness/kl", "older weights"]],
  ["Clipped rows", "", 1, ["policy/clip_fraction", "clipped"], ["mismatch/masked_fraction", "masked for mismatch"]],
  ["Mismatch of engine and trainer: mean |log-probability difference|", "", 1, ["mismatch/logprob_abs_diff", "difference"]],
  ["Effective sample size by age of the weights", "", 1, [/^age_(\w+)\/effective_sample_size$/, "age "]],
  ["Gradient norm", "", 1, ["optim/grad_norm", "policy"], ["critic/grad_norm", "critic"]],
  ["Critic: means of values and returns", "", 0, ["critic/value_mean", "values"], ["critic/return_mean", "returns"]],
  ["Groups without a signal, refused or dropped", "", 1, ["rollout/zero_std_groups", "equal rewards"],
    ["rollout/groups_refused", "refused"], ["rollout/groups_dropped", "dropped"], ["age/dropped_groups", "too old"]],
  ["Staleness: versions behind", "", 1, ["staleness/mean", "mean"], ["staleness/max", "largest"]],
  ["Tokens by age of the weights", "tokens", 1, [/^age_(\w+)\/tokens$/, "age "]],
  ["Idle time per step", "s", 1, ["idle/trainer_seconds", "trainer waits for samples"], ["idle/engine_seconds", "engine waits for weights"]],
  ["Time per step", "s", 1, ["time/step", "step"], ["time/rollout", "rollout"], ["time/train", "train"]],
  ["Parts of training", "s", 1, ["time/recompute", "recompute"], ["time/update", "update"], ["time/sparse_train", "sparse policy's step"]],
  ["Tokens per second", "tokens/s", 1, ["perf/generated_tokens_per_s", "generated"], ["perf/effective_tokens_per_s", "trained"]],
  ["Compression by the prefix tree", "x", 0, ["tree/compression", "tokens"], ["tree/attention_compression", "attention"]],
  ["Memory", "bytes", 1, ["memory/peak", "peak of everything so far"], ["memory/predicted", "plan of a step, without weights and gradients"]],
  ["Time of the gradient: predicted / measured", "", 1, ["tree/predicted_over_measured", "ratio"]],
  ["Acceptance by position: sum of min(p, q)", "", 0, ["sparse/overlap_to_255", "to 255"], ["sparse/overlap_to_1023", "to 1,023"],
    ["sparse/overlap_to_4095", "to 4,095"], ["sparse/overlap_beyond", "beyond"]],
  ["Acceptance by position: 5th percentile over tokens", "", 0, ["sparse/overlap_p5_to_255", "to 255"],
    ["sparse/overlap_p5_to_1023", "to 1,023"], ["sparse/overlap_p5_to_4095", "to 4,095"], ["sparse/overlap_p5_beyond", "beyond"]],
  ["Acceptance by position, estimated from the sampled tokens", "", 0, ["sparse/acceptance_to_255", "to 255"],
    ["sparse/acceptance_to_1023", "to 1,023"], ["sparse/acceptance_to_4095", "to 4,095"], ["sparse/acceptance_beyond", "beyond"]],
  ["Importance ratio by position, mean", "", 0, ["sparse/ratio_to_255", "to 255"], ["sparse/ratio_to_1023", "to 1,023"],
    ["sparse/ratio_to_4095", "to 4,095"], ["sparse/ratio_beyond", "beyond"]],
  ["Importance ratio, 5th percentile by position", "", 0, ["sparse/ratio_p5_to_255", "to 255"],
    ["sparse/ratio_p5_to_1023", "to 1,023"], ["sparse/ratio_p5_to_4095", "to 4,095"], ["sparse/ratio_p5_beyond", "beyond"]],
  ["Importance ratio, 95th percentile by position", "", 0, ["sparse/ratio_p95_to_255", "to 255"],
    ["sparse/ratio_p95_to_1023", "to 1,023"], ["sparse/ratio_p95_to_4095", "to 4,095"], ["sparse/ratio_p95_beyond", "beyond"]],
  ["KL from the behavior policy to the dense policy", "", 1, ["sparse/kl_drawn", "current weights"], ["staleness/kl", "older weights"],
    ["sparse/kl", "sparse policy before its step"]],
  ["Reward of the samples kept from the first N", "", 0, [/^oversampling\/reward_(\d+)$/, "N = "]],
  ["Acceptance of the samples kept from the first N", "", 0, [/^oversampling\/acceptance_(\d+)$/, "N = "]],
];

function metricNames() {
  const names = new Set();
  for (const one of store.runs) for (const name in one.curves) names.add(name);
  return [...names].sort();
}

function chartPlans(names) {
  const known = new Set(names), plans = [];
  for (const [title, unit, zero, ...entries] of CHARTS) {
    const series = [];
    for (const [metric, label, band] of entries) {
      if (metric instanceof RegExp) {
        const matches = names.map(name => metric.exec(name)).filter(Boolean).sort((a, b) => parseInt(a[1]) - parseInt(b[1])).slice(0, 8);
        for (const match of matches) series.push({ metric: match[0], label: label + match[1].replace(/_/g, " ") });
      } else if (known.has(metric)) {
        series.push(Array.isArray(band) ? { metric, label, low: band[0], high: band[1] } : { metric, label, spread: band });
      }
    }
    // A curve that never leaves 0, such as the staleness of a synchronous run, takes space and says nothing, unless it is
    // the reward. Nor does an effective sample size that never leaves 1.
    const isRest = (metric, value) => value === 0 || (value === 1 && metric.endsWith("effective_sample_size"));
    const says = series.some(each => each.metric === "reward/mean" || store.runs.some(one =>
      (curve(one, each.metric) || { values: [] }).values.some(value => !isRest(each.metric, value))));
    if (says) plans.push({ title, unit, zero: Boolean(zero), series });
  }
  return plans;
}

panels.push({
  id: "curves", title: "Curves", kinds: ["metrics"], charts: new Map(), opened: new Map(),
  build(section) {
    this.grid = h("div", { class: "charts" });
    this.search = h("input", { type: "search", id: "search", placeholder: "search all metrics ( / )", "aria-label": "Search all metrics",
      oninput: () => this.list() });
    this.note = h("span", {});
    this.names = h("div", { class: "names" });
    this.more = h("div", { class: "charts" });
    this.all = h("details", {}, h("summary", {}, "All metrics"), h("div", { class: "bar-of-controls" }, this.search, this.note), this.names, this.more);
    section.append(this.grid, this.all);
  },
  update() {
    const names = metricNames();
    for (const plan of chartPlans(names)) {
      const key = plan.title, shown = plan.series.map(series => series.metric).join();
      let chart = this.charts.get(key);
      if (!chart) {
        chart = new Chart(plan);
        this.charts.set(key, chart);
        const order = CHARTS.map(entry => entry[0]);
        const next = [...this.grid.children].find(node => order.indexOf(node.plan) > order.indexOf(key));
        chart.figure.plan = key;
        this.grid.insertBefore(chart.figure, next || null);
      } else if (chart.plan.series.map(series => series.metric).join() !== shown) {
        chart.plan = plan;
      }
    }
    for (const chart of [...this.charts.values(), ...this.opened.values()]) invalidate(chart.canvas);
    this.list();
  },
  list() {
    const names = metricNames(), words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter(name => words.every(word => name.toLowerCase().includes(word)));
    this.note.textContent = `${found.length} of ${count(names.length, "metric")}; choose one to draw it`;
    const focused = document.activeElement && document.activeElement.dataset.metric;
    this.names.replaceChildren(...found.map(name => h("button", { type: "button", "data-metric": name,
      "aria-pressed": String(this.opened.has(name)), onclick: () => this.toggle(name) },
    h("span", {}, name), h("i", {}, short(lastValue(run(), name), 4)))));
    if (focused) for (const button of this.names.children) if (button.dataset.metric === focused) button.focus({ preventScroll: true });
  },
  toggle(name) {
    const chart = this.opened.get(name);
    if (chart) {
      forget(chart.figure);
      chart.figure.remove();
      this.opened.delete(name);
    } else {
      const made = new Chart({ title: name, unit: "", zero: false, series: [{ metric: name, label: "" }] });
      this.opened.set(name, made);
      this.more.append(made.figure);
    }
    this.list();
  },
});
