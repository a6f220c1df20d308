// Rollouts of a step: a group's siblings side by side, or its conversations, with the place where each leaves its
// nearest sibling. Tokens are coloured by one of their numbers.
const COLOURINGS = [["", "no colour"], ["logprob", "log-probability"], ["advantage", "advantage"], ["version", "weights' version"],
  ["mismatch", "mismatch: trainer minus engine"], ["entropy", "entropy"], ["mask", "trained or not"]];

// The pieces of a sample's completion: its tokens, or the whole text if they are not known.
const piecesOf = sample => sample.tokens ? sample.tokens.texts : [...sample.completion];

// For each sample, the earlier sibling with the longest common start: {index, length in pieces}. null: none.
function forksOf(samples) {
  const all = samples.map(piecesOf);
  return all.map((pieces, i) => {
    let best = null;
    for (let j = 0; j < i; ++j) {
      let length = 0;
      while (length < pieces.length && pieces[length] === all[j][length]) ++length;
      if (length > 0 && (!best || length > best.length)) best = { index: j, length, isSame: length === all[j].length };
    }
    return best;
  });
}

function tokenFact(sample, i, what) {
  const tokens = sample.tokens;
  if (what === "logprob") return tokens.logprobs && tokens.logprobs[i];
  if (what === "advantage") return tokens.advantages ? tokens.advantages[i] : sample.advantage;
  if (what === "mismatch") return tokens.mismatches && tokens.mismatches[i];
  if (what === "entropy") return tokens.entropies && tokens.entropies[i];
  if (what === "version") return tokens.versions ? tokens.versions[i] : sample.version;
  return tokens.mask ? tokens.mask[i] : 1;
}

// A background for a token, or null. `scale`: the largest |advantage| and |mismatch|, and the range of versions, of
// the group.
function tokenColour(value, what, scale) {
  if (value === undefined || value === null) return null;
  const shade = (name, part) => part > 0.02 ? `rgb(${css(name)} / ${Math.min(0.65, part * 0.65).toFixed(3)})` : null;
  if (what === "logprob") return shade("--low", Math.min(1, -value / 4));
  if (what === "advantage") return shade(value < 0 ? "--low" : "--high", Math.abs(value) / (scale.advantage || 1));
  if (what === "mismatch") return shade(value < 0 ? "--low" : "--high", Math.abs(value) / scale.mismatch);
  if (what === "entropy") return shade("--mark", Math.min(1, value / 3));
  if (what === "version") return shade("--mark", (scale.newest - value + 1) / (scale.newest - scale.oldest + 1));
  return value ? shade("--mark", 0.45) : null;
}

function scaleOf(samples) {
  const scale = { advantage: 0, mismatch: 0.1, oldest: Infinity, newest: -Infinity };
  for (const sample of samples) {
    for (const each of (sample.tokens && sample.tokens.advantages) || [sample.advantage || 0])
      scale.advantage = Math.max(scale.advantage, Math.abs(each));
    for (const each of (sample.tokens && sample.tokens.mismatches) || []) scale.mismatch = Math.max(scale.mismatch, Math.abs(each));
    for (const each of (sample.tokens && sample.tokens.versions) || [sample.version ?? Infinity])
      if (isFinite(each) && each >= 0) { scale.oldest = Math.min(scale.oldest, each); scale.newest = Math.max(scale.newest, each); }
  }
  return scale;
}

function completionText(sample, fork, what, scale) {
  const pre = h("pre", { tabindex: 0 }), pieces = piecesOf(sample);
  const mark = () => h("span", { class: "fork", title: `leaves #${fork.index + 1} here` }, "▸");
  if (!sample.tokens) {
    if (fork) pre.append(h("span", { class: "common" }, pieces.slice(0, fork.length).join("")), mark());
    pre.append(pieces.slice(fork ? fork.length : 0).join(""));
    return pre;
  }
  pieces.forEach((piece, i) => {
    if (fork && i === fork.length) pre.append(mark());
    const colour = what ? tokenColour(tokenFact(sample, i, what), what, scale) : null;
    pre.append(h("span", { class: fork && i < fork.length ? "t common" : "t", "data-i": i, style: colour ? { "background-color": colour } : {} }, piece));
  });
  pre.addEventListener("pointermove", event => {
    const i = event.target.dataset && event.target.dataset.i;
    if (i === undefined) return hideTip();
    const lines = [`token ${Number(i) + 1}: ${JSON.stringify(sample.tokens.texts[i])}`];
    for (const [key, label] of COLOURINGS.slice(1)) {
      const value = tokenFact(sample, i, key);
      if (value !== undefined && value !== null) lines.push(`${label} ${key === "mask" ? (value ? "trained" : "not trained") : short(value, 4)}`);
    }
    showTip(event.clientX, event.clientY, lines.join("\n"));
  });
  pre.addEventListener("pointerleave", hideTip);
  if (sample.num_tokens > pieces.length) pre.append(h("span", { class: "hint" }, ` … ${count(sample.num_tokens - pieces.length, "more token")}`));
  return pre;
}

