"""docs/: every Python block on a page runs, and the generated pages name every op."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import torchweld
from commands import build_cpp_programs, captured, run_offline
from samples import PUBLIC
from torchweld._library import build_facts
from torchweld.info import ops_of_library

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TORCHWELD = Path(torchweld.__file__).parent
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
ON_A_CPU = ("timm", "diffusers")  # packages whose blocks run where they are installed
PACKAGES = ("Liger", "Lightning", "DeepSpeed", "kernels", *ON_A_CPU)
MARKS = ("needs a GPU", "needs a download", *(f"needs {name}" for name in PACKAGES))


class Block(NamedTuple):
    page: str  # or the name whose docstring it is from
    line: int  # of its first line of code, from 1
    code: str
    mark: str | None


def blocks(page: str) -> list[Block]:
    """The page's blocks of Python; a comment in the line before a block names its requirement."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"(?:<!-- ([^\n]+) -->\n)?```python\n(.*?)```", text, re.S):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, match[2], match[1]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
MARKED = [block for block in ALL if block.mark]


def example(name: str, docstring: str) -> Block | None:
    """The example of a docstring; brackets in its heading name its requirement."""
    found = re.search(r"^Example(?: \((.+)\))?::\n\n((?:    .*\n|\n)+)", docstring + "\n", re.M)
    return found and Block(name, 1, textwrap.dedent(found[2]), found[1])


def run(code: list[Block], folder: Path) -> None:
    """Runs blocks in one process, at the line numbers that they have on their page."""
    text = ""
    for block in code:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.code
    run_text(code[0].page, text, folder)


