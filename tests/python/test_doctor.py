"""Goal: python -m kvtier doctor says what is here and what would not work, and its probe sees
drift. Method: the command itself; made-up engines in sys.modules and made-up installed versions."""
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from kvtier import _c, _engines, doctor
from kvtier._engines import Engine, Uses


def run(*arguments, **env):
    done = subprocess.run([sys.executable, "-m", "kvtier", *arguments], capture_output=True,
                          text=True, env=dict(os.environ, **env))
    return done.returncode, done.stdout, done.stderr


def test_doctor_names_the_library_and_every_engine():
    code, out, _ = run("doctor")
    assert "kvtier 0." in out and "codec" in out
    assert all(engine.name in out for engine in _engines.ENGINES)
    code_json, text, _ = run("doctor", "--json")
    said = json.loads(text)
    assert said["library"]["ok"] and code == code_json
    assert {engine["engine"] for engine in said["engines"]} == {e.name for e in _engines.ENGINES}


def test_a_missing_library_is_exit_1_and_a_sentence():
    code, out, err = run("doctor", KVTIER_LIBRARY="/nowhere/libkvtier.so")
    assert code == 1 and "/nowhere/libkvtier.so" in out and "pip install" in out and not err


@pytest.mark.parametrize("arguments, code", [((), 2), (("docter",), 2), (("--help",), 0),
                                             (("doctor", "--nonsense"), 2),
                                             (("daemon", "--nonsense"), 2)])
def test_usage(arguments, code):
    assert run(*arguments)[0] == code


TOOL = os.environ.get("KVTIER") or str(_c.library_dir().parent / "bin/kvtier")


def test_the_programs_of_the_wheel_are_run():
    for name, variable in (("daemon", "KVTIERD"), ("tool", "KVTIER")):
        code, out, err = run(name, "--version", **{variable: "/nowhere/it"})
        assert code == 1 and not out and "/nowhere/it: install the wheel" in err
    code, out, _ = run("daemon", "--version")
    assert code == 0 and f"kvtier {_c.VERSION}" in out
    if os.access(TOOL, os.X_OK):  # where jansson was there when the wheel was built
        code, out, _ = run("tool", "--version")
        assert code == 0 and f"kvtier {_c.VERSION}" in out
        assert run("tool", "nonsense")[0] == 2


@pytest.mark.skipif(not os.access(TOOL, os.X_OK), reason=f"no {TOOL}")
def test_commands_of_the_tool_in_the_pages_exist():
    """Every `kvtier COMMAND ... --option` that a page of an engine names."""
    pages = pathlib.Path(__file__).resolve().parents[2] / "docs/engines"
    named = {}
    for page in pages.glob("*.md"):
        for command, rest in re.findall(r"`(?:build/)?kvtier ([a-z]+)\b(?!_)([^`]*)`", page.read_text()):
            named.setdefault(command, set()).update(re.findall(r"--[a-z-]+", rest))
    assert {"stat", "plan"} <= set(named)
    for command, options in named.items():
        code, text, _ = run("tool", command, "--help")
        assert code == 0, command
        assert not [option for option in options if option not in text], command


def test_a_command_that_does_not_exist_is_named():
    assert "'docter'; did you mean 'doctor'?" in run("docter")[2]


def test_a_reader_that_leaves_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-m", "kvtier", "doctor", "--json"], stdout=theirs,
                          stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.fixture
def made_up(monkeypatch):
    """An engine `made_up` of version 1.0 with a class and a function."""
    module = types.ModuleType("made_up")

    class Base:
        def __init__(self):
            self.width = 1

    class Thing(Base):
        def work(self, a, b, *, c=None):
            return a

    module.Thing, module.helper = Thing, lambda x: x
    Thing.__module__ = Base.__module__ = "made_up"
    monkeypatch.setitem(sys.modules, "made_up", module)
    versions = {"made-up": "1.0"}

    def version(name):
        if name not in versions:
            raise _engines.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(_engines.importlib.metadata, "version", version)
    return versions


def engine(*contract, needs=lambda: "", tested=("1.0",)):
    return Engine("made-up", ("made-up-cpu", "made-up"), "kvtier.x", tested, contract, needs)


@pytest.mark.parametrize("used, words", [
    (Uses("made_up", "Thing.work", ("self", "a", "c")), ""),
    (Uses("made_up", "helper", ("x",)), ""),
    (Uses("made_up", "Thing.work", ("self", "b", "a")), "takes (self, a, b, c)"),
    (Uses("made_up", "Thing.work", ("self", "d")), "not (self, d)"),
    (Uses("made_up", "Thing.rest"), "Thing.rest is gone"),
    (Uses("made_up", "Other"), "Other is gone"),
    (Uses("not_here_at_all", "Thing"), "not_here_at_all"),
    (Uses("made_up", "Thing", attributes=("work",)), "")])
def test_the_probe_sees_drift(made_up, used, words):
    found = engine(used).drift()
    assert bool(found) == bool(words) and all(words in sentence for sentence in found)


def test_attributes_are_looked_for_in_the_source():
    assert Uses("kvtier.cache", "Cache", attributes=("notes", "_orphans", "close")).drift() == ""
    gone = Uses("kvtier.cache", "Cache", attributes=("nowhere",)).drift()
    assert "no attribute nowhere" in gone


def test_states_of_an_engine(made_up):
    good, bad = Uses("made_up", "helper"), Uses("made_up", "gone")
    assert doctor.examine(engine(bad), probe=False)["state"] == "works"
    assert doctor.examine(engine(bad), probe=True)["state"] == "broken"
    assert doctor.examine(engine(good), probe=True)["state"] == "works"
    made_up["made-up"] = "2.0"
    assert doctor.examine(engine(good), probe=True)["state"] == "untested"
    missing = doctor.examine(engine(good, needs=lambda: "no torch"), probe=False)
    assert (missing["state"], missing["why"]) == ("broken", "no torch")
    made_up["made-up-cpu"] = "3.0"
    assert doctor.examine(engine(good), probe=False)["version"] == "3.0"
    made_up.clear()
    assert doctor.examine(engine(good), probe=True)["state"] == "absent"
    assert engine(good, needs=lambda: "no torch").drift() == ["no torch"]


def test_an_unknown_engine_names_the_known_ones():
    with pytest.raises(KeyError, match="transformers"):
        _engines.get("tensorrt")
