// SPDX-License-Identifier: Apache-2.0
//
// panels.js: the overview of all heads, and what stands beside a map: the head in numbers, attention
// by offset, the strongest keys, the colour scale, and what is under the pointer.

const THUMBNAIL = 104;
const NEAR = 16; // offsets in the chart, to either side
const STRONGEST = 5;

function byId(id) {
  return document.getElementById(id);
}

// ---- overview -----------------------------------------------------------------------------------

class Overview {
  #grid = byId("overview-grid");
  #go;

  /** go(layer, head): what a click does. */
  constructor(go) {
    this.#go = go;
  }

  show({ kind, measure, part, theme, root, layer, head, rows }) {
    const columns = kind.heads.length;
    this.#grid.style.setProperty("--columns", columns);
    const cards = [];
    kind.layers.forEach((layerName, l) => {
      cards.push(element("div", { className: "layer-name", textContent: `Layer ${layerName}` }));
      kind.heads.forEach((headName, h) => {
        const map = kind.head(l, h);
        const limit = map.limit(measure);
        const picture = { measure, part, theme, root, rows, limit };
        const image = imageOf(map, picture, THUMBNAIL * window.devicePixelRatio);
        cards.push(this.#card(kind, [l, h], image, map, l === layer && h === head));
      });
    });
    const focused = [...this.#grid.children].indexOf(document.activeElement);
    this.#grid.replaceChildren(...cards);
    cards[focused]?.focus({ preventScroll: true });
  }

  #card(kind, [l, h], image, map, current) {
    const canvas = element("canvas");
    const scale = Math.min(THUMBNAIL / image.width, THUMBNAIL / image.height);
    const size = [image.width * scale, image.height * scale];
    const context = prepared(canvas, ...size);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, ...size);
    const [distance, entropy] = [kind.distance[l][h].toFixed(1), kind.entropy[l][h].toFixed(2)];
    const share = map.relationShare();
    const card = element(
      "button",
      { className: "card", type: "button" },
      element("span", { className: "card-name", textContent: `Head ${kind.heads[h]}` }),
      canvas,
      element("span", { className: "card-numbers", textContent: `distance ${distance}` }),
      element("span", { className: "card-numbers", textContent: `entropy ${entropy}` }),
    );
    if (share !== null) card.append(shareBar(share));
    const relation = share === null ? "" : `, relation ${percent(share)} of the spread`;
    card.setAttribute(
      "aria-label",
      `Layer ${kind.layers[l]}, head ${kind.heads[h]}: mean distance ${distance}, entropy ${entropy} nats${relation}`,
    );
    if (current) card.setAttribute("aria-current", "true");
    card.addEventListener("click", () => this.#go(l, h));
    return card;
  }
}

/** How much of the logits' spread is content and how much relation. */
function shareBar(share) {
  const bar = element("span", { className: "share" }, element("span"));
  bar.firstChild.style.width = `${100 * share}%`;
  bar.title = `relation: ${percent(share)} of the spread of the logits`;
  return bar;
}

// ---- beside the map -----------------------------------------------------------------------------

function showSummary(kind, head, layer, number) {
  const share = head.relationShare();
  byId("summary-name").textContent = `Layer ${kind.layers[layer]}, head ${kind.heads[number]}`;
  byId("summary-distance").textContent = `${kind.distance[layer][number].toFixed(2)} tokens`;
  byId("summary-entropy").textContent = `${kind.entropy[layer][number].toFixed(2)} nats`;
  byId("summary-share").hidden = share === null;
  if (share === null) return;
  const text = `${percent(1 - share)} content, ${percent(share)} relation`;
  byId("summary-share-text").textContent = text;
  byId("summary-share-bar").replaceChildren(shareBar(share));
}

/** Bars of the mean probability at every offset, and dots of what relation alone would give. */
function showOffsets(kind, head) {
  const canvas = byId("offsets");
  const [width, height] = [canvas.parentElement.clientWidth, 128];
  const context = prepared(canvas, width, height);
  const mass = head.mass("both");
  const alone = kind.hasRelation ? head.mass("relation") : null;
  const first = Math.max(-NEAR, 1 - head.rows);
  const last = Math.min(NEAR, head.keys - 1);
  const of = (numbers, offset) => numbers[offset + head.rows - 1];
  let [largest, near] = [0, 0];
  for (let offset = first; offset <= last; offset++) {
    largest = Math.max(largest, of(mass, offset), alone ? of(alone, offset) : 0);
    near += of(mass, offset);
  }
  const floor = height - 22;
  const side = 11; // for half a label
  const step = (width - 2 * side) / (last - first + 1);
  const [top, bar] = [14, Math.max(1, Math.min(step - 2, 18))];
  const y = (value) => floor - ((floor - top) * value) / (largest || 1);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.fillStyle = colourOf("--line");
  context.fillRect(0, floor, width, 1);
  const middleOf = (offset) => side + (offset - first + 0.5) * step;
  for (let offset = first; offset <= last; offset++) {
    const middle = middleOf(offset);
    context.fillStyle = colourOf(offset === 0 ? "--accent-strong" : "--accent");
    context.fillRect(middle - bar / 2, y(of(mass, offset)), bar, floor - y(of(mass, offset)));
    if (offset % 4 === 0 || last - first < 12) {
      context.fillStyle = colourOf("--faint");
      context.fillText(offset > 0 ? `+${offset}` : `${offset}`.replace("-", "−"), middle, height - 7);
    }
  }
  for (let offset = first; alone && offset <= last; offset++) {
    if (Math.max(of(alone, offset), of(mass, offset)) < largest / 50) continue;
    const middle = middleOf(offset);
    context.beginPath();
    context.arc(middle, y(of(alone, offset)), Math.min(3, step / 2.5), 0, 2 * Math.PI);
    context.fillStyle = colourOf("--relation");
    context.fill();
    context.lineWidth = 1;
    context.strokeStyle = colourOf("--paper");
    context.stroke();
  }
  context.textAlign = "left";
  context.fillStyle = colourOf("--faint");
  context.fillText(exact(largest), 0, 10);
  const order = [...mass.keys()].sort((a, b) => mass[b] - mass[a]).slice(0, 3);
  const strongest = order.map((at) => `${exact(mass[at])} at ${at - head.rows + 1}`);
  canvas.setAttribute("aria-label", `Mean attention by offset, strongest: ${strongest.join(", ")}`);
  const outside = Math.max(0, 1 - near);
  byId("offsets-alone").hidden = !alone;
  byId("offsets-outside").textContent =
    outside >= 0.005 ? `further away: ${percent(outside)}` : "";
}

/** The strongest keys of a query, and the one that is pointed at. */
function showStrongest(kind, head, row, key) {
  byId("strongest").classList.toggle("empty", row === null);
  const reads = row === null ? "" : quoted(kind.queryTokens[row]);
  const says = row !== null && kind.predicted[row] !== undefined ? quoted(kind.predicted[row]) : "";
  byId("strongest-name").textContent =
    row === null ? "Point at a cell or a token" : `${reads}${says && `, predicting ${says},`} looks at`;
  const rows = row === null ? [] : head.strongest(row, STRONGEST);
  if (key !== null && rows.length && !rows.includes(key)) rows.splice(-1, 1, key);
  const parts = kind.hasRelation ? ["content", "relation"] : kind.hasLogits ? ["both"] : [];
  byId("strongest-head").replaceChildren(
    ...["key", "p", ...parts.map((part) => (part === "both" ? "logit" : part))].map((name) => {
      return element("th", { textContent: name, scope: "col" });
    }),
  );
  byId("strongest-body").replaceChildren(
    ...rows.map((j) => {
      const at = row * head.keys + j;
      const p = head.values("probability", "both")[at];
      const cells = parts.map((part) => {
        const text = head.hidden[at] ? "hidden" : signed(head.values("logit", part)[at]);
        return element("td", { textContent: text });
      });
      const name = element("th", { scope: "row" }, element("bdi", { textContent: shown(kind.keyTokens[j]) }));
      const made = element("tr", {}, name, element("td", { textContent: exact(p) }), ...cells);
      made.classList.toggle("marked", j === key);
      made.style.setProperty("--share", `${p < 0.02 ? 0 : Math.round(100 * p)}%`);
      return made;
    }),
  );
}

/** The colour scale under the controls. */
function showLegend(picture) {
  const { measure, limit, head } = picture;
  byId("legend-bar").style.background = gradient(picture);
  byId("legend-low").textContent = measure === "logit" ? signed(-limit) : "0";
  byId("legend-high").textContent = measure === "logit" ? signed(limit) : exact(limit);
  byId("legend-hidden").hidden = !head.hidden.includes(1);
}

// ---- the pair that is pointed at ----------------------------------------------------------------

/** All numbers of a pair, as [name, text]. */
function pairNumbers(kind, head, row, key) {
  const at = row * head.keys + key;
  if (head.hidden[at]) return [["hidden", "this query may not see this key"]];
  const value = (measure, part) => head.values(measure, part)[at];
  const numbers = [["probability", exact(value("probability", "both"))]];
  if (kind.hasLogits) numbers.push(["logit", signed(value("logit", "both"))]);
  if (kind.hasRelation) {
    const of = (measure, form) => {
      return `content ${form(value(measure, "content"))}, relation ${form(value(measure, "relation"))}`;
    };
    numbers.push(["of which", of("logit", signed)], ["p if alone", of("probability", exact)]);
  }
  return numbers;
}

function pairName(kind, row, key) {
  return `${quoted(kind.queryTokens[row])} → ${quoted(kind.keyTokens[key])}`;
}

function pairText(kind, head, row, key) {
  const numbers = pairNumbers(kind, head, row, key).map(([name, text]) => `${name}: ${text}`);
  return `${pairName(kind, row, key)}, ${numbers.join("; ")}`;
}

function hideTooltip() {
  byId("tooltip").hidden = true;
}

function showTooltip(kind, head, row, key, event) {
  const tooltip = byId("tooltip");
  tooltip.hidden = row === null || key === null || !event;
  if (tooltip.hidden) return;
  const offset = `offset ${key - row > 0 ? "+" : ""}${key - row}`.replace("-", "−");
  const rows = pairNumbers(kind, head, row, key).map(([name, text]) => {
    return element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: text }));
  });
  tooltip.replaceChildren(
    element("p", { textContent: `${pairName(kind, row, key)}, ${offset}` }),
    element("dl", {}, ...rows),
  );
  const { width, height } = tooltip.getBoundingClientRect();
  const [x, y] = [event.clientX + 16, event.clientY + 16];
  tooltip.style.left = `${Math.max(4, Math.min(x, document.documentElement.clientWidth - width - 4))}px`;
  tooltip.style.top = `${y + height > window.innerHeight ? event.clientY - height - 12 : y}px`;
}
