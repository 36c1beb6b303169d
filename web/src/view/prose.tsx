// Markdown on the page.

import { Component, createRef } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { copyText } from "../text/copy";
import { type Block, blocksOf, elementsOf, plainBlock } from "../text/markdown";

/** A block keeps its elements as long as its text and links are the same: a reader's selection survives while the answer grows. */
class BlockView extends Component<{ block: Block }> {
  readonly #element = createRef<HTMLDivElement>();

  override shouldComponentUpdate(next: { block: Block }): boolean {
    const { source, token, links } = this.props.block;
    return next.block.source !== source || !next.block.token !== !token || next.block.links !== links;
  }

  override componentDidMount(): void {
    this.#fill();
  }

  override componentDidUpdate(): void {
    this.#fill();
  }

  #fill(): void {
    this.#element.current?.replaceChildren(elementsOf(this.props.block));
  }

  override render() {
    return <div ref={this.#element} class="block" />;
  }
}

/** Answers a click on the copy button of a code block. */
async function onClick(event: MouseEvent): Promise<void> {
  const button = (event.target as Element).closest<HTMLButtonElement>("[data-copy]");
  const code = button?.closest(".code-frame")?.querySelector("code");
  if (!button || !code) return;
  const copied = await copyText(code.textContent ?? "");
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Reading Markdown takes less than this, unless the text was made to take long. Then it is shown as it is. */
const READ_MS_MAX = 400;

export function Prose({ text }: { text: string }) {
  const slow = useRef(false);
  const blocks = useMemo(() => {
    if (slow.current) return plainBlock(text);
    const started = performance.now();
    const read = blocksOf(text);
    slow.current = performance.now() - started > READ_MS_MAX;
    return read;
  }, [text]);
  return (
    <div class="prose" onClick={(event) => void onClick(event)}>
      {blocks.map((block, index) => <BlockView key={index} block={block} />)}
    </div>
  );
}
