"""Self-contained HTML pages with SVG charts: no scripts, no fonts, no links, light and dark.

`markup` writes and escapes elements, and is the only place that does; `page` holds the stylesheet,
the frame of a page, tables and legends; `chart` holds ticks, scales and the plot area of a chart;
`colors` is the palette. Read `markup` first: whatever is not a `Markup` is escaped when it becomes
part of an element, so text from a job, a log or a label cannot add elements to a page.

The pages of `kdist report` and `kdist bench` and the dashboard pages of `tools.dashboards` are made
with it. Everything here is pure and imports nothing else of kdist.
"""
