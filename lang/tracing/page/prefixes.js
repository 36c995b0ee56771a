// ---- Prefix tree: what prompts share, from left to right as their tokens come ----
// A block is as wide as it has tokens, and as high as the share of the prompts' ends that lie in it.

const NODE_AXIS = 26;
const NODE_LABEL_HEIGHT = 13; // pixels a block needs for a label
const NODES_DRAWN_FROM = 0.4; // pixels of height below which a block is left out

class PrefixTree {
  constructor(app) {
    this.app = app;
    this.current = null;
    this.zoomed = null;
    this.hover = null;
    this.redraw = eachFrame(() => this.draw());
    this.up = make("button", { type: "button", onclick: () => this.zoom(this.zoomed?.parent ?? null) }, "Up");
    this.whole = make("button", { type: "button", onclick: () => this.zoom(null) }, "Whole tree");
    this.note = make("span", {});
    this.strip = make("div", { class: "strip" },
      make("div", { class: "legend" }, make("span", {}, "computed once", make("span", { class: "share" }), "reused"), this.note),
      make("div", { class: "buttons" }, this.up, this.whole));
    this.canvas = make("canvas", { tabindex: "0", role: "application", "aria-label": "Prefix tree. Arrow keys move between blocks, Enter zooms, Backspace zooms out." });
    this.frame = make("div", { class: "icicle" }, this.canvas);
    this.card = make("div", { class: "node-card", role: "status", "aria-live": "polite" });
    this.element = make("div", {}, this.strip, this.frame, this.card);
    new ResizeObserver(() => this.draw()).observe(this.frame);
    this.canvas.addEventListener("pointermove", (event) => this._onMove(event));
    this.canvas.addEventListener("pointerleave", () => this._setHover(null));
    this.canvas.addEventListener("click", (event) => {
      const node = this._hit(event);
      if (node) this._open(node);
    });
    for (const name of ["focus", "blur"]) this.canvas.addEventListener(name, this.redraw);
  }

  load() {
    this.tree = this.app.trace.prefixes;
    this.current = this.zoomed = this.hover = null;
    const total = this.tree.roots.reduce((sum, node) => sum + node.weight, 0) || 1;
    let top = 0;
    // Parents stand before children, so each finds where its parent has room left.
    const room = new Map();
    for (const node of this.tree.nodes) {
      const begin = node.parent ? room.get(node.parent) : top;
      node.top = begin;
      node.bottom = begin + node.weight / total;
      room.set(node, begin);
      if (node.parent) room.set(node.parent, node.bottom);
      else top = node.bottom;
    }
    for (let i = this.tree.nodes.length - 1; i >= 0; i--) {
      const node = this.tree.nodes[i];
      node.deepest = Math.max(node.start + node.length, ...node.children.slice(0, 50000).map((child) => child.deepest));
    }
    const saved = this.tree.nodes.reduce((sum, node) => sum + node.saved, 0);
    const asked = this.tree.nodes.reduce((sum, node) => sum + node.uses * node.length, 0);
    this.note.textContent = asked ? `${grouped(saved)} of ${counted(asked, "prompt token")} saved (${percent(saved / asked)})` : "";
    if (this.tree.omitted) this.note.textContent += ` · ${counted(this.tree.omitted, "block")} left out of the trace`;
    this._tell();
  }

  update() {
    this.draw();
  }

  zoom(node) {
    this.zoomed = node;
    this._tell();
    this.redraw();
  }

  _open(node) {
    this.current = node;
    // A block without anything behind it has nothing to zoom to but itself.
    this.zoom(node.children.length ? node : node.parent && node.parent.children.length > 1 ? node : node.parent);
    const first = this._first(node);
    if (first) this.app.select(first, {});
  }

  _first(node) {
    const [run, branch, place] = node.first;
    return this.app.trace.event(`${run}.${branch}.${place}`);
  }

