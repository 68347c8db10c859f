"use strict";
// Line charts on uPlot: one unit a chart, bands and bars for errors, a legend with the values under the cursor, a table.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 2]];
const CHART_HEIGHT = 200;
const charts = [];

const font = () => "12px system-ui, sans-serif";

/** What uPlot draws for one series of a spec: the line, and two unseen series for the ends of its errors. */
function drawnSeries(spec) {
  const data = [spec.x];
  const series = [{}];
  const bands = [];
  spec.series.forEach((one, i) => {
    one.colour = one.colour || `c${(i % 8) + 1}`;
    // A dashed line of many points is a smear: colours alone tell those apart.
    one.dash = one.dash || (one.plain || spec.x.length > 150 ? [] : DASHES[i % DASHES.length]);
    const at = data.length;
    const few = spec.x.length <= 40 || one.points;
    data.push(one.drawn || one.values);
    series.push({
      stroke: () => (one.weak ? faint(one.colour, 0.65) : colour(one.colour)),
      width: one.weak ? 1 : spec.x.length > 150 ? 1.5 : 2,
      dash: one.dash,
      spanGaps: Boolean(one.points),
      points: { show: few && !one.weak ? true : undefined, size: 6, fill: () => colour(one.colour), stroke: () => colour(one.colour) },
    });
    if (one.stacked) bands.push({ series: [at, at - 1], fill: () => faint(one.colour, 0.55), dir: -1 });
    if (!one.errors && !one.low) return;
    const low = one.low || one.values.map((value, k) => (value === null || one.errors[k] === null ? null : value - one.errors[k]));
    const high = one.high || one.values.map((value, k) => (value === null || one.errors[k] === null ? null : value + one.errors[k]));
    one.ends = [low, high];
    data.push(low, high);
    series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
    if (!one.bars) bands.push({ series: [at + 2, at + 1], fill: () => faint(one.colour, Number(colour("band"))) });
  });
  return { data, series, bands };
}

/** Error bars: a line between the two ends of each point, with caps. */
function drawBars(chart, spec) {
  const { ctx } = chart;
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  for (const one of spec.series) {
    if (!one.bars || !one.ends) continue;
    ctx.strokeStyle = colour(one.colour);
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([]);
    ctx.beginPath();
    spec.x.forEach((x, k) => {
      const [low, high] = [one.ends[0][k], one.ends[1][k]];
      if (low === null || high === null) return;
      const [px, bottom, top] = [chart.valToPos(x, "x", true), chart.valToPos(low, "y", true), chart.valToPos(high, "y", true)];
      ctx.moveTo(px, bottom);
      ctx.lineTo(px, top);
      for (const y of [bottom, top]) {
        ctx.moveTo(px - 4 * ratio, y);
        ctx.lineTo(px + 4 * ratio, y);
      }
    });
    ctx.stroke();
  }
  ctx.restore();
}

/** The limits of the axis of a spec, around the values that are seen. */
function limits(spec, low, high) {
  if (low === null || high === null) return [0, 1];
  if (spec.share) return [0, 1];
  const bottom = spec.zero && low >= 0 ? 0 : low;
  if (bottom === high) return high === 0 ? [0, 1] : [Math.min(0, bottom) || bottom - Math.abs(bottom) * 0.5, high + Math.abs(high) * 0.5];
  const room = 0.06 * (high - bottom);
  return [bottom === 0 ? 0 : bottom - room, high + room];
}

function plotOptions(spec, drawn, width, legend) {
  const axis = { stroke: () => colour("soft"), font: font(), labelFont: font(), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("grid"), width: 1, size: 4 } };
  return {
    width,
    height: CHART_HEIGHT,
    legend: { show: false },
    padding: [10, 10, 0, 0],
    cursor: { sync: spec.sync ? { key: spec.sync, setSeries: false } : undefined, drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
    scales: { x: { time: false, range: (_, low, high) => (spec.x.length === 1 ? [spec.x[0] - 1, spec.x[0] + 1] : [low, high]) }, y: { range: (_, low, high) => limits(spec, low, high) } },
    axes: [
      { ...axis, label: spec.xLabel, labelSize: 18, size: 28, gap: 3, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
      { ...axis, size: 58, values: (_, marks) => marks.map((value) => (spec.share ? percent(value) : spec.bytes ? bytes(value) : num(value, 4))) },
    ],
    series: drawn.series,
    bands: drawn.bands,
    hooks: { draw: [(chart) => drawBars(chart, spec)], setCursor: [(chart) => legend.show(chart.cursor.idx)] },
  };
}

const format = (spec, value) => (spec.share ? (value === null || value === undefined ? DASH : `${num(100 * value)} %`) : spec.bytes ? bytes(value) : num(value));

/** Names of the series with their line, and the values at a place (the newest ones when the cursor is away). */
function legendOf(spec) {
  const node = el("div", { class: "legend" });
  const place = el("span", { class: "at" });
  node.append(place);
  const values = spec.series.map((one) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("width", "24");
    line.setAttribute("height", "8");
    line.setAttribute("aria-hidden", "true");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = { x1: 1, x2: 23, y1: 4, y2: 4, "stroke-width": one.stacked ? 8 : one.weak ? 1.2 : 2.4, "stroke-dasharray": one.stacked ? "" : one.dash.join(" ") };
    for (const [key, value] of Object.entries(attributes)) stroke.setAttribute(key, String(value));
    stroke.style.stroke = `var(--${one.colour})`;
    line.append(stroke);
    const value = el("b", {});
    node.append(el("span", { class: "entry" }, line, one.label, value));
    return value;
  });
  const known = (k) => spec.series.some((one) => one.values[k] !== null && one.values[k] !== undefined);
  const newest = spec.x.reduce((last, _, k) => (known(k) ? k : last), 0);
  const show = (index) => {
    const at = index === null || index === undefined ? newest : index;
    place.textContent = `${spec.xLabel === "step" ? "step" : "version"} ${num(spec.x[at])}`;
    spec.series.forEach((one, i) => {
      const [value, error] = [one.values[at], one.errors ? one.errors[at] : null];
      values[i].textContent = format(spec, value) + (error ? ` ± ${format(spec, error)}` : "");
    });
  };
  show(null);
  return { node, show };
}

