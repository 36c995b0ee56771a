// ---- Table of all primitives. Only the rows in sight are elements ----

const SPARE_ROWS = 6; // above and below what is visible

const numberColumn = (key, title, width, value, show = grouped) => ({ key, title, width, isNumber: true, value, show: (event) => show(value(event)) });
const textColumn = (key, title, width, value, show = value) => ({ key, title, width, value, show });

const COLUMNS = [
  textColumn("status", "Status", 88, (event) => statusName(event.status), (event) => `${event.isBad ? "✕ " : event.isStopped ? "⊘ " : ""}${statusName(event.status)}`),
  textColumn("kind", "Kind", 84, (event) => event.kind),
  textColumn("name", "Name", 124, (event) => event.variable || event.name),
  numberColumn("start", "Start", 76, (event) => (event.hasBegun ? event.from - event.origin : null), duration),
  numberColumn("time", "Time", 76, (event) => event.seconds, duration),
  numberColumn("prompt", "Prompt", 72, (event) => (event.isCall ? event.cached + event.prefilled || event.promptTokens : null)),
  numberColumn("cached", "Cached", 72, (event) => (event.isCall ? event.cached : null)),
  numberColumn("prefilled", "Prefilled", 80, (event) => (event.isCall ? event.prefilled : null)),
  numberColumn("hits", "Hits", 60, (event) => event.hitRate, percent),
  numberColumn("forced", "Forced", 68, (event) => (event.isCall ? event.forced : null)),
  numberColumn("decoded", "Decoded", 76, (event) => (event.isCall ? event.decoded : null)),
  numberColumn("queued", "Queued", 76, (event) => event.queued, duration),
  numberColumn("prefill", "Prefill", 76, (event) => event.prefill, duration),
  numberColumn("decode", "Decode", 76, (event) => event.decode, duration),
  textColumn("program", "Program", 140, (event) => event.run.program),
  numberColumn("run", "Run", 52, (event) => event.run.index),
  textColumn("branch", "Branch", 80, (event) => event.branch.label),
  textColumn("text", "Text", 420, (event) => glimpse(event.data.error || event.text, 120)),
];

