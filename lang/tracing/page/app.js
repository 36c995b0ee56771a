// ---- The page: head, views, selection, search, filters, address, keys, files ----

const VIEWS = { timeline: "Timeline", table: "Table", prefixes: "Prefixes", transcript: "Transcript" };
const SEARCH_PAUSE = 120; // milliseconds after the last key
const MARKS_SHOWN = 3000;

const KEYS = [
  ["← →", "previous, next primitive of the branch"], ["↑ ↓", "row above, below"], ["Enter", "details"], ["Esc", "close details"],
  ["+ −", "zoom in, out (also Ctrl and the wheel, or pinch)"], ["a d", "move left, right (also drag, or Shift and the wheel)"], ["0", "show everything"],
  ["z", "zoom to the primitive"], ["c", "collapse or expand the branch"], ["/", "search"], ["n N", "next, previous match"],
  ["1 2 3 4", Object.values(VIEWS).join(", ").toLowerCase()], ["?", "these keys"],
];

/** The small window beside the pointer. */
class Tip {
  constructor() {
    this.element = byId("tip");
  }

  show(x, y, parts) {
    this.element.replaceChildren(...parts);
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 10 : x + 14;
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    this.element.style.transform = `translate(${Math.round(clamp(left, 4, Math.max(4, innerWidth - box.width - 4)))}px, ${Math.round(Math.max(4, top))}px)`;
  }

  hide() {
    this.element.hidden = true;
  }
}

class App {
  constructor() {
    this.trace = null;
    this.selected = null;
    this.found = [];
    this.query = "";
    this.filters = { status: "", kind: "", program: "" };
    this.view = "timeline";
    this.tip = new Tip();
    this.details = new Details(this);
    this.views = { timeline: new Timeline(this), table: new Table(this), prefixes: new PrefixTree(this), transcript: new TranscriptView(this) };
    this._buildTabs();
    this._buildHelp();
    this._listen();
  }

  // -- A trace comes in --

  /** Show a trace. `data` is what the JSON says; Error if it is none. */
  load(data) {
    if (record(data).format !== "palmette.trace") throw new Error("this is not a trace of Palmette");
    if (data.version !== 1) throw new Error(`this page reads version 1 of the format, the file has ${text(data.version)}`);
    this.trace = new Trace(data);
    this.selected = null;
    this.found = [];
    this.query = "";
    byId("search").value = "";
    this.filters = { status: "", kind: "", program: "" };
    byId("drop").hidden = true;
    this._filter();
    this._drawHead();
    this._fillFilters();
    for (const view of Object.values(this.views)) view.load();
    this._recall();
    this.showView(this.view);
    this.details.update();
  }

  async openFile(file) {
    const title = byId("drop-error");
    title.textContent = "";
    try {
      this.load(JSON.parse(await readFile(file)));
      this.remember();
      announce(`Opened ${file.name}`);
    } catch (error) {
      byId("drop").hidden = false;
      title.textContent = `${file.name} cannot be shown: ${error.message}`;
    }
  }

  // -- Selection --

  /**
   * Select an event, or nothing. `reveal` brings it into sight, `open` shows details where they lie
   * over the view, `focus` goes there.
   */
  select(event, { reveal = false, open = false, focus = false } = {}) {
    const hadFocus = this.details.element.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") ?? "" : null;
    const hasChanged = event !== this.selected;
    this.selected = event;
    this.wantsReveal = reveal;
    if (open && event) this.details.element.classList.add("is-open");
    if (!event) this.details.element.classList.remove("is-open");
    if (hasChanged) {
      this.details.update();
      if (event) announce(`${event.name}, ${statusName(event.status)}, ${duration(event.seconds)}`);
    }
    this.views[this.view].update("selection");
    this.wantsReveal = false;
    this.remember();
    if (focus) byId("details-title")?.focus();
    else if (hadFocus !== null) (hadFocus && this.details.element.querySelector(`[aria-label="${CSS.escape(hadFocus)}"]:not(:disabled)`) || byId("details-title"))?.focus();
  }

  closeDetails() {
    this.select(null);
    this._focusView();
  }

  /** The primitive before or after, in the order of the view. */
  step(event, direction) {
    if (this.view === "table") return this.views.table.neighbour(event, direction);
    const events = event.branch.events;
    for (let i = event.place + direction; events[i]; i += direction) if (!events[i].isConstant) return events[i];
    return direction < 0 ? event.branch.fork : event.branch.join;
  }

  firstShown() {
    return this.trace.primitives.find((event) => event.isShown) ?? null;
  }

  goTo(event) {
    this.showView("timeline");
    this.select(event, { reveal: true, open: true });
  }