def run_text(name: str, text: str, folder: Path) -> None:
    """Runs code in a folder that has benchmarks/, as the root of a checkout."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    status, output = run_offline(path)
    assert status == 0, output


def plain_blocks(page: str) -> list[Block]:
    return [block for block in ALL if block.page == page and not block.mark]


# The export page needs a C++ compiler and minutes, and has its own test.
@pytest.mark.parametrize("page", [p for p in PAGES if plain_blocks(p) and p != "export.md"])
def test_python_of_a_page_runs(page, tmp_path):
    pytest.importorskip("transformers")
    if any("import peft" in block.code for block in plain_blocks(page)):
        pytest.importorskip("peft")
    run(plain_blocks(page), tmp_path)


@pytest.mark.parametrize("page", [*PAGES, *(f"kernels/{p.name}" for p in DOCS.glob("kernels/*"))])
def test_links_of_a_page_lead_somewhere_on_github(page):
    """Sphinx checks its own links, in which generated pages exist and dots of headings differ."""
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
        target = path.parent / name if name else path
        assert target.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{name}#{anchor}"


def test_grpo_of_the_losses_page_equals_plain_torch():
    names: dict[str, Any] = {}
    exec("".join(block.code for block in plain_blocks("losses.md")), names)
    hidden, weight = (torch.randn(*s, dtype=torch.float64) for s in ((2, 16, 8), (50, 8)))
    tokens, mask = torch.randint(0, 50, (2, 16)), torch.ones(2, 15, dtype=torch.float64)
    mask[1, 9:] = 0
    old, advantages = torch.randn(2, 15).double() - 4, torch.tensor([1.5, -0.5]).double()

    def plain(hidden, weight):
        z = torch.log_softmax(hidden[:, :-1] @ weight.t() / 0.7, -1)
        ratio = (z.gather(-1, tokens[:, 1:, None])[..., 0] - old).exp()
        worst = torch.minimum(
            ratio * advantages[:, None], ratio.clip(0.8, 1.2) * advantages[:, None]
        )
        loss = -worst + 0.01 * (z.exp() * z).sum(-1)
        return (loss * mask).sum() / mask.sum()

    found = []
    for loss in (lambda h, w: names["grpo_loss"](h, w, tokens, old, advantages, mask), plain):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        value = loss(*leaves)
        found.append([value, *torch.autograd.grad(value, leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block", MARKED, ids=lambda block: f"{block.page}:{block.line}")
def test_python_that_needs_more(block, tmp_path):
    assert block.mark in MARKS
    compile(block.code, block.page, "exec")
    package = block.mark.removeprefix("needs ")
    if package in ON_A_CPU:
        pytest.importorskip(package)
    elif block.mark != "needs a GPU" or not torch.cuda.is_available():
        pytest.skip(f"a block of the documentation {block.mark}")
    run([block], tmp_path)


@pytest.mark.skipif(shutil.which("make") is None, reason="make was not found")
def test_make_docs_without_its_packages_is_one_sentence():
    done = subprocess.run(
        # -S: without site-packages. A make inside of `make test` would print the directories too.
        ["make", "--no-print-directory", "docs", "VENV=", f"PYTHON={sys.executable} -S"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(TORCHWELD.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "pip install -r requirements/docs.txt\n" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_few_blocks_are_marked():
    assert len(ALL) >= 20
    assert len(MARKED) * 5 <= len(ALL)


def test_export_page_makes_what_its_cpp_program_runs(tmp_path):
    run(plain_blocks("export.md"), tmp_path)
    build = build_cpp_programs(tmp_path, "run_exported")
    done = captured(build / "run_exported", "net.pt2", "net_example.pt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "same result as Python\n"), done.stderr


def test_what_the_pages_name_exists():
    text = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    paths = re.findall(r"`((?:csrc|python|tests|benchmarks)/[\w/.-]+)`", text)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`(?:\w+=\S+ )?make ([a-z-]+)", text)
    assert targets and [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)] == []
    names = set(re.findall(r"`torchweld\.(?:nn\.)?(\w+)[`(]", text)) - {"nn"}
    known = {*torchweld.__all__, *torchweld.nn.__all__}
    assert names and names - known == set()
    ops = set(re.findall(r"torch\.ops\.torchweld\.(\w+)", text))
    assert ops and ops - set(ops_of_library()) == set()


@pytest.mark.parametrize("page", sorted((DOCS / "kernels").glob("*.md")), ids=lambda p: p.stem)
def test_page_of_a_kernel_explains_it(page, generate):
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.M)
    for title in ("What it computes", "Roofline", "Tiles and why", "What was tried and lost"):
        assert title in titles
    assert any(title.startswith("Schedule") for title in titles) and "```text\n" in text
    assert f"_generated/kernel_{page.stem}.part.md" in text
    assert generate.kernel_table(page.stem).count("\n") > 10


def test_what_is_not_supported_is_found_by_its_names():
    text = (DOCS / "support.md").read_text(encoding="utf-8")
    rows = text[text.index("## Not supported") :].lower()
    for name in ("fp8", "mxfp8", "nvfp4", "mixture of experts", "moe", "grouped gemm", "dropout",
                 "bias", "alibi", "paged", "continuous batching"):  # fmt: skip
        assert name in rows, name


def test_glossary_has_one_line_a_word():
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "glossary.md").read_text(), re.M)[1:]
    words = [word for word, _ in rows if not word.startswith("---")]
    assert 20 < len(words) <= 45 and len(set(words)) == len(words)


@pytest.fixture
def generate(monkeypatch):
    """docs/generate.py."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module("generate")
    del sys.modules["generate"]


def test_table_of_attention_calls_has_a_cell_for_every_way(generate, monkeypatch):
    """test_attention_paths.py compares the cells with the models."""
    pytest.importorskip("transformers")
    import attention_paths as paths

    rows = generate.ATTENTION.read_text(encoding="utf-8").splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(paths.FAMILIES)
    assert {row.count("|") for row in rows} == {2 + len(paths.WAYS)}
    monkeypatch.setattr(paths, "attention_calls", lambda *_: Counter({"the op": 2, "SDPA": 4}))
    cells = " | ".join(["4 of 6"] * 3)
    assert generate._attention_row("BertForMaskedLM") == f"| `BertForMaskedLM` | {cells} | - |"


def test_table_of_fused_parts_is_that_of_the_installed_transformers(generate):
    transformers = pytest.importorskip("transformers")
    page = generate.PARTS.read_text(encoding="utf-8")
    if transformers.__version__ not in page.splitlines()[0]:
        pytest.skip("the table is of another transformers")
    assert "| `llama` | op | op | op | op | op | op |  | op |  |" in page
    from tiny_models import causal_models

    models = causal_models()[::16]
    rows = [line for line in generate.parts_table(models).splitlines() if line[:3] == "| `"]
    assert len(rows) > 8 and set(rows) <= set(page.splitlines())


