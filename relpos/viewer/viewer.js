// SPDX-License-Identifier: Apache-2.0
//
// viewer.js: what is chosen, and how: controls, keys, steps, theme, address. Every change of state
// goes through change(), which draws the page again.

const data = JSON.parse(byId("data").textContent);
const VIEWS = ["matrix", "lines", "alignment", "overview"];
const START = {
  sentence: 0,
  kind: Object.keys(data.sentences[0].kinds)[0],
  layer: 0, // along the axis, as head; not the model's own number
  head: 0,
  view: "matrix",
  measure: "probability",
  part: "both",
  step: 0, // 0: the whole sentence
  root: false,
  zoom: 1,
  theme: "", // "": as the system has it
};
const CAPTIONS = {
  probability: {
    both: "Probabilities as the model has them: softmax of content + relation.",
    content: "If content alone decided: softmax of the content part over the keys each query sees.",
    relation: "If relative position alone decided: softmax of the relation part over the keys each query sees.",
  },
  logit: {
    both: "Logits: content + relation, before softmax.",
    content: "The logits' share of content: what query and key say to each other.",
    relation: "The logits' share of relation: what relative position adds.",
  },
};
const PLAIN = {
  probability: "Probabilities as the model has them: softmax of the logits.",
  logit: "Logits, before softmax.",
};
const KEYS = {
  e: { kind: "encoder" },
  d: { kind: "decoder" },
  x: { kind: "cross" },
  m: { view: "matrix" },
  l: { view: "lines" },
  a: { view: "alignment" },
  o: { view: "overview" },
  b: { part: "both" },
  c: { part: "content" },
  r: { part: "relation" },
};
const PLAY_EVERY = 800; // milliseconds

const state = { ...START };
const pinned = { row: null, key: null }; // by click or keyboard
const opened = new Map(); // sentence and kind, once unpacked
const dark = window.matchMedia("(prefers-color-scheme: dark)");
// In a notebook's frame the address is not ours.
const keepsAddress = window.top === window && window.location.protocol !== "about:";
let playing = null;
let picture = null; // what the views were given last
let turn = 0; // counts changes: an unpacking that comes late shows nothing

const hooks = { hover, pick, focus };
const views = {
  matrix: new MatrixView(hooks),
  lines: new LinesView(hooks),
  alignment: new AlignmentView(hooks),
  overview: new Overview((layer, head) => change({ layer, head, view: "matrix" })),
};

// ---- state --------------------------------------------------------------------------------------

function sentence() {
  return data.sentences[state.sentence];
}

/** Brings the state to what there is. */
function settle() {
  const within = (value, count) => Math.max(0, Math.min(Number.parseInt(value, 10) || 0, count - 1));
  state.sentence = within(state.sentence, data.sentences.length);
  const { kinds } = sentence();
  if (!Object.hasOwn(kinds, state.kind)) [state.kind] = Object.keys(kinds);
  const raw = kinds[state.kind];
  const [layers, heads, rows] = raw.shape;
  state.layer = within(state.layer, layers);
  state.head = within(state.head, heads);
  state.step = state.kind === "encoder" ? 0 : within(state.step, rows + 1);
  if (!raw.relation || !Object.hasOwn(CAPTIONS.logit, state.part)) state.part = "both";
  if (!(raw.content || raw.logits) || state.measure !== "logit") state.measure = "probability";
  if (!VIEWS.includes(state.view)) state.view = "matrix";
  if (state.view === "alignment" && state.kind !== "cross") state.view = "lines";
  if (state.step && pinned.row >= state.step) pinned.row = pinned.key = null;
  state.zoom = Math.max(1, Math.min(Number(state.zoom) || 1, 8));
  state.root = Boolean(state.root) && state.root !== "false";
  if (!["", "light", "dark"].includes(state.theme)) state.theme = "";
}

