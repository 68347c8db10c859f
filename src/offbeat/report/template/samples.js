"use strict";
// The sample browser. The index of all kept samples is unpacked at first use; texts are, a chunk at a time, when shown
// or searched, and only a few chunks stay in memory.

const PAGE_SIZE = 20;
const CHUNKS_HELD = 6;
const [TRUNCATED, ERRORS] = [1, 2];

class Chunks {
  constructor() {
    this.held = new Map();
  }

  async get(number) {
    const known = this.held.get(number) || unpack(`samples-${number}`);
    this.held.delete(number);
    this.held.set(number, known);
    if (this.held.size > CHUNKS_HELD) this.held.delete(this.held.keys().next().value);
    return known;
  }
}

/** Filters and orders over the index: samples are numbers 0 … n−1 in the order of their groups. */
class SampleIndex {
  constructor(index) {
    this.sets = index.sets;
    this.groups = index.groups;
    this.reward = Float64Array.from(index.samples.reward, (value) => (value === null ? NaN : value));
    this.tokens = Int32Array.from(index.samples.tokens);
    this.flags = Uint8Array.from(index.samples.flags);
    this.first = [];
    this.group = new Int32Array(this.reward.length);
    let at = 0;
    index.groups.count.forEach((count, group) => {
      this.first.push(at);
      this.group.fill(group, at, at + count);
      at += count;
    });
  }

  steps(set) {
    const found = new Set();
    this.groups.step.forEach((step, group) => (set === null || this.groups.set[group] === set) && found.add(step));
    return [...found].sort((a, b) => a - b);
  }

  groupFits(group, filter) {
    return (filter.set === null || this.groups.set[group] === filter.set) && (filter.step === null || this.groups.step[group] === filter.step);
  }

  sampleFits(i, filter) {
    return (!filter.truncated || this.flags[i] & TRUNCATED) && (!filter.errors || this.flags[i] & ERRORS);
  }

  /** Numbers of the samples that pass all filters but the search. */
  samples(filter) {
    const found = [];
    for (let i = 0; i < this.reward.length; i++) if (this.groupFits(this.group[i], filter) && this.sampleFits(i, filter)) found.push(i);
    return found;
  }

  members(group) {
    return Array.from({ length: this.groups.count[group] }, (_, i) => this.first[group] + i);
  }

  meanReward(group) {
    const known = this.members(group).map((i) => this.reward[i]).filter((value) => !Number.isNaN(value));
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN;
  }

  /** `things` (samples, or groups when `grouped`) in the chosen order; what has no reward comes last. */
  sorted(things, order, grouped) {
    const group = (one) => (grouped ? one : this.group[one]);
    const tokens = (one) => (grouped ? extent(this.members(one).map((i) => this.tokens[i]))[1] : this.tokens[one]);
    const reward = (one) => (grouped ? this.meanReward(one) : this.reward[one]);
    const spread = (one) => {
      const [low, high] = extent(this.members(group(one)).map((i) => this.reward[i]));
      return low <= high ? high - low : NaN;
    };
    const [key, sign] = { newest: [(one) => this.groups.step[group(one)], -1], oldest: [(one) => this.groups.step[group(one)], 1], worst: [reward, 1], best: [reward, -1], longest: [tokens, -1], shortest: [tokens, 1], spread: [spread, -1] }[order];
    const keyed = things.map((one) => [key(one), one]);
    keyed.sort(([a, x], [b, y]) => (Number.isNaN(a) ? (Number.isNaN(b) ? x - y : 1) : Number.isNaN(b) ? -1 : sign * (a - b) || x - y));
    return keyed.map(([, one]) => one);
  }
}

