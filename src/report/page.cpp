#include "report/page.h"

namespace bough {

// Colours: one hue per series, distinguishable with red-green blindness, chosen for the light and for the
// dark background. Text never has these colours. In the tree picture, blue marks trained tokens and grey
// untrained ones. Strong colours mark nodes of several sequences, pale colours nodes of one sequence.
const char* const kPageStyle = R"css(
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1d1d1b; --soft: #5d5c57;
  --faint: #8b8a84;
  --line: #e4e3de; --grid: #ecebe6; --c0: #2a78d6; --c1: #c2571a; --c2: #0f8a5f; --c3: #6a4fc0;
  --shared-trained: #1f5fb4; --single-trained: #93bdf0; --shared: #a3a29a; --single: #d9d8d2; --good: #0f7a4d;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #141413; --card: #1e1e1c; --ink: #f1f0ea; --soft: #b4b3ab; --faint: #86857e;
  --line: #33322f;
    --grid: #2a2a27; --c0: #5a9df0; --c1: #e58a4c; --c2: #3fb68a; --c3: #a48ff0; --shared-trained: #5a9df0;
    --single-trained: #2b4f80; --shared: #77766f; --single: #3d3c38; --good: #56c596; --bad: #f2837b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0; font-weight: 650; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; font-weight: 650; }
.subtitle { color: var(--soft); margin: 2px 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; }
.tile, figure, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile span { color: var(--soft); font-size: 13px; }
.tile b { display: block; font-size: 24px; font-weight: 650; line-height: 1.3; }
.tile small { color: var(--faint); font-size: 12.5px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 16px 8px; min-width: 0; }
figcaption { font-weight: 600; display: flex; flex-wrap: wrap; gap: 2px 12px; align-items: baseline; }
figcaption small { font-weight: 400; color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
text.y { text-anchor: end; } text.x { text-anchor: middle; }
.grid { stroke: var(--grid); } .base { stroke: var(--faint); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.pale { stroke-width: 1.2; opacity: .38; } .key.pale { opacity: .38; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); }
.dot { stroke: var(--card); stroke-width: 2; }
.dot.c0, .key.c0 { fill: var(--c0); background: var(--c0); } .dot.c1, .key.c1 { fill: var(--c1);
  background: var(--c1); }
.dot.c2, .key.c2 { fill: var(--c2); background: var(--c2); } .dot.c3, .key.c3 { fill: var(--c3);
  background: var(--c3); }
.lane { fill: var(--grid); }
.hover path { stroke: var(--faint); stroke-dasharray: 3 3; }
.legend { margin-left: auto; display: flex; flex-wrap: wrap; gap: 2px 14px; font-weight: 400; font-size: 13px;
  color: var(--soft); }
.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
.box { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.tree { margin-bottom: 14px; } .tree svg { margin-top: 8px; overflow: hidden; }
.nodes g { cursor: pointer; } .nodes g:hover { opacity: .78; }
.shared { fill: var(--shared); background: var(--shared); } .single { fill: var(--single);
  background: var(--single); }
.shared.trained { fill: var(--shared-trained); background: var(--shared-trained); }
.single.trained { fill: var(--single-trained); background: var(--single-trained); }
.hint { margin: 6px 0 4px; color: var(--faint); font-size: 13px; }
button { font: inherit; font-size: 13px; color: var(--ink); background: none; border: 1px solid var(--line);
  border-radius: 6px; padding: 1px 10px; cursor: pointer; }
.panel { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); padding: 9px 14px;
  border-bottom: 1px solid var(--line); }
td { padding: 9px 14px; vertical-align: top; border-bottom: 1px solid var(--grid); }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { width: 42%; min-width: 240px; }
td pre { margin: 0; max-height: 260px; overflow: auto; } td .note { color: var(--soft); margin-top: 6px; }
pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.settings { margin: 0; padding: 14px 18px; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); }
summary { cursor: pointer; color: var(--soft); margin: 14px 0 12px; }
.talks { padding: 6px 18px 12px; margin-bottom: 14px; }
.talks h3 { font-size: 14px; margin: 8px 0 4px; font-weight: 600; overflow-wrap: anywhere; }
.talk { border-top: 1px solid var(--grid); } .talk summary { margin: 8px 0; font-size: 13.5px; }
.talk summary b { color: var(--ink); } .talk summary small { display: block; color: var(--faint); }
.bar { display: flex; height: 7px; margin-top: 5px; border-radius: 3px; overflow: hidden; }
.bar i { display: block; min-width: 1px; } .bar .model { background: var(--c0); }
.bar .shown { background: var(--shared); } .bar .common { opacity: .3; }
.bar.key { display: inline-flex; width: 14px; margin: 0; } .bar.key i { flex: 1; }
.message { margin: 0 0 8px 14px; padding: 6px 12px; border-left: 3px solid var(--line); }
.message.model { border-left-color: var(--c0); }
.who { font-weight: 600; font-size: 13px; } .who small { font-weight: 400; color: var(--faint); }
.message pre { margin: 3px 0 0; max-height: 320px; overflow: auto; }
.thinks { color: var(--faint); font-style: italic; } .calls { color: var(--c1); }
.empty { color: var(--soft); padding: 14px 18px; margin: 0; }
#tip { position: fixed; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--line);
  border-radius: 8px; padding: 7px 11px; font-size: 13px; box-shadow: 0 4px 18px rgb(0 0 0 / .16);
  white-space: pre;
  font-variant-numeric: tabular-nums; z-index: 2; }
)css";

