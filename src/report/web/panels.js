// The other panels: now, timeline, tree, settings, failures.
const LANES = ["engine", "trainer", "rewards", "writer"];
const WAITS = { engine: "waits for new weights (staleness limiter)", trainer: "waits for samples", rewards: "waits for samples", writer: "has nothing to write" };

function tile(what, value, note, extra) {
  return h("div", { class: extra && extra.wide ? "tile wide" : "tile" }, h("span", {}, what), h("b", { class: extra && extra.mood }, value),
    note ? h("small", {}, note) : null, extra && extra.node);
}

// The tokens of the last batch by how many versions old the weights were that generated them; null if all are new.
function ageTile(one) {
  const ages = Object.entries(one.curves).map(([name, points]) => [/^age_(\w+)\/tokens$/.exec(name), points]).filter(([found]) => found);
  const last = Math.max(...ages.map(([, points]) => points.steps[points.steps.length - 1]));
  const now = ages.filter(([, points]) => points.steps[points.steps.length - 1] === last)
    .map(([found, points]) => [found[1].replace("_up", "+").replaceAll("_", " "), points.values[points.values.length - 1]])
    .sort(([a], [b]) => parseInt(a, 10) - parseInt(b, 10));
  if (!now.some(([age, tokens]) => age !== "0" && tokens > 0)) return null;
  const most = Math.max(...now.map(([, tokens]) => tokens));
  return tile("Staleness of the last batch", "", "tokens, by how many versions old their weights were", { wide: true,
    node: h("div", { class: "ages" }, now.map(([age, tokens]) => h("div", {}, h("span", {}, age),
      h("i", { style: { width: `${Math.round(70 * tokens / most)}%` } }), grouped(tokens)))) });
}

// The state of the run: live, finished, failed or gone, by progress.json.
function stateOf(one) {
  const progress = one.progress;
  if (!progress) return { text: "not recorded", note: "this run wrote no progress.json" };
  if (progress.state !== "running") {
    const mood = progress.state === "failed" ? "bad" : undefined;
    return { text: progress.state, note: progress.error || "", mood };
  }
  if (progress.is_alive === false)
    return { text: "gone", note: "the process ended without saying why: killed, or the machine went down", mood: "bad" };
  return { text: "running", note: store.live ? "" : "when this report was written", live: true };
}

function timeLeft(one, step, total) {
  const times = curve(one, "time/step");
  if (!times || !total || step >= total) return undefined;
  return (total - step) * mean(times.values.slice(-20));
}

