// ---- Timeline: rows of bars on a canvas, with an axis, a map of the whole above ----
// Only what is visible is drawn, on one canvas that stays in place while the rows scroll by.

const AXIS = 28; // height of the time axis, pixels
const TICK_DISTANCE = 76; // pixels between ticks, at least
const MARGIN = 0.012; // of the whole, left free on both sides when everything is shown
const CLICK_SLACK = 4; // pixels a pointer may move and still click
const GRIP = 7; // pixels around an edge of the brush that take hold of it

class Timeline {
  constructor(app) {
    this.app = app;
    this.rows = [];
    this.hover = null;
    this.pointers = new Map();
    this.redraw = eachFrame(() => this.draw());
    this._build();
    this._listen();
  }

  // -- What the app asks of a view --

  /** A new trace: everything is laid out anew and shown whole. */
  load() {
    this.range = null;
    this.layOut();
  }

  update(change) {
    if (change === "filter") this.layOut();
    if (change === "filter" || change === "theme" || change === "view") this.activity = null;
    if (change === "selection" && this.app.selected && this.app.wantsReveal) this.reveal(this.app.selected);
    this.resize();
  }

  /** The visible times, for the address bar: null when everything is shown. */
  get visible() {
    return this.range;
  }

  setVisible(begin, end) {
    const { trace } = this.app;
    const whole = this._whole();
    const least = Math.max(1e-6, (whole[1] - whole[0]) * 1e-7);
    const span = Math.max(end - begin, least);
    if (!(span < (whole[1] - whole[0]) * 0.9999)) this.range = null;
    else {
      const center = (begin + end) / 2;
      const low = clamp(center - span / 2, whole[0], whole[1] - span);
      this.range = [low, low + span];
    }
    if (trace) this.app.remember();
    this.redraw();
  }

  // -- Elements --

  _build() {
    const swatch = (name, title) => [make("span", { class: `swatch ${name}` }), title];
    this.collapseButton = make("button", { type: "button", onclick: () => this.toggleAll() }, "Collapse all");
    const button = (label, sign, action) => make("button", { type: "button", "aria-label": label, title: label, onclick: action }, sign);
    this.strip = make(
      "div", { class: "strip" },
      make("div", { class: "legend" },
        make("span", {}, ...swatch("gen", "gen: queued, prefill, decode")),
        make("span", {}, ...swatch("select", "select")),
        make("span", {}, ...swatch("failed", "✕ failed")),
        make("span", {}, ...swatch("cancelled", "⊘ cancelled"))),
      make("div", { class: "buttons" }, this.collapseButton,
        button("Zoom out (−)", "−", () => this.zoom(1.6)),
        button("Zoom in (+)", "+", () => this.zoom(1 / 1.6)),
        make("button", { type: "button", title: "Show everything (0)", onclick: () => this.fit() }, "Fit")));
    this.map = make("canvas", { class: "minimap", "aria-hidden": "true" });
    this.canvas = make("canvas", {
      tabindex: "0", role: "application", "aria-label": "Timeline. Arrow keys move between primitives, Enter shows details, plus and minus zoom.",
    });
    this.spacer = make("div", {}, this.canvas);
    this.scroller = make("div", { class: "scroller" }, this.spacer);
    this.element = make("div", {}, this.strip, this.map, this.scroller);
  }

