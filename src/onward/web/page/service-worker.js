/**
 * Keeps the site's files, so that it works without a network; with one, the network's are used. Adds the headers
 * that let WebAssembly use threads, for hosts that do not send them.
 */
const KEPT = "onward-site";

self.addEventListener("install", (event) => {
  event.waitUntil((async () => {
    const about = await (await fetch("site.json", { cache: "no-cache" })).json();
    const cache = await caches.open(KEPT);
    await cache.addAll(["./", ...about.files.filter((name) => name !== "service-worker.js")]);
    await self.skipWaiting();
  })());
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET" || new URL(request.url).origin !== self.location.origin) return;
  event.respondWith(answer(request));
});

async function answer(request) {
  const cache = await caches.open(KEPT);
  let response;
  try {
    response = await fetch(request);
    if (response.ok) cache.put(request, response.clone()).catch(() => {});
  } catch (error) {
    response = await cache.match(request, { ignoreSearch: true });
    if (!response) throw error;
  }
  if (response.status === 0 || response.type === "opaqueredirect") return response;
  const headers = new Headers(response.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}