async function change(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  settle();
  if (state.sentence !== before.sentence || state.kind !== before.kind) {
    pinned.row = pinned.key = null;
    if (!("step" in changes)) state.step = 0;
  }
  if (state.kind === "encoder" || state.view === "overview" || state.step === 0) stop();
  remember();
  const mine = ++turn;
  const kind = await openKind();
  if (mine === turn) show(kind);
}

async function openKind() {
  const name = `${state.sentence} ${state.kind}`;
  if (!opened.has(name)) {
    opened.set(name, Kind.open(state.kind, sentence().kinds[state.kind], sentence()));
  }
  return opened.get(name);
}

function theme() {
  return state.theme || (dark.matches ? "dark" : "light");
}

/** Puts what is not as at the start into the address. */
function remember() {
  if (!keepsAddress) return;
  const kept = Object.entries(state).filter(([name, value]) => String(value) !== String(START[name]));
  const hash = String(new URLSearchParams(kept.map(([name, value]) => [name, String(value)])));
  const { pathname, search } = window.location;
  window.history.replaceState(null, "", hash ? `#${hash}` : pathname + search);
}

function recalled() {
  if (!keepsAddress) return {};
  const found = new URLSearchParams(window.location.hash.slice(1));
  return Object.fromEntries([...found].filter(([name]) => Object.hasOwn(START, name)));
}

// ---- drawing ------------------------------------------------------------------------------------

function show(kind) {
  document.documentElement.dataset.theme = theme();
  const { layer, measure, part, root, step, zoom, view } = state;
  const head =
    picture && picture.kind === kind && picture.layer === layer && picture.number === state.head
      ? picture.head
      : kind.head(layer, state.head);
  const ofView = view === "alignment" ? "probability" : measure; // logits align nothing
  const name = `${state.kind} layer ${kind.layers[layer]}, head ${kind.heads[state.head]}`;
  picture = {
    head,
    kind,
    layer,
    number: state.head,
    measure: ofView,
    part,
    root,
    step,
    zoom,
    theme: theme(),
    limit: head.limit(ofView),
    rows: { first: 0, last: step || head.rows },
    marked: { ...pinned },
    label: `${ofView} map of ${name}: ${head.rows} queries by ${head.keys} keys`,
  };
  showControls(kind);
  for (const each of VIEWS) byId(each).hidden = each !== view;
  document.body.dataset.view = view;
  document.body.toggleAttribute("data-relation", kind.hasRelation);
  showLegend(picture);
  if (view === "overview") {
    views.overview.show({ ...picture, head: state.head });
    return;
  }
  showSummary(kind, head, layer, state.head);
  showOffsets(kind, head);
  views[view].show(picture);
  mark(pinned.row, pinned.key);
  announce();
}

function showControls(kind) {
  const raw = sentence().kinds;
  const chosen = { ...state, measure: picture.measure };
  const possible = {
    kind: (value) => value in raw,
    view: (value) => value !== "alignment" || state.kind === "cross",
    measure: (value) => value === "probability" || (kind.hasLogits && state.view !== "alignment"),
    part: (value) => value === "both" || kind.hasRelation,
  };
  for (const group of document.querySelectorAll(".segments")) {
    const { state: name } = group.dataset;
    for (const button of group.children) {
      button.setAttribute("aria-pressed", button.value === chosen[name]);
      button.disabled = !possible[name](button.value);
      button.hidden = button.disabled && name !== "part" && name !== "measure";
    }
  }
  byId("sentence").value = state.sentence;
  choices(byId("layer"), kind.layers, state.layer);
  choices(byId("head"), kind.heads, state.head);
  byId("root").checked = state.root;
  byId("zoom").hidden = state.view !== "matrix";
  byId("theme").textContent = theme() === "dark" ? "☀" : "☾";
  byId("caption").textContent = caption(kind);
  byId("lines-from").textContent = state.kind === "cross" ? "target" : "query";
  byId("lines-to").textContent = state.kind === "cross" ? "source" : "key";
  byId("steps").hidden = state.kind === "encoder" || state.view === "overview";
  byId("step").max = kind.rows;
  byId("step").value = state.step;
  byId("step-text").textContent = stepText(kind);
  byId("play").textContent = playing ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", playing ? "Pause" : "Play the steps");
}

