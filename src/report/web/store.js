"use strict";
// The runs that the page shows, and how they stay up to date: from the page's own data (a saved report), or from
// the server's snapshot and its events. A panel draws a run's data; `touch` marks what changed.
//
// A run: title, folder, curves {name: {steps, values}}, spans [[lane, what, begin, end]], busy {lane: {what:
// seconds}}, end, problems, progress, steps (with rollouts), open {step, waiting}: the step in work and its scored
// groups, settings [[key, value, help]], config.
const SAVED = JSON.parse(document.getElementById("data").textContent);
const store = { runs: [], current: 0, serial: 0, live: false };
const panels = [];  // {id, title, kinds, build(section), update()}
const run = () => store.runs[store.current];

// ---- Elements. Text from data is set as text only; there is no innerHTML on this page.
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const name in value) node.style.setProperty(name, value[name]);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

const tip = document.getElementById("tip");
function showTip(x, y, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, x + 16 + box.width > innerWidth - 8 ? x - box.width - 16 : x + 16) + "px";
  tip.style.top = Math.max(8, Math.min(y + 14, innerHeight - box.height - 8)) + "px";
}
function hideTip() { tip.hidden = true; }

// ---- Numbers for people.
function short(value, digits = 3) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    const power = Math.min(4, Math.floor(Math.log10(size) / 3));
    return Number((value / 1000 ** power).toPrecision(digits)) + ["", "k", "M", "G", "T"][power];
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(digits - 1).replace(/\.?0*e/, "e") : String(Number(value.toPrecision(digits)));
}
function bytes(value) {
  const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return Number((value / 1024 ** power).toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
function duration(seconds) {
  if (!isFinite(seconds)) return "–";
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 60) return Number(seconds.toPrecision(2)) + " s";
  const whole = Math.round(seconds), two = n => String(n).padStart(2, "0");
  const days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600) % 24, minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${two(hours)}:${two(minutes)}`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
const grouped = value => Number(value).toLocaleString("en-US");
const count = (n, what) => `${grouped(n)} ${what}${n === 1 ? "" : "s"}`;
function valueIn(value, unit) {
  if (unit === "bytes") return bytes(value);
  if (unit === "s") return duration(value);
  return short(value, 4) + (unit ? " " + unit : "");
}
const curve = (one, name) => one && one.curves[name];
function lastValue(one, name) {
  const points = curve(one, name);
  return points && points.values.length ? points.values[points.values.length - 1] : undefined;
}
function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }

// ---- Changes. Panels are drawn at most four times a second.
const touched = new Set();
let drawing = 0;
function touch(kind) {
  touched.add(kind);
  if (drawing) return;
  drawing = setTimeout(() => {
    drawing = 0;
    const kinds = new Set(touched);
    touched.clear();
    for (const panel of panels)
      if (kinds.has("all") || panel.kinds.some(each => kinds.has(each))) panel.update(kinds);
  }, 250);
}

function takeEvent(event, serial) {
  if (queue) queue.push([event, serial]);
  if (queue || serial <= store.serial) return;
  const one = store.runs[event.run];
  if (event.kind === "reload" || !one) { load(); return; }
  if (event.kind === "metrics") {
    for (const [name, value] of Object.entries(event.values)) {
      const points = one.curves[name] || (one.curves[name] = { steps: [], values: [] });
      points.steps.push(event.step);
      points.values.push(value);
    }
  } else if (event.kind === "timeline") {
    one.spans = one.spans.concat(event.spans).slice(-1500);
    one.busy = event.busy;
    one.end = event.end;
  } else {
    one[event.kind] = event[event.kind];  // problems, progress, steps
    if (event.kind === "steps") one.open = event.open;
  }
  touch(event.kind);
}

// ---- The server. Whenever the stream of events opens, the page takes a snapshot. Events that come meanwhile are queued,
// and those that the snapshot contains are left out.
let source = null, queue = null;
function connect() {
  source = new EventSource("/api/events");
  source.onopen = load;
  source.onmessage = message => takeEvent(JSON.parse(message.data), Number(message.lastEventId));
  source.onerror = () => {
    say("connection lost; trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);  // else the browser tries again
  };
}
async function load() {
  const events = queue = [];
  let snapshot = null;
  try { snapshot = await (await fetch("/api/snapshot")).json(); } catch (error) { say("the server does not answer; trying again"); }
  if (queue !== events) return;  // a later call takes a newer one
  if (!snapshot) { setTimeout(load, 3000); return; }
  store.runs = snapshot.runs;
  store.serial = snapshot.serial;
  queue = null;
  say("live");
  touch("all");
  for (const [event, serial] of events) takeEvent(event, serial);
}
// The token that the page's URL gave, as ?token=...; the address line loses it. Without it there are no buttons.
const TOKEN = (() => {
  if (SAVED) return "";
  let token = new URLSearchParams(location.search).get("token");
  try {
    token = token || sessionStorage.getItem("bough-token");
    if (token) sessionStorage.setItem("bough-token", token);
  } catch (error) { /* a browser without storage: the buttons go with the page */ }
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  return token || "";
})();
// Tells the run; gives what happened. Rejects with the reason for which the run refused.
async function control(command) {
  const answer = await fetch(`/api/control?run=${store.current}&command=${command}`, { method: "POST", headers: { "X-Bough-Token": TOKEN } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body.text;
}
// Lets the run answer a conversation. Calls `take` with each part: {content, reasoning_content, tool_calls}, all
// optional. Rejects with the run's reason.
async function chat(index, messages, signal, take) {
  const answer = await fetch(`/api/chat?run=${index}`, { method: "POST", headers: { "X-Bough-Token": TOKEN }, body: JSON.stringify({ messages }), signal });
  if (!answer.ok) throw new Error((await answer.json()).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices || []) take(choice.delta || {}, choice.finish_reason);
    }
  }
}
function say(text) { document.getElementById("connection").textContent = text; }

// Rollouts of a step: from the report's own data, or from the server. Rejects with a message for the reader.
async function loadStep(index, step, first) {
  if (!store.live) {
    const found = SAVED.saved && SAVED.saved[index + "/" + step];
    if (!found) throw new Error("This report has no rollouts of this step. `bough view` on the run's folder shows all.");
    return found;
  }
  const answer = await fetch(`/api/step?run=${index}&step=${step}&first=${first}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
// The steps whose rollouts the page can show.
function stepsToShow(index) {
  const all = store.runs[index].steps, open = store.runs[index].open;
  if (store.live) return open ? [...all, open.step] : all;
  return all.filter(step => SAVED.saved && SAVED.saved[index + "/" + step]);
}
