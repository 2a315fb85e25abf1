// The page "A schedule to try": the package's schedules, moved in time by costs that the reader
// chooses. Which actions a schedule has, and what each needs, is in schedules.json, which
// docs/site/schedules.py exports from the package.

"use strict";

const COLORS = { F: "#3b75af", R: "#a6c8e6", B: "#e8853d", W: "#f6cfa4" };
const DARK = "FB"; // kinds whose boxes have white letters
const ROW = 34, GAP = 6, LEFT = 64, WIDTH = 900; // of the picture, in its own units

// An action as text, "F0.2", with its parts.
function parse(text) {
  const [name, stage] = text.split(".");
  return { text, kind: name[0], i: Number(name.slice(1)), j: Number(stage) };
}

const rowOf = (text) => (text ? text.split(" ").map(parse) : []);

/**
 * Move the actions of a schedule in time: each worker runs its own in order, each after those that
 * it needs.
 *
 * @param {object} data - The export of the package.
 * @param {object} schedule - One of its schedules.
 * @param {object} costs - The time of F, B and W of one micro-batch on one device; R costs as F.
 * @param {boolean} split - Whether W is an action of its own; if not, B takes the time of both.
 * @returns {object} The actions of each worker with start and end, the makespan, the bubble, and
 *   the most micro-batches whose activations each worker holds at once.
 */
function simulate(data, schedule, costs, split) {
  const stages = schedule.placement.length;
  const workers = schedule.phases[0].length;
  const each = stages / workers; // stages on a device, each with its part of the time
  const price = {
    F: costs.F / each,
    R: costs.F / each,
    B: (split ? costs.B : costs.B + costs.W) / each,
    W: costs.W / each,
  };
  const phases = schedule.phases.map((rows) => rows.map(rowOf));
  const caller = rowOf(schedule.caller);
  const rows = phases[0].map((_, w) => phases.flatMap((phase) => phase[w]));
  const before = resultsBefore(phases, data.directions, stages);
  const present = new Set([...rows.flat(), ...caller].map((action) => action.text));
  const needs = (action) => [
    ...data.needs[action.kind].map(([kind, by]) => `${kind}${action.i}.${action.j + by}`),
    ...(before.get(action.text) ?? []),
  ].filter((text) => present.has(text));

  const end = new Map();
  const everyone = [...rows, caller];
  const clock = everyone.map(() => 0);
  const next = everyone.map(() => 0);
  const done = everyone.map(() => []);
  for (let progress = true; progress; ) {
    progress = false;
    everyone.forEach((row, w) => {
      for (; next[w] < row.length; next[w] += 1) {
        const action = row[next[w]];
        const needed = needs(action);
        if (!needed.every((text) => end.has(text))) return;
        const start = Math.max(clock[w], ...needed.map((text) => end.get(text)));
        const byCaller = action.j < 0 || action.kind === "L";
        clock[w] = start + (byCaller ? 0 : price[action.kind]);
        end.set(action.text, clock[w]);
        done[w].push({ ...action, start, end: clock[w] });
        progress = true;
      }
    });
  }
  const makespan = Math.max(...clock);
  const busy = done.slice(0, workers).flat().reduce((sum, a) => sum + a.end - a.start, 0);
  return {
    rows: done.slice(0, workers),
    makespan,
    bubble: makespan ? 1 - busy / (makespan * workers) : 0,
    live: rows.map(peakLive),
  };
}

// For each action of a later phase, the actions whose results the caller had to have first.
function resultsBefore(phases, directions, stages) {
  const needed = new Map();
  let results = [];
  for (const phase of phases) {
    const actions = phase.flat();
    actions.forEach((action) => needed.set(action.text, results));
    results = actions
      .filter(({ kind, j }) => j + directions[kind] < 0 || j + directions[kind] >= stages)
      .map((action) => action.text);
  }
  return needed;
}

// The most micro-batches of one worker whose activations are alive at once.
function peakLive(row) {
  const last = (kinds) =>
    new Map(row.filter((a) => kinds.includes(a.kind)).map((a) => [`${a.i}.${a.j}`, a.text]));
  const makes = last("FR"), frees = last("BW");
  let live = 0, peak = 0;
  for (const action of row) {
    const key = `${action.i}.${action.j}`;
    live += makes.get(key) === action.text;
    peak = Math.max(peak, live);
    live -= frees.get(key) === action.text;
  }
  return peak;
}

