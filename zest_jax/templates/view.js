"use strict";
// Texts of rollouts reach the page through textContent alone: whatever they hold is never markup.
const $ = (id) => document.getElementById(id);
const HEIGHT = 56;
const NAMES = { role: ["solver", "proposer"] };
const MARKS = ["✓", "✗", "∅", "■", "✓", "✗"];
let index, columns, shown = [], chosen = -1, searching = 0;
const kept = new Map();

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

async function unpack(id) {
  const letters = atob($(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function part(kind, item) {
  const id = `${kind}-${Math.floor(item / index[kind])}`;
  if (!kept.has(id)) {
    if (kept.size > 200) kept.delete(kept.keys().next().value);
    kept.set(id, unpack(id));
  }
  return kept.get(id).then((items) => items[item % index[kind]]);
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number.isInteger(value) ? String(value) : value.toFixed(digits);
const question = (i) => index.questions[columns.question[i]] || "(no question)";
const outcome = (i) => (columns.outcome[i] === null ? "unknown" : index.outcomes[columns.outcome[i]]);
const good = (i) => (columns.outcome[i] === null ? "" : columns.outcome[i] % 4 === 0 ? "good" : "bad");

// ---------------------------------------------------------------- the list

function options(id, all, values, name) {
  const select = $(id);
  for (const [value, text] of [["", all], ...values.map((value) => [String(value), name(value)])]) {
    const option = make("option", "", text);
    option.value = value;
    select.append(option);
  }
  if (values.length < 2) select.parentElement.hidden = true;
}

function distinct(name) {
  return [...new Set(columns[name])].filter((value) => value !== null).sort((a, b) => a - b);
}

async function filter() {
  const turn = ++searching;
  const wanted = ["outcome", "hops", "role", "step", "source"]
    .map((id) => [columns[id], $(id).value])
    .filter(([, value]) => value !== "")
    .map(([column, value]) => [column, Number(value)]);
  const mixed = $("mixed").checked ? new Set(index.mixed) : null;
  const word = $("search").value.toLowerCase();
  let found = [];
  for (let i = 0; i < index.count; i++) {
    if (mixed && !mixed.has(columns.group[i])) continue;
    if (wanted.every(([column, value]) => column[i] === value)) found.push(i);
  }
  if (word) {
    const holds = (text) => text.toLowerCase().includes(word);
    const near = new Set(found.filter((i) => holds(question(i)) || holds(columns.answer[i])));
    if ($("deep").checked) {
      const passages = new Map();
      for (const [k, i] of found.entries()) {
        if (near.has(i)) continue;
        if (k % 256 === 0) {
          $("count").textContent = `searching, ${Math.round((100 * k) / found.length)} %`;
          await new Promise((done) => setTimeout(done));
        }
        if (turn !== searching) return;
        if (await deepHolds(i, holds, passages)) near.add(i);
      }
    }
    found = found.filter((i) => near.has(i));
  }
  if (turn !== searching) return;
  const [by, way] = $("sort").value.split(" ");
  if (by) {
    const column = columns[by], sign = way === "up" ? 1 : -1;
    // What has no number stands last, whichever way.
    found.sort((a, b) =>
      column[a] === column[b] ? a - b : column[a] === null ? 1 : column[b] === null ? -1 : sign * (column[a] - column[b]));
  }
  shown = found;
  const of = index.total > index.count ? `; the last ${index.count} of ${index.total}` : "";
  $("count").textContent = `${shown.length} of ${index.count} shown${of}`;
  $("space").style.height = `${shown.length * HEIGHT}px`;
  $("list").scrollTop = 0;
  if (shown.length && !shown.includes(chosen)) choose(0);
  else draw();
  if (shown.length) return;
  chosen = -1;
  $("detail").replaceChildren(make("p", "soft", "No rollout is like that."));
}

async function deepHolds(i, holds, passages) {
  const detail = await part("rollouts", i);
  if ([...(detail.golden_answers || []), detail.id].some(holds)) return true;
  for (const turn of detail.turns) {
    if (holds(turn.text || "") || (turn.queries || []).some(holds)) return true;
    for (const [place] of turn.passages || []) {
      if (!passages.has(place)) passages.set(place, (await part("passages", place)).some(holds));
      if (passages.get(place)) return true;
    }
  }
  return false;
}

function draw() {
  const list = $("list"), space = $("space");
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 5);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 5);
  const rows = [];
  for (let k = first; k < last; k++) {
    const i = shown[k], row = make("div", "row");
    row.style.top = `${k * HEIGHT}px`;
    row.id = `row-${i}`;
    row.dataset.at = k;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(i === chosen));
    row.setAttribute("aria-posinset", k + 1);
    row.setAttribute("aria-setsize", shown.length);
    const line = make("div");
    line.append(make("b", good(i), `${MARKS[columns.outcome[i]] || "?"} ${outcome(i)}`), " ", make("bdi", "", question(i).slice(0, 200)));
    const facts = [NAMES.role[columns.role[i]]];
    for (const [name, text] of [["step", "step"], ["hops", "hops"], ["reward", "reward"], ["advantage", "adv"], ["searches", "searches"]]) {
      if (columns[name][i] !== null) facts.push(`${text} ${number(columns[name][i], 2)}`);
    }
    row.append(line, make("div", "", facts.join(" · ")));
    rows.push(row);
  }
  space.replaceChildren(...rows);
  list.setAttribute("aria-activedescendant", chosen < 0 ? "" : `row-${chosen}`);
}

function choose(k) {
  k = Math.max(0, Math.min(shown.length - 1, k));
  if (!shown.length) return;
  chosen = shown[k];
  const list = $("list"), top = k * HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
  draw();
  show(chosen);
}

// ---------------------------------------------------------------- one rollout

async function show(i) {
  const detail = await part("rollouts", i);
  const places = detail.turns.flatMap((turn) => (turn.passages || []).map(([place]) => place));
  const passages = new Map(await Promise.all(places.map(async (place) => [place, await part("passages", place)])));
  if (i !== chosen) return;
  const box = $("detail"), nodes = [make("h2", "", question(i))];
  const facts = make("dl");
  const fact = (name, value, kind) => {
    if (value === "" || value === undefined || value === null) return;
    facts.append(make("dt", "", name), make("dd", kind || "", String(value)));
  };
  fact("outcome", `${MARKS[columns.outcome[i]] || "?"} ${outcome(i)}${detail.finish ? ` (${detail.finish.replaceAll("_", " ")})` : ""}`, good(i));
  fact("answer", columns.answer[i]);
  fact("right answers", (detail.golden_answers || []).join(" / "));
  fact("seed", (detail.chain || []).join(" — "));
  fact("refused by", detail.reason);
  for (const name of ["em", "f1", "reward"]) if (columns[name][i] !== null) fact(name, number(columns[name][i]));
  const pairs = (list) => (list || []).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`).join(" · ");
  fact("reward parts", pairs(detail.reward_parts));
  fact("teacher", detail.why);
  if (columns.advantage[i] !== null) fact("advantage", number(columns.advantage[i]));
  fact("log-likelihoods", pairs(detail.log_likelihoods));
  const counts = [["hops", columns.hops[i]], ["searches", columns.searches[i]], ["queries", detail.queries], ["repeated", detail.duplicates]];
  fact("counts", counts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name} ${value}`).join(" · "));
  fact("gold evidence", (detail.evidence || []).join(", "));
  const where = [NAMES.role[columns.role[i]], index.sources[columns.source[i]], columns.step[i] === null ? "" : `step ${columns.step[i]}`, detail.id];
  fact("from", where.filter(Boolean).join(" · "));
  for (const [name, value] of detail.more || []) fact(name.replaceAll("_", " "), typeof value === "number" ? number(value) : value);
  nodes.push(facts, neighbours(i));
  let asked = [];
  for (const turn of detail.turns) {
    nodes.push(drawTurn(turn, passages, asked));
    if (turn.by === "policy") asked = turn.queries || [];
  }
  box.replaceChildren(...nodes);
  box.scrollTop = 0;
}