// The last words of a prompt, without the special tokens of a chat template.
function promptEnd(prompt) {
  const text = prompt.replace(/<\|[^|>]*\|>/g, " ").replace(/\s+/g, " ").trim();
  return text.length > 90 ? "… " + text.slice(-90).replace(/^\S* /, "") : text;
}

function rewardOf(one) {
  if (one.reward === undefined) return h("span", {}, "no reward");
  return h("span", { class: one.reward > 0 ? "good" : "bad" }, "reward " + short(one.reward));
}

function sampleCard(sample, i, fork, what, scale) {
  const facts = [count(sample.num_tokens, "token")];
  if (sample.advantage !== undefined) facts.push("advantage " + short(sample.advantage));
  if (sample.finish && sample.finish !== "stop") facts.push(sample.finish);
  if (sample.version !== undefined) facts.push("version " + sample.version);
  if (sample.tokens && sample.tokens.versions) facts.push("several versions");
  if (sample.baseline) facts.push("greedy baseline");
  if (!sample.trained) facts.push("filtered out");
  for (const [name, value] of Object.entries(sample.rewards || {})) facts.push(`${name} ${short(value)}`);
  if (fork && fork.length === piecesOf(sample).length) facts.push(fork.isSame ? `same as #${fork.index + 1}` : `the start of #${fork.index + 1}`);
  return h("article", { class: "sample" },
    h("header", {}, h("b", {}, "#" + (i + 1)), " ", rewardOf(sample), ", " + facts.join(", ")),
    completionText(sample, fork, what, scale),
    sample.failure ? h("div", { class: "note bad" }, sample.failure) : null,
    sample.answer !== undefined ? h("div", { class: "note" }, "expected: " + sample.answer) : null);
}

// ---- Conversations of agents.
function tokensBar(talk) {
  const bar = h("div", { class: "tokens-bar", title: "tokens of the last row: coloured ones are the model's, pale ones are shared" });
  let at = 0;
  for (const [tokens, isModel] of talk.runs) {
    const common = Math.max(0, Math.min(tokens, talk.common_tokens - at));
    for (const [part, isCommon] of [[common, true], [tokens - common, false]])
      if (part > 0) bar.append(h("i", { class: (isModel ? "model" : "shown") + (isCommon ? " shared" : ""), style: { flex: String(part) } }));
    at += tokens;
  }
  return bar;
}

function messageBox(message) {
  const isModel = message.turn !== undefined, facts = [];
  if (isModel) {
    facts.push("turn " + message.turn);
    if (message.tokens) facts.push(count(message.tokens, "token"));
    if (message.engine_seconds) facts.push(duration(message.engine_seconds) + " engine");
    if (message.environment_seconds) facts.push(duration(message.environment_seconds) + " environment");
    if (message.reward) facts.push("reward " + short(message.reward));
  }
  return h("div", { class: isModel ? "message model" : "message" },
    h("div", { class: "who" }, message.role, message.name ? " " + message.name : "", " ", h("small", {}, facts.join(", "))),
    message.retokenized ? h("div", { class: "note bad" }, "the template's text of this turn has other tokens than were sampled") : null,
    message.reasoning ? h("pre", { class: "thinks" }, message.reasoning) : null,
    message.content ? h("pre", { class: !isModel && message.content.startsWith("error: ") ? "bad" : "" }, message.content) : null,
    (message.calls || []).map(([name, given]) => h("pre", { class: "calls" }, name + " " + given)));
}

