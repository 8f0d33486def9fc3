"""The style sheet of a transcript's page, on screens, light and dark, and on paper.

Roles differ in their edge and their place as well as in colour. It asks for no font and no picture.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f7f6f3; --card: #fff; --ink: #1d2127; --soft: #5a626d; --line: #dcdad4; --mark: #b3261e;
  --human: #2f5fc4; --human-card: #e9effb; --ai: #0b7a66; --tool: #96610a; --tool-card: #faf5e9;
  --system: #6b7280; --summary: #7a3ea8; --summary-card: #f5eefb;
  --text: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  --code: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1c2026; --ink: #e4e7eb; --soft: #a2abb7; --line: #363c45; --mark: #ff9d94;
    --human: #8fb1ff; --human-card: #1d2842; --ai: #5fd0b8; --tool: #e3b457; --tool-card: #27231a;
    --system: #a2abb7; --summary: #cf9ff5; --summary-card: #291f33;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); font: 1rem/1.55 var(--text); -webkit-text-size-adjust: 100%; }
body { max-width: 50rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1, h2, h3, p, dl, dd, ul { margin: 0; padding: 0; }
a { color: inherit; text-decoration-color: var(--line); text-underline-offset: .2em; }
:focus-visible { outline: 2px solid var(--human); outline-offset: 2px; }
code, pre { font-family: var(--code); font-size: .875em; }
h1, dd, h3, .notes, .said, summary, .tags, pre { overflow-wrap: anywhere; }

body > header { border-bottom: 1px solid var(--line); padding-bottom: 1.5rem; }
.kind { color: var(--soft); font-size: .75rem; font-weight: 600; letter-spacing: .12em; text-transform: uppercase; }
h1 { font-size: 1.75rem; line-height: 1.25; letter-spacing: -.01em; margin-bottom: 1.25rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .9rem 1.5rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { font-variant-numeric: tabular-nums; }
body > header > details { margin: 1.25rem 0 0; }

.day { display: flex; align-items: center; gap: 1rem; margin: 2.25rem 0 1.25rem; color: var(--soft);
  font-size: .85rem; font-weight: 600; }
.day::before, .day::after { content: ""; flex: 1; border-top: 1px solid var(--line); }

article, #summary { --edge: var(--system); border: 1px solid var(--line); border-inline-start: 4px solid var(--edge);
  border-radius: .5rem; background: var(--card); padding: .7rem 1rem .85rem; margin: 0 0 .75rem;
  scroll-margin-top: 1rem; }
article { content-visibility: auto; contain-intrinsic-size: auto 7rem; }
article:target { outline: 2px solid var(--edge); outline-offset: 2px; }
article.human { --edge: var(--human); background: var(--human-card); margin-top: 1.75rem; margin-inline-end: 3rem; }
article.ai { --edge: var(--ai); border-inline-start-style: double; border-inline-start-width: 6px;
  margin-inline-start: 3rem; }
article.tool, article.function { --edge: var(--tool); border-style: dashed; border-inline-start-style: dashed;
  background: var(--tool-card); margin-inline-start: 5rem; }
article.system, article.other { border-style: dotted; border-inline-start-style: dotted; }
.day + article { margin-top: 0; }

article > header, #summary > header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1rem;
  margin-bottom: .3rem; }
h3 { font-size: .95rem; font-weight: 400; flex: 1 1 auto; min-width: 0; }
.label, #summary h3 { color: var(--edge); font-weight: 700; }
.name { color: var(--soft); }
.notes { color: var(--soft); font-size: .8rem; font-variant-numeric: tabular-nums; }
.status { border: 1px solid currentColor; border-radius: .25rem; padding: 0 .3rem; color: var(--mark);
  font-weight: 600; }
.said { white-space: pre-wrap; unicode-bidi: plaintext; }
.tool .said, .function .said { font-family: var(--code); font-size: .875rem; }
.hidden { border: 1px solid currentColor; border-radius: .2rem; padding: 0 .2em; margin: 0 .1em; color: var(--mark);
  font: 600 .7em var(--code); unicode-bidi: isolate; direction: ltr; white-space: nowrap; }

details { margin-top: .5rem; font-size: .9rem; }
summary { cursor: pointer; color: var(--soft); }
summary code { color: var(--ink); font-weight: 600; }
summary .id { color: var(--soft); font-weight: 400; }
pre { margin: .4rem 0 0; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .35rem;
  background: var(--paper); white-space: pre-wrap; unicode-bidi: plaintext; }
.tags { display: flex; flex-wrap: wrap; gap: .35rem; margin-top: .6rem; list-style: none; font-size: .8rem; }
.tags li { border: 1px solid var(--line); border-radius: 1rem; padding: 0 .6rem; color: var(--soft); max-width: 100%; }

#summary { --edge: var(--summary); background: var(--summary-card); border-top: 3px double var(--edge);
  margin: 1.75rem 0; }
.here { color: var(--edge); font-size: .8rem; font-weight: 600; text-align: center; margin-bottom: .4rem; }
.here::before { content: "\\2191\\00a0"; }
body > footer { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--soft);
  font-size: .85rem; }

@media (max-width: 36rem) {
  article.human { margin-inline-end: 0; }
  article.ai { margin-inline-start: 0; }
  article.tool, article.function { margin-inline-start: 1rem; }
}
@page { size: A4; margin: 17mm 16mm 20mm; @bottom-right { content: counter(page) " / " counter(pages);
  font: 8pt sans-serif; color: #555; } }
@media print {
  :root { color-scheme: light; --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #999; --mark: #000;
    --human: #000; --human-card: #f1f1f1; --ai: #000; --tool: #000; --tool-card: #fff; --system: #000;
    --summary: #000; --summary-card: #fff; }
  html { font-size: 10pt; line-height: 1.45; }
  body { max-width: none; padding: 0; }
  article { content-visibility: visible; }
  article, #summary, .tags, dl > div { break-inside: avoid; }
  article > header, .day, summary, .here { break-after: avoid; }
  .said, pre { orphans: 3; widows: 3; }
  article.human { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  /* What is folded on the screen is shown on paper. */
  details::details-content { content-visibility: visible; block-size: auto; }
  summary { list-style: none; }
  summary::-webkit-details-marker { display: none; }
  a { text-decoration: none; }
}
"""
