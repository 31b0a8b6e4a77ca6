/** What every page of Onward does: messages, files in and out, and staying usable without a network. */

/** @param {string} id @returns {any} */
export function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element '${id}'`);
  return found;
}

/** Show what went wrong; an empty text takes it away. @param {unknown} problem */
export function complain(problem) {
  const box = element("problem");
  const text = problem instanceof Error ? problem.message : String(problem ?? "");
  box.textContent = text;
  box.hidden = !text;
  if (text) box.scrollIntoView({ block: "nearest" });
}

/** A handler that shows what goes wrong in it. @param {(event: any) => any} work */
export function careful(work) {
  return async (/** @type {any} */ event) => {
    complain("");
    try {
      await work(event);
    } catch (error) {
      complain(error);
    }
  };
}

/** Let the user save some bytes. @param {Uint8Array} bytes @param {string} name */
export function offerDownload(bytes, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([/** @type {any} */ (bytes)]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Keep the site's files in the browser, where it allows that. */
export async function stayUsableOffline() {
  if (!("serviceWorker" in navigator) || !window.isSecureContext) return;
  try {
    await navigator.serviceWorker.register("service-worker.js");
    await navigator.serviceWorker.ready;
    document.documentElement.dataset.offline = "ready";
  } catch {
    // a page works without it, only not without a network
  }
}

/** @param {number} share */
export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}
