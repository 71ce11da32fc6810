"use strict";
// The viewer of drafted tokens. The data are described in acceptance_viewer.py. One response is
// built at a time; every text reaches the page as a text node.
page.viewers.acceptance = function (box, data, tools) {
  const { make, format, showText, withoutMarks } = tools;
  const samples = data.samples;
  const state = { at: 0, now: 0, rounds: [] };
  // A list of tokens of a part as [id, text]: the part's own texts go before those of the table.
  function wordsOf(part, list) {
    const table = data.texts[samples[state.at].group];
    const own = (part.whole || {})[list] || {};
    return part[list].map((id, i) => [id, own[i] || table[id] || `<token ${id}>`]);
  }

  // The target's token of a round; null without one.
  const choiceOf = (round) => (round.choice === null ? null : wordsOf({ ...round, choice: [round.choice] }, "choice")[0]);

  function token([, text], kind, inline) {
    // <del>: screen readers announce that these tokens are not part of the response
    const gone = kind === "rejected" || kind === "unused" || kind === "left";
    const element = make(gone ? "del" : "span", { class: `tok ${kind}` });
    showText(element, text, { inline: gone || inline });
    return element;
  }

  const said = ([, text]) => JSON.stringify(text);

  // What a round did with every token: [[id, text], kind] in the order of the text.
  function judged(round) {
    const emitted = wordsOf(round, "emitted");
    const drafted = wordsOf(round, "drafted");
    const out = drafted.slice(0, round.accepted).map((word, i) => {
      const same = i >= emitted.length || emitted[i][0] === word[0];
      return [word, same ? "accepted" : "left"];
    });
    drafted.slice(round.accepted).forEach((word, i) => {
      out.push([word, i === 0 && round.choice !== null ? "rejected" : "unused"]);
    });
    if (emitted.length > round.accepted) {
      const own = emitted[round.accepted];
      out.push([own, round.choice === null || round.choice === own[0] ? "target" : "document"]);
    } else if (round.accepted && emitted.length === round.accepted) {
      const last = round.accepted - 1;
      if (emitted[last][0] !== drafted[last][0]) out.push([emitted[last], "document"]);
    }
    return out;
  }

  function numbers(sample) {
    const rounds = sample.parts.filter((part) => part.kind === "round");
    const sum = (of) => rounds.reduce((total, round) => total + of(round), 0);
    const emitted = sum((round) => round.emitted.length);
    return { rounds: rounds.length, emitted, drafted: sum((r) => r.drafted.length), accepted: sum((r) => r.accepted) };
  }

  function spoken(round, number) {
    const drafted = wordsOf(round, "drafted").map(([, text]) => text);
    const kept = withoutMarks(drafted.slice(0, round.accepted).join(""));
    const words = [`Round ${number}: ${round.accepted} of ${round.drafted.length} accepted`];
    if (kept) words.push(kept);
    if (round.accepted < round.drafted.length && round.choice !== null) {
      words.push(`rejected ${drafted[round.accepted]}`);
    }
    if (round.choice !== null) words.push(`the target says ${choiceOf(round)[1]}`);
    return words.join("; ");
  }

  function describe(number) {
    const { round, position } = state.rounds[number];
    const rest = round.drafted.length - round.accepted;
    const head = make("div", { class: "head" }, `Round ${number + 1} of ${state.rounds.length}`);
    head.append(` \u00b7 after ${format(position, "count")} ${position === 1 ? "token" : "tokens"} of the response`);
    const list = make("div", { class: "text" }, "Drafted: ");
    wordsOf(round, "drafted").forEach((word, i) => {
      const kind = i < round.accepted ? "accepted" : i === round.accepted && round.choice !== null ? "rejected" : "unused";
      list.append(token(word, kind, true), " ");
    });
    if (!round.drafted.length) list.append("nothing");
    const words = [`${round.accepted} accepted`];
    if (rest > 0 && round.choice !== null) words.push("the next one rejected");
    if (rest > 1) words.push(`${rest - 1} after it without use`);
    const line = make("div", {}, `${words.join(", ")}. `);
    if (round.choice !== null) {
      line.append(rest > 0 ? "The target's token instead: " : "The token that the target adds: ");
      line.append(make("code", {}, said(choiceOf(round))), ".");
    }
    const own = wordsOf(round, "emitted").at(-1) || [null, ""];
    const last = round.drafted[round.accepted - 1];
    if (round.choice !== null && round.emitted.length > round.accepted && own[0] !== round.choice) {
      line.append(" The document goes on with ", make("code", {}, said(own)), ".");
    } else if (round.choice === null && round.accepted && round.emitted.length === round.accepted && own[0] !== last) {
      line.append(" The target would say the last accepted token; the document has ", make("code", {}, said(own)), " there, so the round ends.");
    }
    detail.replaceChildren(head, list, line);
  }

  function select(number, focus) {
    const found = state.rounds[number];
    if (!found) return;
    const before = tokens.querySelector(".round.now");
    if (before) {
      before.classList.remove("now");
      before.tabIndex = -1;
    }
    found.element.classList.add("now");
    found.element.tabIndex = 0;
    state.now = number;
    describe(number);
    if (focus) {
      found.element.focus({ preventScroll: true });
      found.element.scrollIntoView({ block: "nearest" });
    }
  }

  function plainText(words, kind) {
    const element = make("span", { class: kind });
    for (const [, text] of words) showText(element, text);
    return element;
  }

  function show(number) {
    state.at = Math.min(Math.max(number, 0), samples.length - 1);
    state.rounds = [];
    const sample = samples[state.at];
    const text = make("div", { class: "text", dir: "auto" });
    let position = 0;
    for (const part of sample.parts) {
      if (part.kind === "context") {
        position = 0;
        if (part.left_out) {
          const count = format(part.left_out, "count");
          text.append(make("span", { class: "esc" }, `[${count} tokens before are not shown] `));
        }
        text.append(plainText(wordsOf(part, "tokens"), "context"));
      } else if (part.kind === "first") {
        position += part.tokens.length;
        for (const word of wordsOf(part, "tokens")) text.append(token(word, "target"));
      } else {
        const element = make("span", { class: "round", role: "button", tabindex: -1, "data-round": state.rounds.length });
        element.setAttribute("aria-label", spoken(part, state.rounds.length + 1));
        for (const [word, kind] of judged(part)) element.append(token(word, kind));
        state.rounds.push({ round: part, element, position });
        position += part.emitted.length;
        text.append(element);
      }
    }
    tokens.replaceChildren(text);
    tokens.setAttribute("aria-label", `Rounds of ${sample.name}`);
    const all = numbers(sample);
    const words = [sample.evaluation, sample.name];
    if (sample.source) words.push(sample.source);
    head.replaceChildren(words.join(" \u00b7 "));
    const length = all.rounds ? format(all.emitted / all.rounds, "number") : "\u2013";
    about.replaceChildren(
      `${format(all.rounds, "count")} rounds, ${format(all.emitted, "count")} tokens: ${length} per round. ` +
      `${format(all.accepted, "count")} of ${format(all.drafted, "count")} drafted tokens accepted.` +
      (sample.tree ? " Decoded with trees: of the drafted tokens only the accepted path is kept." : ""),
    );
    place.value = String(state.at);
    before.disabled = state.at === 0;
    after.disabled = state.at === samples.length - 1;
    showLegend(sample);
    detail.replaceChildren("Point at a round, or press Tab and the arrow keys, to see its tokens.");
    state.now = 0;
    if (state.rounds.length) state.rounds[0].element.tabIndex = 0;
  }

  function showLegend(sample) {
    const keys = [
      ["accepted", "drafted and accepted"],
      ["rejected", "drafted and rejected"],
      ["target", "the target's own token"],
    ];
    if (!sample.real) {
      keys.push(["left", "accepted, but the document differs"], ["document", "the document's token, not the target's"]);
    }
    legend.replaceChildren(...keys.map(([kind, text]) => make("span", { class: `key tok ${kind}` }, text)));
  }

  const button = (text, act) => make("button", { type: "button", onclick: act }, text);
  const before = button("\u2039 Previous", () => show(state.at - 1));
  const after = button("Next \u203a", () => show(state.at + 1));
  const place = make("select", {});
  samples.forEach((sample, i) => {
    const name = `${i + 1}: ${sample.name} (${sample.evaluation})`;
    place.append(make("option", { value: i }, name.length > 80 ? `${name.slice(0, 79)}\u2026` : name));
  });
  place.addEventListener("change", () => show(Number(place.value)));
  const rest = make("input", { type: "checkbox" });
  rest.addEventListener("change", () => tokens.classList.toggle("all", rest.checked));
  const bar = make(
    "div",
    { class: "bar" },
    make("div", { class: "group" }, before, make("label", {}, `Response, of ${format(samples.length, "count")}`, place), after),
    make("label", { class: "check" }, rest, "Also drafted tokens after the rejected one"),
  );
  const head = make("p", { class: "head", role: "status" });
  const about = make("p", { class: "about" });
  const legend = make("p", { class: "legend" });
  const tokens = make("div", { class: "tokens drafted", role: "group" });
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const help = "Keys: n and p show the next and the previous response. In the text, the left and right arrow keys move from round to round, Home and End to the first and the last one.";
  const viewer = make("div", { class: "viewer" }, bar, head, about, legend, tokens, detail);
  viewer.append(make("p", { class: "note" }, help));

  for (const kind of ["mouseover", "focusin", "click"]) {
    tokens.addEventListener(kind, (event) => {
      const element = event.target.closest ? event.target.closest(".round") : null;
      if (element && tokens.contains(element)) select(Number(element.dataset.round), false);
    });
  }
  tokens.addEventListener("keydown", (event) => {
    const last = state.rounds.length - 1;
    const steps = { ArrowLeft: state.now - 1, ArrowRight: state.now + 1, Home: 0, End: last };
    const to = steps[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    select(Math.min(Math.max(to, 0), last), true);
  });
  viewer.addEventListener("keydown", (event) => {
    if (event.target === place || event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { n: 1, p: -1 }[event.key];
    if (!step) return;
    const inside = tokens.contains(event.target);
    show(state.at + step);
    if (inside) select(0, true);
  });
  box.append(viewer);
  show(0);
};
