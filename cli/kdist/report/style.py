"""How a page of ours looks, in light and dark: what the pages of receipts and benches have in common."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667085; --line: #e3e6ea; --paper: #ffffff; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #98a2b3; --line: #2f353d; --paper: #14171b; --card: #1b1f25; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 960px; margin: 32px auto; padding: 0 20px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 32px 0 8px; } .soft { color: var(--soft); }
svg { width: 100%; height: auto; background: var(--card); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
.grid { stroke: var(--line); } .tick { fill: var(--soft); font-size: 11px; }
"""
