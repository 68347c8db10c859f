"use strict";
// Both sides on one clock: a group of rows a process, drawn on a canvas, with zoom; and a table of who was busy with what.

const PHASE_COLOURS = { generate: "c1", train: "c2", reward: "c3", sync: "c4", evaluate: "c5", save: "c8", start: "c7", warmup: "c6" };
const LANE = 16;
const LABEL = 110;
const STEPS_SHOWN = 6;

function phaseColour(category) {
  if (Object.hasOwn(PHASE_COLOURS, category)) return PHASE_COLOURS[category];
  const hash = [...category].reduce((sum, character) => (sum * 31 + character.codePointAt(0)) % 997, 7);
  return `c${(hash % 8) + 1}`;
}

/** A share of the traced time: as a figure, as seconds, as a bar. */
function shareCell(seconds, total, category) {
  if (seconds === null) return "";
  const bar = el("span", { class: "share" });
  bar.style.width = `${Math.max(2, (100 * seconds) / total)}%`;
  bar.style.background = `var(--${category ? phaseColour(category) : "c7"})`;
  return el("span", { class: "cell" }, el("span", {}, el("b", { text: percent(seconds / total) }), " ", el("span", { class: "took", text: brief(seconds) })), bar);
}

/** Seconds of each process and phase, and the finer names behind a fold. */
function busyTable(timeline) {
  const total = timeline.traced_s || 1;
  const titles = ["process", "busy", ...timeline.categories, "idle"];
  const rows = timeline.processes.map((one) => [one.name, shareCell(one.busy_s, total, null), ...timeline.categories.map((category) => shareCell(Object.hasOwn(one.by_category, category) ? one.by_category[category] : null, total, category)), shareCell(one.idle_s, total, null)]);
  const finer = timeline.processes.flatMap((one) => one.by_name.map((part) => [one.name, part.name, part.category, part.seconds, part.seconds / total, part.count]));
  return [
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Busy share of each process and phase" }, table(titles, rows, { class: "busy" })),
    el("p", { class: "note muted", text: `Shares of ${duration(timeline.traced_s)} in which anything was recorded. Phases of a process may overlap, so they may add up to more than it was busy.` }),
    el("details", {}, el("summary", { text: "Seconds by finer names" }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Seconds by finer names" }, table(["process", "name", "phase", "seconds", "share", "events"], finer.map((row) => row.map((cell, i) => (i === 4 ? percent(cell) : cell)))))),
  ];
}

function timelinePanel(value) {
  const { timeline } = value;
  if (!timeline.events_total) return el("div", { class: "card" }, el("h3", { text: "Timeline" }), el("p", { class: "muted", text: "trace.json has no events, so there is no timeline of the processes." }));
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": `Timeline of ${timeline.processes.map((one) => one.name).join(", ")}. The table below has the same in numbers. Arrow keys move, plus and minus zoom, 0 shows the whole run.` });
  const hover = el("div", { class: "hover", hidden: true });
  const tools = el("div", { class: "tools" });
  const legend = el("div", { class: "legend" }, ...timeline.categories.slice(0, 20).map((category) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(--${phaseColour(category)})`;
    return el("span", { class: "entry" }, swatch, category);
  }));
  const left = timeline.events_total - timeline.events_limit;
  const panel = el("div", { class: "card timeline" }, el("h3", { text: "Timeline of the processes" }),
    el("p", { class: "note muted", text: `Drag to move, Ctrl and wheel or + and − to zoom. A long run opens at a few steps in its middle.${left > 0 ? ` The ${num(timeline.events_limit)} longest of ${num(timeline.events_total)} events are drawn; trace.json, opened in Perfetto, shows them all.` : ""}` }),
    tools, el("div", { class: "anchor" }, canvas, hover), legend, ...busyTable(timeline));
  unpack("events").then((events) => new Timeline(canvas, hover, tools, events));
  return panel;
}

class Timeline {
  constructor(canvas, hover, tools, events) {
    Object.assign(this, { canvas, hover, events });
    let at = 0;
    this.start = Float64Array.from(events.start, (difference) => (at += difference) / 1e6);
    this.dur = Float64Array.from(events.dur, (micro) => micro / 1e6);
    this.total = this.start.reduce((end, start, i) => Math.max(end, start + this.dur[i]), 1e-6);
    this.rows = this.layout();
    this.view = this.firstView();
    const button = (text, label, act) => el("button", { type: "button", text, "aria-label": label, onclick: act });
    const step = el("input", { type: "number", min: "0", "aria-label": "Step to show in the timeline" });
    tools.append(button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)), button("←", "Earlier", () => this.move(-0.5)), button("→", "Later", () => this.move(0.5)), button("Whole run", "Show the whole run", () => this.show(0, this.total)), el("label", {}, "Step", step), button("Show", "Show this step", () => this.showStep(Number(step.value))));
    step.addEventListener("keydown", (event) => event.key === "Enter" && this.showStep(Number(step.value)));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    document.addEventListener("themechange", () => this.draw());
    this.draw();
  }

  /** The whole of a short run; of a long one a few steps in its middle, in which single events can be seen. */
  firstView() {
    const steps = [...new Set(this.events.step)].filter((step) => step >= 0).sort((a, b) => a - b);
    if (steps.length <= 2 * STEPS_SHOWN) return [0, this.total];
    const middle = Math.floor(steps.length / 2);
    const [from, to] = [steps[middle], steps[middle + STEPS_SHOWN]].map((step) => this.events.step.reduce((low, of, i) => (of === step ? Math.min(low, this.start[i]) : low), Infinity));
    return from < to ? [from, to] : [0, this.total];
  }

  /** Where each lane is drawn, with a gap between two processes. */
  layout() {
    const rows = [];
    let y = 4;
    this.events.lanes.forEach((process, lane) => {
      if (lane && process !== this.events.lanes[lane - 1]) y += 8;
      rows.push(y);
      y += LANE;
    });
    this.height = y + 26;
    return rows;
  }

  listen() {
    let drag = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, view: [...this.view] };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => (drag = null));
    this.canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const seconds = ((drag.x - event.clientX) * (drag.view[1] - drag.view[0])) / this.inner();
        this.show(drag.view[0] + seconds, drag.view[1] + seconds);
      }
      this.point(event);
    });
    this.canvas.addEventListener("pointerleave", () => (this.hover.hidden = true));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.offsetX - LABEL) / this.inner());
    }, { passive: false });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.4, (event.offsetX - LABEL) / this.inner()));
    this.canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.total) }[event.key];
      if (act) {
        act();
        event.preventDefault();
      }
    });
  }

  inner() {
    return Math.max(50, this.canvas.clientWidth - LABEL - 6);
  }

  show(from, to) {
    const width = Math.min(this.total, Math.max(1e-4, to - from));
    const start = Math.max(0, Math.min(this.total - width, from));
    this.view = [start, start + width];
    requestAnimationFrame(() => this.draw());
  }

  zoom(factor, at = 0.5) {
    const [from, to] = this.view;
    const middle = from + Math.max(0, Math.min(1, at)) * (to - from);
    this.show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  move(share) {
    const [from, to] = this.view;
    this.show(from + share * (to - from), to + share * (to - from));
  }

  showStep(step) {
    let [from, to] = [Infinity, -Infinity];
    this.events.step.forEach((of, i) => {
      if (of !== step) return;
      from = Math.min(from, this.start[i]);
      to = Math.max(to, this.start[i] + this.dur[i]);
    });
    if (from < to) this.show(from - 0.1 * (to - from), to + 0.1 * (to - from));
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.drawAxis(ctx, width);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LABEL, 0, width - LABEL, this.height);
    ctx.clip();
    this.drawEvents(ctx);
    ctx.restore();
    this.drawNames(ctx);
  }

  drawAxis(ctx, width) {
    const [from, to] = this.view;
    const rough = (to - from) / Math.max(2, (width - LABEL) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const mark = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
    ctx.strokeStyle = colour("grid");
    ctx.fillStyle = colour("soft");
    ctx.textAlign = "center";
    for (let t = Math.ceil(from / mark) * mark; t <= to; t += mark) {
      const x = Math.round(this.x(t)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, 0);
      ctx.lineTo(x, this.height - 20);
      ctx.stroke();
      if (x < width - 24) ctx.fillText(`${num(Math.round(t * 1e6) / 1e6, 6)} s`, x, this.height - 10);
    }
  }

  x(seconds) {
    return LABEL + ((seconds - this.view[0]) / (this.view[1] - this.view[0])) * this.inner();
  }

  drawEvents(ctx) {
    const { lane, name, category, names, categories } = this.events;
    const colours = categories.map((one) => colour(phaseColour(one)));
    const onBar = colour("card");
    const last = this.rows.map(() => -1);
    ctx.textAlign = "left";
    for (let i = 0; i < this.start.length; i++) {
      if (lane[i] < 0) continue;
      const [left, right] = [this.x(this.start[i]), this.x(this.start[i] + this.dur[i])];
      if (right < LABEL || left > this.canvas.clientWidth) continue;
      // Many short events on one pixel are drawn once.
      if (right - left < 0.7 && right <= last[lane[i]] + 0.3) continue;
      last[lane[i]] = Math.max(last[lane[i]], right);
      const gap = right - left > 4 ? 0.5 : 0;
      ctx.fillStyle = colours[category[i]];
      ctx.fillRect(left, this.rows[lane[i]], Math.max(0.7, right - left - gap), LANE - 2);
      const room = Math.min(right, this.canvas.clientWidth) - Math.max(left, LABEL) - 8;
      if (room > 26) {
        const words = visible(names[name[i]]);
        if (ctx.measureText(words).width <= room) {
          ctx.fillStyle = onBar;
          ctx.fillText(words, Math.max(left, LABEL) + 4, this.rows[lane[i]] + LANE / 2 - 0.5);
        }
      }
    }
  }

  drawNames(ctx) {
    ctx.textAlign = "left";
    ctx.fillStyle = colour("ink");
    this.events.lanes.forEach((process, lane) => {
      if (lane && process === this.events.lanes[lane - 1]) return;
      let words = visible(this.events.processes[process]);
      while (words.length > 3 && ctx.measureText(words).width > LABEL - 10) words = `${words.slice(0, -2)}…`;
      ctx.fillText(words, 0, this.rows[lane] + LANE / 2);
    });
  }

  /** What lies under the pointer. */
  point(event) {
    const lane = this.rows.findIndex((y) => event.offsetY >= y && event.offsetY < y + LANE);
    const t = this.view[0] + ((event.offsetX - LABEL) / this.inner()) * (this.view[1] - this.view[0]);
    const slack = (1.5 * (this.view[1] - this.view[0])) / this.inner();
    let found = -1;
    if (lane >= 0 && event.offsetX >= LABEL) for (let i = 0; i < this.start.length; i++) if (this.events.lane[i] === lane && t >= this.start[i] - slack && t <= this.start[i] + this.dur[i] + slack) found = i;
    this.hover.hidden = found < 0;
    if (found < 0) return;
    const step = this.events.step[found];
    this.hover.textContent = visible(`${this.events.names[this.events.name[found]]} (${this.events.categories[this.events.category[found]]})${step >= 0 ? `, step ${step}` : ""}: ${duration(this.dur[found])}, from ${num(this.start[found], 6)} s`);
    this.hover.style.left = `${Math.max(0, Math.min(event.offsetX + 12, this.canvas.clientWidth - 330))}px`;
    this.hover.style.top = `${event.offsetY + 16}px`;
  }
}
