// A box to talk to the weights that the engine holds, of a run that serves its model (serve.port). The answers are no
// samples of the run.
panels.push({
  id: "talk", title: "Talk", kinds: ["run", "progress"], messages: [], index: 0, stop: null,
  build(section) {
    const button = (label, action) => h("button", { type: "button", onclick: action }, label);
    this.log = h("div", { "aria-live": "polite" });
    this.input = h("textarea", { rows: 2, "aria-label": "Message to the model", placeholder: "Enter sends, Shift+Enter begins a line",
      onkeydown: event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); } } });
    this.sender = button("send", () => this.stop ? this.stop.abort() : this.send());
    this.note = h("span", { role: "status" });
    section.append(h("p", { class: "hint" }, "The weights that the engine holds now answer, with the run's sampling settings. Nobody trains on it."),
      this.log, h("div", { class: "bar-of-controls talk-controls" }, this.input, this.sender, button("new conversation", () => this.clear()), this.note));
  },
  clear() {
    if (this.stop) this.stop.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.note.textContent = "";
  },
  show(message) {
    const box = messageBox(message);
    box.classList.toggle("model", message.role === "assistant");
    this.log.append(box);
    return box;
  },
  async send() {
    const text = this.input.value.trim();
    if (!text || this.stop) return;
    if (this.index !== store.current) this.clear();
    const index = this.index = store.current, stop = this.stop = new AbortController(), messages = this.messages;
    messages.push({ role: "user", content: text });
    this.input.value = "";
    this.show(messages[messages.length - 1]);
    const answer = { role: "assistant", content: "", reasoning: "", calls: [] };
    let box = null, finish = "";
    this.sender.textContent = "stop";
    this.note.textContent = "waiting for the engine";
    try {
      await chat(index, messages.map(({ role, content }) => ({ role, content })), stop.signal, (delta, reason) => {
        answer.content += delta.content || "";
        answer.reasoning += delta.reasoning_content || "";
        for (const call of delta.tool_calls || []) answer.calls.push([call.function.name || "", call.function.arguments || ""]);
        finish = reason || finish;
        this.note.textContent = "";
        const old = box;
        box = this.show(answer);
        if (old) old.remove();
      });
      this.note.textContent = finish === "length" ? "the answer was cut at its largest length" : "";
    } catch (error) {
      this.note.textContent = stop.signal.aborted ? "stopped" : error.message;
    }
    if (messages === this.messages) {
      if (box) messages.push(answer);
      else { messages.pop(); this.log.lastChild.remove(); this.input.value = text; }
    }
    this.stop = null;
    this.sender.textContent = "send";
  },
  update() {
    const one = run();
    this.section.hidden = !(one && store.live && TOKEN && stateOf(one).live && (one.settings || []).some(([key]) => key === "serve.port"));
    this.link.hidden = this.section.hidden;
  },
});
