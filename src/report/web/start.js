// Assembles the page, and the keys that work everywhere.
const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try { theme = localStorage.getItem("bough-theme") || "system"; } catch (error) { /* a page from a file may have no storage */ }
function paint() {
  document.documentElement.classList.toggle("dark", theme === "dark" || (theme === "system" && dark.matches));
  document.getElementById("theme").textContent = "colours: " + theme;
  due.forEach((draw, canvas) => invalidate(canvas));
  if (run()) panels.find(panel => panel.id === "samples").render();
}
function changeTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("bough-theme", theme); } catch (error) { /* as above */ }
  paint();
}

function chooseRun(index) {
  store.current = index;
  touch("all");
}

function start() {
  const main = document.getElementById("main"), nav = document.getElementById("panels");
  const treeOnly = SAVED && SAVED.tree, order = ["now", "curves", "samples", "tree", "timeline", "failures", "talk", "settings"];
  panels.sort((a, b) => order.indexOf(a.id) - order.indexOf(b.id));
  const chooser = h("select", { id: "run", "aria-label": "Run", hidden: true, onchange: () => chooseRun(chooser.selectedIndex) });
  document.getElementById("title").after(chooser);
  for (const panel of panels) {
    panel.section = h("section", { id: panel.id, hidden: Boolean(treeOnly && panel.id !== "tree"), "aria-labelledby": panel.id + "-title" },
      h("h2", { id: panel.id + "-title" }, panel.title));
    panel.link = h("a", { href: "#" + panel.id }, panel.title);
    if (!treeOnly) nav.append(panel.link);
    panel.build(panel.section);
    main.append(panel.section);
  }
  // The run's name, and the list of runs if there are several.
  panels.push({ id: "title", kinds: ["run"], update() {
    if (!run()) return;
    document.getElementById("title").textContent = document.title = run().title;
    chooser.hidden = store.runs.length < 2;
    if (chooser.options.length !== store.runs.length) chooser.replaceChildren(...store.runs.map(one => h("option", {}, one.title)));
    chooser.selectedIndex = store.current;
    for (const panel of panels) if (panel.link) panel.link.hidden = panel.section.hidden;
  } });
  document.getElementById("theme").addEventListener("click", changeTheme);
  dark.addEventListener("change", paint);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const samples = panels.find(panel => panel.id === "samples"), curves = panels.find(panel => panel.id === "curves");
    const action = { j: () => samples.moveGroup(1), k: () => samples.moveGroup(-1), n: () => samples.moveStep(1), p: () => samples.moveStep(-1),
      t: changeTheme, "/": () => { curves.all.open = true; curves.search.focus(); } }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting)
      for (const panel of panels) if (panel.link) panel.link.classList.toggle("here", panel.section === entry.target);
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const panel of panels) if (panel.section) seen.observe(panel.section);
  paint();
  if (SAVED) {
    store.runs = SAVED.runs;
    if (!treeOnly) { touch("all"); return; }
    document.getElementById("title").textContent = SAVED.title;
    panels.find(panel => panel.id === "tree").update();
  } else {
    store.live = true;
    connect();
  }
}
start();
