"use strict";
// The sections of the page, each made of the one JSON value. What a run did not measure is named, not drawn empty.

const SMOOTHED = 10;

/** The mean of about `width` values around each place. */
function rolling(values, width) {
  const half = width / 2;
  return values.map((_, i) => {
    const found = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
  });
}

/** Makes charts over the steps from names of series; keeps account of what is drawn and what is missing. */
class Steps {
  constructor(value, pick) {
    this.curves = value.curves;
    this.pick = pick;
    this.drawn = new Set(["weights_version"]);
    this.missing = [];
  }

  values(key) {
    const found = this.curves.series[key];
    this.drawn.add(key);
    return found && found.some((one) => one !== null) ? found : null;
  }

  /** `keys` are [key, label, more] of the series. */
  chart(title, unit, keys, more = {}) {
    const series = [];
    for (const [key, label, extra] of keys) {
      const values = this.values(key);
      if (values) series.push({ label, values, ...extra });
      else this.missing.push(key);
    }
    return this.figure({ title, unit, series, ...more });
  }

  figure(spec) {
    return chartFigure({ x: this.curves.steps, xLabel: "step", sync: "steps", pick: this.pick, ...spec });
  }

  notMeasured() {
    const missing = this.missing.splice(0);
    return missing.length && this.curves.steps.length ? el("p", { class: "note muted", text: `Not measured in this run: ${missing.join(", ")}.` }) : null;
  }
}

function section(id, title, lead, ...children) {
  const shown = children.filter(Boolean);
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, text: title }), lead ? el("p", { class: "lead", text: lead }) : null, ...(shown.length ? shown : [el("p", { class: "muted", text: "Nothing of this was recorded." })]));
}

function grid(...children) {
  const shown = children.filter(Boolean);
  const narrow = shown.filter((one) => !one.classList.contains("wide"));
  // The last of an odd number takes the whole row.
  if (narrow.length % 2) narrow[narrow.length - 1].classList.add("wide");
  return shown.length ? el("div", { class: "grid" }, ...shown) : null;
}

// --- head ---------------------------------------------------------------------------------------------------------

const STATUS = { done: "Done", running: "Training now", failed: "Failed", interrupted: "Interrupted", unknown: "End not known" };

function statusWords(head) {
  const planned = head.steps_planned === null ? "" : ` of ${num(head.steps_planned)}`;
  if (!head.steps_done) return `no step has finished${planned ? ` (${num(head.steps_planned)} planned)` : ""}`;
  return `${num(head.last_step + 1)}${planned} steps`;
}

function tile(what, number, more) {
  return el("div", { class: "card tile" }, el("div", { class: "what", text: what }), el("div", { class: "number", text: number }), el("div", { class: "more", text: more || "" }));
}