function samplesPanel(value) {
  const { samples } = value;
  const lead = samples.samples === 0 ? "samples.jsonl has no samples." : samples.samples === samples.samples_kept
    ? `All ${num(samples.samples)} samples of the run are in this page.`
    : `${num(samples.samples_kept)} of ${num(samples.samples)} samples are in this page, by whole groups: of every step and evaluation those with the worst, best and longest sample, the widest spread and with errors first, then others by chance. “offbeat samples ${value.header.name}” shows them all.`;
  const cut = samples.cut ? ` ${many(samples.cut, "text")} above ${num(samples.text_limit)} characters ${samples.cut === 1 ? "has" : "have"} only the two ends here.` : "";
  if (!samples.samples_kept) return { node: section("samples", "Samples", lead, el("p", { class: "muted", text: "There is nothing to browse." })), showStep: null };
  const host = el("div", {});
  const node = section("samples", "Samples", lead + cut, host);
  const browser = unpack("samples-index").then((index) => new Browser(host, new SampleIndex(index)));
  return { node, showStep: (step) => browser.then((one) => one.showStep(step)) };
}

class Browser {
  constructor(host, index) {
    this.index = index;
    this.chunks = new Chunks();
    this.page = 0;
    this.run = 0;
    const option = (text, value) => el("option", { value, text: text });
    this.set = el("select", { id: "pick-set" }, option("all", ""), ...index.sets.map((name, i) => (index.groups.set.includes(i) ? option(name === null ? "training" : `held out: ${name}`, String(i)) : null)));
    this.step = el("select", { id: "pick-step" });
    this.order = el("select", { id: "pick-order" }, ...["newest", "oldest", "worst", "best", "longest", "shortest"].map((name) => option(name, name)), option("widest spread", "spread"));
    this.search = el("input", { id: "pick-text", type: "search", placeholder: "in prompts and completions" });
    this.grouped = el("button", { id: "pick-groups", type: "button", "aria-pressed": "true", text: "By prompt" });
    this.truncated = el("input", { id: "pick-truncated", type: "checkbox" });
    this.errors = el("input", { id: "pick-errors", type: "checkbox" });
    this.back = el("button", { type: "button", text: "‹", "aria-label": "Previous step" });
    this.forth = el("button", { type: "button", text: "›", "aria-label": "Next step" });
    this.count = el("p", { class: "muted", role: "status", id: "samples-count" });
    this.list = el("div", { id: "samples-list" });
    this.pager = el("div", { class: "pager" });
    const label = (text, ...nodes) => el("label", {}, text, ...nodes);
    host.append(el("div", { class: "card" }, el("div", { class: "tools" }, label("Set", this.set), el("span", { class: "near" }, label("Step", this.step), this.back, this.forth), label("Order", this.order), el("label", { class: "grow" }, "Search", this.search)), el("div", { class: "tools" }, this.grouped, label("", this.truncated, "cut off"), label("", this.errors, "with reward errors")), this.count), this.list, this.pager);
    this.listen();
    this.fillSteps();
    this.update();
  }