function caption(kind) {
  // Logits that the data has beside their parts are not the sum of them.
  const summed = kind.hasRelation && !(kind.logits && state.part === "both");
  const text = [summed ? CAPTIONS[picture.measure][state.part] : PLAIN[picture.measure]];
  if (kind.hasRelation && !summed) {
    text.push("The parts do not add up to them: softcap, or parts that are left out.");
  }
  if (kind.content && !kind.relation && !kind.logits) text.push("This attention has no relation terms.");
  if (state.view === "overview") text.push("Each head has a scale of its own.");
  return text.join(" ");
}

function choices(select, names, chosen) {
  if (select.dataset.names !== String(names)) {
    select.dataset.names = String(names);
    select.replaceChildren(...names.map((name, i) => element("option", { value: i, textContent: name })));
  }
  select.value = chosen;
}

function stepText(kind) {
  if (state.step === 0) return `all ${kind.rows} steps`;
  const reads = quoted(kind.queryTokens[state.step - 1]);
  const says = kind.predicted[state.step - 1];
  return `step ${state.step} of ${kind.rows}: reads ${reads}${says === undefined ? "" : `, predicts ${quoted(says)}`}`;
}

/** Shows a query, a key, both or none, in the view and beside it. */
function mark(row, key, event = null) {
  const { kind, head, step } = picture;
  if (state.view === "overview") return;
  views[state.view].mark(row, key);
  const from = row ?? (step ? step - 1 : null);
  showStrongest(kind, head, from, key);
  showTooltip(kind, head, from, key, event);
}

// ---- pointing -----------------------------------------------------------------------------------

function hover(row, key, event) {
  if (!picture) return;
  if (row === null && key === null) mark(pinned.row, pinned.key);
  else mark(row ?? pinned.row, key ?? (row === null ? null : pinned.key), event);
}

function focus(row, key) {
  if (row !== null || key !== null) mark(row ?? pinned.row, key);
}

/** A click keeps what it is on, and lets go of what it kept. */
function pick(row, key, event = null) {
  const again = (row === null || row === pinned.row) && (key === null || key === pinned.key);
  if (again) pinned.row = pinned.key = null;
  else {
    pinned.row = row ?? pinned.row;
    pinned.key = key;
  }
  mark(pinned.row, pinned.key, again ? null : event);
  announce();
}

function move(rows, keys) {
  if (state.view === "overview") return;
  const { head, step } = picture;
  const last = step || head.rows;
  const within = (value, count) => Math.max(0, Math.min(value, count - 1));
  const row = pinned.row ?? (step ? step - 1 : rows > 0 ? -1 : 0);
  pinned.row = within(row + rows, last);
  if (keys) pinned.key = within((pinned.key ?? (keys > 0 ? -1 : 1)) + keys, head.keys);
  mark(pinned.row, pinned.key);
  views[state.view].reveal(pinned.row, pinned.key);
  announce();
}

/** What a reader of the screen hears. */
function announce() {
  const { kind, head } = picture;
  const { row, key } = pinned;
  let text = "";
  if (row !== null && key !== null) text = pairText(kind, head, row, key);
  else if (row !== null) {
    const keys = head.strongest(row, 3).map((j) => {
      return `${quoted(kind.keyTokens[j])} ${exact(head.values("probability", "both")[row * head.keys + j])}`;
    });
    text = `${quoted(kind.queryTokens[row])} looks at ${keys.join(", ")}`;
  }
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text; // or it is read out again
}

// ---- steps --------------------------------------------------------------------------------------

function play() {
  if (playing) {
    stop();
    change({});
    return;
  }
  if (state.kind === "encoder" || state.view === "overview") return;
  const { rows } = picture.head;
  playing = window.setInterval(() => {
    if (state.step >= rows) {
      stop();
      change({});
    } else change({ step: state.step + 1 });
  }, PLAY_EVERY);
  change({ step: state.step >= rows || state.step === 0 ? 1 : state.step });
}

