"use strict";
// Puts the page together.

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redrawCharts();
  document.dispatchEvent(new Event("themechange"));
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

  const value = JSON.parse(document.getElementById("value").textContent);
  const samples = samplesPanel(value);
  const steps = new Steps(value, samples.showStep);
  const panels = [headPanel(value), alarmPanel(value), learningPanel(value, steps), lagPanel(value, steps), timePanel(value, steps), lengthPanel(value, steps), trainerPanel(value, steps), otherPanel(value, steps), samples.node].filter(Boolean);
  document.getElementById("main").append(...panels);
  const titles = { overview: "Overview", alarms: value.curves.alarms.length ? `Alarms (${value.curves.alarms.length})` : "Alarms", learning: "Reward", staleness: "Staleness", time: "Time", length: "Lengths", trainer: "Trainer", other: "Other", samples: "Samples" };
  document.getElementById("nav").append(...panels.map((panel) => el("a", { href: `#${panel.id}`, text: titles[panel.id] })));
  document.getElementById("footer").append(el("p", { text: `Made by offbeat ${value.offbeat} at ${date(value.made)} from the files of ${value.header.name}. This page loads nothing from a network. Charts: uPlot, MIT licence.` }));
  drawCharts();
  performance.mark("charts");
  document.documentElement.dataset.ready = String(charts.filter((one) => one.made).length);
}

start();
