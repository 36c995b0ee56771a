// ---- Lanes: which row each branch and each event of the timeline stands in ----
// A branch stands above what it forked. Branches that do not overlap in time share rows, so a loop
// of forks takes no more rows than its widest round.

const MAX_SUBLANES = 8; // events of one branch that overlap, as the texts of a gen with n > 1

class Row {
  constructor(run, depth) {
    this.run = run;
    this.depth = depth;
    this.branches = []; // those that begin in this row
    this.events = []; // by `from`
    this.thin = []; // those of collapsed branches, by `from`
    this.isFirst = false; // of its run
  }
}

/** The rows of all `runs`, in order. Sets `row` of branches and events. */
function layOut(runs) {
  const rows = [];
  for (const run of runs) {
    const begin = rows.length;
    const blocks = new Map();
    // Children stand after their parents, so backwards every block is known before it is placed.
    for (let i = run.branches.length - 1; i >= 0; i--) blocks.set(run.branches[i], blockOf(run.branches[i], blocks));
    for (let i = blocks.get(run.root).height; i > 0; i--) rows.push(new Row(run, 0));
    rows[begin].isFirst = true;
    place(run, begin, blocks, rows);
  }
  for (const row of rows) {
    row.events.sort((a, b) => a.from - b.from);
    row.thin.sort((a, b) => a.from - b.from);
  }
  return rows;
}

/** How many rows a branch and all below it take, and where in them its children begin. */
function blockOf(branch, blocks) {
  const own = sublanes(branch.events);
  const block = { height: own.height, lanes: own.lanes, offsets: new Map(), from: branch.from, to: branch.to };
  for (const child of branch.children) {
    block.from = Math.min(block.from, blocks.get(child).from);
    block.to = Math.max(block.to, blocks.get(child).to);
  }
  if (branch.isCollapsed) return block;
  const busyUntil = []; // by row below the branch's own
  let previous = null;
  for (const child of branch.children) {
    const { height, from, to } = blocks.get(child);
    // Siblings that are born together fill one row after the other: no need to look again.
    const isTwin = previous && previous.from === from && previous.height === height && previous.to > from;
    const row = firstFree(busyUntil, from, height, isTwin ? previous.row + height : 0);
    for (let i = row; i < row + height; i++) busyUntil[i] = to;
    block.offsets.set(child, own.height + row);
    previous = { from, height, row, to };
  }
  block.height += busyUntil.length;
  return block;
}

/** The first of `height` rows in sequence that are free at `time`. */
function firstFree(busyUntil, time, height, begin) {
  for (let row = begin; ; row++) {
    let i = 0;
    while (i < height && (row + i >= busyUntil.length || busyUntil[row + i] <= time)) i++;
    if (i === height) return row;
    row += i;
  }
}

/**
 * For events of one branch that overlap: the lane of each, and how many there are. A join is asked for
 * while what stands before it still runs; it only waits, and lies behind the others in the first lane.
 */
function sublanes(events) {
  const busyUntil = [-Infinity];
  const lanes = [];
  for (const event of events) {
    let lane = 0;
    if (event.to > event.from && !event.isWait) {
      while (lane < MAX_SUBLANES - 1 && lane < busyUntil.length && busyUntil[lane] > event.from) lane++;
      busyUntil[lane] = event.to;
    }
    lanes.push(lane);
  }
  return { lanes, height: busyUntil.length };
}

function place(run, begin, blocks, rows) {
  const depths = new Map([[run.root, 0]]);
  run.root.row = begin;
  run.root.isHidden = false;
  for (const branch of run.branches) {
    const block = blocks.get(branch);
    const depth = depths.get(branch);
    if (branch.isHidden) for (const event of branch.events) putThin(event, branch.row, rows);
    else {
      rows[branch.row].branches.push(branch);
      branch.events.forEach((event, i) => {
        event.row = branch.row + block.lanes[i];
        event.isThin = false;
        rows[event.row].events.push(event);
      });
      rows[branch.row].depth = depth;
    }
    for (const child of branch.children) {
      child.isHidden = branch.isHidden || branch.isCollapsed;
      child.row = child.isHidden ? branch.row : branch.row + block.offsets.get(child);
      depths.set(child, depth + 1);
    }
  }
}

function putThin(event, row, rows) {
  event.row = row;
  event.isThin = true;
  rows[row].thin.push(event);
}