function neighbours(i) {
  const box = make("p", "soft"), of = [];
  for (let j = 0; j < index.count && of.length < 65; j++) if (columns.group[j] === columns.group[i]) of.push(j);
  if (of.length < 2) return box;
  box.append("Its group: ");
  for (const j of of) {
    const button = make("button", good(j), `${MARKS[columns.outcome[j]] || "?"} ${columns.advantage[j] === null ? "" : number(columns.advantage[j], 2)}`);
    button.setAttribute("aria-label", `rollout ${j + 1}: ${outcome(j)}`);
    if (j === i) button.setAttribute("aria-current", "true"), (button.style.borderColor = "currentColor");
    button.onclick = () => {
      const k = shown.indexOf(j);
      if (k >= 0) choose(k);
      else (chosen = j), draw(), show(j);
    };
    box.append(button, " ");
  }
  return box;
}

function drawTurn(turn, passages, asked) {
  const box = make("section", `turn ${turn.by}`);
  const names = { policy: "policy", tool: "what the search brought", injected: "injected (a correction)" };
  box.append(make("h3", "soft", (names[turn.by] || turn.by) + (turn.action ? `: ${turn.action}` : "")));
  if (turn.sizes) box.append(tokens(turn));
  else if (turn.text && !turn.passages?.length) box.append(make("div", "words", turn.text));
  for (const query of turn.queries || []) {
    const line = make("p");
    line.append(make("span", "badge", "query"), make("bdi", "", query));
    box.append(line);
  }
  for (const [place, query, score, gold, holds] of turn.passages || []) {
    const [id, title, text] = passages.get(place), card = make("article", gold ? "passage gold" : "passage"), head = make("h3");
    if (gold) head.append(make("span", "badge star", "★ gold evidence"));
    if (holds) head.append(make("span", "badge", "holds the answer"));
    head.append(make("bdi", "", title));
    const notes = [id, score === null ? "" : `score ${number(score)}`, asked.length > 1 ? `query ${query + 1}` : ""];
    card.append(head, make("div", "words", text), make("div", "soft", notes.filter(Boolean).join(" · ")));
    box.append(card);
  }
  if (turn.text && turn.passages?.length) {
    const raw = make("details");
    raw.append(make("summary", "soft", "as the policy read it"), make("div", "words", turn.text));
    box.append(raw);
  }
  return box;
}

