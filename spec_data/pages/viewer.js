"use strict";
// The viewer of tokens. The data are described in viewer.py; one document is built at a time, and
// every text reaches the page as a text node.
page.viewer = function (box, data) {
  const { make, format } = page;
  const BOUNDS = [0.25, 1, 2, 3]; // nats, between the shades of entropy
  const GONE = ["rejected", "unused", "differs"]; // no part of the text: <del> tells screen readers
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
  const MARKS = /(\u27e8[0-9A-F]{2}(?: [0-9A-F]{2})*\u27e9)/; // bytes, as token_texts.py writes them
  const documents = data.documents;
  const state = { at: 0, now: 0, items: [], hits: [], query: "" };

  // Append the text of a token. Line ends, tabs, spaces, characters that cannot be seen and marks
  // of bytes are set apart; a token that is not part of the text begins no new line.
  function showText(element, text, inline) {
    const set = (name, own) => element.append(make("span", { class: name }, own));
    for (const part of text.split(MARKS)) {
      if (MARKS.test(part)) set("esc", part);
      else for (const run of part.match(/\n|\t| +|[^\n\t ]+/g) || []) {
        if (run === "\n") set("nl", inline ? "" : "\n");
        else if (run === "\t") set("tab", "\t");
        else if (run[0] === " ") set("sp", run);
        else for (const own of HIDDEN.test(run) ? run : [run]) {
          if (own.length < 3 && HIDDEN.test(own)) set("esc", `\\u${own.codePointAt(0).toString(16).padStart(4, "0")}`);
          else element.append(own);
        }
      }
    }
  }

  // -- the compact form of a dataset's document ---------------------------------------------------

  function marks(spans, length) {
    const out = new Uint8Array(length);
    for (let i = 0; i < spans.length; i += 2) out.fill(1, spans[i], spans[i + 1]);
    return out;
  }

  const textOf = (own, i) => (own.join && own.join[i]) || data.texts[own.t[i]];

  // The target's prediction of every token, by position.
  function teacherOf(own) {
    const out = { choice: {}, entropy: {}, nll: {} };
    const known = marks(own.known || [], own.t.length);
    let place = 0;
    for (let i = 0; i < known.length; i++) {
      if (!known[i]) continue;
      out.choice[i] = own.t[i];
      if (own.entropy) [out.entropy[i], out.nll[i]] = [own.entropy[place], own.nll[place]];
      place++;
    }
    for (let k = 0; k < (own.wrong || []).length; k += 2) out.choice[own.wrong[k]] = own.wrong[k + 1];
    return out;
  }

  function expanded(own) {
    const { choice, entropy, nll } = teacherOf(own);
    const supervised = marks(own.m, own.t.length);
    const segments = [];
    const add = (role, start, end) => {
      if (end <= start) return;
      const learned = supervised.subarray(start, end).some(Boolean);
      const name = role ? role + (learned ? "" : ", not supervised") : "context, not supervised";
      segments.push({ title: `${name} \u00b7 ${format(end - start, "count")} tokens`, learned, items: [] });
      for (let i = start; i < end; i++) segments.at(-1).items.push(item(i, role));
    };
    const item = (i, role) => {
      const kinds = [supervised[i] ? "sup" : "", data.special.includes(own.t[i]) ? "special" : ""];
      if (i in choice) kinds.push(choice[i] === own.t[i] ? "right" : "wrong");
      if (i in entropy) kinds.push(`e${BOUNDS.filter((bound) => entropy[i] >= bound).length}`);
      const about = () => {
        const said = supervised[i] ? "supervised" : "not supervised";
        const lines = [`${JSON.stringify(textOf(own, i))} \u00b7 token ${format(i, "count")}, id ${data.tokens[own.t[i]]} \u00b7 ${said} \u00b7 ${role ? `turn of ${role}` : "context"}`];
        if (!own.known) return lines;
        if (!(i in choice)) return [...lines, "No prediction of the target is stored for this token."];
        let line = "The target's first choice";
        if (choice[i] !== own.t[i]) line += `: ${JSON.stringify(data.texts[choice[i]])}`;
        if (i in nll) line += `. Probability of this token ${format(Math.exp(-nll[i]), "share")}, entropy ${entropy[i].toFixed(2)} nats`;
        return [...lines, `${line}.`];
      };
      return { words: [[textOf(own, i), kinds.filter(Boolean).join(" ")]], about };
    };
    let at = 0;
    for (const [role, start, end] of [...own.turns].sort((a, b) => a[1] - b[1])) {
      add("", at, start);
      add(role, Math.max(start, at), end);
      at = Math.max(at, end);
    }
    add("", at, own.t.length);
    return segments;
  }

  // -- one document -------------------------------------------------------------------------------

  function build(segments) {
    for (const segment of segments) {
      const text = make("div", { class: "text", dir: "auto" });
      for (const item of segment.items) {
        const element = make("span", { class: "item", "data-i": state.items.length, tabindex: -1 });
        for (const [word, kind] of item.words) {
          const gone = GONE.includes(kind);
          const own = make(gone ? "del" : "span", { class: `tok ${kind}` });
          showText(own, word, gone);
          element.append(own);
        }
        state.items.push({ ...item, element });
        text.append(element);
      }
      const head = segment.title ? [make("h3", {}, segment.title)] : [];
      tokens.append(make("div", { class: segment.learned ? "turn learned" : "turn" }, ...head, text));
    }
  }

  function show(number) {
    state.at = Math.min(Math.max(number, 0), documents.length - 1);
    const own = documents[state.at];
    state.items = [];
    tokens.replaceChildren();
    build(own.segments || expanded(own));
    head.replaceChildren(own.head);
    identity.replaceChildren(own.id);
    place.value = String(state.at + 1);
    before.disabled = state.at === 0;
    after.disabled = state.at === documents.length - 1;
    tokens.setAttribute("aria-label", `${data.item}s of ${own.id}`);
    detail.replaceChildren(`Point at a ${data.item}, or press Tab and the arrow keys, to see its figures.`);
    state.now = 0;
    if (state.items.length) state.items[0].element.tabIndex = 0;
    mark();
  }

  function select(i, focus) {
    const item = state.items[i];
    if (!item) return;
    const last = state.items[state.now].element;
    last.classList.remove("now");
    last.tabIndex = -1; // by Tab one item is reached, by the arrow keys the others
    state.now = i;
    item.element.classList.add("now");
    item.element.tabIndex = 0;
    const lines = typeof item.about === "function" ? item.about() : item.about;
    detail.replaceChildren(...lines.map((line) => make("div", {}, line)));
    if (focus) item.element.focus();
  }

  function showMode() {
    const [name, , keys] = data.modes[Number(colours.value)];
    tokens.className = `tokens ${name}`;
    legend.className = `legend ${name}`;
    legend.replaceChildren(...keys.map(([kind, text]) => make("span", { class: `tok key ${kind}` }, text)));
  }

  // -- search -------------------------------------------------------------------------------------

  // The text of an item as it is searched: a character is where its last byte is.
  const plain = (text) => text.split(MARKS).filter((part) => !MARKS.test(part)).join("").toLowerCase();

  function textOfDocument(own) {
    if (own.t) return own.t.map((_, i) => plain(textOf(own, i))).join("");
    return own.segments.flatMap((s) => s.items.flatMap((item) => item.words.map(([text]) => plain(text)))).join("");
  }

  // Mark the items that hold the text searched for, and return the first of them.
  function mark() {
    const texts = state.items.map((item) => item.words.map(([text]) => plain(text)).join(""));
    const whole = texts.join("");
    const hits = new Uint8Array(whole.length);
    for (let i = state.query ? whole.indexOf(state.query) : -1; i >= 0; i = whole.indexOf(state.query, i + 1)) {
      hits.fill(1, i, i + state.query.length);
    }
    let at = 0;
    state.items.forEach((item, i) => {
      item.element.classList.toggle("hit", hits.subarray(at, (at += texts[i].length)).some(Boolean));
    });
    return tokens.querySelector(".hit");
  }

  function find() {
    const query = search.value.toLowerCase();
    const fresh = query !== state.query;
    state.query = query;
    if (fresh) state.hits = documents.map((own, i) => i).filter((i) => query && textOfDocument(documents[i]).includes(query));
    const { at, hits } = state;
    if (hits.length) show(hits.find((i) => (fresh ? i >= at : i > at)) ?? hits[0]);
    const first = mark();
    if (first) first.scrollIntoView({ block: "nearest" });
    const where = `This text is in ${format(hits.length, "count")} ${data.noun}${hits.length === 1 ? "" : "s"}`;
    const none = query ? `No ${data.noun} of this page has this text.` : "";
    status.replaceChildren(hits.length ? `${where}; this is match ${hits.indexOf(state.at) + 1}.` : none);
  }

  // -- the page's elements ------------------------------------------------------------------------

  const button = (text, act) => make("button", { type: "button", onclick: act }, text);
  const before = button("\u2039 Previous", () => show(state.at - 1));
  const after = button("Next \u203a", () => show(state.at + 1));
  const place = make("input", { type: "number", min: 1, max: documents.length, step: 1 });
  place.addEventListener("change", () => show((Number.parseInt(place.value, 10) || 1) - 1));
  const search = make("input", { type: "search", placeholder: `text in a ${data.noun}` });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") find();
  });
  const colours = make("select", {}, ...data.modes.map(([, title], i) => make("option", { value: i }, title)));
  colours.addEventListener("change", showMode);
  const bar = make(
    "div",
    { class: "bar" },
    make("div", { class: "group" }, before, make("label", {}, `Shown, of ${format(documents.length, "count")}`, place), after),
    make("div", { class: "group" }, make("label", {}, "Search", search), button("Find", find)),
    make("label", {}, "Show", colours),
  );
  const status = make("p", { class: "status", role: "status" });
  const head = make("p", { class: "head" });
  const identity = make("p", { class: "note" });
  const legend = make("p", { class: "legend" });
  const tokens = make("div", { role: "group" });
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const help = `Keys: n and p show the next and the previous ${data.noun}. In the text, the left and right arrow keys move from ${data.item} to ${data.item}, Home and End to the first and the last one.`;
  for (const kind of ["mouseover", "focusin", "click"]) {
    tokens.addEventListener(kind, (event) => {
      const element = event.target.closest(".item");
      if (element) select(Number(element.dataset.i), false);
    });
  }
  const viewer = make("div", { class: "viewer" }, make("p", { class: "note" }, data.note), bar, status, head, identity, legend);
  viewer.append(make("div", {}, tokens, detail), make("p", { class: "note" }, help)); // the figures stay in sight
  viewer.addEventListener("keydown", (event) => {
    if ([search, place, colours].includes(event.target) || event.ctrlKey || event.altKey || event.metaKey) return;
    const inside = tokens.contains(event.target);
    const last = state.items.length - 1;
    const to = { ArrowLeft: state.now - 1, ArrowRight: state.now + 1, Home: 0, End: last }[event.key];
    const step = { n: 1, p: -1 }[event.key];
    if (step) {
      show(state.at + step);
      if (inside) select(0, true);
    } else if (inside && to !== undefined) {
      event.preventDefault();
      select(Math.min(Math.max(to, 0), last), true);
    }
  });
  box.append(viewer);
  showMode();
  show(0);
};