  _listen() {
    const { canvas, map, scroller } = this;
    scroller.addEventListener("scroll", () => {
      this._setHover(null);
      this.redraw();
    }, { passive: true });
    new ResizeObserver(() => this.resize()).observe(this.element);
    canvas.addEventListener("wheel", (event) => this._onWheel(event), { passive: false });
    map.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = map.getBoundingClientRect();
      this.zoom(Math.exp(event.deltaY * 0.0016), this._mapTime(event.clientX - box.left));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => this._onDown(event));
    canvas.addEventListener("pointermove", (event) => this._onMove(event));
    canvas.addEventListener("pointerup", (event) => this._onUp(event));
    canvas.addEventListener("pointercancel", (event) => this._release(event));
    canvas.addEventListener("pointerleave", () => this._setHover(null));
    canvas.addEventListener("dblclick", (event) => {
      const found = this._hit(event);
      if (found?.event) this.zoomTo(found.event);
    });
    canvas.addEventListener("focus", this.redraw);
    canvas.addEventListener("blur", this.redraw);
    map.addEventListener("pointerdown", (event) => this._onBrush(event));
    map.addEventListener("pointermove", (event) => {
      if (!this.brush) map.style.cursor = this._brushPart(event.offsetX).cursor;
    });
  }

  // -- Geometry --

  layOut() {
    const program = this.app.filters.program;
    this.runs = this.app.trace.runs.filter((run) => !program || run.program === program);
    this.rows = layOut(this.runs);
    const parents = this.app.trace.branches.filter((branch) => branch.children.length);
    this.collapseButton.hidden = !parents.length;
    this.collapseButton.textContent = parents.some((branch) => !branch.isCollapsed) ? "Collapse all" : "Expand all";
    this.resize();
  }

  get rowHeight() {
    const base = this.rows.length <= 24 ? 30 : this.rows.length <= 240 ? 24 : 20;
    return Math.round((base * palette.em) / 14);
  }

  get gutter() {
    return this.width < 560 ? 92 : Math.round(clamp(this.width * 0.19, 150, 420));
  }

  resize() {
    if (!this.element.isConnected || !this.element.clientWidth) return;
    this.spacer.style.height = `${AXIS + this.rows.length * this.rowHeight + 8}px`;
    this.width = this.scroller.clientWidth;
    this.height = this.scroller.clientHeight;
    this.canvas.style.height = `${this.height}px`;
    // Drawn at once: a canvas that is resized is empty until it is.
    this.draw();
  }

  _whole() {
    const { begin, finish } = this.app.trace;
    const margin = (finish - begin) * MARGIN;
    return [begin - margin, finish + margin];
  }

  get _times() {
    return this.range ?? this._whole();
  }

  _x(time) {
    const [begin, end] = this._times;
    return this.gutter + ((time - begin) / (end - begin)) * (this.width - this.gutter);
  }

  _time(x) {
    const [begin, end] = this._times;
    return begin + ((x - this.gutter) / (this.width - this.gutter)) * (end - begin);
  }

  _y(row) {
    return AXIS + row * this.rowHeight - this.scroller.scrollTop;
  }

  /** Where an event stands now, in the page: for tests, and for who places something beside it. */
  locate(event) {
    const box = this.canvas.getBoundingClientRect();
    const [left, right] = [this._x(event.from), this._x(event.to)];
    return { x: box.left + (left + Math.max(right, left + 2)) / 2, y: box.top + this._y(event.row) + this.rowHeight / 2 };
  }

  _hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (y < AXIS) return { x, y, isAxis: true };
    const index = Math.floor((y - AXIS + this.scroller.scrollTop) / this.rowHeight);
    const row = this.rows[index];
    if (!row) return { x, y };
    if (x < this.gutter) return { x, y, row, index, isGutter: true };
    const isLow = row.thin.length && y - this._y(index) > this.rowHeight * 0.68;
    return { x, y, row, index, event: this._eventAt(isLow ? row.thin : row.events, x) ?? this._eventAt(row.thin, x) };
  }

  /** The event at or very near to `x`; markers before bars, later before earlier. */
  _eventAt(events, x) {
    let best = null;
    for (let i = upperBound(events, this._time(x + 5), (each) => each.from) - 1, seen = 0; i >= 0 && seen < 4000; i--, seen++) {
      const event = events[i];
      const [left, right] = [this._x(event.from), this._x(event.to)];
      const distance = x < left ? left - x : x > right ? x - right : 0;
      if (distance > 5) continue;
      const isBetter = !best || distance < best.distance || (distance === best.distance && right - left < best.width);
      if (isBetter) best = { event, distance, width: right - left };
      if (best.distance === 0 && best.width > 6) break;
    }
    return best?.event ?? null;
  }

  // -- Moving about --

  zoom(factor, around = null) {
    const [begin, end] = this._times;
    const selected = this.app.selected;
    const isSeen = selected && selected.from <= end && selected.to >= begin;
    const center = around ?? (isSeen ? clamp((selected.from + selected.to) / 2, begin, end) : (begin + end) / 2);
    this.setVisible(center - (center - begin) * factor, center + (end - center) * factor);
  }

  pan(share) {
    const [begin, end] = this._times;
    const distance = (end - begin) * share;
    this.setVisible(begin + distance, end + distance);
  }

  fit() {
    this.range = null;
    this.app.remember();
    this.redraw();
  }

  zoomTo(event) {
    const span = Math.max(event.to - event.from, 1e-6) * 1.4;
    const center = (event.from + event.to) / 2;
    this.setVisible(center - span / 2, center + span / 2);
  }

  /** Scroll and pan, no further than needed, until the event is in sight. */
  reveal(event) {
    if (event.row === null || !this.height) return;
    for (let branch = event.branch.parent, changed = false; ; branch = branch.parent) {
      if (branch === null) {
        if (changed) this.layOut();
        break;
      }
      if (branch.isCollapsed && event.branch.isHidden) {
        branch.isCollapsed = false;
        changed = true;
      }
    }
    const top = event.row * this.rowHeight;
    const room = this.height - AXIS - this.rowHeight;
    const scrolled = this.scroller.scrollTop;
    if (top < scrolled) this.scroller.scrollTop = Math.max(0, top - this.rowHeight);
    else if (top > scrolled + room) this.scroller.scrollTop = top - room + this.rowHeight;
    const [begin, end] = this._times;
    if (event.to < begin || event.from > end) {
      const center = (event.from + event.to) / 2;
      this.setVisible(center - (end - begin) / 2, center + (end - begin) / 2);
    }
  }

  toggle(row) {
    const parents = row.branches.filter((branch) => branch.children.length);
    if (!parents.length) return false;
    const isCollapsed = parents.every((branch) => branch.isCollapsed);
    for (const branch of parents) branch.isCollapsed = !isCollapsed;
    this.layOut();
    return true;
  }

  toggleAll() {
    const parents = this.app.trace.branches.filter((branch) => branch.children.length);
    const doesCollapse = parents.some((branch) => !branch.isCollapsed);
    for (const branch of parents) branch.isCollapsed = doesCollapse;
    this.layOut();
  }

  /** The event one step on in its branch (sideways), or nearest in time in the rows above or below. */
  neighbour(event, direction) {
    if (direction === "left" || direction === "right") {
      const step = direction === "left" ? -1 : 1;
      const events = event.branch.events;
      for (let i = event.place + step; i >= 0 && i < events.length; i += step) if (!events[i].isConstant) return events[i];
      return direction === "left" ? event.branch.fork : event.branch.join;
    }
    const step = direction === "up" ? -1 : 1;
    for (let i = event.row + step; i >= 0 && i < this.rows.length; i += step) {
      const found = nearest(this.rows[i].events, event);
      if (found) return found;
    }
    return null;
  }

  onKey(key, event) {
    const { app } = this;
    const arrows = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };
    if (arrows[key]) {
      if (event.shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) this.pan(key === "ArrowLeft" ? -0.2 : 0.2);
      else {
        const next = app.selected ? this.neighbour(app.selected, arrows[key]) : app.firstShown();
        if (next) app.select(next, { reveal: true });
      }
    } else if (key === "+" || key === "=" || key === "w") this.zoom(1 / 1.6);
    else if (key === "-" || key === "s") this.zoom(1.6);
    else if (key === "a") this.pan(-0.2);
    else if (key === "d") this.pan(0.2);
    else if (key === "0" || key === "f") this.fit();
    else if (key === "z" && app.selected) this.zoomTo(app.selected);
    else if (key === "c" && app.selected) this.toggle(this.rows[app.selected.branch.row]);
    else if (key === "Home" || key === "End") {
      const shown = app.trace.primitives.filter((each) => each.isShown);
      if (shown.length) app.select(key === "Home" ? shown[0] : shown[shown.length - 1], { reveal: true });
    } else if (key === "PageDown" || key === "PageUp") this.scroller.scrollTop += (key === "PageDown" ? 0.85 : -0.85) * this.height;
    else return false;
    return true;
  }

  // -- Pointers --

  _onWheel(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const isPinch = event.ctrlKey || event.metaKey;
    const hasOverflow = this.scroller.scrollHeight > this.scroller.clientHeight + 1;
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const scale = event.deltaMode === 1 ? 16 : 1; // lines to pixels
    if (isPinch || (!isSideways && (y < AXIS || !hasOverflow))) {
      event.preventDefault();
      const speed = isPinch && Math.abs(event.deltaY) < 40 ? 0.012 : 0.0018;
      this.zoom(Math.exp(event.deltaY * scale * speed), this._time(Math.max(x, this.gutter)));
    } else if (isSideways) {
      event.preventDefault();
      const moved = (event.deltaX || event.deltaY) * scale;
      this.pan(moved / (this.width - this.gutter));
    }
  }

  _onDown(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    const [begin, end] = this._times;
    this.grab = { x: event.clientX, y: event.clientY, begin, end, scroll: this.scroller.scrollTop, moved: false };
    this.pinch = null;
  }

  _onMove(event) {
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) {
      this._setHover(this._hit(event), event);
      return;
    }
    pointer.x = event.clientX;
    pointer.y = event.clientY;
    if (this.pointers.size === 2) this._onPinch();
    else if (this.grab) this._onDrag(event);
  }

  _onDrag(event) {
    const { grab } = this;
    const [dx, dy] = [event.clientX - grab.x, event.clientY - grab.y];
    if (!grab.moved && Math.hypot(dx, dy) < CLICK_SLACK) return;
    grab.moved = true;
    this.canvas.classList.add("is-dragging");
    this._setHover(null);
    const shift = (-dx / (this.width - this.gutter)) * (grab.end - grab.begin);
    this.setVisible(grab.begin + shift, grab.end + shift);
    if (event.pointerType === "mouse") this.scroller.scrollTop = grab.scroll - dy;
  }

  _onPinch() {
    const [a, b] = [...this.pointers.values()];
    const distance = Math.max(20, Math.abs(a.x - b.x));
    const left = this.canvas.getBoundingClientRect().left;
    if (!this.pinch) this.pinch = { distance, time: this._time((a.x + b.x) / 2 - left), times: this._times };
    const { times, time } = this.pinch;
    const factor = this.pinch.distance / distance;
    this.setVisible(time - (time - times[0]) * factor, time + (times[1] - time) * factor);
    if (this.grab) this.grab.moved = true;
  }

  _onUp(event) {
    const wasClick = this.grab && !this.grab.moved && this.pointers.size === 1;
    this._release(event);
    if (!wasClick) return;
    const found = this._hit(event);
    if (found.isGutter) {
      if (!this.toggle(found.row)) this._selectFirst(found.row);
    } else if (found.event) this.app.select(found.event, { open: true });
    else if (!found.isAxis) this.app.select(null);
  }

  _selectFirst(row) {
    const events = row.branches.flatMap((branch) => branch.events);
    const first = events.find((each) => !each.isConstant) ?? events[0];
    if (first) this.app.select(first, { open: true });
  }

  _release(event) {
    this.pointers.delete(event.pointerId);
    this.grab = null;
    this.pinch = null;
    this.canvas.classList.remove("is-dragging");
  }

  _setHover(found, event = null) {
    const isSame = this.hover?.event === found?.event && this.hover?.x === found?.x;
    this.hover = found;
    this.canvas.classList.toggle("is-over", Boolean(found?.event || (found?.isGutter && found.row.branches.some((each) => each.children.length))));
    if (found?.event && event) this.app.tip.show(event.clientX, event.clientY, eventTip(found.event));
    else if (found?.isGutter && event) this.app.tip.show(event.clientX, event.clientY, rowTip(found.row));
    else this.app.tip.hide();
    if (!isSame) this.redraw();
  }

  // -- The map above --

  _mapX(time) {
    const [begin, end] = this._whole();
    return this.gutter + ((time - begin) / (end - begin)) * (this.width - this.gutter);
  }

  _mapTime(x) {
    const [begin, end] = this._whole();
    return begin + ((Math.max(x, this.gutter) - this.gutter) / (this.width - this.gutter)) * (end - begin);
  }

  _brushPart(x) {
    const [left, right] = this._times.map((time) => this._mapX(time));
    if (this.range && Math.abs(x - left) <= GRIP) return { part: "left", cursor: "ew-resize" };
    if (this.range && Math.abs(x - right) <= GRIP) return { part: "right", cursor: "ew-resize" };
    if (this.range && x > left && x < right) return { part: "middle", cursor: "grab" };
    return { part: "new", cursor: "crosshair" };
  }

  _onBrush(down) {
    if (down.button !== 0) return;
    const { map } = this;
    const { part } = this._brushPart(down.offsetX);
    const from = this._mapTime(down.offsetX);
    const [begin, end] = this._times;
    this.brush = part;
    map.setPointerCapture(down.pointerId);
    const move = (event) => {
      const time = this._mapTime(event.offsetX);
      if (part === "left") this.setVisible(Math.min(time, end - 1e-6), end);
      else if (part === "right") this.setVisible(begin, Math.max(time, begin + 1e-6));
      else if (part === "middle") this.setVisible(begin + time - from, end + time - from);
      else if (Math.abs(event.offsetX - down.offsetX) > CLICK_SLACK) this.setVisible(Math.min(from, time), Math.max(from, time));
    };
    const stop = () => {
      this.brush = null;
      for (const [name, listener] of Object.entries(listeners)) map.removeEventListener(name, listener);
    };
    const listeners = { pointermove: move, pointerup: stop, pointercancel: stop };
    for (const [name, listener] of Object.entries(listeners)) map.addEventListener(name, listener);
  }

  /** How many calls run at each pixel of the map, and where something failed. */
  _activity(width) {
    if (this.activity?.width === width) return this.activity;
    const changes = new Float64Array(width + 2);
    const failures = [];
    for (const run of this.runs) {
      for (const branch of run.branches) {
        for (const event of branch.events) {
          if (!event.isShown) continue;
          if (event.isBad) failures.push(this._mapX(event.from));
          if (!event.isCall) continue;
          const left = clamp(Math.floor(this._mapX(event.from)), 0, width);
          const right = clamp(Math.ceil(this._mapX(event.to)), left + 1, width + 1);
          changes[left] += 1;
          changes[right] -= 1;
        }
      }
    }
    let sum = 0;
    let most = 0;
    const running = Array.from(changes, (each) => {
      sum += each;
      most = Math.max(most, sum);
      return sum;
    });
    this.activity = { width, running, most, failures };
    return this.activity;
  }

  _drawMap() {
    const width = this.map.clientWidth;
    const height = this.map.clientHeight;
    const context = fitCanvas(this.map, width, height);
    context.clearRect(0, 0, width, height);
    const { running, most, failures } = this._activity(Math.round(width));
    const low = height - 6;
    context.fillStyle = palette["gen-3"];
    context.beginPath();
    context.moveTo(this.gutter, low);
    for (let x = Math.floor(this.gutter); x < running.length; x++) context.lineTo(x, low - (running[x] / (most || 1)) * (low - 8));
    context.lineTo(width, low);
    context.fill();
    context.fillStyle = palette.failed;
    for (const x of failures) context.fillRect(x - 1, low, 2, 5);
    context.font = `${palette.em * 0.76}px ${palette.sans}`;
    context.textBaseline = "top";
    const [left, right] = this._times.map((time) => this._mapX(time));
    if (this.range) {
      context.globalAlpha = 0.72;
      context.fillStyle = palette.bg;
      context.fillRect(this.gutter, 0, left - this.gutter, height);
      context.fillRect(right, 0, width - right, height);
      context.globalAlpha = 1;
      context.fillStyle = palette.accent;
      context.fillRect(left, 0, Math.max(right - left, 1), 2);
      for (const x of [left, right]) {
        context.fillRect(x - 0.75, 0, 1.5, height);
        roundRect(context, x - 3, height / 2 - 9, 6, 18, 3);
        context.fill();
      }
    }
    context.fillStyle = palette["line-strong"];
    context.fillRect(this.gutter, 0, 1, height);
    context.fillStyle = palette.muted;
    const lines = most ? ["calls at once", `${grouped(most)} at most`] : ["no calls"];
    lines.forEach((line, i) => context.fillText(measure.cut(context, line, this.gutter - 14), 10, 8 + i * palette.em * 1.15));
  }

  // -- Drawing --

  draw() {
    if (!this.app.trace || !this.width || !this.element.isConnected) return;
    this._drawMap();
    const { canvas, width, height, gutter, rowHeight } = this;
    const context = fitCanvas(canvas, width, height);
    context.fillStyle = palette.panel;
    context.fillRect(0, 0, width, height);
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / rowHeight));
    const last = Math.min(this.rows.length, first + Math.ceil((height - AXIS) / rowHeight) + 1);
    const ticks = this._ticks();
    this._drawGround(context, first, last, ticks);
    context.save();
    context.beginPath();
    context.rect(gutter, AXIS, width - gutter, height - AXIS);
    context.clip();
    this._drawConnectors(context, first, last);
    for (let row = first; row < last; row++) this._drawRow(context, row);
    this._drawMarks(context);
    context.restore();
    this._drawGutter(context, first, last);
    this._drawAxis(context, ticks);
    if (!this.rows.length) this._drawNothing(context);
  }

  _drawNothing(context) {
    context.fillStyle = palette.muted;
    context.font = `${palette.em}px ${palette.sans}`;
    context.textAlign = "center";
    context.fillText("No program was run while this trace was taken.", this.width / 2, this.height / 2);
    context.textAlign = "left";
  }

  _drawGround(context, first, last, ticks) {
    const { width, gutter, rowHeight, height } = this;
    for (let i = first; i < last; i++) {
      if (this.rows[i].run.index % 2) {
        context.fillStyle = palette.bg;
        context.fillRect(0, this._y(i), width, rowHeight);
      }
      if (this.rows[i].isFirst && i > 0) {
        context.fillStyle = palette.line;
        context.fillRect(0, this._y(i), width, 1);
      }
    }
    context.fillStyle = palette.line;
    for (const { x } of ticks.marks) if (x > gutter) context.fillRect(Math.round(x), AXIS, 1, height - AXIS);
  }

  /** Lines from a fork to the branches that came of it, and from these to where they were joined. */
  _drawConnectors(context, first, last) {
    const half = this.rowHeight / 2;
    const [from, to] = this._times;
    context.lineWidth = 1;
    context.strokeStyle = palette["line-strong"];
    context.beginPath();
    for (const run of this.runs) {
      if (run.root.row >= last) break;
      for (const branch of run.branches) {
        const { parent, fork, join } = branch;
        if (!parent || branch.isHidden || branch.row < first || parent.row >= last) continue;
        if (branch.from > to && (fork?.from ?? branch.from) > to) continue;
        if ((join?.to ?? branch.to) < from) continue;
        const begin = Math.round(this._x(Math.min(fork ? fork.to : branch.from, branch.from))) + 0.5;
        elbow(context, begin, this._y(fork?.row ?? parent.row) + half, this._x(branch.from), this._y(branch.row) + half);
        // Thin lines along the branch itself, where it waits between two primitives.
        context.moveTo(this._x(branch.from), this._y(branch.row) + half);
        context.lineTo(this._x(branch.to), this._y(branch.row) + half);
        // A branch that ends after the join was not waited for.
        if (join && branch.to <= join.to + 1e-6) {
          const end = Math.round(this._x(Math.max(join.from, branch.to))) + 0.5;
          elbow(context, end, this._y(join.row) + half, this._x(branch.to), this._y(branch.row) + half);
        }
      }
      const root = run.root;
      if (root.row >= first && root.row < last) {
        context.moveTo(this._x(root.from), this._y(root.row) + half);
        context.lineTo(this._x(root.to), this._y(root.row) + half);
      }
    }
    context.stroke();
  }

  _drawRow(context, index) {
    const row = this.rows[index];
    const [from, to] = this._times;
    const top = this._y(index);
    const pad = Math.max(3, Math.round(this.rowHeight * 0.14));
    const hasThin = row.thin.length > 0;
    const height = hasThin ? this.rowHeight * 0.62 - pad : this.rowHeight - 2 * pad;
    let covered = -Infinity; // pixels up to here show something already
    for (const event of row.events) if (event.isWait && event.from <= to && event.to >= from) this._drawEvent(context, event, this._x(event.from), this._x(event.to), top + pad, height);
    for (const event of row.events) {
      if (event.from > to) break;
      if (event.to < from || event.isWait) continue;
      const left = this._x(event.from);
      const right = this._x(event.to);
      if (right - left < 1 && left < covered + 0.8 && !event.isBad && event !== this.app.selected) continue;
      covered = Math.max(covered, right, left);
      this._drawEvent(context, event, left, right, top + pad, height);
    }
    covered = -Infinity;
    for (const event of row.thin) {
      if (event.from > to) break;
      if (event.to < from || event.isConstant) continue;
      const left = this._x(event.from);
      const right = Math.max(this._x(event.to), left + 1);
      if (right < covered + 0.8) continue;
      covered = Math.max(covered, right);
      context.globalAlpha = event.isShown ? 1 : 0.25;
      context.fillStyle = event.isBad ? palette.failed : palette[`${event.family}-3`];
      context.fillRect(left, top + this.rowHeight * 0.72, right - left, Math.max(3, this.rowHeight * 0.16));
    }
    context.globalAlpha = 1;
  }

  _drawEvent(context, event, left, right, top, height) {
    context.globalAlpha = event.isShown ? 1 : 0.22;
    if (event.isConstant) this._drawConstant(context, left, top, height);
    else if (event.kind === "fork" || (right - left < 2 && !(event.isCall && event.hasBegun))) this._drawMarker(context, event, left, top, height);
    else this._drawBar(context, event, left, Math.max(right, left + 1.5), top, height);
    context.globalAlpha = 1;
  }

  _drawConstant(context, x, top, height) {
    context.fillStyle = palette.faint;
    context.fillRect(x - 0.75, top + height * 0.3, 1.5, height * 0.4);
  }

  /** What takes no time: forks and joins as dots, others as diamonds. */
  _drawMarker(context, event, x, top, height) {
    const y = top + height / 2;
    const radius = Math.min(4.5, height * 0.28);
    context.lineWidth = 1.5;
    context.strokeStyle = event.isBad ? palette.failed : palette.muted;
    context.fillStyle = event.kind === "fork" ? context.strokeStyle : palette.panel;
    context.beginPath();
    if (event.kind === "fork" || event.isWait) context.arc(x, y, radius, 0, 7);
    else {
      context.moveTo(x, y - radius);
      context.lineTo(x + radius, y);
      context.lineTo(x, y + radius);
      context.lineTo(x - radius, y);
      context.closePath();
    }
    context.fill();
    context.stroke();
    if (event.isBad || event.isStopped) this._drawSign(context, event, x + radius + 7, y);
  }

  _drawBar(context, event, left, right, top, height) {
    // A bar may begin or end far outside: huge coordinates lose their fractions.
    const x0 = Math.max(left, this.gutter - 20);
    const x1 = Math.min(right, this.width + 20);
    const radius = Math.min(3, (x1 - x0) / 2);
    const { family } = event;
    context.save();
    roundRect(context, x0, top, x1 - x0, height, radius);
    context.clip();
    // A join computes nothing, it waits: it is drawn as lightly as what is queued.
    context.fillStyle = palette[event.isWait ? "other-1" : `${family}-3`];
    context.fillRect(x0, top, x1 - x0, height);
    if (event.queued !== null || event.prefill !== null) {
      const queuedEnd = Math.min(this._x(event.from + (event.queued ?? 0)), x1);
      const prefillEnd = Math.min(this._x(event.from + (event.queued ?? 0) + (event.prefill ?? 0)), x1);
      context.fillStyle = palette[`${family}-1`];
      context.fillRect(x0, top, queuedEnd - x0, height);
      context.fillStyle = palette[`${family}-2`];
      context.fillRect(queuedEnd, top, prefillEnd - queuedEnd, height);
    }
    if (event.isBad) {
      context.fillStyle = palette["failed-soft"];
      context.fillRect(x0, top, x1 - x0, height);
    }
    if (event.isStopped) drawStripes(context, x0, x1, top, height);
    context.restore();
    if (x1 - x0 > 3) {
      context.lineWidth = event.isBad ? 2 : 1;
      context.strokeStyle = event.isBad ? palette.failed : event.isStopped ? palette.cancelled : palette[`${family}-3`];
      if (event.isOpen) context.setLineDash([4, 3]);
      const inset = context.lineWidth / 2;
      roundRect(context, x0 + inset, top + inset, x1 - x0 - 2 * inset, height - 2 * inset, radius);
      context.stroke();
      context.setLineDash([]);
    } else if (event.isBad) {
      context.fillStyle = palette.failed;
      context.fillRect(x0, top, Math.max(2, x1 - x0), height);
    }
    this._drawLabel(context, event, Math.max(x0, this.gutter), x1, top, height);
  }

  _drawLabel(context, event, x0, x1, top, height) {
    let x = x0 + 6;
    const y = top + height / 2 + 0.5;
    if (event.isBad || event.isStopped) {
      if (x1 - x0 < 14) {
        if (event.isBad) this._drawSign(context, event, x1 + 7, y);
        return;
      }
      this._drawSign(context, event, x0 + 9, y);
      x += 11;
    }
    const room = x1 - x - 4;
    if (room < 18) return;
    const size = clamp(height * 0.62, 10, palette.em * 0.86);
    context.font = `${size}px ${palette.sans}`;
    context.textBaseline = "middle";
    context.fillStyle = palette.ink;
    const name = event.variable || event.kind;
    const shown = measure.cut(context, name, room);
    if (event.isWait) {
      // At its end, since others may lie over its beginning.
      context.fillStyle = palette.muted;
      context.fillText(shown, x1 - 6 - measure.width(context, shown), y);
      return;
    }
    context.fillText(shown, x, y);
    const used = measure.width(context, shown) + 8;
    if (room - used < 40 || !event.text) return;
    context.globalAlpha *= 0.66;
    context.fillText(measure.cut(context, glimpse(event.text, 120), room - used), x + used, y);
    context.globalAlpha /= 0.66;
  }

  /** ✕ for what failed, ⊘ for what was stopped: told apart without colours. */
  _drawSign(context, event, x, y) {
    const r = 3.2;
    context.lineWidth = 1.8;
    context.strokeStyle = event.isBad ? palette.failed : palette.cancelled;
    context.beginPath();
    if (event.isBad) {
      context.moveTo(x - r, y - r);
      context.lineTo(x + r, y + r);
      context.moveTo(x + r, y - r);
      context.lineTo(x - r, y + r);
    } else {
      context.arc(x, y, r + 0.8, 0, 7);
      context.moveTo(x - 2.6, y + 2.6);
      context.lineTo(x + 2.6, y - 2.6);
    }
    context.stroke();
  }

  /** Frames around what was found, is pointed at, and is selected. */
  _drawMarks(context) {
    const [from, to] = this._times;
    const frame = (event, colour, width) => {
      if (event.row === null || event.to < from || event.from > to) return;
      const top = this._y(event.row);
      if (top > this.height || top + this.rowHeight < AXIS) return;
      const left = Math.max(this._x(event.from), this.gutter - 20);
      const right = Math.min(this._x(event.to), this.width + 20);
      const spread = right - left < 6 ? 5 : 1.5;
      context.lineWidth = width;
      context.strokeStyle = colour;
      const low = event.isThin ? this.rowHeight * 0.66 : 2;
      roundRect(context, left - spread, top + low, right - left + 2 * spread, this.rowHeight - low - 2, 4);
      context.stroke();
    };
    for (const event of this.app.found) frame(event, palette.found, 2);
    if (this.hover?.event) frame(this.hover.event, palette.muted, 1);
    if (this.app.selected) frame(this.app.selected, palette.accent, 2.5);
  }

  _drawGutter(context, first, last) {
    const { gutter, height } = this;
    context.fillStyle = palette.panel;
    context.fillRect(0, AXIS, gutter, height - AXIS);
    for (let i = first; i < last; i++) this._drawRowLabel(context, i);
    context.fillStyle = palette["line-strong"];
    context.fillRect(gutter, 0, 1, height);
    const end = this._y(this.rows.length);
    if (end < height) {
      context.fillStyle = palette.line;
      context.fillRect(0, end, this.width, 1);
    }
  }

  _drawRowLabel(context, index) {
    const { gutter, rowHeight } = this;
    const row = this.rows[index];
    const top = this._y(index);
    const middle = top + rowHeight / 2 + 0.5;
    if (row.run.index % 2) {
      context.fillStyle = palette.bg;
      context.fillRect(0, top, gutter, rowHeight);
    }
    if (row.isFirst && index > 0) {
      context.fillStyle = palette.line;
      context.fillRect(0, top, gutter, 1);
    }
    if (this.app.selected?.row === index) {
      context.fillStyle = palette["accent-soft"];
      context.fillRect(0, top + 1, gutter, rowHeight - 1);
    }
    const indent = Math.min(row.depth, gutter < 120 ? 2 : 7) * (gutter < 120 ? 6 : 12);
    const parents = row.branches.filter((branch) => branch.children.length);
    if (parents.length) drawTriangle(context, 10 + indent, middle, parents.every((branch) => branch.isCollapsed));
    let x = 20 + indent;
    const run = row.run;
    const isBad = row.isFirst ? ENDED_BADLY.has(run.status) : row.branches.some((each) => ENDED_BADLY.has(each.status));
    if (isBad) {
      this._drawSign(context, { isBad: true }, x + 3, middle);
      x += 12;
    }
    const size = clamp(rowHeight * 0.5, 10.5, palette.em * 0.9);
    context.textBaseline = "middle";
    context.font = `${row.isFirst ? 600 : 400} ${size}px ${palette.sans}`;
    context.fillStyle = row.isFirst ? palette.ink : palette.muted;
    const aside = row.isFirst && gutter > 140 ? duration(run.seconds) : "";
    const room = gutter - x - 6 - (aside ? 58 : 0);
    const name = measure.cut(context, row.isFirst ? run.program : rowLabel(row), room);
    context.fillText(name, x, middle);
    const used = measure.width(context, name) + 6;
    if (row.isFirst && room - used > 24) {
      context.font = `${size * 0.93}px ${palette.sans}`;
      context.fillStyle = palette.muted;
      context.fillText(measure.cut(context, run.given || `run ${run.index}`, room - used), x + used, middle);
    }
    if (!aside) return;
    context.font = `${size * 0.93}px ${palette.sans}`;
    context.fillStyle = palette.muted;
    context.textAlign = "right";
    context.fillText(aside, gutter - 7, middle);
    context.textAlign = "left";
  }

  _ticks() {
    const [begin, end] = this._times;
    const step = niceStep(((end - begin) * TICK_DISTANCE) / Math.max(this.width - this.gutter, 1));
    const origin = this.app.trace.begin;
    const marks = [];
    for (let i = Math.ceil((begin - origin) / step); marks.length < 200; i++) {
      const time = i * step;
      if (origin + time > end) break;
      marks.push({ time, x: this._x(origin + time) });
    }
    return { step, marks };
  }

  _drawAxis(context, { step, marks }) {
    const { width, gutter } = this;
    context.fillStyle = palette.panel;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = palette["line-strong"];
    context.fillRect(0, AXIS - 1, width, 1);
    context.fillRect(gutter, 0, 1, AXIS);
    context.font = `${palette.em * 0.8}px ${palette.sans}`;
    context.textBaseline = "middle";
    context.fillStyle = palette.muted;
    const runs = this.runs.length;
    context.fillText(measure.cut(context, counted(runs, "run"), gutter - 20), 10, AXIS / 2);
    const last = marks.length ? marks[marks.length - 1].time : 0;
    for (const { time, x } of marks) {
      if (x < gutter) continue;
      context.fillStyle = palette["line-strong"];
      context.fillRect(Math.round(x), AXIS - 7, 1, 6);
      context.fillStyle = palette.muted;
      const label = tickLabel(time, step, last);
      if (x + 4 + measure.width(context, label) < width) context.fillText(label, x + 4, AXIS / 2 - 1);
    }
    if (this.hover && this.hover.x > gutter) this._drawPointedTime(context);
  }

  _drawPointedTime(context) {
    const { x } = this.hover;
    context.fillStyle = palette.muted;
    context.globalAlpha = 0.5;
    context.fillRect(Math.round(x), AXIS, 1, this.height);
    context.globalAlpha = 1;
    const [begin, end] = this._times;
    const label = tickLabel(this._time(x) - this.app.trace.begin, (end - begin) / 1000, end - this.app.trace.begin);
    const size = measure.width(context, label) + 10;
    const left = clamp(x - size / 2, this.gutter, this.width - size);
    context.fillStyle = palette.ink;
    roundRect(context, left, 4, size, AXIS - 9, 4);
    context.fill();
    context.fillStyle = palette.panel;
    context.fillText(label, left + 5, AXIS / 2 - 0.5);
  }
}

