// Puts script and style into one page, which the server embeds: crates/keel-server/assets/index.html.
import { build } from "esbuild";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";

const result = await build({
  entryPoints: ["src/main.ts"],
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  write: false,
});
const script = result.outputFiles[0].text.trim().replaceAll("</script", "<\\/script");
const style = readFileSync("src/style.css", "utf8").trim();
const page = readFileSync("src/index.html", "utf8")
  .replace("/* style */", () => style)
  .replace("/* script */", () => script);
mkdirSync("../crates/keel-server/assets", { recursive: true });
writeFileSync("../crates/keel-server/assets/index.html", page);
console.log(`${page.length} bytes`);
