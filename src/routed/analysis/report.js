// What the page does: figures that answer a pointer, a slider over training, tables that are sorted and filtered, copied commands.
// Everything here also has its words without this script: pictures as printed, whole tables.
(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const read = (node) => JSON.parse(node.textContent);

  // Colours of arms are chosen for white paper: on a dark ground the dark ones are made lighter.
  const tone = (colour) => {
    if (!dark.matches || !/^#[0-9a-f]{6}$/i.test(colour)) return colour;
    const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
    const share = light < 0.45 ? 0.62 - light : 0;
    return "#" + parts.map((p) => Math.round(p + (255 - p) * share).toString(16).padStart(2, "0")).join("");
  };
  const toned = (value) => {
    if (Array.isArray(value)) return value.map(toned);
    if (value && typeof value === "object") {
      const fixed = (key) => key === "datasets" || (key === "scale" && value.type === "quantitative"); // colours of values
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, fixed(key) ? part : toned(part)]));
    }
    return typeof value === "string" ? tone(value) : value;
  };
  const themes = read(document.getElementById("themes"));
  const config = () => ({ ...themes[+dark.matches], font: "system-ui, sans-serif", mark: { tooltip: true } });
  const show = (node, spec, renderer = "svg") => window.vegaEmbed(node, { ...toned(spec), config: { ...spec.config, ...config() } }, { actions: false, renderer, tooltip: { theme: dark.matches ? "dark" : "light" } });

  // A figure: panels, each a spec; a legend of checkboxes; single seeds.
  const figure = async (node) => {
    const views = [];
    for (const panel of all(".chart", node)) {
      const result = await show(panel, read(panel.nextElementSibling));
      panel.dataset.drawn = "yes";
      views.push(result.view);
    }
    const set = (name, value) => Promise.all(views.map((view) => view.signal(name, value).runAsync()));
    const update = async () => {
      await set("off", all(".arm", node).filter((box) => !box.checked).map((box) => box.value));
      const seeds = node.querySelector(".seeds");
      if (seeds) await set("seeds", seeds.checked);
      node.dataset.shown = all(".arm:checked", node).length;
    };
    for (const box of all(".arm, .seeds", node)) box.onchange = update;
    for (const button of all(".everything", node)) {
      button.onclick = () => { const on = all(".arm:checked", node).length === 0; for (const box of all(".arm", node)) box.checked = on; update(); };
    }
    for (const swatch of all(".swatch", node)) swatch.style.setProperty("--c", tone(swatch.dataset.colour));
    await update();
    node.dataset.ready = "yes";
  };

  // Routing maps over training: one router at a time, its map at the slider's evaluation, its load, and what changes over training.
  const decode = (text, shape) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const words = new Uint16Array(bytes.buffer), [, rows, experts] = shape;
    return (moment, row, expert) => words[(moment * rows + row) * experts + expert] / 65535;
  };
  const maps = async (node) => {
    const data = read(node.querySelector("script")), slider = node.querySelector(".step"), pick = node.querySelector(".router");
    const [map, load, course, through] = all(".chart", node);
    let views = null, entry = null, value = null;
    const q = (field, domain, title, more = {}) => ({ field, type: "quantitative", scale: { domain, nice: false, ...(more.scale || {}) }, axis: { title, grid: false, tickMinStep: 1, ...(more.axis || {}) } });
    const cells = (moment) => {
      const found = [];
      entry.order[0].forEach((row, i) => entry.order[1].forEach((expert, j) => found.push({
        x: j, x2: j + 1.04, y: i, y2: i + 1.04, p: Math.max(value(moment, row, expert), 1e-5), row: entry.rows[row], expert: entry.experts[expert],
        t: value(moment, row, expert).toPrecision(2),
      })));
      return found;
    };
    const loads = (moment) => entry.order[1].map((expert, j) => ({
      x: j + 0.1, x2: j + 0.9, mid: j + 0.5, y: entry.load[moment][expert], expert: entry.experts[expert], t: entry.load[moment][expert].toPrecision(3), dead: entry.exact && entry.load[moment][expert] < 0.01,
    }));
    const history = () => entry.load.flatMap((loads, i) => entry.order[1].map((expert, j) => ({
      x: j, x2: j + 1.04, y: i, y2: i + 1.04, v: Math.max(loads[expert], 1e-3), t: loads[expert].toPrecision(3), step: entry.steps[i], expert: entry.experts[expert],
    })));
    const draw = async () => {
      entry = data.entries[+pick.value];
      value = decode(entry.values, entry.shape);
      const [moments, rows, experts] = entry.shape;
      slider.max = moments - 1;
      slider.value = Math.min(+slider.value, moments - 1);
      const steps = [entry.steps[0], Math.max(entry.steps[moments - 1], entry.steps[0] + 1)];
      const most = Math.max(1.2, ...entry.load.flat());
      const few = rows <= 24, names = Object.fromEntries(entry.order[0].map((row, i) => [i + 0.5, String(entry.rows[row])]));
      const ticks = [...new Set([0, Math.floor((moments - 1) / 3), Math.floor((2 * (moments - 1)) / 3), moments - 1])];
      const now = [{ step: entry.steps[+slider.value] }];
      const shared = { width: "container", autosize: { type: "fit", contains: "padding" }, padding: { left: 2, right: 6, top: 4, bottom: 2 } };
      const tip = (...pairs) => pairs.map(([field, title]) => ({ field, title }));
      const yAxis = few ? { values: Object.keys(names).map(Number), labelExpr: `(${JSON.stringify(names)})[datum.value]`, labelLimit: 120 } : {};
      views = await Promise.all([
        show(map, { ...shared, height: Math.max(300, Math.min(420, 22 * rows)), data: { name: "table", values: cells(+slider.value) }, mark: { type: "rect", clip: true }, encoding: {
          x: q("x", [0, experts], "expert, by best match"), x2: { field: "x2" }, y: q("y", [0, rows], data.row, { scale: { reverse: true }, axis: yAxis }), y2: { field: "y2" },
          color: { field: "p", type: "quantitative", scale: { type: "log", domain: [0.1 / experts, 1], scheme: "cividis", clamp: true }, legend: { orient: "bottom", direction: "horizontal", title: "mean routing probability", format: ".2~g", gradientLength: 180, tickCount: 4 } },
          tooltip: tip(["row", data.row], ["expert", "expert"], ["t", "probability"]) } }, "canvas"),
        show(load, { ...shared, height: 150, data: { name: "table", values: loads(+slider.value) }, layer: [
          { mark: { type: "rect", color: "#0072B2" }, encoding: { x: q("x", [0, experts], "expert"), x2: { field: "x2" }, y: q("y", [0, most], "load x E", { axis: { tickMinStep: 0 } }), y2: { datum: 0 }, tooltip: tip(["expert", "expert"], ["t", "load x E"], ["dead", "dead"]) } },
          { data: { values: [{ y: 1 }] }, mark: { type: "rule", strokeDash: [3, 3] }, encoding: { y: q("y", [0, most], "load x E", { axis: { tickMinStep: 0 } }) } },
          { transform: [{ filter: "datum.dead" }], mark: { type: "point", shape: "M-.7-.7L.7.7M.7-.7L-.7.7", color: "#D55E00", size: 40, strokeWidth: 1.6 }, encoding: { x: q("mid", [0, experts], "expert"), y: { datum: most / 25, type: "quantitative" }, tooltip: tip(["expert", "expert"], ["t", "load x E"]) } },
        ] }),
        show(course, { ...shared, height: 150, data: { values: entry.course }, layer: [
          { mark: { type: "line", point: { size: 30 } }, encoding: { x: q("step", steps, "optimiser steps", { axis: { tickCount: 5 } }), y: q("v", [0, 1], "share", { axis: { tickMinStep: 0 } }), color: { field: "name", type: "nominal", scale: { domain: ["churn", "dead experts"], range: ["#009E73", "#D55E00"] }, legend: { orient: "bottom", title: null } }, tooltip: tip(["name", "shows"], ["step", "step"], ["t", "share"]) } },
          { data: { name: "now", values: now }, mark: { type: "rule", strokeWidth: 1.5 }, encoding: { x: { field: "step", type: "quantitative" } } },
        ] }),
        show(through, { ...shared, height: 190, data: { values: history() }, mark: { type: "rect", clip: true }, encoding: {
          x: q("x", [0, experts], "expert, by best match"), x2: { field: "x2" }, y: q("y", [0, moments], "step", { axis: { values: ticks.map((i) => i + 0.5), labelExpr: `(${JSON.stringify(Object.fromEntries(ticks.map((i) => [i + 0.5, entry.steps[i].toLocaleString("en")])))})[datum.value]` } }), y2: { field: "y2" },
          color: { field: "v", type: "quantitative", scale: { type: "log", domain: [0.1, Math.max(2, most)], scheme: "purples", clamp: true }, legend: { orient: "bottom", direction: "horizontal", title: "load x E", format: ".2~g", gradientLength: 180, tickCount: 4 } },
          tooltip: tip(["step", "step"], ["expert", "expert"], ["t", "load x E"]) } }, "canvas"),
      ]);
      tell();
    };
    const tell = () => {
      const moment = +slider.value, experts = entry.shape[2], dead = entry.load[moment].filter((share) => share < 0.01).length;
      const words = `step ${entry.steps[moment]}: ${entry.exact ? `${dead} of ${experts} experts dead, ` : ""}largest load ${Math.max(...entry.load[moment]).toPrecision(3)} times a fair one`;
      node.querySelector("output").textContent = words;
      slider.setAttribute("aria-valuetext", words);
    };
    const move = async () => {
      const moment = +slider.value, [one, two, three] = views.map((result) => result.view);
      const change = (view, name, rows) => view.data(name, rows).runAsync();
      await Promise.all([change(one, "table", cells(moment)), change(two, "table", loads(moment)), change(three, "now", [{ step: entry.steps[moment] }])]);
      tell();
    };
    slider.oninput = move;
    pick.onchange = draw;
    await draw();
    node.dataset.ready = "yes";
  };

  // What a pointer would be told, for those who have none: every point of a figure's panels as a table, made when it is opened.
  for (const details of all("details.values")) {
    const panels = all(".panel", details.parentElement);
    details.hidden = !window.vegaEmbed;
    details.ontoggle = () => {
      const place = details.querySelector("div");
      if (place.firstChild) return;
      const table = document.createElement("table"), row = (cells, tag) => { const line = table.insertRow(); for (const text of cells) { const cell = document.createElement(tag); cell.textContent = text; line.append(cell); } };
      row(["panel", "shows", "at", "mean [95 %]", "n"], "th");
      const told = ["means", "bars", "outlines", "cells"];
      for (const panel of panels) {
        const title = panel.querySelector("h4"), heading = title.firstElementChild?.firstChild || title.firstChild;
        const data = read(panel.querySelector("script")).datasets || {};
        for (const name of told) for (const point of data[`${name}0`] || []) row([heading?.textContent.trim(), point.series, point.at, point.text, point.n], "td");
      }
      place.append(table);
    };
  }

  // Figures are drawn when they come near, and again when the colours of the system change.
  const draw = (node) => (node.classList.contains("maps") ? maps(node) : figure(node));
  const live = all(".live");
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "600px" });
  if (window.vegaEmbed) {
    document.body.classList.add("alive");
    for (const node of live) { node.hidden = false; near.observe(node); }
    for (const still of all(".live ~ details.still")) still.open = false;
    dark.addEventListener("change", () => { for (const node of live) if (node.dataset.ready) draw(node); });
  }
  for (const swatch of all(".swatch")) swatch.style.setProperty("--c", tone(swatch.dataset.colour));

  // A menu shows the arms and the decomposed gap at another point; all menus of an experiment go together.
  const points = all(".at-point");
  for (const label of all(".pick")) {
    const pick = label.querySelector("select"), own = label.closest(".at-point").dataset.point;
    label.hidden = false;
    pick.value = own;
    pick.onchange = () => {
      const chosen = pick.value, part = own.split("-")[0];
      for (const node of points) if (node.dataset.point.split("-")[0] === part) node.hidden = node.dataset.point !== chosen;
      pick.value = own;
      label.closest(".at-point").parentElement.querySelector(`.at-point[data-point="${chosen}"] select`)?.focus();
    };
  }

  for (const button of all("button.copy")) {
    button.hidden = false;
    button.onclick = async () => {
      const text = button.dataset.command;
      try { await navigator.clipboard.writeText(text); } catch { // a page from a disk may not have a clipboard
        const field = Object.assign(document.createElement("textarea"), { value: text });
        document.body.append(field); field.select(); document.execCommand("copy"); field.remove(); button.focus();
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy command"; }, 1500);
    };
  }

  // Claims: sorted by a column, filtered by verdict, source and text.
  for (const table of all("table.sorted")) {
    const body = table.tBodies[0];
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "↕";
      button.setAttribute("aria-label", `sort by ${head.textContent.trim().split("\n")[0]}`);
      button.className = "sort";
      head.append(" ", button);
      button.onclick = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const groups = all("tr.claim", body).map((row) => [row, ...(row.nextElementSibling?.classList.contains("below") ? [row.nextElementSibling] : [])]);
        const key = (rows) => rows[0].cells[column].textContent.trim();
        groups.sort((a, b) => (up ? 1 : -1) * key(a).localeCompare(key(b), "en", { numeric: true }));
        body.append(...groups.flat());
      };
    });
  }
  for (const section of all(".filtered")) {
    const bar = section.querySelector(".filters"), verdict = bar.querySelector(".by-verdict"), source = bar.querySelector(".by-source"), text = bar.querySelector(".by-text");
    bar.hidden = false;
    const filter = () => {
      const rows = all("tr.claim", section), wanted = text.value.trim().toLowerCase();
      let count = 0;
      for (const row of rows) {
        const on = (!verdict.value || row.dataset.verdict === verdict.value) && (!source.value || row.dataset.source === source.value) && row.textContent.toLowerCase().includes(wanted);
        row.hidden = !on;
        if (row.nextElementSibling?.classList.contains("below")) row.nextElementSibling.hidden = !on;
        count += on;
      }
      for (const group of all("details.source", section)) { const some = all("tr.claim:not([hidden])", group).length; group.hidden = !some; if (verdict.value || source.value || wanted) group.open = some > 0; }
      bar.querySelector(".count").textContent = `${count} of ${rows.length} claims`;
    };
    verdict.onchange = source.onchange = text.oninput = filter;
    filter();
  }
  // A link to a claim's experiment opens what is folded.
  const open = () => { for (let node = document.getElementById(decodeURIComponent(location.hash.slice(1))); node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true; };
  window.addEventListener("hashchange", open);
  if (location.hash) open();
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && document.activeElement?.classList.contains("term")) document.activeElement.blur(); });
})();