panels.push({
  id: "now", title: "Now", kinds: ["metrics", "progress", "run"],
  build(section) {
    this.tiles = h("div", { class: "tiles" });
    section.append(this.tiles, this.buildControls());
    setInterval(() => { if (store.live && run() && run().progress) this.update(); }, 1000);
  },
  // Buttons for the run's user. `stop` is pressed twice.
  buildControls() {
    const button = (label, command) => h("button", { type: "button", onclick: event => this.command(event.target, command()) }, label);
    this.pause = button("pause", () => this.isPaused() ? "resume" : "pause");
    this.stop = button("stop", () => "stop");
    this.answer = h("span", { role: "status" });
    this.controls = h("div", { class: "bar-of-controls run-controls", role: "group", "aria-label": "Commands to the run", hidden: true },
      this.pause, button("checkpoint", () => "checkpoint"), button("evaluate", () => "evaluate"), this.stop, this.answer);
    return this.controls;
  },
  isPaused() { return /^paus/.test((run().progress || {}).activity || ""); },
  async command(button, command) {
    if (command === "stop" && !button.armed) {
      button.armed = true;
      button.textContent = "stop: press again";
      setTimeout(() => { button.armed = false; button.textContent = "stop"; }, 5000);
      return;
    }
    button.disabled = true;
    this.answer.textContent = command + ": waiting for the run";
    try { this.answer.textContent = await control(command); } catch (error) { this.answer.textContent = error.message; }
    button.disabled = false;
    this.update();
  },
  update() {
    const one = run();
    if (!one) return;
    const list = [], state = stateOf(one), progress = one.progress || {};
    this.controls.hidden = !(store.live && state.live && TOKEN);
    if (!this.pause.disabled) this.pause.textContent = this.isPaused() ? "resume" : "pause";
    const steps = Math.max(0, ...Object.values(one.curves).map(points => points.steps[points.steps.length - 1] || 0));
    const total = progress.total_steps || 0, left = timeLeft(one, steps, total);
    if (state.live && progress.activity)
      list.push(tile("Doing", progress.activity, progress.since ? "for " + duration(Math.max(0, Date.now() / 1000 - progress.since)) : "", { wide: true }));
    const queue = progress.queue;
    if (state.live && queue) {
      const dropped = Object.entries(queue.dropped || {}).map(([reason, n]) => `${grouped(n)} ${reason}`).join(", ");
      list.push(tile("Groups", `${queue.running} in generation, ${queue.awaiting} waiting for rewards, ${queue.buffered} scored`,
        `now; ${grouped(queue.trained)} trained${dropped ? "; dropped: " + dropped : ""}`, { wide: true }));
    }
    if (state.live && progress.threads) {
      const lines = LANES.filter(lane => progress.threads[lane]).map(lane => {
        const { doing, since } = progress.threads[lane];
        return h("div", {}, h("span", { class: "lane" }, lane, " "), (doing || (this.isPaused() ? "waits" : WAITS[lane])) + ", " + duration(Math.max(0, Date.now() / 1000 - since)));
      });
      list.push(h("div", { class: "tile wide lanes" }, h("span", {}, "Threads"), lines));
    }
    list.push(tile("Run", state.text, state.note, { mood: state.mood }));
    list.push(tile("Step", grouped(steps) + (total ? " of " + grouped(total) : ""), "",
      { node: total ? h("progress", { max: total, value: steps, "aria-label": "Steps" }) : null }));
    if (state.live && left !== undefined) list.push(tile("Time left", duration(left), "by the last 20 steps"));
    const reward = curve(one, "reward/mean");
    if (reward) {
      // Single batches are too noisy to compare: means of a tenth of the steps.
      const window = Math.max(1, Math.floor(reward.values.length / 10));
      list.push(tile("Reward", short(mean(reward.values.slice(-window))), reward.values.length > 1
        ? `from ${short(mean(reward.values.slice(0, window)))}, means of ${count(window, "step")}` : ""));
    }
    const accuracy = curve(one, "eval/avg_at_k");
    if (accuracy) list.push(tile("Accuracy (avg@k)", short(lastValue(one, "eval/avg_at_k")),
      accuracy.values.length > 1 ? "from " + short(accuracy.values[0]) + " at step " + accuracy.steps[0] : ""));
    const compression = curve(one, "tree/compression");
    if (compression) list.push(tile("Compression", short(mean(compression.values)) + "x", "tokens of the batch / tokens of its tree"));
    const length = curve(one, "rollout/length_mean");
    if (length) list.push(tile("Length", short(lastValue(one, "rollout/length_mean")), "tokens, from " + short(length.values[0])));
    const time = curve(one, "time/step");
    if (time) list.push(tile("Time per step", duration(mean(time.values.slice(-20))), "mean of the last 20"));
    const rate = lastValue(one, "perf/generated_tokens_per_s");
    if (rate !== undefined) list.push(tile("Generated", grouped(rate.toPrecision(3)), "tokens/s"));
    const peak = lastValue(one, "memory/peak"), planned = lastValue(one, "memory/predicted");
    if (peak) list.push(tile("Memory, peak", bytes(peak), planned ? `a step is planned with ${bytes(planned)} beside weights and gradients` : ""));
    const ages = ageTile(one);
    if (ages) list.push(ages);
    this.tiles.replaceChildren(...list);
  },
});

