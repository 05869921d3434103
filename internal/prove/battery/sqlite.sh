need python3
python3 - <<'P'
import sqlite3
a = sqlite3.connect("x.db"); assert a.execute("pragma journal_mode=wal").fetchone()[0] == "wal"
a.execute("create table t(x)")
with a: a.executemany("insert into t values(?)", ((i,) for i in range(10000)))
b = sqlite3.connect("x.db"); assert b.execute("select sum(x) from t").fetchone()[0] == 49995000
print("SQLite", sqlite3.sqlite_version, "with a write-ahead log, two connections")
P
