"use strict";
// The viewer: a list of documents that is filtered and sorted, and one of them token by token. One
// document is built at a time, and every text reaches the page as a text node. The data are `note`,
// `noun` and `item` (what a document, and a part of it that can be selected, are called), `keys`
// (the legend: [class, text]), `columns` of the list, `sorts` ([name, column, 1 or -1]; the first is
// used at once) and `documents`. A document has its `number` (its link is #doc-NUMBER), `row` (a
// [value, text] per column), `head` (a line of figures), `id`, and `segments`: {title, learned,
// items, seconds}; an item has `words`, each [text, class], and `about`, the lines that are shown
// when it is selected. Segments with `seconds` stand side by side, and are played at that speed.
//
// A page may hold millions of tokens of a dataset. Their documents are compact, and expanded here:
// tokens `t` are rows of one table of `texts`, `tokens` (ids) and `special` rows. `m` and `known` are
// runs [a, b, a, b, ...] of supervised tokens and of tokens with a stored first choice of the target;
// `wrong` has position and row of every first choice that is another token; `turns` are
// [role, start, end].
(function () {
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
  const data = JSON.parse(document.getElementById("data").textContent);
  const documents = data.documents;
  const state = { at: 0, now: 0, items: [], order: [], timer: 0 };

  // make("p", {class: "note"}, "text", child, ...): an element; strings become text, never markup.
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, String(value));
    }
    element.append(...children);
    return element;
  }
  const count = (value) => value.toLocaleString("en-US");

  // Append the text of a token. Line ends, tabs, spaces and characters that cannot be seen are set
  // apart.
  function showText(element, text) {
    const set = (name, part) => element.append(make("span", { class: name }, part));
    for (const run of text.match(/\n|\t| +|[^\n\t ]+/g) || []) {
      if (run === "\n") set("nl", "\n");
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
      const about = [`${JSON.stringify(text)} \u00b7 token ${count(i)}, id ${data.tokens[t[i]]} \u00b7 ${said} \u00b7 ${role ? `turn of ${role}` : "context"}`];
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
      segments.push({ title: `${name} \u00b7 ${count(end - start)} tokens`, learned, items });
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

  function build(segment) {
    const text = make("div", { class: "text", dir: "auto" });
    const items = segment.items.map((item) => {
      const element = make("span", { class: "item", "data-i": state.items.length, tabindex: -1 });
      for (const [word, kind] of item.words) {
        const part = make("span", { class: `tok ${kind}` });
        showText(part, word);
        element.append(part);
      }
      state.items.push({ about: item.about, element });
      text.append(element);
      return element;
    });
    if (segment.seconds) state.played.push({ items, seconds: segment.seconds });
    return make("div", { class: segment.learned ? "turn learned" : "turn" }, make("h3", {}, segment.title), text);
  }

  function show(number) {
    cancelAnimationFrame(state.timer);
    state.at = number;
    const shown = documents[number];
    const segments = shown.segments || expanded(shown);
    Object.assign(state, { items: [], played: [], now: 0 });
    const parts = segments.map((segment) => [segment.seconds, build(segment)]);
    const beside = make("div", { class: "beside" }, ...parts.filter(([timed]) => timed).map(([, part]) => part));
    tokens.replaceChildren(...parts.filter(([timed]) => !timed).map(([, part]) => part));
    if (state.played.length) tokens.append(beside);
    replay.hidden = !state.played.length;
    head.replaceChildren(shown.head);
    identity.replaceChildren(shown.id);
    tokens.setAttribute("aria-label", `${data.item}s of ${shown.id}`);
    detail.replaceChildren(`Point at a ${data.item} to see what it is. Keys: \u2190 \u2192 ${data.item}s, J K ${data.noun}s, / filter${replay.hidden ? "" : ", R replay"}.`);
    if (state.items.length) state.items[0].element.tabIndex = 0;
    mark();
  }

  function select(i) {
    const last = state.items[state.now].element;
    last.classList.remove("now");
    last.tabIndex = -1; // by Tab one item is reached, by the arrow keys the others
    state.now = i;
    const { element, about } = state.items[i];
    element.classList.add("now");
    element.tabIndex = 0;
    detail.replaceChildren(...about.map((line) => make("div", {}, line)));
  }

  // Show the items of each timed segment one after another, evenly over the seconds that it took.
  function play() {
    cancelAnimationFrame(state.timer);
    const start = performance.now();
    const step = (now) => {
      let done = true;
      for (const { items, seconds } of state.played) {
        const shown = Math.floor(((now - start) / 1000 / seconds) * items.length);
        items.forEach((item, i) => item.classList.toggle("later", i >= shown));
        done = done && shown >= items.length;
      }
      if (!done) state.timer = requestAnimationFrame(step);
    };
    step(start);
  }

  // -- the list -----------------------------------------------------------------------------------

  function textOf(one) {
    one.text ??= [
      one.id,
      ...one.row.map(([, text]) => text),
      one.t ? one.t.map((row) => data.texts[row]).join("") : one.segments.flatMap((s) => s.items.flatMap((item) => item.words.map(([text]) => text))).join(""),
    ].join("\n").toLowerCase();
    return one.text;
  }

  // Fill the list: what is filtered, in the order chosen; values that are not known come last.
  function arrange() {
    const query = filter.value.toLowerCase();
    const [, column, sign] = data.sorts[sort.selectedIndex];
    const value = (i) => documents[i].row[column][0];
    state.order = documents.map((_, i) => i).filter((i) => !query || textOf(documents[i]).includes(query));
    state.order.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)) || a - b);
    const cells = (one) => one.row.map(([value, text], i) => {
      const inside = i ? text : make("a", { href: `#doc-${one.number}` }, text);
      return make("td", typeof value === "number" ? { class: "number" } : {}, inside);
    });
    rows.replaceChildren(...state.order.map((i) => make("tr", { "data-i": i }, ...cells(documents[i]))));
    status.replaceChildren(state.order.length ? `${count(state.order.length)} of ${count(documents.length)} ${data.noun}s` : `No ${data.noun} of this page has this text.`);
    mark();
  }

  function mark() {
    for (const row of rows.children) {
      const now = Number(row.dataset.i) === state.at;
      row.setAttribute("aria-current", now);
      if (!now) continue;
      const top = row.offsetTop - list.querySelector("thead").offsetHeight; // which stays in sight
      const least = row.offsetTop + row.offsetHeight - list.clientHeight;
      list.scrollTop = Math.max(Math.min(list.scrollTop, top), least);
    }
  }

  function move(by) {
    const at = state.order.indexOf(state.at) + by;
    const next = state.order[Math.min(Math.max(at, 0), state.order.length - 1)];
    if (next !== undefined) location.replace(`#doc-${documents[next].number}`);
  }

  function follow() {
    const number = /^#doc-(\d+)$/.exec(location.hash);
    const at = number ? documents.findIndex((one) => one.number === Number(number[1])) : -1;
    if (at >= 0) show(at);
    return at >= 0;
  }

  // -- the page's elements ------------------------------------------------------------------------

  const sort = make("select", { onchange: arrange }, ...data.sorts.map(([name]) => make("option", {}, name)));
  const filter = make("input", { type: "search", placeholder: `text in the ${data.noun}s`, oninput: arrange });
  const replay = make("button", { type: "button", onclick: play }, "\u25b6 Replay at the measured speed");
  const names = data.columns.map(([name, form]) => make("th", { scope: "col", class: form === "text" ? "" : "number" }, name));
  const rows = make("tbody", {});
  const list = make("div", { class: "list", tabindex: 0, role: "region", "aria-label": `List of ${data.noun}s` }, make("table", {}, make("thead", {}, make("tr", {}, ...names)), rows));
  const status = make("p", { class: "status", role: "status" });
  const head = make("p", { class: "head" });
  const identity = make("p", { class: "note" });
  const legend = make("p", { class: "legend" }, ...data.keys.map(([kind, text]) => make("span", { class: `tok key ${kind}` }, text)));
  const tokens = make("div", { role: "group", class: data.texts ? "tokens" : "tokens steps" });
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  for (const kind of ["mouseover", "focusin", "click"]) {
    tokens.addEventListener(kind, (event) => {
      const element = event.target.closest(".item");
      if (element) select(Number(element.dataset.i));
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, .scroll")) return;
    const last = state.items.length - 1;
    const to = { ArrowLeft: state.now - 1, ArrowRight: state.now + 1 }[event.key];
    const acts = { j: () => move(1), k: () => move(-1), "/": () => filter.focus(), r: play };
    const act = to === undefined ? acts[event.key] : () => state.items[Math.min(Math.max(to, 0), last)]?.element.focus();
    if (!act) return;
    event.preventDefault();
    act();
  });
  window.addEventListener("hashchange", follow);
  const bar = make("div", { class: "bar" }, make("label", {}, "Sort", sort), make("label", {}, "Filter", filter), replay);
  const shown = make("div", { class: "shown" }, head, identity, legend, tokens, detail);
  const sides = make("div", { class: "sides" }, make("div", {}, bar, status, list), shown);
  document.getElementById("viewer").append(sides, make("p", { class: "note" }, data.note));
  arrange();
  if (!follow()) show(state.order[0]);
  document.documentElement.dataset.ready = "yes"; // what tests wait for
})();
