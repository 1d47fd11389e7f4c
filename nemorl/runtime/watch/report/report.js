"use strict";
const root = document.documentElement;
root.classList.add("scripted");
const data = JSON.parse(document.getElementById("report-data").textContent);
const id = (name) => document.getElementById(name);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

function make(name, className, text) {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

function fmt(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e4) return String(value);
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(2).replace("e-0", "e-");
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= unit) return (value / (name === "k" ? 1e3 : unit)).toPrecision(3) + name;
  return size >= 1000 ? value.toFixed(0) : value.toPrecision(3);
}

// Light and dark
id("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};

// Curves: one cursor over all of them, smoothing, search
const W = 420, H = 200, L = 46, R = 12, T = 10, B = 24;
const charts = all("figure.chart").map((figure) => {
  const curve = data.curves[figure.dataset.curve];
  const [x0, x1, y0, y1] = curve.box;
  return {
    figure, curve, svg: figure.querySelector("svg"), line: figure.querySelector(".cursor"), dot: figure.querySelector(".dot"),
    smooth: figure.querySelector(".smooth"), now: figure.querySelector(".now"), rest: figure.querySelector(".now").textContent, shown: curve.train[1],
    x: (step) => L + (step - x0) / (x1 - x0) * (W - L - R), y: (value) => H - B - (value - y0) / (y1 - y0) * (H - T - B),
  };
});

function smoothed(values, width) {
  const reach = Math.ceil(3 * width), kernel = [];
  for (let k = -reach; k <= reach; k++) kernel.push(Math.exp(-0.5 * (k / width) ** 2));
  return values.map((_, i) => {
    let sum = 0, weight = 0;
    for (let k = Math.max(-reach, -i); k <= reach && i + k < values.length; k++) { sum += kernel[k + reach] * values[i + k]; weight += kernel[k + reach]; }
    return sum / weight;
  });
}

function smooth(amount) {
  for (const chart of charts) {
    if (!chart.smooth) continue;
    const [steps, values] = chart.curve.train;
    const width = chart.curve.width * 2 ** ((amount - 50) / 10);
    chart.shown = amount === 0 ? values : smoothed(values, width);
    chart.smooth.setAttribute("d", "M" + steps.map((step, i) => `${chart.x(step).toFixed(1)} ${chart.y(chart.shown[i]).toFixed(1)}`).join("L"));
  }
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

function point(step) {
  for (const chart of charts) {
    const [steps, values] = chart.curve.train, [places, marks] = chart.curve.validation;
    const i = nearest(steps.length ? steps : places, step), at = (steps.length ? steps : places)[i];
    chart.figure.classList.add("pointing");
    chart.line.setAttribute("x1", chart.x(at)); chart.line.setAttribute("x2", chart.x(at));
    const parts = [`step ${at}`];
    if (steps.length) {
      chart.dot.setAttribute("cx", chart.x(at)); chart.dot.setAttribute("cy", chart.y(chart.shown[i]));
      if (chart.smooth && fmt(values[i]) !== fmt(chart.shown[i])) parts.push(`smoothed ${fmt(chart.shown[i])}`);
    }
    if (places.length && steps.length) { const j = nearest(places, step); parts.push(`val ${fmt(marks[j])}` + (places[j] === at ? "" : ` (${places[j]})`)); }
    chart.now.replaceChildren(make("small", "", parts.join(" · ") + "  "), fmt(steps.length ? values[i] : marks[i]));
  }
}

function leave() {
  for (const chart of charts) { chart.figure.classList.remove("pointing"); chart.now.textContent = chart.rest; }
}

for (const chart of charts) {
  const stepOf = (event) => {
    const area = chart.svg.getBoundingClientRect(), [x0, x1] = chart.curve.box;
    return x0 + ((event.clientX - area.left) / area.width * W - L) / (W - L - R) * (x1 - x0);
  };
  chart.svg.onpointermove = (event) => point(stepOf(event));
  chart.svg.onpointerleave = leave;
  chart.svg.onclick = (event) => {
    if (!steps.length) return;
    show(nearest(steps, stepOf(event)));
    id("samples").scrollIntoView();
  };
}

smooth(50);
if (id("smoothing")) id("smoothing").oninput = (event) => smooth(Number(event.target.value));

if (id("find-curve")) id("find-curve").oninput = (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  for (const { figure } of charts) figure.hidden = !`${figure.dataset.metric} ${figure.querySelector(".what").textContent}`.toLowerCase().includes(wanted);
  for (const group of all("details.group")) {
    group.dataset.was ??= group.open;
    const found = all("figure", group).some((figure) => !figure.hidden);
    group.open = wanted ? found : group.dataset.was === "true";
    group.hidden = Boolean(wanted) && !found;
  }
};

// Samples
const steps = Object.keys(data.samples.steps).map(Number).sort((a, b) => a - b);
const rewards = steps.flatMap((step) => data.samples.steps[step].map((sample) => sample.w)).filter((value) => value !== undefined);
const [worst, best] = [Math.min(...rewards), Math.max(...rewards)];
const WIDE = 0.5; // a gap in nats that has full colour
let place = steps.length - 1, mode = all(".modes button")[0]?.dataset.mode ?? "none";

function tint(sample, i) {
  const advantage = Array.isArray(sample.a) ? sample.a[i] : sample.a;
  if (mode === "advantage" && advantage && data.samples.most)
    return `rgba(var(--${advantage > 0 ? "plus" : "minus"}), ${(0.08 + 0.47 * Math.min(1, Math.abs(advantage) / data.samples.most)).toFixed(3)})`;
  if (mode === "gap" && typeof sample.g?.[i] === "number") return `rgba(var(--odd), ${(0.6 * Math.min(1, Math.abs(sample.g[i]) / WIDE)).toFixed(3)})`;
  if (mode === "logprob" && typeof sample.l?.[i] === "number") return `rgba(var(--odd), ${(0.6 * Math.min(1, -sample.l[i] / 5)).toFixed(3)})`;
  return "";
}

function response(sample) {
  const text = make("div", "text");
  if (!sample.t?.length) { text.textContent = sample.r || "(empty)"; return text; }
  sample.t.forEach((piece, i) => {
    const visible = piece.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (sign) => String.fromCodePoint(0x2400 + Math.min(0x21, sign.codePointAt(0))));
    const span = make("span", "t", piece === "" ? "·" : visible.replace(/\n/g, "↵\n"));
    if (piece === "" || /^<[^<>\s]+>$/.test(piece)) span.classList.add("sign");
    span.style.background = tint(sample, i);
    span.dataset.i = i;
    text.append(span);
  });
  if (sample.cut) text.append(make("small", "", ` … and ${sample.cut} more tokens`));
  text.onpointermove = (event) => tell(event, sample);
  text.onpointerleave = () => { tip.style.display = "none"; };
  return text;
}

const tip = document.body.appendChild(make("div", ""));
tip.id = "tip";

function tell(event, sample) {
  const i = event.target.dataset?.i;
  if (i === undefined) { tip.style.display = "none"; return; }
  const lines = [`token ${Number(i) + 1} of ${sample.n ?? sample.t.length}: ${JSON.stringify(sample.t[i])}`], logprob = sample.l?.[i];
  if (typeof logprob === "number") lines.push(`probability ${fmt(Math.exp(logprob))} (log ${fmt(logprob)})`);
  const gap = sample.g?.[i];
  if (typeof gap === "number") lines.push(`of the trainer ${fmt(Math.exp(logprob + gap))}, by a factor of ${Math.exp(gap).toFixed(3)}`);
  const advantage = Array.isArray(sample.a) ? sample.a[i] : sample.a;
  if (typeof advantage === "number") lines.push(`advantage ${fmt(advantage)}`);
  tip.textContent = lines.join("\n");
  tip.style.display = "block";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 20 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 20}px`;
}

function chip(name, value) {
  const found = make("span", "chip", `${name} `);
  found.append(make("b", "", value));
  return found;
}

function side(name, text) {
  const found = make("div", `side ${name}`);
  found.append(make("small", "", name), make("div", "text", text || "(empty)"));
  return found;
}

function card(sample) {
  const found = make("article", "sample"), meta = make("div", "meta");
  found.append(make("div", "text prompt", sample.p));
  if (sample.c === undefined && sample.j === undefined) found.append(response(sample));
  if (sample.c !== undefined) found.append(side("chosen", sample.c));
  if (sample.j !== undefined) found.append(side("rejected", sample.j));
  if (sample.w !== undefined) {
    const middle = (worst + best) / 2;
    const reward = make("span", `reward ${best > worst ? (sample.w > middle ? "up" : sample.w < middle ? "down" : "") : ""}`, `reward ${fmt(sample.w)}`);
    reward.title = `rewards on this page go from ${fmt(worst)} to ${fmt(best)}`;
    meta.append(reward);
  }
  for (const [name, value] of Object.entries(sample.ws ?? {})) meta.append(chip(name, fmt(value)));
  if (typeof sample.a === "number") meta.append(chip("advantage", fmt(sample.a)));
  for (const [name, value] of Object.entries(sample.o)) meta.append(chip(name.replace(/_id$/, "").replaceAll("_", " "), value));
  if (sample.n !== undefined) meta.append(make("span", "chip", sample.n === 1 ? "1 token" : `${sample.n} tokens`));
  if (sample.f && sample.f !== "stop") meta.append(make("span", "chip", sample.f === "length" ? "cut at the limit" : sample.f));
  found.append(meta);
  return found;
}

function show(where) {
  place = Math.max(0, Math.min(steps.length - 1, where));
  const wanted = id("find-sample").value.trim().toLowerCase();
  const found = data.samples.steps[steps[place]].filter((sample) => !wanted || JSON.stringify(sample).toLowerCase().includes(wanted));
  id("sample-step").textContent = steps[place];
  id("sample-range").value = place;
  id("sample-list").replaceChildren(...found.map(card));
  if (!found.length) id("sample-list").append(make("p", "empty", "No sample of this step has that text."));
  for (const button of all(".modes button")) button.setAttribute("aria-pressed", button.dataset.mode === mode);
  const legend = id("legend"), bar = make("i");
  legend.replaceChildren();
  if (mode === "advantage") {
    bar.style.background = "linear-gradient(90deg, rgba(var(--minus), .55), transparent, rgba(var(--plus), .55))";
    legend.append(`−${fmt(data.samples.most)}`, bar, `+${fmt(data.samples.most)}`, " advantage: what the update makes less likely, and more likely");
  } else if (mode === "logprob") {
    bar.style.background = "linear-gradient(90deg, transparent, rgba(var(--odd), .6))";
    legend.append("certain", bar, "probability below 0.7 %");
  } else if (mode === "gap") {
    bar.style.background = "linear-gradient(90deg, transparent, rgba(var(--odd), .6))";
    legend.append("agreement", bar, `trainer's and sampler's probability differ by a factor of ${Math.exp(WIDE).toFixed(1)} or more`);
  }
}

if (steps.length) {
  id("earlier").onclick = () => show(place - 1);
  id("later").onclick = () => show(place + 1);
  id("sample-range").oninput = (event) => show(Number(event.target.value));
  id("find-sample").oninput = () => show(place);
  for (const button of all(".modes button")) button.onclick = () => { mode = button.dataset.mode; show(place); };
  addEventListener("keydown", (event) => {
    if (event.target.closest?.("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowLeft") show(place - 1);
    if (event.key === "ArrowRight") show(place + 1);
  });
  for (const { figure } of charts) { figure.classList.add("clickable"); figure.title = "click: samples of this step"; }
  show(place);
}

// Settings and log
function filterSettings() {
  const wanted = id("find-setting").value.trim().toLowerCase(), only = id("only-changed")?.checked;
  for (const row of all(".settings tr")) row.hidden = (only && !row.classList.contains("changed")) || !`${row.title} ${row.textContent}`.toLowerCase().includes(wanted);
  for (const part of all("#settings .card")) part.hidden = all("tr", part).every((row) => row.hidden);
}
if (id("find-setting")) id("find-setting").oninput = filterSettings;
if (id("only-changed")) id("only-changed").onchange = filterSettings;
if (id("all-events")) id("all-events").onchange = (event) => id("log").classList.toggle("all", event.target.checked);
