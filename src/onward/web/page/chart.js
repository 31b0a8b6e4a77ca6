/** A loss curve in SVG: two series over steps, drawn at most once a frame. */

const HEIGHT = 220; // pixels, whatever the width: text keeps its size on a phone
const MARGIN = { left: 52, right: 10, top: 10, bottom: 28 };
const POINTS = 320;

export class LossChart {
  /** @param {SVGSVGElement} svg @param {{what: string, names: [string, string]}} options for the description */
  constructor(svg, { what, names }) {
    this._svg = svg;
    this._what = what;
    this._names = names;
    this._waiting = false;
    svg.setAttribute("height", String(HEIGHT));
    svg.setAttribute("role", "img");
    svg.classList.add("chart");
    this.clear();
    new ResizeObserver(() => this._draw()).observe(svg);
  }

  /** @param {number} series 0 or 1 @param {number} x @param {number} y */
  add(series, x, y) {
    if (Number.isFinite(y)) this._series[series].push([x, y]);
    this._draw();
  }

  clear() {
    /** @type {[number, number][][]} */
    this._series = [[], []];
    this._draw();
  }

  _draw() {
    if (this._waiting) return;
    this._waiting = true;
    requestAnimationFrame(() => {
      this._waiting = false;
      this._render();
    });
  }

  _render() {
    const width = Math.max(200, this._svg.clientWidth);
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const all = this._series.flat();
    const right = Math.max(10, ...all.map(([x]) => x));
    const top = niceCeiling(Math.max(0.1, ...all.map(([, y]) => y)));
    const x = (value) => MARGIN.left + (value / right) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const parts = [];
    for (let tick = 0; tick <= 4; tick++) {
      const value = (top * tick) / 4;
      parts.push(`<line class="grid" x1="${MARGIN.left}" x2="${width - MARGIN.right}" y1="${y(value)}" y2="${y(value)}"/>`);
      parts.push(`<text x="${MARGIN.left - 8}" y="${y(value) + 4}" text-anchor="end">${+value.toPrecision(3)}</text>`);
    }
    parts.push(`<text x="${MARGIN.left}" y="${HEIGHT - 8}">0</text>`);
    parts.push(`<text x="${width - MARGIN.right}" y="${HEIGHT - 8}" text-anchor="end">${right} steps</text>`);
    this._series.forEach((points, index) => {
      const line = thin(points).map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
      parts.push(`<polyline class="series${index ? " second" : ""}" points="${line}"/>`);
    });
    this._svg.innerHTML = parts.join("");
    const said = this._series.flatMap((points, index) => {
      const last = points.at(-1);
      return last ? [`${this._names[index]} ${last[1].toPrecision(3)} at step ${last[0]}`] : [];
    });
    this._svg.setAttribute("aria-label", `${this._what}: ${said.join(", ") || "no steps yet"}`);
  }
}

/** Means over equal shares of the points, where there are more than can be seen. @param {[number, number][]} points */
function thin(points) {
  if (points.length <= POINTS) return points;
  const made = [];
  for (let i = 0; i < POINTS; i++) {
    const part = points.slice(Math.floor((i * points.length) / POINTS), Math.floor(((i + 1) * points.length) / POINTS));
    made.push([part[part.length - 1][0], part.reduce((sum, [, value]) => sum + value, 0) / part.length]);
  }
  return made;
}

/** @param {number} value */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}
