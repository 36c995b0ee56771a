// ---- Tokens coloured by probability, with what else could have come ----

const TOKENS_SHOWN = 1500; // at first: each is an element of its own
const ALTERNATIVES_SHOWN = 6;

/**
 * Where on the scale a probability lies, from 0 (sure) to 1 (hardly possible). A power evens out what
 * matters to a reader: 0.9, 0.5, 0.1 and 0.01 lie about equally far apart.
 */
const paleness = (probability) => 1 - probability ** 0.35;

/** Characters that leave no trace on paper, as signs. */
function spellOut(value) {
  const shown = value.replace(/[\n\r\t\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/gu, (sign) => {
    if (sign === "\n") return "↵";
    if (sign === "\t") return "⇥";
    return `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`;
  });
  return shown.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";
}

/** The tokens of a text, and a card that tells about the one pointed at. */
class TokenView {
  constructor(tokens) {
    this.tokens = tokens;
    this.shown = 0;
    this.current = null;
    this.text = make("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens. Left and right arrows move between them.",
      onkeydown: (event) => this._onKey(event),
    });
    this.text.addEventListener("pointerover", (event) => this._pointAt(event.target));
    this.text.addEventListener("click", (event) => this._pointAt(event.target));
    // Room for the alternatives from the start, so that nothing below moves.
    const hasTop = tokens.some((token) => token.top.length);
    this.inspector = make("div", { class: `inspector${hasTop ? " has-top" : ""}`, role: "status", "aria-live": "polite" });
    this.more = make("button", { type: "button", onclick: () => this._showMore() });
    this._showMore();
    this._inspect(null);
    const hasProbabilities = tokens.some((token) => token.logprob !== null);
    const hasForced = tokens.some((token) => token.isForced);
    this.element = make("div", {}, tokenScale(hasProbabilities, hasForced), this.text, this.more, this.inspector);
  }

  _showMore() {
    const end = Math.min(this.tokens.length, this.shown + TOKENS_SHOWN);
    const parts = [];
    for (let i = this.shown; i < end; i++) parts.push(this._element(this.tokens[i], i));
    this.text.append(...parts);
    this.shown = end;
    const left = this.tokens.length - end;
    this.more.hidden = !left;
    this.more.textContent = `Show ${counted(Math.min(left, TOKENS_SHOWN), "more token")} of ${grouped(left)}`;
  }

  _element(token, index) {
    const names = ["token"];
    if (token.isForced) names.push("is-forced");
    if (token.logprob === null) names.push("is-unknown");
    const element = make("span", { class: names.join(" "), "data-token": String(index) });
    if (token.logprob !== null) element.style.setProperty("--t", paleness(Math.exp(token.logprob)).toFixed(3));
    if (token.text === "") element.append(make("span", { class: "sign" }, "·"));
    else {
      // A line break is shown as a sign and then breaks the line, so that its colour can be seen.
      token.text.split(/(\n)/u).forEach((part) => {
        if (part === "\n") element.append(make("span", { class: "sign" }, "↵"), "\n");
        else if (part) element.append(part);
      });
    }
    return element;
  }

  _pointAt(target) {
    const element = target.closest?.("[data-token]");
    if (element) this._setCurrent(Number(element.dataset.token));
  }

  _setCurrent(index) {
    this.text.querySelector(".is-current")?.classList.remove("is-current");
    this.current = index;
    const element = this.text.children[index];
    element?.classList.add("is-current");
    this._inspect(this.tokens[index]);
    return element;
  }

  _onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.tokens.length) return;
    event.preventDefault();
    event.stopPropagation();
    const from = this.current ?? (steps[event.key] > 0 ? -1 : 1);
    const element = this._setCurrent(clamp(from + steps[event.key], 0, this.shown - 1));
    element?.scrollIntoView({ block: "nearest" });
  }

  _inspect(token) {
    if (!token) {
      this.inspector.replaceChildren(make("p", { class: "muted" }, "Point at a token, or focus the text and use the arrow keys, to see its probability and what else was likely."));
      return;
    }
    const probability = token.logprob === null ? null : Math.exp(token.logprob);
    const facts = [make("b", { class: "mono" }, spellOut(token.text)), `  id ${token.id ?? "–"}`];
    if (probability !== null) facts.push(`  ·  probability ${percent(probability)}`);
    else facts.push(token.isForced ? "" : "  ·  no probability recorded");
    if (token.isForced) facts.push("  ·  forced: the constraint allowed nothing else");
    const top = token.top.filter((each) => each.logprob !== null);
    const isAmong = top.some((each) => each.id === token.id);
    const shown = top.slice(0, ALTERNATIVES_SHOWN);
    if (!isAmong && top.length && probability !== null) shown.push({ id: token.id, text: token.text, logprob: token.logprob });
    this.inspector.replaceChildren(
      make("div", {}, ...facts),
      make("div", { class: "top" }, ...shown.flatMap((each) => {
        const share = Math.exp(each.logprob);
        const isThis = each.id === token.id ? " is-this" : "";
        return [
          make("span", { class: `option${isThis}`, title: `id ${each.id ?? "–"}` }, spellOut(each.text)),
          make("span", { class: "meter token" }, make("span", { style: { width: `${clamp(share * 100, 0, 100)}%` } })),
          make("span", { class: `number${isThis}` }, percent(share)),
        ];
      })));
  }
}

function tokenScale(hasProbabilities, hasForced) {
  const parts = [];
  if (hasProbabilities) {
    const steps = Array.from({ length: 24 }, (_, i) => make("span", { class: "token", style: { "--t": String(i / 24) } }));
    const ticks = [1, 0.5, 0.1, 0.01].map((each) => make("span", { class: "tick", style: { left: `${paleness(each) * 100}%` } }, percent(each)));
    parts.push("Probability", make("span", { class: "ramp-frame", role: "img", "aria-label": "Scale of probabilities, from 100% to 0" }, make("span", { class: "ramp" }, ...steps), ...ticks));
  }
  if (hasForced) parts.push(make("span", {}, make("span", { class: "token is-forced" }, "forced"), " by the constraint"));
  return make("div", { class: "scale" }, ...parts);
}
