/** A pad to draw on with mouse, finger, pen or keyboard; gives strokes of points between 0 and 1. */
const STEP = 0.04;

export class Pad {
  /** @param {HTMLCanvasElement} canvas @param {{onChange: () => void, onDigit: (digit: number) => void}} listeners */
  constructor(canvas, { onChange, onDigit }) {
    this._canvas = canvas;
    this._onChange = onChange;
    this._onDigit = onDigit;
    /** @type {[number, number][][]} */
    this.strokes = [];
    this._pen = { x: 0.5, y: 0.5, down: false, shown: false };
    this._drawing = false;
    canvas.addEventListener("pointerdown", (event) => this._start(event));
    canvas.addEventListener("pointermove", (event) => this._move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (this._drawing = false));
    canvas.addEventListener("keydown", (event) => this._key(event));
    canvas.addEventListener("blur", () => this._showPen(false));
    this._render();
  }

  clear() {
    this.strokes = [];
    this._drawing = false;
    this._pen.down = false;
    this._changed();
  }

  _start(event) {
    event.preventDefault();
    this._canvas.focus({ preventScroll: true });
    this._canvas.setPointerCapture(event.pointerId);
    this._drawing = true;
    this._pen.shown = false;
    this.strokes.push([this._point(event)]);
    this._changed();
  }

  _move(event) {
    if (!this._drawing) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const each of events.length ? events : [event]) this.strokes.at(-1)?.push(this._point(each));
    this._changed();
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };
    const pen = this._pen;
    if (moves[event.key]) {
      const [dx, dy] = moves[event.key];
      pen.x = Math.max(0, Math.min(1, pen.x + dx));
      pen.y = Math.max(0, Math.min(1, pen.y + dy));
      if (pen.down) this.strokes.at(-1)?.push([pen.x, pen.y]);
    } else if (event.key === " ") {
      pen.down = !pen.down;
      if (pen.down) this.strokes.push([[pen.x, pen.y]]);
    } else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else if (/^\d$/.test(event.key)) this._onDigit(Number(event.key));
    else return;
    event.preventDefault();
    pen.shown = true;
    this._changed();
  }

  _showPen(shown) {
    this._pen.shown = shown;
    this._render();
  }

  /** @returns {[number, number]} */
  _point(event) {
    const box = this._canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  _changed() {
    this._render();
    this._onChange();
  }

  _render() {
    const { width, height } = this._canvas;
    const context = /** @type {CanvasRenderingContext2D} */ (this._canvas.getContext("2d"));
    context.clearRect(0, 0, width, height);
    context.strokeStyle = "#eceae3";
    context.lineWidth = 2;
    context.strokeRect(width * 0.2, height * 0.1, width * 0.6, height * 0.8);
    Object.assign(context, { strokeStyle: "#1c1b19", lineWidth: width * 0.06, lineCap: "round", lineJoin: "round" });
    for (const stroke of this.strokes) {
      context.beginPath();
      context.moveTo(stroke[0][0] * width, stroke[0][1] * height);
      for (const [x, y] of stroke.length > 1 ? stroke.slice(1) : stroke) context.lineTo(x * width, y * height);
      context.stroke();
    }
    if (this._pen.shown) {
      Object.assign(context, { strokeStyle: "#0b5cad", lineWidth: this._pen.down ? 10 : 4 });
      context.beginPath();
      context.arc(this._pen.x * width, this._pen.y * height, 16, 0, 2 * Math.PI);
      context.stroke();
    }
  }
}
