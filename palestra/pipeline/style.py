"""The style sheet of a pipeline's page, light and dark."""

STYLE = """
:root { color-scheme: light dark; --text: #1d232b; --soft: #5d6875; --page: #fbfbfa; --card: #ffffff; --line: #d9dde2;
  --done: #2e7d4f; --done-in: #e6f3ea; --run: #1f66b0; --run-in: #e3eefa; --bad: #b3372c; --bad-in: #fbe7e4;
  --wait: #6f7884; --wait-in: #eef0f2; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e6ea; --soft: #9aa5b1; --page: #14171b; --card: #1c2127;
  --line: #343b44; --done: #6fc48d; --done-in: #1b3325; --run: #7bb3ee; --run-in: #1a2d42; --bad: #f0897d;
  --bad-in: #42211d; --wait: #97a1ad; --wait-in: #262c33; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 24px 32px 64px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 0 0 8px; font-size: 17px; }
header p { margin: 4px 0 20px; color: var(--soft); overflow-wrap: anywhere; }
main { display: flex; gap: 28px; align-items: flex-start; }
.picture { flex: none; max-width: 45vw; max-height: calc(100vh - 24px); overflow: auto; position: sticky; top: 12px; }
.graph { max-width: 100%; height: auto; }
main.wide { display: block; }
.wide .picture { max-width: 100%; max-height: none; position: static; margin-bottom: 20px; }
.told { flex: 1; min-width: 0; display: grid; gap: 14px; }
@media (max-width: 800px) { main { flex-direction: column; } .told { width: 100%; }
  .picture { position: static; max-width: 100%; max-height: none; } }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px;
  scroll-margin-top: 12px; overflow-x: auto; }
section:target { border-color: var(--run); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 0 8px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td { overflow-wrap: anywhere; }
td:not(:first-child):not(:last-child) { white-space: nowrap; }
.pairs { font-size: 13px; } .pairs td:first-child { white-space: nowrap; width: 1%; color: var(--soft); }
.pairs td { overflow-wrap: anywhere; }
code, pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { margin: 6px 0 0; padding: 10px; overflow-x: auto; background: var(--page); border-radius: 6px; }
summary { cursor: pointer; color: var(--soft); margin-top: 6px; }
img { display: block; max-width: min(100%, 640px); margin: 10px 0; border-radius: 6px; background: #ffffff; }
.bad { color: var(--bad); } td a { color: inherit; }
.badge { font-size: 12px; font-weight: 600; padding: 2px 9px; border-radius: 10px; vertical-align: 2px;
  color: var(--wait); background: var(--wait-in); }
.badge.done, .badge.ran { color: var(--done); background: var(--done-in); }
.badge.running, .badge.elsewhere { color: var(--run); background: var(--run-in); }
.badge.failed { color: var(--bad); background: var(--bad-in); }
.graph text { fill: var(--text); font-size: 14px; text-anchor: middle; } .graph a { text-decoration: none; }
.graph .note { fill: var(--soft); font-size: 12px; }
.graph .edge { fill: none; stroke: var(--soft); stroke-width: 1.4; } .graph .tip { fill: var(--soft); }
.graph rect { fill: var(--wait-in); stroke: var(--wait); stroke-width: 1.4; }
.graph .done rect, .graph .ran rect { fill: var(--done-in); stroke: var(--done); }
.graph .ran rect { stroke-width: 2.4; }
.graph .running rect, .graph .elsewhere rect { fill: var(--run-in); stroke: var(--run); }
.graph .failed rect { fill: var(--bad-in); stroke: var(--bad); }
.graph .blocked rect { stroke-dasharray: 5 4; }
"""
