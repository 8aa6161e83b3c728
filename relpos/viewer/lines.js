// SPDX-License-Identifier: Apache-2.0
//
// lines.js: tokens joined by lines, in two columns (every kind) or two rows (an alignment). However
// many lines there are, they are a few paths: all of one strength and sign are one.

const LEVELS = 8; // strengths that are told apart
const EACH = 8; // lines of each query where all queries show theirs
const ROW = 26; // height of a token in a column
const HEIGHT = 170; // between the rows of an alignment
const LEAST = 0.02; // weaker lines are not drawn

const drawing = document.getElementById("lines-drawing"); // an SVG element, whose kind others get

function pathOf(classes, strokeOpacity, d) {
  const path = document.createElementNS(drawing.namespaceURI, "path");
  path.setAttribute("class", classes);
  path.setAttribute("stroke-opacity", strokeOpacity);
  path.setAttribute("d", d);
  return path;
}

/** Paths for lines [from, to, strength from -1 to 1], where curve(from, to) says how a line runs. */
function bundle(lines, curve, classes) {
  const found = new Map();
  for (const [from, to, value] of lines) {
    if (Math.abs(value) < LEAST) continue;
    const level = Math.ceil(Math.abs(value) * LEVELS) * Math.sign(value);
    found.set(level, (found.get(level) ?? "") + curve(from, to));
  }
  const levels = [...found].sort(([a], [b]) => Math.abs(a) - Math.abs(b));
  return levels.map(([level, d]) => {
    return pathOf(`${classes} ${level < 0 ? "negative" : ""}`, Math.abs(level) / LEVELS, d);
  });
}

/** A token to point at, by number in its column. */
function tokenElement(token, number, side, total) {
  const text = element("bdi", { textContent: shown(token) });
  const made = element("div", { className: "token", tabIndex: -1 }, text);
  made.dataset.side = side;
  made.dataset.number = number;
  made.setAttribute("role", "option");
  made.setAttribute("aria-label", `${shown(token)}, ${side} ${number + 1} of ${total}`);
  return made;
}

/** Tells hooks which token the pointer or the focus is on. */
function listen(frame, hooks) {
  const at = (event) => {
    const token = event.target.closest?.(".token");
    if (!token || token.classList.contains("later")) return [null, null];
    const number = Number(token.dataset.number);
    return token.dataset.side === "query" ? [number, null] : [null, number];
  };
  frame.addEventListener("pointerover", (event) => hooks.hover(...at(event), event));
  frame.addEventListener("pointerleave", () => hooks.hover(null, null, null));
  frame.addEventListener("focusin", (event) => hooks.focus(...at(event)));
  frame.addEventListener("click", (event) => hooks.pick(...at(event), event));
}

