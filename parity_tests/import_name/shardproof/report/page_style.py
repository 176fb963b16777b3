"""Style of pages: named colours for light and dark, and a one-column layout on narrow screens."""

from __future__ import annotations

from shardproof.report import colours
from shardproof.report.markup import Child, as_text, tag

# Every rule is below `.shardproof`, so that a notebook around it is unaffected.
_STYLE = """
.shardproof {
  --ground: #ffffff; --ink: #1c1e21; --quiet: #59616a; --line: #cfd4da; --panel: #f4f5f7;
  --right: #1a7f37; --wrong: #b3124e; --blame: #fdeaf1;
  color-scheme: light; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; padding: 1rem; overflow-wrap: anywhere;
}
@media (prefers-color-scheme: dark) {
  .shardproof {
    --ground: #15171a; --ink: #e4e7ea; --quiet: #a2aab3; --line: #40474f; --panel: #1f2327;
    --right: #56c271; --wrong: #ff7aa8; --blame: #3a1a28; color-scheme: dark;
  }
}
body.shardproof { margin: 0 auto; max-width: 1240px; }
html { background: #ffffff; }
@media (prefers-color-scheme: dark) { html { background: #15171a; } }
.shardproof h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
.shardproof h2 { font-size: 1.15rem; margin: 1.8rem 0 .4rem; }
.shardproof h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
.shardproof p { margin: .3rem 0; }
.shardproof code, .shardproof pre { font: 13px/1.45 ui-monospace, monospace; color: inherit; background: none; }
.shardproof pre { background: var(--panel); padding: .6rem .8rem; overflow-x: auto; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.shardproof table { border-collapse: collapse; font-size: 14px; }
.shardproof .wide { overflow-x: auto; max-width: 100%; }
.shardproof th, .shardproof td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: normal; background: none; }
.shardproof th { color: var(--quiet); font-weight: 600; }
.shardproof td.number { text-align: right; font-variant-numeric: tabular-nums; }
.shardproof .verdict { font-weight: 700; white-space: nowrap; }
.shardproof .right { color: var(--right); }
.shardproof .wrong { color: var(--wrong); }
.shardproof .quiet { color: var(--quiet); }
.shardproof .badge { background: var(--wrong); color: var(--ground); padding: 0 .45em; border-radius: .6em;
  font-size: 12px; font-weight: 700; white-space: nowrap; }
.shardproof ul { margin: .3rem 0; padding-left: 1.2rem; }
.shardproof a { color: inherit; }
.shardproof summary { cursor: pointer; margin: .5rem 0; }
.shardproof svg { display: block; overflow: visible; }
.shardproof svg text { font: 11px ui-monospace, monospace; fill: var(--ink); text-anchor: middle; }
.shardproof .movement { overflow-x: auto; border: 1px solid var(--line); }
.shardproof .step { display: grid; grid-template-columns: minmax(0, 22rem) max-content; min-width: max-content; }
.shardproof .step > p { margin: 0; padding: .5rem .8rem; position: sticky; left: 0; box-sizing: border-box; }
.shardproof .step.bwd { background: var(--panel); }
.shardproof .step.blamed { background: var(--blame); box-shadow: inset 5px 0 0 var(--wrong); }
.shardproof .step code { display: block; }
.shardproof .lifeline { stroke: var(--line); stroke-width: 1; stroke-dasharray: 2 3; }
.shardproof .under { stroke: var(--ink); opacity: .45; fill: none; }
.shardproof .transfer { fill: none; }
.shardproof .hub { fill: var(--ground); stroke: var(--ink); }
.shardproof .absent { fill: none; stroke: var(--wrong); stroke-dasharray: 3 3; }
.shardproof .culprit { fill: none; stroke: var(--wrong); stroke-width: 3; }
.shardproof .tensors { display: flex; flex-wrap: wrap; gap: 1.2rem 2rem; }
.shardproof .maps { display: flex; flex-wrap: wrap; gap: .8rem 1.2rem; }
.shardproof figure { margin: 0; max-width: 100%; overflow-x: auto; }
.shardproof figcaption { color: var(--quiet); font-size: 13px; }
.shardproof .cell { stroke: var(--ground); stroke-width: 1; }
.shardproof .sum { fill: var(--ground); stroke: var(--quiet); }
.shardproof .cross { stroke-width: 1.2; fill: none; }
.shardproof .legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 13px; color: var(--quiet); }
.shardproof .legend svg { display: inline-block; vertical-align: -2px; margin-right: .3em; }
@media (max-width: 760px) {
  .shardproof { padding: .7rem; }
  .shardproof table { font-size: 13px; }
  .shardproof th, .shardproof td { padding-right: .5rem; }
  .shardproof pre.terminal { white-space: pre; overflow-wrap: normal; }
  .shardproof .step { display: block; min-width: 0; }
  .shardproof .movement svg { max-width: 100%; height: auto; }
  .shardproof .step > p { width: calc(100vw - 3rem); }
}
"""


def style() -> str:
    """The text of a style element."""
    ranks = "".join(
        f".shardproof .r{rank} {{ fill: {paint}; }} .shardproof .l{rank} {{ stroke: {paint}; }}\n"
        f".shardproof svg text.t{rank} {{ fill: {colours.ink(paint)}; }}\n"
        for rank, paint in enumerate(colours.RANKS)
    )
    errors = "".join(
        f".shardproof .e{level} {{ fill: {paint}; }} .shardproof .on{level} {{ stroke: {colours.ink(paint)}; }}\n"
        for level, paint in enumerate(colours.ERRORS)
    )
    return _STYLE + ranks + errors


def in_notebook(*parts: Child) -> str:
    """Parts of a page together with their style."""
    return as_text(tag("div", tag("style", style()), *parts, class_="shardproof"))
