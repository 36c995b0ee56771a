// ---- Transcript: the text of a branch, with its roles, constants and what the model wrote ----

const SEGMENTS_SHOWN = 3000;
const BRANCHES_LISTED = 2000;

class TranscriptView {
  constructor(app) {
    this.app = app;
    this.branch = null;
    this.showsInherited = true;
    this.runs = make("select", { "aria-label": "Run", onchange: () => this.show(this.app.trace.runs[Number(this.runs.value)].root) });
    this.branches = make("select", { "aria-label": "Branch", onchange: () => this.show(this.branch.run.branches[Number(this.branches.value)]) });
    const step = (label, sign, by) => make("button", { type: "button", "aria-label": label, title: label, onclick: () => this._step(by) }, sign);
    this.inherited = make("input", { type: "checkbox", checked: true, onchange: () => {
      this.showsInherited = this.inherited.checked;
      this.draw();
    } });
    this.inheritedLabel = make("label", {}, this.inherited, " text before the fork");
    this.page = make("div", { class: "page" });
    this.scroller = make("div", { class: "transcript", tabindex: "0", "aria-label": "Transcript, scrollable" }, this.page);
    this.element = make("div", {},
      make("div", { class: "strip" }, step("Previous run", "‹", -1), this.runs, step("Next run", "›", 1), this.branches, this.inheritedLabel,
        make("span", { class: "legend" }, make("span", {}, make("span", { class: "made" }, "generated")), make("span", {}, make("span", { class: "made select" }, "selected")), make("span", { class: "constant" }, "constant"))),
      this.scroller);
  }

  load() {
    this.branch = this.app.trace.runs[0]?.root ?? null;
    const runs = this.app.trace.runs.slice(0, BRANCHES_LISTED);
    this.runs.replaceChildren(...runs.map((run) => make("option", { value: String(run.index) }, `${run.index}: ${glimpse(run.label, 60)}`)));
    this.drawn = null;
  }

  update(change) {
    if (change === "selection") {
      const { selected } = this.app;
      if (selected && selected.branch !== this.branch && !(this.branch && chainOf(this.branch).has(selected.branch))) this.branch = selected.branch;
    }
    if (this.drawn !== this.branch) this.draw();
    this._mark();
  }

  show(branch, event = null) {
    if (!branch) return;
    this.branch = branch;
    this.draw();
    this.app.remember();
    if (event) this.page.querySelector(`[data-event="${event.index}"]`)?.scrollIntoView({ block: "center" });
    else this.scroller.scrollTop = 0;
  }

  _step(by) {
    const run = this.app.trace.runs[this.branch.run.index + by];
    if (run) this.show(run.root);
  }

  onKey(key) {
    if (key !== "ArrowLeft" && key !== "ArrowRight") return false;
    const events = this.branch ? segmentsOf(this.branch, true).map((each) => each.event).filter((each) => !each.isConstant) : [];
    if (!events.length) return false;
    const place = events.indexOf(this.app.selected);
    const next = events[place < 0 ? 0 : clamp(place + (key === "ArrowLeft" ? -1 : 1), 0, events.length - 1)];
    this.app.select(next, { reveal: true });
    this.page.querySelector(`[data-event="${next.index}"]`)?.scrollIntoView({ block: "nearest" });
    return true;
  }

  _mark() {
    for (const each of this.page.querySelectorAll(".is-selected")) each.classList.remove("is-selected");
    const { selected } = this.app;
    if (selected) this.page.querySelector(`[data-event="${selected.index}"]`)?.classList.add("is-selected");
  }

  draw() {
    if (!this.element.isConnected) {
      this.drawn = null;
      return;
    }
    this.drawn = this.branch;
    if (!this.branch) {
      this.page.replaceChildren(make("p", { class: "nothing" }, "This trace has no runs."));
      return;
    }
    const { run } = this.branch;
    this.runs.value = String(run.index);
    this.branches.hidden = run.branches.length < 2;
    this.branches.replaceChildren(...run.branches.slice(0, BRANCHES_LISTED).map((branch) => make("option", { value: String(branch.index) }, branch.path.length ? `branch ${branch.label}` : "root")));
    this.branches.value = String(this.branch.index);
    this.inheritedLabel.hidden = !this.branch.parent;
    this.page.replaceChildren(...this._parts(segmentsOf(this.branch, this.showsInherited)));
    this._mark();
  }