/** What a chart shows, in words: for those who do not see it. */
function inWords(spec) {
  const parts = spec.series.map((one) => {
    const known = one.values.filter((value) => value !== null && value !== undefined);
    if (!known.length) return `${one.label}: no values`;
    const [low, high] = extent(known);
    return `${one.label}: first ${format(spec, known[0])}, last ${format(spec, known[known.length - 1])}, lowest ${format(spec, low)}, highest ${format(spec, high)}`;
  });
  return `${spec.title}${spec.unit ? ` (${spec.unit})` : ""}. ${parts.join(". ")}.`;
}

function valueTable(spec) {
  const titles = [spec.xLabel === "step" ? "step" : "weights version"];
  spec.series.forEach((one) => titles.push(one.label, ...(one.errors ? ["± error"] : [])));
  const rows = spec.x.map((x, k) => [x, ...spec.series.flatMap((one) => (one.errors ? [one.values[k], one.errors[k]] : [one.values[k]]))]);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${spec.title}` }, table(titles, rows));
}

/**
 * A chart as a figure, or null when no series has a value.
 * spec: title, unit, note, x, xLabel, series [{label, values, errors?, bars?, low?, high?, stacked?, weak?}], share?, zero?, sync?, pick?
 */
function chartFigure(spec) {
  spec.series = spec.series.filter((one) => one.values && one.values.some((value) => value !== null && value !== undefined));
  if (!spec.series.length || !spec.x.length) return null;
  const drawn = drawnSeries(spec);
  const legend = legendOf(spec);
  const plot = el("div", { class: "plot", role: "img", tabindex: "0", "aria-label": inWords(spec) });
  const button = el("button", { type: "button", class: "quiet small", "aria-expanded": "false", text: "Table" });
  const figure = el("figure", { class: `card chart${spec.wide ? " wide" : ""}` }, el("figcaption", {}, el("h3", { text: spec.title }), el("span", { class: "unit", text: spec.unit || "" }), button), spec.note ? el("p", { class: "note", text: spec.note }) : null, plot, legend.node);
  button.addEventListener("click", () => {
    const shown = figure.querySelector(".scroll");
    if (shown) shown.remove();
    else figure.append(valueTable(spec));
    button.setAttribute("aria-expanded", String(!shown));
  });
  charts.push({ spec, drawn, plot, legend, made: null });
  return figure;
}

/** Draws all charts that are in the page. */
function drawCharts() {
  for (const one of charts) {
    if (one.made || !one.plot.isConnected) continue;
    one.made = new uPlot(plotOptions(one.spec, one.drawn, one.plot.clientWidth || 500, one.legend), one.drawn.data, one.plot);
    one.plot.addEventListener("keydown", (event) => chartKey(one, event));
    one.plot.addEventListener("blur", () => one.legend.show(null));
    new ResizeObserver(() => {
      const width = one.plot.clientWidth;
      if (width && Math.abs(width - one.made.width) > 1) one.made.setSize({ width, height: CHART_HEIGHT });
    }).observe(one.plot);
  }
}

/** Arrows move the cursor, Home and End go to the ends, Escape shows the whole run, Enter shows the step's samples. */
function chartKey(one, event) {
  const { made, spec } = one;
  const now = made.cursor.idx ?? spec.x.length - 1;
  const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: spec.x.length - 1 }[event.key];
  if (to !== undefined) {
    const index = Math.max(0, Math.min(spec.x.length - 1, to));
    made.setCursor({ left: made.valToPos(spec.x[index], "x"), top: 10 });
    event.preventDefault();
  } else if (event.key === "Escape") made.setData(made.data);
  else if (event.key === "Enter" && spec.pick) spec.pick(spec.x[now]);
}

const redrawCharts = () => charts.forEach((one) => one.made && one.made.redraw(true, true));
