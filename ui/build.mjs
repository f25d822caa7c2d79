// Builds the page into src/etude/ui/static/, or with --tests the tests of its pure functions into .tests/.

import { build } from "esbuild";
import { copyFile, readdir } from "node:fs/promises";

const STATIC = "../src/etude/ui/static";

if (process.argv.includes("--tests")) {
  const tests = (await readdir("tests")).filter((name) => name.endsWith(".test.ts")).map((name) => `tests/${name}`);
  await build({ entryPoints: tests, bundle: true, platform: "node", format: "esm", outdir: ".tests", outExtension: { ".js": ".mjs" } });
} else {
  await build({
    entryPoints: { app: "src/main.tsx" },
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    outdir: STATIC,
  });
  await copyFile("src/index.html", `${STATIC}/index.html`);
}
