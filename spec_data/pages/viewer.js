"use strict";
// The viewer of tokens: one document is built at a time, and every text reaches the page as a text
// node. The data are `note` (a sentence above), `noun` and `item` (what a document, and a part of it
// that can be selected, are called), `keys` (the legend: [class, text]) and `documents`. A document
// has a `head` (a line of figures), an `id`, and `segments`: {title, learned, items}; an item has
// `words`, each [text, class], and `about`, the lines that are shown when it is selected.
//
// A page may hold millions of tokens of a dataset. Their documents are compact, and expanded here:
// tokens `t` are rows of one table of `texts`, `tokens` (ids) and `special` rows. `m` and `known` are
// runs [a, b, a, b, ...] of supervised tokens and of tokens with a stored first choice of the target;
// `wrong` has position and row of every first choice that is another token; `turns` are
// [role, start, end].
page.viewer = function (box, data) {
  const { make, format } = page;
  const GONE = ["rejected", "differs"]; // no part of the text: <del> tells screen readers
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
  const documents = data.documents;
  const state = { at: 0, now: 0, items: [] };

  // Append the text of a token. Line ends, tabs, spaces and characters that cannot be seen are set
  // apart; a token that is not part of the text begins no new line.
  function showText(element, text, inline) {
    const set = (name, part) => element.append(make("span", { class: name }, part));
    for (const run of text.match(/\n|\t| +|[^\n\t ]+/g) || []) {
      if (run === "\n") set("nl", inline ? "" : "\n");
      else if (run === "\t") set("tab", "\t");
      else if (run[0] === " ") set("sp", run);
      else for (const one of HIDDEN.test(run) ? run : [run]) {
        if (one.length < 3 && HIDDEN.test(one)) set("esc", `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
        else element.append(one);
      }
    }
  }

  // -- the compact form of a dataset's document ---------------------------------------------------

  function marks(spans, length) {
    const out = new Uint8Array(length);
    for (let i = 0; i < spans.length; i += 2) out.fill(1, spans[i], spans[i + 1]);
    return out;
  }

  function expanded({ t, m, known, wrong = [], turns }) {
    const [supervised, stored] = [marks(m, t.length), marks(known || [], t.length)];
    const other = new Map();
    for (let k = 0; k < wrong.length; k += 2) other.set(wrong[k], data.texts[wrong[k + 1]]);
    const item = (i, role) => {
      const text = data.texts[t[i]];
      const kinds = [supervised[i] && "sup", data.special.includes(t[i]) && "special", other.has(i) && "wrong"];
      const said = supervised[i] ? "supervised" : "not supervised";
      const about = [`${JSON.stringify(text)} \u00b7 token ${format(i, "count")}, id ${data.tokens[t[i]]} \u00b7 ${said} \u00b7 ${role ? `turn of ${role}` : "context"}`];
      if (other.has(i)) about.push(`The target's first choice: ${JSON.stringify(other.get(i))}.`);
      else if (known) about.push(stored[i] ? "The target's first choice." : "No prediction of the target is stored for this token.");
      return { words: [[text, kinds.filter(Boolean).join(" ")]], about };
    };
    const segments = [];
    const add = (role, start, end) => {
      if (end <= start) return;
      const learned = supervised.subarray(start, end).some(Boolean);
      const name = role ? role + (learned ? "" : ", not supervised") : "context, not supervised";
      const items = Array.from({ length: end - start }, (_, i) => item(start + i, role));
      segments.push({ title: `${name} \u00b7 ${format(end - start, "count")} tokens`, learned, items });
    };
    let at = 0;
    for (const [role, start, end] of [...turns].sort((a, b) => a[1] - b[1])) {
      add("", at, start);
      add(role, Math.max(start, at), end);
      at = Math.max(at, end);
    }
    add("", at, t.length);
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
          const part = make(gone ? "del" : "span", { class: `tok ${kind}` });
          showText(part, word, gone);
          element.append(part);
        }
        state.items.push({ about: item.about, element });
        text.append(element);
      }
      tokens.append(make("div", { class: segment.learned ? "turn learned" : "turn" }, make("h3", {}, segment.title), text));
    }
  }

  function show(number) {
    state.at = Math.min(Math.max(number, 0), documents.length - 1);
    const shown = documents[state.at];
    state.items = [];
    tokens.replaceChildren();
    build(shown.segments || expanded(shown));
    head.replaceChildren(shown.head);
    identity.replaceChildren(shown.id);
    place.value = String(state.at + 1);
    before.disabled = state.at === 0;
    after.disabled = state.at === documents.length - 1;
    tokens.setAttribute("aria-label", `${data.item}s of ${shown.id}`);
    detail.replaceChildren(`Point at a ${data.item}, or press Tab and the arrow keys, to see what it is.`);
    state.now = 0;
    if (state.items.length) state.items[0].element.tabIndex = 0;
  }

  function select(i, focus) {
    const last = state.items[state.now].element;
    last.classList.remove("now");
    last.tabIndex = -1; // by Tab one item is reached, by the arrow keys the others
    state.now = i;
    const { element, about } = state.items[i];
    element.classList.add("now");
    element.tabIndex = 0;
    detail.replaceChildren(...about.map((line) => make("div", {}, line)));
    if (focus) element.focus();
  }

  // Show the next document that has the text searched for; the browser's own search marks it.
  function find() {
    const query = search.value.toLowerCase();
    const texts = ({ t, segments }) =>
      t ? t.map((row) => data.texts[row]) : segments.flatMap((s) => s.items.flatMap((item) => item.words.map(([text]) => text)));
    const order = documents.map((_, i) => (state.at + 1 + i) % documents.length);
    const next = query ? order.find((i) => texts(documents[i]).join("").toLowerCase().includes(query)) : undefined;
    if (next !== undefined) show(next);
    status.replaceChildren(query && next === undefined ? `No ${data.noun} of this page has this text.` : "");
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
  const bar = make(
    "div",
    { class: "bar" },
    make("div", { class: "group" }, before, make("label", {}, `Shown, of ${format(documents.length, "count")}`, place), after),
    make("div", { class: "group" }, make("label", {}, "Search", search), button("Find", find)),
  );
  const status = make("p", { class: "status", role: "status" });
  const head = make("p", { class: "head" });
  const identity = make("p", { class: "note" });
  const legend = make("p", { class: "legend" }, ...data.keys.map(([kind, text]) => make("span", { class: `tok key ${kind}` }, text)));
  const tokens = make("div", { role: "group", class: data.texts ? "tokens" : "tokens steps" });
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  for (const kind of ["mouseover", "focusin", "click"]) {
    tokens.addEventListener(kind, (event) => {
      const element = event.target.closest(".item");
      if (element) select(Number(element.dataset.i), false);
    });
  }
  tokens.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const last = state.items.length - 1;
    const to = { ArrowLeft: state.now - 1, ArrowRight: state.now + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(Math.min(Math.max(to, 0), last), true);
  });
  const shown = make("div", {}, tokens, detail); // what an item is stays in sight
  box.append(make("div", { class: "viewer" }, make("p", { class: "note" }, data.note), bar, status, head, identity, legend, shown));
  show(0);
};
