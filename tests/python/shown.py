"""Commands as the pages of docs/engines show them: tests run these, with other places and sizes, so
that what a user copies is what was run."""
import json
import pathlib
import re
import shlex

PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs/engines"


def commands(page):
    """Words of each command in the page's ```sh blocks; "&" at an end is left out."""
    out = []
    for block in re.findall(r"```sh\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.S):
        text = ""
        for line in block.splitlines(keepends=True):
            text += line
            if text.endswith("\\\n"):
                continue
            try:
                words = shlex.split(text.replace("\\\n", " "), comments=True)
            except ValueError:  # in the middle of a quoted text
                continue
            text = ""
            if words:
                out.append([word for word in words if word != "&"])
        assert not text, f"{page}: {text}"
    return out


def command(page, *words):
    """The first one that has all of `words`."""
    return next(c for c in commands(page) if set(words) <= set(c))


def told(argv, option):
    """The value of an option: parsed where it is JSON, else its text."""
    text = argv[argv.index(option) + 1]
    return json.loads(text) if text.startswith("{") else text


def changed(argv, **values):
    """A command with other values of options that it has: l1_size_gb is --l1-size-gb."""
    out = list(argv)
    for name, value in values.items():
        place = out.index("--" + name.replace("_", "-")) + 1
        out[place] = json.dumps(value) if isinstance(value, dict) else str(value)
    return out
