"use strict";
// Builds the document from the JSON in #data. Texts of the data reach it by textContent alone.
// A viewer registers itself: page.viewers.NAME = function (element, data, tools) {...}.
// `tools` is `page.tools`: make, format, colour, onColours, showText, withoutMarks.
const page = { viewers: {}, tools: {}, charts: [] };

(function () {
  const SERIES = 6;
  const DASHES = [[], [7, 4], [2, 3], [10, 4, 2, 4], [14, 4], [4, 2]];
  const SHAPES = ["circle", "rect", "triangle", "rectRot", "crossRot", "star"];
  const LONG = 20; // characters: cells of longer texts are not squeezed
  const TABLE_ROWS = 2000; // a chart's data table shows at most so many

  // make("p", {class: "note", title: "..."}, "text", child, ...): an element; strings become text.
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children) {
      if (child === null || child === undefined) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
  const MARKS = /(\u27e8[0-9A-F]{2}(?: [0-9A-F]{2})*\u27e9)/; // bytes, as token_texts.py writes them

  // Append the text of a token. Line ends, tabs, characters that cannot be seen and marks of bytes
  // are set apart; `spaces`: spaces too. `inline`: a line end is marked only, without a new line.
  function showText(element, text, { spaces = false, inline = false } = {}) {
    for (const part of text.split(MARKS)) {
      if (MARKS.test(part)) element.append(make("span", { class: "esc" }, part));
      else for (const run of part.match(/\n|\t| +|[^\n\t ]+/g) || []) showRun(element, run, spaces, inline);
    }
  }

  function showRun(element, run, spaces, inline) {
    if (run === "\n") element.append(make("span", { class: "nl" }, inline ? "" : "\n"));
    else if (run === "\t") element.append(make("span", { class: "tab" }, "\t"));
    else if (spaces && run[0] === " ") element.append(make("span", { class: "sp" }, run));
    else if (!HIDDEN.test(run)) element.append(run);
    else {
      for (const character of run) {
        const code = `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;
        element.append(HIDDEN.test(character) ? make("span", { class: "esc" }, code) : character);
      }
    }
  }

  // The text of a token without its bytes that are no character.
  function withoutMarks(text) {
    return text.includes("\u27e8") ? text.split(MARKS).filter((part) => !MARKS.test(part)).join("") : text;
  }

  function significant(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
      return value.toExponential(2).replace("e+", "e").replace("-", "\u2212");
    }
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  }

  function bytes(value) {
    for (const unit of ["bytes", "kB", "MB", "GB"]) {
      if (value < 1000) {
        return `${value.toLocaleString("en-US", { maximumFractionDigits: 2 })} ${unit}`;
      }
      value /= 1000;
    }
    return `${value.toLocaleString("en-US", { maximumFractionDigits: 2 })} TB`;
  }

  function seconds(value) {
    if (value < 90) return `${significant(value)} s`;
    return value < 5400 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  // format(value, kind): the text of a value; kinds as in page_parts.py.
  function format(value, kind) {
    if (value === null || value === undefined) return "\u2013";
    if (typeof value !== "number" || kind === "text") return String(value);
    if (kind === "count") return Math.round(value).toLocaleString("en-US");
    if (kind === "share") return `${(100 * value).toFixed(1)}\u00a0%`;
    if (kind === "bytes") return bytes(value);
    if (kind === "seconds") return seconds(value);
    return significant(value);
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  // onColours(f): call f when the system changes between light and dark.
  function onColours(changed) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  }

  function tableOf(columns, rows, title) {
    const numeric = columns.map(([, kind]) => kind !== "text");
    const side = (i) => (numeric[i] ? "number" : null);
    const head = columns.map(([name], i) => make("th", { scope: "col", class: side(i) }, name));
    const body = make("tbody");
    for (const row of rows) {
      const cells = row.map((v, i) => {
        const text = format(v, columns[i][1]);
        return make("td", { class: side(i) || (text.length > LONG ? "long" : null) }, text);
      });
      body.append(make("tr", {}, ...cells));
    }
    const caption = title ? make("caption", {}, title) : null;
    const named = columns.some(([name]) => name);
    const top = named ? make("thead", {}, make("tr", {}, ...head)) : null;
    return make("table", {}, caption, top, body);
  }

  function scrolled(table, label) {
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
  }

  function figures(part) {
    const list = make("dl", { class: "figures wide" });
    for (const [name, value, kind] of part.items) {
      const text = format(value, kind);
      const size = text.length > 16 ? "long" : null;
      list.append(make("div", {}, make("dt", {}, name), make("dd", { class: size }, text)));
    }
    return list;
  }

  function table(part) {
    const wide = part.columns.length > 4 ? "wide" : null;
    const note = part.note ? make("p", { class: "note" }, part.note) : null;
    const shown = tableOf(part.columns, part.rows, part.title);
    return make("div", { class: wide }, scrolled(shown, part.title), note);
  }

  function note(part) {
    const text = part.warning ? `Warning: ${part.text}` : part.text;
    return make("p", { class: part.warning ? "warning wide" : "wide" }, text);
  }

  // The rows of a chart's data table: x (or the label), then one column per series.
  function chartRows(part) {
    const columns = [[part.x.title, part.kind === "bars" ? "text" : part.x.format]];
    for (const own of part.series) columns.push([own.name, part.y.format]);
    if (part.kind === "bars") {
      const row = (label, i) => [label, ...part.series.map((own) => own.values[i])];
      return [columns, part.labels.map(row)];
    }
    const rows = new Map();
    part.series.forEach((own, i) => {
      for (const [x, y] of own.points) {
        if (!rows.has(x)) rows.set(x, [x, ...part.series.map(() => null)]);
        rows.get(x)[i + 1] = y;
      }
    });
    return [columns, [...rows.values()].sort((a, b) => a[0] - b[0])];
  }

  function dataTable(part) {
    const details = make("details", {}, make("summary", {}, "Show the data as a table"));
    details.addEventListener("toggle", function fill() {
      details.removeEventListener("toggle", fill);
      const [columns, rows] = chartRows(part);
      const shown = tableOf(columns, rows.slice(0, TABLE_ROWS), "");
      details.append(scrolled(shown, `Data of ${part.title}`));
      if (rows.length > TABLE_ROWS) {
        const text = `The first ${TABLE_ROWS.toLocaleString("en-US")} of ${rows.length} rows.`;
        details.append(make("p", { class: "note" }, text));
      }
    });
    return details;
  }

  const LABEL = 24; // characters of a label below a bar
  const ALL_LABELS = 16; // so many labels are all written

  function axis(own, category, stacked, labels) {
    const kind = category ? "category" : own.log ? "logarithmic" : "linear";
    const scale = { type: kind, stacked, title: { display: true, text: own.title } };
    if (own.least !== null) scale.min = own.least;
    if (own.most !== null) scale.max = own.most;
    scale.ticks = { maxRotation: 0, autoSkipPadding: 14 };
    if (category) {
      // a histogram may leave out labels, other bars must not
      if (labels.length <= ALL_LABELS && !own.dense) Object.assign(scale.ticks, { autoSkip: false, maxRotation: 50 });
      scale.ticks.callback = (value) => (labels[value].length > LABEL ? `${labels[value].slice(0, LABEL)}\u2026` : labels[value]);
    } else if (own.format === "share") scale.ticks.callback = (value) => `${+(100 * value).toFixed(2)}\u00a0%`;
    else scale.ticks.callback = (value) => format(value, own.format);
    if (own.format === "count") scale.ticks.precision = 0;
    return scale;
  }

  function dataset(part, own, i) {
    const shape = SHAPES[i % SHAPES.length];
    if (part.kind === "bars") {
      const gap = part.dense ? { barPercentage: 1, categoryPercentage: 0.96 } : { maxBarThickness: 72 };
      return { label: own.name, data: own.values, ...gap };
    }
    const few = part.points || own.points.length < 2;
    return {
      label: own.name,
      data: own.points.map(([x, y]) => ({ x, y })),
      borderDash: DASHES[i % DASHES.length],
      borderWidth: 2,
      pointStyle: shape,
      pointRadius: few ? 4 : 0,
      pointHitRadius: 8,
      spanGaps: false,
    };
  }

  // Set every colour of a chart; called again when the system changes between light and dark.
  function paint(chart) {
    const text = colour("text");
    chart.data.datasets.forEach((own, i) => {
      own.borderColor = colour(`series-${(i % SERIES) + 1}`);
      own.backgroundColor = own.borderColor;
    });
    for (const scale of Object.values(chart.options.scales)) {
      scale.ticks.color = colour("soft");
      scale.title.color = text;
      scale.grid = { color: colour("line") };
    }
    if (chart.config.type === "bar") chart.options.scales.x.grid = { display: false };
    chart.options.plugins.legend.labels.color = text;
  }

  function chart(part) {
    const lines = part.kind === "lines";
    const names = part.series.map((own) => own.name).join(", ");
    const label = `${part.title}. ${part.x.title} against ${part.y.title}: ${names}.`;
    const canvas = make("canvas", { role: "img", "aria-label": `${label} The data follow as a table.` });
    const many = part.series.length > 1;
    const config = {
      type: lines ? "line" : "bar",
      data: { datasets: part.series.map((own, i) => dataset(part, own, i)) },
      options: {
        animation: false,
        maintainAspectRatio: false,
        interaction: { mode: lines ? "nearest" : "index", axis: "x", intersect: false },
        scales: { x: axis({ ...part.x, dense: part.dense }, !lines, part.stacked, part.labels), y: axis(part.y, false, part.stacked) },
        plugins: {
          legend: { display: many, labels: { usePointStyle: true, pointStyleWidth: lines ? 34 : 12, pointStyle: lines ? "line" : "rect" } },
          tooltip: {
            callbacks: {
              title: (items) => (lines ? format(items[0].parsed.x, part.x.format) : items[0].label),
              label: (item) => `${item.dataset.label}: ${format(item.parsed.y, part.y.format)}`,
            },
          },
        },
      },
    };
    if (!lines) config.data.labels = part.labels;
    const note = part.note ? make("p", { class: "note" }, part.note) : null;
    const head = make("figcaption", {}, make("h3", {}, part.title));
    const figure = make("figure", {}, head, make("div", { class: "chart" }, canvas), note, dataTable(part));
    return [figure, () => {
      // drawn once the figure has its size; painted before, so that nothing is drawn twice
      const own = { data: config.data, options: config.options, config };
      paint(own);
      page.charts.push(new Chart(canvas, config));
    }];
  }

  function viewer(part, name) {
    const box = make("div", { class: "wide" });
    page.viewers[part.name](box, part.data, page.tools);
    return box;
  }

  const BUILD = { figures, table, note, viewer };

  page.start = function () {
    const data = JSON.parse(document.getElementById("data").textContent);
    document.title = `${data.title} \u2013 ${data.kind}`;
    const main = make("main");
    const links = make("ul");
    const later = [];
    const head = make("header", {}, make("p", { class: "kind" }, data.kind), make("h1", {}, data.title));
    head.append(make("nav", { "aria-label": "Sections" }, links));
    data.sections.forEach((section, i) => {
      const id = `section-${i + 1}`;
      links.append(make("li", {}, make("a", { href: `#${id}` }, section.title)));
      const parts = make("div", { class: "parts" });
      const text = section.text ? make("p", {}, section.text) : null;
      const heading = make("h2", { id: `${id}-title` }, section.title);
      main.append(make("section", { id, "aria-labelledby": `${id}-title` }, heading, text, parts));
      const charts = section.parts.filter((part) => part.kind === "lines" || part.kind === "bars");
      for (const part of section.parts) {
        if (charts.includes(part)) {
          const [figure, draw] = chart(part);
          if (charts.length === 1) figure.className = "wide";
          parts.append(figure);
          later.push(draw);
        } else parts.append(BUILD[part.kind](part));
      }
    });
    const footer = data.footer ? make("footer", {}, data.footer) : null;
    document.body.append(head, main);
    if (footer) document.body.append(footer);
    if (later.length) {
      Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
      Chart.defaults.font.size = 13;
    }
    for (const draw of later) draw();
    onColours(() => {
      for (const own of page.charts) {
        paint(own);
        own.update("none");
      }
    });
    document.documentElement.dataset.ready = "yes"; // what tests wait for
  };

  page.tools = { make, format, colour, onColours, showText, withoutMarks };
})();