// ---- Timeline: what each thread did, and what it waited for.
panels.push({
  id: "timeline", title: "Timeline", kinds: ["timeline"],
  build(section) {
    this.canvas = h("canvas", { role: "img", "aria-label": "What each thread did over time" });
    this.legend = h("span", { class: "legend" });
    this.caption = h("small", {});
    this.rows = h("tbody", {});
    section.append(h("figure", {}, h("figcaption", {}, "What each thread did", this.caption, this.legend), this.canvas,
      h("details", {}, h("summary", {}, "Shares of the whole run"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "thread"),
        h("th", {}, "activity"), h("th", { class: "number" }, "time"), h("th", { class: "number" }, "share"))), this.rows)))));
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    onView(this.canvas, () => this.draw());
  },
  // A colour an activity, the longest first; all others have the fourth.
  colours() {
    const seconds = new Map();
    for (const lane of Object.values(run().busy)) for (const [what, time] of Object.entries(lane)) seconds.set(what, (seconds.get(what) || 0) + time);
    return new Map([...seconds].sort((a, b) => b[1] - a[1]).map(([what], i) => [what, Math.min(3, i)]));
  },
  update() {
    const one = run();
    this.section.hidden = !one || !one.spans.length;
    if (this.section.hidden) return;
    const colours = this.colours(), names = [[], [], [], []], rows = [];
    for (const [what, colour] of colours) names[colour].push(what);
    this.legend.replaceChildren(...names.map((list, i) => list.length ? h("span", {}, h("i", { class: "key k" + i }), list.join(", ")) : null).filter(Boolean), "empty: idle");
    for (const lane of LANES) {
      const busy = Object.entries(one.busy[lane] || {}).sort((a, b) => b[1] - a[1]);
      const row = (what, key, time) => rows.push(h("tr", {}, h("td", {}, lane), h("td", {}, key === null ? null : h("i", { class: "box k" + key }), what),
        h("td", { class: "number" }, duration(time)), h("td", { class: "number" }, (100 * time / Math.max(1e-9, one.end)).toFixed(1) + "%")));
      for (const [what, time] of busy) row(what, colours.get(what), time);
      const idle = one.end - busy.reduce((sum, each) => sum + each[1], 0);
      if (WAITS[lane] && lane !== "writer" && busy.length && idle > 0) row("idle: " + WAITS[lane], null, idle);
    }
    this.rows.replaceChildren(...rows);
    invalidate(this.canvas);
  },
  draw() {
    const one = run();
    if (!one || !one.spans.length) return;
    const lane = 26, left = 62, { context, width } = prepareCanvas(this.canvas, LANES.length * lane + 26);
    const spans = [...one.spans].sort((a, b) => a[3] - b[3]), colours = this.colours();
    const end = spans[spans.length - 1][3];
    // If spans were left out, the picture begins where the earliest lane is complete, so that gaps are idle time.
    const begin = Math.min(...spans.map(span => span[2]));
    const x = time => left + (time - begin) / Math.max(1e-9, end - begin) * (width - left - 4);
    this.caption.textContent = `the last ${duration(end - begin)} of ${duration(one.end)}`;
    LANES.forEach((name, i) => {
      context.fillStyle = css("--grid");
      context.fillRect(left, i * lane + 3, width - left - 4, lane - 8);
      context.fillStyle = css("--soft");
      context.textAlign = "left";
      context.fillText(name, 0, i * lane + 18);
    });
    this.boxes = [];
    for (const [name, what, from, to] of spans) {
      const i = LANES.indexOf(name);
      if (i < 0) continue;
      const box = [x(from), i * lane + 3, Math.max(0.4, x(to) - x(from)), lane - 8];
      context.fillStyle = css("--c" + (colours.get(what) ?? 3));
      context.fillRect(...box);
      this.boxes.push([box, `${name}: ${what}, ${duration(to - from)}`]);
    }
    context.fillStyle = css("--soft");
    context.textAlign = "center";
    for (const tick of ticks(begin, end, Math.max(2, Math.floor(width / 110))))
      context.fillText(duration(tick), Math.max(left + 10, Math.min(width - 24, x(tick))), LANES.length * lane + 18);
  },
  point(event) {
    const place = this.canvas.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top;
    const hit = (this.boxes || []).find(([box]) => x >= box[0] - 1 && x <= box[0] + box[2] + 1 && y >= box[1] && y <= box[1] + box[3]);
    if (hit) showTip(event.clientX, event.clientY, hit[1]);
    else hideTip();
  },
});