  _tell() {
    this.up.disabled = this.whole.disabled = !this.zoomed;
    const node = this.current;
    if (!node) {
      this.card.replaceChildren(make("p", { class: "muted" }, this.tree?.nodes.length ? "Point at a block to see its text; click to zoom in." : ""));
      return;
    }
    const first = this._first(node);
    this.card.replaceChildren(
      make("div", { class: "below" }, ...nodeFacts(node),
        first ? make("button", { type: "button", class: "link", onclick: () => this.app.goTo(first) }, "Show the request that computed it first") : null),
      make("pre", { class: "plain" }, (node.text || "∅") + (node.isCut ? "…" : "")));
  }

  // -- Geometry --

  get _window() {
    const node = this.zoomed;
    if (!node) return { left: 0, right: Math.max(this.tree.depth, 1), top: 0, bottom: 1 };
    return { left: node.start, right: Math.max(node.deepest, node.start + 1), top: node.top, bottom: node.bottom };
  }

  _box(node) {
    const { left, right, top, bottom } = this._window;
    const scaleX = this.width / (right - left);
    const scaleY = (this.height - NODE_AXIS) / (bottom - top || 1);
    const x = (node.start - left) * scaleX;
    const y = NODE_AXIS + (node.top - top) * scaleY;
    return { x, y, width: node.length * scaleX, height: (node.bottom - node.top) * scaleY };
  }

