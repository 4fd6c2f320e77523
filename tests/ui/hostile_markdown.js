// Draws what a hostile model might write: what is returned should not have been made of it.
async () => {
  const script = performance.getEntriesByType("resource").find(({name}) => name.endsWith("/markdown.js"));
  const { MarkdownView } = await import(script.name);
  const lines = ["# " + " ".repeat(200000) + "x", "```" + " ".repeat(200000) + "`", "|\n" + " ".repeat(200000) + "x",
    "[".repeat(100000) + "](x)", "*a ".repeat(50000), "http://a" + ".".repeat(100000) + "b",
    ">".repeat(20000), "- ".repeat(20000), "`".repeat(100000) + "a", "__a".repeat(30000)];
  const parts = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))",
    "[b](data:text/html,x)", "![c](https://example.org/p.png)", "**", "*", "_", "`", "```", "\n", "> ", "- ", "1. ", "| a | b |",
    "|---|---|", "# ", "&lt;", "\\", " ", "word", "https://example.org/?a=1&b=<x>", "~~", "[x](mailto:a@b)"];
  let seed = 7;
  const random = (below) => (seed = (seed * 1103515245 + 12345) % 2147483648) % below;
  for (let round = 0; round < 400; round += 1)
    lines.push(Array.from({length: 30}, () => parts[random(parts.length)]).join(random(2) ? "" : " "));
  const allowed = new Set("A P BR STRONG EM DEL CODE PRE DIV SPAN BUTTON svg path UL OL LI BLOCKQUOTE HR H3 H4 H5 H6 TABLE THEAD TBODY TR TH TD".split(" "));
  const bad = new Set();
  for (const text of lines) {
    const root = document.createElement("div");
    new MarkdownView(root).show(text);
    for (const node of root.querySelectorAll("*")) {
      if (!allowed.has(node.tagName)) bad.add(node.tagName);
      for (const {name, value} of node.attributes)
        if (name.startsWith("on") || name === "src" || (name === "href" && !/^(https?|mailto):/.test(value))) bad.add(name + "=" + value);
    }
  }
  return [...bad];
}