const mean = (values) => {
  const known = (values || []).filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

function tiles(value) {
  const { curves, totals, header: head } = value;
  const rewards = curves.series.reward_mean || [];
  const ends = Math.max(1, Math.min(10, Math.floor(rewards.length / 2)));
  const found = [];
  if (mean(rewards) !== null) found.push(tile("Reward", rewards.length > 1 ? `${num(mean(rewards.slice(0, ends)))} → ${num(mean(rewards.slice(-ends)))}` : num(rewards[0]), rewards.length > 1 ? (ends > 1 ? `means of the first and last ${ends} steps` : "first and last step") : "one step"));
  for (const set of curves.evaluations.slice(0, 3)) {
    const score = set.scores.find((one) => one.name.startsWith("avg@")) || set.scores[0];
    if (!score) continue;
    const points = score.values.map((v, i) => [v, set.versions[i]]).filter(([v]) => v !== null);
    if (!points.length) continue;
    const [first, last] = [points[0], points[points.length - 1]];
    found.push(tile(`${set.name} ${score.name}`, points.length > 1 ? `${num(first[0])} → ${num(last[0])}` : num(first[0]), points.length > 1 ? `version ${first[1]} → ${last[1]}` : `version ${first[1]}`));
  }
  if (totals.time_step_s) found.push(tile("Steps took", duration(totals.time_step_s), `${duration(totals.time_step_s / Math.max(1, head.steps_done))} a step${totals.time_evaluate_s ? ` · evaluations ${duration(totals.time_evaluate_s)}` : ""}`));
  const overlap = mean(curves.series.overlap);
  if (overlap !== null) found.push(tile("Overlap", percent(overlap), "of the shorter side's work was hidden"));
  if (totals.tokens_generated) found.push(tile("Tokens sampled", totals.tokens_generated >= 1e6 ? `${num(totals.tokens_generated / 1e6)} M` : num(totals.tokens_generated), totals.time_step_s ? `${num(Math.round(totals.tokens_generated / totals.time_step_s))} a second of the steps` : ""));
  const lag = (curves.series.staleness_max || []).filter((v) => v !== null);
  if (lag.length) found.push(tile("Lag", String(extent(lag)[1]), "weights versions behind, at most"));
  return el("div", { class: "tiles" }, ...found);
}

function headPanel(value) {
  const { header: head } = value;
  const facts = [...head.facts];
  if (head.versions) facts.push(["Weights versions", `${head.versions[0]} to ${head.versions[1]}`]);
  if (head.started) facts.push(["Started", date(head.started)], ["Last event", `${date(head.ended)}, ${duration(head.wall_s)} later`]);
  if (head.resumes) facts.push(["Resumed", `${many(head.resumes, "time")}, at step ${head.resumed_at.join(", ")}`]);
  if (head.saved_at !== null) facts.push(["Newest checkpoint", `step ${head.saved_at}`]);
  for (const [reason, count, of] of head.dropped) facts.push(["Dropped", `${count ? `${many(count, "sample")} of ` : ""}${many(of, "step")}: ${reason}`]);
  return el("section", { id: "overview", "aria-label": "Overview" },
    el("div", { class: "head" }, el("h1", { text: head.name }), el("span", { class: `badge ${head.status}`, text: STATUS[head.status] }), el("span", { class: "muted", text: statusWords(head) })),
    el("p", { class: "under", text: head.model === null ? "config.json is missing: the settings of the run are not known." : head.model }),
    head.failure ? el("p", { class: "problem bad", text: head.failure }) : null,
    value.remarks.length ? el("div", { class: "problem", role: "note" }, ...value.remarks.map((remark) => el("p", { text: remark }))) : null,
    tiles(value),
    facts.length ? el("div", { class: "card facts" },
      el("dl", {}, ...facts.flatMap(([name, words]) => [el("dt", { text: name }), el("dd", { text: words })])),
      head.settings.length ? el("details", {}, el("summary", { text: `All ${head.settings.length} settings` }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" }, table(["key", "value"], head.settings, { class: "settings" }))) : null) : null,
    value.curves.steps.length < value.curves.steps_total ? el("p", { class: "lead", text: `Charts show ${num(value.curves.steps.length)} of ${num(value.curves.steps_total)} steps, evenly spaced; metrics.jsonl has them all.` }) : null);
}

function alarmPanel(value) {
  const { alarms, nonfinite } = value.curves;
  const shown = alarms.map((one) => el("div", { class: "alarm" },
    el("p", { text: one.newest }),
    el("p", { class: "when", text: `${one.kind} · ${one.count === 1 ? "at step" : `at ${num(one.count)} steps:`} ${one.steps}${one.now ? " · still so at the newest step" : ""}` })));
  for (const one of nonfinite) shown.push(el("div", { class: "alarm" }, el("p", { text: `${one.key} was not a number, or infinite.` }), el("p", { class: "when", text: `at step ${one.steps}` })));
  if (!shown.length) shown.push(el("p", { class: "muted", text: value.curves.steps.length ? "None: rewards, spread, truncation, skipped updates and the agreement of engines and trainer were within bounds." : "No step to look at." }));
  return section("alarms", "Alarms", null, ...shown);
}

// --- charts -------------------------------------------------------------------------------------------------------

function learningPanel(value, steps) {
  const rewards = steps.values("reward_mean");
  const many_ = rewards && rewards.length > 3 * SMOOTHED;
  const band = { label: "mean reward ± standard error", values: rewards, errors: value.curves.reward_error, weak: many_, plain: true };
  const smooth = { label: `mean of ${SMOOTHED} steps around`, values: many_ ? rolling(rewards, SMOOTHED) : null, plain: true };
  const parts = Object.keys(value.curves.series).filter((key) => key.startsWith("reward/"));
  const sets = value.curves.evaluations.map((set) => chartFigure({
    title: `Held out: ${set.name}`,
    unit: "score",
    note: "Bars are one standard error, clustered by prompt.",
    x: set.versions,
    xLabel: "weights version",
    share: false,
    series: set.scores.map((score) => ({ label: score.name, values: score.values, errors: score.errors.some((v) => v !== null) ? score.errors : null, bars: true, points: true })),
  }));
  const shown = grid(
    rewards && steps.figure({ title: "Reward of the training samples", unit: "reward", note: "Standard error over groups: samples of one prompt are not independent.", series: [{ ...band, colour: "c1" }, { ...smooth, colour: "c1" }] }),
    ...sets,
    parts.length > 1 || (parts.length === 1 && mean(value.curves.series[parts[0]]) !== mean(rewards)) ? steps.chart("Reward functions", "mean of each, before its weight", parts.slice(0, 12).map((key) => [key, key.slice(7)])) : (parts.forEach((key) => steps.drawn.add(key)), null),
    groupChart(value, steps),
    steps.chart("Groups without spread", "share of groups", [["groups_without_spread_fraction", "all rewards of the group equal"]], { share: true, note: "Such a group teaches nothing." }),
  );
  steps.drawn.add("reward_std");
  return section("learning", "Reward and evaluation", "Drag in a chart to zoom, double-click to see the whole run again. With the keyboard: arrow keys move along a chart, Enter shows the samples of the step.", shown);
}

function groupChart(value, steps) {
  const { groups } = value;
  if (!groups.steps.length) return null;
  const [low, , lower, middle, upper, , high] = groups.quantiles;
  return steps.figure({
    title: "Mean reward of the groups",
    unit: "reward",
    note: "How the prompts of a step differ: easy ones above, hard ones below.",
    x: groups.steps,
    series: [
      { label: "median, and the middle half of the groups", values: middle, low: lower, high: upper, colour: "c3", plain: true },
      { label: "lowest group", values: low, weak: true, colour: "c2", dash: [2, 3] },
      { label: "highest group", values: high, weak: true, colour: "c1", dash: [7, 4] },
    ],
  });
}

function lagPanel(value, steps) {
  return section("staleness", "Staleness", "How old the weights were that sampled a step's tokens, when the step trained on them.", grid(
    steps.chart("Staleness", "weights versions", [["staleness_max", "oldest sample"], ["staleness_min", "newest sample"]], { zero: true, note: "Version that is updated, minus the version that sampled." }),
    steps.chart("Optimizer updates behind", "updates", [["updates_behind_max", "at most"]], { zero: true, note: "The same lag in updates, up to the last update of the step." })), steps.notMeasured());
}

const TIMES = [["time_generate_s", "generate", { colour: "c1" }], ["time_reward_s", "reward", { colour: "c3" }], ["time_train_s", "train", { colour: "c2" }], ["time_wait_s", "wait for samples", { colour: "c7" }], ["time_sync_s", "sync", { colour: "c4" }], ["time_step_s", "whole step", { colour: "c8", weak: true }]];
const SYNC = [["time_sync_rendezvous_s", "rendezvous"], ["time_sync_transfer_s", "transfer"], ["time_sync_verify_s", "verify"], ["time_sync_probe_s", "probe"]];

/** Parts of a total on top of each other. */
function stacked(series) {
  let below = null;
  return series.map((one, i) => {
    const base = below;
    below = one.values.map((value, k) => (value === null ? null : value + (base ? base[k] || 0 : 0)));
    return { ...one, drawn: below, stacked: i > 0, plain: true };
  });
}

function timePanel(value, steps) {
  const parts = SYNC.filter(([key]) => steps.values(key)).map(([key, label], i) => ({ label, values: steps.values(key), colour: ["c6", "c4", "c3", "c5"][i] }));
  SYNC.filter(([key]) => !steps.values(key)).forEach(([key]) => steps.missing.push(key));
  return section("time", "Where the time went", "One step is as long as its slower side when generation and training overlap.", grid(
    steps.chart("Time of a step", "seconds", TIMES, { zero: true, note: "Generation and rewards are of the samples that the step trained on, whenever they were made.", wide: true }),
    steps.chart("Overlap", "share of the shorter side's work", [["overlap", "hidden behind the other side"]], { share: true }),
    chartFigure({ title: "Time of evaluations", unit: "seconds, all held-out sets", x: value.curves.evaluation_times.versions, xLabel: "weights version", zero: true, series: [{ label: "evaluate", values: value.curves.evaluation_times.seconds, points: true }] })),
    timelinePanel(value),
    el("h3", { text: "Weight sync" }),
    grid(
      parts.length ? steps.figure({ title: "Time of a sync", unit: "seconds, parts on top of each other", series: stacked(parts), zero: true }) : null,
      parts.length ? null : steps.figure({ title: "Time of a sync", unit: "seconds", series: [{ label: "sync", values: value.curves.series.time_sync_s || null, colour: "c4" }], zero: true }),
      steps.chart("Moved by a sync", "bytes to one engine", [["sync_bytes", "bytes"]], { zero: true, bytes: true }),
      steps.chart("Probe gap", "difference of logprobs at the same version", [["logprob_gap_max", "largest"], ["logprob_gap_mean", "mean"]].map(([key, label]) => [key, label, { points: true }]), { zero: true, note: "Numerics alone: engine against trainer, with equal weights. At steps with a parity probe." })), steps.notMeasured());
}

function lengthPanel(value, steps) {
  const truncated = value.curves.evaluations.filter((set) => set.other.response_length_mean).map((set) => chartFigure({ title: `Length, held out: ${set.name}`, unit: "tokens a sample", x: set.versions, xLabel: "weights version", zero: true, series: [{ label: "mean", values: set.other.response_length_mean, points: true }] }));
  return section("length", "Lengths and truncation", null, grid(
    steps.chart("Length of the samples", "sampled tokens a sample", [["response_length_mean", "mean"]], { zero: true }),
    steps.chart("Truncated samples", "share of samples", [["truncated_fraction", "cut off at max_new_tokens"]], { share: true }),
    ...truncated,
    steps.chart("Tokens of a step", "tokens", [["tokens_generated", "generated"], ["tokens_trained", "trained, each pass counted"]], { zero: true })), steps.notMeasured());
}

function trainerPanel(value, steps) {
  const shown = [
    steps.chart("Entropy", "nats a token", [["entropy", "entropy"]], { zero: true }),
    steps.chart("KL", "nats a token", [["kl_engine_trainer", "engine to trainer"], ["kl_reference", "to the reference model"]], { note: "Engine to trainer: staleness and numerics together." }),
    steps.chart("Gradient norm", "before clipping", [["grad_norm", "norm"]], { zero: true }),
    steps.chart("Clipped tokens", "share of tokens", [["clip_fraction_low", "ratio too low"], ["clip_fraction_high", "ratio too high"], ["clip_fraction_dual", "dual clip"]], { zero: true, note: "Tokens whose gradient is cut off." }),
    steps.chart("Effective sample size", "share of tokens", [["ess", "(Σr)² / (n · Σr²)"]], { share: true, note: "1: the samples are as good as on-policy ones." }),
    steps.chart("Ratio", "current to sampling policy", [["ratio_max", "largest"], ["ratio_mean", "mean"]]),
    steps.chart("Loss", "loss", [["loss", "loss"]]),
    steps.chart("Learning rate", "learning rate", [["lr", "lr"]], { zero: true }),
    steps.chart("Skipped updates and reward errors", "count", [["skipped_updates", "skipped updates"], ["reward_errors", "failed reward calls"]], { zero: true }),
  ];
  steps.missing = steps.missing.filter((key) => key !== "clip_fraction_dual");
  return section("trainer", "Trainer", null, grid(...shown), steps.notMeasured());
}

/** What the page does not know by name: a trainer's own keys. */
function otherPanel(value, steps) {
  const keys = Object.keys(value.curves.series).filter((key) => !steps.drawn.has(key) && value.curves.series[key].some((v) => v !== null));
  if (!keys.length) return null;
  const known = (key) => value.curves.series[key].filter((v) => v !== null);
  const [constant, changing] = [keys.filter((key) => new Set(known(key)).size === 1), keys.filter((key) => new Set(known(key)).size > 1)];
  return section("other", "Other measures", "Keys of metrics.jsonl that have no place above.",
    constant.length ? el("p", { class: "lead", text: `The same at every step: ${constant.slice(0, 60).map((key) => `${key} ${num(known(key)[0])}`).join(", ")}.` }) : null,
    grid(...changing.slice(0, 60).map((key) => steps.chart(key, "", [[key, "value"]]))));
}
