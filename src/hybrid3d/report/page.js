"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (name, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  // Values under the pointer, or at the step that the arrow keys move

  const format = (value, unit) => {
    if (value === null) return "not finite";
    if (unit === "bytes") return value.toLocaleString("en-US") + " B";
    if (unit === "fraction") return Number((100 * value).toPrecision(6)) + " %";
    return Number(value.toPrecision(6)) + (unit ? " " + unit : "");
  };

  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  };

  for (const chart of document.querySelectorAll(".chart")) {
    const area = chart.querySelector("svg[role=img]"), shown = chart.querySelector(".hover");
    const from = Number(chart.dataset.from), to = Number(chart.dataset.to);
    const lines = [...area.querySelectorAll(".line")].map((line) => ({
      label: line.dataset.label,
      metric: data.runs[line.dataset.run].metrics[line.dataset.key],
    })).filter((line) => line.metric.steps.length);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    let at = null;
    const show = (step) => {
      const places = lines.map((line) => nearest(line.metric.steps, step));
      const found = lines.map((line, i) => line.metric.steps[places[i]]);
      at = found.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best);
      cursor.setAttribute("d", `M${1000 * (at - from) / (to - from)} 0V1000`);
      area.append(cursor);
      const values = lines.map((line, i) => {
        const where = found[i] === at ? "" : ` (step ${found[i]})`;
        return `${lines.length > 1 ? line.label + " " : ""}${format(line.metric.values[places[i]], chart.dataset.unit)}${where}`;
      });
      shown.textContent = `step ${at}: ${values.join(" · ")}`;
    };
    const hide = () => { cursor.remove(); shown.textContent = ""; };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      show(from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from));
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const steps = lines.reduce((most, line) => line.metric.steps.length > most.length ? line.metric.steps : most, []);
      const place = at === null ? steps.length - 1 : nearest(steps, at) + move;
      show(steps[Math.min(steps.length - 1, Math.max(0, place))]);
    });
  }

  // The seconds of the step that is chosen

  for (const phases of document.querySelectorAll(".phases")) {
    const rows = data.runs[phases.dataset.run].time, choice = phases.querySelector(".step");
    const fill = () => {
      const row = rows[choice.selectedIndex], step = row["time/step"];
      const parts = [...phases.querySelectorAll("tr[data-phase]")];
      let left = step;
      for (const part of parts) {
        const phase = part.dataset.phase;
        if (phase && phase !== "time/step" && phase !== "time/eval") left -= row[phase] || 0;
      }
      for (const part of parts) {
        const value = part.dataset.phase ? row[part.dataset.phase] || 0 : left, bar = part.querySelector(".bar");
        part.querySelector(".seconds").textContent = value.toFixed(3);
        part.querySelector(".share").textContent = (100 * value / step).toFixed(1) + " %";
        if (bar) bar.style.width = Math.min(100, Math.max(0, 100 * value / step)) + "%";
      }
    };
    choice.addEventListener("change", fill);
  }

  // Samples by run, step, reward and text

  const PAGE = 8;
  const list = byId("list"), more = byId("more");
  const field = (id) => byId(id)?.value ?? "";
  const number = (id, otherwise) => field(id) === "" ? otherwise : Number(field(id));
  let found = [], shown = 0;

  const textWithMarks = (text, wanted) => {
    const pre = make("pre"), lower = text.toLowerCase();
    let done = 0;
    // Some characters change their length in lower case: places would not agree
    if (wanted && lower.length === text.length) {
      for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, done)) {
        pre.append(text.slice(done, at), make("mark", text.slice(at, at + wanted.length)));
        done = at + wanted.length;
      }
    }
    pre.append(text.slice(done));
    return pre;
  };

  const showMore = () => {
    const wanted = field("f-text").toLowerCase();
    for (const sample of found.slice(shown, shown + PAGE)) {
      const article = make("article", undefined, "sample");
      const facts = [`step ${sample.step}`, `reward ${sample.reward === null ? "unknown" : Number(sample.reward.toPrecision(6))}`];
      if (data.runs.length > 1) facts.unshift(`${"AB"[sample.run]} · ${data.runs[sample.run].name}`);
      if (sample.answer_tokens !== null) facts.push(`${sample.answer_tokens} tokens`);
      if (sample.weights !== null && sample.weights !== sample.step) facts.push(`weights of step ${sample.weights}`);
      article.append(make("h3", facts.join(" · ")), make("p", "Prompt"), textWithMarks(sample.prompt, wanted));
      article.append(make("p", "Answer"), textWithMarks(sample.answer, wanted));
      list.append(article);
    }
    shown = Math.min(found.length, shown + PAGE);
    more.hidden = shown >= found.length;
    byId("found").textContent = found.length === data.samples.length
      ? `${found.length} samples; ${shown} are listed.`
      : `${found.length} of ${data.samples.length} samples match; ${shown} are listed.`;
  };

  const filter = () => {
    const run = field("f-run"), text = field("f-text").toLowerCase();
    const from = number("f-from", -Infinity), to = number("f-to", Infinity);
    const low = number("f-low", -Infinity), high = number("f-high", Infinity);
    const anyReward = low === -Infinity && high === Infinity;
    found = data.samples.filter((sample) =>
      (run === "" || sample.run === Number(run)) && sample.step >= from && sample.step <= to
      && (anyReward || (sample.reward !== null && sample.reward >= low && sample.reward <= high))
      && (!text || sample.prompt.toLowerCase().includes(text) || sample.answer.toLowerCase().includes(text)));
    found.sort((a, b) => b.step - a.step);
    list.replaceChildren();
    shown = 0;
    showMore();
  };

  if (data.samples.length) {
    byId("filters").hidden = false;
    byId("filters").addEventListener("input", filter);
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", showMore);
    filter();
  }
})();