def test_reference_has_every_public_name_once(generate):
    names = [name for page in generate.api().values() for name in page]
    assert len(set(names)) == len(names)
    assert {f"torchweld.{op}" for op in PUBLIC} <= set(names)
    found = {id(generate.public(name)) for name in names}
    for module in ("", ".nn", ".integrations", ".quantization", ".tuning", ".distributed",
                   ".compat.flash_attn", ".compat.xformers", ".compat.causal_conv1d"):  # fmt: skip
        public = importlib.import_module(f"torchweld{module}")
        missing = [each for each in public.__all__ if id(getattr(public, each)) not in found]
        assert missing == (["nn"] if not module else []), module
    for page in generate.PAGES:
        text = generate.api_page(page)
        assert all(f":: {name}\n" in text for name in generate.api()[page])


def test_every_public_name_has_an_example_that_runs(generate, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    text, lacking, marked = "import torch.distributed as dist\n", [], []
    for page, names in generate.api().items():
        begin = generate.IMPORTS + generate.PAGES[page].begin
        for name in names:
            block = example(name, inspect.getdoc(generate.public(name)) or "")
            if block is None:
                lacking.append(name)
            elif block.mark:
                assert block.mark in MARKS
                compile(block.code, name, "exec")
                marked.append(name)
            else:
                code = textwrap.indent(f"{begin}torch.manual_seed(0)\n{block.code}", "    ")
                function = name.replace(".", "_")
                text += f"def {function}():\n{code}\n{function}()\n"
                text += "if dist.is_initialized():\n    dist.destroy_process_group()\n"
    assert lacking == [] and len(marked) <= 1
    run_text("examples.py", text, tmp_path)


def test_table_of_ops_is_what_the_registry_says(generate):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", generate.ops_table(), re.M))
    assert set(rows) == set(PUBLIC)
    three = " | ".join(["CPU, CUDA"] * 3)
    assert rows["softmax"] == f"{three} | CPU | `x`"
    assert rows["int4_linear"].endswith("| `x`")  # the weight is frozen
    assert rows["int4_pack"].startswith("integers only")


def test_table_of_ops_is_that_of_a_cuda_build_without_cuda_too(generate, monkeypatch):
    if not build_facts().get("cuda"):
        pytest.skip("there are no CUDA kernels in this build")
    table = generate.ops_table()
    monkeypatch.setattr(generate, "build_facts", dict)
    rows, note = generate.ops_table().rsplit("\n\n", 1)
    assert rows == table.rsplit("\n\n", 1)[0] and "CPU alone" in note


def test_an_op_that_refuses_a_dtype_is_not_listed_for_it(generate, monkeypatch):
    import samples

    def call(op):
        def refuse(x):
            if x.dtype != torch.float32:
                raise RuntimeError("x must be float32")

        return refuse

    monkeypatch.setattr(samples, "call", call)
    assert generate.served_dtypes("softmax", "cpu") == [torch.float32]


def test_page_of_benchmarks_has_every_result_and_picture(generate):
    page = generate.benchmarks()
    assert page.startswith("# Benchmarks\n")
    for path in generate.RESULTS.glob("*/*.json"):
        assert all(f"| {row['case']} |" in page for row in json.loads(path.read_text())["rows"])
    pictures = [path for path in generate.RESULTS.glob("*/*") if path.suffix in (".svg", ".png")]
    assert len(pictures) > 30
    for path in pictures:
        assert f"](../../{path.relative_to(ROOT).as_posix()})" in page


def test_plan_table_has_a_row_for_each_number_of_gpus(generate):
    rows = re.findall(r"^\| llama-\S+ \| (\d+) \| (.+?) \|", generate.plan_table(), re.M)
    assert [int(gpus) for gpus, _ in rows] == [8, 64, 256, 1024] * 3
    assert {dims for _, dims in rows} > {"does not fit"}


def test_versions_are_those_of_the_build_files(generate):
    table = generate.versions_table()
    assert "| Python | 3.10 or later |" in table
    assert "sm_80, sm_90a, and PTX of sm_80" in table
    assert re.search(r"\| torch \| [\d.]+ or later to build; the suite runs with [\d.]+ \|", table)
