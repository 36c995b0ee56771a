// ---- Details: everything about the selected primitive; without one, where time and tokens went ----

const LISTED = 5; // slowest, most prefilled and so on, in the overview
const TEXT_SHOWN = 20000; // characters, at first
const OPTIONS_SHOWN = 60;

const STATUS_NAMES = { timed_out: "timed out", not_done: "not done", ok: "done" };
const statusName = (status) => STATUS_NAMES[status] ?? status;

/** How a stretch of a prompt is drawn, by its reason. */
function stretchClass(reason) {
  const known = { cached: "cached", evicted: "evicted", diverged: "diverged", "needed for its logits": "logits", "never seen": "new" };
  return `stretch-${known[reason] ?? (reason.includes("tier") ? "cached" : "other")}`;
}

class Details {
  constructor(app) {
    this.app = app;
    this.element = byId("side");
  }

  update() {
    const event = this.app.selected;
    this.element.replaceChildren(...(event ? this._ofEvent(event) : this._overview()));
    this.element.scrollTop = 0;
  }

  // -- One primitive --

  _ofEvent(event) {
    const { data } = event;
    return [
      this._head(event),
      this._error(event),
      this._time(event),
      this._tokenCounts(event),
      this._prompt(event),
      this._options(event),
      this._output(event),
      this._asked(event),
      this._branches(event, list(data.children)),
    ].filter(Boolean);
  }

  _head(event) {
    const { app } = this;
    const button = (label, sign, direction) => {
      const to = app.step(event, direction);
      return make("button", { type: "button", class: "quiet", "aria-label": label, title: label, disabled: !to, onclick: () => app.select(to, { reveal: true, open: true }) }, sign);
    };
    const badges = [make("span", { class: `badge ${event.family}` }, event.kind)];
    if (event.status !== "ok") {
      const look = event.isBad ? "failed" : event.isStopped ? "cancelled" : "running";
      badges.push(make("span", { class: `badge ${look}` }, statusName(event.status)));
    }
    const sample = isNumber(event.data.sample) ? ` · text ${event.data.sample + 1}` : "";
    const title = event.variable || event.name;
    const place = [`${event.run.program} · ${event.branch.path.length ? `branch ${event.branch.label}` : "root"}${sample}`];
    if (event.data.where) place.push(make("br"), make("span", { class: "mono", title: text(event.data.where) }, shortPath(text(event.data.where))));
    return make("div", { class: "side-head" },
      make("div", { class: "side-title" },
        make("h2", { id: "details-title", tabindex: "-1" }, ...badges, glimpse(title, 120)),
        button("Previous primitive", "‹", -1), button("Next primitive", "›", 1),
        make("button", { type: "button", class: "quiet", "aria-label": "Close details (Esc)", title: "Close (Esc)", onclick: () => app.closeDetails() }, "×")),
      make("p", { class: "side-sub" }, ...place),
      make("p", { class: "side-sub" },
        make("button", { type: "button", class: "link", onclick: () => app.showTranscript(event.branch, event) }, "Show in the transcript")));
  }

  _error(event) {
    if (!event.data.error) return null;
    return section(statusName(event.status)[0].toUpperCase() + statusName(event.status).slice(1), "", make("p", { class: "message" }, text(event.data.error)));
  }

  _time(event) {
    if (event.isConstant) return null;
    const origin = this.app.trace.begin;
    if (!event.hasBegun) return section("Time", "", make("p", { class: "muted" }, `It has not begun${event.asked === null ? "" : `; asked for at ${duration(event.asked - origin)}`}.`));
    const at = `from ${duration(event.from - origin)} to ${event.end === null ? "now" : duration(event.to - origin)}`;
    const waited = event.asked === null ? null : event.from - event.asked;
    const parts = [["queued", event.queued], ["prefill", event.prefill], ["decode", event.decode]].filter(([, value]) => value !== null);
    const total = event.seconds ?? event.to - event.from;
    const known = parts.reduce((sum, [, value]) => sum + value, 0);
    const body = [];
    if (parts.length && known > 0) {
      const scale = Math.max(total, known);
      const bars = ["queued", "prefill", "decode"].map((name) => make("span", { style: { width: `${(100 * (event[name] ?? 0)) / scale}%` } }));
      body.push(make("div", { class: `phases ${event.family}`, role: "img", "aria-label": parts.map(([name, value]) => `${name} ${duration(value)}`).join(", ") }, ...bars));
    }
    const facts = parts.map(([name, value]) => make("span", {}, make("b", {}, duration(value)), ` ${name}`));
    if (parts.length && total - known > total * 0.005 && total > known) facts.push(make("span", {}, make("b", {}, duration(total - known)), " elsewhere"));
    if (event.decoded > 1 && event.decode) facts.push(make("span", {}, make("b", {}, duration(event.decode / event.decoded)), " per token"));
    if (waited !== null && waited > 1e-5) facts.push(make("span", {}, "asked for ", make("b", {}, duration(waited)), " before it began"));
    if (facts.length) body.push(make("div", { class: "below" }, ...facts));
    if (!body.length && !event.isCall && total <= 0) return null;
    return section(`Time: ${event.end === null ? `${duration(total)} so far` : duration(total)}`, at, ...body);
  }

