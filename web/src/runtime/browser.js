/** The onnxruntime of a browser: onnxruntime-web, on WebAssembly or WebGPU. */

/** @param {import("./host.js").RuntimeOptions} options */
export async function loadWeb({ provider = "wasm", threads, wasmPaths }) {
  if (provider !== "wasm" && provider !== "webgpu") {
    throw new RangeError(`provider is '${provider}': choose wasm or webgpu`);
  }
  const configure = (/** @type {any} */ ort) => {
    ort.env.logLevel = "error";
    if (threads !== undefined) ort.env.wasm.numThreads = threads;
    if (wasmPaths !== undefined) ort.env.wasm.wasmPaths = wasmPaths;
    return ort;
  };
  const ort = configure(await import("onnxruntime-web/wasm"));
  if (provider === "wasm") return { ort };
  const adapter = await /** @type {any} */ (navigator).gpu?.requestAdapter().catch(() => null);
  if (!adapter) return { ort, fallback: "this browser offers no WebGPU" };
  try {
    return { ort, gpu: configure(await import("onnxruntime-web/webgpu")) };
  } catch {
    return { ort, fallback: "this page was made without WebGPU" };
  }
}
