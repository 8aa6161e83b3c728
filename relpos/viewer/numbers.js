// SPDX-License-Identifier: Apache-2.0
//
// numbers.js: the maps of a sentence, unpacked, and what follows from them. packing.py says how the
// numbers are written.

const HIDDEN = 65535;
const ONE = 65534; // a probability of 1

/** The 16-bit numbers of an array, from base64 of deflated planes: high bytes, then low ones. */
async function unpack(text) {
  const binary = atob(text);
  const deflated = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) deflated[i] = binary.charCodeAt(i);
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 2;
  const numbers = new Uint16Array(count);
  for (let i = 0; i < count; i++) numbers[i] = (planes[i] << 8) | planes[count + i];
  return numbers;
}

/** One kind of attention of one sentence: every layer and head of it. */
class Kind {
  static async open(name, raw, sentence) {
    const kind = new Kind();
    kind.name = name;
    [, , kind.rows, kind.keys] = raw.shape;
    kind.layers = raw.layers;
    kind.heads = raw.heads;
    kind.entropy = raw.entropy;
    kind.distance = raw.distance;
    kind.queryTokens = name === "encoder" ? sentence.source : sentence.target;
    kind.keyTokens = name === "decoder" ? sentence.target : sentence.source;
    kind.predicted = name === "encoder" ? [] : sentence.predicted;
    kind.probabilities = await unpack(raw.probabilities);
    for (const part of ["content", "relation", "logits"]) {
      if (!raw[part]) continue;
      const numbers = new Int16Array((await unpack(raw[part].data)).buffer);
      kind[part] = { numbers, steps: raw[part].steps };
    }
    return kind;
  }

  get hasLogits() {
    return Boolean(this.content || this.logits);
  }

  get hasRelation() {
    return Boolean(this.relation);
  }

  head(layer, head) {
    return new Head(this, layer, head);
  }
}

/** One head: maps of (rows, keys), made when they are asked for and kept. */
class Head {
  #kind;
  #layer;
  #head;
  #made = new Map();
  #base;

  constructor(kind, layer, head) {
    this.#kind = kind;
    this.#layer = layer;
    this.#head = head;
    this.rows = kind.rows;
    this.keys = kind.keys;
    this.size = kind.rows * kind.keys;
    this.#base = (layer * kind.heads.length + head) * this.size;
    this.hidden = new Uint8Array(this.size);
    for (let i = 0; i < this.size; i++) {
      this.hidden[i] = kind.probabilities[this.#base + i] === HIDDEN ? 1 : 0;
    }
  }

  /** measure: "probability" or "logit". part: "both", "content" or "relation". */
  values(measure, part) {
    const name = `${measure} ${part}`;
    if (!this.#made.has(name)) {
      const make = measure === "logit" ? () => this.#logit(part) : () => this.#probability(part);
      this.#made.set(name, make());
    }
    return this.#made.get(name);
  }

  #probability(part) {
    if (part !== "both") return this.#softmax(this.values("logit", part));
    const packed = this.#kind.probabilities;
    const values = new Float32Array(this.size);
    for (let i = 0; i < this.size; i++) {
      if (!this.hidden[i]) values[i] = packed[this.#base + i] / ONE;
    }
    return values;
  }

  #logit(part) {
    const kind = this.#kind;
    if (part !== "both") return this.#unpacked(kind[part]);
    if (kind.logits) return this.#unpacked(kind.logits);
    const values = this.#unpacked(kind.content);
    if (kind.relation) {
      const relation = this.values("logit", "relation");
      for (let i = 0; i < this.size; i++) values[i] += relation[i];
    }
    return values;
  }

  #unpacked({ numbers, steps }) {
    const step = steps[this.#layer][this.#head];
    const values = new Float32Array(this.size);
    for (let i = 0; i < this.size; i++) values[i] = numbers[this.#base + i] * step;
    return values;
  }

  /** Of every row, over the keys it sees. */
  #softmax(logits) {
    const values = new Float32Array(this.size);
    for (let row = 0; row < this.size; row += this.keys) {
      let largest = -Infinity;
      let sum = 0;
      for (let i = row; i < row + this.keys; i++) {
        if (!this.hidden[i]) largest = Math.max(largest, logits[i]);
      }
      for (let i = row; i < row + this.keys; i++) {
        if (!this.hidden[i]) sum += values[i] = Math.exp(logits[i] - largest);
      }
      for (let i = row; i < row + this.keys; i++) values[i] /= sum || 1;
    }
    return values;
  }

  /** What stands at the end of the colour scale: the same for content, relation and both, so that
   * they compare. */
  limit(measure) {
    const name = `limit ${measure}`;
    if (!this.#made.has(name)) {
      let limit = 0;
      const parts = this.#kind.hasRelation ? ["both", "content", "relation"] : ["both"];
      for (const part of parts) {
        for (const value of this.values(measure, part)) limit = Math.max(limit, Math.abs(value));
      }
      this.#made.set(name, limit || 1);
    }
    return this.#made.get(name);
  }

  /** The share of relation in the spread of the logits: var(relation) / (var(content) +
   * var(relation)), variances over the keys a query sees, averaged over queries. A constant along
   * a row changes nothing, and does not count. */
  relationShare() {
    if (!this.#kind.hasRelation) return null;
    const content = this.#spread(this.values("logit", "content"));
    const relation = this.#spread(this.values("logit", "relation"));
    return content + relation > 0 ? relation / (content + relation) : null;
  }

  #spread(logits) {
    let total = 0;
    for (let row = 0; row < this.size; row += this.keys) {
      let count = 0;
      let sum = 0;
      let square = 0;
      for (let i = row; i < row + this.keys; i++) {
        if (this.hidden[i]) continue;
        count++;
        sum += logits[i];
        square += logits[i] * logits[i];
      }
      if (count > 1) total += Math.max(0, square / count - (sum / count) ** 2);
    }
    return total;
  }

  /** Mean over the queries of the probability at key - query, from -(rows - 1) to keys - 1. */
  mass(part) {
    const values = this.values("probability", part);
    const mass = new Float64Array(this.rows + this.keys - 1);
    for (let i = 0, at = 0; i < this.rows; i++) {
      for (let j = 0; j < this.keys; j++, at++) mass[j - i + this.rows - 1] += values[at] / this.rows;
    }
    return mass;
  }

  /** The keys of a row, those with most first. */
  strongest(row, count, measure = "probability", part = "both") {
    const values = this.values(measure, part).subarray(row * this.keys, (row + 1) * this.keys);
    const seen = [];
    for (let j = 0; j < this.keys; j++) if (!this.hidden[row * this.keys + j]) seen.push(j);
    return seen.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, count);
  }
}