// Tokens are cut out of bytes. Those that share a character are one span that tells of each.
function tokens(turn) {
  const bytes = turn.hex
    ? Uint8Array.from(turn.hex.match(/../g), (pair) => parseInt(pair, 16))
    : new TextEncoder().encode(turn.text || "");
  const box = make("div", "words"), decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "the policy's tokens; left and right arrows go from one to the next");
  let at = 0, from = 0, told = [], low = 0;
  for (let t = 0; t < turn.sizes.length; t++) {
    const end = at + turn.sizes[t], logp = turn.logps[t];
    const piece = [...bytes.subarray(at, end)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    told.push([t, logp, piece]);
    low = Math.max(low, logp ?? 0);
    at = end;
    if ((bytes[at] & 0xc0) === 0x80 && t + 1 < turn.sizes.length) continue;
    const text = decoder.decode(bytes.subarray(from, at)), span = make("span", "token", text);
    span.dataset.tip = told
      .map(([n, value, hex]) =>
        `token ${n + 1} of ${turn.sizes.length}: ` +
        (value === null ? "no log-probability" : `p = ${(100 * Math.exp(-value / 1000)).toFixed(1)} %, log p = ${value ? "−" : ""}${(value / 1000).toFixed(3)}`) +
        (told.length > 1 ? `; part of a character, bytes ${hex}` : ""))
      .join("\n");
    span.style.setProperty("--p", 1 - Math.exp(-low / 1000));
    if ($("colour").checked) paint(span);
    box.append(span);
    from = at;
    told = [];
    low = 0;
  }
  return box;
}

function paint(span) {
  const doubt = Number(span.style.getPropertyValue("--p")), on = $("colour").checked;
  span.style.background = on ? `rgba(var(--low), ${(0.55 * doubt).toFixed(3)})` : "";
  span.style.textDecoration = on && doubt > 0.5 ? "underline dotted" : "";
}

function tip(span) {
  const box = $("tip");
  box.hidden = !span;
  if (!span) return;
  box.textContent = span.dataset.tip;
  const place = span.getClientRects()[0] || span.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  const below = place.bottom + 4;
  box.style.top = `${below + box.offsetHeight > innerHeight ? place.top - box.offsetHeight - 4 : below}px`;
}

// ---------------------------------------------------------------- what one does

const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
$("list").addEventListener("keydown", (event) => {
  if (!(event.key in MOVES) || !shown.length) return;
  event.preventDefault();
  choose(shown.indexOf(chosen) + MOVES[event.key]);
});
$("list").addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (row) choose(Number(row.dataset.at));
});
let drawing = false;
$("list").addEventListener("scroll", () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => ((drawing = false), draw()));
});
addEventListener("resize", () => index && draw());
$("detail").addEventListener("mouseover", (event) => tip(event.target.closest(".token")));
$("detail").addEventListener("mouseleave", () => tip(null));
$("detail").addEventListener("scroll", () => tip(null));
$("detail").addEventListener("keydown", (event) => {
  const box = event.target;
  if (!box.classList.contains("words") || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
  event.preventDefault();
  const now = box.querySelector(".at");
  const next = event.key === "Escape" ? null : !now ? box.firstElementChild : event.key === "ArrowRight" ? now.nextElementSibling || now : now.previousElementSibling || now;
  if (now) now.classList.remove("at"), now.removeAttribute("aria-describedby");
  if (next) next.classList.add("at"), next.setAttribute("aria-describedby", "tip");
  tip(next);
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", (event) => {
  if (event.target.id === "colour") for (const span of document.querySelectorAll(".token")) paint(span);
  else if (event.target.id !== "search") filter();
});
let typed;
$("search").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(filter, 150);
});

(async () => {
  index = await unpack("index");
  columns = index.columns;
  options("outcome", "all", distinct("outcome"), (value) => index.outcomes[value]);
  options("hops", "all", distinct("hops"), String);
  options("role", "all", distinct("role"), (value) => NAMES.role[value]);
  options("step", "all", distinct("step"), String);
  options("source", "all", distinct("source"), (value) => index.sources[value] || "file");
  const sorts = ["reward", "advantage", "searches"].flatMap((name) => [`${name} down`, `${name} up`]);
  options("sort", "as they came", sorts, (value) => value.replace("down", "↓").replace("up", "↑"));
  await filter();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})().catch((error) => {
  $("count").textContent = `This browser cannot show the page (${error}); take a newer one.`;
});
