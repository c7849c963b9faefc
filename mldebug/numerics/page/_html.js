"use strict";
// The map of the page: only the rows in sight are drawn, so that ten thousand scroll as ten do.
const ABSENT = 0, NAN = 1, INF = 2, ZERO = 3, FIRST = 4, ROW = 16, EDGE = 3; // pixels
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("map-data").textContent);
const look = JSON.parse($("map-look").textContent);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function main() {
  const [cells, names, dtypes] = await Promise.all([data.cells, data.names, data.dtypes].map(unpack));
  const columns = data.batches.length;
  const name = new TextDecoder().decode(names).split("\n");
  const short = name.map((text) => text.replace(/ output(?=\[|$)/, ""));
  const lower = name.map((text) => text.toLowerCase());
  const limit = Array.from(dtypes, (kind) => data.kinds[kind][1]);
  const log = (code) => data.low + (code - FIRST) * data.unit;
  let order = [], mode = "absmax", top = 0, cursor = null, pinned = false;

  // Of each tensor: how near it came to the limit. inf stands before all numbers; NaN, often damage only, counts as none.
  const near = Float64Array.from({length: data.rows}, (_, row) => {
    let worst = -1e9;
    for (let column = 0; column < columns; column++) {
      const code = cells[row * columns + column];
      const now = code === INF ? 1e9 : code < FIRST ? -1e8 : log(code) - (limit[row] ?? 1e4);
      worst = Math.max(worst, now);
    }
    return worst;
  });

  const part = (row, code) => mode === "absmax"
    ? (log(code) - look.least) / (look.most - look.least)
    : 1 - (limit[row] - log(code)) / look.far;
  const shades = Array.from({length: 256}, (_, i) => {
    const place = i / 255 * (look.scale.length - 1), k = Math.min(Math.floor(place), look.scale.length - 2);
    const rgb = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    const [a, b] = [rgb(look.scale[k]), rgb(look.scale[k + 1])];
    return `rgb(${a.map((value, j) => Math.round(value + (b[j] - value) * (place - k))).join(",")})`;
  });
  const color = (row, code) => {
    if (code === NAN) return look.nan;
    if (code === INF) return look.inf;
    if (mode === "headroom" && limit[row] === null) return null;
    if (code === ZERO) return shades[0];
    return shades[Math.round(255 * Math.min(Math.max(part(row, code), 0), 1))];
  };

  const scroll = $("scroll"), pane = $("pane"), space = $("space"), canvas = $("cells"), axis = $("axis"), rows = $("rows");
  let left = 0, width = 0, height = 0, cell = 1, seen = 0;

  function lay() {
    const all = scroll.clientWidth;
    const longest = short.reduce((most, text) => Math.max(most, text.length), 0);
    left = Math.round(Math.min(longest * 7.9 + 18, all * 0.42));
    cell = Math.min((all - left - 2 * EDGE) / columns, 40);
    width = cell * columns;
    height = Math.min(order.length * ROW, Math.floor(innerHeight * 0.7), 900);
    seen = Math.ceil(height / ROW) + 1;
    space.style.height = `${order.length * ROW}px`;
    pane.style.height = `${height}px`;
    scroll.style.height = `${height + 2}px`;
    rows.style.width = `${left}px`;
    canvas.style.left = `${left}px`;
    size(canvas, width + 2 * EDGE, height);
    size(axis, all, 22);
    draw();
  }

  function size(target, wide, high) {
    const ratio = devicePixelRatio || 1;
    target.width = Math.max(1, Math.round(wide * ratio));
    target.height = Math.max(1, Math.round(high * ratio));
    target.style.width = `${wide}px`;
    target.style.height = `${high}px`;
    target.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  function draw() {
    const pen = canvas.getContext("2d"), gap = cell >= 6 ? 1 : 0;
    top = scroll.scrollTop;
    const first = Math.floor(top / ROW), shift = top - first * ROW;
    pen.clearRect(0, 0, width + 2 * EDGE, height);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let i = 0; i < seen && first + i < order.length; i++) {
      const row = order[first + i], y = i * ROW - shift;
      for (let column = 0; column < columns; column++) {
        const code = cells[row * columns + column], x = EDGE + column * cell, fill = code === ABSENT ? null : color(row, code);
        if (fill === null) {
          pen.fillStyle = "#8888";
          pen.fillRect(x + cell / 2 - 1, y + ROW / 2 - 1, 2, 2);
          continue;
        }
        pen.fillStyle = fill;
        pen.fillRect(x, y, cell - gap, ROW - 1);
        if (cell >= 9 && (code === NAN || code === INF)) {
          pen.fillStyle = code === NAN ? "#000" : "#fff";
          pen.font = "bold 11px system-ui,sans-serif";
          pen.fillText(code === NAN ? "\u00d7" : "\u221e", x + (cell - gap) / 2, y + ROW / 2);
        }
      }
      if (data.event !== null && row === data.event[0]) frame(pen, EDGE + data.event[1] * cell, y, Math.max(cell - gap, 3), "#000", "#fff");
      if (cursor !== null && row === cursor[0]) frame(pen, EDGE + cursor[1] * cell, y, Math.max(cell - gap, 3), "#fff", "#000");
    }
    label(first, shift);
    ticks();
    now();
  }

  function frame(pen, x, y, wide, outer, inner) {
    pen.lineWidth = 2;
    pen.strokeStyle = inner;
    pen.strokeRect(x - 2, y - 2, wide + 4, ROW + 3);
    pen.strokeStyle = outer;
    pen.strokeRect(x, y, wide, ROW - 1);
  }

  function label(first, shift) {
    rows.style.top = `${-shift}px`;
    const letters = Math.floor((left - 16) / 7.9), count = Math.max(0, Math.min(seen, order.length - first));
    while (rows.children.length < count) rows.append(document.createElement("span"));
    while (rows.children.length > count) rows.lastChild.remove();
    for (let i = 0; i < count; i++) {
      const row = order[first + i], text = short[row], span = rows.children[i];
      span.textContent = text.length > letters ? `\u2026${text.slice(1 - letters)}` : text;
      span.title = name[row];
      span.dataset.row = row;
      span.className = `${data.event !== null && row === data.event[0] ? "event" : ""} ${cursor !== null && cursor[0] === row ? "at" : ""}`;
    }
  }

  function ticks() {
    const pen = axis.getContext("2d"), every = Math.max(1, Math.ceil(44 / cell));
    pen.clearRect(0, 0, axis.width, axis.height);
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.font = "12px system-ui,sans-serif";
    pen.textAlign = "right";
    pen.fillText(data.steps.some((step) => step !== null) ? "step" : "batch", left - 8, 15);
    pen.textAlign = "center";
    for (let column = (columns - 1) % every; column < columns; column += every) {
      const text = String(data.steps[column] ?? data.batches[column]), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(left + EDGE + (column + 0.5) * cell, scroll.clientWidth - half - 2), 15);
    }
  }

  function now() {
    const plain = order.length === data.rows && $("order").value === "run";
    for (const box of document.querySelectorAll(".now")) {
      box.hidden = !plain || height >= order.length * ROW;
      box.style.top = `${100 * top / (order.length * ROW)}%`;
      box.style.height = `${100 * height / (order.length * ROW)}%`;
    }
  }

  function tell() {
    if (cursor === null) {
      $("readout").textContent = "Point at a cell, or use the arrow keys, to read it.";
      return;
    }
    const [row, column] = cursor, code = cells[row * columns + column], step = data.steps[column];
    const when = `${step === null ? "" : `step ${step}, `}batch ${data.batches[column]}`;
    let what = "did not run";
    if (code === NAN) what = "nan";
    if (code === INF) what = "inf";
    if (code === ZERO) what = "abs max 0";
    if (code >= FIRST) {
      const known = limit[row] !== null;
      what = `abs max ${(2 ** log(code)).toPrecision(2)}`;
      if (known) what += `, headroom ${Math.max(limit[row] - log(code), 0).toFixed(1)} powers of two`;
    }
    const kind = data.kinds[dtypes[row]][0];
    $("readout").textContent = `${name[row]}${kind ? ` (${kind})` : ""}\n${when}: ${what}`;
  }

  function choose() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    order = [];
    for (let row = 0; row < data.rows; row++) if (words.every((word) => lower[row].includes(word))) order.push(row);
    if ($("order").value === "near") order.sort((a, b) => near[b] - near[a] || a - b);
    $("count").textContent = `${order.length} of ${data.rows} tensors`;
    scroll.scrollTop = 0;
    lay();
  }

  function show(row, column) {
    const place = order.indexOf(row);
    if (place < 0) return;
    cursor = [row, column];
    if (place * ROW < scroll.scrollTop || (place + 1) * ROW > scroll.scrollTop + height) scroll.scrollTop = place * ROW - height / 2;
    tell();
    draw();
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const place = Math.floor((event.clientY - box.top + top) / ROW), column = Math.floor((event.clientX - box.left - EDGE) / cell);
    if (place < 0 || place >= order.length || column < 0 || column >= columns) return;
    cursor = [order[place], column];
    tell();
    draw();
  }

  canvas.addEventListener("mousemove", (event) => { if (!pinned) point(event); });
  canvas.addEventListener("click", (event) => { pinned = !pinned; point(event); });
  scroll.addEventListener("scroll", () => requestAnimationFrame(draw));
  scroll.addEventListener("keydown", (event) => {
    const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (move === undefined || order.length === 0) return;
    event.preventDefault();
    const place = cursor === null ? -1 : order.indexOf(cursor[0]);
    if (place < 0) return show(order[Math.floor(top / ROW)], columns - 1);
    const to = Math.min(Math.max(place + move[0], 0), order.length - 1);
    show(order[to], Math.min(Math.max(cursor[1] + move[1], 0), columns - 1));
  });
  for (const id of ["filter", "order"]) $(id).addEventListener("input", choose);
  for (const input of document.querySelectorAll("[name=mode]")) input.addEventListener("input", () => { mode = input.value; turn(); });
  for (const image of document.querySelectorAll(".picture img")) {
    image.addEventListener("click", (event) => {
      const box = image.getBoundingClientRect();
      $("filter").value = "";
      $("order").value = "run";
      choose();
      show(Math.min(Math.floor((event.clientY - box.top) / box.height * data.rows), data.rows - 1),
           Math.min(Math.floor((event.clientX - box.left) / box.width * columns), columns - 1));
    });
  }
  function turn() {
    for (const figure of document.querySelectorAll("figure")) figure.hidden = figure.dataset.mode !== mode;
    draw();
  }

  document.body.classList.add("scripted");
  $("map").hidden = false;
  choose();
  turn();
  tell();
  if (data.event !== null) {
    $("jump").hidden = false;
    $("jump").addEventListener("click", () => { $("filter").value = ""; choose(); show(...data.event); });
    show(...data.event);
  }
  addEventListener("resize", lay);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.body.dataset.ready = "yes";
}

main().catch((error) => { document.body.dataset.ready = `no: ${error}`; });
