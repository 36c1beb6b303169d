// Imports a module of the page into Node, for tests of what needs no browser.
import { build } from "esbuild";

export async function load(path) {
  const result = await build({
    entryPoints: [new URL(`../../src/${path}`, import.meta.url).pathname],
    bundle: true,
    format: "esm",
    platform: "neutral",
    write: false,
  });
  return import(`data:text/javascript;base64,${Buffer.from(result.outputFiles[0].contents).toString("base64")}`);
}
