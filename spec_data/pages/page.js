"use strict";
// Draws the charts of the JSON in #data, and starts the viewer. Tables and texts are in the page.
const page = { charts: [], viewer: null };

(function () {
  const SERIES = 6;
  const DASHES = [[], [7, 4], [2, 3], [10, 4, 2, 4], [14, 4], [4, 2]];
  const SHAPES = ["circle", "rect", "triangle", "rectRot", "crossRot", "star"];
  const LABEL = 24; // characters of a label below a bar
  const FEW = 40; // points of a line that are marked

  // make("p", {class: "note"}, "text", child, ...): an element; strings become text, never markup.
  page.make = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null) element.setAttribute(name, String(value));
    }
    element.append(...children);
    return element;
  };

  // format(value, kind): the text of a number, as `shown` of page.py.
  page.format = function (value, kind) {
    if (value === null || value === undefined) return "\u2013";
    if (kind === "count") return Math.round(value).toLocaleString("en-US");
    if (kind === "share") return `${+(100 * value).toFixed(1)}\u00a0%`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  };

  function axis(own, labels) {
    const scale = { type: labels ? "category" : "linear", title: { display: true, text: own.title } };
    scale.ticks = { maxRotation: 0, autoSkipPadding: 14 };
    if (labels) {
      scale.ticks.callback = (i) => (labels[i].length > LABEL ? `${labels[i].slice(0, LABEL)}\u2026` : labels[i]);
      return scale;
    }
    if (own.least !== null) scale.min = own.least;
    if (own.most !== null) scale.max = own.most;
    if (own.format === "count") scale.ticks.precision = 0;
    scale.ticks.callback = (value) => page.format(value, own.format);
    return scale;
  }

  function dataset(name, values, i, lines) {
    if (!lines) return { label: name, data: values, maxBarThickness: 72 };
    return {
      label: name,
      data: values.map(([x, y]) => ({ x, y })),
      borderDash: DASHES[i % DASHES.length],
      borderWidth: 2,
      pointStyle: SHAPES[i % SHAPES.length],
      pointRadius: values.length <= FEW ? 4 : 0,
      pointHitRadius: 8,
    };
  }

  // Set every colour of a chart; called again when the system changes between light and dark.
  function paint(chart) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    chart.data.datasets.forEach((own, i) => {
      own.borderColor = colour(`series-${(i % SERIES) + 1}`);
      own.backgroundColor = own.borderColor;
    });
    for (const [name, scale] of Object.entries(chart.options.scales)) {
      scale.ticks.color = colour("soft");
      scale.title.color = colour("text");
      scale.grid = chart.type === "bar" && name === "x" ? { display: false } : { color: colour("line") };
    }
    chart.options.plugins.legend.labels.color = colour("text");
  }

  function draw(canvas, part) {
    const lines = !part.labels.length;
    const series = Object.entries(part.series);
    const legend = { usePointStyle: true, pointStyleWidth: lines ? 34 : 12, pointStyle: lines ? "line" : "rect" };
    const title = (items) => (lines ? page.format(items[0].parsed.x, part.x.format) : items[0].label);
    const label = (item) => `${item.dataset.label}: ${page.format(item.parsed.y, part.y.format)}`;
    const config = {
      type: lines ? "line" : "bar",
      data: { datasets: series.map(([name, values], i) => dataset(name, values, i, lines)) },
      options: {
        animation: false,
        maintainAspectRatio: false,
        interaction: { mode: lines ? "nearest" : "index", axis: "x", intersect: false },
        scales: { x: axis(part.x, lines ? null : part.labels), y: axis(part.y) },
        plugins: { legend: { display: series.length > 1, labels: legend }, tooltip: { callbacks: { title, label } } },
      },
    };
    if (!lines) config.data.labels = part.labels;
    paint(config); // before it is drawn, so that nothing is drawn twice
    page.charts.push(new Chart(canvas, config));
  }

  page.start = function () {
    const data = JSON.parse(document.getElementById("data").textContent);
    const canvases = document.querySelectorAll("canvas[data-chart]");
    if (canvases.length) {
      Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
      Chart.defaults.font.size = 13;
    }
    canvases.forEach((canvas, i) => draw(canvas, data.charts[i]));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of page.charts) {
        paint({ type: chart.config.type, data: chart.data, options: chart.options });
        chart.update("none");
      }
    });
    if (data.viewer) page.viewer(document.getElementById("viewer"), data.viewer);
    document.documentElement.dataset.ready = "yes"; // what tests wait for
  };
})();
