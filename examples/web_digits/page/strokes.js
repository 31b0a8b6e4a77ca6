/**
 * From strokes to the 8×8 image that the model knows: scaled to fill 32×32 dots as the data set's makers did, drawn
 * with a pen of their width, and counted in blocks of 4×4.
 */
const SIZE = 32;
const PEN = 2.7;
const WIDEST = 27;

/**
 * @param {[number, number][][]} strokes points of any scale
 * @param {{turn?: number, slant?: number, pen?: number, stretch?: number}} [change] a small change of hand
 * @returns {Float32Array} 64 numbers of 0 to 1
 */
export function toImage(strokes, { turn = 0, slant = 0, pen = PEN, stretch = 1 } = {}) {
  const [cos, sin] = [Math.cos(turn), Math.sin(turn)];
  const moved = strokes.map((stroke) => stroke.map(([x, y]) => {
    const leaning = (x + slant * y) * stretch;
    return /** @type {[number, number]} */ ([cos * leaning - sin * y, sin * leaning + cos * y]);
  }));
  const image = new Float32Array(64);
  const points = moved.flat();
  if (!points.length) return image;
  const [left, right] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
  const [top, bottom] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
  const scale = Math.min((SIZE - 2 * pen) / (bottom - top || 1e-9), (WIDEST - 2 * pen) / (right - left || 1e-9), 1e6);
  const place = ([x, y]) => [
    SIZE / 2 + (x - (left + right) / 2) * (right - left || bottom - top ? scale : 0),
    SIZE / 2 + (y - (top + bottom) / 2) * (right - left || bottom - top ? scale : 0),
  ];
  for (const stroke of moved) {
    const placed = stroke.map(place);
    if (placed.length === 1) placed.push(placed[0]);
    for (let i = 1; i < placed.length; i++) ink(image, placed[i - 1], placed[i], pen);
  }
  return image.map((bits) => bitCount(bits) / 16);
}

/** Mark the dots within reach of a line; each block keeps its 16 dots as bits. */
function ink(image, [x0, y0], [x1, y1], pen) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const length = dx * dx + dy * dy;
  for (let y = Math.max(0, Math.floor(Math.min(y0, y1) - pen)); y < Math.min(SIZE, Math.max(y0, y1) + pen); y++) {
    for (let x = Math.max(0, Math.floor(Math.min(x0, x1) - pen)); x < Math.min(SIZE, Math.max(x0, x1) + pen); x++) {
      const [px, py] = [x + 0.5 - x0, y + 0.5 - y0];
      const along = length ? Math.max(0, Math.min(1, (px * dx + py * dy) / length)) : 0;
      const distance = (px - along * dx) ** 2 + (py - along * dy) ** 2;
      if (distance > pen * pen) continue;
      const block = (y >> 2) * 8 + (x >> 2);
      image[block] |= 1 << ((y & 3) * 4 + (x & 3)); // 16 bits are exact in a float
    }
  }
}

function bitCount(bits) {
  let count = 0;
  for (let rest = bits; rest; rest >>= 1) count += rest & 1;
  return count;
}
