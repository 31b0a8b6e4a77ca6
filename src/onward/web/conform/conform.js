/** Runs the models that `onward conform` sends, on onnxruntime-web, and sends back what comes out. */
const status = document.getElementById("status");
const { provider } = await (await fetch("settings.json")).json();
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array, bool: Uint8Array,
};

/** A message as `onward.runtime.separate_process` packs it: a size, JSON, a model, arrays. */
function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let start = 4 + size;
  const model = new Uint8Array(buffer.slice(start, start + head.model));
  start += head.model;
  const arrays = head.arrays.map(([name, type, dims]) => {
    const Kind = ARRAYS[type];
    const length = dims.reduce((a, b) => a * b, 1) * Kind.BYTES_PER_ELEMENT;
    const data = new Kind(buffer.slice(start, start + length));
    start += length;
    return { name, type, dims, data };
  });
  return { model, arrays };
}

/** @param {object} head @param {{name: string, type: string, dims: readonly number[], data: any}[]} arrays */
function pack(head, arrays = []) {
  const total = arrays.reduce((sum, { data }) => sum + data.byteLength, 0);
  const listed = arrays.map(({ name, type, dims }) => [name, type, dims]);
  const text = new TextEncoder().encode(JSON.stringify({ ...head, model: 0, arrays: listed, total }));
  const size = new Uint8Array(4);
  new DataView(size.buffer).setUint32(0, text.length, true);
  return new Blob([size, text, ...arrays.map(({ data }) => data)]);
}

async function hello(ort) {
  const adapter = provider === "webgpu" ? await navigator.gpu?.requestAdapter() : null;
  if (provider === "webgpu" && !adapter) return { problem: "this browser offers no WebGPU" };
  const { vendor, architecture, device, description } = adapter?.info ?? {};
  return {
    browser: navigator.userAgent, "onnxruntime-web": ort.env.versions?.web ?? "",
    ...(adapter ? { adapter: [vendor, architecture, device, description].filter(Boolean).join(" ") } : {}),
  };
}

async function run(ort, { model, arrays }) {
  const executionProviders = provider === "webgpu" ? [{ name: "webgpu", preferredLayout: "NCHW" }, "wasm"] : ["wasm"];
  const session = await ort.InferenceSession.create(model, { executionProviders, logSeverityLevel: 4 });
  try {
    const feeds = {};
    for (const { name, type, dims, data } of arrays) feeds[name] = new ort.Tensor(type, data, dims);
    const results = await session.run(feeds);
    return session.outputNames.map((name, index) => {
      const { type, dims, data } = results[name];
      return { name: String(index), type, dims, data };
    });
  } finally {
    await session.release();
  }
}

const ort = await import(`./lib/onnxruntime-web/ort.${provider}.min.mjs`);
ort.env.logLevel = "error";
let answer = pack({ hello: await hello(ort) });
for (let count = 0; ;) {
  const response = await fetch("next", { method: "POST", body: answer }).catch(() => null);
  if (!response || response.status === 410) break; // the program has what it needs
  answer = new Blob([]);
  if (response.status !== 200) continue; // nothing to do for now
  status.textContent = `model ${(count += 1)} …`;
  try {
    answer = pack({}, await run(ort, unpack(await response.arrayBuffer())));
  } catch (error) {
    answer = pack({ error: String(error.message ?? error) });
  }
}
status.textContent = "done: the report is where onward conform was started";