// The picture: a row for each device, a box for each action.
function picture({ rows, makespan }) {
  const height = rows.length * (ROW + GAP);
  const scale = (WIDTH - LEFT) / makespan;
  const boxes = rows.flatMap((row, w) => [
    `<text class="device" x="0" y="${w * (ROW + GAP) + 22}">device ${w}</text>`,
    ...row.map((action) => box(action, LEFT, w * (ROW + GAP), scale)),
  ]);
  return `<svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="The schedule">` +
    `${boxes.join("")}</svg>`;
}

function box({ kind, i, j, start, end }, left, y, scale) {
  const x = left + start * scale, width = (end - start) * scale;
  const label = width > 9 * String(i).length + 12
    ? `<text x="${x + width / 2}" y="${y + 22}" fill="${DARK.includes(kind) ? "#fff" : "#333"}">` +
      `${kind}${i}</text>`
    : "";
  return `<g><title>${kind}${i}, stage ${j}</title>` +
    `<rect x="${x}" y="${y}" width="${Math.max(width - 0.8, 0.4)}" height="${ROW}" ` +
    `fill="${COLORS[kind]}"/>${label}</g>`;
}

// What the reader would write for this.
function argumentsOf({ kind, devices, chunks, recompute }) {
  const usual = kind.byMicroBatch ? "never" : "except_last";
  return [
    `chunks=${chunks}`,
    kind.name === "fill_drain" ? "" : `schedule="${kind.name}"`,
    kind.split && !kind.name.startsWith("zero") ? "split_backward=True" : "",
    recompute === usual ? "" : `activation_checkpointing="${recompute}"`,
  ].filter(Boolean).join(", ");
}

function show(page, data) {
  const value = (name) => page.querySelector(`[name=${name}]`).value;
  const kind = data.kinds[Number(value("kind"))];
  const devices = data.devices[Number(value("devices"))];
  const chunks = data.chunks[Number(value("chunks"))];
  const recompute = value("recompute");
  const costs = { F: Number(value("F")), B: Number(value("B")), W: Number(value("W")) };
  const name = `${kind.name} ${kind.split ? "split" : "whole"} ${devices} ${chunks} ${recompute}`;
  const result = simulate(data, data.schedules[name], costs, kind.split);
  const work = devices * chunks * (costs.F + costs.B + costs.W); // of one device, all at once
  const each = data.schedules[name].placement.length / devices;
  const texts = {
    devices, chunks,
    F: costs.F, B: costs.B, W: costs.W,
    bubble: `${(100 * result.bubble).toFixed(0)} %`,
    speed: `${(work / result.makespan).toFixed(2)}×`,
    live: result.live.map((count) => count / each).join(", "),
    code: `GPipeStrategy(${argumentsOf({ kind, devices, chunks, recompute })})`,
  };
  for (const [key, text] of Object.entries(texts)) {
    for (const place of page.querySelectorAll(`[data-shows=${key}]`)) place.textContent = text;
  }
  page.querySelector("[data-shows=picture]").innerHTML = picture(result);
  return result;
}

async function start(page) {
  const answer = await fetch(page.dataset.schedules);
  const data = await answer.json();
  const kinds = page.querySelector("[name=kind]");
  data.kinds.forEach(({ title, split, name }, k) => {
    const halves = split && !name.startsWith("zero") ? ", split backwards" : "";
    kinds.add(new Option(title + halves, String(k)));
  });
  for (const name of ["devices", "chunks"]) {
    const slider = page.querySelector(`[name=${name}]`);
    slider.max = String(data[name].length - 1);
    slider.value = String(data[name].indexOf(name === "devices" ? 4 : 8));
  }
  page.addEventListener("input", () => show(page, data));
  show(page, data);
  page.dataset.ready = "true";
  window.schedules = { data, simulate };
}

for (const page of document.querySelectorAll("[data-schedules]")) start(page);
