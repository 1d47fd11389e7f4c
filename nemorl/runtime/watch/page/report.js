"use strict";
document.documentElement.classList.add("scripted");
const data = JSON.parse(document.getElementById("report-data").textContent);
const id = (name) => document.getElementById(name);
const all = (selector) => [...document.querySelectorAll(selector)];

const make = (name, className = "", text = "") => Object.assign(document.createElement(name), { className, textContent: text });
const fmt = (value) => Number.isInteger(value) && Math.abs(value) < 1e4 ? String(value) : String(Number(value.toPrecision(3)));

const tip = document.body.appendChild(Object.assign(make("div"), { id: "tip", hidden: true }));
const hide = () => { tip.hidden = true; };

function tell(event, lines) {
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  const below = event.clientY + 20;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
}

// Curves: the values at the pointer; a click shows the samples of the step.
const BOX = [0.12, 0.975]; // the axes' left and right edge: plots.BOX

const nearest = (sorted, value) => sorted.reduce((best, each, i) => (Math.abs(each - value) < Math.abs(sorted[best] - value) ? i : best), 0);

for (const figure of all("figure.chart[data-curve]")) {
  const { edges, courses } = data.curves[figure.dataset.curve], picture = figure.querySelector("svg");
  const stepAt = (event) => {
    const area = picture.getBoundingClientRect(), share = (event.clientX - area.left) / area.width;
    return edges[0] + (share - BOX[0]) / (BOX[1] - BOX[0]) * (edges[1] - edges[0]);
  };
  picture.onpointermove = (event) => {
    const lines = courses.filter((course) => course.at(-1).length).map((course) => {
      const [places, values] = course.slice(-2), i = nearest(places, stepAt(event));
      return `${course.slice(0, -2).join(", ")} ${fmt(values[i])} at step ${places[i]}`;
    });
    tell(event, lines);
  };
  picture.onpointerleave = hide;
  picture.onclick = (event) => {
    if (!steps.length) return;
    show(nearest(steps, stepAt(event)));
    id("samples").scrollIntoView();
  };
}

// Samples: one step at a time, each token colored by what was measured of it.
const steps = [...new Set(data.runs.flatMap((run) => Object.keys(run.steps).map(Number)))].sort((a, b) => a - b);
const rewards = data.runs.flatMap((run) => Object.values(run.steps).flat()).map((sample) => sample.reward).filter((value) => value !== undefined);
const most = Math.max(...data.runs.map((run) => run.most));
const middle = (Math.min(...rewards) + Math.max(...rewards)) / 2;
const GAP = 0.5, SURPRISE = 5; // nats that have full color
const opening = Math.max(0, steps.indexOf(data.opens)); // the newest step that all runs have
let place = opening, mode = all(".modes button")[0]?.dataset.mode ?? "none";

const shade = (color, share) => `rgba(var(--${color}), ${(0.6 * Math.min(1, share)).toFixed(3)})`;
const COLORS = {
  advantages: (sample, i) => sample.advantages?.[i] ? shade(sample.advantages[i] > 0 ? "plus" : "minus", Math.abs(sample.advantages[i]) / most) : "",
  logprobs: (sample, i) => shade("odd", -(sample.logprobs?.[i] ?? 0) / SURPRISE),
  trainer_logprobs: (sample, i) => shade("odd", Math.abs(sample.gaps?.[i] ?? 0) / GAP),
  none: () => "",
};
const LEGENDS = {
  advantages: [`−${fmt(most)}`, `${shade("minus", 1)}, transparent, ${shade("plus", 1)}`, `+${fmt(most)} advantage: what the update makes less likely, and more likely`],
  logprobs: ["certain", `transparent, ${shade("odd", 1)}`, "probability below 0.7 %"],
  trainer_logprobs: ["agreement", `transparent, ${shade("odd", 1)}`, `trainer's and sampler's probability differ by a factor of ${Math.exp(GAP).toFixed(1)} or more`],
};

