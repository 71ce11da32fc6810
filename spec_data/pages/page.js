"use strict";
// Draws the charts of the JSON in #data, and starts the viewer. Tables and texts are in the page.
const page = { charts: [], viewer: null };

(function () {
  const SERIES = 6;
  const DASHES = [[], [7, 4], [2, 3], [10, 4, 2, 4], [14, 4], [4, 2]];
  const SHAPES = ["circle", "rect", "triangle", "rectRot", "crossRot", "star"];
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

  function axis(spec) {
    const scale = { type: "linear", title: { display: true, text: spec.title } };
    scale.ticks = { maxRotation: 0, autoSkipPadding: 14, callback: (value) => page.format(value, spec.format) };
    if (spec.least !== null) scale.min = spec.least;
    if (spec.format === "count") scale.ticks.precision = 0;
    return scale;
  }

  const dataset = ([name, points], i) => ({
    label: name,
    data: points.map(([x, y]) => ({ x, y })),
    borderDash: DASHES[i % DASHES.length],
    borderWidth: 2,
    pointStyle: SHAPES[i % SHAPES.length],
    pointRadius: points.length <= FEW ? 4 : 0,
    pointHitRadius: 8,
  });

  // Set every colour of a chart; called again when the system changes between light and dark.
  function paint(chart) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    chart.data.datasets.forEach((line, i) => {
      line.borderColor = colour(`series-${(i % SERIES) + 1}`);
      line.backgroundColor = line.borderColor;
    });
    for (const scale of Object.values(chart.options.scales)) {
      scale.ticks.color = colour("soft");
      scale.title.color = colour("text");
      scale.grid = { color: colour("line") };
    }
    chart.options.plugins.legend.labels.color = colour("text");
  }

  function draw(canvas, part) {
    const series = Object.entries(part.series);
    const labels = { usePointStyle: true, pointStyleWidth: 34, pointStyle: "line" };
    const title = (items) => page.format(items[0].parsed.x, part.x.format);
    const label = (item) => `${item.dataset.label}: ${page.format(item.parsed.y, part.y.format)}`;
    const config = {
      type: "line",
      data: { datasets: series.map(dataset) },
      options: {
        animation: false,
        maintainAspectRatio: false,
        interaction: { mode: "nearest", axis: "x", intersect: false },
        scales: { x: axis(part.x), y: axis(part.y) },
        plugins: { legend: { display: series.length > 1, labels }, tooltip: { callbacks: { title, label } } },
      },
    };
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
