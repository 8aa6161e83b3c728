// SPDX-License-Identifier: Apache-2.0
//
// colours.js: numbers as colours and as text. Both maps grow steadily in lightness and go from blue
// to white or to orange, which every kind of colour vision tells apart.

const STOPS = {
  light: {
    sequential: ["#ebf0f6", "#cadcec", "#93bfde", "#4c93c6", "#1f64a3", "#0c3a70", "#08203f"],
    diverging: ["#0c3f7d", "#3f86c1", "#a5cbe6", "#efefed", "#f4bf8f", "#d9762b", "#8a3a08"],
  },
  dark: {
    sequential: ["#1d2430", "#1b3656", "#1d4f80", "#2f78b5", "#5ea6da", "#a6d2f0", "#f2faff"],
    diverging: ["#a8d4f5", "#4d97d6", "#23507f", "#252a33", "#7d4a1e", "#d98236", "#fbd0a2"],
  },
};
const SHADES = 256;

/** SHADES colours, as 32-bit numbers that an ImageData holds. */
function ramp(stops) {
  const parts = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  const shades = new Uint32Array(SHADES);
  for (let i = 0; i < SHADES; i++) {
    const place = (i / (SHADES - 1)) * (stops.length - 1);
    const left = Math.min(Math.floor(place), stops.length - 2);
    const mix = [0, 1, 2].map((c) => {
      return Math.round(parts[left][c] + (place - left) * (parts[left + 1][c] - parts[left][c]));
    });
    shades[i] = pixel(mix);
  }
  return shades;
}

function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

const RAMPS = Object.fromEntries(
  Object.entries(STOPS).map(([theme, { sequential, diverging }]) => {
    return [theme, { probability: ramp(sequential), logit: ramp(diverging) }];
  }),
);

/** The colour of a style variable, as an ImageData holds it. */
function pixelOf(variable) {
  const text = colourOf(variable).slice(1);
  return pixel([0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
}

function colourOf(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

/** How strong a value is, from 0 to 1, with its sign. Root makes small ones easier to see. */
function strength(value, limit, root) {
  const share = Math.min(Math.abs(value) / limit, 1);
  return Math.sign(value) * (root ? Math.sqrt(share) : share);
}

function shade(shades, measure, value) {
  const place = measure === "logit" ? (value + 1) / 2 : value;
  return shades[Math.round(place * (SHADES - 1))];
}

/** A map as an image of one pixel a cell, or, where it would be larger than `most` pixels, of the
 * strongest of several cells. rows: from which to which it is shown. */
function imageOf(head, { measure, part, theme, root, rows, limit }, most = Infinity) {
  const { keys } = head;
  const pool = Math.max(1, Math.ceil(Math.max(head.rows, keys) / most));
  const [width, height] = [Math.ceil(keys / pool), Math.ceil(head.rows / pool)];
  const values = head.values(measure, part);
  const strongest = new Float32Array(width * height);
  const seen = new Uint8Array(width * height);
  for (let i = rows.first; i < rows.last; i++) {
    for (let j = 0, cell = i * keys; j < keys; j++, cell++) {
      if (head.hidden[cell]) continue;
      const to = Math.floor(i / pool) * width + Math.floor(j / pool);
      seen[to] = 1;
      if (Math.abs(values[cell]) > Math.abs(strongest[to])) strongest[to] = values[cell];
    }
  }
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = RAMPS[theme][measure];
  const hidden = pixelOf("--hidden");
  const last = Math.ceil(rows.last / pool) * width;
  for (let to = Math.floor(rows.first / pool) * width; to < last; to++) {
    pixels[to] = seen[to] ? shade(shades, measure, strength(strongest[to], limit, root)) : hidden;
  }
  const canvas = element("canvas", { width, height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** The colours of the scale from end to end, as it is used: evenly spaced values, not colours. */
function gradient({ measure, theme, limit, root }) {
  const colours = [];
  for (let i = 0; i <= 24; i++) {
    const value = measure === "logit" ? (i / 12 - 1) * limit : (i / 24) * limit;
    const number = shade(RAMPS[theme][measure], measure, strength(value, limit, root));
    colours.push(`rgb(${number & 255} ${(number >> 8) & 255} ${(number >> 16) & 255})`);
  }
  return `linear-gradient(to right, ${colours.join(", ")})`;
}

/** A canvas's context for drawing in style pixels, sharp on every screen. */
function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// ---- text ---------------------------------------------------------------------------------------

const BLANKS = { "": "∅", " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A token as it is shown: blank ones by a sign, and sentencepiece's heavy mark of a space by a
 * light one. */
function shown(token) {
  if (token.trim() !== "") return token.replaceAll("▁", "·");
  return [...token].map((letter) => BLANKS[letter] ?? "␣").join("") || BLANKS[""];
}

/** A sentence of tokens, as text. */
function joined(tokens) {
  const pieces = tokens.some((token) => token.includes("▁"));
  if (!pieces) return tokens.map(shown).join(" ");
  const words = tokens.filter((token) => !/^<\/?\w+>$/.test(token)); // no </s>
  return words.join("").replaceAll("▁", " ").trim();
}

/** A token inside a sentence; the isolates keep right-to-left ones from turning what is around. */
function quoted(token) {
  return `“\u2068${shown(token)}\u2069”`;
}

function exact(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4) return value.toExponential(1).replace("-", "−").replace("e-", "e−");
  return value.toFixed(size < 0.1 ? 4 : 3).replace("-", "−");
}

function signed(value) {
  return value > 0 ? `+${exact(value)}` : exact(value);
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
