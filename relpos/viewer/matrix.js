// SPDX-License-Identifier: Apache-2.0
//
// matrix.js: the matrix view. One canvas, as large as what is seen of it, draws the part that the
// scroll position says, with the tokens along its edges; so a long sentence costs no more to draw.

const LABEL = { font: "12px system-ui, sans-serif", line: 14, most: 108, gap: 8 };
const CELL = { least: 4, most: 44, gapFrom: 9 };
const EDGE = 10; // free space right of the map and below it

class MatrixView {
  #frame = document.getElementById("matrix");
  #space = document.getElementById("matrix-space");
  #canvas = document.getElementById("matrix-canvas");
  #place = null; // where everything is
  #picture = null; // what is shown, and its image
  #hooks;

  /** hooks: hover(row, key, event) as the pointer moves, pick(row, key) at a click. */
  constructor(hooks) {
    this.#hooks = hooks;
    this.#frame.addEventListener("scroll", () => this.#draw());
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event, "hover"));
    this.#canvas.addEventListener("pointerleave", () => hooks.hover(null, null, null));
    this.#canvas.addEventListener("click", (event) => this.#point(event, "pick"));
  }

  #point(event, hook) {
    const { left, top, cell, x, y } = this.#place;
    const box = this.#canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - x - left + this.#frame.scrollLeft) / cell);
    const row = Math.floor((event.clientY - box.top - y - top + this.#frame.scrollTop) / cell);
    const inLabels = event.clientX - box.left < x + left || event.clientY - box.top < y + top;
    const { head, rows } = this.#picture;
    const inside = row >= rows.first && row < rows.last && key >= 0 && key < head.keys;
    if (inside && !inLabels) this.#hooks[hook](row, key, event);
    else if (hook === "hover") this.#hooks.hover(null, null, null);
  }

  /** picture: head, kind, measure, part, theme, root, rows, limit, zoom, and label, for readers of
   * the screen. */
  show(picture) {
    this.#picture = picture;
    picture.image = imageOf(picture.head, picture);
    this.#canvas.setAttribute("aria-label", picture.label);
    this.layout();
  }

  /** Gives everything its place in the room there is. */
  layout() {
    const { head, kind, zoom } = this.#picture;
    const width = this.#frame.clientWidth;
    const below = window.innerHeight - this.#frame.getBoundingClientRect().top - window.scrollY - 12;
    const height = below > 420 ? Math.min(below, 860) : Math.max(340, window.innerHeight * 0.74);
    const context = this.#canvas.getContext("2d");
    context.font = LABEL.font;
    const most = Math.min(LABEL.most, width * 0.24);
    const widest = (tokens) => {
      const widths = tokens.map((token) => context.measureText(shown(token)).width);
      return Math.ceil(Math.min(Math.max(...widths), most)) + LABEL.gap + 4;
    };
    const left = widest(kind.queryTokens);
    const top = widest(kind.keyTokens);
    const fitting = Math.min(
      (width - left - EDGE) / head.keys,
      (height - top - EDGE) / head.rows,
    );
    const fit = Math.max(CELL.least, Math.min(CELL.most, fitting));
    const cell = zoom === 1 && fit >= CELL.gapFrom ? Math.floor(fit) : fit * zoom;
    const full = [left + head.keys * cell + EDGE, top + head.rows * cell + EDGE];
    const seen = [Math.min(width, full[0]), Math.min(height, full[1])];
    const x = Math.max(0, Math.floor((width - full[0]) / 2));
    this.#place = { left, top, cell, full, seen, x, y: 0, width, most };
    this.#space.style.width = `${Math.max(width, full[0])}px`;
    this.#space.style.height = `${full[1]}px`;
    this.#frame.style.height = `${seen[1]}px`;
    this.#draw();
  }

  /** Marks a row and a key, either of which may be null, and keeps a mark at a step's row. */
  mark(row, key) {
    this.#picture.marked = { row, key };
    this.#draw();
  }

  /** Scrolls so that a cell is seen. */
  reveal(row, key) {
    const { left, top, cell, seen } = this.#place;
    const along = [
      ["scrollLeft", key, seen[0] - left - EDGE],
      ["scrollTop", row, seen[1] - top - EDGE],
    ];
    for (const [scroll, at, room] of along) {
      if (at === null) continue;
      if (at * cell < this.#frame[scroll]) this.#frame[scroll] = at * cell;
      const end = (at + 1) * cell - room;
      if (end > this.#frame[scroll]) this.#frame[scroll] = end;
    }
  }

  #draw() {
    const { head, image, rows, step } = this.#picture;
    const { left, top, cell, seen, x, width } = this.#place;
    const context = prepared(this.#canvas, width, seen[1]);
    context.translate(x, 0);
    const scroll = [this.#frame.scrollLeft, this.#frame.scrollTop];
    context.save();
    context.beginPath();
    context.rect(left - 2, top - 2, seen[0] - left + 2, seen[1] - top + 2);
    context.clip();
    context.translate(left - scroll[0], top - scroll[1]);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, head.keys * cell, head.rows * cell);
    if (cell >= CELL.gapFrom) this.#gaps(context, rows);
    if (step) {
      context.strokeStyle = colourOf("--accent");
      context.lineWidth = 2;
      context.strokeRect(-1, (step - 1) * cell, head.keys * cell + 2, cell);
    }
    this.#markCell(context);
    context.restore();
    this.#labels(context, scroll);
  }

  #gaps(context, rows) {
    const { head } = this.#picture;
    const { cell } = this.#place;
    context.strokeStyle = colourOf("--paper");
    context.lineWidth = 1;
    context.beginPath();
    for (let j = 0; j <= head.keys; j++) {
      context.moveTo(j * cell, rows.first * cell);
      context.lineTo(j * cell, rows.last * cell);
    }
    for (let i = rows.first; i <= rows.last; i++) {
      context.moveTo(0, i * cell);
      context.lineTo(head.keys * cell, i * cell);
    }
    context.stroke();
  }

  #markCell(context) {
    const { row, key } = this.#picture.marked ?? { row: null, key: null };
    const { cell } = this.#place;
    if (row === null || key === null) return;
    context.lineWidth = 2;
    context.strokeStyle = colourOf("--paper");
    context.strokeRect(key * cell - 2, row * cell - 2, cell + 4, cell + 4);
    context.strokeStyle = colourOf("--ink");
    context.strokeRect(key * cell, row * cell, cell, cell);
  }

  #labels(context, scroll) {
    const { kind, marked, rows, step } = this.#picture;
    const { left, top, seen } = this.#place;
    const row = marked?.row ?? (step ? step - 1 : null);
    context.textBaseline = "middle";
    context.save(); // the queries, down the left edge
    context.beginPath();
    context.rect(0, top - 2, left, seen[1] - top + 2);
    context.clip();
    context.translate(left - LABEL.gap, top - scroll[1]);
    const last = Math.max(rows.last, 0);
    this.#along(context, kind.queryTokens.slice(0, last), row, false);
    context.restore();
    context.save(); // the keys, upwards from the top edge
    context.beginPath();
    context.rect(left - 2, 0, seen[0] - left + 2, top);
    context.clip();
    context.translate(left - scroll[0], top - LABEL.gap);
    this.#along(context, kind.keyTokens, marked?.key ?? null, true);
    context.restore();
  }

  /** Tokens along an edge; only every few where they are closer than a line of text. The marked one
   * is always there, and its neighbours make room. */
  #along(context, tokens, marked, upright) {
    const { cell, most } = this.#place;
    const every = Math.max(1, Math.ceil(LABEL.line / cell));
    const near = marked === null ? -Infinity : LABEL.line / cell;
    context.textAlign = upright ? "left" : "right";
    const [ink, faint] = [colourOf("--ink"), colourOf("--faint")];
    tokens.forEach((token, i) => {
      if (i !== marked && (i % every || Math.abs(i - marked) < near)) return;
      context.save();
      context.translate(upright ? (i + 0.5) * cell : 0, upright ? 0 : (i + 0.5) * cell);
      if (upright) context.rotate(-Math.PI / 2);
      context.font = i === marked ? `600 ${LABEL.font}` : LABEL.font;
      context.fillStyle = i === marked ? ink : faint;
      context.fillText(shortened(context, shown(token), most), 0, 0);
      context.restore();
    });
  }
}

/** A text that is no wider than `most`, cut at whole letters. */
function shortened(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  const letters = [...text];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > most) {
    letters.pop();
  }
  return `${letters.join("")}…`;
}