function talkCard(talk) {
  const facts = [talk.reason, count(talk.turns, "turn"), count(talk.tokens, "token")];
  const sum = key => talk.messages.reduce((total, message) => total + (message[key] || 0), 0);
  if (sum("engine_seconds")) facts.push(duration(sum("engine_seconds")) + " engine");
  if (sum("environment_seconds")) facts.push(duration(sum("environment_seconds")) + " environment");
  if (talk.rows > 1) facts.push(talk.rows + " rows");
  for (const [name, value] of Object.entries(talk.rewards)) facts.push(`${name} ${short(value)}`);
  const fork = !talk.forks_from ? "" : talk.fork_turn < 0 ? `forks from ${talk.forks_from} before the first turn`
    : talk.runs.reduce((total, [tokens]) => total + tokens, 0) <= talk.common_tokens ? `the same tokens as ${talk.forks_from}`
    : `forks from ${talk.forks_from} in turn ${talk.fork_turn}, ${count(talk.common_tokens, "token")} in common`;
  return h("article", { class: "sample talk" },
    h("header", {}, h("b", {}, talk.name), " ", rewardOf(talk), ", " + facts.join(", "),
      talk.invalid_calls ? h("span", { class: "bad" }, ", " + count(talk.invalid_calls, "invalid call")) : null,
      fork ? h("div", { class: "note" }, fork) : null, tokensBar(talk)),
    h("div", {}, talk.messages.map(messageBox)),
    talk.failure ? h("pre", { class: "bad" }, talk.failure) : null);
}

