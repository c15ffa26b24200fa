"""The documents: their tables match the result files, the things that they name exist, the README's
example runs.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import torchweld
from commands import python, run_offline
from samples import PUBLIC

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOCUMENTS = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}


@pytest.fixture
def tables():
    """A fresh copy of benchmarks/readme_table.py."""
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def copy(tables, tmp_path, monkeypatch):
    """The pages and the result files where they may be changed."""
    shutil.copytree(ROOT / tables.RESULTS, tmp_path / tables.RESULTS)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def change_report(folder: Path, change) -> None:
    path = folder / "benchmarks" / "results" / "nvidia-h200" / "attention.json"
    report = json.loads(path.read_text())
    change(report["rows"][0])
    path.write_text(json.dumps(report))


def test_tables_are_what_the_results_say(tables):
    stale = [str(path.relative_to(ROOT)) for path in tables.stale_pages()]
    assert not stale, "run python benchmarks/readme_table.py"


def test_stale_tables_are_found_and_written_anew(tables, copy, capsys):
    change_report(copy, lambda row: row.update(ours_us=1234567.8))
    assert tables.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "README.md is not" in error and "benchmarks/results/README.md is not" in error
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    assert "| 1234567.8 |" in (copy / "benchmarks" / "results" / "README.md").read_text()


def test_a_wrong_answer_has_no_ratio(tables, copy):
    change_report(copy, lambda row: row.update(ratio=None))
    row = next(row for row in tables.SUMMARY if row.family == "attention")
    assert f"| {row.what} | {row.name} | wrong |" in tables.summary_table()
    assert re.search(r"\| attention \(8, 12, 1024, 64\).* \| wrong \| ", tables.results_page())


def test_picture_shows_the_range_of_every_pictured_row(tables):
    svg = ElementTree.fromstring(tables.picture())
    texts = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    pictured = [row for row in tables.SUMMARY if row.pictured]
    assert 8 <= len(pictured) < len(tables.SUMMARY)
    for row in pictured:
        assert row.what in texts and f"against {row.name}" in texts
    ranges = re.findall(r"\| ([\d.]+(?: to [\d.]+)?) \|$", tables.summary_table(), re.M)
    assert len(ranges) == len(tables.SUMMARY)
    for row, text in zip(tables.SUMMARY, ranges, strict=True):
        assert not row.pictured or text in texts


def test_a_family_tells_what_a_user_gains(tables):
    def row(case, us, against, **peers):
        return {"case": case, "ours_us": us, "against": against, "ratio": 1.0, "peers_us": peers}

    rows = [
        row("step (4,) bfloat16", 9.0, "liger", liger=10.0, plan=5.0),
        row("step (8,) bfloat16 over liger", 6.0, "liger", liger=10.0, eager=40.0),
        row("step (8,) bfloat16 peak memory, MiB over liger", 30.0, "liger", liger=20.0),
        {**row("step (16,) bfloat16", 1.0, "liger", liger=10.0), "ratio": None},
    ]
    assert tables._gains({"rows": rows}) == [
        "- Liger: 0.75 of its time (0.60 to 0.90), 1.50 of its memory",
        "- Torch's ops: 0.15 of its time",
    ]
    picture = tables.family_picture("models", {"rows": rows, "device": "a GPU"})
    assert picture.count('fill="#2a9d63"') == 2 and picture.count('fill="#c44e52"') == 1
    assert "step, peak memory</text>" in picture and "against Liger</text>" in picture


def test_a_row_without_cases_is_refused(tables):
    summary = tables.SUMMARY[0]._replace(cases="no such case")
    with pytest.raises(ValueError, match=f"no case matches the README's row '{summary.what}'"):
        tables.matching_ratios(summary, tables.read_reports()["nvidia-h200"]["attention"]["rows"])


def test_a_case_counts_once_whatever_its_rows_are_over(tables):
    summary = tables.SUMMARY[0]._replace(cases="step .*", peer="liger")
    row = {"ratio": 1.0, "peers_us": {"liger": 10.0, "eager": 40.0}}
    rows = [
        {**row, "case": f"step {size} over {peer}", "against": peer, "ours_us": us}
        for size, us in ((4, 5.0), (8, 8.0))
        for peer in row["peers_us"]
    ]
    assert tables.matching_ratios(summary, rows) == [0.5, 0.8]


def test_every_result_is_on_the_page(tables):
    page = (ROOT / tables.RESULTS / "README.md").read_text(encoding="utf-8")
    for families in tables.read_reports().values():
        for report in families.values():
            assert all(f"| {row['case']} |" in page for row in report["rows"])


@pytest.mark.parametrize(("name", "most"), [("README.md", 180), ("CONTRIBUTING.md", 110)])
def test_documents_stay_short(name, most):
    assert len(DOCUMENTS[name].splitlines()) <= most


@pytest.mark.parametrize("name", [*DOCUMENTS, "benchmarks/results/README.md"])
def test_what_a_document_names_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [(ROOT / name).parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    paths = re.findall(r"\b(?:csrc|python|tests|benchmarks)/[\w/.-]*\w(?![\w<*])", text)
    assert links or paths
    missing = [str(path) for path in [*links, *map(ROOT.joinpath, paths)] if not path.exists()]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_of_a_document_exist(name):
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)", DOCUMENTS[name])
    assert targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)] == []
    text = python("-m", "torchweld", "--help", check=True).stdout
    commands = re.findall(r"`torchweld ([a-z]+)", DOCUMENTS[name])
    assert [c for c in commands if not re.search(rf"^ +{c} ", text, re.M)] == []


PAGES = [*DOCUMENTS, "CHANGELOG.md"]
PAGES += [f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_paragraph_is_read_as_a_bullet(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^[A-Za-z].*\n((?:[-+*]|\d+[.)]) .*)", text, re.M) == []


def test_readme_shows_code_first():
    first, last = README.index("```python\n"), README.index("\n```\n")
    code = [line for line in README[first:last].splitlines()[1:] if line]
    assert README[:last].count("\n") < 25 and 5 <= len(code) <= 10


def test_readme_names_every_op_and_module():
    names = set(re.findall(r"`(\w+)`", README))
    assert set(PUBLIC) - names == set()
    assert set(torchweld.nn.__all__) - names == set()


def test_example_of_the_readme_runs(tmp_path):
    pytest.importorskip("transformers")
    example = tmp_path / "example.py"
    example.write_text("".join(re.findall(r"```python\n(.*?)```", README, re.S)), encoding="utf-8")
    status, output = run_offline(example)
    assert status == 0, output
    assert "torchweld::softmax(float32 (4096, 5000) on meta)" in output
    assert (tmp_path / "mlp.pt").stat().st_size > 0


def test_the_tested_transformers_are_the_same_everywhere():
    from torchweld.integrations.version import NEWEST, OLDEST

    wanted = f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    for name, times in (("pyproject.toml", 1), ("requirements/demo.txt", 1)):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(r"transformers[<>=][^\"\n]*", text) == [wanted] * times
    constraints = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntransformers=={NEWEST[0]}.{NEWEST[1]}." in constraints
    tested = f"transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    for name in ("README.md", "CHANGELOG.md", "docs/faq.md", "docs/refused.md"):
        assert tested in (ROOT / name).read_text(encoding="utf-8"), name
    old = [path.name for path in (ROOT / "requirements").glob("transformers-*.txt")]
    assert old == [f"transformers-{OLDEST[0]}.{OLDEST[1]}.0.txt"]