  _tokenCounts(event) {
    if (!TOKEN_KINDS.some((name) => event[name])) return null;
    return section("Tokens", event.hitRate === null ? "" : `${percent(event.hitRate)} of the prompt cached`, tokenStack(event), tokenLegend(event, event.isCall));
  }

  _prompt(event) {
    const prompt = record(event.data.prompt);
    const stretches = list(prompt.stretches).map(record);
    if (!stretches.length) return null;
    const length = Math.max(count(prompt.tokens), ...stretches.map((each) => count(each.end)), 1);
    const bar = stretches.map((each) => {
      const [begin, end] = [count(each.start), count(each.end)];
      const told = `${begin}–${end}: ${text(each.reason)}`;
      return make("span", { class: stretchClass(text(each.reason)), style: { "flex-grow": String(Math.max(end - begin, 0)) }, title: told });
    });
    const items = stretches.slice(0, 100).map((each) => {
      const [begin, end] = [count(each.start), count(each.end)];
      return make("li", {},
        make("span", { class: `key ${stretchClass(text(each.reason))}` }),
        make("span", {}, `${grouped(begin)} – ${grouped(end)}`),
        make("span", {}, `${text(each.reason)} `, make("span", { class: "detail" }, `${counted(end - begin, "token")}${each.detail ? ` · ${text(each.detail)}` : ""}`)));
    });
    return section("Prompt, and why it was computed", counted(length, "token"),
      make("div", { class: "stretches", role: "img", "aria-label": `Prompt of ${counted(length, "token")} in ${counted(stretches.length, "stretch", "stretches")}` }, ...bar),
      make("ul", { class: "reasons" }, ...items));
  }

  _options(event) {
    const options = list(event.data.options).map(record);
    if (!options.length) return null;
    const chosen = event.data.chosen;
    const ranked = options.map((option, index) => ({ option, index }));
    if (options.some((each) => isNumber(each.probability))) ranked.sort((a, b) => (b.option.probability ?? -1) - (a.option.probability ?? -1));
    // The chosen one is always among those shown.
    const shown = ranked.slice(0, OPTIONS_SHOWN);
    if (!shown.some(({ index }) => index === chosen) && ranked.length > shown.length) shown.push(ranked.find(({ index }) => index === chosen) ?? ranked[OPTIONS_SHOWN]);
    const rows = shown.flatMap(({ option, index }) => {
      const isChosen = index === chosen;
      const value = number(option.probability);
      const label = value !== null ? percent(value) : isNumber(option.score) ? option.score.toFixed(2) : "–∞";
      const title = `${glimpse(option.text, 300)}${isNumber(option.log_likelihood) ? ` · log-likelihood ${option.log_likelihood.toFixed(3)}` : ""}`;
      return [
        make("span", { class: `option${isChosen ? " chosen" : ""}`, title }, `${isChosen ? "✓ " : ""}${spellOut(glimpse(option.text, 80))}`),
        make("span", { class: "meter" }, make("span", { style: { width: `${clamp((value ?? 0) * 100, 0, 100)}%` } })),
        make("span", { class: "number" }, label),
      ];
    });
    const hidden = options.length - shown.length;
    const parts = [make("div", { class: "choices" }, ...rows)];
    if (hidden > 0) parts.push(make("p", { class: "muted" }, `and ${grouped(hidden)} less likely ones`));
    const withTokens = record(options[chosen]).tokens;
    if (withTokens) {
      const tokens = readTokens(withTokens, this.app.trace.vocabulary(event.run));
      if (tokens.some((each) => each.logprob !== null)) parts.push(make("h4", {}, "Tokens of the chosen option"), new TokenView(tokens).element);
    }
    return section("Options", text(event.data.method), ...parts);
  }