// ---- The prefix tree as an icicle: width is sequences, height is depth in tokens.
const trees = new Map();  // "RUN/STEP": tree, as far as loaded
function treeFigure(tree, title) {
  const height = 320, left = 48, canvas = h("canvas", { tabindex: 0, role: "img" });
  const nodes = tree.nodes.map(([parent, begin, end, sequences, trained]) => ({ parent, begin, end, sequences, trained, next: 0, first: 0, children: [] }));
  let sequences = 0, depth = 1;
  nodes.forEach((node, i) => {
    const parent = nodes[node.parent];
    node.first = parent ? parent.first + parent.next : sequences;
    if (parent) { parent.next += node.sequences; parent.children.push(i); } else sequences += node.sequences;
    depth = Math.max(depth, node.end);
  });
  let from = 0, wide = sequences, chosen = -1, width = 0;
  const whole = h("button", { type: "button", hidden: true, onclick: () => zoom(-1) }, "show the whole tree");
  const x = at => left + (at - from) / wide * (width - left), y = at => 4 + at / depth * (height - 8);
  function draw() {
    const prepared = prepareCanvas(canvas, height), context = prepared.context;
    width = prepared.width;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of ticks(0, depth, 6)) {
      context.fillStyle = css("--soft");
      context.fillText(short(tick), left - 6, Math.max(8, Math.min(height - 8, y(tick))));
    }
    nodes.forEach((node, i) => {
      const begin = Math.max(left, x(node.first)), end = Math.min(width, x(node.first + node.sequences));
      if (end <= begin) return;
      const gap = end - begin > 6 ? 1.2 : (end - begin) / 6, kind = node.sequences > 1 ? "--shared" : "--single";
      context.fillStyle = css(kind);
      context.fillRect(begin, y(node.begin), end - begin - gap, y(node.end) - y(node.begin));
      context.fillStyle = css(kind + "-trained");
      for (let t = 0; t < node.trained.length; t += 2)
        context.fillRect(begin, y(node.trained[t]), end - begin - gap, y(node.trained[t + 1]) - y(node.trained[t]));
      if (i !== chosen) return;
      context.strokeStyle = css("--ink");
      context.lineWidth = 2;
      context.strokeRect(begin + 1, y(node.begin) + 1, Math.max(1, end - begin - gap - 2), Math.max(1, y(node.end) - y(node.begin) - 2));
    });
  }
  function zoom(i) {
    from = i < 0 ? 0 : nodes[i].first;
    wide = i < 0 ? sequences : nodes[i].sequences;
    whole.hidden = wide === sequences;
    invalidate(canvas);
  }
  function describe(i, clientX, clientY) {
    const node = nodes[i];
    let trained = 0;
    for (let t = 0; t < node.trained.length; t += 2) trained += node.trained[t + 1] - node.trained[t];
    showTip(clientX, clientY, `tokens ${grouped(node.begin)} to ${grouped(node.end)} (${grouped(node.end - node.begin)})\n` +
      (node.sequences === 1 ? "one sequence" : `shared by ${count(node.sequences, "sequence")}`) + `\n${grouped(trained)} of the tokens trained`);
  }
  const hit = event => {
    const place = canvas.getBoundingClientRect(), px = event.clientX - place.left, py = event.clientY - place.top;
    return nodes.findIndex(node => px >= Math.max(left, x(node.first)) && px < x(node.first + node.sequences) && py >= y(node.begin) && py < y(node.end));
  };
  canvas.addEventListener("pointermove", event => { const i = hit(event); if (i < 0) hideTip(); else describe(i, event.clientX, event.clientY); });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("blur", () => { chosen = -1; hideTip(); invalidate(canvas); });
  canvas.addEventListener("click", event => { const i = hit(event); if (i >= 0) zoom(i); });
  canvas.addEventListener("keydown", event => {
    const siblings = chosen >= 0 && nodes[chosen].parent >= 0 ? nodes[nodes[chosen].parent].children : nodes.map((_, i) => i).filter(i => nodes[i].parent < 0);
    const at = siblings.indexOf(chosen), go = { ArrowRight: siblings[at + 1], ArrowLeft: siblings[at - 1],
      ArrowDown: chosen < 0 ? siblings[0] : nodes[chosen].children[0], ArrowUp: chosen < 0 ? undefined : nodes[chosen].parent };
    if (event.key === "Enter" && chosen >= 0) zoom(chosen);
    else if (event.key === "Escape") { chosen = -1; hideTip(); zoom(-1); }
    else if (event.key in go) {
      if (go[event.key] !== undefined && go[event.key] >= 0) chosen = go[event.key];
      const place = canvas.getBoundingClientRect();
      if (chosen >= 0) describe(chosen, Math.min(place.right, Math.max(place.left, place.left + x(nodes[chosen].first))), place.top + y(nodes[chosen].end));
      invalidate(canvas);
    } else return;
    event.preventDefault();
  });
  const saved = tree.tokens / Math.max(1, tree.tree_tokens);
  const summary = `${count(tree.sequences, "sequence")}, ${grouped(tree.tree_tokens)} tokens in the tree for ${grouped(tree.tokens)} in the batch: ` +
    `${short(saved)}x compression` + (tree.left_out ? `; ${grouped(tree.left_out)} narrow nodes are left out` : "");
  canvas.setAttribute("aria-label", `Prefix tree, ${title}: ${summary}. Arrow keys choose a node, Enter zooms, Escape shows all.`);
  onView(canvas, draw);
  const key = (name, text) => h("span", {}, h("i", { class: "box k-" + name }), text);
  return h("figure", { class: "tree" }, h("figcaption", {}, title, h("small", {}, summary), whole, h("span", { class: "legend" }, key("shared-trained", "shared, trained"),
    key("shared", "shared, not trained"), key("single-trained", "one sequence, trained"), key("single", "one sequence, not trained"))), canvas,
  h("p", { class: "hint" }, "Height: depth in tokens. Width: sequences. Point at a node to read it, click to zoom into its subtree."));
}