function stop() {
  window.clearInterval(playing);
  playing = null;
}

// ---- controls -----------------------------------------------------------------------------------

function switchTheme() {
  change({ theme: theme() === "dark" ? "light" : "dark" });
}

function press(event) {
  const { key, shiftKey, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open || !picture) return;
  const types = target.closest?.("select, input[type=range]");
  if (types && (key.startsWith("Arrow") || target.tagName === "SELECT")) return;
  const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const actions = {
    p: () => change({ measure: state.measure === "logit" ? "probability" : "logit" }),
    s: () => change({ root: !state.root }),
    t: switchTheme,
    ",": () => change({ step: state.step - 1 }),
    ".": () => change({ step: state.step + 1 }),
    "+": () => change({ zoom: state.zoom * 2 }),
    "-": () => change({ zoom: state.zoom / 2 }),
    "?": () => byId("help").showModal(),
    Escape: () => pick(null, null),
  };
  if (key in arrows) {
    const [down, right] = arrows[key];
    if (shiftKey) move(down, right);
    else change({ layer: state.layer + down, head: state.head + right });
  } else if (key === " ") {
    if (target.closest?.("button, input") || byId("steps").hidden) return;
    play();
  } else if (key in KEYS) change(KEYS[key]);
  else if (key in actions) actions[key]();
  else return;
  event.preventDefault();
}

let resizing = 0;

function resized() {
  window.cancelAnimationFrame(resizing);
  resizing = window.requestAnimationFrame(() => change({}));
}

function connect() {
  for (const group of document.querySelectorAll(".segments")) {
    group.addEventListener("click", ({ target }) => {
      if (target.value) change({ [group.dataset.state]: target.value });
    });
  }
  for (const group of document.querySelectorAll(".stepper")) {
    const name = group.dataset.state;
    group.addEventListener("click", ({ target }) => {
      if (target.tagName === "BUTTON") change({ [name]: state[name] + Number(target.value) });
    });
    byId(name).addEventListener("change", ({ target }) => change({ [name]: Number(target.value) }));
  }
  byId("zoom").addEventListener("click", ({ target }) => {
    if (target.value) change({ zoom: state.zoom * Number(target.value) });
  });
  byId("sentence").addEventListener("change", ({ target }) => change({ sentence: target.value }));
  byId("step").addEventListener("input", ({ target }) => change({ step: Number(target.value) }));
  byId("play").addEventListener("click", play);
  byId("root").addEventListener("change", ({ target }) => change({ root: target.checked }));
  byId("theme").addEventListener("click", switchTheme);
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  document.addEventListener("keydown", press);
  dark.addEventListener("change", () => change({}));
  window.addEventListener("resize", resized);
  window.addEventListener("scroll", hideTooltip, { capture: true });
  window.addEventListener("hashchange", () => change({ ...START, ...recalled() }));
}

function sentenceName({ source, target }) {
  const words = [...joined(source.length ? source : target)];
  return words.length > 60 ? `${words.slice(0, 59).join("")}…` : words.join("");
}

async function start() {
  byId("title").textContent = data.title;
  document.title = data.title;
  byId("sentence").replaceChildren(
    ...data.sentences.map((each, i) => {
      return element("option", { value: i, textContent: `${i + 1}. ${sentenceName(each)}` });
    }),
  );
  byId("sentence").hidden = data.sentences.length < 2;
  connect();
  await change(recalled());
}

/** What went wrong is said on the page, not in the console alone. */
function fail(reason) {
  const old = typeof DecompressionStream === "undefined" ? " This browser is too old for the page." : "";
  byId("error").textContent = `The maps cannot be shown: ${reason?.message ?? reason}.${old}`;
  byId("error").hidden = false;
}

window.addEventListener("unhandledrejection", ({ reason }) => fail(reason));
start();