  _output(event) {
    const tokens = event.data.tokens ? readTokens(event.data.tokens, this.app.trace.vocabulary(event.run)) : [];
    if (tokens.length) {
      const surprise = tokens.reduce((sum, token) => sum - (token.logprob ?? 0), 0);
      const known = tokens.filter((token) => token.logprob !== null).length;
      const aside = known ? `perplexity ${Math.exp(surprise / known).toFixed(2)}` : "";
      return section(`Output: ${counted(tokens.length, "token")}`, aside, new TokenView(tokens).element);
    }
    if (!event.text) return null;
    const length = number(event.data.num_chars) ?? event.text.length;
    return section(event.isConstant ? "Text" : "Output", counted(length, "character"), longText(event.text, event.data.num_chars));
  }

  _asked(event) {
    const { data } = event;
    const facts = [];
    const add = (name, value) => {
      if (value !== undefined && value !== null && value !== "") facts.push(make("dt", {}, name), make("dd", { class: typeof value === "object" ? "mono" : null }, plain(value)));
    };
    add("Primitive", event.variable && event.name !== event.variable ? event.name : "");
    add("Finished by", [data.finish_reason, data.stop_reason === undefined || data.stop_reason === null ? "" : spellOut(text(data.stop_reason))].filter(Boolean).join(": "));
    for (const [name, value] of Object.entries(record(data.sampling))) add(name, value);
    const constraint = record(data.constraint);
    if (constraint.kind) add("Constraint", text(constraint.kind));
    if (constraint.source !== undefined) facts.push(make("dt", {}, "Source"), make("dd", { class: "mono" }, prettySource(constraint.source)));
    for (const [name, value] of Object.entries(constraint)) if (!["kind", "source", "num_chars"].includes(name)) add(name, value);
    add("Mode", data.mode);
    return facts.length ? section("Asked for", "", make("dl", { class: "facts" }, ...facts)) : null;
  }

  _branches(event, indices) {
    const branches = indices.map((index) => event.run.branches[index]).filter(Boolean);
    if (!branches.length) return null;
    const winners = new Set(list(event.data.winners));
    const rows = branches.slice(0, 50).map((branch) => {
      const target = branch.events.find((each) => !each.isConstant) ?? branch.events[0];
      const tokens = new Totals(branch.events);
      const mark = winners.has(branch.index) ? "✓ " : ENDED_BADLY.has(branch.status) ? "✕ " : STOPPED.has(branch.status) ? "⊘ " : "";
      const said = branch.events.filter((each) => !each.isConstant && each.text).map((each) => glimpse(each.text, 40)).join(" · ");
      return this._jump(target, [`${mark}${branch.label} `, make("span", { class: "muted" }, glimpse(said, 80))], `${duration(branch.to - branch.from)}, ${grouped(tokens.prefilled + tokens.decoded)} computed`);
    });
    return section("Branches", counted(branches.length, "branch", "branches"), make("ul", { class: "jump-list" }, ...rows));
  }

  // -- The whole trace --

