// ---- The trace as the views need it: checked, flat lists, times and sums made once ----

const CONSTANT_KINDS = new Set(["text", "special", "role_begin", "role_end", "scope_begin", "scope_end"]);
const CALL_KINDS = new Set(["gen", "select", "score"]);
const ENDED_BADLY = new Set(["failed", "timed_out"]);
const STOPPED = new Set(["cancelled", "not_done"]);

/** One primitive or constant of a branch. */
class TraceEvent {
  constructor(data, branch, place) {
    data = record(data);
    this.data = data;
    this.branch = branch;
    this.place = place; // in its branch
    this.index = -1; // in the trace
    this.kind = text(data.kind) || "unknown";
    this.variable = text(data.variable);
    this.name = text(data.name) || (this.variable ? `${this.kind}('${this.variable}')` : this.kind);
    this.status = text(data.status) || "ok";
    this.asked = number(data.asked);
    this.start = number(data.start) ?? this.asked ?? branch.start;
    this.hasBegun = number(data.start) !== null;
    this.end = number(data.end);
    this.text = text(data.text);
    this.isWait = this.kind === "join" || this.kind === "first_k"; // waits for branches, computes nothing
    this.isConstant = CONSTANT_KINDS.has(this.kind);
    this.isCall = CALL_KINDS.has(this.kind) || Boolean(data.prompt) || Boolean(data.tokens);
    const usage = record(data.usage);
    const prompt = record(data.prompt);
    this.promptTokens = count(usage.prompt_tokens ?? prompt.tokens);
    this.cached = count(usage.cached_tokens ?? prompt.cached);
    this.prefilled = count(usage.prefilled_tokens ?? prompt.prefilled);
    this.forced = count(usage.forced_tokens ?? list(record(data.tokens).forced).length);
    this.decoded = count(usage.decoded_tokens);
    this.shared = count(usage.shared_tokens); // came with the answer to an equal request
    this.queued = number(data.queued);
    this.prefill = number(data.prefill);
    this.decode = number(data.decode);
    this.row = null; // where the timeline shows it
  }

  get run() {
    return this.branch.run;
  }

  get isBad() {
    return ENDED_BADLY.has(this.status);
  }

  get isStopped() {
    return STOPPED.has(this.status);
  }

  get isOpen() {
    return this.status === "running" || this.status === "waiting";
  }

  /** Seconds it took, so far if it runs; null if it has not begun. */
  get seconds() {
    return this.hasBegun && this.end !== null ? Math.max(0, this.end - this.start) : null;
  }

  get hitRate() {
    return this.cached + this.prefilled ? this.cached / (this.cached + this.prefilled) : null;
  }

  /** Which of the four families of colours it has. */
  get family() {
    return CALL_KINDS.has(this.kind) ? this.kind : "other";
  }

  get reference() {
    return `${this.run.index}.${this.branch.index}.${this.place}`;
  }
}

class Branch {
  constructor(data, run, index) {
    data = record(data);
    this.data = data;
    this.run = run;
    this.index = index;
    this.path = list(data.path).map(text);
    this.status = text(data.status) || "ok";
    this.start = number(data.start);
    this.end = number(data.end);
    this.parent = null;
    this.fork = null; // the event of the parent that made it
    this.join = null; // the event that took it in, if any
    this.children = [];
    this.isCollapsed = false;
    this.events = list(data.events).map((each, place) => new TraceEvent(each, this, place));
  }

  get label() {
    return this.path.length ? this.path.join(".") : "root";
  }
}

class Run {
  constructor(data, index) {
    data = record(data);
    this.data = data;
    this.index = index;
    this.program = text(data.program) || "program";
    this.status = text(data.status) || "ok";
    this.start = number(data.start);
    this.end = number(data.end);
    const branches = list(data.branches);
    this.branches = branches.map((each, place) => new Branch(each, this, place));
    if (!this.branches.length) this.branches.push(new Branch({}, this, 0));
    this._connect();
  }

  get root() {
    return this.branches[0];
  }

  get seconds() {
    return this.to - this.from;
  }

  /** Its arguments in short, on one line. */
  get given() {
    const values = Object.values(record(this.data.arguments));
    return values.slice(0, 6).map((each) => glimpse(each, 40)).join(", ");
  }

  get label() {
    return this.given ? `${this.program}(${this.given})` : this.program;
  }

  _connect() {
    this.branches.slice(1).forEach((branch, i) => {
      // Parents stand before their children; anything else is taken as a branch of the root, so that
      // a damaged file cannot make a circle.
      const parent = branch.data.parent;
      const isSound = Number.isInteger(parent) && parent >= 0 && parent <= i;
      branch.parent = this.branches[isSound ? parent : 0];
      branch.parent.children.push(branch);
      branch.fork = branch.parent.events[branch.data.forked_by] ?? null;
    });
    for (const branch of this.branches) {
      for (const event of branch.events) {
        if (!event.isWait) continue;
        for (const child of list(event.data.children)) {
          const joined = this.branches[child];
          if (joined && joined.parent === branch && !joined.join) joined.join = event;
        }
      }
    }
  }
}

const TOKEN_KINDS = ["cached", "prefilled", "forced", "decoded", "shared"];

/** Sums of a list of events. */
class Totals {
  constructor(events) {
    Object.assign(this, { primitives: 0, calls: 0, cached: 0, prefilled: 0, forced: 0, decoded: 0, shared: 0, failed: 0, stopped: 0 });
    for (const event of events) {
      if (!event.isConstant) this.primitives += 1;
      if (event.isCall) this.calls += 1;
      for (const name of TOKEN_KINDS) this[name] += event[name];
      if (event.isBad) this.failed += 1;
      else if (event.isStopped) this.stopped += 1;
    }
  }

