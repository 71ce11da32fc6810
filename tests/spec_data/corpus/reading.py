"""Rows to write to corpus files, and a way to read them that checks the counts."""

import hashlib
import json

from spec_data.corpus.record_reader import CorpusReader


def pair(i):
    return [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i} é"}]


def rows(n, start=0):
    return [{"messages": pair(i)} for i in range(start, start + n)]


def write_jsonl(path, items, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        for item in items:
            file.write((item if isinstance(item, str) else json.dumps(item)) + "\n")
    return str(path)


def read(*names, **options):
    reader = CorpusReader(names, **options)
    records = list(reader)
    for report in reader.reports:
        assert report.rows == sum(report.formats.values()) + report.bad
    assert len(records) == sum(r.rows - r.bad for r in reader.reports)
    return records, reader.reports


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