  /** Elements for all segments; what lies between the beginning and end of a role is in its turn. */
  _parts(segments) {
    const parts = [];
    let turn = null;
    let wasInherited = false;
    for (const { event, isInherited } of segments.slice(0, SEGMENTS_SHOWN)) {
      if (wasInherited && !isInherited) {
        const note = make("span", { class: "note" }, `Branch ${this.branch.label} begins here`);
        if (turn) turn.append(note);
        else parts.push(note);
      }
      wasInherited = isInherited;
      if (event.kind === "role_begin") {
        const role = /^(\w+?)_begin/u.exec(event.name)?.[1] ?? event.name;
        turn = make("div", { class: `turn role-${role.replace(/\W/gu, "")}` }, make("span", { class: "who" }, role));
        parts.push(turn);
      }
      const element = this._segment(event, isInherited);
      if (element && turn) turn.append(element);
      else if (element) parts.push(element);
      if (event.kind === "role_end") turn = null;
    }
    if (segments.length > SEGMENTS_SHOWN) parts.push(make("p", { class: "note" }, `${grouped(segments.length - SEGMENTS_SHOWN)} further parts are not shown.`));
    if (!segments.length) parts.push(make("p", { class: "nothing" }, "Nothing was appended to this branch."));
    return parts;
  }

  _segment(event, isInherited) {
    if (event.kind === "fork" || event.kind === "join" || event.kind === "first_k") return this._split(event);
    if (count(event.data.sample) > 0) return null; // a further text of a gen with n > 1
    const fade = isInherited ? " inherited" : "";
    const value = event.text.length > TEXT_SHOWN ? longText(event.text, event.data.num_chars) : event.text;
    if (event.isConstant) return value ? make("span", { class: `constant${fade}`, "data-event": String(event.index) }, value) : null;
    const looks = ["made", event.family, event.isBad ? "failed" : ""].filter(Boolean).join(" ");
    const sign = event.isBad ? `✕ ${statusName(event.status)}` : event.isStopped ? `⊘ ${statusName(event.status)}` : event.isOpen ? statusName(event.status) : "";
    const tag = make("span", { class: "tag" }, event.variable || event.kind, sign ? ` ${sign}` : "");
    const told = event.isBad ? glimpse(event.data.error, 200) : "";
    return make("span", {
      class: `${looks}${fade}`, role: "button", tabindex: "0", "data-event": String(event.index),
      onclick: () => this.app.select(event, { open: true }),
      onkeydown: (key) => {
        if (key.key !== "Enter") return;
        key.stopPropagation();
        this.app.select(event, { open: true, focus: true });
      },
    }, tag, value, told ? make("span", { class: "error" }, ` ${told}`) : null);
  }

  _split(event) {
    const branches = list(event.data.children).map((index) => event.run.branches[index]).filter(Boolean);
    const verb = event.kind === "fork" ? "Fork into" : event.kind === "join" ? "Join of" : "First of";
    const links = branches.slice(0, 40).map((branch) => make("button", { type: "button", class: "link", onclick: () => this.show(branch) }, branch.label));
    const added = event.text ? make("span", { class: "constant", "data-event": String(event.index) }, event.text.slice(0, TEXT_SHOWN)) : null;
    return make("span", {}, make("span", { class: "note", "data-event": added ? null : String(event.index) }, `${verb} ${counted(branches.length, "branch", "branches")}: `, ...links, branches.length > 40 ? "…" : null), added);
  }
}

/** The branch and those that it came from. */
function chainOf(branch) {
  const chain = new Set();
  for (let each = branch; each; each = each.parent) chain.add(each);
  return chain;
}

/** All events that made a branch's text: those of its parents up to their forks, then its own. */
function segmentsOf(branch, withInherited) {
  const chain = [...chainOf(branch)].reverse();
  return chain.flatMap((each, i) => {
    const next = chain[i + 1];
    if (next && !withInherited) return [];
    const events = next ? each.events.slice(0, next.fork ? next.fork.place : undefined) : each.events;
    return events.map((event) => ({ event, isInherited: Boolean(next) }));
  });
}