const char* const kPageScript = R"js(
"use strict";
const tip = document.getElementById("tip");
const svgNode = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return node;
};
const showTip = (event, text) => {
  tip.textContent = text;
  tip.hidden = false;
  const left = event.clientX + 16, box = tip.getBoundingClientRect();
  tip.style.left = (left + box.width > innerWidth - 8 ? event.clientX - box.width - 16 : left) + "px";
  tip.style.top = Math.max(8, Math.min(event.clientY + 14, innerHeight - box.height - 8)) + "px";
};
const hideTip = () => { tip.hidden = true; };

for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const hover = figure.querySelector(".hover");
  const clear = () => { hover.replaceChildren(); hideTip(); };
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("pointermove", event => {
    const left = svg.getBoundingClientRect().left;
    const x = (event.clientX - left) * svg.viewBox.baseVal.width / svg.clientWidth;
    // A point of each series: that of the step nearest to the pointer over all series.
    let nearest = null;
    for (const series of data.series)
      for (const point of series.points)
        if (!nearest || Math.abs(point[0] - x) < Math.abs(nearest[0] - x)) nearest = point;
    if (!nearest) return;
    hover.replaceChildren(svgNode("path", {d: `M${nearest[0]} 12V214`}));
    let text = "step " + nearest[2];
    data.series.forEach((series, i) => {
      const point = series.points.find(candidate => candidate[2] === nearest[2]);
      if (!point) return;
      hover.append(svgNode("circle", {class: "dot c" + i, cx: point[0], cy: point[1], r: 4.5}));
      text += "\n" + (data.series.length > 1 ? series.name + "  " : "") + point[3];
      if (data.unit) text += " " + data.unit;
    });
    showTip(event, text);
  });
}

for (const figure of document.querySelectorAll("figure.tree")) {
  const nodes = figure.querySelector(".nodes"), whole = figure.querySelector(".whole");
  const width = nodes.viewBox.baseVal.width, groups = [...nodes.children];
  const numbers = target => target.closest("[data-n]")?.dataset.n.split(",").map(Number);
  nodes.addEventListener("pointerleave", hideTip);
  nodes.addEventListener("pointermove", event => {
    const n = numbers(event.target);
    if (!n) return hideTip();
    const [begin, end, sequences, trained] = n;
    const who = sequences === 1 ? "one sequence" : `shared by ${sequences} sequences`;
    showTip(event, `tokens ${begin} to ${end} (${end - begin})\n${who}\n${trained} of the tokens trained`);
  });
  // Lays the part [from, from + part) of the picture out over its whole width; the gaps keep their size.
  const zoom = (from, part) => {
    for (const group of groups) {
      const n = numbers(group), wide = n[5] * width / part, gap = wide > 6 ? 1.5 : wide / 5;
      for (const box of group.children) {
        box.setAttribute("x", (n[4] - from) * width / part);
        box.setAttribute("width", wide - gap);
      }
    }
    whole.hidden = part === width;
  };
  nodes.addEventListener("click", event => {
    const n = numbers(event.target);
    if (n) zoom(n[4], n[5]);
  });
  whole.addEventListener("click", () => zoom(0, width));
}
)js";

}  // namespace bough