  listen() {
    let waiting = 0;
    this.set.addEventListener("change", () => (this.fillSteps(), this.update()));
    for (const one of [this.step, this.order, this.truncated, this.errors]) one.addEventListener("change", () => this.update());
    this.search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.update(), 250);
    });
    this.grouped.addEventListener("click", () => {
      this.grouped.setAttribute("aria-pressed", String(this.grouped.getAttribute("aria-pressed") !== "true"));
      this.update();
    });
    const jump = (by) => {
      const to = this.step.selectedIndex + by;
      if (to < 0 || to >= this.step.options.length) return;
      this.step.selectedIndex = to;
      this.update();
    };
    this.back.addEventListener("click", () => jump(-1));
    this.forth.addEventListener("click", () => jump(1));
  }

  fillSteps() {
    const chosen = this.step.value;
    const steps = this.index.steps(this.set.value === "" ? null : Number(this.set.value));
    this.step.replaceChildren(el("option", { value: "", text: "all" }), ...steps.map((step) => el("option", { value: String(step), text: String(step) })));
    this.step.value = steps.includes(Number(chosen)) ? chosen : "";
  }

  showStep(step) {
    this.set.value = "";
    this.fillSteps();
    this.step.value = this.index.steps(null).includes(step) ? String(step) : "";
    this.update();
    document.getElementById("samples").scrollIntoView();
  }

  filter() {
    const asNumber = (select) => (select.value === "" ? null : Number(select.value));
    return { set: asNumber(this.set), step: asNumber(this.step), truncated: this.truncated.checked, errors: this.errors.checked };
  }

  /** Filters anew, and shows the first page. A newer call ends an older one's search. */
  async update() {
    const run = ++this.run;
    const search = this.search.value.trim();
    const grouped = this.grouped.getAttribute("aria-pressed") === "true";
    let found = this.index.samples(this.filter());
    if (search) found = await this.searched(found, search.toLowerCase(), run);
    if (found === null || run !== this.run) return;
    const things = grouped ? [...new Set(found.map((i) => this.index.group[i]))] : found;
    this.shown = { things: this.index.sorted(things, this.order.value, grouped), grouped, search, hits: new Set(found) };
    this.page = 0;
    this.words = grouped ? `${many(things.length, "prompt")} with ${many(found.length, "sample")}` : many(found.length, "sample");
    this.back.disabled = this.step.selectedIndex <= 0;
    this.forth.disabled = this.step.selectedIndex >= this.step.options.length - 1;
    await this.draw();
  }

  /** The samples whose prompt or completion has the text; null when a newer search began. */
  async searched(samples, search, run) {
    const { groups } = this.index;
    const found = [];
    let chunk = -1;
    for (const i of samples) {
      const group = this.index.group[i];
      if (groups.chunk[group] !== chunk) {
        chunk = groups.chunk[group];
        this.count.textContent = `Searching … ${many(found.length, "sample")} so far`;
        await this.chunks.get(chunk);
        if (run !== this.run) return null;
      }
      const one = (await this.chunks.get(chunk))[groups.at[group]];
      const sample = one.samples[i - this.index.first[group]];
      if (one.prompt.toLowerCase().includes(search) || sample.completion.toLowerCase().includes(search)) found.push(i);
    }
    return found;
  }

  async draw() {
    const run = this.run;
    const { things, grouped } = this.shown;
    const pages = Math.max(1, Math.ceil(things.length / PAGE_SIZE));
    this.page = Math.max(0, Math.min(pages - 1, this.page));
    const cards = [];
    for (const one of things.slice(this.page * PAGE_SIZE, (this.page + 1) * PAGE_SIZE)) {
      const group = grouped ? one : this.index.group[one];
      const value = (await this.chunks.get(this.index.groups.chunk[group]))[this.index.groups.at[group]];
      if (run !== this.run) return;
      cards.push(grouped ? this.groupCard(group, value) : this.sampleCard(one, group, value));
    }
    this.list.replaceChildren(...cards);
    this.count.textContent = things.length ? this.words : "No sample fits.";
    const turn = (by, text, label) => el("button", { type: "button", text, "aria-label": label, disabled: this.page + by < 0 || this.page + by >= pages, onclick: () => ((this.page += by), this.draw().then(() => this.count.scrollIntoView({ block: "center" }))) });
    this.pager.replaceChildren(...(pages > 1 ? [turn(-1, "‹ Previous", "Previous page"), `page ${num(this.page + 1)} of ${num(pages)}`, turn(1, "Next ›", "Next page")] : []));
  }

  title(group) {
    const { groups, sets } = this.index;
    const set = sets[groups.set[group]];
    return [el("span", { class: "id", text: groups.prompt_id[group] }), el("span", { class: "field" }, el("b", { text: set === null ? `step ${groups.step[group]}` : `${set} at version ${groups.step[group]}` })), set === null && groups.epoch[group] > 0 ? el("span", { class: "field", text: `epoch ${groups.epoch[group]}` }) : null];
  }

  text(words, name, classes = "") {
    const node = el("div", { class: `text${classes}`, tabindex: "0", role: "region", "aria-label": name }, ...marked(words, this.shown.search));
    if (words === "") node.append(el("span", { class: "muted", text: "(empty)" }));
    if (words.length < 700 && words.split("\n").length < 14) return [node];
    const button = el("button", { type: "button", class: "quiet small", text: "Show in full", onclick: () => (button.textContent = node.classList.toggle("open") ? "Show less" : "Show in full") });
    return [node, button];
  }

  /** The line of figures of one sample. */
  figures(sample, i) {
    const field = (name, value) => el("span", { class: "field" }, `${name} `, el("b", { text: value }));
    const versions = sample.versions.map(([version]) => version);
    return el("div", { class: "line" },
      field("reward", num(sample.reward)),
      sample.parts.length > 1 ? sample.parts.map(([name, value]) => field(name, num(value))) : null,
      sample.advantage === null ? null : field("advantage", num(sample.advantage)),
      field("tokens", num(sample.tokens)),
      versions.length ? field(versions.length > 1 ? "versions" : "version", sample.versions.length > 1 ? sample.versions.map(([v, n]) => `${v} × ${n}`).join(", ") : num(versions[0])) : null,
      field("sample", num(sample.index)),
      sample.engine ? el("span", { class: "field", text: sample.engine }) : null,
      this.index.flags[i] & TRUNCATED ? el("span", { class: "tag", text: "cut off" }) : sample.finish && sample.finish !== "stop" ? el("span", { class: "tag", text: sample.finish }) : null,
      sample.errors.length ? el("span", { class: "tag error", text: many(sample.errors.length, "reward error") }) : null);
  }

  errorsOf(sample) {
    return sample.errors.map((error) => el("div", { class: "text wrong", text: error }));
  }

  sampleCard(i, group, value) {
    const sample = value.samples[i - this.index.first[group]];
    return el("article", { class: "card sample" }, el("div", { class: "line" }, ...this.title(group)), this.figures(sample, i), el("div", { class: "pair" }, el("div", {}, el("div", { class: "what", text: "Prompt" }), ...this.text(value.prompt, "Prompt")), el("div", {}, el("div", { class: "what", text: "Completion" }), ...this.text(sample.completion, "Completion"))), ...this.errorsOf(sample));
  }

  /** A prompt with those of its samples that fit: the best, the worst, and the others behind a fold. */
  groupCard(group, value) {
    const members = this.index.sorted(this.index.members(group), "best", false);
    const fitting = members.filter((i) => this.shown.hits.has(i));
    const shown = [...fitting.slice(0, 1), ...fitting.slice(1).slice(-1), ...fitting.slice(1, -1)];
    const rewards = members.map((i) => this.index.reward[i]).filter((v) => !Number.isNaN(v));
    const [low, high] = extent(rewards);
    const strip = el("div", { class: "strip", role: "img", "aria-label": `rewards: ${rewards.map((v) => num(v)).join(", ")}` }, ...members.map((i) => {
      const bar = el("span", { title: num(this.index.reward[i]) });
      bar.style.height = `${high > low ? 2 + (24 * (this.index.reward[i] - low)) / (high - low) : 13}px`;
      return bar;
    }));
    const member = (i) => {
      const sample = value.samples[i - this.index.first[group]];
      return el("div", { class: "member" }, this.figures(sample, i), ...this.text(sample.completion, "Completion"), ...this.errorsOf(sample));
    };
    const rest = shown.slice(2);
    const more = rest.length ? el("details", {}, el("summary", { text: `${many(rest.length, "more sample")}` })) : null;
    if (more) more.addEventListener("toggle", () => more.children.length === 1 && more.append(...rest.map(member)), { once: true });
    const words = rewards.length ? (low === high ? `all rewards ${num(low)}` : `rewards ${num(low)} to ${num(high)}, mean ${num(this.index.meanReward(group))}`) : "no rewards";
    return el("article", { class: "card sample" }, el("div", { class: "line" }, ...this.title(group), el("span", { class: "field", text: `${many(members.length, "sample")}, ${words}` })), el("div", { class: "pair" }, el("div", {}, el("div", { class: "what", text: "Prompt" }), ...this.text(value.prompt, "Prompt"), strip), el("div", {}, el("div", { class: "what", text: shown.length < members.length ? `Completions that fit: ${shown.length} of ${members.length}` : "Completions: the best, the worst, then the others" }), ...shown.slice(0, 2).map(member), more)));
  }
}
