// Drives one headless Chromium for the tests: a command per line of JSON in, an answer per line out.
import { createInterface } from "node:readline";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { createRequire } from "node:module";

const [modules, executablePath] = process.argv.slice(2);
const { chromium } = createRequire(path.join(modules, "x.js"))("playwright-core");
// in software, for machines without a graphics card
const WEBGPU = [
  "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist",
];
const profile = mkdtempSync(path.join(tmpdir(), "onward-chromium-"));
const context = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  acceptDownloads: true,
  viewport: { width: 1100, height: 900 },
  args: [
    "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--js-flags=--expose-gc", "--enable-precise-memory-info",
    ...WEBGPU,
  ],
});
let page = context.pages()[0];
let problems = [];
page.setDefaultTimeout(20000);
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (line) => line.type() === "error" && problems.push(line.text()));

const commands = {
  goto: async ({ url }) => void (problems = [], await page.goto(url)),
  evaluate: ({ source, argument }) => page.evaluate(`(${source})(${JSON.stringify(argument ?? null)})`),
  click: ({ selector }) => page.click(selector),
  fill: ({ selector, value }) => page.fill(selector, value),
  press: ({ selector, key }) => page.press(selector, key),
  upload: ({ selector, path: file }) => page.setInputFiles(selector, file),
  // polled from here: waitForFunction evaluates its text in the page, which the content security policy forbids
  wait: async ({ source, timeout }) => {
    const end = Date.now() + (timeout ?? 20000);
    while (!(await page.evaluate(source))) {
      if (Date.now() > end) throw new Error(`timeout waiting for ${source}`);
      await new Promise((done) => setTimeout(done, 50));
    }
    return true;
  },
  text: ({ selector }) => page.innerText(selector),
  download: async ({ selector, path: target }) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.click(selector)]);
    await download.saveAs(target);
    return download.suggestedFilename();
  },
  draw: async ({ selector, points }) => {
    await page.locator(selector).scrollIntoViewIfNeeded();
    const box = await page.locator(selector).boundingBox();
    const at = ([x, y]) => [box.x + x * box.width, box.y + y * box.height];
    await page.mouse.move(...at(points[0]));
    await page.mouse.down();
    for (const point of points.slice(1)) await page.mouse.move(...at(point), { steps: 4 });
    await page.mouse.up();
  },
  viewport: (size) => page.setViewportSize(size),
  screenshot: ({ path: file, full }) => page.screenshot({ path: file, fullPage: full ?? true }).then(() => null),
  problems: () => problems,
};

process.stdout.write(`${JSON.stringify({ ready: context.browser()?.version() ?? "chromium" })}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[command](given)) ?? null };
  } catch (error) {
    answer = { error: String(error.message ?? error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await context.close();
rmSync(profile, { recursive: true, force: true });