  showTranscript(branch, event) {
    this.details.element.classList.remove("is-open");
    this.showView("transcript");
    this.views.transcript.show(branch, event);
  }

  // -- Views --

  showView(name) {
    this.view = name;
    for (const key of Object.keys(VIEWS)) {
      const tab = byId(`tab-${key}`);
      tab.setAttribute("aria-selected", String(key === name));
      tab.tabIndex = key === name ? 0 : -1;
    }
    this.tip.hide();
    const { element } = this.views[name];
    byId("view").replaceChildren(element);
    if (this.trace) {
      this.wantsReveal = Boolean(this.selected);
      this.views[name].update("view");
      if (this.selected) this.views[name].update("selection");
      this.wantsReveal = false;
    }
    this.remember();
  }

  _focusView() {
    const { element } = this.views[this.view];
    (element.querySelector("canvas[tabindex]") ?? element.querySelector("[tabindex='0']"))?.focus({ preventScroll: true });
  }

  _buildTabs() {
    Object.entries(VIEWS).forEach(([key, title]) => {
      byId("tabs").append(make("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`, onclick: () => this.showView(key) }, title));
      const { element } = this.views[key];
      element.id = `panel-${key}`;
      element.setAttribute("role", "tabpanel");
      element.setAttribute("aria-labelledby", `tab-${key}`);
    });
    byId("tabs").addEventListener("keydown", (event) => {
      const names = Object.keys(VIEWS);
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      this.showView(names[(names.indexOf(this.view) + step + names.length) % names.length]);
      byId(`tab-${this.view}`).focus();
    });
  }

  // -- Head --

  _drawHead() {
    const { trace } = this;
    const programs = [...new Set(trace.runs.map((run) => run.program))];
    const title = programs.length === 1 ? programs[0] : programs.length ? counted(programs.length, "program") : "Empty trace";
    byId("title").textContent = glimpse(title, 80);
    document.title = `${glimpse(title, 60)} · Palmette trace`;
    const models = list(trace.data.backends).map(record).map((each) => [each.model_name, each.kind].filter(Boolean).map(text).join(" · "));
    const created = new Date(text(trace.data.created));
    const about = [...new Set(models)];
    if (!Number.isNaN(created.getTime())) about.push(created.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }));
    byId("about").textContent = about.join(" · ");
    byId("about").title = trace.data.palmette ? `Written by Palmette ${text(trace.data.palmette)}` : "";
    const { totals } = trace;
    const bad = trace.failedRuns + totals.failed;
    const failedTold = trace.failedRuns ? counted(trace.failedRuns, "run") : totals.stopped ? `${grouped(totals.stopped)} stopped` : "";
    byId("totals").replaceChildren(
      total("Wall time", duration(trace.finish - trace.begin)),
      total("Runs", grouped(trace.runs.length)),
      total("Primitives", grouped(totals.primitives)),
      total("Failed", `${totals.failed ? "✕ " : ""}${grouped(totals.failed)}`, failedTold, bad ? "bad" : ""),
      total("Hit rate", percent(totals.hitRate), totals.prompt ? `of ${grouped(totals.prompt)}` : ""),
      make("div", { class: "total total-tokens" }, make("span", { class: "total-label" }, `Tokens: ${grouped(totals.prompt)} in prompts, ${grouped(totals.completion)} generated`), tokenStack(totals), tokenLegend(totals)));
  }

  // -- Filters and search --

  _fillFilters() {
    const { trace } = this;
    const options = (key, title, values, name = (value) => value) => {
      const select = byId(`filter-${key}`);
      const counts = new Map();
      for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
      select.replaceChildren(make("option", { value: "" }, title), ...[...counts].slice(0, 500).map(([value, number_]) => make("option", { value }, `${glimpse(name(value), 40)} (${grouped(number_)})`)));
    };
    options("status", "Any status", trace.primitives.map((event) => event.status), statusName);
    options("kind", "All kinds", trace.events.map((event) => event.kind));
    options("program", "All programs", trace.runs.map((run) => run.program));
  }

  setFilter(key, value) {
    this.filters[key] = value;
    this._filter();
    this._search();
    for (const view of Object.values(this.views)) if (view === this.views[this.view] || view === this.views.timeline) view.update("filter");
    this.remember();
  }

  _filter() {
    const { status, kind, program } = this.filters;
    for (const event of this.trace.events) {
      event.isShown = (!status || event.status === status) && (!kind || event.kind === kind) && (!program || event.run.program === program);
    }
    for (const key of Object.keys(this.filters)) {
      byId(`filter-${key}`).value = this.filters[key];
      byId(`filter-${key}`).classList.toggle("is-set", Boolean(this.filters[key]));
    }
  }