class LinesView {
  #frame = document.getElementById("lines");
  #sides = {
    query: document.getElementById("lines-queries"),
    key: document.getElementById("lines-keys"),
  };
  #picture = null;
  #kind = null; // whose tokens are in the columns

  constructor(hooks) {
    listen(this.#frame, hooks);
  }

  show(picture) {
    const { kind } = picture;
    this.#picture = picture;
    if (this.#kind !== kind) {
      this.#kind = kind;
      fill(this.#sides.query, kind.queryTokens, "query");
      fill(this.#sides.key, kind.keyTokens, "key");
    }
    this.layout();
  }

  layout() {
    const { head } = this.#picture;
    drawing.setAttribute("height", Math.max(head.rows, head.keys) * ROW);
    this.mark(this.#picture.marked?.row ?? null, this.#picture.marked?.key ?? null);
  }

  /** With a query marked its lines are shown, with a key alone those to it, else the strongest of
   * all. */
  mark(row, key) {
    const picture = this.#picture;
    picture.marked = { row, key };
    const { head, measure, part, root, rows, step } = picture;
    const from = row ?? (step ? step - 1 : null);
    const values = head.values(measure, part);
    const limit = picture.limit;
    const at = (i, j) => {
      return head.hidden[i * head.keys + j] ? 0 : strength(values[i * head.keys + j], limit, root);
    };
    const lines = [];
    for (let i = rows.first; i < rows.last; i++) {
      if (from !== null && i !== from) continue;
      const everyKey = from !== null || key !== null;
      const keys = everyKey ? [...Array(head.keys).keys()] : head.strongest(i, EACH, measure, part);
      for (const j of keys) if (from !== null || key === null || key === j) lines.push([i, j, at(i, j)]);
    }
    const width = drawing.getBoundingClientRect().width;
    const curve = (i, j) => {
      const [y, z] = [(i + 0.5) * ROW, (j + 0.5) * ROW];
      return `M0 ${y}C${width / 2} ${y} ${width / 2} ${z} ${width} ${z}`;
    };
    const chosen = from !== null && key !== null ? lines.filter(([, j]) => j === key) : [];
    const classes = measure === "logit" ? "signed" : part;
    const paths = bundle(lines, curve, `${classes} ${chosen.length ? "behind" : ""}`);
    drawing.replaceChildren(...paths, ...bundle(chosen, curve, `${classes} chosen`));
    const weigh = (side, strengths, marked) => {
      weighTokens(this.#sides[side], strengths, marked, classes);
    };
    const ofKeys = from === null ? [] : lines.map(([, , value]) => value);
    const ofQueries = from === null && key !== null ? lines.map(([, , value]) => value) : [];
    const numbers = (i, j) => exact(values[i * head.keys + j]);
    weigh("key", ofKeys.map((value, j) => [value, numbers(from, j)]), key);
    weigh("query", ofQueries.map((value, i) => [value, numbers(i + rows.first, key)]), from);
    [...this.#sides.query.children].forEach((token, i) => {
      token.classList.toggle("later", i >= rows.last);
    });
    this.#keep(from, key);
  }

  /** The token that Tab comes to: the marked query, or the first. */
  #keep(row, key) {
    for (const [side, marked] of [["query", row], ["key", key]]) {
      const tokens = this.#sides[side].children;
      for (const token of tokens) token.tabIndex = -1;
      if (tokens.length) tokens[marked ?? 0].tabIndex = 0;
    }
  }

  reveal(row, key) {
    const token = row === null ? this.#sides.key.children[key] : this.#sides.query.children[row];
    token?.scrollIntoView({ block: "nearest" });
  }
}

function fill(column, tokens, side) {
  column.replaceChildren(...tokens.map((token, i) => tokenElement(token, i, side, tokens.length)));
}

/** strengths: [strength, text] of the tokens, in order; [] leaves them plain. */
function weighTokens(column, strengths, marked, classes) {
  const sign = classes === "signed";
  [...column.children].forEach((token, i) => {
    const [value, text] = strengths[i] ?? [0, ""];
    token.style.setProperty("--weight", Math.abs(value).toFixed(3));
    token.classList.toggle("negative", sign && value < 0);
    token.classList.toggle("marked", i === marked);
    token.setAttribute("aria-selected", i === marked);
    if (Math.abs(value) >= 0.08) token.dataset.value = text;
    else delete token.dataset.value;
    token.dataset.colour = classes;
  });
}

// ---- alignment ----------------------------------------------------------------------------------

class AlignmentView {
  #frame = document.getElementById("alignment");
  #sides = {
    key: document.getElementById("alignment-keys"),
    query: document.getElementById("alignment-queries"),
  };
  #drawing = document.getElementById("alignment-drawing");
  #picture = null;
  #kind = null;

  constructor(hooks) {
    listen(this.#frame, hooks);
  }

  show(picture) {
    const { kind } = picture;
    this.#picture = picture;
    if (this.#kind !== kind) {
      this.#kind = kind;
      const said = kind.predicted.length ? kind.predicted : kind.queryTokens;
      fill(this.#sides.key, kind.keyTokens, "key");
      fill(this.#sides.query, said, "query");
    }
    this.layout();
  }

  layout() {
    this.mark(this.#picture.marked?.row ?? null, this.#picture.marked?.key ?? null);
  }

  /** Every query's strongest key is a link; the other weights are faint. */
  mark(row, key) {
    this.#picture.marked = { row, key };
    const { head, part, rows, root, limit, measure } = this.#picture;
    const values = head.values(measure, part);
    const middles = (side) => {
      return [...this.#sides[side].children].map((token) => {
        return token.offsetLeft + token.offsetWidth / 2;
      });
    };
    const [above, below] = [middles("key"), middles("query")];
    const curve = (i, j) => {
      const middle = HEIGHT / 2;
      return `M${below[i]} ${HEIGHT}C${below[i]} ${middle} ${above[j]} ${middle} ${above[j]} 0`;
    };
    const soft = [];
    const links = [];
    for (let i = rows.first; i < rows.last; i++) {
      if (row !== null && i !== row) continue;
      const [best, ...others] = head.strongest(i, row === null ? EACH : head.keys, measure, part);
      if (best !== undefined && (key === null || best === key)) links.push([i, best]);
      for (const j of [best, ...others]) {
        if (j === undefined || (key !== null && j !== key)) continue;
        soft.push([i, j, strength(values[i * head.keys + j], limit, root)]);
      }
    }
    const widths = Object.values(this.#sides).map((side) => side.offsetWidth);
    this.#drawing.setAttribute("width", Math.max(...widths));
    this.#drawing.setAttribute("height", HEIGHT);
    const classes = measure === "logit" ? "signed" : part;
    const hard = pathOf(`${part} link`, 1, links.map(([i, j]) => curve(i, j)).join(""));
    this.#drawing.replaceChildren(...bundle(soft, curve, `${classes} soft`), hard);
    const of = (number) => (number === null ? [] : [number]);
    this.#highlight("query", [...of(row), ...(key === null ? [] : links.map(([i]) => i))]);
    this.#highlight("key", [...of(key), ...(row === null ? [] : links.map(([, j]) => j))]);
    [...this.#sides.query.children].forEach((token, i) => {
      token.classList.toggle("later", i >= rows.last);
    });
  }

  #highlight(side, numbers) {
    [...this.#sides[side].children].forEach((token, i) => {
      token.classList.toggle("marked", numbers.includes(i));
      token.setAttribute("aria-selected", numbers.includes(i));
      token.tabIndex = i === (numbers[0] ?? 0) ? 0 : -1;
    });
  }

  reveal(row, key) {
    const token = row === null ? this.#sides.key.children[key] : this.#sides.query.children[row];
    token?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