function measured(sample, i) {
  const lines = [`token ${i + 1} of ${sample.tokens.length + (sample.cut ?? 0)}: ${JSON.stringify(sample.tokens[i])}`], logprob = sample.logprobs?.[i], gap = sample.gaps?.[i];
  if (typeof logprob === "number") lines.push(`probability ${fmt(Math.exp(logprob))} (log ${fmt(logprob)})`);
  if (typeof gap === "number") lines.push(`of the trainer ${fmt(Math.exp(logprob + gap))}, by a factor of ${Math.exp(gap).toFixed(3)}`);
  if (typeof sample.advantages?.[i] === "number") lines.push(`advantage ${fmt(sample.advantages[i])}`);
  if (untrained(sample, i)) lines.push("not trained on");
  return lines;
}

const untrained = (sample, i) => sample.trained?.[i] === false;

// What the model said in a turn: its tokens, or its text where they are unknown or were cut.
function said(sample, { response, tokens: [begin, end] }) {
  const text = make("div", "text");
  if (!(sample.tokens?.length > begin)) { text.textContent = response || "(empty)"; return text; }
  sample.tokens.slice(begin, end).forEach((piece, place) => {
    const i = begin + place;
    const visible = piece.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (sign) => String.fromCodePoint(0x2400 + Math.min(0x21, sign.codePointAt(0))));
    const span = make("span", piece === "" || /^<[^<>\s]+>$/.test(piece) ? "t sign" : "t", piece === "" ? "·" : visible.replace(/\n/g, "↵\n"));
    span.classList.toggle("untrained", untrained(sample, i));
    span.style.background = COLORS[mode](sample, i);
    span.onpointermove = (event) => tell(event, measured(sample, i));
    text.append(span);
  });
  if (end > sample.tokens.length && sample.cut) text.append(make("small", "", ` … cut here: ${sample.cut} more tokens`));
  text.onpointerleave = hide;
  return text;
}

const promptOf = (sample) => sample.turns?.[0].given || sample.prompt;

// A conversation: what was given and said in each turn. A single response is one turn.
function response(sample, prompt) {
  if (!sample.turns) return said(sample, { response: sample.response, tokens: [0, Infinity] });
  const found = make("div");
  sample.turns.forEach((turn, i) => {
    const one = found.appendChild(make("div", "turn")), meta = make("div", "meta", `turn ${i + 1}${turn.rewritten ? ", context rewritten" : ""}`);
    if (turn.given && (i > 0 || turn.given !== prompt)) one.append(make("div", "text prompt", turn.given));
    if (typeof turn.reward === "number") meta.append(rewardOf(turn));
    one.append(meta, said(sample, turn));
  });
  return found;
}

function chips(meta, values) {
  for (const [name, value] of Object.entries(values)) {
    meta.append(make("span", "chip", `${name.replace(/_id$/, "").replaceAll("_", " ")} `));
    meta.lastChild.append(make("b", "", value));
  }
  return meta;
}

const without = (values, names) => Object.fromEntries(Object.entries(values).filter(([name]) => !names.includes(name)));
const failedOf = (sample) => make("span", "reward down", `failed: ${sample.failure}`);
const rewardOf = (sample) => make("span", `reward ${sample.reward > middle ? "up" : sample.reward < middle ? "down" : ""}`, `reward ${fmt(sample.reward)}`);

function card(sample) {
  const found = make("article", "sample"), meta = make("div", "meta"), pair = ["chosen", "rejected"].filter((name) => name in sample);
  found.append(make("div", "text prompt", promptOf(sample)), ...(pair.length ? [] : [response(sample, promptOf(sample))]));
  for (const name of pair) {
    found.append(make("div", `side ${name}`));
    found.lastChild.append(make("small", "", name), make("div", "text", sample[name] || "(empty)"));
  }
  if (sample.reward !== undefined) meta.append(rewardOf(sample));
  if (sample.failure) meta.append(failedOf(sample));
  found.append(chips(meta, sample.chips));
  return found;
}