class Table {
  constructor(app) {
    this.app = app;
    this.sort = { key: "start", isDescending: false };
    this.events = [];
    this.rows = new Map(); // by position: the elements in sight
    this.redraw = eachFrame(() => this.draw());
    this.template = COLUMNS.map((column) => `${(column.width / 14).toFixed(3)}rem`).join(" ");
    this.head = make("div", { class: "grid-row grid-head", role: "row", "aria-rowindex": "1", style: { "grid-template-columns": this.template } });
    this.body = make("div", { class: "grid-body", role: "rowgroup" });
    this.caption = make("span", {});
    const width = COLUMNS.reduce((sum, column) => sum + column.width, 16);
    this.grid = make("div", { class: "grid", role: "grid", "aria-label": "Primitives", "aria-colcount": String(COLUMNS.length), style: { width: `max(100%, ${(width / 14).toFixed(2)}rem)` } }, this.head, this.body);
    this.scroller = make("div", { class: "table-wrap", tabindex: "0", "aria-label": "Primitives, scrollable" }, this.grid);
    this.element = make("div", {}, make("div", { class: "strip" }, this.caption), this.scroller);
    this.scroller.addEventListener("scroll", this.redraw, { passive: true });
    new ResizeObserver(this.redraw).observe(this.scroller);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".grid-row");
      if (row) this.app.select(this.events[Number(row.dataset.position)], { open: true });
    });
  }

  get rowHeight() {
    return Math.round((30 * palette.em) / 14);
  }

  load() {
    for (const event of this.app.trace.events) event.origin = this.app.trace.begin;
    this.events = [];
  }

  update(change) {
    if (change !== "selection" && change !== "search") this._collect();
    else if (change === "selection" && this.app.wantsReveal) this._reveal();
    this.draw();
  }

  setSort(key, isDescending) {
    if (!COLUMNS.some((column) => column.key === key)) return;
    this.sort = { key, isDescending };
    if (this.app.trace) this._collect();
    this.app.remember();
  }

  /** Those that the filters let through, sorted; what has no value comes last. */
  _collect() {
    const { key, isDescending } = this.sort;
    const column = COLUMNS.find((each) => each.key === key);
    const asked = this.app.filters.kind;
    const shown = this.app.trace.events.filter((event) => event.isShown && (!event.isConstant || event.kind === asked));
    const keyed = shown.map((event) => ({ event, value: column.value(event) }));
    const sign = isDescending ? -1 : 1;
    keyed.sort((a, b) => {
      const [x, y] = [a.value, b.value];
      if (x === y) return a.event.index - b.event.index;
      if (x === null || x === "") return 1;
      if (y === null || y === "") return -1;
      return sign * (column.isNumber ? x - y : x < y ? -1 : 1);
    });
    this.events = keyed.map((each) => each.event);
    this.positions = new Map(this.events.map((event, position) => [event, position]));
    const all = this.app.trace.primitives.length;
    this.caption.textContent = this.events.length === all ? counted(all, "primitive") : `${grouped(this.events.length)} of ${counted(all, "primitive")}`;
    this._drawHead();
    this.body.replaceChildren();
    this.rows.clear();
  }

  _drawHead() {
    const focused = document.activeElement?.dataset?.key;
    this.head.replaceChildren(...COLUMNS.map((column) => {
      const isSorted = column.key === this.sort.key;
      const direction = this.sort.isDescending ? "descending" : "ascending";
      const arrow = isSorted ? (this.sort.isDescending ? " ↓" : " ↑") : "";
      const button = make("button", { type: "button", "data-key": column.key, onclick: () => {
        // Numbers are looked at from the largest: that is what one looks for.
        this.setSort(column.key, isSorted ? !this.sort.isDescending : Boolean(column.isNumber) && column.key !== "start" && column.key !== "run");
        this.draw();
      } }, `${column.title}${arrow}`);
      return make("div", { role: "columnheader", class: column.isNumber ? "number" : null, "aria-sort": isSorted ? direction : "none" }, button);
    }));
    if (focused) this.head.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    this.grid.setAttribute("aria-rowcount", String(this.events.length + 1));
  }

  _reveal() {
    const position = this.positions?.get(this.app.selected);
    if (position === undefined) return;
    const top = position * this.rowHeight;
    const room = this.scroller.clientHeight - this.head.offsetHeight - this.rowHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top > this.scroller.scrollTop + room) this.scroller.scrollTop = top - room;
  }

  draw() {
    if (!this.element.isConnected || !this.app.trace) return;
    const height = this.rowHeight;
    this.body.style.height = `${Math.max(this.events.length, 1) * height}px`;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / height) - SPARE_ROWS);
    const last = Math.min(this.events.length, first + Math.ceil(this.scroller.clientHeight / height) + 2 * SPARE_ROWS);
    for (const [position, element] of this.rows) {
      if (position >= first && position < last) continue;
      element.remove();
      this.rows.delete(position);
    }
    const found = new Set(this.app.found);
    for (let position = first; position < last; position++) {
      if (!this.rows.has(position)) this._add(position, height);
      const event = this.events[position];
      const row = this.rows.get(position);
      row.setAttribute("aria-selected", String(event === this.app.selected));
      row.classList.toggle("is-found", found.has(event));
    }
    if (!this.events.length) this.body.replaceChildren(make("p", { class: "nothing" }, "No primitive passes the filters."));
  }

  _add(position, height) {
    const event = this.events[position];
    const cells = COLUMNS.map((column) => {
      const shown = column.show(event);
      const cell = make("div", { role: "gridcell", class: `${column.isNumber ? "number" : ""}${shown === "0" || shown === "–" ? " zero" : ""}` });
      if (column.key === "kind") cell.append(make("span", { class: `badge ${event.family}` }, shown));
      else cell.textContent = shown;
      if (column.key === "status" && event.isBad) cell.classList.add("error");
      return cell;
    });
    const row = make("div", {
      class: "grid-row", role: "row", "aria-rowindex": String(position + 2), "data-position": String(position),
      style: { "grid-template-columns": this.template, top: `${position * height}px`, height: `${height}px` },
    }, ...cells);
    this.rows.set(position, row);
    this.body.append(row);
  }

  neighbour(event, step) {
    const position = this.positions?.get(event);
    return position === undefined ? this.events[0] ?? null : this.events[position + step] ?? null;
  }

  onKey(key) {
    const { app } = this;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 2);
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
    let next = null;
    if (key in steps) next = app.selected && this.positions.has(app.selected) ? this.events[clamp(this.positions.get(app.selected) + steps[key], 0, this.events.length - 1)] : this.events[0];
    else if (key === "Home") next = this.events[0];
    else if (key === "End") next = this.events[this.events.length - 1];
    else return false;
    if (next) app.select(next, { reveal: true });
    return true;
  }
}