panels.push({
  id: "tree", title: "Tree and plan", kinds: ["tree", "metrics"], shown: null,
  build(section) {
    this.facts = h("div", { class: "tiles" });
    this.place = h("div", {});
    section.append(this.facts, h("p", { class: "hint" }), this.place);
  },
  update() {
    if (SAVED && SAVED.tree) {
      if (this.shown !== SAVED.tree) this.place.replaceChildren(treeFigure(this.shown = SAVED.tree, SAVED.title), h("p", { class: "hint" }, SAVED.note));
      return;
    }
    const samples = panels.find(panel => panel.id === "samples"), key = store.current + "/" + samples.step, tree = trees.get(key), one = run();
    const list = [], ratio = lastValue(one, "tree/predicted_over_measured"), update = lastValue(one, "time/update");
    if (ratio !== undefined && update !== undefined)
      list.push(tile("Updates of the last batch", duration(update), `measured; predicted ${duration(update * ratio)}`));
    const peak = lastValue(one, "memory/peak"), planned = lastValue(one, "memory/predicted");
    if (peak && planned) list.push(tile("Memory of a step", bytes(planned), `predicted, beside weights and gradients; peak of everything so far: ${bytes(peak)}`));
    const again = lastValue(one, "tree/recomputed_fraction");
    if (again !== undefined) list.push(tile("Recomputed", short(100 * again) + "%", "of the forwarded tokens"));
    this.facts.replaceChildren(...list);
    this.section.hidden = !list.length && !tree;
    if (tree === this.shown) return;
    forget(this.place);
    this.shown = tree;
    this.place.replaceChildren(...(tree ? [treeFigure(tree, "step " + grouped(samples.step))] : []));
  },
});

