"use strict";
// Draws the page's charts from the data in it; a page that is watched asks its server for news.
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const live = read("report-live");
  let charts = read("report-data").charts;
  let plots = [];

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (place) => css(`--c${place % 8}`);

  // Half of a colour on the background; not half transparent: many lines on each other stay pale.
  const pale = (own) => {
    const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [one, other] = [parts(own), parts(css("--bg"))];
    return `rgb(${one.map((value, at) => Math.round((value + other[at]) / 2)).join()})`;
  };

  const HEIGHT = 240;
  const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 10000) {
      const [unit, name] = UNITS.find(([least]) => size >= least);
      return `${+(value / unit).toPrecision(4)}${name}`;
    }
    return size !== 0 && size < 1e-4 ? value.toExponential(1) : String(+value.toPrecision(5));
  };
  const shown = (value) => (value == null ? "" : short(value));

  // Rows of parts that are added up, the last part at the bottom: areas lie on each other.
  const stacked = (curves) => {
    const sums = curves[0].x.map(() => 0);
    const tops = [];
    for (const curve of curves.slice().reverse()) {
      curve.y.forEach((value, at) => { sums[at] += value || 0; });
      tops.unshift(sums.slice());
    }
    return [curves[0].x, ...tops];
  };

  const values = (chart) =>
    chart.kind === "stack" ? stacked(chart.curves) : uPlot.join(chart.curves.map((c) => [c.x, c.y]));

  const several = (chart) => new Set(chart.curves.map((curve) => curve.run)).size > 1;

  // Where no cursor is over a chart its legend has the last values.
  const last = (values) => (values || []).findLast((value) => value != null);
  const legend = (plot, value, series, index) =>
    shown(index == null ? last(plot.data && plot.data[series]) : value);

  const line = (chart, curve, at) => {
    const base = { label: curve.label, value: legend, points: { size: 5, fill: css("--bg") } };
    if (chart.kind === "stack") {
      const own = color(at);
      const steps = uPlot.paths.stepped({ align: 1 });
      const part = (u, value, series, index) => {
        const own = chart.curves[series - 1].y;
        return shown(index == null ? last(own) : own[index]);
      };
      return { ...base, value: part, stroke: own, fill: `${own}cc`, width: 1, paths: steps, points: { show: false } };
    }
    const places = { steps: 0, mean: 0, validation: 1, best: 1, test: 2, part: at };
    const own = color(several(chart) ? curve.run : places[curve.role]);
    const alone = !chart.curves.some((other) => other.role !== "steps");
    if (curve.role === "steps") {
      if (alone) return { ...base, stroke: own, width: 1.5 };
      const few = curve.x.length < 3;  // of a single step there is no line
      return { ...base, stroke: pale(own), width: 1, points: { show: few, size: 5 } };
    }
    const dash = several(chart) && curve.role === "validation" ? [6, 3] : undefined;
    const dots = { test: 8, best: 11 }[curve.role];
    if (dots) return { ...base, stroke: own, width: 0, points: { show: true, size: dots, fill: own } };
    return { ...base, stroke: own, width: 2, dash };
  };

  // Charts of one axis begin and end at the same place, whatever each of them has recorded.
  const whole = (x) => {
    const ends = charts.filter((chart) => chart.x === x).flatMap((chart) => chart.curves.map((c) => c.x[c.x.length - 1]));
    return [0, Math.max(1, ...ends)];
  };

  const options = (chart, width) => {
    const axis = {
      stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 },
      font: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : short(tick))),
    };
    const bands = chart.kind === "stack"
      ? chart.curves.slice(1).map((_, at) => ({ series: [at + 1, at + 2] })) : [];
    const all = (u, low, high) =>  // but for what the reader has marked
      low === u.data[0][0] && high === last(u.data[0]) ? whole(chart.x) : [low, high];
    const range = chart.kind === "stack" ? (_, low, high) => [0, (high || 1) * 1.04] : undefined;
    return {
      width, height: HEIGHT, bands,
      // A curve's nearest value, where it has one near the cursor: runs end at different places.
      cursor: { sync: { key: `by ${chart.x}` }, y: false, hover: { prox: 40, skip: [undefined] } },
      scales: { x: { time: false, range: all }, y: range ? { range } : {} },
      axes: [{ ...axis, space: 70, size: 30, label: chart.x, labelFont: axis.font, labelSize: 18 }, { ...axis, size: 58 }],
      series: [
        { label: chart.x, value: (u, value, series, index) => {
          const at = index == null ? last(u.data && u.data[0]) : value;
          return at == null ? "" : at.toLocaleString("en");
        } },
        ...chart.curves.map((curve, at) => line(chart, curve, at)),
      ],
    };
  };

  const hosts = () => [...document.querySelectorAll("[data-chart]")];

  // By keyboard: arrows move the cursor from value to value, Enter hides and shows a curve.
  const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  const withKeys = (host, plot) => {
    const legend = host.querySelector(".u-legend");
    host.tabIndex = 0;
    host.onkeydown = (event) => {
      if (event.target !== host || !(event.key in STEPS)) return;
      event.preventDefault();
      legend.setAttribute("aria-live", "polite");
      const last = plot.data[0].length - 1;
      const step = STEPS[event.key] * Math.max(1, Math.round(last / 200));
      const from = plot.cursor.idx ?? (step > 0 ? -1 : last + 1);
      const at = Math.min(Math.max(from + step, 0), last);
      plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 0 });
    };
    legend.querySelectorAll(".u-series th").forEach((name, at) => {
      if (at === 0) return;  // the x axis
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.setAttribute("aria-pressed", "true");
      name.addEventListener("click", () => name.setAttribute("aria-pressed", String(plot.series[at].show)));
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    });
  };

  const draw = () => {
    plots.forEach(({ plot, watcher }) => { watcher.disconnect(); plot.destroy(); });
    plots = [];
    for (const host of hosts()) {
      const chart = charts.find((one) => one.id === host.dataset.chart);
      if (!chart) continue;
      const width = () => Math.max(host.clientWidth, 200);
      const plot = new uPlot(options(chart, width()), values(chart), host);
      // After the frame: a size that is set within the observer's own call is reported as an error.
      const watcher = new ResizeObserver(() => requestAnimationFrame(() => {
        if (host.isConnected && Math.abs(width() - plot.width) > 1) plot.setSize({ width: width(), height: HEIGHT });
      }));
      watcher.observe(host);
      withKeys(host, plot);
      plots.push({ id: chart.id, plot, watcher });
    }
    window.reportReady = plots.length === hosts().length;
  };

  // The theme: as the system has it, or one of the two.
  const THEMES = { auto: "automatic", light: "light", dark: "dark" };
  const button = document.getElementById("theme");
  const setTheme = (name) => {
    root.dataset.theme = name;
    button.textContent = `Theme: ${THEMES[name]}`;
    draw();
  };
  let kept = "auto";
  try { kept = localStorage.getItem("samestep-theme") || "auto"; } catch { /* a file may not keep it */ }
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(root.dataset.theme) + 1) % names.length];
    try { localStorage.setItem("samestep-theme", next); } catch { /* same */ }
    setTheme(next);
  });
  setTheme(kept in THEMES ? kept : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // On paper everything is light: the drawings have to be made anew for it.
  let onScreen = root.dataset.theme;
  window.addEventListener("beforeprint", () => { onScreen = root.dataset.theme; root.dataset.theme = "light"; draw(); });
  window.addEventListener("afterprint", () => { root.dataset.theme = onScreen; draw(); });

  if (!live) return;

  // News: charts get new data in place; of the rest only what has changed is replaced.
  const told = document.getElementById("live");
  const say = (text, ended) => {
    told.hidden = false;
    told.classList.toggle("ended", ended);
    if (told.textContent !== text) told.textContent = text;
  };
  const parts = (within) => new Map([...within.querySelectorAll("[data-live]")].map((part) => [part.id, part]));
  const form = (list) => JSON.stringify(list.map((c) => [c.id, c.kind, c.curves.map((curve) => curve.label)]));
  const texts = () => new Map([...parts(document)].map(([id, part]) => [id, part.innerHTML]));
  let before = texts();
  const framed = document.querySelector("iframe") !== null;

  const replace = (now, next) => {
    if (now.contains(document.activeElement) && document.activeElement !== now) return false;
    const open = new Map([...now.querySelectorAll("details")].map((one) => [one.id, one.open]));
    now.replaceChildren(...next.childNodes);
    now.querySelectorAll("details").forEach((one) => { if (open.has(one.id)) one.open = open.get(one.id); });
    return true;
  };

  const replaceTexts = (now, next) => {
    // The drawings stay, and so does what has the focus; their numbers and texts are replaced.
    for (const place of [".gaps", ".values .scroll", ".verdict", ".columns"]) {
      const from = [...next.querySelectorAll(place)];
      [...now.querySelectorAll(place)].forEach((one, at) => {
        if (from[at] && !one.contains(document.activeElement)) one.replaceChildren(...from[at].childNodes);
      });
    }
    const labels = new Map([...next.querySelectorAll("[data-chart]")].map((one) => [one.dataset.chart, one]));
    now.querySelectorAll("[data-chart]").forEach((one) => {
      const from = labels.get(one.dataset.chart);
      if (from) one.setAttribute("aria-label", from.getAttribute("aria-label"));
    });
  };

  const take = (news) => {
    const fresh = new DOMParser().parseFromString(news.body, "text/html");
    const same = form(charts) === form(news.charts);
    charts = news.charts;
    const here = parts(document);
    const there = parts(fresh);
    if ([...there.keys()].join() !== [...here.keys()].join()) {
      document.getElementById("body").replaceChildren(...fresh.body.childNodes);
      before = texts();
      draw();
      return;
    }
    for (const [id, part] of there) {
      const text = part.innerHTML;
      if (before.get(id) === text) continue;
      const keep = part.dataset.live === "charts" && same;
      if (keep) replaceTexts(here.get(id), part);
      if (keep || replace(here.get(id), part)) before.set(id, text);
    }
    if (!same) draw();
    else plots.forEach(({ id, plot }) => plot.setData(values(charts.find((one) => one.id === id))));
  };

  let every = live.every_ms;
  const ask = async () => {
    try {
      const answer = await fetch("/data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error((await answer.text()).trim() || String(answer.status));
      const news = await answer.json();
      take(news);
      say(news.ended ? `Ended: ${news.status}` : `Live: ${news.status}`, news.ended);
      // What a recipe's own page may do stands in the policy, which is read with the page alone.
      if (news.ended && !framed && document.querySelector("iframe")) location.reload();
      window.reportEnded = news.ended;
      every = live.every_ms * (news.ended ? 5 : 1);  // it may be resumed
    } catch (error) {
      const lost = error instanceof TypeError;  // the browser's own, where nobody answers
      say(lost ? "No news: samestep watch has ended, or cannot be reached." : error.message, true);
    }
    setTimeout(ask, every);
  };
  ask();
})();