  setQuery(query) {
    this.query = query;
    this._search();
    this.views[this.view].update("search");
    this.remember();
  }

  _search() {
    const wanted = this.query.trim().toLowerCase();
    this.matches = wanted && this.trace ? this.trace.events.filter((event) => event.isShown && haystack(event).includes(wanted)) : [];
    // Frames around thousands tell nobody anything, and take time.
    this.found = this.matches.slice(0, MARKS_SHOWN);
    this._tellFound();
  }

  _tellFound() {
    const place = this.matches.indexOf(this.selected);
    const total_ = this.matches.length;
    byId("search-count").textContent = !this.query.trim() ? "" : !total_ ? "none" : place < 0 ? `${grouped(total_)} found` : `${grouped(place + 1)} of ${grouped(total_)}`;
    byId("search-previous").disabled = byId("search-next").disabled = !total_;
  }

  goToMatch(step) {
    if (!this.matches?.length) return;
    const place = this.matches.indexOf(this.selected);
    const next = place < 0 ? (step > 0 ? 0 : this.matches.length - 1) : (place + step + this.matches.length) % this.matches.length;
    this.select(this.matches[next], { reveal: true });
    this._tellFound();
  }

  // -- The address keeps what is shown --

  remember() {
    if (!this.trace || this.isRecalling) return;
    clearTimeout(this.memory);
    this.memory = setTimeout(() => history.replaceState(null, "", `#${this.address()}`), 60);
  }

  address() {
    const parts = new URLSearchParams();
    parts.set("view", this.view);
    if (this.selected) parts.set("at", this.selected.reference);
    for (const [key, value] of Object.entries(this.filters)) if (value) parts.set(key, value);
    if (this.query) parts.set("find", this.query);
    const times = this.views.timeline.visible;
    if (times) parts.set("time", times.map((time) => (time - this.trace.begin).toPrecision(9)).join(","));
    const { key, isDescending } = this.views.table.sort;
    if (key !== "start" || isDescending) parts.set("sort", `${isDescending ? "-" : ""}${key}`);
    const { branch } = this.views.transcript;
    if (this.view === "transcript" && branch) parts.set("branch", `${branch.run.index}.${branch.index}`);
    return parts.toString();
  }

  _recall() {
    const parts = new URLSearchParams(location.hash.slice(1));
    this.isRecalling = true;
    for (const key of Object.keys(this.filters)) {
      const value = parts.get(key) ?? "";
      this.filters[key] = [...byId(`filter-${key}`).options].some((option) => option.value === value) ? value : "";
    }
    this._filter();
    this.query = parts.get("find") ?? "";
    byId("search").value = this.query;
    this._search();
    if (Object.hasOwn(VIEWS, parts.get("view") ?? "")) this.view = parts.get("view");
    const { timeline, table, transcript } = this.views;
    timeline.layOut();
    const times = (parts.get("time") ?? "").split(",").map(Number);
    if (times.length === 2 && times.every(Number.isFinite) && times[1] > times[0]) timeline.setVisible(this.trace.begin + times[0], this.trace.begin + times[1]);
    const sort = parts.get("sort");
    if (sort) table.setSort(sort.replace(/^-/u, ""), sort.startsWith("-"));
    const [run, branch] = (parts.get("branch") ?? "").split(".").map(Number);
    this.selected = this.trace.event(parts.get("at"));
    transcript.branch = this.trace.runs[run]?.branches[branch] ?? this.selected?.branch ?? transcript.branch;
    this.isRecalling = false;
    this._tellFound();
  }

  // -- What people do --

