"""How a report looks: colours of two schemes, and rules that touch nothing outside of it.

Each rule begins with the class of the report's root, as the same markup stands in notebooks. Widths
are those of the root, not of the window. Colours say nothing that a shape or a word does not.
"""

from __future__ import annotations

from collections.abc import Mapping

ROOT = "elasticlib-report"

LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "ink": "#1b1f23",
    "soft": "#565e66",
    "rule": "#d5d9dd",
    "band-a": "#2c6da4",
    "on-a": "#ffffff",
    "band-b": "#a9cdec",
    "on-b": "#14202b",
    "good": "#00705a",
    "bad": "#b83a00",
    "gone": "#8a2f76",
    "leave": "#7a5a00",
    "curve": "#2c6da4",
    "area": "#cfe3f5",
    "shade": ".22",
}
"""band-a and band-b are those of generations in turn, on-a and on-b words in them; shade: how much
of the page a gap's band hides."""
DARK: Mapping[str, str] = {
    "page": "#15181b",
    "ink": "#e9ecee",
    "soft": "#a9b1b8",
    "rule": "#3a4148",
    "band-a": "#4f97d3",
    "on-a": "#08121b",
    "band-b": "#b7d6f0",
    "on-b": "#08121b",
    "good": "#42cba9",
    "bad": "#ff8f57",
    "gone": "#e59ad4",
    "leave": "#e3c25c",
    "curve": "#62a8e2",
    "area": "#24425c",
    "shade": ".45",
}
PHASES: Mapping[str, str] = {
    "detect": "#ffaabb",
    "stop": "#ee8866",
    "imports": "#ccbbdd",
    "rendezvous": "#eedd88",
    "start": "#77aadd",
    "restore": "#99ddff",
    "stalled": "#dddddd",
    "redone": "#bbbb44",
}
"""The same in both schemes, with dark words on all of them."""


def style() -> str:
    """All rules, for one style element."""
    phases = "".join(f"& .p-{name} {{ fill: {hue} }}\n" for name, hue in PHASES.items())
    body = _RULES + phases
    rules = "\n".join(_scoped(line) for line in body.splitlines())
    return (
        f".{ROOT} {{ color-scheme: light; {_variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{\n"
        f".{ROOT} {{ color-scheme: dark; {_variables(DARK)} }}\n}}\n{rules}\n"
    )