const kFollowSeconds = 5;
panels.push({
  id: "samples", title: "Samples", kinds: ["steps"], step: null, group: 0, colouring: "", follows: true, shown: null,
  inView: false, behind: false, loaded: 0, timer: 0,
  build(section) {
    this.select = h("select", { "aria-label": "Step", onchange: () => this.go(Number(this.select.value), 0) });
    const button = (label, text, move) => h("button", { type: "button", "aria-label": label, onclick: move }, text);
    this.earlier = button("Step before (p)", "‹ step", () => this.moveStep(-1));
    this.later = button("Next step (n)", "step ›", () => this.moveStep(1));
    this.before = button("Group before (k)", "‹ group", () => this.moveGroup(-1));
    this.after = button("Next group (j)", "group ›", () => this.moveGroup(1));
    this.evaluated = button("The evaluation after the step", "evaluation", () => this.go(this.step, this.shown.first_evaluated));
    this.where = h("span", {});
    const colour = h("select", { "aria-label": "Colour of tokens", onchange: () => { this.colouring = colour.value; this.render(); } },
      COLOURINGS.map(([key, label]) => h("option", { value: key }, label)));
    this.body = h("div", { "aria-live": "polite" });
    section.append(h("div", { class: "bar-of-controls" }, this.earlier, this.select, this.later, this.before, this.where, this.after, this.evaluated,
      h("label", {}, "tokens: ", colour)), this.body);
    // A step's rollouts are a file that the server must read: the last step is followed while it can be seen, and
    // at most every kFollowSeconds.
    new IntersectionObserver(entries => {
      this.inView = entries[entries.length - 1].isIntersecting;
      if (this.inView && this.behind) this.follow();
    }).observe(section);
  },
  isOpen(step) { return Boolean(store.live && run().open && run().open.step === step); },
  // The group that finished last: of the step in work the last one that waits, of other steps the first one.
  newest(step) { return this.isOpen(step) ? Math.max(0, run().open.waiting - 1) : 0; },
  follow() {
    const steps = stepsToShow(store.current), wait = this.loaded + kFollowSeconds * 1000 - Date.now();
    this.behind = true;
    if (!this.inView || !steps.length || !this.follows) return;
    if (wait > 0) { clearTimeout(this.timer); this.timer = setTimeout(() => this.follow(), wait); return; }
    this.go(steps[steps.length - 1], this.newest(steps[steps.length - 1]));
  },
  update(kinds) {
    if (!run()) return;
    const steps = stepsToShow(store.current);
    this.select.replaceChildren(...steps.map(step => h("option", { value: step }, "step " + grouped(step) + (this.isOpen(step) ? ", in work" : ""))));
    if (!steps.length) {
      this.body.replaceChildren(h("p", { class: "hint" }, "No rollouts yet. A run keeps them with saver.rollouts."));
      return;
    }
    const last = steps[steps.length - 1];
    if (kinds.has("all") || !steps.includes(this.step)) this.go(last, this.newest(last));
    else if (this.follows && (this.step !== last || this.group !== this.newest(last))) this.follow();
    else if (this.shown && this.shown.isOpen !== this.isOpen(this.step)) this.go(this.step, 0);  // it has ended
    this.select.value = this.step;
    this.controls();
  },
  moveStep(by) {
    const steps = stepsToShow(store.current), next = steps[steps.indexOf(this.step) + by];
    if (next !== undefined) this.go(next, 0);
  },
  moveGroup(by) {
    if (!this.shown) return;
    const next = this.nextGroup(by);
    if (next !== undefined) this.go(this.step, next);
  },
  // A report has some of the groups only.
  nextGroup(by) {
    const groups = this.shown.groups, next = this.group + by;
    if (!store.live) return (groups[groups.findIndex(each => each.index === this.group) + by] || {}).index;
    return next >= 0 && next < Math.max(this.shown.num_groups, this.newest(this.step) + 1) ? next : undefined;
  },
  async go(step, group) {
    const steps = stepsToShow(store.current), index = store.current;
    const isOpen = this.isOpen(step);
    this.follows = step === steps[steps.length - 1] && group === this.newest(step);
    this.step = step;
    this.group = group;
    this.select.value = step;
    this.behind = false;
    const has = data => data && data.index === index && data.step === step && data.isOpen === isOpen && data.groups.some(each => each.index === group);
    if (!has(this.shown)) {
      this.loaded = Date.now();
      try {
        const data = await loadStep(index, step, group);
        if (this.step !== step || this.group !== group || store.current !== index) return;  // the reader went on
        if (!data.groups.length && group > 0) { this.go(step, 0); return; }  // they went into the step before
        this.shown = Object.assign({ index, isOpen }, data);
        if (data.tree) trees.set(index + "/" + step, data.tree);
        touch("tree");
      } catch (error) {
        this.shown = null;
        this.body.replaceChildren(h("p", { class: "hint" }, error.message));
        // The run may have moved the step's files meanwhile.
        if (store.live) setTimeout(() => { if (!this.shown && this.step === step) this.go(step, 0); }, 2000);
        return;
      }
    }
    this.render();
  },
  controls() {
    const steps = stepsToShow(store.current), at = steps.indexOf(this.step);
    this.earlier.disabled = at <= 0;
    this.later.disabled = at >= steps.length - 1;
    this.before.disabled = !this.shown || this.nextGroup(-1) === undefined;
    this.after.disabled = !this.shown || this.nextGroup(1) === undefined;
    this.evaluated.hidden = !this.shown || !(store.live ? this.shown.first_evaluated < this.shown.num_groups
      : this.shown.groups.some(each => each.evaluation !== undefined));
    if (!this.shown) { this.where.textContent = ""; return; }
    const first = this.shown.first_evaluated, isEvaluation = first < this.shown.num_groups && this.group >= first;
    const [which, all, part] = isEvaluation ? ["evaluation, problem ", this.shown.num_groups - first, this.group - first + 1] : ["group ", first, this.group + 1];
    const kept = this.shown.groups.filter(each => (each.evaluation !== undefined) === isEvaluation).length;
    this.where.textContent = which + part + " of " + all + (!store.live && kept < all ? ` (${kept} in this report)` : "");
  },
  render() {
    const group = this.shown && this.shown.groups.find(each => each.index === this.group);
    this.controls();
    if (!group) {  // the groups of the step in work went into the step before
      this.body.replaceChildren(h("p", { class: "hint" }, "No samples of this step yet."));
      return;
    }
    const isOpen = this.body.querySelector(".prompt") && this.body.querySelector(".prompt").open;
    const prompt = h("details", { class: "panel padded prompt", open: isOpen },
      h("summary", {}, `Prompt of ${group.name || "the group"}: `, h("span", {}, promptEnd(group.prompt))), h("pre", { tabindex: 0 }, group.prompt));
    const samples = group.samples, forks = forksOf(samples), scale = scaleOf(samples);
    const note = group.dropped !== undefined ? "dropped: " + group.dropped
      : group.evaluation !== undefined ? `evaluation after step ${this.step} (${group.evaluation})` : this.shown.isOpen ? "waits for its step" : "";
    this.body.replaceChildren(prompt, note ? h("p", { class: "hint" }, note) : "", h("div", { class: "siblings", tabindex: 0, role: "group", "aria-label": "Siblings" },
      group.conversations ? group.conversations.map(talkCard)
        : samples.map((sample, i) => sampleCard(sample, i, forks[i], this.colouring, scale))));
  },
});
