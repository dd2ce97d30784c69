"""SQL over the files of runs by DuckDB: read where they lie, nothing else, and only what a query names.

A table is a view over the run's own files, so that a query streams through them with bounded memory. Once the views
are made, DuckDB may open these files and no others.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from palestra.errors import UsageError, needs_extra
from palestra.runs.plot import POSITION
from palestra.runs.run import Run

CONFIG: dict[str, Any] = {"memory_limit": "1GB", "threads": 2}
LINE = 32 << 20  # bytes of the longest line of rollouts that is read; each thread has room for two, several times
FILES = ("metrics.jsonl", "rollouts.jsonl", "trace*.json")
EMPTY = "/dev/null"  # in place of a file that no run has
SQL: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
TABLES = SQL["tables"]


@dataclass(frozen=True)
class Result:
    """The rows of a query, to be read once."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def query(sql: str, runs: Sequence[Run]) -> Iterator[Result]:
    """Run one SELECT over the tables `runs`, `metrics`, `rollouts`, `evaluations` and `events` of some runs."""
    with needs_extra("palestra query", "query"):
        import duckdb
    used = [name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
    with tempfile.TemporaryDirectory() as spill, duckdb.connect(config=CONFIG | {"temp_directory": spill}) as database:
        try:
            statements = database.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UsageError("expected one SELECT: runs can be read, and nothing can be changed")
            _make_tables(database, runs, used)
            result = database.execute(statements[0])
            rows = (row for batch in iter(lambda: result.fetchmany(1000), []) for row in batch)
            yield Result([column[0] for column in result.description or ()], rows)
        except duckdb.Error as error:
            known = [f"columns of {table}: {', '.join(_columns(database, table))}" for table in used]
            known = known or [f"the tables are: {', '.join(TABLES)}"]
            raise UsageError("\n".join([str(error).strip(), *known])) from error


def _make_tables(database: Any, runs: Sequence[Run], used: Sequence[str]) -> None:
    """Make what a query uses, then forbid everything else."""
    database.execute("CREATE TABLE files (run VARCHAR, seed BIGINT, filename VARCHAR)")
    database.execute(SQL["readers"]["about"])
    files: dict[str, list[str]] = {name: [] for name in FILES}
    for run in runs:
        id = f"{run.name}/{run.id}"
        if "runs" in used:
            progress = run.progress()
            values = [id, run.name, run.spec["kind"], run.state, run.created[:19], len(run.seeds)]
            values += [progress.get("step"), json.dumps(progress["headline"]), json.dumps(run.spec), str(run.path)]
            database.execute(f"INSERT INTO about VALUES ({', '.join('?' * len(values))})", values)
        for session, pattern in ((session, pattern) for session in run.sessions for pattern in FILES):
            for path in map(str, session.path.glob(pattern)):
                files[pattern].append(path)
                database.execute("INSERT INTO files VALUES (?, ?, ?)", (id, session.seed, path))
    metrics, rollouts, traces = (_list(files[name] or [EMPTY]) for name in FILES)
    parts = {"texts": _sql("texts", files=metrics), "traces": _sql("texts", files=traces)}
    parts["groups"] = _sql("rows", files=rollouts, columns=_sql("group"))
    keys = [key for (key,) in database.execute(_sql("keys", **parts)).fetchall()] if "metrics" in used else []
    names = {key.lower(): _quoted(key) for key in ("step", *keys) if key != "seed"}
    columns = ", ".join(f"{name}: '{'BIGINT' if key in POSITION else 'DOUBLE'}'" for key, name in names.items())
    parts |= {"names": ", ".join(names.values()), "rows": _sql("rows", files=metrics, columns=columns)}
    for table in used:
        database.execute(f"CREATE VIEW {table} AS {Template(TABLES[table]).substitute(parts)}")
    database.execute(f"SET allowed_paths={_list([EMPTY, *(path for paths in files.values() for path in paths)])}")
    database.execute("SET enable_external_access=false")
    database.execute("SET lock_configuration=true")


def _sql(name: str, **parts: object) -> str:
    return Template(SQL["readers"][name]).substitute(parts, longest=LINE)


def _columns(database: Any, table: str) -> list[str]:
    found = "SELECT column_name FROM information_schema.columns WHERE table_name = ? ORDER BY ordinal_position"
    return [name if name.isidentifier() else _quoted(name) for (name,) in database.execute(found, [table]).fetchall()]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _list(texts: Sequence[str]) -> str:
    return "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"