// ---- Failures and settings.
panels.push({
  id: "failures", title: "Failures", kinds: ["problems", "metrics"],
  build(section) {
    this.counts = h("p", { class: "hint" });
    this.body = h("div", { class: "panel scroll" });
    section.append(this.counts, this.body);
  },
  update() {
    const one = run();
    if (!one) return;
    const total = name => (curve(one, name) || { values: [] }).values.reduce((sum, value) => sum + value, 0);
    const counted = [["reward/failures", "failed rewards"], ["rollout/groups_refused", "groups refused"], ["rollout/groups_dropped", "groups dropped"],
      ["age/dropped_groups", "groups too old"]].filter(([name]) => total(name)).map(([name, label]) => `${label}: ${grouped(total(name))}`);
    const skipped = lastValue(one, "optim/skipped_steps");
    if (skipped) counted.push(`optimizer steps skipped: ${grouped(skipped)}`);
    this.counts.textContent = counted.length ? counted.join(", ") : "No failed rewards, no dropped groups.";
    const error = one.progress && one.progress.error;
    this.body.hidden = !one.problems.length && !error;
    this.body.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ["", "first message of its kind", "times", "first", "last"].map((name, i) =>
      h("th", { class: i === 2 ? "number" : "" }, name)))), h("tbody", {},
      error ? h("tr", {}, h("td", { class: "bad" }, "end"), h("td", {}, h("pre", {}, error)), h("td", {}), h("td", {}), h("td", {})) : null,
      one.problems.map(each => h("tr", {}, h("td", { class: each.level === "warning" ? "level" : "level bad" }, each.level), h("td", {}, h("pre", {}, each.text)),
        h("td", { class: "number" }, grouped(each.count)), h("td", {}, each.first), h("td", {}, each.count > 1 ? each.last : ""))))));
  },
});

panels.push({
  id: "settings", title: "Settings", kinds: ["run"],
  build(section) {
    this.body = h("div", {});
    section.append(this.body);
  },
  update() {
    const one = run();
    if (!one) return;
    const others = store.runs.filter(each => each !== one);
    const keys = [...new Set(store.runs.flatMap(each => (each.settings || []).map(([key]) => key)))].sort();
    const of = (each, key) => (each.settings || []).find(([name]) => name === key);
    const rows = keys.map(key => {
      const found = of(one, key) || of(others.find(each => of(each, key)), key);
      const values = store.runs.map(each => (of(each, key) || [key, "default"])[1]);
      return h("tr", {}, h("td", { class: "key-name" }, key), values.map(value =>
        h("td", {}, values.some(other => other !== value) ? h("b", {}, value) : value)), h("td", {}, h("small", {}, found[2])));
    });
    const titles = store.runs.length > 1 ? store.runs.map(each => each.title) : ["value"];
    this.body.replaceChildren(
      one.settings_error ? h("p", { class: "hint" }, one.settings_error) : h("p", { class: "hint" }, "Those that differ from their defaults."),
      rows.length ? h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), titles.map(title => h("th", {}, title)), h("th", {}, "meaning"))),
        h("tbody", {}, rows))) : "",
      one.config ? h("details", {}, h("summary", {}, "All settings: config.yaml"), h("div", { class: "panel padded" }, h("pre", {}, one.config))) : "");
  },
});