  _overview() {
    const { app } = this;
    const { trace } = app;
    if (!trace || !trace.events.length) return [make("div", { class: "side-head" }, make("h2", {}, "Overview")), section("Empty", "", make("p", { class: "muted" }, "This trace has no primitives."))];
    const calls = trace.primitives.filter((event) => event.isCall);
    const by = (key) => calls.filter((event) => key(event) > 0).sort((a, b) => key(b) - key(a)).slice(0, LISTED);
    const failures = trace.events.filter((event) => event.isBad);
    return [
      make("div", { class: "side-head" },
        make("div", { class: "side-title" }, make("h2", { id: "details-title", tabindex: "-1" }, "Overview"),
          make("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => app.closeDetails() }, "×")),
        make("p", { class: "side-sub" }, "Select a primitive to see its tokens, times and cache misses.")),
      this._listed("Failed", failures.slice(0, LISTED), failures.length, (event) => glimpse(event.data.error || statusName(event.status), 60)),
      this._listed("Slowest", by((event) => event.seconds ?? 0), 0, (event) => duration(event.seconds)),
      this._listed("Most prefilled", by((event) => event.prefilled), 0, (event) => `${grouped(event.prefilled)} of ${grouped(event.cached + event.prefilled)}`),
      this._misses(calls),
      this._programs(),
    ].filter(Boolean);
  }

  _listed(title, events, total, told) {
    if (!events.length) return null;
    const rows = events.map((event) => {
      const place = event.run.program + (event.branch.path.length ? ` · ${event.branch.label}` : "");
      return this._jump(event, [event.isBad ? "✕ " : "", event.variable || event.name, " ", make("span", { class: "muted" }, place)], told(event));
    });
    return section(title, total > events.length ? `${grouped(total)} in all` : "", make("ul", { class: "jump-list" }, ...rows));
  }

  /** Why prompts were computed, summed over all that say so. */
  _misses(calls) {
    const sums = new Map();
    for (const event of calls) {
      for (const each of list(record(event.data.prompt).stretches).map(record)) {
        const reason = text(each.reason);
        if (reason !== "cached") sums.set(reason, (sums.get(reason) ?? 0) + Math.max(0, count(each.end) - count(each.start)));
      }
    }
    if (!sums.size) return null;
    const total = [...sums.values()].reduce((a, b) => a + b, 0) || 1;
    const sorted = [...sums].sort((a, b) => b[1] - a[1]);
    return section("Why prompts were computed", counted(total, "token"),
      make("div", { class: "stretches", "aria-hidden": "true" }, ...sorted.map(([reason, tokens]) => make("span", { class: stretchClass(reason), style: { "flex-grow": String(tokens) } }))),
      make("ul", { class: "reasons" }, ...sorted.map(([reason, tokens]) => make("li", {},
        make("span", { class: `key ${stretchClass(reason)}` }), make("span", {}, counted(tokens, "token")), make("span", {}, reason)))));
  }

  _programs() {
    const groups = new Map();
    for (const run of this.app.trace.runs) groups.set(run.program, [...(groups.get(run.program) ?? []), run]);
    if (groups.size < 2 && this.app.trace.runs.length < 2) return null;
    const rows = [...groups].slice(0, 20).map(([program, runs]) => {
      const times = runs.map((run) => run.seconds).sort((a, b) => a - b);
      const middle = times[times.length >> 1];
      const first = runs[0].root.events.find((each) => !each.isConstant) ?? runs[0].root.events[0];
      return this._jump(first, [program, " ", make("span", { class: "muted" }, counted(runs.length, "run"))], `median ${duration(middle)}, longest ${duration(times[times.length - 1])}`);
    });
    return section("Programs", "", make("ul", { class: "jump-list" }, ...rows));
  }

  _jump(event, what, told) {
    return make("li", {}, make("button", { type: "button", disabled: !event, onclick: () => this.app.select(event, { reveal: true, open: true }) },
      make("span", { class: "what" }, ...what), make("span", { class: "muted" }, told)));
  }
}

// -- Parts of it --

function section(title, aside, ...body) {
  return make("section", {}, make("h3", {}, title, aside ? make("span", { class: "aside" }, aside) : null), ...body);
}

function tokenStack(sums) {
  const parts = TOKEN_KINDS.filter((name) => sums[name] > 0);
  const label = parts.map((name) => `${grouped(sums[name])} ${name}`).join(", ") || "no tokens";
  return make("div", { class: "stack", role: "img", "aria-label": label }, ...parts.map((name) => make("span", { class: name, style: { "flex-grow": String(sums[name]), "flex-basis": "0" } })));
}

function tokenLegend(sums, isFull = true) {
  const names = TOKEN_KINDS.filter((name) => sums[name] || (isFull && name !== "shared"));
  return make("div", { class: "legend" }, ...names.map((name) => make("span", {}, make("span", { class: `key ${name}` }), make("b", {}, grouped(sums[name])), ` ${name}`)));
}

/** A text of any length: its beginning, and a button for the rest. */
function longText(value, recorded) {
  const body = make("pre", { class: "plain" }, value.slice(0, TEXT_SHOWN));
  const parts = [body];
  const rest = value.length - TEXT_SHOWN;
  if (rest > 0) {
    const more = make("button", { type: "button", onclick: () => {
      body.textContent = value;
      more.remove();
    } }, `Show ${counted(rest, "more character")}`);
    parts.push(more);
  }
  if (isNumber(recorded) && recorded > value.length) parts.push(make("p", { class: "muted" }, `The trace keeps ${grouped(value.length)} of ${grouped(recorded)} characters.`));
  return make("div", {}, ...parts);
}

/** The end of a path, which is what tells files apart. */
function shortPath(path) {
  const parts = path.split("/");
  return parts.length > 4 ? `…/${parts.slice(-3).join("/")}` : path;
}

function plain(value) {
  if (typeof value === "string") return value.slice(0, TEXT_SHOWN);
  return typeof value === "object" ? JSON.stringify(value).slice(0, TEXT_SHOWN) : String(value);
}

/** A constraint's source: JSON is indented, all else is as it came. */
function prettySource(source) {
  if (typeof source !== "string") return plain(source);
  if (!/^\s*[[{]/u.test(source) || source.length > TEXT_SHOWN) return source.slice(0, TEXT_SHOWN);
  try {
    return JSON.stringify(JSON.parse(source), null, 2);
  } catch {
    return source;
  }
}
