"""Goal: what README and docs/engines say about the package can be done. Method: examples/*.py that
need no engine are run; Python in the pages is compiled; every name kvtier.x and every --option in
them exists."""
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/engines").glob("*.md")) + [ROOT / "README.md"]


def test_the_example_runs_and_finds_its_blocks_again(tmp_path):
    for found in (0, 2):
        done = subprocess.run([sys.executable, ROOT / "examples/remember.py", tmp_path / "store"],
                              capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (
            0, f"found before: {found} blocks\nloaded bytes are the same\n"), done.stderr
    done = subprocess.run([sys.executable, ROOT / "examples/remember.py"], capture_output=True)
    assert done.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_pages_is_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page):
    source = {path.stem: path.read_text() for path in (ROOT / "python/kvtier").glob("*.py")}
    folders = {path.name for path in (ROOT / "python/kvtier").iterdir() if path.is_dir()}
    for name in set(re.findall(r"`(?:python -m )?kvtier\.(?!pc\b)(\w+)", page.read_text())):
        top = importlib.import_module("kvtier")
        assert hasattr(top, name) or name in source or name in folders, name


def test_options_of_the_server_in_the_pages_exist():
    text = (ROOT / "python/kvtier/llama_server.py").read_text()
    options = set(re.findall(r'"(--[a-z-]+)"', text)) | {"--help", "--probe", "--json"}
    page = (ROOT / "docs/engines/llama-cpp-python.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z-]+", page))
    assert named and named <= options, named - options