// What GRPO compares: the prompt once, and what all responses share; then they, the best first.
function groupCard(members) {
  const found = make("article", "sample together"), list = make("div", "responses"), meta = make("div", "meta");
  const prompt = promptOf(members.find((sample) => sample.turns) ?? members[0]);
  const judged = members.filter((sample) => !sample.failure), failed = members.length - judged.length;
  const equal = judged.length > 1 && judged.every((sample) => sample.reward === judged[0].reward && !sample.advantages?.some(Boolean));
  const shared = Object.keys(members[0].chips).filter((name) => name !== "advantage" && members.every((sample) => sample.chips[name] === members[0].chips[name]));
  meta.append(make("span", "", `group ${members[0].group}: ${members.length} responses${failed ? `, ${failed} failed` : ""}${equal ? ", all with the same reward: nothing to learn from" : ""}`));
  chips(meta, Object.fromEntries(shared.map((name) => [name, members[0].chips[name]])));
  for (const sample of [...judged.sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0)), ...members.filter((sample) => sample.failure)]) {
    const own = make("div", "meta"), { advantage, ...rest } = without(sample.chips, shared);
    if (sample.reward !== undefined) own.append(rewardOf(sample));
    if (sample.failure) own.append(failedOf(sample));
    chips(own, advantage === undefined ? rest : { advantage: advantage > 0 ? `+${advantage}` : advantage, ...rest });
    list.append(make("div", "answer"));
    list.lastChild.append(own, response(sample, prompt));
  }
  found.append(make("div", "text prompt", prompt), meta, list);
  return found;
}

function cards(samples) {
  const groups = new Map();
  samples.forEach((sample, i) => {
    const key = sample.group ?? `alone ${i}`;
    groups.set(key, [...(groups.get(key) ?? []), sample]);
  });
  return [...groups.values()].map((members) => (members.length > 1 ? groupCard(members) : card(members[0])));
}

function show(where) {
  place = where;
  id("sample-step").textContent = steps[place];
  id("sample-range").value = place;
  const shown = data.runs.map((run) => cards(run.steps[steps[place]] ?? []));
  if (shown.length > 1) {
    const columns = shown.map((found, i) => {
      const column = make("div");
      column.append(make("h3", "", data.runs[i].name), ...(found.length ? found : [make("p", "empty", "No samples of this step.")]));
      return column;
    });
    id("sample-list").className = "side-by-side";
    id("sample-list").replaceChildren(...columns);
  } else id("sample-list").replaceChildren(...shown[0]);
  for (const button of all(".modes button")) button.setAttribute("aria-pressed", button.dataset.mode === mode);
  const [low, colors, high] = LEGENDS[mode] ?? ["", "transparent, transparent", ""], bar = make("i");
  bar.style.background = `linear-gradient(90deg, ${colors})`;
  id("legend").replaceChildren(low, bar, high);
}

// While `nemorl report --watch` writes the page again and again, it loads itself and stays as it was left.
const kept = JSON.parse((data.refresh && sessionStorage.getItem(location.pathname)) || "{}");
const toggles = all("details, input[type=checkbox]"), property = (element) => (element.localName === "details" ? "open" : "checked");
if (data.refresh) {
  toggles.forEach((element, i) => { element[property(element)] = kept.toggles?.[i] ?? element[property(element)]; });
  mode = kept.mode ?? mode;
  if (steps.includes(kept.step)) place = steps.indexOf(kept.step);
  setTimeout(() => location.reload(), 1000 * data.refresh);
  addEventListener("pagehide", () => {
    const step = place === opening ? null : steps[place]; // the newest stays the newest
    sessionStorage.setItem(location.pathname, JSON.stringify({ toggles: toggles.map((element) => element[property(element)]), mode, step }));
  });
}

if (steps.length) {
  id("sample-range").oninput = (event) => show(Number(event.target.value));
  for (const button of all(".modes button")) button.onclick = () => { mode = button.dataset.mode; show(place); };
  show(place);
}