// -- Parts of it --

function nearest(events, target) {
  const time = (target.from + target.to) / 2;
  let best = null;
  for (const event of events) {
    if (event.isConstant) continue;
    const distance = time < event.from ? event.from - time : time > event.to ? time - event.to : 0;
    if (!best || distance < best.distance) best = { event, distance };
  }
  return best?.event ?? null;
}

function rowLabel(row) {
  const [first, second] = row.branches;
  if (!first) return "";
  return second ? `${first.label} … ${row.branches[row.branches.length - 1].label} (${row.branches.length})` : first.label;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((each) => each * power >= least * 0.999) * power;
}

/** The time of a tick, in the unit that suits the last one, with as many digits as ticks differ in. */
function tickLabel(time, step, last) {
  const [unit, name] = last >= 1 || step >= 1 ? [1, "s"] : last >= 1e-3 || step >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const digits = clamp(Math.ceil(-Math.log10(step / unit) - 1e-9), 0, 9);
  const value = (time / unit).toFixed(digits);
  return Number(value) === 0 ? "0" : `${value} ${name}`;
}

function roundRect(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 0), Math.max(height, 0), Math.max(0, radius));
}

/** Down (or up) from the trunk at `x`, then sideways to the branch, with a rounded corner. */
function elbow(context, x, y, toX, toY) {
  const radius = Math.min(5, Math.abs(toX - x), Math.abs(toY - y));
  context.moveTo(x, y);
  context.arcTo(x, toY, toX, toY, radius);
  context.lineTo(toX, toY);
}