  _listen() {
    let pause = 0;
    byId("search").addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => this.setQuery(byId("search").value), SEARCH_PAUSE);
    });
    byId("search-form").addEventListener("submit", (event) => event.preventDefault());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        clearTimeout(pause);
        if (byId("search").value !== this.query) this.setQuery(byId("search").value);
        this.goToMatch(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        event.preventDefault();
        byId("search").value = "";
        this.setQuery("");
        this._focusView();
      } else return;
      event.stopPropagation();
    });
    byId("search-next").addEventListener("click", () => this.goToMatch(1));
    byId("search-previous").addEventListener("click", () => this.goToMatch(-1));
    for (const key of Object.keys(this.filters)) byId(`filter-${key}`).addEventListener("change", (event) => this.setFilter(key, event.target.value));
    document.addEventListener("keydown", (event) => this._onKey(event));
    window.addEventListener("hashchange", () => {
      if (!this.trace || location.hash.slice(1) === this.address()) return;
      this._recall();
      this.showView(this.view);
      this.details.update();
    });
    document.querySelector("[data-skip]").addEventListener("click", (event) => {
      event.preventDefault();
      this._focusView();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      readPalette();
      if (this.trace) this.views[this.view].update("theme");
    });
    window.addEventListener("resize", readPalette);
    byId("help-button").addEventListener("click", () => byId("help").showModal());
    this._listenToFiles();
  }

  _listenToFiles() {
    const [drop, file] = [byId("drop"), byId("file")];
    for (const id of ["open-button", "drop-button"]) byId(id).addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      if (file.files[0]) this.openFile(file.files[0]);
      file.value = "";
    });
    let depth = 0; // of elements that the drag is over
    const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const leave = () => {
      depth = 0;
      drop.classList.remove("is-over");
      drop.hidden = Boolean(this.trace);
    };
    document.addEventListener("dragenter", (event) => {
      if (!holdsFiles(event)) return;
      depth += 1;
      drop.hidden = false;
      drop.classList.add("is-over");
    });
    document.addEventListener("dragleave", (event) => {
      if (holdsFiles(event) && --depth <= 0) leave();
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      leave();
      if (event.dataTransfer?.files[0]) this.openFile(event.dataTransfer.files[0]);
    });
  }

  _onKey(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const { key, target } = event;
    if (byId("help").open) return;
    if (key === "Escape") {
      if (!byId("drop").hidden && this.trace) byId("drop").hidden = true;
      else if (this.selected || this.details.element.classList.contains("is-open")) this.closeDetails();
      else return;
      event.preventDefault();
      return;
    }
    if (!this.trace || target.closest?.("input, select, textarea, dialog")) return;
    const isButton = Boolean(target.closest?.("button, [role='button']"));
    if (this._onPageKey(key)) event.preventDefault();
    else if (!target.closest?.(".side") && !(isButton && (key === "Enter" || key === " ")) && this._onViewKey(key, event)) event.preventDefault();
  }

  _onPageKey(key) {
    const views = Object.keys(VIEWS);
    if (key === "/") {
      byId("search").focus();
      byId("search").select();
    } else if (key === "n") this.goToMatch(1);
    else if (key === "N") this.goToMatch(-1);
    else if (key === "?") byId("help").showModal();
    else if (/^[1-4]$/u.test(key) && views[Number(key) - 1]) this.showView(views[Number(key) - 1]);
    else return false;
    return true;
  }

  _onViewKey(key, event) {
    const view = this.views[this.view];
    if (key === "Enter" && this.selected && this.view !== "prefixes") {
      this.select(this.selected, { open: true, focus: true });
      return true;
    }
    return view.onKey(key, event);
  }

  _buildHelp() {
    byId("help").append(
      make("h2", { id: "help-title" }, "Keys"),
      make("dl", { class: "facts" }, ...KEYS.flatMap(([keys, what]) => [make("dt", {}, ...keys.split(" ").flatMap((key) => [make("kbd", {}, key), " "])), make("dd", {}, what)])),
      make("form", { method: "dialog" }, make("button", { class: "primary" }, "Close")));
  }
}

// -- Parts of it --

function total(name, value, aside = "", look = "") {
  return make("dl", { class: `total ${look}` }, make("dt", {}, name), make("dd", { class: "total-value" }, value, aside ? make("small", {}, aside) : null));
}

/** All that a search looks through, in small letters; made when first asked for. */
function haystack(event) {
  if (event.haystack === undefined) {
    const parts = [event.name, event.variable, event.text, text(event.data.error)];
    for (const option of list(event.data.options)) parts.push(text(record(option).text));
    // A program's name finds what it asked for, not each of its constants.
    if (!event.isConstant) parts.push(event.run.program);
    event.haystack = parts.join("\n").toLowerCase();
  }
  return event.haystack;
}

/** A file's text; one that is compressed with gzip is told by its first bytes. */
async function readFile(file) {
  const bytes = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return file.text();
  return new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Start the page with the trace that is embedded in it, if there is one. */
function begin() {
  performance.mark("palmette:begin");
  readPalette();
  const app = new App();
  // For the browser's console and for tests.
  window.palmette = app;
  let data = null;
  try {
    data = JSON.parse(byId("trace").textContent);
    if (data !== null) app.load(data);
  } catch (error) {
    byId("drop-error").textContent = `The trace in this page cannot be shown: ${error.message}`;
  }
  if (!app.trace) {
    byId("drop").hidden = false;
    app.showView("timeline");
    byId("drop-button").focus();
  }
  requestAnimationFrame(() => setTimeout(() => performance.measure("palmette:first-frame", "palmette:begin")));
}

begin();