def page_style() -> str:
    """Of a page that holds nothing else."""
    return (
        f"html {{ background: {LIGHT['page']}; -webkit-text-size-adjust: 100% }}\n"
        "body { margin: 0 }\n"
        "@media screen and (prefers-color-scheme: dark) "
        f"{{ html {{ background: {DARK['page']} }} }}\n"
        "@page { margin: 14mm 12mm }\n"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _scoped(line: str) -> str:
    """The root twice: stronger than what a notebook says of its tables."""
    return line.replace("&", f".{ROOT}.{ROOT}")


_RULES = """
& { container-type: inline-size; background: var(--page); color: var(--ink) }
& { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
& { text-align: left; padding: 20px 16px 32px; box-sizing: border-box }
& * { box-sizing: border-box }
& .inner { max-width: 1040px; margin: 0 auto; overflow-wrap: anywhere }
& h1 { font-size: 26px; line-height: 1.2; margin: 0 0 6px; font-weight: 650; color: var(--ink) }
& h2 { font-size: 18px; line-height: 1.3; margin: 40px 0 4px; font-weight: 650; color: var(--ink) }
& h3 { font-size: 13px; margin: 20px 0 2px; font-weight: 600; color: var(--ink) }
& p { margin: 0 0 10px; max-width: 72ch }
& .soft { color: var(--soft); font-size: 13px; font-weight: 400 }
& .lead { margin: 0 0 4px; display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: baseline }
& .state { font-weight: 650 }
& .reason { white-space: pre-wrap }
& svg { display: block; overflow: visible; max-width: none; margin: 0 }
& svg.drawing { width: 100% }
& svg.sign { display: inline-block; vertical-align: -2px; margin-right: 5px; flex: none }
& svg text { font-family: inherit; font-size: 12px; fill: var(--ink) }
& svg text.note { fill: var(--soft) }
& svg text.value { font-size: 11px; fill: var(--soft) }
& svg .halo { stroke: var(--page); stroke-width: 4px; paint-order: stroke; stroke-linejoin: round }
& svg .rule { stroke: var(--rule); stroke-width: 1px; shape-rendering: crispEdges }
& svg .life { stroke: var(--soft); stroke-width: 1px }
& svg .lost { stroke: var(--gone); stroke-width: 1.5px; stroke-dasharray: 2 4 }
& svg .fault { stroke: var(--bad); stroke-width: 1px; stroke-dasharray: 3 3; opacity: .75 }
& svg .band-a { fill: var(--band-a) }
& svg .band-b { fill: var(--band-b) }
& svg .starting { fill: var(--page); stroke: var(--band-a); stroke-width: 1px }
& svg text.on-a { fill: var(--on-a) }
& svg text.on-b { fill: var(--on-b) }
& svg .area { fill: var(--area) }
& svg .curve { fill: none; stroke: var(--curve); stroke-width: 1.6px; stroke-linejoin: round;
  stroke-linecap: round; vector-effect: non-scaling-stroke }
& svg .curve.alone { stroke-width: 5px }
& svg .gap { fill: var(--leave); opacity: var(--shade) }
& svg .gap-failure { fill: var(--bad) }
& svg .gap-loss { fill: var(--gone) }
& svg .hover { fill: transparent }
& svg .ink { fill: var(--ink) }
& svg .good { fill: var(--good) }
& svg .bad { fill: var(--bad) }
& svg .gone { fill: var(--gone) }
& svg .leave { fill: var(--leave) }
& svg .phase { stroke: var(--page); stroke-width: 1px }
& svg text.on-phase { fill: #14181c; font-size: 11px }
& svg .w1, & svg .w2 { display: none }
@container (min-width: 640px) { & svg .w1 { display: inline } & svg .n0 { display: none } }
@container (min-width: 980px) { & svg .w2 { display: inline } }
& ul.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap }
& ul.legend { gap: 3px 16px; font-size: 12px; color: var(--soft) }
& ul.legend li { display: flex; align-items: center; margin: 0 }
& dl.figures { display: grid; grid-template-columns: repeat(2, 1fr); gap: 14px 16px }
& dl.figures { margin: 20px 0 0; padding: 0 }
& dl.figures dt { font-size: 12px; color: var(--soft); font-weight: 400; margin: 0 }
& dl.figures dd { margin: 0 !important; font-size: 20px; line-height: 1.25; font-weight: 600 }
& dl.figures dd.small { font-size: 15px }
& dl.figures small { display: block; font-size: 12px; font-weight: 400; color: var(--soft) }
@container (min-width: 640px) { & dl.figures { grid-template-columns: repeat(4, 1fr) } }
@container (min-width: 980px) { & dl.figures { grid-template-columns: repeat(5, 1fr) } }
& .timeline p.soft { margin-top: 8px }
& .charts figure { container-type: inline-size }
& .charts ul { list-style: none; margin: 0; padding: 0; font-size: 13px }
& .charts li { margin: 0 0 3px }
& .charts { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 32px }
@container (min-width: 760px) { & .charts.two { grid-template-columns: repeat(2, minmax(0, 1fr)) } }
& ol.recoveries { list-style: none; margin: 14px 0 0; padding: 0 }
& ol.recoveries > li { margin: 0 0 14px }
& .head { display: flex; justify-content: space-between; gap: 12px; font-size: 13px }
& .head b { font-weight: 650; white-space: nowrap }
& ul.phases { list-style: none; margin: 3px 0 0; padding: 0; display: flex; flex-wrap: wrap }
& ul.phases { gap: 0 14px; font-size: 12px; color: var(--soft) }
& ul.phases li { display: flex; align-items: center; margin: 0 }
& table { border-collapse: collapse; width: 100%; margin: 8px 0 0; font-size: 13px; border: 0 }
& table { table-layout: auto; color: var(--ink) }
& table tr, & table tbody tr:nth-child(n) { background: none }
& table th { font-weight: 600; font-size: 12px; color: var(--soft); text-align: left }
& table th, & table td { padding: 5px 16px 5px 0; vertical-align: top; text-align: left }
& table th { white-space: nowrap }
& table td.name { min-width: 116px }
& table td.reason { min-width: 170px }
& table th, & table td { border: 0; border-bottom: 1px solid var(--rule); max-width: none }
& table td.number, & table th.number { text-align: right; white-space: nowrap }
& table td.number, & table td.when { font-variant-numeric: tabular-nums }
& table td.when { white-space: nowrap }
& table th:last-child, & table td:last-child { padding-right: 0 }
& table .wide { display: none }
@container (min-width: 640px) { & table .wide { display: table-cell; padding-left: 16px } }
& table td.reason { white-space: pre-wrap; font-size: 13px }
& code { font: 12px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
& code { background: none; color: inherit; padding: 0; border: 0 }
@container (max-width: 639px) {
& table th, & table td { padding-right: 10px }
& table td.number { white-space: normal }
& table td.name { min-width: 0 }
& table.cards thead { display: none }
& table.cards, & table.cards tbody { display: block }
& table.cards tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--rule) }
& table.cards td { display: flex; gap: 10px; border: 0; padding: 1px 0; text-align: left }
& table.cards td.number { text-align: left; white-space: normal }
& table.cards td:empty { display: none }
& table.cards td::before { content: attr(data-label); flex: 0 0 84px; color: var(--soft) }
& table.cards td::before { font-size: 12px; line-height: 1.6; white-space: normal }
& table.cards td > * { min-width: 0 }
}
& footer { margin-top: 44px; font-size: 12px; color: var(--soft) }
@media print {
& { padding: 0; print-color-adjust: exact; -webkit-print-color-adjust: exact }
& h2, & h3, & .head { break-after: avoid }
& .charts { display: block }
& svg.drawing, & .charts figure, & li, & tr, & dl.figures > div { break-inside: avoid }
& thead { display: table-header-group }
& .inner { max-width: none }
}
& figure { margin: 0; padding: 0 }
"""
