// Draws excerpts with the experts of each token. All text goes in as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("view-data").textContent);
  const at = (name) => document.getElementById(`view-${name}`);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = (text) => (data.wide === 1 ? bytes(text) : new Uint16Array(bytes(text).buffer));
  const count = data.position.length, shown = data.shown, layers = data.layers.length;
  const expert = numbers(data.expert), before = data.before ? numbers(data.before) : null;
  const parts = {};
  for (const name of ["weight", "scores"]) if (data[name]) parts[name] = bytes(data[name].parts);
  const names = JSON.parse(at("layer").dataset.names);
  let layer = Math.min(+at("layer").value, layers - 1), focus = null, current = null;
  let spans = [];
  const starts = [];
  data.excerpts.reduce((begin, excerpt) => (starts.push(begin), begin + excerpt.tokens), 0);

  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const word = (token) => (data.words ? data.words[data.token[token]] : String(data.position[token]));
  const chosen = (array, token, of = layer) => {
    const begin = (of * count + token) * shown;
    return Array.from(array.subarray(begin, begin + shown)).map((one) => one - 1).filter((one) => one >= 0);
  };
  const value = (name, token, place) => {
    const [low, high] = data[name].ends[layer];
    return low + ((high - low) * parts[name][(layer * count + token) * shown + place]) / 255;
  };
  const moved = (token) => {
    if (!before) return false;
    const now = new Set(chosen(expert, token)), old = chosen(before, token);
    return old.length !== now.size || old.some((one) => !now.has(one));
  };

  // The experts that serve most of the sample in this layer have hues that are far apart.
  const ranks = () => {
    const uses = new Map();
    for (let token = 0; token < count; token++) {
      const first = chosen(expert, token)[0];
      if (first !== undefined) uses.set(first, (uses.get(first) || 0) + 1);
    }
    return [...uses].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  };
  const colour = (element, rank) => {
    element.style.setProperty("--hue", ((rank * 137.508) % 360).toFixed(1));
    element.style.setProperty("--ring", Math.floor(rank / 9) % 3);
  };

  const choose = (one) => { focus = focus === one ? null : one; paint(); };
  const paint = () => {
    const ordered = ranks(), rank = new Map(ordered.map(([one], i) => [one, i]));
    at("name").textContent = names[layer];
    const only = at("changed") && at("changed").checked;
    for (const span of spans) {
      const token = +span.dataset.token, has = chosen(expert, token), first = has[0];
      span.className = "t";
      if (first === undefined) span.classList.add("none");
      else colour(span, rank.get(first));
      if (focus !== null) span.classList.add(first === focus ? "first" : has.includes(focus) ? "second" : "off");
      if (moved(token)) span.classList.add("moved");
      else if (only) span.classList.add("off");
      if (token === current) span.classList.add("at");
      span.lastChild.textContent = first === undefined ? "–" : first;
    }
    at("experts").replaceChildren(...ordered.map(([one, uses], i) => {
      const button = make("button", undefined, "e");
      const swatch = make("span", undefined, "swatch");
      colour(swatch, i);
      button.append(swatch, `${one} `, make("small", `${((100 * uses) / count).toFixed(uses * 20 < count ? 1 : 0)} %`));
      button.title = `expert ${one}: first for ${uses} of ${count} tokens of all excerpts`;
      button.setAttribute("aria-pressed", focus === one);
      button.onclick = () => choose(one);
      return button;
    }));
    at("focus").replaceChildren(...tops());
    if (current !== null) tell(current);
  };

  // The most frequent words of the expert in focus.
  const tops = () => {
    if (focus === null) return [];
    const uses = new Map();
    for (let token = 0; token < count; token++) {
      if (!chosen(expert, token).includes(focus)) continue;
      uses.set(word(token), (uses.get(word(token)) || 0) + 1);
    }
    const most = [...uses].sort((a, b) => b[1] - a[1]).slice(0, 14);
    const line = [`Expert ${focus} of layer ${names[layer]}, its most frequent tokens here: `];
    for (const [text, times] of most) line.push(make("bdi", text.trim()), ` ${times}×  `);
    return line;
  };

  const tell = (token) => {
    const head = make("b"), lines = [head];
    head.append(make("bdi", word(token)));
    let about = data.ids && data.textual ? `  id ${data.ids[data.token[token]]},` : "";
    about += ` position ${data.position[token]}`;
    for (const [name, label] of Object.entries(data.labels)) about += `, ${name} ${label.names[label.code[token]]}`;
    lines.push(make("span", about, "soft"), make("br"));
    const each = chosen(expert, token).map((one, place) => {
      let text = `expert ${one}`;
      if (parts.weight) text += `: weight ${value("weight", token, place).toPrecision(2)}`;
      if (parts.scores) text += `${parts.weight ? "," : ":"} score ${value("scores", token, place).toPrecision(2)}`;
      return text;
    });
    lines.push(`Layer ${names[layer]}: ${each.join("; ") || "no expert"}${data.left_out ? `, and up to ${data.left_out} more` : ""}.`);
    if (before) lines.push(` At ${data.before_name}: ${chosen(before, token).join(", ") || "none"}.`);
    const every = names.map((name, of) => {
      const first = chosen(expert, token, of)[0];
      return `${name}→${first === undefined ? "–" : first}`;
    });
    lines.push(make("br"), make("span", `First expert by layer: ${every.join("  ")}`, "soft"));
    at("tip").replaceChildren(...lines);
  };
  const point = (token) => {
    current = token;
    for (const span of spans) span.classList.toggle("at", +span.dataset.token === token);
    tell(token);
  };

  const wanted = () => {
    const [kind, name, code] = JSON.parse(at("which").value);
    return data.excerpts.map((_, i) => i).filter((i) => {
      if (kind === "all") return true;
      if (kind === "changed") return data.excerpts[i].changed;
      return data.labels[name].code.slice(starts[i], starts[i] + data.excerpts[i].tokens).includes(code);
    });
  };
  const draw = () => {
    spans = [];
    at("texts").replaceChildren(...wanted().map((i) => {
      const excerpt = data.excerpts[i], box = make("div", undefined, "excerpt"), line = make("div");
      let about = `sequence ${excerpt.sequence}, from position ${data.position[starts[i]]}`;
      for (const [name, label] of Object.entries(data.labels)) {
        const codes = new Set(label.code.slice(starts[i], starts[i] + excerpt.tokens));
        if (codes.size === 1) about += `, ${name} ${label.names[[...codes][0]]}`;
      }
      if (excerpt.changed) about += ", changed most";
      let rtl = 0;
      for (let token = starts[i]; token < starts[i] + excerpt.tokens; token++) {
        const span = make("span", word(token), "t");
        rtl += /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/.test(span.textContent) ? 1 : /[a-z]/i.test(span.textContent) ? -1 : 0;
        span.dataset.token = token;
        span.append(make("i"));
        spans.push(span);
        line.append(span);
        if (span.firstChild.textContent.endsWith("↵")) line.append(make("br"));
      }
      line.dir = rtl > 0 ? "rtl" : "ltr";
      box.append(make("small", about, "soft"), line);
      return box;
    }));
    paint();
  };

  const option = (text, ...kind) => {
    const one = make("option", text);
    one.value = JSON.stringify(kind);
    at("which").append(one);
  };
  option("all excerpts", "all");
  if (before) option(`changed most since ${data.before_name}`, "changed");
  for (const [name, label] of Object.entries(data.labels)) {
    const present = new Set(label.code);
    label.names.forEach((text, code) => present.has(code) && option(`${name}: ${text}`, "label", name, code));
  }
  at("layer").max = layers - 1;
  at("layer").value = layer;
  at("layer").oninput = () => { layer = +at("layer").value; focus = null; paint(); };
  at("which").onchange = draw;
  at("numbers").onchange = () => at("texts").classList.toggle("plain-numbers", !at("numbers").checked);
  if (at("changed")) at("changed").onchange = paint;
  const token = (event) => event.target.closest(".t");
  at("texts").onmouseover = (event) => token(event) && point(+token(event).dataset.token);
  at("texts").onclick = (event) => {
    if (!token(event)) return;
    point(+token(event).dataset.token);
    const first = chosen(expert, current)[0];
    if (first !== undefined) choose(first);
  };
  at("texts").onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !spans.length) return;
    event.preventDefault();
    const here = spans.findIndex((span) => +span.dataset.token === current);
    const next = spans[Math.max(0, Math.min(spans.length - 1, here + step))];
    point(+next.dataset.token);
    next.scrollIntoView({ block: "nearest" });
  };
  document.getElementById("view").hidden = false;
  draw();
})();