function drawTriangle(context, x, y, isCollapsed) {
  context.fillStyle = palette.muted;
  context.beginPath();
  if (isCollapsed) {
    context.moveTo(x - 3, y - 4.5);
    context.lineTo(x + 4, y);
    context.lineTo(x - 3, y + 4.5);
  } else {
    context.moveTo(x - 4.5, y - 3);
    context.lineTo(x + 4.5, y - 3);
    context.lineTo(x, y + 4);
  }
  context.fill();
}

function drawStripes(context, x0, x1, top, height) {
  context.strokeStyle = palette.stripe;
  context.lineWidth = 2;
  context.beginPath();
  for (let x = x0 - height; x < x1; x += 6) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
}

/** What the pointer is told about an event. */
function eventTip(event) {
  const time = event.seconds === null ? event.status : duration(event.seconds);
  const lines = [make("div", {}, make("b", {}, event.name), " ", make("span", { class: "muted" }, `${time}${event.status === "ok" ? "" : ` · ${statusName(event.status)}`}`))];
  const counts = [];
  if (event.prefilled + event.cached) counts.push(`prompt ${grouped(event.prefilled)} prefilled, ${grouped(event.cached)} cached`);
  if (event.decoded + event.forced) counts.push(`${grouped(event.decoded)} decoded, ${grouped(event.forced)} forced`);
  if (event.shared) counts.push(`${grouped(event.shared)} shared`);
  if (counts.length) lines.push(make("div", { class: "muted" }, counts.join(" · ")));
  const told = glimpse(event.data.error || event.text, 220);
  if (told) lines.push(make("p", { class: "mono" }, told));
  return lines;
}

function rowTip(row) {
  if (row.isFirst) {
    const { run } = row;
    const branches = run.branches.length > 1 ? ` · ${counted(run.branches.length, "branch", "branches")}` : "";
    return [make("b", {}, glimpse(run.label, 200)), make("div", { class: "muted" }, `${statusName(run.status)} · ${duration(run.seconds)}${branches}`)];
  }
  const shown = row.branches.slice(0, 8).map((branch) => branch.label).join(", ");
  return [make("b", {}, `${row.branches.length > 1 ? "Branches" : "Branch"} ${shown}${row.branches.length > 8 ? "…" : ""}`), make("div", { class: "muted" }, row.run.program)];
}
