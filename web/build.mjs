// Builds the page into the files that the server embeds: crates/keel-server/assets/page.
// Another folder may be named, so that CI can compare a fresh build with the committed one.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const folder = process.argv[2] ?? "../crates/keel-server/assets/page";
/** Bytes of all files together, uncompressed. */
const LIMIT_BYTES = 1_000_000;

const result = await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: "out",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022", "chrome123", "firefox128", "safari17.5"],
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".woff2": "dataurl" },
  legalComments: "none",
  charset: "utf8",
  write: false,
});

const files = new Map([["icon.svg", readFileSync("src/icon.svg", "utf8")]]);
for (const output of result.outputFiles) files.set(output.path.split(/[\\/]/).pop(), output.text);

// A name with the content's hash may be cached for good.
let html = readFileSync("src/index.html", "utf8");
for (const [name, text] of files) {
  const hash = createHash("sha256").update(text).digest("hex").slice(0, 12);
  html = html.replace(`{{${name}}}`, hash);
}
files.set("index.html", html);

files.set("licences.txt", licences());

/** The notices of the libraries that are part of the page, which their licences ask for. */
function licences() {
  const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
  const notices = Object.keys(dependencies).map((name) => {
    const at = join("node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(at, "package.json"), "utf8"));
    const file = readdirSync(at).find((each) => /^licen[cs]e(\.(md|txt))?$/i.test(each));
    if (!file) throw new Error(`${name} has no licence file`);
    return `${name} ${version} (${license})\n\n${readFileSync(join(at, file), "utf8").trim()}\n`;
  });
  return `Libraries in the page of keel serve.\n\n${notices.join(`\n${"=".repeat(80)}\n\n`)}`;
}

mkdirSync(folder, { recursive: true });
let total = 0;
let compressed = 0;
for (const [name, text] of files) {
  writeFileSync(join(folder, name), text);
  const bytes = Buffer.byteLength(text);
  total += bytes;
  compressed += gzipSync(text, { level: 9 }).length;
  console.log(`${name.padEnd(12)} ${String(bytes).padStart(8)} bytes`);
}
console.log(`${"together".padEnd(12)} ${String(total).padStart(8)} bytes, ${compressed} compressed`);
if (total > LIMIT_BYTES) {
  console.error(`the page is larger than ${LIMIT_BYTES} bytes`);
  process.exit(1);
}