  _hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let nodes = this.tree.roots;
    for (;;) {
      const found = nodes.find((node) => {
        const each = this._box(node);
        return y >= each.y && y < each.y + each.height;
      });
      if (!found) return null;
      const each = this._box(found);
      if (x >= each.x && x < Math.max(each.x + each.width, each.x + 2)) return found;
      nodes = found.children;
    }
  }

  _onMove(event) {
    const node = this._hit(event);
    this._setHover(node);
    if (!node) return;
    this.app.tip.show(event.clientX, event.clientY, [
      make("div", { class: "below" }, ...nodeFacts(node)),
      make("p", { class: "mono" }, glimpse(node.text, 200) + (node.isCut ? "…" : "")),
    ]);
  }

  _setHover(node) {
    if (!node) this.app.tip.hide();
    if (this.hover === node) return;
    this.hover = node;
    this.redraw();
  }

  onKey(key) {
    const node = this.current;
    const siblings = node?.parent ? node.parent.children : this.tree.roots;
    const place = siblings.indexOf(node);
    const moves = {
      ArrowLeft: () => node?.parent,
      ArrowRight: () => node?.children[0],
      ArrowUp: () => siblings[place - 1],
      ArrowDown: () => siblings[place + 1],
      Home: () => this.tree.roots[0],
    };
    if (moves[key]) {
      const next = node ? moves[key]() : this.tree.roots[0];
      if (next) {
        this.current = next;
        const shown = this._window;
        if (next.top < shown.top || next.bottom > shown.bottom || next.start < shown.left) this.zoomed = next.parent;
        announce(`${counted(next.length, "token")}, ${counted(next.uses, "use")}, ${percent(next.reuse)} reused: ${glimpse(next.text, 60)}`);
        this._tell();
        this.redraw();
      }
    } else if (key === "Enter" && node) this._open(node);
    else if (key === "Backspace" || key === "-") this.zoom(this.zoomed?.parent ?? null);
    else if (key === "0" || key === "f") this.zoom(null);
    else return false;
    return true;
  }

  // -- Drawing --

  draw() {
    if (!this.tree || !this.element.isConnected || !this.frame.clientWidth) return;
    this.width = this.frame.clientWidth;
    this.height = this.frame.clientHeight;
    const context = fitCanvas(this.canvas, this.width, this.height);
    context.fillStyle = palette.panel;
    context.fillRect(0, 0, this.width, this.height);
    if (!this.tree.nodes.length) {
      context.fillStyle = palette.muted;
      context.font = `${palette.em}px ${palette.sans}`;
      context.textAlign = "center";
      context.fillText("This trace knows of no prompts.", this.width / 2, this.height / 2);
      return;
    }
    const shades = Array.from({ length: 21 }, (_, i) => mix(palette.once, palette.reused, i / 20));
    const waiting = [...this.tree.roots];
    while (waiting.length) {
      const node = waiting.pop();
      const box = this._box(node);
      const isSeen = box.y < this.height && box.y + box.height > NODE_AXIS && box.x < this.width;
      if (!isSeen || box.height < NODES_DRAWN_FROM) continue;
      this._drawNode(context, node, box, shades);
      for (const child of node.children) waiting.push(child);
    }
    this._drawScale(context);
    for (const [node, colour, width] of [[this.hover, palette.muted, 1.5], [this.current, palette.accent, 2.5]]) {
      if (!node) continue;
      const box = this._box(node);
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(box.x + 1, Math.max(box.y, NODE_AXIS) + 1, Math.max(box.width - 2, 1), Math.max(Math.min(box.height, this.height) - 2, 1));
    }
  }

  _drawNode(context, node, box, shades) {
    const right = box.x + box.width;
    if (right < 0) return;
    const gap = box.height > 6 ? 1 : box.height > 3 ? 0.5 : 0;
    const x = Math.max(box.x, 0);
    const y = Math.max(box.y, NODE_AXIS);
    const height = Math.min(box.y + box.height, this.height) - y - gap;
    context.fillStyle = shades[Math.round(node.reuse * 20)];
    context.fillRect(x, y, Math.max(right - x - 1, 0.6), Math.max(height, 0.4));
    const room = Math.min(right, this.width) - x - 10;
    if (height < NODE_LABEL_HEIGHT || room < 24) return;
    context.save();
    context.beginPath();
    context.rect(x, y, room + 8, height);
    context.clip();
    const size = palette.em * 0.82;
    context.textBaseline = "middle";
    context.fillStyle = palette.ink;
    const isTall = height > 3 * size;
    const middle = y + height / 2;
    context.font = `${size}px ${palette.mono}`;
    context.fillText(measure.cut(context, glimpse(node.text, 160) || "∅", room), x + 6, isTall ? middle - size * 0.75 : middle + 0.5);
    if (isTall) {
      context.font = `${size}px ${palette.sans}`;
      context.fillText(measure.cut(context, `${counted(node.length, "token")} · ${counted(node.uses, "use")} · ${percent(node.reuse)} reused`, room), x + 6, middle + size * 0.75);
    }
    context.restore();
  }

  _drawScale(context) {
    const { left, right } = this._window;
    context.fillStyle = palette.panel;
    context.fillRect(0, 0, this.width, NODE_AXIS);
    context.fillStyle = palette["line-strong"];
    context.fillRect(0, NODE_AXIS - 1, this.width, 1);
    context.font = `${palette.em * 0.8}px ${palette.sans}`;
    context.textBaseline = "middle";
    context.fillStyle = palette.muted;
    const step = Math.max(1, niceStep(((right - left) * 90) / this.width));
    for (let token = Math.ceil(left / step) * step; token <= right; token += step) {
      const x = ((token - left) / (right - left)) * this.width;
      context.fillRect(Math.round(x), NODE_AXIS - 6, 1, 5);
      const label = token === 0 ? "token 0" : grouped(token);
      if (x + measure.width(context, label) + 6 < this.width) context.fillText(label, x + 4, NODE_AXIS / 2 - 2);
    }
  }
}

function nodeFacts(node) {
  const fact = (value, name) => make("span", {}, make("b", {}, value), ` ${name}`);
  return [
    fact(grouped(node.length), `tokens from ${grouped(node.start)}`),
    fact(grouped(node.uses), node.uses === 1 ? "use" : "uses"),
    fact(grouped(node.computed), "computed"),
    fact(grouped(node.saved), "saved"),
    fact(percent(node.reuse), "reused"),
  ];
}

/** A colour between two given as #rrggbb. */
function mix(from, to, share) {
  const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((each, i) => Math.round(each + (b[i] - each) * share)).join(" ")})`;
}