  get prompt() {
    return this.cached + this.prefilled;
  }

  get completion() {
    return this.forced + this.decoded + this.shared;
  }

  get hitRate() {
    return this.prompt ? this.cached / this.prompt : null;
  }
}

class Trace {
  constructor(data) {
    this.data = record(data);
    this.runs = list(this.data.runs).map((each, index) => new Run(each, index));
    this.branches = this.runs.flatMap((run) => run.branches);
    this.events = this.branches.flatMap((branch) => branch.events);
    this.events.forEach((event, index) => {
      event.index = index;
    });
    this.primitives = this.events.filter((event) => !event.isConstant);
    this._settleTimes();
    this.totals = new Totals(this.events);
    this.failedRuns = this.runs.filter((run) => ENDED_BADLY.has(run.status)).length;
    this.prefixes = readPrefixes(this.data.prefixes);
  }

  /** Which texts the ids of likely tokens have; by run. */
  vocabulary(run) {
    return record(list(this.data.vocabulary)[run.data.backend ?? 0]);
  }

  event(reference) {
    const [run, branch, place] = text(reference).split(".").map(Number);
    return this.runs[run]?.branches[branch]?.events[place] ?? null;
  }

  /** Every event gets a start and an end to be drawn at: `from` and `to`. */
  _settleTimes() {
    let low = Infinity;
    let high = -Infinity;
    const see = (time) => {
      if (time === null) return;
      low = Math.min(low, time);
      high = Math.max(high, time);
    };
    for (const each of [...this.runs, ...this.branches, ...this.events]) {
      see(each.start);
      see(each.end);
    }
    if (isNumber(this.data.duration) && low !== Infinity) see(this.data.duration);
    if (low === Infinity) [low, high] = [0, 0];
    this.begin = low;
    this.finish = Math.max(high, low + 1e-6);
    for (const branch of this.branches) {
      let before = branch.start ?? branch.fork?.to ?? branch.parent?.from ?? branch.run.start ?? low;
      branch.from = before;
      branch.to = before;
      for (const event of branch.events) {
        // What has not begun stands behind what it waits for.
        event.from = event.hasBegun ? event.start : Math.max(event.asked ?? before, before);
        event.to = event.end ?? (event.status === "running" ? this.finish : event.from);
        if (event.to < event.from) event.to = event.from;
        before = event.from;
        branch.to = Math.max(branch.to, event.to);
      }
      if (branch.events.length) branch.from = Math.min(branch.from, ...firstAndLast(branch.events));
      if (branch.end !== null) branch.to = Math.max(branch.to, branch.end);
    }
    // A program may go on with its branches after its root has ended.
    for (const run of this.runs) {
      run.from = run.start ?? run.root.from;
      run.to = run.end ?? run.branches.reduce((latest, branch) => Math.max(latest, branch.to), run.from);
    }
  }
}

const firstAndLast = (events) => [events[0].from, events[events.length - 1].from];

/** The prefix tree: nodes with children, the depth they begin at, and how many prompts go through. */
function readPrefixes(data) {
  const nodes = list(record(data).nodes).map((each, index) => {
    each = record(each);
    const length = count(each.num_tokens);
    const uses = count(each.uses);
    const computed = Math.min(number(each.computed) ?? length, uses * length);
    return {
      index, length, uses, computed, ends: count(each.ends), text: text(each.text), isCut: Boolean(each.cut),
      first: list(each.first), children: [], parent: null, start: number(each.start),
      parentIndex: Number.isInteger(each.parent) && each.parent >= 0 && each.parent < index ? each.parent : null,
      reuse: uses * length ? 1 - computed / (uses * length) : 0,
      saved: Math.max(0, uses * length - computed),
      weight: 0,
    };
  });
  const roots = [];
  for (const node of nodes) {
    node.parent = node.parentIndex === null ? null : nodes[node.parentIndex];
    if (node.start === null) node.start = node.parent ? node.parent.start + node.parent.length : 0;
    (node.parent ? node.parent.children : roots).push(node);
  }
  // Heights are shares of leaves; children stand after their parents, so one pass backwards sums them.
  for (let i = nodes.length - 1; i >= 0; i--) {
    const node = nodes[i];
    if (!node.children.length) node.weight = 1;
    if (node.parent) node.parent.weight += node.weight;
  }
  return {
    nodes, roots,
    omitted: count(record(data).omitted_nodes),
    depth: nodes.reduce((deepest, node) => Math.max(deepest, node.start + node.length), 0),
  };
}

/** Columns of tokens as rows: id, text, logprob, whether forced, the likeliest others. */
function readTokens(data, vocabulary) {
  data = record(data);
  const ids = list(data.ids);
  const forced = new Set(list(data.forced));
  const textOf = (id) => (Object.hasOwn(vocabulary, id) ? text(vocabulary[id]) : `#${id}`);
  return ids.map((id, i) => ({
    id: number(id),
    text: text(list(data.texts)[i]),
    logprob: number(list(data.logprobs)[i]),
    isForced: forced.has(i),
    top: list(list(data.top)[i]).map((pair) => {
      const [other, logprob] = list(pair);
      return { id: number(other), text: textOf(other), logprob: number(logprob) };
    }),
  }));
}
