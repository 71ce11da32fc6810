"use strict";
// The viewer of tokens. One document is built at a time, from the compact form of token_viewer.py.
page.viewers.tokens = function (box, data, tools) {
  const { make, format, showText, withoutMarks } = tools;
  const AT_ONCE = 8000; // tokens that are built at a time
  const BOUNDS = [0.25, 1, 2, 3]; // nats, between the shades of entropy
  const documents = data.documents;
  const special = new Set(data.special);
  const state = { at: 0, mode: "supervised", now: 0, found: null, query: "", read: null };
  const kept = new Map(); // lower-case texts of documents that were searched

  function bytesOf(text) {
    const raw = atob(text);
    const out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  }

  function rowsOf(text) {
    const buffer = bytesOf(text).buffer;
    return data.width === 2 ? new Uint16Array(buffer) : new Uint32Array(buffer);
  }

  function marks(spans, length) {
    const out = new Uint8Array(length);
    for (let i = 0; i < spans.length; i += 2) out.fill(1, spans[i], spans[i + 1]);
    return out;
  }

  // Everything about one document, by token.
  function read(number) {
    const own = documents[number];
    const rows = rowsOf(own.t);
    const length = rows.length;
    const out = { own, rows, length, supervised: marks(own.m, length), known: null };
    if (own.k) {
      out.known = marks(own.k, length);
      out.right = new Uint8Array(length);
      out.choice = new Int32Array(length);
      out.entropy = own.e ? new Float64Array(length) : null;
      out.nll = own.l ? new Float64Array(length) : null;
      const right = bytesOf(own.a);
      const choices = rowsOf(own.c);
      let place = 0;
      let wrong = 0;
      for (let i = 0; i < length; i++) {
        if (!out.known[i]) continue;
        out.right[i] = (right[place >> 3] >> (place & 7)) & 1;
        out.choice[i] = out.right[i] ? rows[i] : choices[wrong++];
        if (own.e) out.entropy[i] = own.e[place];
        if (own.l) out.nll[i] = own.l[place];
        place++;
      }
    }
    return out;
  }

  function textAt(doc, i) {
    const joined = doc.own.join;
    return joined && i in joined ? joined[i] : data.pieces[doc.rows[i]];
  }

  // The turns of a document and what lies between them, in order.
  function segments(doc) {
    if (doc.segments) return doc.segments;
    const out = [];
    let at = 0;
    for (const [role, start, end] of [...doc.own.turns].sort((a, b) => a[1] - b[1])) {
      if (start > at) out.push({ role: "", start: at, end: start });
      out.push({ role, start: Math.max(start, at), end });
      at = end;
    }
    if (at < doc.length) out.push({ role: "", start: at, end: doc.length });
    doc.segments = out.filter((part) => part.end > part.start);
    return doc.segments;
  }

  function classes(doc, i) {
    const out = ["tok"];
    if (special.has(doc.rows[i])) out.push("special");
    if (doc.supervised[i]) out.push("sup");
    if (doc.known && doc.known[i]) {
      out.push(doc.right[i] ? "right" : "wrong");
      if (doc.entropy) out.push(`e${BOUNDS.filter((bound) => doc.entropy[i] >= bound).length}`);
    }
    return out.join(" ");
  }

  function quoted(text) {
    return make("code", {}, JSON.stringify(text));
  }

  function describe(i) {
    const doc = state.read;
    const text = textAt(doc, i);
    const part = segments(doc).find((own) => own.start <= i && i < own.end);
    const words = [`token ${format(i, "count")}, id ${data.tokens[doc.rows[i]]}`];
    if (withoutMarks(text) !== text) words.push("with a part of a character: its bytes");
    if (special.has(doc.rows[i])) words.push("special");
    words.push(doc.supervised[i] ? "supervised" : "not supervised");
    words.push(part && part.role ? `turn of ${part.role}` : "context");
    detail.replaceChildren(quoted(text), ` \u00b7 ${words.join(" \u00b7 ")}`);
    const line = make("div", {});
    if (!doc.known) return;
    if (!doc.known[i]) line.append("No prediction of the target is stored for this token.");
    else {
      line.append(doc.right[i] ? "The target's first choice." : "The target's first choice: ");
      if (!doc.right[i]) line.append(quoted(data.pieces[doc.choice[i]]), ".");
      if (doc.nll) line.append(` Probability of this token ${format(Math.exp(-doc.nll[i]), "share")},`);
      if (doc.entropy) line.append(` entropy ${doc.entropy[i].toFixed(2)} nats.`);
    }
    detail.append(line);
  }

  function tokenAt(i) {
    return tokens.querySelector(`[data-i="${i}"]`);
  }

  function select(i, focus) {
    const element = tokenAt(i);
    if (!element) return;
    const reachable = tokens.querySelector(".tok[tabindex='0']"); // by Tab: one token at a time
    if (reachable) reachable.tabIndex = -1;
    const before = tokens.querySelector(".now");
    if (before) before.classList.remove("now");
    element.classList.add("now");
    element.tabIndex = 0;
    state.now = i;
    describe(i);
    if (focus) element.focus();
  }

  // Build tokens from `start` on, at most AT_ONCE of them; a button builds the next.
  function build(start) {
    const doc = state.read;
    const stop = Math.min(doc.length, start + AT_ONCE);
    for (const part of segments(doc)) {
      const first = Math.max(part.start, start);
      const last = Math.min(part.end, stop);
      if (first >= last) continue;
      const learned = doc.supervised.subarray(part.start, part.end).some(Boolean);
      const count = part.end - part.start;
      const name = part.role || "context, not supervised";
      const how = part.role && !learned ? ", not supervised" : "";
      const title = `${name}${how} \u00b7 ${format(count, "count")} ${count === 1 ? "token" : "tokens"}`;
      const text = make("div", { class: "text", dir: "auto" });
      for (let i = first; i < last; i++) {
        const element = make("span", { class: classes(doc, i), "data-i": i, tabindex: -1 });
        showText(element, textAt(doc, i), { spaces: true });
        text.append(element);
      }
      const kind = learned ? "turn learned" : "turn";
      tokens.append(make("div", { class: kind }, make("h3", {}, title), text));
    }
    if (stop < doc.length) {
      const left = Math.min(AT_ONCE, doc.length - stop);
      const more = make("button", { type: "button" }, `Show the next ${format(left, "count")} tokens`);
      more.addEventListener("click", () => {
        more.remove();
        build(stop);
        mark();
        select(stop, true);
      });
      tokens.append(more);
    }
  }

  const KEYS = {
    supervised: [["sup", "supervised: learned by drafts"], ["", "context"]],
    choice: [
      ["right", "the target's first choice"],
      ["wrong", "not its first choice"],
      ["", "no prediction stored"],
    ],
    entropy: [["e0", "below 0.25 nats"], ["e1", "0.25 to 1"], ["e2", "1 to 2"], ["e3", "2 to 3"], ["e4", "3 or more"]],
  };

  function showMode() {
    const doc = state.read;
    const modes = { choice: Boolean(doc.known), entropy: Boolean(doc.entropy) };
    for (const option of colours.options) option.disabled = modes[option.value] === false;
    const mode = modes[state.mode] === false ? "supervised" : state.mode;
    colours.value = mode;
    tokens.className = `tokens ${mode}`;
    const keys = KEYS[mode].map(([kind, text]) => make("span", { class: `key ${kind}` }, text));
    keys.push(make("span", { class: "key special" }, "special token"));
    legend.replaceChildren(...keys);
  }

  function show(number) {
    state.at = Math.min(Math.max(number, 0), documents.length - 1);
    state.read = read(state.at);
    const doc = state.read;
    const count = doc.supervised.reduce((sum, value) => sum + value, 0);
    const words = [
      `Document ${format(doc.own.n, "count")}`,
      data.sources[doc.own.s],
      `${format(doc.length, "count")} tokens, ${format(count, "count")} supervised`,
    ];
    if (doc.known) {
      const all = doc.known.reduce((sum, value) => sum + value, 0);
      const right = doc.right.reduce((sum, value) => sum + value, 0);
      if (all) words.push(`${format(right / all, "share")} the target's first choice`);
      if (doc.nll && all) {
        const sum = doc.nll.reduce((total, value) => total + value, 0);
        words.push(`NLL ${(sum / all).toFixed(2)} nats`);
      }
    }
    head.replaceChildren(words.join(" \u00b7 "));
    identity.replaceChildren(`id ${doc.own.id}`);
    place.value = String(state.at + 1);
    before.disabled = state.at === 0;
    after.disabled = state.at === documents.length - 1;
    tokens.setAttribute("aria-label", `Tokens of document ${doc.own.n}`);
    tokens.replaceChildren();
    build(0);
    showMode();
    mark();
    const idle = "Point at a token, or press Tab and the arrow keys, to see its figures.";
    detail.replaceChildren(idle);
    const first = tokenAt(0);
    if (first) first.tabIndex = 0;
    state.now = 0;
  }

  // The text of a token as it is searched: a character is where its last byte is.
  function searchedAt(doc, i) {
    return withoutMarks(textAt(doc, i)).toLowerCase();
  }

  function searched(number) {
    if (!kept.has(number)) {
      const own = documents[number];
      const doc = { own, rows: rowsOf(own.t) };
      let text = "";
      for (let i = 0; i < doc.rows.length; i++) text += searchedAt(doc, i);
      kept.set(number, text);
    }
    return kept.get(number);
  }

  // Mark the tokens of the document that hold the text searched for; return the first of them.
  function mark() {
    for (const element of tokens.querySelectorAll(".hit")) element.classList.remove("hit");
    if (!state.query) return null;
    const doc = state.read;
    const text = searched(state.at);
    let first = null;
    let from = text.indexOf(state.query);
    let at = 0; // of the token's text
    for (let i = 0; i < doc.length && from >= 0; i++) {
      const end = at + searchedAt(doc, i).length;
      while (from >= 0 && from + state.query.length <= at) from = text.indexOf(state.query, from + 1);
      if (from >= 0 && from < end && end > at) {
        const element = tokenAt(i);
        if (element) element.classList.add("hit");
        if (element && first === null) first = element;
      }
      at = end;
    }
    return first;
  }

  function find(step) {
    const query = search.value.toLowerCase();
    if (query !== state.query) {
      state.query = query;
      state.found = null;
    }
    if (!query) {
      status.replaceChildren("");
      mark();
      return;
    }
    const fresh = state.found === null;
    if (fresh) {
      state.found = [];
      for (let i = 0; i < documents.length; i++) if (searched(i).includes(query)) state.found.push(i);
    }
    const found = state.found;
    if (!found.length) {
      status.replaceChildren("No document of this page has this text.");
      mark();
      return;
    }
    let next;
    if (step > 0) next = found.find((i) => (fresh ? i >= state.at : i > state.at)) ?? found[0];
    else next = found.findLast((i) => i < state.at) ?? found[found.length - 1];
    show(next);
    const first = mark();
    if (first) first.scrollIntoView({ block: "nearest" });
    const count = format(found.length, "count");
    status.replaceChildren(`${count} ${found.length === 1 ? "document has" : "documents have"} this text; this is match ${found.indexOf(next) + 1}.`);
  }

  const button = (text, act) => make("button", { type: "button", onclick: act }, text);
  const before = button("\u2039 Previous", () => show(state.at - 1));
  const after = button("Next \u203a", () => show(state.at + 1));
  const place = make("input", { type: "number", min: 1, max: documents.length, step: 1 });
  place.addEventListener("change", () => show((Number.parseInt(place.value, 10) || 1) - 1));
  const search = make("input", { type: "search", placeholder: "text in a document" });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") find(event.shiftKey ? -1 : 1);
  });
  search.addEventListener("search", () => search.value || find(1));
  const colours = make("select", {});
  colours.append(make("option", { value: "supervised" }, "supervised tokens"));
  if (documents.some((own) => own.k)) {
    colours.append(make("option", { value: "choice" }, "the target's first choice"));
    colours.append(make("option", { value: "entropy" }, "the target's entropy"));
  }
  colours.addEventListener("change", () => {
    state.mode = colours.value;
    showMode();
  });
  const total = format(documents.length, "count");
  const bar = make(
    "div",
    { class: "bar" },
    make("div", { class: "group" }, before, make("label", {}, `Shown, of ${total}`, place), after),
    make("div", { class: "group" }, make("label", {}, "Search", search), button("Find", () => find(1))),
    make("label", {}, "Colour by", colours),
  );
  const status = make("p", { class: "status", role: "status" });
  const head = make("p", { class: "head" });
  const identity = make("p", { class: "note" });
  const legend = make("p", { class: "legend" });
  const tokens = make("div", { class: "tokens", role: "group" });
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const help = "Keys: n and p show the next and the previous document. In the tokens, the left and right arrow keys move from token to token, Home and End to the first and the last one.";

  function indexOf(event) {
    const element = event.target.closest ? event.target.closest(".tok") : null;
    return element && tokens.contains(element) ? Number(element.dataset.i) : null;
  }
  for (const kind of ["mouseover", "focusin", "click"]) {
    tokens.addEventListener(kind, (event) => {
      const i = indexOf(event);
      if (i !== null) select(i, false);
    });
  }
  tokens.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: state.now - 1, ArrowRight: state.now + 1, Home: 0 };
    const last = tokens.querySelectorAll(".tok").length - 1;
    const to = event.key === "End" ? last : steps[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    select(Math.min(Math.max(to, 0), last), true);
  });
  const viewer = make("div", { class: "viewer" }, make("p", { class: "note" }, data.note), bar, status);
  const shown = make("div", {}, tokens, detail); // the figures stay in sight while tokens scroll
  viewer.append(head, identity, legend, shown, make("p", { class: "note" }, help));
  viewer.addEventListener("keydown", (event) => {
    const typing = event.target === search || event.target === place || event.target === colours;
    if (typing || event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { n: 1, p: -1 }[event.key];
    if (!step) return;
    const inside = tokens.contains(event.target);
    show(state.at + step);
    if (inside) select(0, true);
  });
  box.append(viewer);
  show(0);
};
